"""A model is changed under 50 running streams, on each engine in its own way, and no request fails.

The times that count for an operator are from the command to the first token of the new model, and to the last byte of
the old one. Once by the engine's own calls, past the sidecar, which has to bear it; then by `sidecar model load`.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.backend import MODEL, policy
from tests.engines.client import call
from tests.engines.deepspeed import DeepSpeed
from tests.engines.engine import Vllm, free_port
from tests.engines.figures import note
from tests.engines.install_vllm import model_dir, venv_dir
from tests.engines.load import End, Load
from tests.engines.sidecar_process import Sidecar
from tests.engines.triton import Triton

pytestmark = [pytest.mark.engines, pytest.mark.timeout(420)]

STREAMS = 50
TOKENS = 10
PACE_MS = (
    300  # three seconds a stream. Triton says nothing while it loads: some 500 responses that wait hang it for ever
)
SPREAD_S = TOKENS * PACE_MS / 1000  # at any moment some stream ends and another begins
PROMPT = f"Count, delay_ms={PACE_MS}"
AFTER_S = 4.0  # the new model serves everybody by then

SETTINGS = """\
deadlines: {connect: 1s, head: 60s, first_token: 30s, token_gap: 10s, tool_gap: 10s, total: 3m, idle_client: 30s}
retry: {attempts: 1}
"""


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[Triton]:
    engine = Triton(f"127.0.0.1:{free_port()}", tmp_path / "triton.log", (MODEL,), source="toy_llm")
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.stop()


Before = Callable[[str], Sidecar]


@pytest.fixture
def before(tmp_path: Path) -> Iterator[Before]:
    """Starts the sidecar before an endpoint; no request may fail, so none is sent again."""
    running: list[Sidecar] = []

    def start(endpoint: str) -> Sidecar:
        running.append(Sidecar(tmp_path, policy([endpoint], SETTINGS)))
        return running[-1]

    yield start
    for sidecar in running:
        sidecar.stop()


def under_load(load: Load, change: Callable[[], None], is_new: Callable[[End], bool], what: str) -> None:
    """Changes the model in the middle of the streams, and checks and notes what came of it."""
    with load:
        load.wait(whole=STREAMS)
        began = time.monotonic()
        change()
        changed_s = time.monotonic() - began
        time.sleep(AFTER_S)
    failed = [end for end in load.ends if not end.whole(TOKENS)]
    assert not failed, failed[:5]
    new = [end for end in load.ends if is_new(end)]
    old = [end for end in load.ends if not is_new(end)]
    assert len(new) >= STREAMS
    first_new_s = min(end.first for end in new) - began
    last_old_s = max(end.last for end in old) - began
    assert max(end.began for end in old) - began < changed_s + 1, "the old one is still asked"
    note(
        f"{what}, {STREAMS} streams",
        requests=len(load.ends),
        failed=0,
        command_s=changed_s,
        first_of_new_s=first_new_s,
        last_of_old_s=last_old_s,
    )


def said(done: "subprocess.CompletedProcess[str]") -> None:
    assert done.returncode == 0, done.stdout + done.stderr


# --- Triton


def test_triton_loads_a_new_version_by_its_own_call(triton: Triton, before: Before) -> None:
    sidecar = before(f'url: "http://{triton.address}", engine: triton')

    load = Load(sidecar.address, STREAMS, TOKENS, PROMPT, spread_s=SPREAD_S)

    def change() -> None:
        triton.publish(MODEL, 2, "toy_llm")
        assert triton.load(MODEL).status == 200

    under_load(load, change, lambda end: end.version == "2", "Triton, its own load")
    triton.wait_states(MODEL, {"1": "UNAVAILABLE", "2": "READY"}, within_s=20)


def test_triton_loads_a_new_version_by_the_sidecar(triton: Triton, before: Before) -> None:
    sidecar = before(f'url: "http://{triton.address}", engine: triton')
    triton.publish(MODEL, 2, "toy_llm")
    load = ("model", "load", MODEL, "--service", "chat", "--canary-prompt", "Count", "--expect", "v2-")
    under_load(
        Load(sidecar.address, STREAMS, TOKENS, PROMPT, spread_s=SPREAD_S),
        lambda: said(sidecar.command(*load)),
        lambda end: end.version == "2",
        "Triton, sidecar model load",
    )
    triton.wait_states(MODEL, {"1": "UNAVAILABLE", "2": "READY"}, within_s=20)


def test_triton_whose_new_version_cannot_be_loaded_serves_the_old_one_on(triton: Triton, before: Before) -> None:
    sidecar = before(f'url: "http://{triton.address}", engine: triton')
    triton.publish(MODEL, 2, "toy_llm", load_error="no weights today")
    with Load(sidecar.address, 10, TOKENS, PROMPT) as load:
        load.wait(whole=10)
        done = sidecar.command("model", "load", MODEL, "--service", "chat")
        assert done.returncode == 1
        assert "no weights today" in done.stdout + done.stderr
        load.wait(whole=30)
    assert {(end.whole(TOKENS), end.version) for end in load.ends} == {(True, "1")}


# --- vLLM


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    script = Path(__file__).with_name("make_adapters.py")
    subprocess.run([venv_dir() / "bin" / "python", "-P", script, model_dir(), folder], check=True)
    return folder


@pytest.fixture(scope="module")
def vllm_with_lora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    engine = Vllm(
        f"127.0.0.1:{free_port()}",
        tmp_path_factory.mktemp("lora") / "vllm.log",
        "--enable-lora --max-lora-rank 16",
        VLLM_ALLOW_RUNTIME_LORA_UPDATING="1",
        VLLM_SERVER_DEV_MODE="1",
    )
    try:
        engine.wait_ready()
        call(engine.address, "POST", "/v1/completions", b'{"model":"tiny","prompt":"import","max_tokens":2}')
        yield engine
    finally:
        engine.stop()


def test_vllm_loads_an_adapter_by_its_own_call_and_by_the_sidecar(
    vllm_with_lora: Vllm, adapters: Path, before: Before
) -> None:
    """The base model's streams go on meanwhile; the adapter's own begin when it is there."""
    vllm = vllm_with_lora
    sidecar = before(f'url: "http://{vllm.address}"')
    with Load(sidecar.address, STREAMS, TOKENS) as load:
        load.wait(whole=STREAMS)
        began = time.monotonic()
        body = f'{{"lora_name": "own", "lora_path": "{adapters / "a"}"}}'.encode()
        assert call(vllm.address, "POST", "/v1/load_lora_adapter", body).status == 200
        own_s = time.monotonic() - began
        with Load(sidecar.address, 2, TOKENS, model="own") as first:
            first.wait(whole=2)
        began = time.monotonic()
        said(sidecar.command("model", "load", "ours", "--path", str(adapters / "a"), "--service", "chat"))
        ours_s = time.monotonic() - began
        with Load(sidecar.address, 2, TOKENS, model="ours") as second:
            second.wait(whole=2)
        first_new_s = min(end.first for end in second.ends) - began
    for each in (load, first, second):
        assert all(end.whole(TOKENS) for end in each.ends), each.codes()
    note(
        f"vLLM, a new adapter, {STREAMS} streams",
        requests=len(load.ends),
        failed=0,
        own_call_s=own_s,
        command_s=ours_s,
        first_of_new_s=first_new_s,
    )


def test_vllm_changes_an_adapter_under_its_streams(vllm_with_lora: Vllm, adapters: Path, before: Before) -> None:
    sidecar = before(f'url: "http://{vllm_with_lora.address}"')
    load = ("model", "load", "sql", "--service", "chat", "--path")
    said(sidecar.command(*load, str(adapters / "a")))
    with Load(sidecar.address, 1, TOKENS, model="sql") as alone:
        alone.wait(whole=1)
    began_with = alone.ends[0].text[:8]  # what was under way may end in the new one's words
    under_load(
        Load(sidecar.address, STREAMS, TOKENS, model="sql"),
        lambda: said(sidecar.command(*load, str(adapters / "b"), "--in-rotation")),
        lambda end: not end.text.startswith(began_with),
        "vLLM, an adapter in the place of another",
    )


# --- DeepSpeed-MII


def test_mii_is_followed_by_another_deployment(tmp_path: Path, before: Before) -> None:
    """MII cannot change its model: the new one is another deployment, and a version of its own in the routes."""
    old, new = (
        DeepSpeed("openai", f"127.0.0.1:{free_port()}", tmp_path / f"{name}.log", name=MODEL, pace_ms=PACE_MS)
        for name in ("old", "new")
    )
    try:
        old.wait_ready()
        new.wait_ready()
        sidecar = before(f'url: "http://{old.address}", engine: deepspeed')
        load = ("model", "load", MODEL, "--service", "chat", "--version", "v2", "--engine", "deepspeed")
        under_load(
            Load(sidecar.address, STREAMS, TOKENS, spread_s=SPREAD_S),
            lambda: said(sidecar.command(*load, "--endpoint", f"http://{new.address}")),
            lambda end: end.endpoint == new.address,
            "DeepSpeed-MII, a second deployment",
        )
        old.wait_running(0, within_s=5)
    finally:
        old.stop()
        new.stop()
