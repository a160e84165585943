"""The routing tables as release tools, operators and Envoys ask for them: what `sidecar.routes` does, as a port.

One way in for all who change a table (the descriptor stream, the admin port, the xDS server, the analysis): what is
asked is held against the rules, written to the log under the version it was made for, and answered once it stands
there. One way out: a snapshot, and every change after it, whoever made it.
"""

from typing import Literal, Protocol

import msgspec
from msgspec.structs import replace

from sidecar.core.revise import Accepted, Refused, Update
from sidecar.core.table import Table
from sidecar.policy.schema import Service

Action = Literal["promote", "promote_full", "abort", "hold", "resume"]
"""What an operator says of a rollout: `promote` moves to the next step, `promote_full` to the whole weight, `abort`
takes the canary's weight away, `hold` leaves it where it is until `resume`."""


class TableView(msgspec.Struct, frozen=True):
    """A service's table as it stands. `version`: `table.table_version`; `at_us`: when, by the log server's clock; `by`
    who wrote it, `why` in a word (`update`, `promote`, `failed`, `zone`, `restored`, ...), `evidence` in a sentence."""

    table: Table
    version: int
    at_us: int
    by: str
    why: str
    evidence: str = ""


class Notice(msgspec.Struct, frozen=True):
    """Something that subscribers should know and that is no change of a table: `kind` is `xds_nack`,
    `xds_left_out`, `version_down`, `version_back` or `rollout_unclear`."""

    service: str
    kind: str
    text: str


Event = TableView | Notice


def outline(view: TableView) -> TableView:
    """The same without the endpoints, which may be thousands."""
    versions = tuple(replace(version, endpoints=()) for version in view.table.versions)
    return replace(view, table=replace(view.table, versions=versions))


class Feed(Protocol):
    """One subscriber's events, in a bounded queue."""

    async def next(self) -> list[Event]:
        """All that came since the last call, oldest first; waits for the first. Cancelled, it has taken nothing."""

    @property
    def lagged(self) -> bool:
        """Whether events fell out because nobody took them: read the snapshot anew (that clears it)."""

    def close(self) -> None:
        """Nothing more is wanted; again is harmless."""


class Desk(Protocol):
    """What may be asked of the routing tables. Not for more than one thread."""

    def tables(self) -> list[TableView]:
        """Every table that stands in the log, by service; services that only policy files name have none.

        Of a thousand services with a thousand endpoints each it takes half a second in which nothing else runs: who
        needs no endpoints takes `outlines`, who needs few tables `standing`.
        """

    def outlines(self) -> list[TableView]:
        """As `tables`, each as `outline` has it: what is at hand, nothing is read for it."""

    def standing(self, service: str) -> TableView | None:
        """A service's table as it stands; None where it has none."""

    def effective(self) -> list[Service]:
        """Every service as this sidecar routes it: the files' policy with the table over it."""

    async def submit(self, update: Update) -> Accepted | Refused:
        """Do what an update asks. Never raises; cancelled, it may or may not have been done."""

    async def order(self, service: str, action: Action, by: str) -> Accepted | Refused:
        """Obey an operator about a service's rollout; as `submit`."""

    async def restore(self, service: str, table: Table, by: str, why: str, over: int = 0) -> Accepted | Refused:
        """Put a table back as it was, without its seen updates being lost; as `submit`. `over`: the version
        that it is put over, and no other (`stale`); 0: any."""

    def subscribe(self) -> Feed:
        """All events from now on: first take `tables()`, in the same turn of the loop."""

    def notice(self, notice: Notice) -> None:
        """Tell this sidecar's subscribers, and its log."""
