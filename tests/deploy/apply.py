"""What `kubectl apply` says of a custom resource of ours: unknown fields, defaults, schema, lists' keys, CEL, in words.

The words around ours are those of API servers from 1.31 on (apiextensions-apiserver's validation over kube-openapi's
errors). Patterns are matched by the regular expressions of the CEL library, which are RE2's kind: one with a look-ahead
would be refused with the definition. As there, CEL is left out where the schema alone finds a fault of type or length.
"""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import cel
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped]

from tests.deploy import crds
from tests.deploy.objects import Object

_BLOCKING = ("type", "required", "maxLength", "maxItems")
_PLACE = re.compile(r"\$\.?([^:]*): (.*)", re.DOTALL)
_MATCHES = cel.compile("text.matches(pattern)")


class Definition:
    """One custom resource definition."""

    def __init__(self, crd: Object) -> None:
        (version,) = crd["spec"]["versions"]
        self.schema: Object = version["schema"]["openAPIV3Schema"]
        self.kind: str = crd["spec"]["names"]["kind"]
        self.api_version = f"{crd['spec']['group']}/{version['name']}"
        self._crds = crds.Crds([crd])
        self._validator = Draft202012Validator(_without_patterns(self.schema))

    def defaulted(self, each: Object) -> Object:
        """A copy as the API server stores it."""
        return self._crds.defaulted(each)

    def answer(self, each: Object, old: Object | None = None) -> list[str]:
        """Why it is refused, a line for each reason; empty: it is taken. `old`: what is there already."""
        unknown = [f'strict decoding error: unknown field "{path}"' for path in _unknown(self.schema, each, "")]
        if unknown:
            return unknown
        full = self.defaulted(each)
        errors = list(self._validator.iter_errors(full))
        said = [line for error in errors for line in _words(error)]
        said += [*_patterns(self.schema, full, ""), *_doubles(self.schema, full, "")]
        if not any(error.validator in _BLOCKING for error in errors):
            before = None if old is None else self.defaulted(old)
            said += [self._cel_words(line) for line in crds.cel_faults(self.schema, full, before)]
        return sorted(said)

    def _cel_words(self, line: str) -> str:
        place = _PLACE.fullmatch(line)
        assert place is not None, line
        node = _node(self.schema, place[1])
        rules = (node or {}).get("x-kubernetes-validations", [])
        kind = node["type"] if node is not None and any(each.get("message") == place[2] for each in rules) else "object"
        return f'{place[1]}: Invalid value: "{kind}": {place[2]}'


def _unknown(schema: Object, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and path != "metadata":
        for name, held in value.items():
            inner = schema.get("properties", {}).get(name)
            if inner is None:
                yield _join(path, name)
            else:
                yield from _unknown(inner, held, _join(path, name))
    elif isinstance(value, list):
        for index, held in enumerate(value):
            yield from _unknown(schema.get("items", {}), held, f"{path}[{index}]")


def _without_patterns(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {
            key: _without_patterns(each) for key, each in schema.items() if key != "pattern" or isinstance(each, dict)
        }
    return schema


def _patterns(schema: Object, value: Any, path: str) -> Iterator[str]:
    pattern = schema.get("pattern")
    if isinstance(value, str) and pattern is not None and not _MATCHES.execute({"text": value, "pattern": pattern}):
        yield f"{path}: Invalid value: {json.dumps(value)}: {path} in body should match '{pattern}'"
    for inner, held, place in _inside(schema, value, path):
        yield from _patterns(inner, held, place)


def _doubles(schema: Object, value: Any, path: str) -> Iterator[str]:
    """Items of a list that is a set or a map by keys."""
    kind = schema.get("x-kubernetes-list-type")
    if isinstance(value, list) and kind in ("set", "map"):
        seen: list[Any] = []
        for index, item in enumerate(value):
            key = {name: item.get(name) for name in schema["x-kubernetes-list-map-keys"]} if kind == "map" else item
            if key in seen:
                shown = (
                    f"map[string]interface {{}}{json.dumps(key, separators=(',', ':'))}"
                    if kind == "map"
                    else json.dumps(key)
                )
                yield f"{path}[{index}]: Duplicate value: {shown}"
            seen.append(key)
    for inner, held, place in _inside(schema, value, path):
        yield from _doubles(inner, held, place)


def _inside(schema: Object, value: Any, path: str) -> Iterator[tuple[Object, Any, str]]:
    if isinstance(value, dict):
        for name, held in value.items():
            if name in schema.get("properties", {}):
                yield schema["properties"][name], held, _join(path, name)
    elif isinstance(value, list) and "items" in schema:
        for index, held in enumerate(value):
            yield schema["items"], held, f"{path}[{index}]"


def _words(error: ValidationError) -> list[str]:
    path = re.sub(r"^\$\.?", "", error.json_path)
    value, rule = error.instance, error.validator_value
    body = f"{path} in body"
    match error.validator:
        case "required":
            return [f"{_join(path, name)}: Required value" for name in rule if name not in value]
        case "type":
            kind = _kind(value)
            return [f'{path}: Invalid value: "{kind}": {body} must be of type {rule}: "{kind}"']
        case "enum":
            return [
                f"{path}: Unsupported value: {json.dumps(value)}: supported values: {', '.join(map(json.dumps, rule))}"
            ]
        case "minimum":
            return [f"{path}: Invalid value: {value}: {body} should be greater than or equal to {rule}"]
        case "maximum":
            return [f"{path}: Invalid value: {value}: {body} should be less than or equal to {rule}"]
        case "maxLength":
            return [f"{path}: Too long: may not be more than {rule} bytes"]
        case "minLength":
            return [f"{path}: Invalid value: {json.dumps(value)}: {body} should be at least {rule} chars long"]
        case "maxItems":
            return [f"{path}: Too many: {len(value)}: must have at most {rule} items"]
        case "minItems":
            return [f"{path}: Invalid value: {len(value)}: {body} should have at least {rule} items"]
        case _:
            raise AssertionError(f"no words for {error.validator}")


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _node(schema: Object, path: str) -> Object | None:
    """The schema at a path such as `spec.versions[0].front`."""
    node: Object | None = schema
    for name, index in re.findall(r"([^.\[\]]+)|(\[\d+\])", path):
        node = (node or {}).get("items") if index else (node or {}).get("properties", {}).get(name)
    return copy.copy(node)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
