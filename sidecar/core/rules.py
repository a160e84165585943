"""What becomes of an update: `revise` holds it against the rules that `core.revise` states; pure.

A table is made anew from the one that stands, or, for a service whose versions nobody updated yet, from what its
policy file says. Everything is checked on what would come of it, and nothing of what is refused is kept.
"""

import re
from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import isfinite
from typing import Final, get_args

import msgspec
from msgspec.structs import replace

from sidecar.core.revise import Accepted, Known, Refused, Update
from sidecar.core.rollout import begin, superseded
from sidecar.core.table import (
    MAX_ENDPOINTS,
    MAX_VERSIONS,
    PARTS,
    SEEN,
    Seen,
    Table,
    Version,
    parts_of,
    started,
    weighed,
)
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.address import endpoint_key
from sidecar.policy.check import check_front
from sidecar.policy.schema import NAME_PATTERN, NAME_WORDS, PRINTABLE, Endpoint, Engine, Front, Service

MAX_NAME: Final = 63
MAX_WORD: Final = 253
"""Of a zone and a node."""
MAX_URL: Final = 512
MAX_ID: Final = 128
MAX_HASHES: Final = 64
MAX_SIGNATURE: Final = 64
MAX_FIELD: Final = 1024
MAX_MODELS: Final = 1000
MAX_GLOB: Final = 256
MAX_TEXT: Final = 1024
"""Of an engine's own name for its model, and of a template's path."""
SUM_SLACK: Final = 1e-6
"""By how much the parts of a whole may miss it: what a sum of decimal fractions does."""

_NAME: Final = re.compile(NAME_PATTERN)
_PRINTABLE: Final = re.compile(PRINTABLE)
_PLACE: Final = re.compile(r"[A-Za-z0-9._:/-]*")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_ENGINES: Final[tuple[Engine, ...]] = get_args(Engine)
_FRONTS: Final[tuple[Front, ...]] = get_args(Front)
_encoder: Final = msgspec.msgpack.Encoder(order="deterministic")


def revise(
    table: Table | None,
    policy: Service | None,
    version_number: int,
    update: Update,
    now_us: int,
    new_id: Callable[[], str],
) -> Table | Refused | Accepted:
    """The table that an update makes of the one that stands (`version_number`: its version; None and 0: there is none).

    `policy`: what the policy file says of the service; None: no file names it. Accepted: it was taken before, or asks
    for what stands. `new_id` names a rollout.
    """
    wrong = _wrong(update, policy)
    if wrong:
        return Refused("invalid", wrong, version_number)
    digest = digest_of(update)
    if table is not None and update.update_id:
        for seen in table.seen:
            if seen.id == update.update_id:
                if seen.digest != digest:
                    said = f"update id {update.update_id!r} was another update: a new update has a new id"
                    return Refused("conflict", said, version_number)
                # The first of a register did not know its epoch when it was written.
                first = (version_number >> 20 << 20) + 1
                return Accepted(table, seen.version or first, repeated=True)
    if update.expected and update.expected != version_number:
        said = f"the table is at version {version_number}" if version_number else "there is no table yet"
        return Refused("stale", f"{said}, and not at {update.expected}", version_number)
    base = table
    if base is None:
        base = Table(update.service)
    if not base.versions and policy is not None:
        base = replace(base, versions=started(policy).versions)
    made = _revised(base, policy, update, now_us, new_id)
    if isinstance(made, Refused):
        return replace(made, version=version_number)
    if update.update_id:
        seen = Seen(update.update_id, digest, version_number + 1 if version_number else 0)
        return replace(made, seen=(*made.seen, seen)[-SEEN:])
    if table is not None and made == table:
        return Accepted(table, version_number, repeated=True)
    return made


def digest_of(update: Update) -> bytes:
    """What an update says, whoever says it and whatever table it was made for."""
    update = replace(update, update_id="", expected=0, by="")
    said = _encoder.encode(Known(**{name: getattr(update, name) for name in Known.__struct_fields__}))
    later = (update.front, update.engine_model, update.chat_template)
    if any(each is not None for each in later):
        said += _encoder.encode(later)
    return blake2b(said, digest_size=16).digest()


