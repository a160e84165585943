"""What an operator types is what requests do: the verbs against a whole sidecar, its log and two engines."""

import asyncio
import json
from pathlib import Path

import pytest

from sidecar.cli import main
from tests.harness import Upstream, connect, one_by_one
from tests.outcomes.pods import GOOD, SERVICE, Pod, pod
from tests.under_test import chat, service

ENGINE = one_by_one(GOOD)
PLAN = "{baseline: v1, steps: [{weight: 0.5, min: 1h, min_samples: 1000000}, {weight: 0.9, min: 1h}]}"


class Prompt:
    """An operator's prompt at a pod."""

    def __init__(self, told: Pod, capsys: pytest.CaptureFixture[str]) -> None:
        self._admin = f"127.0.0.1:{told.running.admin_port}"
        self._capsys = capsys

    async def type(self, line: str) -> tuple[int, str]:
        """The exit code, and what was said."""
        self._capsys.readouterr()
        code = await asyncio.to_thread(main, [*line.split(), "--admin", self._admin])
        captured = self._capsys.readouterr()
        return code, captured.out + captured.err


async def versions(told: Pod, requests: int = 12) -> set[bytes]:
    """Who answers."""
    seen = set()
    async with connect(told.port) as client:
        for _ in range(requests):
            seen.add((await client.ask(chat(stream=True), b"POST")).header(b"x-sidecar-version"))
    return seen


async def test_what_is_typed_is_what_requests_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        Upstream(ENGINE) as old,
        Upstream(ENGINE) as new,
        pod("pod-1", "local", service(old), tmp_path) as told,
    ):
        prompt = Prompt(told, capsys)
        assert (await prompt.type("canary status"))[0] == 0
        code, said = await prompt.type(f"routes set {SERVICE} v2 --endpoint http://{new.key} --engine vllm --weight 1")
        assert (code, said.splitlines()[2].split()) == (0, ["default", "v2", "1"])
        assert await versions(told) == {b"v2"}
        back = f"routes set {SERVICE} v1 --weight 1 --update-id back --by ann"
        assert (await prompt.type(back))[0] == 0
        assert await versions(told) == {b"v1"}
        assert "which stood before" in (await prompt.type(back))[1]
        for wrong in ("--weight 1.5", "--weight -1", "--endpoint ftp://x", "--weight 0.5 --expected 7", "--engine gpt"):
            code, said = await prompt.type(f"routes set {SERVICE} v2 {wrong}")
            assert code == 1 and "refused with 4" in said, wrong
        assert await versions(told) == {b"v1"}
        assert "pod-1: update" in (await prompt.type("routes list"))[1]


async def test_a_canary_is_held_resumed_led_on_and_taken_back_by_what_is_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    async with (
        Upstream(ENGINE) as old,
        Upstream(ENGINE) as new,
        pod("pod-1", "local", service(old), tmp_path) as told,
    ):
        prompt = Prompt(told, capsys)
        assert (await prompt.type("canary abort"))[0] == 1
        begin = f"routes set {SERVICE} v2 --endpoint http://{new.key} --engine vllm --plan {plan}"
        code, said = await prompt.type(begin)
        assert code == 0 and "canary v2 against v1: running, step 1 of 2, 0.5 of new sessions" in said
        assert await versions(told, 30) == {b"v1", b"v2"}
        for line, phase, step, weight in (
            ("canary hold", "held", 1, 0.5),
            ("canary resume", "running", 1, 0.5),
            ("canary promote", "running", 2, 0.9),
            ("canary abort --by ann", "aborted", 2, 0.0),
        ):
            code, said = await prompt.type(f"{line} --json")
            shown = json.loads(said)
            assert (code, shown["phase"], shown["step"], shown["weight"]) == (0, phase, step, weight), said
        assert await versions(told) == {b"v1"}
        text = (await told.page(b"/metrics")).body.decode()
        assert 'sidecar_route_weight_ratio{service="default",version="v2"} 0.0' in text
        assert 'sidecar_rollout_phase{service="default",phase="aborted"} 1' in text
        assert 'sidecar_route_updates_total{result="accepted"} 1' in text
        parts = json.loads((await told.page(b"/healthz")).body)["parts"]
        assert parts["routes"] == {"ok": True, "detail": "1 table"}
