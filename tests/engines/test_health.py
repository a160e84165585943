"""Real engines that say that all is well, and no client: the sidecar finds out by itself, and that they are back.

Times are measured from the fault and from its end; each test prints them (`-s`), and docs/engines.md has them.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.client import call, post
from tests.engines.deepspeed import DeepSpeed, Front
from tests.engines.engine import Vllm, free_port
from tests.engines.sidecar_process import Sidecar
from tests.engines.triton import Triton

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

STALLED_S = 3.0
CANARY_S = 2.0
INTERVAL_S = 0.2
FIRST_TOKEN_S = 5.0
ENDLESS = 30_000
SLOW_S = 3.0  # what a busy machine may add

POLICY = """\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    endpoints:
      - {{url: "http://{address}", {endpoint}}}
    deadlines: {{first_token: 5s}}
    health_check: {{mode: truth, interval: 200ms, stalled: 3s, canary_interval: 2s}}
    breakers:
      node: {{min_closed_ratio: 0, open: 1s, open_max: 1s, adaptive: false}}
"""


class Watched:
    """A sidecar before one engine that nobody sends anything to."""

    def __init__(self, folder: Path, address: str, endpoint: str) -> None:
        self.address = address
        self.sidecar = Sidecar(folder, POLICY.format(address=address, endpoint=endpoint))

    def opens(self, within_s: float) -> float:
        """The seconds until its breaker opened."""
        return self._comes_to("open", within_s)

    def closes(self, within_s: float = 20.0) -> float:
        """The seconds until it closed."""
        return self._comes_to("closed", within_s)

    def stays_closed(self, for_s: float) -> None:
        """Nothing is held against an engine that is well."""
        until = time.monotonic() + for_s
        while time.monotonic() < until:
            assert self.sidecar.breaker("node", self.address) == "closed"
            time.sleep(INTERVAL_S)

    def why(self) -> str:
        """What moved the breaker last."""
        listed = json.loads(call(self.sidecar.admin, "GET", "/breakers").body)
        return next(str(row["why"]) for row in listed if row["scope"] == "node")

    def canaries(self, ending: str = "") -> float:
        """How many were sent that ended so."""
        text = call(self.sidecar.admin, "GET", "/metrics").body.decode()
        lines = [line for line in text.splitlines() if line.startswith("sidecar_health_canaries_total{")]
        return sum(float(line.split()[-1]) for line in lines if ending in line)

    def _comes_to(self, state: str, within_s: float) -> float:
        began = time.monotonic()
        self.sidecar.wait_breaker("node", self.address, state, within_s)
        return time.monotonic() - began


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[list[Watched]]:
    made: list[Watched] = []
    yield made
    for each in made:
        each.sidecar.stop()


def told(what: str, opened_s: float, closed_s: float) -> None:
    """For whoever writes the figures down."""
    print(f"\n{what}: opened after {opened_s:.1f} s, closed {closed_s:.1f} s after it was back")


def test_a_triton_whose_model_is_dead_behind_ready(watched: list[Watched], tmp_path: Path) -> None:
    triton = Triton(f"127.0.0.1:{free_port()}", tmp_path / "triton.log")
    try:
        triton.wait_ready()
        endpoint = f'engine: triton, engine_model: toy_llm, metrics_url: "http://{triton.metrics_address}"'
        bed = Watched(tmp_path, triton.address, endpoint)
        watched.append(bed)
        bed.stays_closed(2 * CANARY_S)
        assert bed.canaries("complete") >= 1
        os.kill(triton.stub_pid("toy_llm"), signal.SIGKILL)
        opened_s = bed.opens(CANARY_S + 2 * FIRST_TOKEN_S + SLOW_S)
        assert triton.ready("toy_llm")  # its own word, worth nothing here
        assert bed.why() in ("canary", "probe_failed")
        assert triton.unload("toy_llm").status == 200
        assert triton.load("toy_llm").status == 200
        told("Triton, stub killed", opened_s, bed.closes())
        assert bed.why() == "proved"
    finally:
        triton.stop()


@pytest.mark.parametrize("front", ["openai", "api", "rest"])
def test_an_mii_without_its_engine(watched: list[Watched], tmp_path: Path, front: Front) -> None:
    deepspeed = DeepSpeed(front, f"127.0.0.1:{free_port()}", tmp_path / "mii.log")
    name = {"openai": "openai", "api": "api_server", "rest": "gateway"}[front]
    try:
        deepspeed.wait_ready()
        bed = Watched(tmp_path, deepspeed.address, f"engine: deepspeed, front: {name}, engine_model: {deepspeed.name}")
        watched.append(bed)
        bed.stays_closed(2 * CANARY_S)
        assert bed.canaries("complete") >= 1
        deepspeed.signal_servicer(signal.SIGKILL)
        opened_s = bed.opens(CANARY_S + 2 * FIRST_TOKEN_S + SLOW_S)
        assert deepspeed.health() == 200
        assert bed.why() in ("canary", "probe_failed")
        deepspeed.restart_servicer()
        deepspeed.wait_ready()
        told(f"MII {name}, engine killed", opened_s, bed.closes())
    finally:
        deepspeed.stop()


def test_a_vllm_whose_core_is_stopped(watched: list[Watched], vllm: Vllm, tmp_path: Path) -> None:
    bed = Watched(tmp_path, vllm.address, "engine: vllm")
    watched.append(bed)
    bed.stays_closed(2 * CANARY_S)
    assert bed.canaries("complete") >= 1
    body = json.dumps({"model": "tiny", "prompt": "def", "max_tokens": ENDLESS, "stream": True, "ignore_eos": True})
    core = vllm.core_pid()
    with post(vllm.address, "/v1/completions", body.encode()).head() as stream:  # another's, past the sidecar
        next(iter(stream.events()))
        os.kill(core, signal.SIGSTOP)
        try:
            opened_s = bed.opens(STALLED_S + 2 * INTERVAL_S + SLOW_S)
            assert vllm.health() == 200
            assert bed.why() in ("stalled", "probe_failed")
        finally:
            os.kill(core, signal.SIGCONT)
        told("vLLM, core stopped with a stream in it", opened_s, bed.closes())
    # And once more while it is idle: there is nothing to be seen on its pages.
    vllm.wait_running(0, within_s=10)
    bed.stays_closed(CANARY_S)
    os.kill(core, signal.SIGSTOP)
    try:
        opened_s = bed.opens(CANARY_S + 2 * STALLED_S + SLOW_S)
    finally:
        os.kill(core, signal.SIGCONT)
    told("vLLM, core stopped while idle", opened_s, bed.closes())
    short = json.dumps({"model": "tiny", "prompt": "def", "max_tokens": 4}).encode()
    assert call(bed.sidecar.address, "POST", "/v1/completions", short).status == 200
