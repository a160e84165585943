"""The engines by what they have in common, so that one test runs before each: an address, a count, an endpoint.

All serve the model `tiny`, whatever it is: vLLM and DeepSpeed the random one, Triton SmolLM2 or the model that counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.engines.deepspeed import DeepSpeed, Front
from tests.engines.engine import Vllm, VllmKeeper, free_port
from tests.engines.install_deepspeed import tiny_dir
from tests.engines.make_smollm2 import smollm2_dir
from tests.engines.triton import Triton

MODEL = "tiny"
Name = Literal["vllm", "triton", "toy", "deepspeed", "api_server", "gateway"]
FRONTS: dict[Name, Front] = {"deepspeed": "openai", "api_server": "api", "gateway": "rest"}
PACE_MS = 20.0

POLICY = """\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    models: [{models}]
    endpoints:
{endpoints}
{settings}
"""


@dataclass(frozen=True)
class Backend:
    """A running engine. `endpoint` is its line in a policy; `running` asks the engine itself what it holds."""

    name: Name
    engine: Vllm | Triton | DeepSpeed
    endpoint: str

    @property
    def address(self) -> str:
        """`host:port`, as breakers call it."""
        return self.engine.address

    def running(self) -> float:
        """Requests that the engine holds, by its own word."""
        return self.engine.running()


def policy(endpoints: list[str], settings: str, models: str = '"*"') -> str:
    """A policy with one service; `settings` are the service's other members in YAML, from the left margin."""
    lines = [f"      - {{{endpoint}}}" for endpoint in endpoints]
    return POLICY.format(
        models=models,
        endpoints="\n".join(lines),
        settings="\n".join("    " + line for line in settings.strip().split("\n")),
    )


def vllm_backend(vllm: Vllm) -> Backend:
    """A vLLM that runs already."""
    return Backend("vllm", vllm, f'url: "http://{vllm.address}", engine: vllm')


@contextmanager
def started(name: Name, folder: Path, keeper: VllmKeeper) -> Iterator[Backend]:
    """A ready engine; all but vLLM, which the keeper has, end with the block."""
    if name == "vllm":
        yield vllm_backend(keeper.ready())
        return
    address = f"127.0.0.1:{free_port()}"
    engine: Triton | DeepSpeed
    if name in ("triton", "toy"):
        source, template = ("smollm2", smollm2_dir()) if name == "triton" else ("toy_llm", tiny_dir())
        engine = Triton(address, folder / f"{name}.log", (MODEL,), source=source)
        endpoint = f'url: "http://{address}", engine: triton, chat_template: "{template}"'
        endpoint += f', metrics_url: "http://{engine.metrics_address}"'
    else:
        engine = DeepSpeed(FRONTS[name], address, folder / f"{name}.log", name=MODEL, pace_ms=PACE_MS)
        front = "openai" if name == "deepspeed" else name
        endpoint = f'url: "http://{address}", engine: deepspeed, front: {front}, engine_model: {MODEL}'
        if name != "deepspeed":
            endpoint += f', chat_template: "{tiny_dir()}"'
        else:
            endpoint = endpoint.replace(f", engine_model: {MODEL}", "")
    try:
        engine.wait_ready()
        yield Backend(name, engine, endpoint)
    finally:
        engine.stop()