def _revised(
    base: Table, policy: Service | None, update: Update, now_us: int, new_id: Callable[[], str]
) -> Table | Refused:
    known = base.version(update.version)
    if known is None and not update.engine:
        said = f"{update.version!r} is a new version of {update.service}: name its engine, one of {', '.join(_ENGINES)}"
        return Refused("invalid", said)
    version = _updated(known or Version(update.version, 0), update)
    wrong = _wrong_together(version)
    if wrong:
        return Refused("invalid" if update.engine else "conflict", wrong)
    unlike = _unlike(known, version, policy, update)
    if unlike:
        return Refused("conflict", unlike)
    if len(base.versions) + (known is None) > MAX_VERSIONS:
        said = f"{update.service} has {len(base.versions)} versions, and a table holds {MAX_VERSIONS}"
        return Refused("exhausted", f"{said}: take the endpoints of one without traffic away first")
    if known is None:
        table = replace(base, versions=(*base.versions, version))
    else:
        table = replace(base, versions=tuple(version if each is known else each for each in base.versions))
    if update.models and policy is None:
        table = replace(table, models=update.models)
    weighted = _weighted(base, table, update, now_us, new_id)
    if isinstance(weighted, Refused):
        return weighted
    table = weighted
    fixed = _fixed(policy)
    refused = _check_endpoints(base, table, fixed, update) or _check_hashes(table)
    if refused is not None:
        return refused
    if update.endpoints == () and not table.weights[update.version] and update.version not in fixed.values():
        # Nothing is left of it that anybody could use.
        table = replace(table, versions=tuple(each for each in table.versions if each.name != update.version))
    return table


def _updated(version: Version, update: Update) -> Version:
    """A version as an update has it, its weight apart."""
    targets = version.endpoints if update.endpoints is None else update.endpoints
    if update.zone:
        targets = tuple(target if target.zone else replace(target, zone=update.zone) for target in targets)
    schema_hash = _plain(update.schema_hash) or version.schema_hash
    compatible = tuple(dict.fromkeys(_plain(each) for each in update.compatible))
    if not compatible and schema_hash == version.schema_hash:
        compatible = version.compatible
    engine = _engine(update.engine) or version.engine
    had = version if engine == version.engine else Version(version.name, 0)
    front = None if update.front is None else _front(update.front)
    return replace(
        version,
        engine=engine,
        front=had.front if front is None else front,
        engine_model=had.engine_model if update.engine_model is None else update.engine_model,
        chat_template=had.chat_template if update.chat_template is None else update.chat_template,
        endpoints=targets,
        schema_hash=schema_hash,
        compatible=compatible,
        signature=update.signature or version.signature,
    )


def _weighted(base: Table, table: Table, update: Update, now_us: int, new_id: Callable[[], str]) -> Table | Refused:
    """`table` with the weights that an update says, or that its plan begins with."""
    name = update.version
    if update.plan is not None:
        first = update.plan.steps[0].weight if update.plan.steps else 0
        if update.weight is not None and round(update.weight * PARTS) != first:
            said = f"a weight of {update.weight:g} is not that of the plan's first step ({first / PARTS:g}): say one"
            return Refused("invalid", said)
        return begin(table, name, update.plan, new_id(), now_us, update.by)
    if update.weights:
        for other in update.weights:
            if table.version(other) is None:
                said = f"weights: {update.service} has no version {other!r}; it has {', '.join(table.weights)}"
                return Refused("not_found", said)
        parts = parts_of({each.name: update.weights.get(each.name, 0.0) for each in table.versions})
        table = superseded(table, update.by, now_us)
        return replace(table, versions=tuple(replace(each, weight=parts[each.name]) for each in table.versions))
    weight = update.weight
    if weight is None:
        if any(base.weights.values()):
            return table
        weight = 1.0  # the first that there is
    part = round(weight * PARTS)
    if 0.0 < weight < 1.0:
        part = min(max(part, 1), PARTS - 1)
    made = weighed(table, name, part)
    if made is None:
        rest = "all" if not part else f"the other {1 - weight:g}"
        said = f"{rest} of {update.service} would go to nobody: no version but {name!r} has a weight"
        return Refused("conflict", said)
    return made if update.weight is None else superseded(made, update.by, now_us)


def _fixed(policy: Service | None) -> dict[EndpointKey, str]:
    """The endpoints that a policy file names, with their versions."""
    return {} if policy is None else {endpoint_key(each.url): each.version for each in policy.endpoints}


