"""Updates of a routing table: what a release tool or an operator asks, held against the rules; pure.

The rules:

1. Weights. `weight` is the share of `version`, 0-1; the other versions keep their proportions in the rest. `weights`
   instead says the whole split at once, and sums to 1. Neither: the weights stay (a new version has 0), unless the
   version is the service's first, which gets all. A whole that would go to nobody is refused.
2. A version with a weight has an endpoint (its own, or its policy file's), and one that is new names its engine.
   `endpoints` None leaves them, a list replaces them; an empty one for a version with a weight is refused. An endpoint
   belongs to one version of a service. `front`, `engine_model` and `chat_template` are of all endpoints of the version,
   and go with its engine: another engine has none of them but those that are said with it. What a policy file
   says of an endpoint is not overruled by an update that names the endpoint and says none of them.
3. Versions that differ in their schema's hash get traffic together only if one names the other's as compatible. A
   version that says none says nothing.
4. A plan begins a rollout at its first step's weight. A version whose weight is said by hand, by whatever update, ends
   the rollout under way (`superseded`); an update that says no weight leaves it.
5. The same id twice is one update: what it made the first time is answered again. The same id for another update is
   refused. An id is remembered for the last `table.SEEN` updates of its service.
6. What is refused changes nothing, and says why in a code (of gRPC's) and in words for who wrote it.
"""

from typing import Literal

import msgspec

from sidecar.core.table import Plan, Table, Target

Code = Literal["invalid", "stale", "conflict", "unavailable", "denied", "not_found", "exhausted"]
"""Why an update was refused: it makes no sense; the table is not the expected one; it makes no sense with what is there
(schema hashes, the last endpoint, an id of another update); the log is away; the writer may not; no such service or
version; too many or too much."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What updates say since there are any: an update that says no more has one digest in all releases."""

    service: str
    version: str
    update_id: str = ""
    expected: int = 0
    weight: float | None = None
    weights: dict[str, float] = {}
    engine: str = ""
    endpoints: tuple[Target, ...] | None = None
    zone: str = ""
    schema_hash: str = ""
    compatible: tuple[str, ...] = ()
    signature: dict[str, str] = {}
    models: tuple[str, ...] = ()
    plan: Plan | None = None
    by: str = ""


class Update(Known, frozen=True, kw_only=True):
    """One update, as it was asked: of one version of one service.

    `expected`: the table's version (`table.table_version`) that it was made for; 0: any. `weight` None: not said.
    `by`: who asked. `models`: only for a service that no policy file names. `endpoints` None: unchanged; so are
    `front`, `engine_model` and `chat_template`, and empty ones are as in `table.Version`.
    """

    front: str | None = None
    engine_model: str | None = None
    chat_template: str | None = None


class Accepted(msgspec.Struct, frozen=True):
    """The update is in the log: the table and its version. `repeated`: it was there before."""

    table: Table
    version: int
    repeated: bool = False


class Refused(msgspec.Struct, frozen=True):
    """It changed nothing. `version`: the table's that stands (0: there is none)."""

    code: Code
    message: str
    version: int = 0
