"""What the admin pages need to know and may set going; `main` implements it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

import msgspec

from sidecar.core.breaker import Action, Scope
from sidecar.core.desk import Desk
from sidecar.core.fleet import Fleet
from sidecar.core.hot_plan import Updates
from sidecar.core.quotas.quota import Ledger
from sidecar.policy.store import PolicyStore


class Phase(StrEnum):
    """Where the process is in its life. Only SERVING can be ready."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """One record of the log, as operators see it.

    `id` is unique in the log. `ts_us` and `expires_us` (0: never) are the server's clock, microseconds since the epoch.
    `key` is the register's (`node:chat/127.0.0.1:8000`); scope (or `route`), service and name are its parts. `kind` is
    `transition`, `override`, `suspect` or `route`; `state` that of the register after it. `by` is the sidecar that said
    so, of an order the operator. `tx` is the record's own id, `trace` that of the request that caused it (empty: none),
    both in hex. `held`: nothing but the next order, or `expires_us`, moves it. `wait_s` is how long an open breaker
    waits.
    """

    id: str
    ts_us: int
    key: str
    scope: str
    service: str
    name: str
    kind: str
    state: str
    epoch: int
    version: int
    why: str = ""
    evidence: str = ""
    by: str = ""
    tx: str = ""
    trace: str = ""
    held: bool = False
    expires_us: int = 0
    wait_s: float = 0.0


class LogView(msgspec.Struct, frozen=True):
    """How it stands with the log.

    `state`: `starting`, `up`, `away` (the server does not answer: local state decides) or `local` (there is none).
    `since` is when that began, Unix seconds. `last_error` is empty if there never was one. `lag_records` is how many
    records are known to be written and not read yet; `ring` how many of our own wait to be written, `dropped` how many
    of those fell out. `members` is how many sidecars live; `position` how far the log was read.
    """

    state: str
    since: float
    last_error: str = ""
    lag_records: int = 0
    ring: int = 0
    dropped: int = 0
    members: int = 0
    position: str = ""


class ControlView(msgspec.Struct, frozen=True):
    """A port at which release tools or Envoys are served: its address, and how many are connected now."""

    address: str
    streams: int


class LogAway(Exception):
    """The log's server does not answer, in words for an operator."""


class Subscription(Protocol):
    """One reader's live records, in a bounded queue: what it does not take in time falls out, the oldest first."""

    async def next(self) -> list[LogRecord]:
        """All that came since the last call, oldest first; waits for the first. Cancelled, it has taken nothing."""

    @property
    def lost(self) -> int:
        """How many records fell out so far."""

    def close(self) -> None:
        """Let go of the queue; again is harmless. Nobody waits in `next` then."""


class Recording(Protocol):
    """A span of the log, read as it is asked for."""

    async def next(self) -> list[bytes]:
        """Its next lines of JSON, each with its end; none: that was all. LogAway if they cannot be had."""


class LogFacts(Protocol):
    """The log, as far as operators look into it."""

    def view(self) -> LogView:
        """How it stands, from memory."""

    async def history(self, key: str | None, since_us: int | None, limit: int) -> list[LogRecord]:
        """The newest `limit` records of one register (None: of all) since then (None: ever), oldest first.

        LogAway if they cannot be had; in its own time, the caller sets no deadline. ValueError if `key` is none.
        """

    def subscribe(self) -> Subscription:
        """What is told from now on."""

    def record(self, since_us: int, until_us: int, service: str) -> Recording:
        """What was seen and what moved between two moments, of one service ("": of all), in order of time."""


class KeysView(Protocol):
    """One issuer's keys, which tokens are held against. `keys`: how many; `stale_s`: since they cannot be read any
    more, -1.0: they can. `why`: what the last attempt failed for."""

    @property
    def issuer(self) -> str: ...

    @property
    def keys(self) -> int: ...

    @property
    def stale_s(self) -> float: ...

    @property
    def why(self) -> str: ...


class Facts(Protocol):
    """Read at every request, on the loop; nothing here may wait, except the metrics and the log's history."""

    @property
    def fleet(self) -> Fleet: ...

    @property
    def store(self) -> PolicyStore: ...

    @property
    def log(self) -> LogFacts | None:
        """None: no log is kept."""

    @property
    def routes(self) -> Desk | None:
        """The routing tables; None: there is no log to keep them in."""

    @property
    def models(self) -> Updates | None:
        """The model updates; None: this sidecar relays nothing."""

    @property
    def ledger(self) -> Ledger | None:
        """The token budgets; None: this sidecar relays nothing."""

    @property
    def keys(self) -> Sequence[KeysView]:
        """The keys of each issuer of tokens; none: no token is verified here."""

    def why_not_counted(self, service: str) -> str:
        """Why prompts of a service that has a tokenizer are estimated; empty: they are counted."""

    @property
    def control(self) -> ControlView | None:
        """The descriptor stream's port; None: it is off."""

    @property
    def xds(self) -> ControlView | None:
        """The xDS server's port; None: it is off."""

    @property
    def phase(self) -> Phase: ...

    def now(self) -> float:
        """Monotonic seconds, the clock of the fleet."""

    def wall(self) -> float:
        """Unix seconds."""

    def override(self, scope: Scope, key: str, action: Action, by: str, for_s: float) -> bool:
        """Obey an operator here, and tell all sidecars, also where it changed no state; False: nobody knows `key`.

        `for_s` is how long the order stands, infinity: until the next.
        """

    def updated(self, result: str) -> None:
        """Count what became of an update that was asked here: `accepted`, `repeated`, or why it was refused."""

    def drain(self) -> None:
        """Begin to drain; again is harmless."""

    @property
    def live(self) -> int:
        """Requests under way."""

    @property
    def drained(self) -> bool:
        """Whether it drains, takes nobody in any more, and the last reply has ended."""

    async def exposition(self) -> tuple[bytes, str]:
        """The metrics and their content type."""
