"""A service's routing table: its versions with their weights and endpoints, its zones, and the rollout under way.

What all sidecars agree on about a service's routes is one value, replaced whole: a record of kind ROUTE holds it
(`txlog.codec`), every sidecar folds it over what its policy files say (`effective`), and the xDS server says the same
to Envoys. The log's register gives it its version; nothing here knows of the log.

1. Weights are parts of `PARTS`, whole numbers: sidecars and Envoys split alike, and a sum is exact.
2. A table holds all versions that may get traffic, with endpoints or without: those that a policy file names for a
   version stay the file's, and are added to the table's. One that has no versions says nothing of them (it is there for
   a zone's sake): the policy file's split stands. A version that only the file names gets nothing, unless nobody else
   is there: where no version with a weight has an endpoint (a file's versions were named anew, say), those that the
   table does not name serve as the file has them. What it does name and gives no weight gets none in any case.
3. A table that a later release wrote with more in it is read for what is known here; what is not known is lost if this
   one writes the next. A schema that is not known is refused.
4. Times are the log server's clock in microseconds since the epoch: the only clock that sidecars share.
5. A record is deflated: addresses of one cluster are alike, so that 1,000 endpoints are 4 to 18 kB and not 36 to 72,
   in the server, on the way and in every sidecar. What would inflate to more than a table can be is refused.
"""

import zlib
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from sidecar.policy.address import endpoint_key
from sidecar.policy.schema import Endpoint, Engine, Front, Globs, Name, Service, Text

SCHEMA: Final = 1
PARTS: Final = 10_000
"""A whole: the smallest weight is one part of it."""
MAX_VERSIONS: Final = 100
MAX_ENDPOINTS: Final = 5_000
"""Of one service, all versions together: with addresses as long as allowed they fit a record."""
MAX_STEPS: Final = 20
SEEN: Final = 64
"""Updates that are remembered by their id."""

_LEVEL: Final = 1
"""The next levels take four times as long and save a quarter."""
WRITABLE_BYTES: Final = 3 << 20
"""Of a table once inflated, to be written: who follows tables gets it as one message, and gRPC's clients take 4 MiB
unless they were told otherwise. `MAX_ENDPOINTS` with addresses, zones and nodes of 200 characters each fit."""
_MOST_BYTES: Final = 8 << 20
"""To be read: a later release may write more."""

Ratio = Annotated[float, Meta(ge=0, le=1)]


class Target(msgspec.Struct, frozen=True, omit_defaults=True):
    """One endpoint that an update names: `url` as in a policy file; `node`, `zone` for operators and zone decay."""

    url: str
    zone: str = ""
    node: str = ""


class Version(msgspec.Struct, frozen=True, omit_defaults=True):
    """One version of a service's model.

    `weight` in parts of `PARTS`. `schema_hash`: SHA-256 of the service's schema descriptor in lower-case hex, empty:
    not said. `compatible`: hashes of other versions that clients of this one may meet. `signature`: kept and not read.
    `front`, `engine_model`, `chat_template`: of all its endpoints, as a policy file says them of one; the template's
    path is one on every sidecar.
    """

    name: Name
    weight: int
    engine: Engine = "vllm"
    endpoints: tuple[Target, ...] = ()
    schema_hash: str = ""
    compatible: tuple[str, ...] = ()
    signature: dict[str, str] = {}
    front: Front = ""
    engine_model: Text = ""
    chat_template: Text = ""


class Step(msgspec.Struct, frozen=True):
    """One step of a rollout: the canary has `weight` parts for at least `min_s` seconds and `min_samples` answers."""

    weight: int
    min_s: float
    min_samples: int


class Margins(msgspec.Struct, frozen=True):
    """How much worse than its baseline a canary may be and still be called as good (docs/canary.md).

    `success`: of all judged answers, how many more may fail, 0-1. `first_token`, `token_gap`: how many times slower at
    the same prompt size, from 1. `errors`: of all answers, how many more may have an error in their stream, 0-1.
    `length`: how many times longer or shorter, from 1. `finish`: of all answers, how many may end for another reason,
    0-1.
    """

    success: float = 0.005
    first_token: float = 1.10
    token_gap: float = 1.10
    errors: float = 0.005
    length: float = 1.25
    finish: float = 0.05


class Plan(msgspec.Struct, frozen=True):
    """How a canary is led to its full weight.

    `baseline`: the version it is held against. `false_alarm`: how likely a canary as good as its baseline is taken
    back, over the whole rollout. `min_ready`: a rollback sends the canary's share only to versions of whose endpoints
    at least this part may serve.
    """

    baseline: str
    steps: tuple[Step, ...]
    false_alarm: float = 0.01
    margins: Margins = Margins()
    min_ready: float = 0.5


Phase = Literal["running", "held", "promoted", "failed", "aborted", "superseded"]
"""`running`: judged, and moved on. `held`: an operator holds it where it is. The others are its ends: the last step was
passed (or an operator said so), the analysis took it back, an operator did, another update of the weights came."""


