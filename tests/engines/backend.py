"""The engines by what they have in common, so that one test runs before each: an address, a count, an endpoint.

All serve the model `tiny`, whatever it is: vLLM and DeepSpeed the random one, Triton SmolLM2 or the model that counts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tests.engines.deepspeed import DeepSpeed, Front
from tests.engines.engine import Vllm, VllmKeeper, free_port
from tests.engines.install_deepspeed import tiny_dir
from tests.engines.make_smollm2 import smollm2_dir
from tests.engines.triton import Triton

MODEL = "tiny"
Name = Literal["vllm", "triton", "toy", "deepspeed", "api_server", "gateway"]
Engine = Vllm | Triton | DeepSpeed
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


class Backend:
    """An engine that runs, at one address for good. `endpoint` is its line in a policy."""

    def __init__(self, name: Name, address: str, endpoint: str, make: Callable[[], Engine]) -> None:
        """Starts it; returns when it is ready."""
        self.name = name
        self.address = address
        self.endpoint = endpoint
        self._make = make
        self.engine = self._started()

    def _started(self) -> Engine:
        engine = self._make()
        try:
            engine.wait_ready()
        except BaseException:
            engine.stop()
            raise
        return engine

    def restart(self) -> None:
        """Ends what is left of it and starts it anew, as a pod does its container; returns when it is ready."""
        self.engine.stop()
        self.engine = self._started()

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


def backend_of(name: Name, folder: Path, keeper: VllmKeeper) -> Backend:
    """A ready engine. All but vLLM, which the keeper has, are the caller's to stop."""
    if name == "vllm":
        address = keeper.address
        return Backend(name, address, f'url: "http://{address}", engine: vllm', keeper.ready)
    address, metrics = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    log = folder / f"{name}.log"
    if name in ("triton", "toy"):
        source, template = ("smollm2", smollm2_dir()) if name == "triton" else ("toy_llm", tiny_dir())
        endpoint = f'url: "http://{address}", engine: triton, chat_template: "{template}"'
        endpoint += f', metrics_url: "http://{metrics}"'
        return Backend(name, address, endpoint, lambda: Triton(address, log, (MODEL,), source=source, metrics=metrics))
    front = "openai" if name == "deepspeed" else name
    endpoint = f'url: "http://{address}", engine: deepspeed, front: {front}'
    if name != "deepspeed":
        endpoint += f', engine_model: {MODEL}, chat_template: "{tiny_dir()}"'
    return Backend(name, address, endpoint, lambda: DeepSpeed(FRONTS[name], address, log, name=MODEL, pace_ms=PACE_MS))


@contextmanager
def started(name: Name, folder: Path, keeper: VllmKeeper) -> Iterator[Backend]:
    """A ready engine, ended with the block; vLLM stays, for whoever comes next."""
    backend = backend_of(name, folder, keeper)
    try:
        yield backend
    finally:
        if name != "vllm":
            backend.engine.stop()
