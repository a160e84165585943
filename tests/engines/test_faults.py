"""Each engine is killed, frozen and told to end, in the middle of streams and while nobody asks it anything.

1. Every client learns the truth: its answer is whole, or it gets an error. None ends well that is not whole, and none
   waits longer than the deadlines say.
2. The breaker opens: by what clients met, or, without them, by `health_check: {mode: truth}`.
3. Once the engine is back, the breaker closes: by a client's request where clients opened it, without any client where
   nobody asked.

Health pages are asked beside it, from the engine itself: most of these faults leave them at 200.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from tests.engines.backend import MODEL, Backend, Name, policy, started
from tests.engines.client import answers, call
from tests.engines.deepspeed import DeepSpeed
from tests.engines.engine import Vllm, VllmKeeper
from tests.engines.figures import note
from tests.engines.load import Load, stream
from tests.engines.sidecar_process import Sidecar
from tests.engines.triton import Triton

pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]

FIRST_TOKEN_S = 4.0
GAP_S = 2.0
LATE_S = 2.0  # how much later than its deadline an end may be seen, with an engine that takes a core
STREAMS = 8
TOKENS = 60
FOUND_S = 20.0  # canary_interval + 2 first_token + 4 intervals, and as much again for a slow machine
CLOSED_S = 30.0

SETTINGS = """\
deadlines: {connect: 1s, head: 5s, first_token: 4s, token_gap: 2s, tool_gap: 2s, total: 3m, idle_client: 30s}
retry: {attempts: 1}
health_check: {mode: truth, interval: 250ms, timeout: 2s, stalled: 3s, canary_interval: 1s}
breakers:
  node: {mode: enforce, consecutive: 2, open: 1s, open_max: 2s, successes: 1, min_closed_ratio: 0, adaptive: false}
  session: {mode: "off"}
  request: {mode: "off"}
