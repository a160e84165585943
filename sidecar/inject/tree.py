"""A YAML or JSON text as a tree that knows where in the text each part stands, so that parts can be changed in place.

Not the policies' composer, which knows lines and refuses what is no policy: here any manifest must do, and places must
be exact to the character. PyYAML's events have them; what its block collections lack, their end, is that of what stands
last in them. Not a library that writes YAML anew either: none keeps every space, fold and quote, and what we do not
change is to stay byte for byte.

1. Plain scalars mean what kubectl makes of them: YAML 1.1's words for true and false, octal numbers with a 0.
2. A key that is there twice is an error: readers differ in which one counts.
3. Aliases stand for what they name; `<<` is merged, own keys win. What they expand to is bounded.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Final, Literal

import yaml

MAX_NODES: Final = 2_000_000
"""With aliases expanded: far more than an API server takes in one object."""
MAX_DEPTH: Final = 100

_WORDS: Final[dict[str, bool | None]] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **{f(word): True for word in ("true", "yes", "on", "y") for f in (str.lower, str.title, str.upper)},
    **{f(word): False for word in ("false", "no", "off", "n") for f in (str.lower, str.title, str.upper)},
}
_INTEGER: Final = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+|0o?[0-7]+")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_BEFORE_DASH: Final = re.compile(r"(?:#[^\n]*|[&!]\S*|\s)*")
_TAG: Final = "tag:yaml.org,2002:"
_ESCAPED_PAIR: Final = re.compile(r"\\u[dD][89abAB]")

# libyaml's parser is twenty times as fast, and knows no pairs of surrogates, which JSON writes; the other one does.
_FAST: Any = getattr(yaml, "CLoader", yaml.Loader)

Kind = Literal["map", "list", "scalar", "alias"]


class Broken(Exception):
    """What is no YAML, or not such as can be read in one way only. `line`: from 1."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class Node:
    """A part of a text. `start` to `end`: what it takes up, without spaces and comments that follow. `column`: of its
    start, from 0; of a block, that of its keys or dashes. `flow`: written in brackets or on its own; else it is a block
    collection, or a block scalar. `named`: what an alias stands for. `merged`: it has a `<<`."""

    __slots__ = (
        "column",
        "end",
        "entries",
        "flow",
        "items",
        "kind",
        "line",
        "merged",
        "named",
        "size",
        "start",
        "value",
    )

    def __init__(self, kind: Kind, start: int, end: int, column: int, line: int, *, flow: bool) -> None:
        self.kind: Kind = kind
        self.start = start
        self.end = end
        self.column = column
        self.line = line
        self.flow = flow
        self.value: Any = None
        self.entries: list[tuple[Node, Node]] = []
        self.items: list[Node] = []
        self.merged = False
        self.named: Node | None = None
        self.size = 1


def chunks(text: str) -> list[str]:
    """The documents of a stream, each with what stands before the next one; together they are the text."""
    starts: list[int] = []
    for event in _events(text):
        if isinstance(event, yaml.DocumentStartEvent):
            starts.append(_place(event)[0])
    if not starts:
        return [text]
    return [text[low:high] for low, high in pairwise((0, *starts[1:], len(text)))]


def compose(text: str) -> Node | None:
    """The tree of the one document in `text`; None where there is none. Broken for what cannot be read."""
    return _Composer(text).document()


def _events(text: str) -> Iterator[Any]:
    try:
        yield from yaml.parse(text, Loader=yaml.Loader if _ESCAPED_PAIR.search(text) else _FAST)
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        words = ": ".join(part for part in (exc.context, exc.problem) if part)
        raise Broken(f"not YAML: {words}", mark.line + 1 if mark else 1) from exc
    except yaml.YAMLError as exc:
        raise Broken(f"not YAML: {exc}".partition("\n")[0], 1) from exc


def _place(event: Any) -> tuple[int, int, int, int]:
    """Start, end, column and line of what an event is about."""
    mark = event.start_mark
    return mark.index, event.end_mark.index, mark.column, mark.line + 1