class Rollout(msgspec.Struct, frozen=True, omit_defaults=True):
    """A canary on its way. `id` is unique; evidence names it and its `step`, so that none of another counts.

    `since_us`: when this step began, or the end came; to hold it and to go on are no new beginning. `why` and
    `evidence` say what the last change was concluded from, `by` who made it: a sidecar, or an operator.
    """

    id: str
    version: str
    plan: Plan
    step: int = 0
    phase: Phase = "running"
    since_us: int = 0
    why: str = ""
    evidence: str = ""
    by: str = ""

    @property
    def live(self) -> bool:
        """Whether it has not ended."""
        return self.phase in ("running", "held")


class Decay(msgspec.Struct, frozen=True):
    """A zone that is turned down: its endpoints get `share` (0-1) of what they would. `since_us`: since when.

    `times`: how often in a row, at 1 for the first time. `usual_s`: what its first tokens usually took, 0: not known.
    With a share of 1 it is back, and remembered for a while.
    """

    share: float
    since_us: int
    why: str = ""
    times: int = 1
    usual_s: float = 0.0


class Stepped(msgspec.Struct, frozen=True, array_like=True):
    """A step of a model update that is over: `result` is `done` or `failed`, `place` the endpoint (empty: none of its
    own)."""

    step: str
    place: str
    result: str
    took_s: float
    detail: str = ""


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model update under way, or the last one (`core.hot_update`): what is loaded or unloaded how, by whom, on which
    sidecar (`on`), and how far it is.

    `until_us`: by then another word of it is due while `phase` is one of those under way; who has nothing written by
    then was interrupted. `why`: why it did not end as asked. `version`: of the routing table, where it is about one.
    """

    id: str
    action: str
    kind: str
    model: str
    by: str
    on: str
    since_us: int
    step: str
    step_us: int
    until_us: int
    place: str = ""
    phase: str = "running"
    why: str = ""
    version: str = ""
    steps: tuple[Stepped, ...] = ()


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """An update that was taken: its id, a digest of what it said, and the table's version that it made (0: the first
    of this register)."""

    id: str
    digest: bytes
    version: int


class Table(msgspec.Struct, frozen=True, omit_defaults=True):
    """All of it. `models`: globs, of a service that no policy file names; empty: the service's own name.

    `versions` empty: nobody updated it (a zone was turned down), and the policy's file alone says them. `update`: the
    last model update. `salt_generation` grows when no prefix cache of before may serve any more (docs/hot-update.md).
    """

    service: Name
    versions: Annotated[tuple[Version, ...], Meta(max_length=MAX_VERSIONS)] = ()
    models: Globs = ()
    zones: dict[str, Decay] = {}
    rollout: Rollout | None = None
    seen: tuple[Seen, ...] = ()
    update: Progress | None = None
    salt_generation: int = 0

    def version(self, name: str) -> Version | None:
        """The version of this name."""
        for version in self.versions:
            if version.name == name:
                return version
        return None

    @property
    def weights(self) -> dict[str, int]:
        """Parts by version, those without traffic too."""
        return {version.name: version.weight for version in self.versions}


class BadTable(ValueError):
    """Bytes that are no table, or one of a schema that is not known; says which."""


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Table)


def encode(table: Table) -> bytes:
    """A table as a record's blob."""
    return bytes((SCHEMA,)) + zlib.compress(_encoder.encode(table), _LEVEL)


def decode(blob: bytes, most: int = _MOST_BYTES) -> Table:
    """A table from a record's blob. BadTable for all that is none, none of this schema, or more than `most` bytes."""
    if not blob or blob[0] != SCHEMA:
        raise BadTable(f"schema {blob[0]} of a routing table is not known here" if blob else "an empty routing table")
    try:
        inflating = zlib.decompressobj()
        plain = inflating.decompress(memoryview(blob)[1:], most)
        if not inflating.eof or inflating.unused_data:
            raise BadTable(f"no routing table: more than {most} bytes of it, or not whole")
        table = _decoder.decode(plain)
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise BadTable(f"no routing table: {exc}") from exc
    if any(not 0 <= version.weight <= PARTS for version in table.versions):
        raise BadTable("no routing table: a weight in it is none")
    if table.versions and not any(version.weight for version in table.versions):
        raise BadTable("no routing table: nobody would get the traffic")
    return table


def table_version(epoch: int, version: int) -> int:
    """A register's (epoch, version) as one number that only grows: a double, and so JSON, holds it exactly.

    A register would need a million changes a second for an epoch's numbers to reach the next one's.
    """
    return (epoch << 20) + version


