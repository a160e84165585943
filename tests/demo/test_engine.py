import asyncio
import json
import re
import signal
import socket
import subprocess
import sys

import msgspec
import pytest

from sidecar.demo.engine import Engine, main
from sidecar.demo.script import Fault, Kind, Script
from tests.demo.requests import CHAT, ask, engine_and_client, get, plain_for, post, refused, stream_for, talk
from tests.harness import connect

STREAM = ask(3, stream=True)
PLAIN = ask(3, stream=False)


def steer(method: bytes, path: bytes, body: bytes = b"") -> bytes:
    return b"%b %b HTTP/1.1\r\nhost: engine\r\ncontent-length: %d\r\n\r\n%b" % (method, path, len(body), body)


# --- pages ----------------------------------------------------------------------------------------------------------


async def test_health_follows_the_script() -> None:
    async with engine_and_client() as (engine, client):
        assert (await client.ask(get(b"/health"))).status == 200
        engine.script = Script(healthy=False)
        assert (await client.ask(get(b"/health"))).status == 503


async def test_health_stays_well_while_requests_hang() -> None:
    async with (
        Engine(Script(fault=Fault(Kind.HANG))) as engine,
        connect(engine.port) as hanging,
        connect(engine.port) as client,
    ):
        await hanging.send(post(STREAM))
        assert (await client.ask(get(b"/health"))).status == 200
        assert hanging.unread == b""


async def test_models_are_listed() -> None:
    async with talk(Script(models=("a", "b"))) as client:
        answer = json.loads((await client.ask(get(b"/v1/models"))).body)
        assert [model["id"] for model in answer["data"]] == ["a", "b"]


async def test_metrics_show_what_runs_and_what_waits() -> None:
    async with (
        Engine(Script(slots=1, first_token_s=60.0)) as engine,
        connect(engine.port) as one,
        connect(engine.port) as two,
        connect(engine.port) as client,
    ):
        await one.send(post(STREAM))
        await one.response_head()
        await two.send(post(STREAM))
        await two.settled()
        text = (await client.ask(get(b"/metrics"))).body.decode()
        assert re.search(r'^vllm:num_requests_running\{engine="0",model_name="demo"\} 1\.0$', text, re.M)
        assert re.search(r'^vllm:num_requests_waiting\{engine="0",model_name="demo"\} 1\.0$', text, re.M)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (get(b"/nothing"), 404),
        (get(CHAT), 405),
        (post(b"{}", b"/health"), 405),
        (post(b"{}", b"/nothing"), 404),
        (post(b'{"model":'), 400),
        (post(b"[]"), 400),
        (post(b'{"max_tokens":"three"}'), 400),
    ],
)
async def test_wrong_requests_get_the_status_of_a_real_engine(request_: bytes, status: int) -> None:
    async with engine_and_client() as (engine, client):
        answer = await client.ask(request_)
        assert answer.status == status
        assert json.loads(answer.body)
        # The connection goes on.
        assert (await client.ask(post(PLAIN), b"POST")).status == 200
        assert engine.counters.live == 0


async def test_unknown_model_is_refused_where_the_script_says_so() -> None:
    async with engine_and_client(Script(any_model=False)) as (engine, client):
        answer = await client.ask(post(b'{"model":"other"}'), b"POST")
        assert answer.status == 404 and json.loads(answer.body)["error"]["type"] == "NotFoundError"
        assert (await client.ask(post(b'{"model":"demo"}'), b"POST")).status == 200
        assert (await client.ask(post(b"{}"), b"POST")).status == 200
        assert engine.counters.refused == 1


# --- when a fault strikes -------------------------------------------------------------------------------------------


async def test_fault_spares_then_strikes_then_heals() -> None:
    async with talk(fault=Fault(Kind.STATUS, skip=2, times=3)) as client:
        seen = [(await client.ask(post(PLAIN), b"POST")).status for _ in range(7)]
        assert seen == [200, 200, 500, 500, 500, 200, 200]


