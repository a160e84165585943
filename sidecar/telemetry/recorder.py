"""What the request path tells the world, as metrics and log lines."""

from collections.abc import Callable
from typing import Final

from sidecar.core.breaker import State, Transition
from sidecar.core.poison import Condemned
from sidecar.core.pool import Node
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey
from sidecar.kernel.outcome import Ending, Result
from sidecar.proxy.ports import AttemptRecord, RequestRecord
from sidecar.telemetry.logs import Logs
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.render import Wall

QUIET_S: Final = 10.0
"""An endpoint's broken bytes are logged once per this long; the metric counts all."""

MAX_QUIET: Final = 1000
"""Endpoints whose last line is remembered; beyond, all are forgotten and may be logged again."""


class TelemetryRecorder:
    """`proxy.ports.Recorder` over metrics and logs. `wall`: Unix seconds. `share` takes transitions for the others."""

    __slots__ = ("_logs", "_metrics", "_quiet_until", "_share", "_wall")

    def __init__(
        self, metrics: Metrics, logs: Logs, wall: Wall, share: Callable[[Transition, str], None] | None = None
    ) -> None:
        self._metrics = metrics
        self._logs = logs
        self._wall = wall
        self._share = share
        self._quiet_until: dict[EndpointKey, float] = {}

    def attempt(self, record: AttemptRecord) -> None:
        """Metrics only: the request's line tells how many attempts it took."""
        self._metrics.attempt(record)

    def canary(self, node: Node, ending: Ending, result: Result) -> None:
        """Metrics only: it is nobody's request, and a breaker that it moves has its event."""
        self._metrics.canary(node.service, node.version, node.key, ending, result)

    def canary_refused(self, node: Node, said: str) -> None:
        """An event: a warning."""
        self._logs.event.warning("health_canary_refused", service=node.service, endpoint=node.key, error=said)

    def request(self, record: RequestRecord) -> None:
        """Metrics and the canonical line."""
        self._metrics.request(record)
        self._logs.request(record)

    def transition(self, transition: Transition, trace: str = "") -> None:
        """Metrics and an event: a warning when a breaker opens; and the transaction log."""
        self._metrics.transition(transition)
        if self._share is not None:
            self._share(transition, trace)
        log = self._logs.event.warning if transition.new is State.OPEN else self._logs.event.info
        log(
            "breaker",
            scope=transition.scope.value,
            key=transition.key,
            service=transition.service,
            old=transition.old.value,
            new=transition.new.value,
            why=transition.why,
            evidence=transition.evidence,
            generation=transition.generation,
            agreed=transition.agreed,
        )

    def condemned(self, prompt: Condemned) -> None:
        """An event: a warning, with the mark of the prompt and nothing that could be read."""
        self._logs.event.warning(
            "poison",
            service=prompt.service,
            mark=prompt.mark,
            endpoints=list(prompt.endpoints),
            ttl_s=prompt.ttl_s,
            mode=prompt.mode,
        )

    def refused(self, reason: Reason) -> None:
        """Metrics only: whoever sends garbage must not be able to fill the log."""
        self._metrics.refused(reason)

    @property
    def quiet(self) -> int:
        """How many endpoints are remembered to have been logged."""
        return len(self._quiet_until)

    def malformed_upstream(self, endpoint: EndpointKey) -> None:
        """Metrics, and an event now and then."""
        self._metrics.malformed_upstream(endpoint)
        now = self._wall()
        if now >= self._quiet_until.get(endpoint, now):
            if len(self._quiet_until) >= MAX_QUIET:
                self._quiet_until.clear()
            self._quiet_until[endpoint] = now + QUIET_S
            self._logs.event.warning("malformed_upstream", endpoint=endpoint)
