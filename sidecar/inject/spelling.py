"""How values were written, where taking our changes back says the same in other characters: quotes, brackets, aliases.

What a text says and how it says it are two things. `sidecar.inject.edit` restores the first; what is found here to
differ in the second is kept in the annotation (`Text`) and put back, each only if the text then says the same.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from sidecar.inject.edit import Change, applied
from sidecar.inject.patch import Step, equal, identity
from sidecar.inject.status import Text
from sidecar.inject.tree import Broken, Node, compose

Path = tuple[Step, ...]


def spellings(
    original: str, restored: str, places: Sequence[Path], *, whole: bool = False
) -> dict[Path, tuple[Text, ...]]:
    """What of the parts at `places` (keys and indexes) is written otherwise in `restored`, which says the same. The
    smallest parts, if not the `whole` of them: that is long, and always enough."""
    before, after = compose(original), compose(restored)
    found: dict[Path, tuple[Text, ...]] = {}
    for at in places:
        old, new = _follow(before, at), _follow(after, at)
        differing = [] if old is None or new is None else _differing(original, old, restored, new, (), whole)
        found[at] = tuple(differing)
    return found


def respelt(text: str, written: Mapping[Path, tuple[Text, ...]]) -> str:
    """`text`, with parts of what is at some places written as they were."""
    root = compose(text)
    todo = [(at, each) for at, texts in written.items() for each in texts]
    if root is None or not todo:
        return text
    # All at once: what is long has many, and each look at the result is one at the whole.
    together = _rewritten(text, root, todo)
    if together is not None:
        return together
    for one in todo:
        changed = _rewritten(text, root, [one])
        if changed is not None and changed != text:
            text, root = changed, compose(changed)
            assert root is not None  # it says what it said
    return text


def _rewritten(text: str, root: Node, todo: Sequence[tuple[Path, Text]]) -> str | None:
    """`text` with these parts; None where one is not there, two are in each other, or it says something else then."""
    changes: list[Change] = []
    for at, each in todo:
        node, found = _follow(root, at), None
        for name in each.at:
            found = _part(text, node, name)
            node = found[2] if found is not None else None
        if found is None:
            return None
        changes.append(Change(found[0], found[1], each.text))
    changes.sort(key=lambda each: each.start)
    if any(earlier.end > later.start for earlier, later in pairwise(changes)):
        return None
    changed = applied(text, changes)
    try:
        after = compose(changed)
    except Broken:
        return None
    return changed if after is not None and equal(after.value, root.value) else None


def _follow(node: Node | None, path: Path) -> Node | None:
    for step in path:
        node = _step(node, step)
    return node


def _differing(original: str, old: Node, restored: str, new: Node, path: Path, whole: bool) -> list[Text]:
    found: list[Text] = []
    for name in _names(old):
        here, there = _part(original, old, name), _part(restored, new, name)
        if here is None or there is None or original[here[0] : here[1]] == restored[there[0] : there[1]]:
            continue
        deeper: list[Text] = []
        if not whole and _alike(here[2], there[2]):
            deeper = _differing(original, here[2], restored, there[2], (*path, name), whole)
        found.extend(deeper or [Text((*path, name), original[here[0] : here[1]])])
    return found


def _alike(old: Node, new: Node) -> bool:
    """Whether two collections have the same parts, written in the same way."""
    return (old.kind, old.flow) == (new.kind, new.flow) and _names(old) == _names(new) and bool(_names(old))


def _names(node: Node) -> list[Step]:
    """What the parts of a collection are known by; nothing where not all are."""
    names: list[Any] = [key.value for key, _ in node.entries] or [identity(each.value) for each in node.items]
    return names if all(isinstance(each, str | int) for each in names) else []


def _step(node: Node | None, step: Step) -> Node | None:
    if node is None:
        return None
    if isinstance(step, int) and node.kind == "list":
        return node.items[step] if step < len(node.items) else None
    return next((value for key, value in node.entries if key.value == step), None)


def _part(text: str, node: Node | None, name: Step) -> tuple[int, int, Node] | None:
    """Where a part of a collection stands, with its key and, in a block, with the comment behind it."""
    if node is None:
        return None
    for key, value in node.entries:
        if key.value == name:
            end = max(key.end, value.end)
            return key.start, end if node.flow else _line_end(text, end), value
    for each in node.items:
        if identity(each.value) == name:
            return each.start, each.end if node.flow else _line_end(text, each.end), each
    return None


def _line_end(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end