def started(policy: Service) -> Table:
    """The table of a service before anybody updated it: what its policy file says, in parts."""
    names = list(dict.fromkeys(endpoint.version for endpoint in policy.endpoints))
    if policy.split:
        names += [name for name in policy.split if name not in names]
        shares = {name: float(policy.split.get(name, 0.0)) for name in names}
    else:
        # Without a split any endpoint serves: a version's share is how many it has.
        shares = {name: float(sum(e.version == name for e in policy.endpoints)) for name in names}
    parts = parts_of(shares)
    of = {endpoint.version: endpoint for endpoint in policy.endpoints}
    return Table(policy.name, tuple(_version_of(name, parts[name], of.get(name)) for name in names))


def _version_of(name: str, part: int, endpoint: Endpoint | None) -> Version:
    if endpoint is None:
        return Version(name, part)
    return Version(
        name,
        part,
        endpoint.engine,
        front=endpoint.front,
        engine_model=endpoint.engine_model,
        chat_template=endpoint.chat_template,
    )


def parts_of(shares: dict[str, float]) -> dict[str, int]:
    """Shares (any positive sum) as parts that sum to `PARTS`: rounded down, the largest rests rounded up; all 0 where
    the sum is 0. What has a share keeps at least one part."""
    total = sum(shares.values())
    if total <= 0:
        return dict.fromkeys(shares, 0)
    exact = {name: share / total * PARTS for name, share in shares.items()}
    parts = {name: max(1, int(value)) if shares[name] > 0 else 0 for name, value in exact.items()}
    left = PARTS - sum(parts.values())
    by_rest = sorted(exact, key=lambda name: (parts[name] - exact[name], name))
    while left > 0:
        for name in by_rest:
            if left and exact[name] > 0:
                parts[name] += 1
                left -= 1
    while left < 0:  # the least parts were rounded up: the largest give
        largest = max(parts, key=lambda name: (parts[name], name))
        parts[largest] -= 1
        left += 1
    return parts


def weighed(table: Table, name: str, weight: int) -> Table | None:
    """`table` with `weight` parts for one of its versions, and the rest for the others in the proportions they had.

    None where the rest would go to nobody: no other version has a weight.
    """
    others = {version.name: float(version.weight) for version in table.versions if version.name != name}
    rest = sum(others.values())
    if rest <= 0 and weight < PARTS:
        return None
    scaled = {other: share / rest * (PARTS - weight) if rest else 0.0 for other, share in others.items()}
    parts = parts_of({**scaled, name: float(weight)})
    return replace(table, versions=tuple(replace(each, weight=parts[each.name]) for each in table.versions))


def effective(policy: Service, table: Table) -> Service:
    """The policy's service as the table has it: its endpoints beside the table's, its rules, the table's weights.

    An endpoint that both name is the table's (version, engine, zone), with the rest as the policy has it. How it is
    spoken to is the table's, too, unless that names the same engine and nothing more: so it is with tables of releases
    that knew of no fronts. A table without versions leaves the policy as it is.
    """
    if not table.versions:
        return policy
    fixed = {endpoint_key(endpoint.url): endpoint for endpoint in policy.endpoints}
    for version in table.versions:
        for target in version.endpoints:
            key = endpoint_key(target.url)
            known = fixed.get(key) or Endpoint(url=target.url)
            says: Version | Endpoint = version
            if version.engine == known.engine and not (version.front or version.engine_model or version.chat_template):
                says = known
            fixed[key] = replace(
                known,
                engine=version.engine,
                front=says.front,
                engine_model=says.engine_model,
                chat_template=says.chat_template,
                version=version.name,
                zone=target.zone or known.zone,
                node=target.node or known.node,
            )
    endpoints = tuple(fixed.values())
    return replace(policy, endpoints=endpoints, split=_split(policy, endpoints, table))


def reweighed(policy: Service, service: Service, before: Table, table: Table) -> Service | None:
    """`service`, which is what `before` makes of `policy`, as `table` has it; None where more than weights differ.

    Its endpoints stay the same object: who compares them need not go through thousands.
    """
    if not table.versions or [_stands(each) for each in before.versions if each.endpoints] != [
        _stands(each) for each in table.versions if each.endpoints
    ]:
        return None
    return replace(service, split=_split(policy, service.endpoints, table))


def strangers(service: Service, table: Table) -> list[str]:
    """Versions that serve though the table does not name them: nobody else is there. `service` is as it has it."""
    return [name for name, part in service.split.items() if part and table.versions and table.version(name) is None]


def _stands(version: Version) -> tuple[str, str, str, str, str, tuple[Target, ...]]:
    front, model, template = version.front, version.engine_model, version.chat_template
    return version.name, version.engine, front, model, template, version.endpoints


def _split(policy: Service, endpoints: tuple[Endpoint, ...], table: Table) -> dict[str, float]:
    parts = {version.name: float(version.weight) for version in table.versions}
    if any(version.weight and version.endpoints for version in table.versions):
        return parts
    here = {endpoint.version for endpoint in endpoints}
    if any(part and name in here for name, part in parts.items()):
        return parts
    files = started(policy).weights
    others = {name: float(files[name]) for name in files if name in here and name not in parts and files[name]}
    return {**dict.fromkeys(parts, 0.0), **others} if others else parts
