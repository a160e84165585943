"""One client script against the three engines, each behind a sidecar; the three fronts of MII among them.

Nothing that the script does is an engine's fault: the breaker opens at the first failure, and must be closed after
every step; and after every step the engine itself holds nothing any more.
"""

import time
from collections.abc import Iterator

import pytest

from tests.engines import script
from tests.engines.backend import MODEL, Backend, Name, policy, started
from tests.engines.engine import VllmKeeper
from tests.engines.sidecar_process import Sidecar

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

SETTINGS = """\
deadlines: {connect: 1s, head: 60s, first_token: 30s, token_gap: 10s, tool_gap: 10s, total: 3m, idle_client: 30s}
retry: {attempts: 1}
health_check: {mode: load}
breakers:
  node: {mode: enforce, consecutive: 1, open: 1s, open_max: 1s, successes: 1, min_closed_ratio: 0, adaptive: false}
"""
OPEN_S = 1.1
LEAVING_BEFORE = script.leaving_before_the_answer_frees_the_engine
MODELS: dict[Name, str] = {"deepspeed": f"{MODEL}, nobody", "api_server": MODEL, "gateway": MODEL}
"""What the policy says: MII's OpenAI front judges names, but nobody asks it for them; the others serve any name."""
CONTEXTS: dict[Name, int] = {"vllm": 32768, "triton": 8192, "deepspeed": 32768, "api_server": 32768, "gateway": 32768}
LACKS: dict[Name, str] = {
    "vllm": "",
    "triton": "Triton",
    "deepspeed": "DeepSpeed-MII",
    "api_server": "DeepSpeed-MII",
    "gateway": "DeepSpeed-MII",
}


@pytest.fixture(scope="module", params=["vllm", "triton", "deepspeed", "api_server", "gateway"])
def backend(
    request: pytest.FixtureRequest, vllm_keeper: VllmKeeper, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    with started(request.param, tmp_path_factory.mktemp(request.param), vllm_keeper) as running:
        yield running


@pytest.fixture(scope="module")
def sidecar(backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    running = Sidecar(
        tmp_path_factory.mktemp("sidecar"), policy([backend.endpoint], SETTINGS, MODELS.get(backend.name, '"*"'))
    )
    yield running
    running.stop()


@pytest.mark.parametrize("step", script.STEPS, ids=lambda step: step.__name__)
def test_script(step: script.Step, backend: Backend, sidecar: Sidecar) -> None:
    tells_length = backend.name in ("vllm", "triton")
    served = script.Served(
        sidecar.address,
        MODEL,
        context=CONTEXTS[backend.name],
        lacks=LACKS[backend.name],
        tells_length=tells_length,
        recounts=backend.name == "deepspeed",
        streams=backend.name != "gateway",
        held=backend.running,
    )
    with served.client() as client:
        step(client, served)
        if step is script.too_long_a_prompt_is_a_bad_request and not tells_length:
            # MII says the same 500 of a dead engine: nobody can tell whose fault it is, and it is taken for a failure.
            sidecar.wait_breaker("node", backend.address, "open", within_s=2)
            time.sleep(OPEN_S)
            script.chat(client, served)
    # MII hears of nobody's leaving but through a stream: what nobody waits for is worked on to its end.
    deaf = backend.name == "gateway" or (backend.name, step) == ("deepspeed", LEAVING_BEFORE)
    backend.engine.wait_running(0, within_s=60 if deaf else 10)
    assert sidecar.in_flight() == 0
    assert sidecar.breaker("node", backend.address) == "closed"
