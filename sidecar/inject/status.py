"""The annotation that remembers what was done to a pod, so that it can be undone.

It is made by comparing the pod before with the pod after, and not kept beside the changes: what is changed is
remembered, whatever it is and whoever adds a change.

1. Entries of lists are found by their names (`sidecar.inject.patch`): others may have come or gone meanwhile.
2. What was added goes, even if it was changed since: it is ours. A list or mapping that was made for our entries goes
   when nothing else is in it.
3. What was replaced, or lengthened, comes back only where our value still stands, by its digest: what was changed since
   is somebody's will, and is told.
4. What cannot be an injection's is not read: a pod's maker may write the annotation, and what it says is looked for in
   lists that are as long as an API server lets them be.
5. `texts` are for files alone: how a value was written where writing it anew would look different.
"""

from copy import deepcopy
from hashlib import sha256
from typing import Annotated, Any, Final

import msgspec

from sidecar.inject.container import Object
from sidecar.inject.names import STATUS
from sidecar.inject.patch import Step, align, canonical, identity, keyed

Path = tuple[Step, ...]
MOST_CHANGES: Final = 100
"""Of one pod; the pods that tests have need 17 at most."""
MOST_CHARACTERS: Final = 256 << 10
"""Of all annotations of an object, as Kubernetes has it."""

Place = Annotated[Path, msgspec.Meta(min_length=1, max_length=32)]
"""A path that leads somewhere: the annotation is a pod's maker's to write."""


class Undo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change, backwards. With `was`: that was there (at `index` of its mapping, where the key is gone); else it was
    added. `of`: the names in a collection that was made for them. `cut`: so many entries at a list's end are ours.
    `put`: the digest of what was put there."""

    at: Place
    was: Any = msgspec.UNSET
    index: int = -1
    of: Annotated[tuple[Step, ...], msgspec.Meta(max_length=MOST_CHANGES)] = ()
    cut: int = 0
    put: str = ""


class Text(msgspec.Struct, frozen=True):
    """How the value at a path was written."""

    at: Place
    text: str


class Status(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the annotation says. `version`: of the sidecar that wrote it."""

    version: str
    undo: Annotated[tuple[Undo, ...], msgspec.Meta(max_length=MOST_CHANGES)] = ()
    texts: tuple[Text, ...] = ()


def encode(status: Status) -> str:
    """The annotation's value."""
    return msgspec.json.encode(status).decode()


def read(pod: Object) -> Status | None:
    """What a pod's annotation says; None without one. ValueError where it cannot be read."""
    annotations = (pod.get("metadata") or {}).get("annotations") or {}
    if STATUS not in annotations:
        return None
    text = annotations[STATUS]
    if isinstance(text, str) and len(text) > MOST_CHARACTERS:
        raise ValueError(f"is longer than {MOST_CHARACTERS} characters")
    try:
        return msgspec.json.decode(text, type=Status)
    except (msgspec.DecodeError, TypeError) as exc:
        raise ValueError(f"is not what `sidecar inject` writes: {exc}") from exc


def remember(before: Object, after: Object, version: str) -> Object:
    """`after` with the annotation that leads back to `before`; it has an empty one already, where it is to stand."""
    undo = tuple(_undo(before, after, ()))
    annotations = {**after["metadata"]["annotations"], STATUS: encode(Status(version, undo))}
    return {**after, "metadata": {**after["metadata"], "annotations": annotations}}


def with_texts(pod: Object, texts: tuple[Text, ...]) -> Object:
    """An injected pod whose annotation remembers these texts, too."""
    done = read(pod)
    assert done is not None  # it is injected
    annotations = {**pod["metadata"]["annotations"], STATUS: encode(msgspec.structs.replace(done, texts=texts))}
    return {**pod, "metadata": {**pod["metadata"], "annotations": annotations}}


def digest(value: Any) -> str:
    """A short word for a value; equal values have the same."""
    return sha256(canonical(value).encode()).hexdigest()[:8]


