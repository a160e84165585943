"""Bytes of a YAML or JSON file to trees that know their lines.

Our own composer over PyYAML's events, and not `safe_load`: that lets a duplicate key win silently, forgets lines, and
reads scalars by YAML 1.1, where `1:30` is 90, `off` is false, `010` is 8 and `1e-3` is text. Here:

1. Plain scalars mean what YAML 1.2 (core schema) says, so that a YAML file and its JSON twin are the same policy.
2. Duplicate keys, keys that are not scalars, and tags other than the core ones are errors.
3. Anchors, aliases and merge keys (`<<`) work; what they expand to is bounded, so that a file of one kilobyte cannot
   cost a gigabyte. An alias inside its own anchor is unknown there, so trees have no cycles.
"""

import re
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec
import yaml

from sidecar.policy.errors import Faults, PolicyError, quote

# 100,000 endpoints are about 12 MB; more is not a policy.
MAX_FILE_BYTES: Final = 16 << 20
# Deeper than any policy by far, and shallow enough for readers that recurse.
MAX_DEPTH: Final = 64
# What aliases may add to a file, in nodes: some hundred services that share their settings.
MAX_ALIASED_NODES: Final = 100_000

ScalarKind = Literal["null", "bool", "number", "text"]

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_WORDS: Final[dict[str, ScalarKind]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), "null"),
    **dict.fromkeys(("true", "True", "TRUE", "false", "False", "FALSE"), "bool"),
}
_STRING_TAGS = ("!", "tag:yaml.org,2002:str")
_PLAIN_TAGS = (None, *(f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq")))

_SURROGATE_PAIR = re.compile(r"(?<!\\)((?:\\\\)*)\\u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})")
_SURROGATE = re.compile("[\ud800-\udfff]")

# libyaml's parser is ten times as fast; the pure one is for wheels without it.
_LOADER: Any = getattr(yaml, "CLoader", yaml.Loader)


class Scalar(msgspec.Struct, frozen=True, gc=False):
    """A leaf; `plain` is false for what was quoted, which is always text."""

    value: str
    plain: bool
    line: int

    @property
    def kind(self) -> ScalarKind:
        """What YAML 1.2's core schema takes it for."""
        if not self.plain:
            return "text"
        if word := _WORDS.get(self.value):
            return word
        return "number" if _INTEGER.fullmatch(self.value) or _FLOAT.fullmatch(self.value) else "text"


class Sequence(msgspec.Struct, frozen=True):
    """A list."""

    items: "list[Node]"
    line: int


class Mapping(msgspec.Struct, frozen=True):
    """A mapping, keys in order; the line of a key is that of its scalar."""

    entries: "dict[str, tuple[Scalar, Node]]"
    line: int


Node = Scalar | Sequence | Mapping


def documents(file: str, data: bytes, faults: Faults) -> list[Node]:
    """The documents in `data`, without empty ones; what is wrong is added to `faults`.

    After a fault of syntax the documents before it are still returned, so that their own faults can be told too.
    """
    text = _text(file, data, faults)
    if text is None:
        return []
    composer = _Composer(file, faults)
    try:
        composer.run(yaml.parse(text, Loader=_LOADER))
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        message = ": ".join(part for part in (exc.context, exc.problem) if part)
        faults.add(PolicyError(file, mark.line + 1 if mark else 0, "$", f"not YAML: {message}"))
    except yaml.YAMLError as exc:
        faults.add(PolicyError(file, 0, "$", f"not YAML: {exc}".partition("\n")[0]))
    except _TooMuch as exc:
        faults.add(PolicyError(file, exc.line, "$", str(exc)))
    return composer.documents


def _text(file: str, data: bytes, faults: Faults) -> str | None:
    if len(data) > MAX_FILE_BYTES:
        faults.add(PolicyError(file, 0, "$", f"{len(data)} bytes; a policy file has at most {MAX_FILE_BYTES}"))
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        faults.add(PolicyError(file, line, "$", f"not UTF-8: byte 0x{data[exc.start]:02x}"))
        return None
    if file.endswith(".json"):
        # JSON that YAML's scanners refuse: tabs between tokens (inside strings JSON has none), surrogate pairs.
        return _SURROGATE_PAIR.sub(_join_pair, text.replace("\t", " "))
    return text


def _join_pair(pair: re.Match[str]) -> str:
    high, low = int(pair[2], 16), int(pair[3], 16)
    return pair[1] + chr(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00))


class _TooMuch(Exception):
    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class _Frame:
    """A collection that is not closed yet."""

    __slots__ = ("anchor", "entries", "is_map", "items", "key", "line", "merges", "size")

    def __init__(self, line: int, anchor: str | None, *, is_map: bool) -> None:
        self.line = line
        self.anchor = anchor
        self.is_map = is_map
        self.items: list[Node] = []
        self.entries: dict[str, tuple[Scalar, Node]] = {}
        self.merges: list[Node] = []
        self.key: Scalar | None = None
        self.size = 1

    def step(self) -> str:
        """Where in this collection the next value goes, as a part of a path."""
        if not self.is_map:
            return f"[{len(self.items)}]"
        return f".{quote(self.key.value)}" if self.key is not None else ""


class _Composer:
    """Events to trees, on a stack of its own: depth costs no recursion."""

    __slots__ = ("_aliased", "_anchors", "_faults", "_file", "_frames", "documents")

    def __init__(self, file: str, faults: Faults) -> None:
        self._file = file
        self._faults = faults
        self._frames: list[_Frame] = []
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._aliased = 0
        self.documents: list[Node] = []

    def run(self, events: Iterator[Any]) -> None:
        for event in events:
            match event:
                case yaml.ScalarEvent():
                    self._put(self._scalar(event), 1, event.anchor)
                case yaml.AliasEvent():
                    self._alias(event)
                case yaml.MappingStartEvent() | yaml.SequenceStartEvent():
                    self._open(event)
                case yaml.MappingEndEvent() | yaml.SequenceEndEvent():
                    self._close()
                case yaml.DocumentStartEvent():
                    self._anchors.clear()
                case _:
                    pass

    def _scalar(self, event: Any) -> Scalar:
        line = event.start_mark.line + 1
        plain = event.implicit[0]
        if event.tag is not None:
            plain = False
            if event.tag not in _STRING_TAGS:
                self._error(line, f'the tag "{event.tag}" is not supported')
        if not event.value.isascii() and _SURROGATE.search(event.value):
            # Only the pure parser lets one pass; what holds it cannot be written out again.
            self._error(line, "half of a surrogate pair is no character")
        return Scalar(event.value, plain, line)

    def _open(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if len(self._frames) >= MAX_DEPTH:
            raise _TooMuch(line, f"nested deeper than {MAX_DEPTH} levels")
        if event.tag not in _PLAIN_TAGS:
            self._error(line, f'the tag "{event.tag}" is not supported')
        self._frames.append(_Frame(line, event.anchor, is_map=isinstance(event, yaml.MappingStartEvent)))

    def _close(self) -> None:
        frame = self._frames.pop()
        if frame.is_map:
            self._merge(frame)
            self._put(Mapping(frame.entries, frame.line), frame.size, frame.anchor)
        else:
            self._put(Sequence(frame.items, frame.line), frame.size, frame.anchor)

    def _alias(self, event: Any) -> None:
        line = event.start_mark.line + 1
        known = self._anchors.get(event.anchor)
        if known is None:
            self._error(line, f"the alias *{event.anchor} has no anchor before it")
            self._put(Scalar("", True, line), 1, None)
            return
        node, size = known
        self._aliased += size
        if self._aliased > MAX_ALIASED_NODES:
            raise _TooMuch(line, f"aliases expand to more than {MAX_ALIASED_NODES} nodes")
        self._put(node, size, None)

    def _put(self, node: Node, size: int, anchor: str | None) -> None:
        if anchor is not None:
            self._anchors[anchor] = (node, size)
        if not self._frames:
            if not (isinstance(node, Scalar) and node.kind == "null"):
                self.documents.append(node)
            return
        frame = self._frames[-1]
        frame.size += size
        if not frame.is_map:
            frame.items.append(node)
        elif frame.key is None:
            if not isinstance(node, Scalar):
                self._error(node.line, "a key must be text")
                node = Scalar("", False, node.line)
            frame.key = node
        else:
            self._enter(frame, frame.key, node)
            frame.key = None

    def _enter(self, frame: _Frame, key: Scalar, node: Node) -> None:
        if key.value == "<<" and key.plain:
            frame.merges.append(node)
            return
        first = frame.entries.get(key.value)
        if first is not None:
            self._error(key.line, f'the key "{key.value}" is here twice; first in line {first[0].line}')
            return
        frame.entries[key.value] = (key, node)

    def _merge(self, frame: _Frame) -> None:
        """Keys that are written win over merged ones, and earlier merged ones over later."""
        for node in frame.merges:
            for source in node.items if isinstance(node, Sequence) else (node,):
                if not isinstance(source, Mapping):
                    self._error(source.line, "a merge key (<<) takes a mapping or a list of mappings")
                    continue
                for name, entry in source.entries.items():
                    frame.entries.setdefault(name, entry)

    def _error(self, line: int, message: str) -> None:
        path = "$" + "".join(frame.step() for frame in self._frames)
        self._faults.add(PolicyError(self._file, line, path, message))