def _check_endpoints(base: Table, table: Table, fixed: Mapping[EndpointKey, str], update: Update) -> Refused | None:
    """Rule 2: what has traffic has endpoints, and each of them is one version's."""
    if update.endpoints:
        total = sum(len(each.endpoints) for each in table.versions)
        if total > MAX_ENDPOINTS:
            return Refused("exhausted", f"{update.service} would have {total} endpoints: {MAX_ENDPOINTS} at most")
        # The addresses of this update were read before, by `_wrong`.
        own = {endpoint_key(target.url) for target in update.endpoints}
        for key in own:
            owner = fixed.get(key, update.version)
            if owner != update.version:
                return Refused("conflict", f"{key} is an endpoint of {owner!r} in the policy file of {update.service}")
        for each in table.versions:
            if each.name != update.version:
                for target in each.endpoints:
                    try:
                        key = endpoint_key(target.url)
                    except ValueError as exc:  # the log may have anybody's tables
                        said = f'{each.name!r} has an endpoint "{target.url[:MAX_URL]}" that {exc}'
                        return Refused("conflict", f"{said}: give it others first")
                    if key in own:
                        said = f"{key} is an endpoint of {each.name!r}: take it from there first"
                        return Refused("conflict", said)
    before, owners = base.weights, set(fixed.values())
    for each in table.versions:
        asked = each.name == update.version or each.weight > before.get(each.name, 0)
        if asked and each.weight and not each.endpoints and each.name not in owners:
            if each.name == update.version and update.endpoints == () and before.get(each.name, 0):
                said = f"{each.name!r} has a weight: its last endpoints stay until that is 0"
                return Refused("conflict", said)
            return Refused("invalid", f"{each.name!r} has no endpoint, and would have a weight: name its endpoints")
    return None


def _check_hashes(table: Table) -> Refused | None:
    """Rule 3: those that get traffic together go together."""
    hashed = [each for each in table.versions if each.weight and each.schema_hash]
    for index, one in enumerate(hashed):
        for other in hashed[:index]:
            if one.schema_hash == other.schema_hash:
                continue
            if other.schema_hash not in one.compatible and one.schema_hash not in other.compatible:
                said = (
                    f"{one.name!r} has schema {one.schema_hash[:12]}, {other.name!r} has {other.schema_hash[:12]}, and "
                    "neither names the other's as compatible: they cannot get traffic together"
                )
                return Refused("conflict", said)
    return None


def _wrong(update: Update, policy: Service | None) -> str:
    """What is wrong with an update by itself; empty: nothing."""
    try:
        _encoder.encode(update)
    except UnicodeEncodeError:
        return "it has half of a surrogate pair in it, which no UTF-8 can say"
    except OverflowError:
        return "it has a number in it that is too large for any field"
    return (
        _wrong_names(update)
        or _wrong_weights(update)
        or _wrong_endpoints(update)
        or _wrong_hashes(update)
        or _wrong_models(update, policy)
    )


def _wrong_names(update: Update) -> str:
    for what, name in (("service", update.service), ("version", update.version)):
        if not 0 < len(name) <= MAX_NAME or _NAME.fullmatch(name) is None:
            return f"{what} {name[:MAX_NAME]!r} is no name: 1 to {MAX_NAME} {NAME_WORDS}"
    if len(update.update_id) > MAX_ID or _PRINTABLE.fullmatch(update.update_id) is None:
        return f"an update id is up to {MAX_ID} characters, none of them a control character"
    if update.engine and _engine(update.engine) is None:
        return f"engine {update.engine[:MAX_NAME]!r} is not known: {', '.join(_ENGINES)} are"
    if update.front and _front(update.front) is None:
        return f"front {update.front[:MAX_NAME]!r} is not known: {', '.join(filter(None, _FRONTS))} are"
    for what, text in (("engine_model", update.engine_model), ("chat_template", update.chat_template)):
        if text and (len(text) > MAX_TEXT or _PRINTABLE.fullmatch(text) is None):
            return f"{what} is up to {MAX_TEXT} characters, none of them a control character"
    if len(update.signature) > MAX_SIGNATURE or any(
        len(word) > MAX_FIELD for field in update.signature.items() for word in field
    ):
        return f"a signature is up to {MAX_SIGNATURE} fields of up to {MAX_FIELD} characters each"
    return _wrong_place("zone", update.zone)


def _wrong_place(what: str, place: str) -> str:
    if len(place) > MAX_WORD or _PLACE.fullmatch(place) is None:
        return f"{what} {place[:MAX_NAME]!r} is none: up to {MAX_WORD} letters, digits and . _ : / -"
    return ""


def _wrong_together(version: Version) -> str:
    """What a version's engine, its front and what goes with that have against each other."""
    like = Endpoint(
        url="http://any",
        engine=version.engine,
        front=version.front,
        engine_model=version.engine_model,
        chat_template=version.chat_template,
    )
    return "; ".join(f"{version.name!r}: {fault.steps[-1]}: {fault.message}" for fault in check_front(like))