def undone(pod: Object, status: Status) -> tuple[Object, tuple[Path, ...]]:
    """The pod as it was, and the paths of what stays since it was changed after it was put there."""
    tree = deepcopy(pod)
    kept: list[Path] = []
    for each in status.undo:
        if each.index < 0 and not _taken_back(_at(tree, each.at[:-1]), each):
            kept.append(each.at)
    for each in status.undo:
        parent = _at(tree, each.at[:-1])
        if each.index >= 0 and isinstance(parent, dict) and each.at[-1] not in parent:
            entries = list(parent.items())
            entries.insert(each.index, (str(each.at[-1]), each.was))
            parent.clear()
            parent.update(entries)
    return tree, tuple(kept)


def _undo(before: Any, after: Any, at: Path) -> list[Undo]:
    if isinstance(before, dict) and isinstance(after, dict):
        found = [Undo((*at, key), was=before[key], index=i) for i, key in enumerate(before) if key not in after]
        for key, value in after.items():
            found.extend(_undo(before[key], value, (*at, key)) if key in before else (_added(value, (*at, key)),))
        return found
    if canonical(before) == canonical(after):
        return []
    if isinstance(before, list) and isinstance(after, list):
        if keyed(before) and keyed(after):
            pairs = align(before, after)
            if all(new >= 0 for _, new in pairs):
                return [each for old, new in pairs for each in _entry(before, after, old, new, at)]
        if after[: len(before)] == before:
            return [Undo(at, cut=len(after) - len(before), put=digest(after[len(before) :]))]
    if before is None and (made := _names(after)):
        return [Undo(at, was=None, of=made)]
    return [Undo(at, was=before, put=digest(after))]


def _entry(before: list[Any], after: list[Any], old: int, new: int, at: Path) -> list[Undo]:
    name = identity(after[new])
    assert name is not None  # `keyed` said so
    # An entry that is new is ours as it is: nobody puts something of theirs into it.
    return [Undo((*at, name))] if old < 0 else _undo(before[old], after[new], (*at, name))


def _added(value: Any, at: Path) -> Undo:
    if made := _names(value):
        return Undo(at, of=made)
    return Undo(at) if at[-1] == STATUS else Undo(at, put=digest(value))


def _names(value: Any) -> tuple[Step, ...]:
    """What is in a collection, by name; nothing, where its parts have none."""
    if isinstance(value, dict):
        return tuple(value)
    if isinstance(value, list) and keyed(value):
        return tuple(name for name in map(identity, value) if name is not None)
    return ()


def _taken_back(parent: Any, undo: Undo) -> bool:
    """Takes back what stands in `parent`; False where it is not ours any more."""
    step = undo.at[-1]
    if isinstance(parent, list):
        parent[:] = [each for each in parent if identity(each) != step]
        return True
    if not isinstance(parent, dict) or step not in parent:
        return True
    value = parent[step]
    if undo.of:
        left = _less(value, undo.of)
    elif undo.cut:
        if not isinstance(value, list) or digest(value[-undo.cut :]) != undo.put:
            return False
        left = value[: -undo.cut]
    elif undo.put and digest(value) != undo.put:
        return False
    else:
        left = undo.was
    if undo.of and not left:
        left = undo.was  # it was made for what is gone
    if left is msgspec.UNSET:
        del parent[step]
    else:
        parent[step] = left
    return True


def _less(value: Any, names: tuple[Step, ...]) -> Any:
    if isinstance(value, dict):
        return {key: each for key, each in value.items() if key not in names}
    if isinstance(value, list):
        return [each for each in value if identity(each) not in names]
    return value


def _at(tree: Any, path: Path) -> Any:
    """What is at a path; None where nothing is."""
    for step in path:
        if isinstance(tree, dict):
            tree = tree.get(step)
        elif isinstance(tree, list):
            tree = next((each for each in tree if identity(each) == step), None)
    return tree
