"""Manifests as text: every pod in them with the sidecar, or without it again, and all else byte for byte as it was.

1. A document without a pod is not looked at twice. One with a pod is changed in place (`sidecar.inject.edit`).
2. A pod that has been injected is restored first, as text, and then injected: so twice is once, byte for byte, and a
   newer sidecar replaces an older one.
3. All problems of all documents are told, and then there is no text: half a deployment is worse than none.
4. What a Service sends to the engine's port finds nobody there afterwards, and a Service that is called like vLLM's
   variables keeps vLLM from starting. Neither can be seen in the pod; both are looked for across all documents.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from sidecar.inject import pod as pods
from sidecar.inject import status
from sidecar.inject.container import Object
from sidecar.inject.edit import edited
from sidecar.inject.engines import Engine
from sidecar.inject.names import ENABLED, INJECT, PROXY_PORT
from sidecar.inject.patch import Step
from sidecar.inject.pod import Declined, Defaults, Injected, Problem, Refused, Restored
from sidecar.inject.spelling import respelt, spellings
from sidecar.inject.tree import Broken, chunks, compose
from sidecar.inject.workloads import Workload, dotted, objects, put, strangers, title, workloads

Path = tuple[Step, ...]

_STRANGER: Final = (
    f"left as it is: it has containers, and is of no kind whose pods are known here; give them the label"
    f" {INJECT}: {ENABLED}, for the webhook"
)


class Told(msgspec.Struct, frozen=True):
    """What there is to say of a place in a file. `document` and `line` from 1, 0: unknown; `title`: Deployment/vllm."""

    file: str
    document: int
    title: str
    path: str
    message: str
    line: int = 0

    def __str__(self) -> str:
        where = [self.file]
        if self.line:
            where.append(f"line {self.line}")
        elif self.document:
            where.append(f"document {self.document}" + (f" ({self.title})" if self.title else ""))
        return ": ".join(filter(None, (", ".join(where), self.path, self.message)))


class Outcome(msgspec.Struct, frozen=True):
    """What became of files: their texts, nothing in case of `problems`; `pods`: how many were changed."""

    texts: tuple[str, ...]
    problems: tuple[Told, ...]
    warnings: tuple[Told, ...]
    pods: int


class _Served(msgspec.Struct, frozen=True):
    """An injected pod, for those who look at Services."""

    labels: dict[str, str]
    engine: Engine
    ports: dict[str, int]
    links: bool


def injected(files: Sequence[tuple[str, str]], defaults: Defaults) -> Outcome:
    """Files (name, text) with the sidecar in every pod that has an engine."""
    return _Run(defaults).done(files)


def uninjected(files: Sequence[tuple[str, str]]) -> Outcome:
    """Files as they were before; a pod without our annotation stays as it is."""
    return _Run(None).done(files)


class _Run:
    def __init__(self, defaults: Defaults | None) -> None:
        self._defaults = defaults
        self._problems: list[Told] = []
        self._warnings: list[Told] = []
        self._served: list[_Served] = []
        self._services: list[tuple[str, int, Object]] = []
        self._pods = 0
        self._unfit = False
        self._file = ""
        self._document = 0

    def done(self, files: Sequence[tuple[str, str]]) -> Outcome:
        texts = []
        for self._file, text in files:
            texts.append(self._texts(text))
        if self._unfit and not self._pods and not self._problems:
            # To pass it on as it is would be taken for done.
            self._problems, self._warnings = self._warnings, []
        for file, document, service in self._services:
            self._file, self._document = file, document
            self._look_at_service(service)
        return Outcome(() if self._problems else tuple(texts), tuple(self._problems), tuple(self._warnings), self._pods)

    def _texts(self, text: str) -> str:
        mark = text[: text.startswith("\ufeff")]
        text = text.removeprefix(mark)
        try:
            parts = chunks(text)
        except Broken as exc:
            self._problems.append(Told(self._file, 0, "", "", str(exc), exc.line))
            return ""
        done = []
        line = 0
        for number, part in enumerate(parts, 1):
            self._document = number
            try:
                done.append(self._part(part))
            except Broken as exc:
                self._problems.append(Told(self._file, number, "", "", str(exc), line + exc.line))
            line += part.count("\n")
        return mark + "".join(done)

    def _part(self, text: str) -> str:
        root = compose(text)
        if root is None:
            return text
        for each, _ in objects(root.value):
            if each.get("apiVersion") == "v1" and each.get("kind") == "Service":
                self._services.append((self._file, self._document, each))
        before = self._restored(text)
        if self._defaults is None or before is None:
            return before or ""
        # The tree of what is injected into: restoring may have changed it.
        root = compose(before)
        assert root is not None  # it was there above
        value = root.value
        for named, at in strangers(value):
            self._unfit = True
            self._warnings.append(Told(self._file, self._document, named, dotted(at), _STRANGER))
        changed: list[Workload] = []
        for workload in workloads(value):
            if not isinstance(workload.pod, dict):
                self._tell(self._problems, workload, Problem("", "there is no pod"))
                continue
            outcome = pods.inject(workload.pod, self._defaults)
            match outcome:
                case Refused(problems=problems):
                    for problem in problems:
                        self._tell(self._problems, workload, problem)
                case Declined(why=why, wished=wished):
                    self._unfit = self._unfit or not wished
                    self._tell(self._warnings, workload, Problem(why.path, f"left as it is: {why.message}"))
                case Injected(pod=after, engine=engine, warnings=warnings):
                    self._pods += 1
                    value = put(value, (*workload.at, *workload.template), after)
                    changed.append(workload)
                    self._served.append(_served(workload.pod, engine))
                    for warning in warnings:
                        self._tell(self._warnings, workload, warning)
        if not changed:
            return before
        return _spelt(before, edited(before, value), value, changed)

    def _restored(self, text: str) -> str | None:
        """The text without the sidecar; None where it cannot be had."""
        root = compose(text)
        value = root.value if root is not None else None
        texts: dict[Path, tuple[status.Text, ...]] = {}
        for workload in workloads(value):
            outcome = pods.uninject(workload.pod) if isinstance(workload.pod, dict) else None
            match outcome:
                case Refused(problems=problems):
                    for problem in problems:
                        self._tell(self._problems, workload, problem)
                    return None
                case Restored(pod=before, warnings=warnings):
                    done = status.read(workload.pod)
                    at = (*workload.at, *workload.template)
                    texts[at] = done.texts if done is not None else ()
                    value = put(value, at, before)
                    self._pods += self._defaults is None
                    for warning in warnings:
                        self._tell(self._warnings, workload, warning)
        if not texts:
            return text
        return respelt(edited(text, value), texts)

    def _look_at_service(self, service: Object) -> None:
        spec = service.get("spec")
        selector = spec.get("selector") if isinstance(spec, dict) else None
        named = title(service)
        for served in self._served:
            if served.links and served.engine.kind == "vllm" and named.upper().replace("-", "_") == "SERVICE/VLLM":
                words = (
                    "Kubernetes makes VLLM_PORT of its name, and vLLM does not start with it: set enableServiceLinks:"
                    " false in the pod's spec"
                )
                self._warnings.append(Told(self._file, self._document, named, "metadata.name", words))
            if not isinstance(selector, dict) or not selector or not selector.items() <= served.labels.items():
                continue
            listed = spec.get("ports") if isinstance(spec, dict) else None
            for index, port in enumerate(listed if isinstance(listed, list) else ()):
                target = port.get("targetPort", port.get("port")) if isinstance(port, dict) else None
                number = served.ports.get(target) if isinstance(target, str) else target
                if number in served.engine.closed:
                    words = f"nobody answers at {target} any more: targetPort: {PROXY_PORT} is the sidecar's"
                    where = f"spec.ports[{index}].targetPort"
                    self._warnings.append(Told(self._file, self._document, named, where, words))

    def _tell(self, told: list[Told], workload: Workload, problem: Problem) -> None:
        path = ".".join(filter(None, (dotted((*workload.at, *workload.template)), problem.path)))
        told.append(Told(self._file, self._document, workload.title, path, problem.message))


def _spelt(before: str, after: str, value: Any, changed: Sequence[Workload]) -> str:
    """The injected text, with what restoring it could not know in its annotations."""
    plain = compose(before)
    assert plain is not None  # it has workloads
    back = edited(after, plain.value)
    for whole in (False, True):
        if back == before:
            break
        places = [(*each.at, *each.template) for each in changed]
        texts = spellings(before, back, places, whole=whole)
        for at, written in texts.items():
            value = put(value, at, status.with_texts(_at(value, at), written))
        after = edited(after, value)
        back = respelt(edited(after, plain.value), texts)
    return after


def _at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def _served(pod: Object, engine: Engine) -> _Served:
    # Its shape has been looked at.
    spec, labels = pod["spec"], (pod.get("metadata") or {}).get("labels") or {}
    ports = spec["containers"][engine.container].get("ports") or []
    named = {each["name"]: each["containerPort"] for each in ports if each.get("name")}
    return _Served(labels, engine, named, spec.get("enableServiceLinks") is not False)