async def test_fault_of_a_share_strikes_by_the_requests_id() -> None:
    fault = Fault(Kind.STATUS, share=0.5, times=4)
    ids = [f"r{number}" for number in range(16)]
    in_question = [name for name in ids if fault.strikes(name)]
    assert 4 < len(in_question) < len(ids)
    async with talk(fault=fault) as client:
        struck = [
            name for name in ids if (await client.ask(post(PLAIN, request_id=name), b"POST")).status == fault.status
        ]
    assert struck == in_question[:4]


async def test_prompt_and_spread_make_the_first_token_later() -> None:
    script = Script(first_token_per_prompt_token_s=0.001, spread=0.2)
    long = ask(3, stream=True, messages=[{"role": "user", "content": "x" * 200}])
    async with engine_and_client(script) as (engine, client):
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert (await client.ask(post(long), b"POST")).body == stream_for(long, 3)
        took_s = loop.time() - began
    assert took_s >= script.first_token_after_s("r1", len(long) // 4, 0) - 0.001
    assert engine.counters.completed == 1


async def test_setting_a_fault_again_starts_its_count_again() -> None:
    async with engine_and_client(fault=Fault(Kind.STATUS, times=1)) as (engine, client):
        assert (await client.ask(post(PLAIN), b"POST")).status == 500
        assert (await client.ask(post(PLAIN), b"POST")).status == 200
        engine.fail(Fault(Kind.STATUS, times=1))
        assert (await client.ask(post(PLAIN), b"POST")).status == 500


async def test_fault_ends_by_itself_after_its_time() -> None:
    async with engine_and_client() as (engine, client):
        engine.fail(Fault(Kind.STATUS, for_s=0.02))
        assert (await client.ask(post(PLAIN), b"POST")).status == 500
        async with asyncio.timeout(2):
            while engine.script.fault is not None:
                await asyncio.sleep(0.005)
        assert (await client.ask(post(PLAIN), b"POST")).status == 200


async def test_later_fault_is_not_healed_by_the_time_of_an_earlier_one() -> None:
    async with Engine() as engine:
        engine.fail(Fault(Kind.STATUS, for_s=0.01))
        engine.fail(Fault(Kind.STALL))
        await asyncio.sleep(0.03)
        assert engine.script.fault == Fault(Kind.STALL)


async def test_requests_own_header_overrides_the_script() -> None:
    async with talk(fault=Fault(Kind.STATUS)) as client:
        mine = post(PLAIN, CHAT, b'x-demo-fault: {"kind":"status","status":529}')
        assert (await client.ask(mine, b"POST")).status == 529


async def test_header_that_is_no_fault_is_not_skipped_in_silence() -> None:
    async with talk() as client:
        answer = await client.ask(post(PLAIN, CHAT, b"x-demo-fault: stall"), b"POST")
        assert answer.status == 400 and b"x-demo-fault" in answer.body


async def test_faults_spare_health_models_and_metrics() -> None:
    async with talk(fault=Fault(Kind.RST_BEFORE_HEAD)) as client:
        for path in (b"/health", b"/v1/models", b"/metrics"):
            assert (await client.ask(get(path))).status == 200


# --- death ----------------------------------------------------------------------------------------------------------


async def test_dead_engine_resets_and_refuses_until_it_is_healed_on_the_same_port() -> None:
    async with Engine(Script(token_gap_s=60.0)) as engine:
        async with connect(engine.port) as busy, connect(engine.port) as idle:
            await busy.send(post(STREAM))
            await busy.response_head()
            await idle.settled()
            engine.fail(Fault(Kind.DIE))
            await busy.rest()
            await idle.rest()
            assert isinstance(busy.error, ConnectionResetError) and isinstance(idle.error, ConnectionResetError)
        assert await refused(engine.port)
        assert engine.counters.live == engine.counters.open == 0
        assert engine.counters.aborted == 1
        engine.script = Script()
        async with connect(engine.port) as client:
            assert (await client.ask(post(STREAM), b"POST")).body == stream_for(STREAM, 3)


async def test_engine_may_die_and_come_back_many_times_at_once() -> None:
    async with Engine() as engine:
        for _ in range(5):
            engine.fail(Fault(Kind.DIE))
            engine.heal()
        await asyncio.sleep(0.01)
        async with connect(engine.port) as client:
            assert (await client.ask(post(PLAIN), b"POST")).status == 200
        engine.fail(Fault(Kind.DIE))
        await asyncio.sleep(0.01)
        assert await refused(engine.port)


async def test_engine_may_be_dead_from_its_start() -> None:
    async with Engine(Script(fault=Fault(Kind.DIE))) as engine:
        await asyncio.sleep(0)
        assert await refused(engine.port)


@pytest.mark.parametrize("fault", [None, Fault(Kind.DIE), Fault(Kind.HANG)], ids=str)
async def test_stop_leaves_nothing_and_twice_is_harmless(fault: Fault | None) -> None:
    engine = Engine(Script(token_gap_s=60.0))
    await engine.start()
    async with connect(engine.port) as client:
        await client.send(post(STREAM))
        await client.settled()
        if fault is not None:
            engine.fail(fault)
        await engine.stop()
        await engine.stop()
        await client.rest()
    assert engine.counters.open == engine.counters.live == 0


async def test_script_may_be_set_before_the_start_and_after_the_stop() -> None:
    engine = Engine()
    engine.fail(Fault(Kind.STATUS, for_s=60.0))
    await engine.start()
    async with connect(engine.port) as client:
        assert (await client.ask(post(PLAIN), b"POST")).status == 500
    await engine.stop()
    engine.fail(Fault(Kind.DIE))
    engine.heal()
    await asyncio.sleep(0.01)
    assert await refused(engine.port)


# --- slots ----------------------------------------------------------------------------------------------------------


async def test_slots_are_given_in_the_order_of_coming() -> None:
    async with (
        Engine(Script(slots=1, token_gap_s=0.003)) as engine,
        connect(engine.port) as one,
        connect(engine.port) as two,
        connect(engine.port) as three,
    ):
        for client in (one, two, three):
            await client.send(post(STREAM))
            await client.settled()
        assert (engine.counters.live, engine.counters.waiting) == (3, 2)
        assert two.unread == b""
        for client in (one, two, three):
            assert (await client.response(b"POST")).body == stream_for(STREAM, 3)
        assert (engine.counters.live, engine.counters.waiting, engine.counters.completed) == (0, 0, 3)


async def test_one_more_than_the_queue_takes_gets_503() -> None:
    async with (
        Engine(Script(slots=1, queue=1, first_token_s=60.0)) as engine,
        connect(engine.port) as one,
        connect(engine.port) as two,
        connect(engine.port) as three,
    ):
        await one.send(post(STREAM))
        await one.response_head()
        await two.send(post(STREAM))
        await two.settled()
        answer = await three.ask(post(STREAM), b"POST")
        assert answer.status == 503 and b"queue is full" in answer.body
        assert (engine.counters.live, engine.counters.waiting, engine.counters.refused) == (2, 1, 1)


async def test_one_that_leaves_the_queue_gives_its_turn_to_the_next() -> None:
    async with (
        Engine(Script(slots=1, first_token_s=0.03)) as engine,
        connect(engine.port) as one,
        connect(engine.port) as three,
    ):
        async with connect(engine.port) as two:
            await one.send(post(STREAM))
            await one.response_head()
            await two.send(post(STREAM))
            await two.settled()
            await three.send(post(STREAM))
            await three.settled()
            assert engine.counters.waiting == 2
        assert (await three.response(b"POST")).body == stream_for(STREAM, 3)
        assert (engine.counters.aborted, engine.counters.waiting) == (1, 0)


# --- steering over HTTP ---------------------------------------------------------------------------------------------


async def test_fault_is_set_seen_and_healed_over_http() -> None:
    async with talk() as client:
        assert (await client.ask(get(b"/_fault"))).body == b"null"
        said = await client.ask(steer(b"POST", b"/_fault", b'{"kind":"status","status":502}'))
        assert json.loads(said.body) == {"kind": "status", "status": 502}
        assert json.loads((await client.ask(get(b"/_fault"))).body) == {"kind": "status", "status": 502}
        assert (await client.ask(post(PLAIN), b"POST")).status == 502
        assert (await client.ask(steer(b"DELETE", b"/_fault"))).status == 200
        assert (await client.ask(post(PLAIN), b"POST")).body == plain_for(PLAIN, 3)


async def test_script_is_changed_in_part_over_http() -> None:
    async with engine_and_client(Script(tokens=9, models=("m",))) as (engine, client):
        said = await client.ask(steer(b"POST", b"/_script", b'{"token_gap_s":0.5}'))
        assert said.status == 200
        assert engine.script == Script(tokens=9, models=("m",), token_gap_s=0.5)
        assert msgspec.json.decode((await client.ask(get(b"/_script"))).body, type=Script) == engine.script


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (b"/_fault", b'{"kind":"sulk"}'),
        (b"/_fault", b"stall"),
        (b"/_script", b'{"tokens":-1}'),
        (b"/_script", b"[]"),
        (b"/_script", b'{"speed":1}'),
    ],
)
async def test_bad_steering_is_refused_and_changes_nothing(path: bytes, body: bytes) -> None:
    async with engine_and_client() as (engine, client):
        assert (await client.ask(steer(b"POST", path, body))).status == 400
        await asyncio.sleep(0.01)
        assert engine.script == Script()


