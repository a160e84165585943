"""Zones on this sidecar: hears what all sidecars saw of them, and turns them down and up again. Nobody leads.

```
the request path counts first tokens by zone -> a summary into the log's evidence, everybody's -> `core.zone` concludes
-> the service's routing table, by compare-and-set -> every sidecar's endpoints and every Envoy's have the zone's share
```

Whoever concludes first writes; what the others concluded was about a table that is no more. A sidecar that has just
begun knows of no zone what is usual for it, and leaves the judging to those that do. One whose policy turns no zone
down obeys that at once on its own; what the table says it undoes when for `UNMINDED_S` nobody told of the zones any
more. Others' files may ask for it, and two sidecars that undo each other would do so for ever.

Once a second it looks as well whose versions have nobody left who may serve, and says so (`core.down`).
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from sidecar.core.desk import Notice, TableView
from sidecar.core.down import Downs
from sidecar.core.fleet import Fleet
from sidecar.core.revise import Accepted, Refused
from sidecar.core.service import ServiceState
from sidecar.core.table import Decay, Table
from sidecar.core.zone import Turn, ZoneWatch, turned
from sidecar.kernel.ids import ServiceName
from sidecar.txlog.summary import Summary

TICK_S: Final = 1.0
UNMINDED_S: Final = 60.0
"""Whoever judges zones tells of them each second in which it has traffic."""


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class Change(Protocol):
    """`Routes.change`: writes what `revise` makes of the table that stands, if it still stands then."""

    def __call__(
        self,
        service: str,
        revise: Callable[[Table], Table | Refused],
        by: str,
        why: str,
        evidence: str = "",
        *,
        begin: bool = False,
    ) -> Awaitable[Accepted | Refused]: ...


class Zones:
    """All services' zones. `clock` gives monotonic seconds, `server_us` the log server's microseconds at one."""

    def __init__(
        self,
        fleet: Fleet,
        standing: Callable[[str], TableView | None],
        change: Change,
        notice: Callable[[Notice], None],
        *,
        clock: Callable[[], float],
        server_us: Callable[[float], int],
        say: Say,
    ) -> None:
        self._fleet = fleet
        self._standing = standing
        self._change = change
        self._notice = notice
        self._clock = clock
        self._server_us = server_us
        self._say = say
        self._watches: dict[str, ZoneWatch] = {}
        self._downs: dict[str, Downs] = {}
        self._minded: dict[str, float] = {}
        """When somebody last told of a service's zones; at first, when we began to listen."""
        self.turns: dict[str, int] = {}
        """Changes that this sidecar wrote, by why."""

    async def run(self) -> None:
        """Look once a second, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                await self.tick()
            except Exception as exc:  # noqa: BLE001 - a second's judgement is lost, and the next one's is as good
                self._say("error", "zones_crashed", exc_info=exc)

    def heard(self, seen: Summary, at_ms: int) -> None:
        """A summary was read from the log, by whichever sidecar; `at_ms` is the server's time of it."""
        if not seen.zones:
            return
        service = self._fleet.services.get(ServiceName(seen.service))
        if service is None:
            return
        self._minded[service.name] = self._clock()
        if service.zone_seen is None:
            return
        watch = self.watch(service)
        for zone, told in seen.zones.items():
            watch.heard(1000 * at_ms, zone, told)

    def watch(self, service: ServiceState) -> ZoneWatch:
        """What is known of a service's zones here."""
        watch = self._watches.get(service.name)
        if watch is None:
            watch = self._watches[service.name] = ZoneWatch()
        return watch

    async def tick(self) -> None:
        """Conclude what may be concluded, of each service at most one thing; cancelled, it may or may not be done."""
        now = self._clock()
        services = list(self._fleet.services.values())
        for name in self._watches.keys() - {service.name for service in services if service.zone_seen is not None}:
            del self._watches[name]
        for name in self._minded.keys() - {service.name for service in services}:
            del self._minded[name]
        self._downs = {service.name: self._downs.get(service.name) or Downs() for service in services if service.split}
        for service in services:
            downs = self._downs.get(service.name)
            for told in () if downs is None else downs.look(service, now):
                self._notice(Notice(service.name, told.kind, told.text))
        for service in services:
            if service.zone_seen is not None or service.zone_shares:
                await self._judge(service)

    async def _judge(self, service: ServiceState) -> None:
        name = service.name
        if service.zone_seen is None and self._clock() - self._minded.setdefault(name, self._clock()) < UNMINDED_S:
            return
        watch = self.watch(service) if service.zone_seen is not None else ZoneWatch()
        view = self._standing(name)
        decays: dict[str, Decay] = {} if view is None else view.table.zones
        now = self._clock()
        now_us = self._server_us(now)
        turn = watch.conclude(service.policy.zone_decay, service.ready_zones(now), decays, now_us)
        if turn is None:
            return
        concluded: Turn = turn

        def revise(table: Table) -> Table | Refused:
            made = turned(table, concluded, now_us)
            return Refused("stale", f"zone {concluded.zone} has been changed") if made is None else made

        evidence = f"zone {turn.zone}: {turn.evidence}"
        answer = await self._change(name, revise, "", turn.why, evidence, begin=True)
        if isinstance(answer, Refused):
            self._minded[name] = self._clock()  # with the log away nobody is heard
        else:
            self.turns[turn.why] = self.turns.get(turn.why, 0) + 1
            level = "warning" if turn.why == "zone_slow" else "info"
            self._say(level, turn.why, service=name, zone=turn.zone, share=turn.share, evidence=turn.evidence)
