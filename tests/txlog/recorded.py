"""Recordings for replays: written by hand, and by the product's own pipeline in the simulated world."""

from collections.abc import Mapping, Sequence
from typing import Any

from sidecar.core.breaker import Scope, State, Transition
from sidecar.core.detection import Counts
from sidecar.core.poison import Condemned
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import DOCTRINE, Ending
from sidecar.policy.schema import Service
from sidecar.proxy.ports import AttemptRecord, Recorder, RequestRecord
from sidecar.simulate.fault import Fault
from sidecar.simulate.method import Context
from sidecar.simulate.product import Product
from sidecar.simulate.run import Scenario, simulate
from sidecar.simulate.workload import Modifier
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.tally import Tally
from sidecar.txlog import codec
from sidecar.txlog.codec import Code, Kind, Record
from sidecar.txlog.recording import Line, Moved, moved_of, seen_of
from sidecar.txlog.summary import EndpointSummary, Summary, Teller, decode

START_S = 1_764_470_000.0
"""When recordings begin: 2025-11-30, 02:33:20 UTC."""

CODES = {State.CLOSED: Code.CLOSED, State.HALF_OPEN: Code.HALF_OPEN, State.OPEN: Code.OPEN}


def at_ms(second: float) -> int:
    return round(1000 * (START_S + second))


class Hand:
    """A recording of one service, written second by second."""

    def __init__(self, observer: str = "pod-a", service: str = "chat") -> None:
        self.observer = observer
        self.service = service
        self.lines: list[Line] = []
        self._seq = 1000
        self._versions: dict[str, int] = {}

    def second(
        self,
        second: float,
        ended: Mapping[str, Mapping[Ending, int]],
        counts: Sequence[Counts] = (),
        **changes: Any,
    ) -> None:
        """What ended in the second that is over at `second`."""
        saw = {each.endpoint: each for each in counts}
        self._seq += 1
        endpoints = [
            EndpointSummary(
                EndpointKey(key),
                "v1",
                {(ending, DOCTRINE[ending].node): number for ending, number in of.items()},
                counts=saw.get(EndpointKey(key)),
            )
            for key, of in ended.items()
        ]
        told = Summary(self.observer, self._seq, self.service, 1000, tuple(endpoints), **changes)
        self.lines.append(seen_of(told, at_ms(second)))

    def moved(self, second: float, name: str, state: str, why: str = "", **changes: Any) -> None:
        version = self._versions[name] = self._versions.get(name, 0) + 1
        line = {"scope": "node", "kind": "transition", "by": self.observer, **changes}
        self.lines.append(Moved(at_ms(second), service=self.service, name=name, state=state, epoch=1,
                                version=version, why=why, **line))  # fmt: skip


def in_order(*recordings: Sequence[Line]) -> list[Line]:
    """Several recordings as one."""
    return sorted((line for lines in recordings for line in lines), key=lambda line: getattr(line, "at_ms", 0))


class Ear:
    """`proxy.ports.Recorder`: the simulation's own, the metrics, and every transition as a record of the log."""

    def __init__(self, inner: Recorder, metrics: Metrics, lines: list[Line], observer: str) -> None:
        self._inner = inner
        self._metrics = metrics
        self._lines = lines
        self._observer = observer

    def attempt(self, record: AttemptRecord) -> None:
        self._inner.attempt(record)
        self._metrics.attempt(record)

    def request(self, record: RequestRecord) -> None:
        self._inner.request(record)

    def transition(self, transition: Transition, trace: str = "") -> None:
        self._inner.transition(transition, trace)
        record = Record(
            kind=Kind.TRANSITION,
            state=CODES[transition.new],
            epoch=1,
            version=transition.generation,
            tx=bytes(16),
            key=codec.register_key(transition.scope, transition.service, transition.key),
            service=transition.service,
            by=self._observer,
            why=transition.why,
            evidence=transition.evidence,
        )
        line = moved_of(codec.decode(codec.encode(record)), at_ms(transition.at))
        assert line is not None
        self._lines.append(line)

    def condemned(self, prompt: Condemned) -> None:
        self._inner.condemned(prompt)

    def refused(self, reason: Reason) -> None:
        self._inner.refused(reason)

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        self._inner.malformed_upstream(endpoint)


class Recorded(Product):
    """A sidecar that tells its summaries each second, as a real one does."""

    def __init__(self, context: Context, policy: Service, lines: list[Line]) -> None:
        super().__init__(context, policy)
        metrics = Metrics()
        observer = f"pod-{context.number}"
        self.ear = Ear(self.pipeline.recorder, metrics, lines, observer)
        self.pipeline.recorder = self.ear
        self.lines = lines
        self.tally = Tally(metrics)
        self.teller = Teller(observer, at_ms(context.clock.now), context.clock.now)

    def tick(self, now: float) -> None:
        for moved in self._fleet.tick(now):
            self.ear.transition(moved)
        for share in self.teller.tell(self._fleet, self.tally.take(), now):
            self.lines.append(seen_of(decode(share.blob), at_ms(now)))


def simulated(
    policy: Service,
    faults: Sequence[Fault],
    *,
    modifiers: Sequence[Modifier] = (),
    seconds: float = 300.0,
    pods: int = 5,
    seed: int = 1,
    sidecars: int = 1,
) -> list[Line]:
    """What the product's pipeline would have recorded, faults coming at the clock's seconds (from 120)."""
    lines: list[Line] = []
    scenario = Scenario("recorded", lambda rng, count: list(faults), lambda rng: list(modifiers), seconds)
    simulate(lambda context: Recorded(context, policy, lines), scenario, seed, pods=pods, sidecars=sidecars)
    return in_order(lines)


def openings(lines: Sequence[Line]) -> list[tuple[str, float]]:
    """Which endpoints opened in the record, and at which second; re-openings after a failed probe are none."""
    found: list[tuple[str, float]] = []
    state: dict[str, str] = {}
    for line in lines:
        if isinstance(line, Moved) and line.scope == Scope.NODE:
            if line.state == "open" and state.get(line.name, "closed") == "closed":
                found.append((line.name, line.at_ms / 1000 - START_S))
            state[line.name] = line.state
    return found
