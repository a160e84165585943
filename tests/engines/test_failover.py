"""vLLM, Triton and DeepSpeed behind one service, lost one after the other under load: nobody is told a lie.

Each client gets one answer, all of it and of one engine alone, or an error; what had not begun to arrive moves to an
engine that lives, unseen. The model that counts makes it certain: what it said is whole word by word, and an answer
that has a word of it has no other.
"""

import os
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines.backend import MODEL, policy, started
from tests.engines.deepspeed import DeepSpeed
from tests.engines.engine import Vllm, VllmKeeper
from tests.engines.figures import note
from tests.engines.load import End, Load
from tests.engines.sidecar_process import Sidecar
from tests.engines.triton import Triton

pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]

CLIENTS = 24
TOKENS = 40
FIRST_TOKEN_S = 4.0
BETWEEN_S = 6.0
OPEN_S = 2.0

SETTINGS = """\
deadlines: {connect: 1s, head: 10s, first_token: 4s, token_gap: 2s, tool_gap: 2s, total: 3m, idle_client: 30s}
retry: {attempts: 3, budget_ratio: 1.0, budget_min: 100}
health_check: {mode: truth, interval: 500ms, timeout: 2s, stalled: 3s, canary_interval: 2s}
breakers:
  node: {mode: enforce, consecutive: 2, open: 2s, open_max: 4s, successes: 1, min_closed_ratio: 0, adaptive: false}
  session: {mode: "off"}
  request: {mode: "off"}
"""


def test_three_engines_are_lost_one_after_the_other(vllm_keeper: VllmKeeper, tmp_path: Path) -> None:
    with ExitStack() as stack:
        vllm, triton, mii = (
            stack.enter_context(started(name, tmp_path, vllm_keeper)) for name in ("vllm", "toy", "deepspeed")
        )
        assert isinstance(vllm.engine, Vllm)
        assert isinstance(triton.engine, Triton)
        assert isinstance(mii.engine, DeepSpeed)
        sidecar = Sidecar(tmp_path, policy([vllm.endpoint, triton.endpoint, mii.endpoint], SETTINGS, MODEL))
        marks: list[tuple[str, float]] = []
        with Load(sidecar.address, CLIENTS, TOKENS) as load:
            load.wait(whole=3 * CLIENTS)
            marks.append(("vLLM killed", time.monotonic()))
            os.kill(vllm.engine.core_pid(), signal.SIGKILL)
            time.sleep(BETWEEN_S)
            marks.append(("Triton frozen", time.monotonic()))
            triton.engine.signal_server(signal.SIGSTOP)
            time.sleep(BETWEEN_S)
            marks.append(("DeepSpeed killed", time.monotonic()))
            mii.engine.signal_servicer(signal.SIGKILL)
            time.sleep(BETWEEN_S)
            marks.append(("DeepSpeed is back", time.monotonic()))
            mii.engine.restart_servicer()
            mii.engine.wait_ready()
            sidecar.wait_breaker("node", mii.address, "closed", within_s=30)
            marks.append(("its breaker closed", time.monotonic()))
            time.sleep(BETWEEN_S)
        triton.engine.signal_server(signal.SIGCONT)
        names = {vllm.address: "vllm", triton.address: "triton", mii.address: "deepspeed", "": "nobody"}
        lies = [end for end in load.ends if not end.code and not end.whole(TOKENS)]
        assert not lies, lies[:5]
        for n, (mark, since) in enumerate(marks):
            until = marks[n + 1][1] if n + 1 < len(marks) else float("inf")
            ended = [end for end in load.ends if since <= end.ended < until]
            note(f"fail-over, {CLIENTS} clients: {mark}", **_told(ended, names))
        note("fail-over, all", **_told(load.ends, names))
        # One engine lost of three, and of two: whoever had heard nothing yet was served elsewhere.
        alive = [end for end in load.ends if marks[0][1] <= end.began < marks[2][1] - FIRST_TOKEN_S]
        unheard = [end for end in alive if end.code and not end.text]
        assert not unheard, unheard[:5]
        after = [end for end in load.ends if end.began > marks[-1][1] + OPEN_S]
        assert after
        assert all(end.whole(TOKENS) and end.endpoint == mii.address for end in after), after[:5]
        assert max(end.ended - end.last for end in load.ends) < 3 * FIRST_TOKEN_S
        sidecar.stop()


def _told(ends: list[End], names: dict[str, str]) -> dict[str, object]:
    """Counts: whole answers by engine, errors by code, and how many of those had begun to arrive."""
    return {
        "whole": dict(Counter(names[end.endpoint] for end in ends if not end.code)),
        "errors": dict(Counter(end.code for end in ends if end.code)),
        "broken_off": sum(1 for end in ends if end.code and end.text),
    }
