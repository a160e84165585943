"""`sidecar run` as a process: starting, draining, reloading, every signal; and what `serving` raises and lets go."""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc import StatusCode

from sidecar import installed, main
from sidecar.control.pb.control_pb2 import Endpoint
from sidecar.core.breaker import Transition
from sidecar.core.fleet import Fleet
from sidecar.main import serving
from sidecar.policy.errors import PolicyErrors
from sidecar.policy.load import single
from sidecar.settings import Listen, Settings, UsageError
from sidecar.telemetry.live import WATCHED
from tests.control.client import put, stream
from tests.harness import Message, connect, request
from tests.processes import Sidecar, engine, process, sidecar

TOKENS = 8


def ask(*, tokens: int = TOKENS) -> bytes:
    body = b'{"model":"demo","stream":true,"max_tokens":%d,"messages":[]}' % tokens
    return request(b"/v1/chat/completions", method=b"POST", headers=[b"Content-Type: application/json"], body=body)


async def once(port: int, data: bytes) -> Message:
    async with connect(port) as client:
        return await client.ask(data, data.split(b" ")[0])


async def page(proxy: Sidecar, path: bytes) -> Message:
    return await once(proxy.admin, request(path, headers=[b"Connection: close"]))


async def until_status(proxy: Sidecar, path: bytes, status: int) -> None:
    async with asyncio.timeout(10.0):
        while (await page(proxy, path)).status != status:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def behind(*flags: str, admin: bool = True, **script: object) -> AsyncIterator[Sidecar]:
    async with (
        engine(**script) as (_, port),
        sidecar("--upstream", f"http://127.0.0.1:{port}", *flags, admin=admin) as proxy,
    ):
        yield proxy


# --- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
async def test_an_idle_sidecar_ends_at_once_and_well(number: signal.Signals) -> None:
    async with behind("--settle", "0", "--drain", "30s") as proxy:
        assert (await once(proxy.port, ask())).status == 200
        proxy.process.send(number)
        assert await proxy.process.ended() == 0
        assert "Traceback" not in proxy.process.output
        assert proxy.process.events()[-1] == "draining"


async def test_drain_fails_readiness_first_then_refuses_and_lets_a_live_stream_end() -> None:
    async with behind("--settle", "1s", "--drain", "30s", token_gap_s=0.4) as proxy, connect(proxy.port) as client:
        assert (await page(proxy, b"/readyz")).status == 200
        await client.send(ask())
        await client.seen(b"t0 ")
        proxy.process.send(signal.SIGTERM)
        await until_status(proxy, b"/readyz", 503)
        # Settling: whoever has not heard yet is served.
        assert (await once(proxy.port, ask(tokens=1))).status == 200
        assert (await page(proxy, b"/livez")).status == 200
        refused = await once(proxy.port, ask(tokens=1))
        async with asyncio.timeout(10.0):
            while refused.status == 200:
                await asyncio.sleep(0.05)
                refused = await once(proxy.port, ask(tokens=1))
        assert refused.status == 503
        assert refused.header(b"connection") == b"close" and refused.header(b"x-sidecar-reason") == b"draining"
        assert int(refused.header(b"retry-after")) >= 1
        answer = await client.response()
        assert answer.body.endswith(b"data: [DONE]\n\n") and b"t%d " % (TOKENS - 1) in answer.body
        assert await proxy.process.ended() == 0
        assert "Traceback" not in proxy.process.output


@pytest.mark.parametrize("admin", [True, False], ids=["with admin", "without admin"])
async def test_what_outlives_the_grace_is_cut_in_band(admin: bool) -> None:
    async with (
        behind("--settle", "0", "--drain", "300ms", admin=admin, token_gap_s=0.2) as proxy,
        connect(proxy.port) as client,
    ):
        await client.send(ask(tokens=1000))
        await client.seen(b"t0 ")
        proxy.process.send(signal.SIGTERM)
        answer = await client.response()
        assert answer.body.endswith(b"\n\n") and b"[DONE]" not in answer.body
        assert b'"code":"draining"' in answer.body.rsplit(b"data: ", 1)[1]
        await client.gone()
        assert await proxy.process.ended() == 0
        assert "Traceback" not in proxy.process.output


