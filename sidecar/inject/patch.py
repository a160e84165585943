"""Two objects and what leads from one to the other, as a JSON patch (RFC 6902).

Lists of Kubernetes are mostly lists of things with a name, so their entries are told apart by it: a container that was
put before others moves them, and changes none. Entries without one are the same where they are equal.
"""

from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any, Final

import msgspec

from sidecar.inject.container import Object

Step = str | int
"""A part of a path: a key of a mapping, or an entry of a list."""

_NAMES = ("mountPath", "containerPort", "name")
"""What an entry is known by, as the API server's own merge keys: a volume may be mounted twice, a port have no name."""


MOST_PAIRS: Final = 1_000_000
"""Lists that differ in more are replaced and not compared: no pod has them, and made-up ones must not cost seconds."""


def identity(entry: Any) -> Step | None:
    """What an entry of a list is known by; None: by nothing."""
    if isinstance(entry, dict):
        for key in _NAMES:
            if isinstance(name := entry.get(key), str | int) and not isinstance(name, bool):
                return name
    return None


def keyed(entries: list[Any]) -> bool:
    """Whether all entries are known by something, and no two by the same."""
    known = {identity(each) for each in entries}
    return None not in known and len(known) == len(entries)


def align(before: list[Any], after: list[Any]) -> list[tuple[int, int]]:
    """Pairs of indexes in order: entries that stay or change. -1 on the right: it goes; on the left: it comes."""
    old, new = [_mark(each) for each in before], [_mark(each) for each in after]
    same = 0  # what both begin with: long lists are lengthened, and the matcher is slow with many equal entries
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    pairs = [(index, index) for index in range(same)]
    for tag, low, high, first, last in _opcodes(old, new, same):
        changed = all(
            isinstance(each, dict) and identity(each) is None for each in (*before[low:high], *after[first:last])
        )
        if tag == "equal" or (tag == "replace" and high - low == last - first and changed):
            # Mappings without names, as many as before: they are the same ones, changed.
            pairs.extend(zip(range(low, high), range(first, last), strict=True))
        else:
            pairs.extend((index, -1) for index in range(low, high))
            pairs.extend((-1, index) for index in range(first, last))
    return pairs


def _opcodes(old: list[Any], new: list[Any], same: int) -> Iterator[tuple[str, int, int, int, int]]:
    most = min(len(old), len(new)) - same
    tail = 0  # what both end with: lists are lengthened at their beginning, too
    while tail < most and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    high, last = len(old) - tail, len(new) - tail
    if (high - same) * (last - same) > MOST_PAIRS:
        yield "delete", same, high, same, same
        yield "insert", high, high, same, last
    else:
        for tag, *bounds in SequenceMatcher(None, old[same:high], new[same:last], autojunk=False).get_opcodes():
            yield tag, bounds[0] + same, bounds[1] + same, bounds[2] + same, bounds[3] + same
    if tail:
        yield "equal", high, len(old), last, len(new)


def _mark(entry: Any) -> tuple[str, Step]:
    known = identity(entry)
    return ("", canonical(entry)) if known is None else ("named", known)


def canonical(value: Any) -> str:
    """A value as text, the same for equal values."""
    return msgspec.json.encode(value, order="deterministic").decode()


def equal(left: Any, right: Any) -> bool:
    """Whether they are the same to Kubernetes: 1 is not true, and 1 is not 1.0."""
    return canonical(left) == canonical(right)


def json_patch(before: Any, after: Any, path: str = "") -> list[Object]:
    """The operations, in the order in which they are to be done."""
    if isinstance(before, dict) and isinstance(after, dict):
        operations: list[Object] = []
        for key in before:
            if key not in after:
                operations.append({"op": "remove", "path": f"{path}/{_escaped(key)}"})
        for key, value in after.items():
            where = f"{path}/{_escaped(key)}"
            if key in before:
                operations.extend(json_patch(before[key], value, where))
            else:
                operations.append({"op": "add", "path": where, "value": value})
        return operations
    if isinstance(before, list) and isinstance(after, list):
        return _list_patch(before, after, path)
    return [] if equal(before, after) else [{"op": "replace", "path": path, "value": after}]


def _list_patch(before: list[Any], after: list[Any], path: str) -> list[Object]:
    operations: list[Object] = []
    place = 0
    for old, new in align(before, after):
        where = f"{path}/{place}"
        if new < 0:
            operations.append({"op": "remove", "path": where})
            continue
        if old < 0:
            operations.append({"op": "add", "path": where, "value": after[new]})
        else:
            operations.extend(json_patch(before[old], after[new], where))
        place += 1
    return operations


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
