"""How values were written, where taking our changes back says the same in other characters: quotes, brackets, aliases.

What a text says and how it says it are two things. `sidecar.inject.edit` restores the first; what is found here to
differ in the second is kept in the annotation (`Text`) and put back, each only if the text then says the same.
"""

from typing import Any

from sidecar.inject.patch import Step, equal, identity
from sidecar.inject.status import Text
from sidecar.inject.tree import Broken, Node, compose

Path = tuple[Step, ...]


def spellings(original: str, restored: str, at: Path, *, whole: bool = False) -> tuple[Text, ...]:
    """What of the part at `at` (keys and indexes) is written otherwise in `restored`, which says the same. The smallest
    parts, if not the `whole` of them: that is long, and always enough."""
    old, new = compose(original), compose(restored)
    for step in at:
        old, new = _step(old, step), _step(new, step)
    if old is None or new is None:
        return ()
    return tuple(_differing(original, old, restored, new, (), whole))


def respelt(text: str, at: Path, texts: tuple[Text, ...]) -> str:
    """`text`, with parts of what is at `at` written as they were."""
    for each in texts:
        root = compose(text)
        node, found = root, None
        for step in at:
            node = _step(node, step)
        for name in each.at:
            found = _part(text, node, name)
            node = found[2] if found is not None else None
        if root is None or found is None:
            continue
        changed = f"{text[: found[0]]}{each.text}{text[found[1] :]}"
        try:
            after = compose(changed)
        except Broken:
            continue
        if after is not None and equal(after.value, root.value):
            text = changed
    return text


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