async def test_a_request_without_a_first_token_gets_503_when_the_grace_is_over() -> None:
    async with (
        behind("--settle", "0", "--drain", "200ms", first_token_s=600) as proxy,
        connect(proxy.port) as client,
    ):
        await client.send(ask())
        await proxy.process.said(lambda line: '"started"' in line)
        async with asyncio.timeout(10.0):
            while b'"in_flight":1' not in (await page(proxy, b"/routes")).body:
                await asyncio.sleep(0.02)
        proxy.process.send(signal.SIGTERM)
        answer = await client.response(b"POST")
        assert answer.status == 503 and answer.header(b"x-sidecar-reason") == b"draining"
        assert await proxy.process.ended() == 0


async def test_its_first_words_are_where_it_is_and_what_runs() -> None:
    async with behind() as proxy:
        started = await proxy.process.event("started")
        assert (started["tls"], started["compiled"]) == (False, installed.compiled())


async def test_a_second_signal_ends_it_at_once() -> None:
    async with behind("--settle", "0", "--drain", "10m", token_gap_s=5) as proxy, connect(proxy.port) as client:
        await client.send(ask())
        await client.seen(b"t0 ")
        proxy.process.send(signal.SIGTERM)
        await proxy.process.event("draining")
        assert proxy.process.alive
        proxy.process.send(signal.SIGTERM)
        assert await proxy.process.ended() == -signal.SIGTERM


async def test_the_admins_word_drains_as_a_signal_does() -> None:
    async with behind("--settle", "0", "--drain", "30s") as proxy:
        answer = await once(proxy.admin, request(b"/drain", method=b"POST", headers=[b"Connection: close"], body=b""))
        assert answer.status in (200, 202)
        assert await proxy.process.ended() == 0


async def test_a_drain_sends_release_tools_elsewhere_at_once_and_says_nothing_of_it() -> None:
    async with behind("--settle", "0", "--drain", "30s", "--control", "127.0.0.1:0", token_gap_s=0.1) as proxy:
        port = int(str((await proxy.process.event("started"))["control"]).rpartition(":")[2])
        async with stream(port) as tool, stream(port) as stuck, connect(proxy.port) as client:
            for each in (tool, stuck):
                assert await each.snapshot() == {}
            ack = await tool.ack(put(1.0, "v1", "more", engine="vllm", endpoints=[Endpoint(url="http://127.0.0.1:1")]))
            assert ack.table_version > 0
            health = json.loads((await page(proxy, b"/healthz")).body)["parts"]["control"]["detail"]
            assert health == f"127.0.0.1:{port}, 2 streams"
            await client.send(ask())
            await client.seen(b"t0 ")
            proxy.process.send(signal.SIGTERM)
            end = await tool.end()
            assert (end.code, end.details) == (StatusCode.UNAVAILABLE, "draining")
            assert tool.passed[-1].notice.kind == "draining"
            assert (await client.response()).body.endswith(b"data: [DONE]\n\n")
            assert await proxy.process.ended() == 0
        assert [line for line in proxy.process.lines if not line.startswith("{")] == []


async def test_who_has_no_use_for_grpc_does_not_load_it() -> None:
    for flags, loaded in ((("--control", "off"), False), (("--control", "127.0.0.1:0"), True)):
        async with behind(*flags) as proxy:
            assert ((await proxy.process.event("started"))["control"] == "off") is not loaded
            assert ("cygrpc" in proxy.process.maps) is loaded


# --- the beginning ----------------------------------------------------------------------------------------------------


async def failure(*flags: str, **environ: str) -> tuple[int, str]:
    """How `sidecar run` ends that cannot start, and what it says."""
    async with process("sidecar", "run", "--admin", "off", *flags, **environ) as running:
        code = await running.ended()
    return code, running.output