def _unlike(known: Version | None, version: Version, policy: Service | None, update: Update) -> str:
    """An endpoint of the policy file's that would be spoken to otherwise from now on, though nobody said how: the
    file's endpoints of one version may differ, and a table's do not."""
    said = update.engine or any(each is not None for each in (update.front, update.engine_model, update.chat_template))
    if policy is None or not update.endpoints or said:
        return ""
    had = frozenset(() if known is None else [target.url for target in known.endpoints])  # whatever it says: it stands
    named = {endpoint_key(target.url) for target in update.endpoints if target.url not in had}
    way = version.engine, version.front, version.engine_model, version.chat_template
    for each in policy.endpoints:
        its = each.engine, each.front, each.engine_model, each.chat_template
        # What says its engine alone leaves the rest as the file has it.
        if its == way or (each.engine == version.engine and not any(way[1:])) or endpoint_key(each.url) not in named:
            continue
        return (
            f"{each.url} is spoken to as {_way(each)} in the policy file of {update.service}, and {version.name!r} as "
            f"{_way(version)}: say the engine, or give it a version of its own"
        )
    return ""


def _way(one: Endpoint | Version) -> str:
    said = [one.engine, one.front, one.engine_model, one.chat_template]
    return " ".join(word for word in said if word)


def _wrong_weights(update: Update) -> str:
    if update.weight is not None and not 0.0 <= update.weight <= 1.0:  # NaN is neither
        return f"a weight of {update.weight:g} is no share: 0 to 1"
    if not update.weights:
        return ""
    if update.weight is not None or update.plan is not None:
        return "weights are the whole split: a weight or a plan beside them would say it twice"
    if len(update.weights) > MAX_VERSIONS:
        return f"{len(update.weights)} weights are too many: {MAX_VERSIONS} versions at most"
    for name, weight in update.weights.items():
        if not (isfinite(weight) and 0.0 <= weight <= 1.0):
            return f"a weight of {weight:g} for {name[:MAX_NAME]!r} is no share: 0 to 1"
    total = sum(update.weights.values())
    if abs(total - 1.0) > SUM_SLACK:
        return f"the weights sum to {total:g}, and not to 1"
    return ""


def _wrong_endpoints(update: Update) -> str:
    if update.endpoints is None:
        return ""
    if len(update.endpoints) > MAX_ENDPOINTS:
        return f"{len(update.endpoints)} endpoints are too many: {MAX_ENDPOINTS} at most"
    seen: set[EndpointKey] = set()
    for target in update.endpoints:
        if len(target.url) > MAX_URL:
            return f"an endpoint's URL has {len(target.url)} characters: {MAX_URL} at most"
        try:
            key = endpoint_key(target.url)
        except ValueError as exc:
            return f'endpoint "{target.url}" {exc}'
        if key in seen:
            return f"{key} is named twice"
        seen.add(key)
        wrong = _wrong_place("zone", target.zone) or _wrong_place("node", target.node)
        if wrong:
            return wrong
    return ""


def _wrong_hashes(update: Update) -> str:
    if len(update.compatible) > MAX_HASHES:
        return f"{len(update.compatible)} compatible hashes are too many: {MAX_HASHES} at most"
    for each in (update.schema_hash, *update.compatible):
        if each and _HASH.fullmatch(_plain(each)) is None:
            return f"schema hash {each[:80]!r} is no SHA-256 in hex: 64 digits"
    if "" in update.compatible:
        return "an empty hash is compatible with nothing"
    return ""


def _wrong_models(update: Update, policy: Service | None) -> str:
    if not update.models:
        return ""
    if policy is not None and tuple(policy.models) != update.models:
        return f"the models of {update.service} are its policy file's: an update says none"
    if len(update.models) > MAX_MODELS:
        return f"{len(update.models)} models are too many: {MAX_MODELS} at most"
    for glob in update.models:
        if not 0 < len(glob) <= MAX_GLOB or _PRINTABLE.fullmatch(glob) is None:
            return f"model {glob[:MAX_NAME]!r} is none: 1 to {MAX_GLOB} characters, none of them a control character"
    return ""


def _plain(schema_hash: str) -> str:
    """A hash as tables have it: lower-case hex alone."""
    return schema_hash.removeprefix("sha256:").lower()


def _engine(word: str) -> Engine | None:
    for engine in _ENGINES:
        if engine == word:
            return engine
    return None


def _front(word: str) -> Front | None:
    for front in _FRONTS:
        if front == word:
            return front
    return None
