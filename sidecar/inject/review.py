"""AdmissionReview v1 in, AdmissionReview v1 out: what an API server is told about a pod that somebody makes.

1. Only pods that are created are judged, and only those that ask: by their label, or, with `unlabelled`, by their
   namespace's, which the API server has looked at before it asks us. `disabled` always means no.
2. A pod that cannot be injected passes as it is, with a warning that its maker sees: a model that serves without us is
   better than none. With `strict` it is refused, in the same words.
3. The answer is the difference, as a JSON patch: an API server takes nothing else.
4. A pod of half a megabyte is not looked into: comparing it would hold up everybody else's for seconds, and whoever may
   make pods may send them in a row. People's pods have some kilobytes.
"""

from base64 import b64encode
from typing import Any, Final, Literal

import msgspec

from sidecar.inject.container import Object
from sidecar.inject.names import INJECT
from sidecar.inject.patch import json_patch
from sidecar.inject.pod import Declined, Defaults, Injected, Problem, Refused, inject

VERSION: Final = "admission.k8s.io/v1"
KIND: Final = "AdmissionReview"

WARNING_CHARACTERS: Final = 250
MOST_WARNINGS: Final = 10
"""An API server cuts off warnings of more than 256 characters, and all of them after 4096."""

REFUSAL_CHARACTERS: Final = 2000
"""Enough for some problems; what is refused may have a name for each of thousands of containers."""

MOST_BYTES: Final = 512 << 10

Result = Literal["injected", "unchanged", "declined", "refused"]


class Rules(msgspec.Struct, frozen=True):
    """How pods are judged."""

    defaults: Defaults = Defaults()
    unlabelled: bool = False
    strict: bool = False


class Group(msgspec.Struct, frozen=True):
    """What kind of thing it is about."""

    kind: str = ""
    group: str = ""


class Request(msgspec.Struct, frozen=True):
    """What is asked. `object` null: it is being deleted."""

    uid: str
    kind: Group = Group()
    operation: str = ""
    namespace: str = ""
    object: Any = None


class Review(msgspec.Struct, frozen=True):
    """The question."""

    apiVersion: str
    kind: str
    request: Request


class Verdict(msgspec.Struct, frozen=True):
    """The answer, and what to write down of it."""

    answer: Object
    result: Result
    pod: str = ""
    words: tuple[str, ...] = ()


def question(body: bytes) -> Review:
    """What a body asks. ValueError for what is no AdmissionReview v1."""
    review = msgspec.json.decode(body, type=Review)
    if (review.apiVersion, review.kind) != (VERSION, KIND):
        raise ValueError(f'"{review.apiVersion[:40]}" "{review.kind[:40]}" is not {VERSION} {KIND}')
    return review


def reviewed(review: Review, rules: Rules, size: int = 0) -> Verdict:
    """The answer. `size`: of the question, in bytes; 0: not known, whoever asks is trusted with it."""
    request = review.request
    pod = request.object
    if request.operation != "CREATE" or request.kind != Group("Pod") or not isinstance(pod, dict):
        return Verdict(_answer(request.uid), "unchanged")
    name = f"{request.namespace}/{_name(pod)}"
    if not rules.unlabelled and not _labelled(pod):
        return Verdict(_answer(request.uid), "unchanged", name)
    if size > MOST_BYTES:
        return failed(request.uid, name, (f"the pod is larger than {MOST_BYTES >> 10} KiB",), rules)
    outcome = inject(pod, rules.defaults)
    match outcome:
        case Injected(pod=after, warnings=warnings):
            told = _told(warnings)
            patch = json_patch(pod, after)
            return Verdict(_answer(request.uid, patch=patch, warnings=told), "injected", name, told)
        case Declined(wished=True):
            return Verdict(_answer(request.uid), "unchanged", name)
        case Declined(why=why):
            told = _told((why,), "left as it is: ")
            return Verdict(_answer(request.uid, warnings=told), "declined", name, told)
        case Refused(problems=problems):
            return failed(request.uid, name, _told(problems), rules)


def failed(uid: str, name: str, told: tuple[str, ...], rules: Rules) -> Verdict:
    """The answer for a pod that cannot be injected."""
    if rules.strict:
        return Verdict(_answer(uid, refused="; ".join(told)[:REFUSAL_CHARACTERS]), "refused", name, told)
    warnings = tuple(f"no sidecar: {each}"[:WARNING_CHARACTERS] for each in told)
    return Verdict(_answer(uid, warnings=warnings), "refused", name, told)


def _answer(
    uid: str, *, patch: list[Object] | None = None, warnings: tuple[str, ...] = (), refused: str = ""
) -> Object:
    response: Object = {"uid": uid, "allowed": not refused}
    if refused:
        response["status"] = {"code": 422, "reason": "Invalid", "message": f"llm-sidecar: {refused}"}
    if patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = b64encode(msgspec.json.encode(patch)).decode()
    if warnings:
        response["warnings"] = [f"llm-sidecar: {each}"[:WARNING_CHARACTERS] for each in warnings]
    return {"apiVersion": VERSION, "kind": KIND, "response": response}


def _told(problems: tuple[Problem, ...], before: str = "") -> tuple[str, ...]:
    return tuple(f"{before}{each}" for each in problems[:MOST_WARNINGS])


def _labelled(pod: Object) -> bool:
    metadata = pod.get("metadata")
    labels = metadata.get("labels") if isinstance(metadata, dict) else None
    return isinstance(labels, dict) and INJECT in labels


def _name(pod: Object) -> str:
    metadata = pod.get("metadata")
    if not isinstance(metadata, dict):
        return ""
    return str(metadata.get("name") or f"{metadata.get('generateName', '')}*")
