"""The real vLLM with `cache_salt: tenant`: what it finds in its prefix cache is the tenant's own, by its own count."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.client import CHAT, call
from tests.engines.engine import Vllm
from tests.engines.sidecar_process import Sidecar

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]  # an engine's start is 36-119 s

POLICY = """\
apiVersion: sidecar/v1
kind: Policy
services: [{{name: chat, cache_salt: tenant, endpoints: [{{url: "http://{engine}"}}]}}]
"""

HITS = "vllm:prefix_cache_hits_total"
LEAST = 64
"""Tokens of a prompt that is found again: it has some hundred, and the last block is always worked through."""


@pytest.fixture
def sidecar(vllm: Vllm, tmp_path: Path) -> Iterator[Sidecar]:
    started = Sidecar(tmp_path, POLICY.format(engine=vllm.address))
    yield started
    started.stop()


def found(vllm: Vllm, address: str, path: str, body: dict[str, object], tenant: str = "") -> float:
    """How many of the prompt's tokens the engine had; the answer must be good."""
    before = vllm.metric(HITS)
    data = json.dumps(body).encode()
    answer = call(address, "POST", path, data, x_tenant_id=tenant) if tenant else call(address, "POST", path, data)
    assert answer.status == 200, answer.body
    return vllm.metric(HITS) - before


def asking(path: str, text: str) -> dict[str, object]:
    body: dict[str, object] = {"model": "tiny", "max_tokens": 4}
    prompt = f"{text} " + "def return import class " * 40
    if path == "/v1/completions":
        return body | {"prompt": prompt}
    return body | {"messages": [{"role": "user", "content": prompt}]}


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/messages"])
def test_tenant_finds_its_own_prompts_and_nobody_elses(vllm: Vllm, sidecar: Sidecar, path: str) -> None:
    body = asking(path, path)
    assert found(vllm, sidecar.address, path, body, "a") < LEAST
    assert found(vllm, sidecar.address, path, body, "a") >= LEAST
    assert found(vllm, sidecar.address, path, body, "b") < LEAST
    assert found(vllm, sidecar.address, path, body) < LEAST
    assert found(vllm, sidecar.address, path, body) >= LEAST
    assert found(vllm, sidecar.address, path, body, "b") >= LEAST


def test_salt_that_a_client_sends_opens_no_other_cache(vllm: Vllm, sidecar: Sidecar) -> None:
    body = asking(CHAT, "a client's own salt") | {"cache_salt": "the-victims"}
    assert found(vllm, vllm.address, CHAT, body) < LEAST
    assert found(vllm, vllm.address, CHAT, body) >= LEAST  # the salt is good: who could send it would find the prompt
    assert found(vllm, sidecar.address, CHAT, body, "thief") < LEAST
