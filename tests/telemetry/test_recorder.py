"""What the request path tells reaches metrics and log, and neither can be flooded."""

import json

import pytest

from sidecar.core.breaker import Breaker, Scope, State
from sidecar.core.poison import Condemned
from sidecar.core.pool import Node
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import EndpointKey, ServiceName
from sidecar.policy.schema import Endpoint, NodeBreaker
from sidecar.proxy.ports import Recorder
from sidecar.telemetry.logs import Logs
from sidecar.telemetry.metrics import Metrics
from sidecar.telemetry.recorder import MAX_QUIET, QUIET_S, TelemetryRecorder
from sidecar.telemetry.writer import LineWriter
from tests.telemetry.records import NODE, attempt, request, total, transition


class Lines(LineWriter):
    """Keeps lines instead of writing them."""

    def __init__(self) -> None:
        super().__init__(-1)
        self.lines: list[dict[str, object]] = []

    def put(self, line: bytes) -> None:
        self.lines.append(json.loads(line))


class Bench:
    """A recorder over real metrics and a log that is kept, with a clock to turn."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self.lines = Lines()
        self.metrics = Metrics()
        self.recorder: Recorder = TelemetryRecorder(self.metrics, Logs(self.lines, self.wall), self.wall)

    def wall(self) -> float:
        return self.now


async def test_request_is_counted_and_logged() -> None:
    bench = Bench()
    bench.recorder.request(request())
    assert await total(bench.metrics, "sidecar_requests_total") == 1
    assert [line["event"] for line in bench.lines.lines] == ["request"]


def test_a_condemned_prompt_is_an_event_that_says_nothing_of_it() -> None:
    bench = Bench()
    bench.recorder.condemned(Condemned("chat", "00ff00ff", (NODE, EndpointKey("b:80")), 300.0, "shadow"))
    (line,) = bench.lines.lines
    assert (line["event"], line["level"]) == ("poison", "warning")
    assert (line["service"], line["mark"], line["mode"], line["ttl_s"]) == ("chat", "00ff00ff", "shadow", 300.0)
    assert line["endpoints"] == [NODE, "b:80"]


def test_an_engine_that_refuses_canaries_is_an_event() -> None:
    bench = Bench()
    recorder = TelemetryRecorder(bench.metrics, Logs(bench.lines, bench.wall), bench.wall)
    breaker = Breaker(Scope.NODE, NODE, "chat", NodeBreaker(), 0.0, lease_s=1.0)
    node = Node(NODE, ServiceName("chat"), Endpoint(url="http://a:80"), breaker, {})
    recorder.canary_refused(node, "401 Unauthorized")
    (line,) = bench.lines.lines
    assert (line["event"], line["level"], line["endpoint"]) == ("health_canary_refused", "warning", NODE)
    assert (line["service"], line["error"]) == ("chat", "401 Unauthorized")


async def test_attempt_is_counted_and_not_logged() -> None:
    bench = Bench()
    bench.recorder.attempt(attempt())
    assert await total(bench.metrics, "sidecar_attempts_total") == 1
    assert bench.lines.lines == []


@pytest.mark.parametrize(
    ("old", "new", "level"),
    [
        pytest.param(State.CLOSED, State.OPEN, "warning", id="opens"),
        pytest.param(State.HALF_OPEN, State.OPEN, "warning", id="reopens"),
        pytest.param(State.OPEN, State.HALF_OPEN, "info", id="half-opens"),
        pytest.param(State.HALF_OPEN, State.CLOSED, "info", id="closes"),
    ],
)
@pytest.mark.parametrize("scope", list(Scope))
async def test_transition_is_counted_and_logged_with_its_evidence(
    scope: Scope, old: State, new: State, level: str
) -> None:
    bench = Bench()
    bench.recorder.transition(transition(scope, key="k", old=old, new=new))
    assert await total(bench.metrics, "sidecar_breaker_transitions_total", old=old.value, new=new.value) == 1
    (line,) = bench.lines.lines
    assert line["level"] == level
    wanted = {
        "event": "breaker",
        "scope": scope.value,
        "key": "k",
        "service": "chat",
        "old": old.value,
        "new": new.value,
        "why": "consecutive",
        "evidence": "5 failures in a row",
        "generation": 1,
    }
    assert line.items() >= wanted.items()


async def test_garbage_from_clients_does_not_fill_the_log() -> None:
    bench = Bench()
    for _ in range(100):
        bench.recorder.refused(Reason.BAD_REQUEST)
    assert await total(bench.metrics, "sidecar_refused_heads_total", reason="bad_request") == 100
    assert bench.lines.lines == []


async def test_broken_engine_is_logged_now_and_then() -> None:
    bench = Bench()
    other = EndpointKey("10.0.0.2:8000")
    for _ in range(100):
        bench.recorder.malformed_upstream(NODE)
    bench.recorder.malformed_upstream(other)
    assert [line["endpoint"] for line in bench.lines.lines] == [NODE, other]
    bench.now += QUIET_S
    bench.recorder.malformed_upstream(NODE)
    assert [line["endpoint"] for line in bench.lines.lines] == [NODE, other, NODE]
    assert await total(bench.metrics, "sidecar_malformed_upstream_total") == 102


def test_endpoints_that_come_and_go_leave_nothing_behind() -> None:
    bench = Bench()
    for number in range(3 * MAX_QUIET):
        bench.recorder.malformed_upstream(EndpointKey(f"h{number}:1"))
    assert isinstance(bench.recorder, TelemetryRecorder)
    assert bench.recorder.quiet <= MAX_QUIET