async def test_the_sigterm_after_the_admins_drain_cuts_nobody() -> None:
    # What every pod does: preStop asks for the drain, then the kubelet sends SIGTERM.
    async with behind("--settle", "0", "--drain", "30s", token_gap_s=0.1) as proxy, connect(proxy.port) as client:
        await client.send(ask())
        await client.seen(b"t0 ")
        asked = request(b"/drain", method=b"POST", headers=[b"Content-Length: 0", b"Connection: close"])
        assert (await once(proxy.admin, asked)).status == 202
        proxy.process.send(signal.SIGTERM)
        answer = await client.response()
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert await proxy.process.ended() == 0


async def test_a_port_in_use_is_one_clear_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = await failure("--listen", f"127.0.0.1:{port}", "--upstream", "http://127.0.0.1:1")
    assert code == 1
    assert "Traceback" not in said
    last = said.splitlines()[-1]
    assert last == f"sidecar run: cannot listen at 127.0.0.1:{port} (--listen): Address already in use"


async def test_an_admin_port_in_use_is_one_clear_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = await failure("--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--admin", where)
    assert code == 1
    assert "Traceback" not in said
    assert said.splitlines()[-1] == f"sidecar run: cannot listen at {where} (--admin): Address already in use"


async def test_a_control_port_in_use_is_one_clear_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = await failure("--listen", "127.0.0.1:0", "--upstream", "http://127.0.0.1:1", "--control", where)
    assert code == 1
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith(f"sidecar run: cannot listen at {where} (--control): ")


@pytest.mark.parametrize(
    ("flags", "code", "word"),
    [
        ([], 2, "--upstream"),
        (["--policy", "/nowhere/policy.yaml"], 1, "/nowhere/policy.yaml"),
        (
            ["--upstream", "http://127.0.0.1:1", "--tls-cert", "/nowhere/c.pem", "--tls-key", "/nowhere/k.pem"],
            1,
            "c.pem",
        ),
    ],
    ids=["nothing to forward to", "no such policy", "no such certificate"],
)
async def test_what_cannot_start_says_why(flags: list[str], code: int, word: str) -> None:
    ended, said = await failure("--listen", "127.0.0.1:0", *flags)
    assert ended == code
    assert "Traceback" not in said and "sidecar run: " in said and word in said