"""

ENGINES: tuple[Name, ...] = ("vllm", "toy", "deepspeed")
HEALTH: dict[Name, str] = {"vllm": "/health", "toy": f"/v2/models/{MODEL}/ready", "deepspeed": "/health"}


@dataclass(frozen=True)
class Fault:
    """What is done to an engine, and what brings it back."""

    name: str
    engine: Name
    inflict: Callable[[Backend], None]
    mend: Callable[[Backend], None]
    healthy: bool
    """Whether the health page goes on saying 200 under it."""


KILL, STOP, TERM, CONT = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT


def vllm_core(number: signal.Signals) -> Callable[[Backend], None]:
    def send(backend: Backend) -> None:
        assert isinstance(backend.engine, Vllm)
        os.kill(backend.engine.core_pid(), number)

    return send


def vllm_api(number: signal.Signals) -> Callable[[Backend], None]:
    def send(backend: Backend) -> None:
        assert isinstance(backend.engine, Vllm)
        backend.engine.signal_api(number)

    return send


def triton_server(number: signal.Signals) -> Callable[[Backend], None]:
    def send(backend: Backend) -> None:
        assert isinstance(backend.engine, Triton)
        backend.engine.signal_server(number)

    return send


def triton_stub(number: signal.Signals) -> Callable[[Backend], None]:
    def send(backend: Backend) -> None:
        assert isinstance(backend.engine, Triton)
        os.kill(backend.engine.stub_pid(MODEL), number)

    return send


def mii_engine(number: signal.Signals) -> Callable[[Backend], None]:
    def send(backend: Backend) -> None:
        assert isinstance(backend.engine, DeepSpeed)
        backend.engine.signal_servicer(number)

    return send


def mii_front(number: signal.Signals) -> Callable[[Backend], None]:
    def send(backend: Backend) -> None:
        assert isinstance(backend.engine, DeepSpeed)
        backend.engine.signal_front(number)

    return send


def mii_engine_again(backend: Backend) -> None:
    assert isinstance(backend.engine, DeepSpeed)
    backend.engine.restart_servicer()
    backend.engine.wait_ready()


def triton_model_thaws(backend: Backend) -> None:
    """Triton 2.51 may end by an assertion of its own seconds after a frozen process of its is back: then a new one."""
    triton_stub(CONT)(backend)
    survived = True
    give_up = time.monotonic() + 5
    while survived and time.monotonic() < give_up:
        time.sleep(0.2)
        survived = _healthy(backend)
    note("toy model-frozen: thawed again", server_survived=survived)
    if not survived:
        backend.restart()


FAULTS = (
    Fault("core-frozen", "vllm", vllm_core(STOP), vllm_core(CONT), healthy=True),
    Fault("api-frozen", "vllm", vllm_api(STOP), vllm_api(CONT), healthy=False),
    Fault("core-killed", "vllm", vllm_core(KILL), Backend.restart, healthy=False),
    Fault("told-to-end", "vllm", vllm_api(TERM), Backend.restart, healthy=False),
    Fault("server-frozen", "toy", triton_server(STOP), triton_server(CONT), healthy=False),
    Fault("model-frozen", "toy", triton_stub(STOP), triton_model_thaws, healthy=True),
    Fault("model-killed", "toy", triton_stub(KILL), Backend.restart, healthy=True),
    Fault("server-killed", "toy", triton_server(KILL), Backend.restart, healthy=False),
    Fault("told-to-end", "toy", triton_server(TERM), Backend.restart, healthy=False),
    Fault("engine-frozen", "deepspeed", mii_engine(STOP), mii_engine(CONT), healthy=True),
    Fault("engine-killed", "deepspeed", mii_engine(KILL), mii_engine_again, healthy=True),
    Fault("engine-told-to-end", "deepspeed", mii_engine(TERM), mii_engine_again, healthy=True),
    Fault("front-frozen", "deepspeed", mii_front(STOP), mii_front(CONT), healthy=False),
    Fault("front-killed", "deepspeed", mii_front(KILL), Backend.restart, healthy=False),
    Fault("front-told-to-end", "deepspeed", mii_front(TERM), Backend.restart, healthy=False),
)
IDLE = tuple(fault for fault in FAULTS if fault.healthy)
"""Without a client these are found by asking for a token alone."""


@pytest.fixture(scope="module", params=ENGINES)
def backend(
    request: pytest.FixtureRequest, vllm_keeper: VllmKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    with started(request.param, tmp_path_factory.mktemp(request.param), vllm_keeper) as running:
        yield running


@pytest.fixture
def sidecar(backend: Backend, tmp_path: Path) -> Iterator[Sidecar]:
    if not _healthy(backend):  # a test before this one failed
        backend.restart()
    running = Sidecar(tmp_path, policy([backend.endpoint], SETTINGS, MODEL))
    yield running
    running.stop()


def cases(faults: tuple[Fault, ...]) -> pytest.MarkDecorator:
    """Each fault with its engine, and with no other."""
    return pytest.mark.parametrize(
        ("backend", "fault"),
        [pytest.param(fault.engine, fault, id=f"{fault.engine}-{fault.name}") for fault in faults],
        indirect=["backend"],
        scope="module",
    )


@cases(FAULTS)
def test_in_the_middle_of_streams(backend: Backend, sidecar: Sidecar, fault: Fault) -> None:
    with Load(sidecar.address, STREAMS, TOKENS) as load:
        load.wait(whole=STREAMS)
        struck = time.monotonic()
        fault.inflict(backend)
        sidecar.wait_breaker("node", backend.address, "open", within_s=FOUND_S)
        opened_s = time.monotonic() - struck
        healthy = _healthy(backend)
    worst_s = max(end.ended - end.last for end in load.ends)
    assert all(end.told() for end in load.ends), load.ends
    lies = [end for end in load.ends if not (end.code or end.whole(TOKENS) or end.finish_reasons == ["abort"])]
    assert not lies, lies
    assert not all(end.whole(TOKENS) for end in load.ends)
    assert worst_s < FIRST_TOKEN_S + LATE_S
    if fault.healthy:
        assert healthy, "its health page is better than was thought"
    closed_s = _mended(backend, sidecar, fault, clients=True)
    note(
        f"{backend.name} {fault.name} under {STREAMS} streams",
        ends=load.codes(),
        opened_s=opened_s,
        worst_wait_s=worst_s,
        health_200=healthy,
        closed_s=closed_s,
    )


@cases(IDLE)
def test_while_nobody_asks(backend: Backend, sidecar: Sidecar, fault: Fault) -> None:
    time.sleep(2)  # some canaries' time: nothing is wrong yet
    assert sidecar.breaker("node", backend.address) == "closed"
    struck = time.monotonic()
    fault.inflict(backend)
    sidecar.wait_breaker("node", backend.address, "open", within_s=FOUND_S)
    opened_s = time.monotonic() - struck
    healthy = _healthy(backend)
    assert healthy
    closed_s = _mended(backend, sidecar, fault, clients=False)
    assert sidecar.requests(1)  # the one that `_mended` sends at the end: no client's before it
    note(f"{backend.name} {fault.name} idle", opened_s=opened_s, health_200=healthy, closed_s=closed_s)


def _mended(backend: Backend, sidecar: Sidecar, fault: Fault, *, clients: bool) -> float:
    """Brings the engine back, and returns the seconds from then until its breaker closed.

    With `clients` one asks all the while; without, nobody does until it has closed.
    """
    fault.mend(backend)
    back = time.monotonic()
    with openai.OpenAI(base_url=f"http://{sidecar.address}/v1", api_key="none", max_retries=0) as client:
        if clients:
            while not stream(client, TOKENS).whole(TOKENS):
                assert time.monotonic() < back + CLOSED_S, sidecar.log()[-2000:]
                time.sleep(0.1)
        sidecar.wait_breaker("node", backend.address, "closed", within_s=CLOSED_S)
        closed_s = time.monotonic() - back
        end = stream(client, TOKENS)
    assert end.whole(TOKENS), end
    assert sidecar.in_flight() == 0
    backend.engine.wait_running(0, within_s=10)
    return closed_s


def _healthy(backend: Backend) -> bool:
    if not answers(backend.address):
        return False
    try:
        return call(backend.address, "GET", HEALTH[backend.name], timeout_s=2).status == 200
    except (OSError, AssertionError):
        return False