async def test_counters_are_seen_over_http() -> None:
    async with talk() as client:
        await client.ask(post(STREAM), b"POST")
        counters = json.loads((await client.ask(get(b"/_counters"))).body)
        assert (counters["seen"], counters["completed"], counters["tokens"], counters["live"]) == (1, 1, 3, 0)


async def test_control_port_outlives_death() -> None:
    engine = Engine()
    await engine.start(control_port=0)
    assert engine.control_port
    try:
        async with connect(engine.control_port) as control:
            await control.ask(steer(b"POST", b"/_fault", b'{"kind":"die"}'))
            await asyncio.sleep(0.01)
            assert await refused(engine.port)
            assert (await control.ask(steer(b"DELETE", b"/_fault"))).status == 200
            assert (await control.ask(post(PLAIN), b"POST")).status == 404
        async with connect(engine.port) as client:
            assert (await client.ask(post(PLAIN), b"POST")).status == 200
    finally:
        await engine.stop()


async def test_death_asked_for_over_http_is_confirmed_first() -> None:
    async with engine_and_client() as (engine, client):
        answer = await client.ask(steer(b"POST", b"/_fault", b'{"kind":"die","for_s":0.02}'))
        assert answer.status == 200
        await client.rest()
        async with asyncio.timeout(2):
            while engine.script.fault is not None:
                await asyncio.sleep(0.005)
        async with connect(engine.port) as again:
            assert (await again.ask(get(b"/health"))).status == 200


