"""Custom objects through their CRDs, as an API server reads them: schema, unknown fields, defaults, CEL.

1. Unknown fields are refused at every object whose schema lists its fields, as `kubectl apply --validate=strict` does;
   `x-kubernetes-preserve-unknown-fields` is heeded. Fields are listed by a schema's structure alone: what stands under
   oneOf, anyOf, allOf and not only tests values.
2. CEL (`x-kubernetes-validations`) sees the object after defaults. `oldSelf` is there where an old object is given;
   rules that speak of it are left out where none is, as they are at creation.
3. Functions of Kubernetes' own that CEL's core lacks and that Istio's rules or ours use are in `FUNCTIONS`. A rule that
   needs another one fails with an error: it never passes for want of a function.
"""

import copy
import functools
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cel
from cel import stdlib
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

from tests.deploy.objects import ROOT, Object, called, read

NO_ISTIO = (
    "Istio's CRDs are not there: take manifests/charts/base/files/crd-all.gen.yaml of https://github.com/istio/istio,"
    " and name it by ISTIO_CRDS=FILE or put it to ../shared/istio/ beside this repository"
)


def istio_path() -> Path:
    """Istio's CRDs: `ISTIO_CRDS`, else beside the repository. It fails where there is neither: nothing is skipped."""
    told = os.environ.get("ISTIO_CRDS")
    path = Path(told) if told else ROOT.parent / "shared" / "istio" / "crd-all.gen.yaml"
    assert path.is_file(), NO_ISTIO
    return path


class Crds:
    """CRDs by group, version and kind."""

    def __init__(self, definitions: Iterable[Object]) -> None:
        self._schemas: dict[tuple[str, str], Object] = {}
        self._validators: dict[tuple[str, str], Draft202012Validator] = {}
        for each in definitions:
            spec = each["spec"]
            for version in spec["versions"]:
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                self._schemas[key] = _whole(version["schema"]["openAPIV3Schema"])

    def known(self, each: Object) -> bool:
        """Whether there is a CRD for it."""
        return (str(each.get("apiVersion")), str(each.get("kind"))) in self._schemas

    def faults(self, each: Object, old: Object | None = None) -> list[str]:
        """What an API server would not take of an object, or of its change from `old`; CEL only if the schema holds."""
        key = (str(each.get("apiVersion")), str(each.get("kind")))
        if key not in self._schemas:
            return [f"{called(each)}: there is no CRD for {key[1]} of {key[0]}"]
        if key not in self._validators:
            self._validators[key] = Draft202012Validator(_strict(self._schemas[key]))
        full = self.defaulted(each)
        errors = sorted(self._validators[key].iter_errors(full), key=lambda error: error.json_path)
        if errors:
            return [f"{called(each)}: {error.json_path}: {error.message[:300]}" for error in errors]
        before = None if old is None else self.defaulted(old)
        return [f"{called(each)}: {words}" for words in cel_faults(self._schemas[key], full, before)]

    def defaulted(self, each: Object) -> Object:
        """A copy with the schema's defaults."""
        full = copy.deepcopy(each)
        _default(self._schemas[(str(each["apiVersion"]), str(each["kind"]))], full)
        return full


@functools.cache
def istio() -> Crds:
    """Istio's."""
    return Crds(read(istio_path().read_text(encoding="utf-8")))


def of(*paths: Path) -> Crds:
    """Those in some files."""
    return Crds(each for path in paths for each in read(path.read_text(encoding="utf-8")))


def _whole(schema: Object) -> Object:
    """With the fields that every object has, which CRDs leave out."""
    return {
        **schema,
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            **{name: each for name, each in schema.get("properties", {}).items() if name not in ("metadata",)},
        },
    }


def _strict(schema: Object) -> Object:
    """A JSON Schema of a structural one: unknown fields refused, nullable and int-or-string in JSON Schema's words."""
    made = {key: value for key, value in schema.items() if not key.startswith("x-kubernetes") and key != "nullable"}
    if "properties" in schema:
        made["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        made["additionalProperties"] = _strict(extra)
    elif schema.get("type") == "object" and extra is None and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if isinstance(schema.get("items"), dict):
        made["items"] = _strict(schema["items"])
    if schema.get("nullable") and isinstance(made.get("type"), str):
        made["type"] = [made["type"], "null"]
        if "enum" in made:
            made["enum"] = [*made["enum"], None]
    if schema.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    return made


def _default(schema: Object, value: Any) -> None:
    if isinstance(value, dict):
        for name, each in schema.get("properties", {}).items():
            if name not in value and "default" in each:
                value[name] = copy.deepcopy(each["default"])
            if name in value:
                _default(each, value[name])
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict):
            for name, held in value.items():
                if name not in schema.get("properties", {}):
                    _default(extra, held)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for held in value:
            _default(schema["items"], held)


def cel_faults(schema: Object, value: Any, old: Any = None, path: str = "$") -> Iterator[str]:
    """What a schema's CEL says of a value that fits the schema, as `path: message`."""
    if value is None:
        return
    for rule in schema.get("x-kubernetes-validations", []):
        yield from _rule_faults(rule, value, old, path)
    if isinstance(value, dict):
        before = old if isinstance(old, dict) else {}
        for name, held in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(inner, dict):
                yield from cel_faults(inner, held, before.get(name), f"{path}.{name}")
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        for index, held in enumerate(value):
            yield from cel_faults(schema["items"], held, None, f"{path}[{index}]")


def _rule_faults(rule: Object, value: Any, old: Any, path: str) -> Iterator[str]:
    transition = re.search(r"\boldSelf\b", rule["rule"]) is not None
    if transition and old is None:
        return
    known = {"self": value, **({"oldSelf": old} if transition else {})}
    context = cel.Context(known, functions=FUNCTIONS)
    stdlib.add_stdlib_to_context(context)
    if _program(rule["rule"]).execute(context) is True:
        return
    message = rule.get("message")
    if "messageExpression" in rule:
        message = _program(rule["messageExpression"]).execute(context) or message
    yield f"{path}{rule.get('fieldPath', '')}: {message or 'failed rule: ' + rule['rule']}"


@functools.cache
def _program(source: str) -> cel.Program:
    return cel.compile(source)


def unknown_functions(rules: Iterable[str]) -> set[str]:
    """Functions of some rules that are neither CEL's nor in `FUNCTIONS`."""
    context = cel.Context({}, functions=FUNCTIONS)
    stdlib.add_stdlib_to_context(context)
    known = {*context.functions, *_CORE}
    return {name for rule in rules for name in _program(rule).functions() if name.isidentifier() and name not in known}


_CORE = {
    *("all", "exists", "exists_one", "map", "filter", "has", "size", "contains", "startsWith", "endsWith", "matches"),
    *("int", "uint", "double", "string", "bytes", "bool", "timestamp", "duration", "type", "dyn"),
}


def _url(text: str) -> Object:
    """As Kubernetes' `url()`: an absolute URI or an absolute path."""
    parts = urlsplit(text)
    if not (parts.scheme or text.startswith("/")):
        raise ValueError(f'"{text}" is no URL')
    return {"scheme": parts.scheme, "host": parts.netloc, "path": parts.path}


def _is_url(text: str) -> bool:
    try:
        return bool(_url(text))
    except ValueError:
        return False


FUNCTIONS = {
    "url": _url,
    "isURL": _is_url,
    "getScheme": lambda url: url["scheme"],
    "getHost": lambda url: url["host"],
    "find": lambda text, pattern: ((m := re.search(pattern, text)) and m.group()) or "",
}
