"""A document's text, changed so that it says something else, and in no other character.

1. What is to be said is an object; what has to change is found by comparing it with what the text says. After each
   round the text is read anew and compared again, until nothing is left: what was made is what was meant, or an error.
2. An anchor may be changed under its alias. So of what touches one, or what it is named in, one change is made in a
   round: what follows from it needs no change of its own. An alias that must say something else is written out.
3. New lines go right behind the line of what stands before them, and are taken away with the line break before them:
   what was put in and taken out again leaves every character as it was. Comments stay with what follows them.
4. A text in brackets (JSON, too) is changed in brackets, over several lines where it is so already.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from sidecar.inject.patch import Step, align, equal
from sidecar.inject.tree import Broken, Node, compose
from sidecar.inject.write import Style, below, entry, flow, item, json, pretty, scalar, several_lines

MAX_ROUNDS: Final = 500

Path = tuple[Step, ...]


class Change(msgspec.Struct, frozen=True):
    """Characters from `start` to `end` that become `text`."""

    start: int
    end: int
    text: str


def edited(text: str, target: Any) -> str:
    """The text of one document, saying `target`. Broken where that cannot be done."""
    root = compose(text)
    for _ in range(MAX_ROUNDS):
        if root is None:
            break
        if equal(root.value, target):
            return text
        changes = _Changes(text, root).towards(target)
        if not changes:
            break
        text = applied(text, _together(changes, root))
        try:
            root = compose(text)
        except Broken:
            break  # such as an anchor that was written over, and is named elsewhere
    raise Broken("it cannot be changed in place: write out what is named by an anchor", 1)


def applied(text: str, changes: list[Change]) -> str:
    """The text with all of them, which are apart from each other. What is put in at one place keeps its order, and
    stands before what is taken away from there on."""
    order = sorted(enumerate(changes), key=lambda each: (each[1].start, each[1].end > each[1].start, each[0]))
    for _, each in reversed(order):
        text = f"{text[: each.start]}{each.text}{text[each.end :]}"
    return text


def style_of(root: Node) -> Style:
    """How a document indents, by its first mapping in a mapping and list in a mapping."""
    step = dash = None
    todo = [root]
    while todo:
        node = todo.pop(0)
        for key, value in node.entries:
            if not node.flow and not value.flow:
                if value.kind == "map" and step is None and value.column > key.column:
                    step = value.column - key.column
                if value.kind == "list" and dash is None:
                    dash = max(0, value.column - key.column)
            todo.append(value)
        todo.extend(node.items)
    return Style(step or 2, 0 if dash is None else dash)


def _together(changes: list[Change], root: Node) -> list[Change]:
    """Those that can be done in one round: of what touches one anchor, the first alone."""
    spans = list(_delicate(root))
    chosen: list[Change] = []
    touched: set[int] = set()
    for each in changes:
        anchors = {anchor for low, high, anchor in spans if each.start <= high and each.end >= low}
        if not anchors & touched:
            chosen.append(each)
            touched |= anchors
    return chosen


def _delicate(node: Node) -> Iterator[tuple[int, int, int]]:
    """Where aliases stand, what they name, and what they are merged into; each with what its anchor is known by."""
    if node.named is not None:
        yield node.start, node.end, id(node.named)
        yield node.named.start, node.named.end, id(node.named)
    for key, value in node.entries if node.merged else ():
        if key.value == "<<":
            for each in value.items or (value,):
                yield node.start, node.end, id(each.named)
    for each in (*node.items, *(value for _, value in node.entries)):
        yield from _delicate(each)


class _Changes:
    """What leads from a tree to what it is to say: changes, each of which makes sense alone."""

    def __init__(self, text: str, root: Node) -> None:
        self._text = text
        self._root = root
        self._style = style_of(root)
        self._break = "\r\n" if "\r\n" in text else "\n"
        self._found: list[Change] = []

    def towards(self, target: Any) -> list[Change]:
        """The changes, as they stand in the text."""
        self._node(self._root, target, -1)
        return self._found

    def _node(self, node: Node, target: Any, head: int) -> bool:
        """Changes what is within `node`, whose key or dash ends at `head`. False: it must be written anew, whole."""
        if equal(node.value, target):
            return True
        if node.value in ({}, []):
            return False  # empty brackets say nothing of how to write what is to be in them
        before = len(self._found)
        if node.kind == "map" and isinstance(target, dict) and target:
            done = self._map(node, target, head)
        elif node.kind == "list" and isinstance(target, list) and target:
            done = self._list(node, target, head)
        else:
            return False
        if not done:
            del self._found[before:]
        return done

    # Mappings.

    def _map(self, node: Node, target: dict[str, Any], head: int) -> bool:
        own = {key.value: (key, value) for key, value in node.entries if isinstance(key.value, str)}
        if any(key not in target and key not in own for key in node.value):
            return False  # what << brings cannot be taken away
        if node.flow:
            return self._flow_map(node, target, own)
        if not node.entries:
            return False
        gone = [key for key in own if key not in target and key != "<<"]
        first = node.entries[0][0]
        if gone and own[gone[0]][0] is first and not self._alone(first.start):
            return False  # it stands behind a dash
        names = list(own)
        before = ""
        for key, value in target.items():
            if key in own:
                self._entry(*own[key], value, node)
                before = key
            elif key not in node.value or not equal(node.value[key], value):
                follows = names[names.index(before) + 1 if before else 0 :][:1]
                if follows and follows[0] in gone:
                    # It takes another one's place, behind the comment that stands above it.
                    place: int | None = self._without(*own[follows[0]]).start
                else:
                    place = self._place(node, own[before][1] if before else None, head)
                if place is None:
                    return False
                self._found.append(Change(place, place, self._lines(entry(key, value, self._style), first.column)))
        # Last: where a round is one change, what takes a place comes before what leaves it.
        for key in gone:
            self._found.append(self._without(*own[key]))
        return True

    def _entry(self, key: Node, value: Node, target: Any, parent: Node) -> None:
        head = self._text.index(":", key.end) + 1
        if (parent.flow or not self._outgrown(value, target)) and self._node(value, target, head):
            return
        if parent.flow:
            space = " " if self._text[value.start - 1] == ":" and not self._root.flow else ""
            self._found.append(Change(value.start, value.end, space + self._flow(target, key.column)))
        else:
            self._found.append(self._rewritten(head, value, target, key.column))

    def _rewritten(self, head: int, value: Node, target: Any, column: int) -> Change:
        """What stands behind a key, written anew; a comment on that line stays."""
        end = self._line_end(value.end)
        note = ""
        if value.flow:
            note = self._text[value.end : end]
        elif value.kind != "scalar":
            note = self._text[head : self._line_end(head)]
        first, more = below(target, self._style)
        return Change(head, end, first + note.rstrip() + self._lines(more, column))

    def _outgrown(self, node: Node, target: Any) -> bool:
        """Whether brackets are no way to write it, as scripts have several lines."""
        return node.flow and not equal(node.value, target) and several_lines(target)

    def _place(self, node: Node, before: Node | None, head: int) -> int | None:
        """Where a new entry's lines go: behind the entry before it, or the head of all. None: nowhere."""
        if before is not None:
            return self._line_end(before.end)
        first = node.entries[0][0].start if node.kind == "map" else node.start
        return self._line_end(head) if head >= 0 and self._alone(first) else None

    def _without(self, key: Node, value: Node) -> Change:
        return self._cut(key.start - key.column, self._line_end(max(value.end, key.end)))

    def _cut(self, start: int, end: int) -> Change:
        """Whole lines, with the break before them, or behind them at the text's start."""
        if start == 0:
            return Change(0, min(len(self._text), end + len(self._break)), "")
        return Change(start - (2 if self._text[start - 2 : start] == "\r\n" else 1), end, "")

    # Lists.

    def _list(self, node: Node, target: list[Any], head: int) -> bool:
        pairs = align(node.value, target)
        if node.flow:
            return self._flow_list(node, target, pairs)
        dashes = self._dashes(node)
        if not node.items or not all(map(self._alone, dashes)):
            return False
        if not any(old >= 0 and new >= 0 for old, new in pairs):
            return False
        column = node.column
        behind = -1
        for old, new in pairs:
            if new < 0:
                end = self._line_end(node.items[old].end)
                self._found.append(self._cut(self._line_start(dashes[old]), end))
            elif old < 0:
                place = self._place(node, node.items[behind] if behind >= 0 else None, head)
                if place is None:
                    return False
                self._found.append(Change(place, place, self._lines(item(target[new], self._style), column)))
            else:
                self._item(node.items[old], target[new], dashes[old], column)
            behind = old if old >= 0 else behind
        return True

    def _item(self, node: Node, target: Any, dash: int, column: int) -> None:
        if not self._outgrown(node, target) and self._node(node, target, dash + 1):
            return
        first, *more = item(target, self._style)
        end = self._line_end(node.end)
        note = self._text[node.end : end] if node.flow else ""
        self._found.append(Change(dash, end, first + note + self._lines(more, column)))

    def _dashes(self, node: Node) -> list[int]:
        """Where the dashes of a block list are. Between its entries there are only spaces, comments, and they."""
        found: list[int] = []
        at = node.start
        for each in node.items:
            for match in re.finditer(r"#[^\n]*|[&!]\S+|-", self._text[at : each.start + 1]):
                if match[0] == "-":
                    found.append(at + match.start())
                    break
            at = self._line_end(max(each.end, found[-1] + 1))
        return found

    # Brackets.

    def _flow_map(self, node: Node, target: dict[str, Any], own: dict[str, tuple[Node, Node]]) -> bool:
        gone = [key for key in own if key not in target and key != "<<"]
        parts = list(node.entries)
        if gone and len(gone) == len(parts):
            return False
        spans = [(key.start, value.end) for key, value in parts]
        for key in gone:
            self._found.append(self._flow_cut(spans, parts.index(own[key])))
        behind = -1
        names = [key.value for key, _ in parts]
        for key, value in target.items():
            if key in own:
                self._entry(*own[key], value, node)
                behind = names.index(key)
            elif key not in node.value or not equal(node.value[key], value):
                column = parts[0][0].column
                name = json(key) if self._root.flow else scalar(key)
                words = f"{name}: {self._flow(value, column)}"
                self._found.append(self._flow_insert(node, spans, behind, words))
        return True

    def _flow_list(self, node: Node, target: list[Any], pairs: list[tuple[int, int]]) -> bool:
        spans = [(each.start, each.end) for each in node.items]
        if not any(old >= 0 and new >= 0 for old, new in pairs):
            return False
        behind = -1
        for old, new in pairs:
            if new < 0:
                self._found.append(self._flow_cut(spans, old))
            elif old < 0:
                column = node.items[0].column
                self._found.append(self._flow_insert(node, spans, behind, self._flow(target[new], column)))
            else:
                each = node.items[old]
                if not self._node(each, target[new], each.start):
                    self._found.append(Change(each.start, each.end, self._flow(target[new], each.column)))
            behind = old if old >= 0 else behind
        return True

    def _flow_cut(self, spans: list[tuple[int, int]], index: int) -> Change:
        if index:
            return Change(spans[index - 1][1], spans[index][1], "")
        return Change(spans[0][0], spans[1][0] if len(spans) > 1 else spans[0][1], "")

    def _flow_insert(self, node: Node, spans: list[tuple[int, int]], behind: int, words: str) -> Change:
        start = spans[0][0]
        gap = re.search(r"\r?\n[ \t]*$", self._text[node.start : start])
        between = f",{gap[0]}" if gap else ", "
        if behind < 0:
            return Change(start, start, words + between)
        return Change(spans[behind][1], spans[behind][1], between + words)

    def _flow(self, value: Any, column: int) -> str:
        """A value in brackets: over several lines where the whole text is, at the column of the entry that has it."""
        if not self._root.flow:
            return flow(value)
        if "\n" not in self._text[self._root.start : self._root.end]:
            return json(value)
        step = self._root.entries[0][0].column if self._root.entries else 2
        return pretty(value, step or 2, column).replace("\n", self._break)

    # Text.

    def _lines(self, lines: list[str], column: int) -> str:
        indent = " " * column
        return "".join(f"{self._break}{indent if line else ''}{line}" for line in lines)

    def _line_end(self, at: int) -> int:
        """Where the line of a place ends, before its break."""
        end = self._text.find("\n", at)
        if end < 0:
            return len(self._text)
        return end - 1 if end > at and self._text[end - 1] == "\r" else end

    def _line_start(self, at: int) -> int:
        return self._text.rfind("\n", 0, at) + 1

    def _alone(self, at: int) -> bool:
        """Whether nothing but spaces stands before a place on its line."""
        return not self._text[self._line_start(at) : at].strip()