async def test_a_bad_policy_at_the_start_lists_its_faults(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("apiVersion: sidecar/v1\nkind: Policy\nservices: [{name: a, nonsense: 1}, {name: a}]\n")
    code, said = await failure("--listen", "127.0.0.1:0", "--policy", str(policy))
    assert code == 1
    assert "policy.yaml" in said and "nonsense" in said and "Traceback" not in said


# --- reload -----------------------------------------------------------------------------------------------------------


def policy_of(name: str, port: int) -> str:
    return (
        "apiVersion: sidecar/v1\nkind: Policy\nready_when: always\n"
        f'services: [{{name: {name}, endpoints: [{{url: "http://127.0.0.1:{port}"}}]}}]\n'
    )


@asynccontextmanager
async def with_policy(tmp_path: Path) -> AsyncIterator[tuple[Sidecar, Path, int]]:
    policy = tmp_path / "policy.yaml"
    async with engine() as (_, port):
        policy.write_text(policy_of("first", port))
        async with sidecar("--policy", str(policy), "--settle", "0", "--drain", "1s") as proxy:
            yield proxy, policy, port


async def test_sighup_takes_the_policy_anew_and_requests_go_on(tmp_path: Path) -> None:
    async with with_policy(tmp_path) as (proxy, policy, port), connect(proxy.port) as client:
        assert (await client.ask(ask(), b"POST")).status == 200
        policy.write_text(policy_of("second", port))
        proxy.process.send(signal.SIGHUP)
        async with asyncio.timeout(10.0):
            while b"second" not in (await page(proxy, b"/routes")).body:
                await asyncio.sleep(0.02)
        assert (await client.ask(ask(), b"POST")).status == 200  # the same connection
        proxy.process.send(signal.SIGTERM)
        assert await proxy.process.ended() == 0
        assert proxy.process.events().count("policy_applied") >= 2


async def test_a_bad_policy_keeps_the_last_good_one_and_says_why(tmp_path: Path) -> None:
    async with with_policy(tmp_path) as (proxy, policy, _):
        policy.write_text(policy.read_text().replace("endpoints", "endpiontes"))
        proxy.process.send(signal.SIGHUP)
        refused = await proxy.process.event("policy_refused")
        assert "endpiontes" in str(refused["error"])
        assert (await once(proxy.port, ask())).status == 200
        assert b"first" in (await page(proxy, b"/routes")).body
        metrics = (await page(proxy, b"/metrics")).body
        assert re.search(rb"^sidecar_policy_version 1(\.0)?$", metrics, re.M)
        assert re.search(rb'^sidecar_policy_loads_total{outcome="refused"} [1-9]', metrics, re.M)
        policy.write_text(policy.read_text().replace("endpiontes", "endpoints"))
        proxy.process.send(signal.SIGHUP)
        assert (await once(proxy.port, ask())).status == 200


async def test_every_gauge_is_on_the_page() -> None:
    async with behind("--redis", "local") as proxy:
        metrics = (await page(proxy, b"/metrics")).body.decode()
        shown = dict(re.findall(r"^(sidecar_\w+) (\S+)$", metrics, re.M))
        assert {name for name, _, _ in WATCHED.values()} <= set(shown)
        assert (shown["sidecar_log_up"], shown["sidecar_log_local"]) == ("1", "1")
        assert (shown["sidecar_log_members"], shown["sidecar_log_crashes_total"]) == ("1", "0")
        assert float(shown["sidecar_log_read_age_seconds"]) < 5


async def test_sighup_without_a_policy_kills_nobody() -> None:
    async with behind("--settle", "0", "--drain", "1s") as proxy:
        proxy.process.send(signal.SIGHUP)
        await proxy.process.event("nothing_to_reload")
        assert (await once(proxy.port, ask())).status == 200
        proxy.process.send(signal.SIGTERM)
        assert await proxy.process.ended() == 0


# --- in process -------------------------------------------------------------------------------------------------------

HERE = Settings(listen=Listen("127.0.0.1", 0), admin=None, control=None, access_log="off")
NOBODY = single(["http://127.0.0.1:1"])


async def test_serving_raises_what_happened_and_not_a_group() -> None:
    with pytest.raises(UsageError):
        async with serving(HERE):
            pass
    with pytest.raises(PolicyErrors):
        async with serving(Settings(listen=HERE.listen, admin=None, control=None, policy=Path("/nowhere"))):
            pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError):
            taken_port = Listen("127.0.0.1", taken.getsockname()[1])
            async with serving(Settings(listen=taken_port, admin=None, control=None), NOBODY):
                pass
    with pytest.raises(ZeroDivisionError):
        async with serving(HERE, NOBODY):
            raise ZeroDivisionError


async def test_after_serving_its_port_is_free_and_no_task_is_left() -> None:
    before = asyncio.all_tasks()
    async with serving(HERE, NOBODY) as running:
        port = running.proxy_port
        assert running.admin_port is None
        async with connect(port) as client:
            await client.send(b"GET / HT")
    assert asyncio.all_tasks() == before
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


async def test_a_crash_of_what_learns_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen = asyncio.Event()
    ticks = 0

    def tick(_: Fleet, now: float) -> list[Transition]:
        nonlocal ticks
        ticks += 1
        if ticks == 1:
            raise RuntimeError("a bug")
        seen.set()
        return []

    monkeypatch.setattr(main, "_TICK_S", 0.01)
    monkeypatch.setattr(Fleet, "tick", tick)
    async with asyncio.timeout(10.0), serving(HERE, NOBODY) as running:
        await seen.wait()
        assert (await once(running.proxy_port, ask())).status == 502
    assert capfd.readouterr().out.count("tick_crashed") == 1


async def test_drain_said_twice_is_one_drain() -> None:
    async with serving(HERE, NOBODY) as running:
        running.drain()
        running.drain()
        assert running.stopping.is_set()


async def test_a_refused_policy_changes_nothing_but_what_is_told() -> None:
    async with serving(HERE, NOBODY) as running:
        before = running.store.current
        running.refuse("line 3: nonsense")
        assert running.store.current is before and running.store.last_error == "line 3: nonsense"


async def test_a_signal_after_the_end_of_a_drain_makes_no_failure_of_it() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    try:
        main.Signals().ignore()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        for number, handler in zip((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)