async def test_kept_requests_are_bounded() -> None:
    async with engine_and_client(Script(keep=2)) as (engine, client):
        for number in range(5):
            await client.ask(post(PLAIN, request_id=f"r{number}"), b"POST")
        assert [request.request_id for request in engine.received] == ["r3", "r4"]
        engine.script = Script(keep=0)
        await client.ask(post(PLAIN), b"POST")
        assert not engine.received


# --- as a process ---------------------------------------------------------------------------------------------------


def test_process_tells_its_ports_serves_and_ends_on_sigterm() -> None:
    command = [
        sys.executable,
        "-m",
        "sidecar.demo.engine",
        "--port",
        "0",
        "--control-port",
        "0",
        "--script",
        '{"tokens":2}',
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        told = re.fullmatch(
            r"engine listening on 127\.0\.0\.1:(\d+) control on 127\.0\.0\.1:(\d+)\n", process.stdout.readline()
        )
        assert told
        with socket.create_connection(("127.0.0.1", int(told[1])), timeout=5) as sock:
            sock.sendall(post(b"{}"))
            assert b"t0 t1 " in sock.recv(65536)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("argv", [["--script", "{"], ["--script", '{"tokens":-1}'], ["--port", "many"], ["--what"]])
def test_wrong_arguments_are_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert argv[0] in capsys.readouterr().err