class _Composer:
    def __init__(self, text: str) -> None:
        self._text = text
        self._events = _events(text)
        self._anchors: dict[str, Node] = {}
        self._nodes = 0

    def document(self) -> Node | None:
        for event in self._events:
            if isinstance(event, yaml.NodeEvent):
                return self._node(event, 0)
        return None

    def _node(self, event: Any, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise Broken(f"nested more than {MAX_DEPTH} deep", _place(event)[3])
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        if isinstance(event, yaml.ScalarEvent):
            node = Node("scalar", *_place(event), flow=True)
            node.value = _scalar(event)
            if event.style in ("|", ">"):
                node.flow = False
                node.end = _end_of_block(self._text, node.start, node.end)
        elif isinstance(event, yaml.MappingStartEvent):
            node = self._collection("map", event)
            self._map(node, depth)
        else:
            node = self._collection("list", event)
            self._list(node, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        self._count(1, node.line)
        return node

    def _collection(self, kind: Kind, event: Any) -> Node:
        return Node(kind, *_place(event), flow=bool(event.flow_style))

    def _alias(self, event: Any) -> Node:
        node = Node("alias", *_place(event), flow=True)
        named = self._anchors.get(event.anchor)
        if named is None:
            raise Broken(f"alias *{event.anchor} names no anchor before it", node.line)
        node.named, node.value, node.size = named, named.value, named.size
        self._count(node.size, node.line)
        return node

    def _count(self, size: int, line: int) -> None:
        self._nodes += size
        if self._nodes > MAX_NODES:
            raise Broken("aliases expand to more than any object has", line)

    def _map(self, node: Node, depth: int) -> None:
        own: dict[str, Any] = {}
        merges: list[Node] = []
        for event in self._events:
            if isinstance(event, yaml.MappingEndEvent):
                if node.flow:
                    node.end = _place(event)[1]
                break
            key = self._node(event, depth + 1)
            value = self._node(next(self._events), depth + 1)
            node.entries.append((key, value))
            node.size += 1 + value.size
            node.end = max(node.end, value.end)
            if key.kind == "scalar" and key.value == "<<" and self._text[key.start] == "<":
                merges.append(value)
                continue
            name = key.value if isinstance(key.value, str) else self._text[key.start : key.end]
            if key.kind != "scalar" or name in own:
                words = f'key "{name}" is there twice' if key.kind == "scalar" else "a key is no scalar"
                raise Broken(words, key.line)
            own[name] = value.value
        if node.entries and not node.flow:
            node.column = node.entries[0][0].column  # and not that of an anchor
        node.merged = bool(merges)
        node.value = {**_merged(merges), **own} if merges else own

    def _list(self, node: Node, depth: int) -> None:
        for event in self._events:
            if isinstance(event, yaml.SequenceEndEvent):
                if node.flow:
                    node.end = _place(event)[1]
                break
            item = self._node(event, depth + 1)
            node.items.append(item)
            node.size += item.size
            node.end = max(node.end, item.end)
        if not node.flow:
            dash = _BEFORE_DASH.match(self._text, node.start)
            at = dash.end() if dash is not None else node.start
            node.column = at - self._text.rfind("\n", 0, at) - 1
        node.value = [item.value for item in node.items]


def _merged(merges: list[Node]) -> dict[str, Any]:
    """What `<<` brings: of several the first counts."""
    found: dict[str, Any] = {}
    for each in merges:
        for part in each.value if isinstance(each.value, list) else [each.value]:
            if not isinstance(part, dict):
                raise Broken("<< merges mappings only", each.line)
            found = {**part, **found}
    return found


def _scalar(event: Any) -> Any:
    text: str = event.value
    if event.tag is not None and event.tag.startswith(_TAG):
        return text if event.tag == f"{_TAG}str" else _plain(text)
    if event.tag == "!" or not event.implicit[0]:
        # Quoted. JSON writes what is beyond 16 bits as a pair.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if _PAIR.search(text) else text
    return _plain(text)


_PAIR: Final = re.compile("[\ud800-\udfff]")


def _plain(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        digits = text.replace("_", "").lower()
        if digits.startswith("0x"):
            return int(digits, 16)
        return int(digits.replace("o", ""), 8) if len(digits) > 1 and digits[0] == "0" else int(digits)
    return float(text) if _FLOAT.fullmatch(text) else text


def _end_of_block(text: str, start: int, end: int) -> int:
    """Where a block scalar's last line of content ends; blank lines are content where the header says so (+)."""
    header = re.match(r"(?:[!&]\S*\s+)*[|>][-+0-9]*", text[start:end])
    body = text[start:end]
    if header is not None and "+" in header[0]:
        return end - 1 if body.endswith("\n") else end
    return start + len(body.rstrip())
