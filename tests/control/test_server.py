import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from sidecar.control.pb import control_pb2 as pb
from sidecar.control.server import MESSAGE_BYTES, SERVICE, STOP_S, Control
from sidecar.core.desk import Notice
from sidecar.core.table import Table, Version
from tests.certificates import Certificates
from tests.control.client import Client, Ended, Line, channel, on, put, served, stream, trusting
from tests.control.desk import FakeDesk
from tests.harness import awake, eventually
from tests.under_test import service as plain_service
from tests.under_test import sidecar

V1 = pb.Endpoint(url="http://10.0.0.1:8000")
V2 = pb.Endpoint(url="http://10.0.0.2:8000", zone="a", node="n-2")
HASH, OTHER_HASH = "ab" * 32, "cd" * 32

Served = Callable[[], contextlib.AbstractAsyncContextManager[int]]


@contextlib.asynccontextmanager
async def _fake() -> AsyncIterator[int]:
    async with served(FakeDesk(), []) as control:
        yield control.port


@contextlib.asynccontextmanager
async def _real() -> AsyncIterator[int]:
    from sidecar.policy.schema import Endpoint
    from sidecar.settings import Listen

    file = plain_service(Endpoint(url=V1.url, version="v1"), name="chat")
    async with sidecar(file, control=Listen("127.0.0.1", 0), log_level="error") as proxy:
        assert proxy.running.descriptors is not None
        yield proxy.running.descriptors.port


@pytest.fixture(autouse=True)
def nothing_said_by_grpc(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """gRPC logs what it does not expect, which is our fault then."""
    yield
    assert [record for record in caplog.get_records("call") if record.name.startswith("grpc")] == []
    assert "chttp2" not in capfd.readouterr().err


@pytest.fixture(params=[_fake, _real], ids=["fake", "real"])
def serves(request: pytest.FixtureRequest) -> Served:
    """A server over the fake desk and a whole sidecar: what the fake promises, the real one keeps."""
    return request.param  # type: ignore[no-any-return]


def grow(weight: float, **more: Any) -> pb.DescriptorUpdate:
    """v2 with that weight, as a release tool says it first."""
    return put(weight, "v2", **{"engine": "vllm", "endpoints": [V2], **more})


# --- what is asked and told, over the fake desk and the real one ------------------------------------------------------


async def test_a_snapshot_comes_first_then_every_change(serves: Served) -> None:
    async with serves() as port, stream(port) as client, stream(port) as other:
        assert await client.snapshot() == await other.snapshot() == {}
        ack = await client.ack(grow(0.15, update_id="u-1"))
        assert (ack.update_id, ack.service_name, ack.number, ack.repeated) == ("u-1", "chat", 1, False)
        assert dict(ack.weights) == {"v1": 0.85, "v2": 0.15}
        assert ack.table_version > 0
        table = await other.table()
        assert (table.service_name, table.table_version, table.why) == ("chat", ack.table_version, "update")
        assert table.by.startswith("stream@127.0.0.1")
        assert [(v.name, v.weight, v.engine) for v in table.versions] == [("v1", 0.85, "vllm"), ("v2", 0.15, "vllm")]
        assert list(table.versions[1].endpoints) == [V2]
        async with stream(port) as late:
            assert (await late.snapshot()).keys() == {"chat"}


async def test_updates_of_one_stream_are_answered_in_their_order(serves: Served) -> None:
    async with serves() as port, stream(port) as client:
        for number in range(1, 21):
            await client.send(grow(number / 100, update_id=f"u-{number}"))
        answers = [await client.kind("ack") for _ in range(20)]
        assert [event.ack.update_id for event in answers] == [f"u-{number}" for number in range(1, 21)]
        assert [event.ack.number for event in answers] == list(range(1, 21))
        versions = [event.ack.table_version for event in answers]
        assert versions == sorted(set(versions))
        told = [event.table.table_version for event in client.passed if event.HasField("table")]
        assert told == sorted(set(told))


async def test_an_id_given_twice_is_one_update(serves: Served) -> None:
    async with serves() as port, stream(port) as client, stream(port) as other:
        first = await client.ack(grow(0.15, update_id="u-1"))
        for again in (client, other):
            ack = await again.ack(grow(0.15, update_id="u-1"))
            assert (ack.table_version, ack.repeated) == (first.table_version, True)
        nack = await other.nack(grow(0.5, update_id="u-1"))
        assert (nack.code, nack.last_good_version) == (pb.Nack.CONFLICT, first.table_version)


async def test_an_update_made_for_an_earlier_table_is_stale(serves: Served) -> None:
    async with serves() as port, stream(port) as client:
        first = (await client.ack(grow(0.15))).table_version
        second = (await client.ack(put(0.2, "v2", expected_table_version=first))).table_version
        nack = await client.nack(put(0.3, "v2", expected_table_version=first, update_id="late"))
        assert (nack.code, nack.last_good_version, nack.update_id) == (pb.Nack.STALE, second, "late")
        assert nack.message


BAD: list[tuple[str, pb.DescriptorUpdate | bytes, "pb.Nack.Code", str]] = [
    ("endpoint form", put(0.3, "v2", endpoints=[pb.Endpoint(url="10.0.0.9:8000")]), pb.Nack.INVALID, "10.0.0.9:8000"),
    ("no host", put(0.3, "v2", endpoints=[pb.Endpoint(url="http://:8000")]), pb.Nack.INVALID, "host"),
    ("another scheme", put(0.3, "v2", endpoints=[pb.Endpoint(url="grpc://a:1")]), pb.Nack.INVALID, "grpc://a:1"),
    ("a path", put(0.3, "v2", endpoints=[pb.Endpoint(url="http://a:1/v1")]), pb.Nack.INVALID, "path"),
    ("port 0", put(0.3, "v2", endpoints=[pb.Endpoint(url="http://a:0")]), pb.Nack.INVALID, "port 0"),
    ("below 0", put(-1, "v2"), pb.Nack.INVALID, "canary_weight is -1"),
    ("above 1", put(1.5, "v2"), pb.Nack.INVALID, "canary_weight is 1.5"),
    ("NaN", put(math.nan, "v2"), pb.Nack.INVALID, "canary_weight is nan"),
    ("infinite", put(math.inf, "v2"), pb.Nack.INVALID, "canary_weight is inf"),
    ("sum of 0", put(version="v2", weights={"v1": 0, "v2": 0}), pb.Nack.INVALID, ""),
    ("sum above 1", put(version="v2", weights={"v1": 0.6, "v2": 0.6}), pb.Nack.INVALID, ""),
    ("NaN in the split", put(version="v2", weights={"v1": math.nan, "v2": 1}), pb.Nack.INVALID, "nan"),
    ("a version nobody knows", put(version="v2", weights={"v1": 0.5, "v9": 0.5}), pb.Nack.NOT_FOUND, "v9"),
    ("stale", put(0.3, "v2", expected_table_version=77), pb.Nack.STALE, "77"),
    ("wrong hash", put(0.3, "v2", schema_hash=OTHER_HASH), pb.Nack.CONFLICT, "schema"),
    ("no hash", put(0.3, "v2", schema_hash="abc"), pb.Nack.INVALID, "SHA-256"),
    ("unknown engine", put(0.3, "v2", engine="llamafile"), pb.Nack.INVALID, "llamafile"),
    ("new version without an engine", put(0.3, "v3", endpoints=[V1]), pb.Nack.INVALID, "engine"),
    ("last endpoint", put(version="v2", clear_endpoints=True), pb.Nack.CONFLICT, "endpoint"),
    ("an endpoint of another version", put(version="v2", endpoints=[V1]), pb.Nack.CONFLICT, "10.0.0.1:8000"),
    ("no service", put(0.3, "v2", service=""), pb.Nack.INVALID, "service_name is missing"),
    ("no version", put(0.3, ""), pb.Nack.INVALID, ""),
    ("a name with a line feed", put(0.3, "v\n2", engine="vllm"), pb.Nack.INVALID, ""),
    ("baseline nobody knows", put(version="v2", plan=pb.CanaryPlan(baseline="v9")), pb.Nack.INVALID, ""),
    ("no message", b"\xff\xff", pb.Nack.INVALID, "cannot be decoded"),
]


async def test_a_bad_update_is_refused_with_its_reason_and_changes_nothing(serves: Served) -> None:
    async with serves() as port, stream(port) as client:
        good = await client.ack(put(1.0, "v1", schema_hash=HASH))
        good = await client.ack(grow(0.1, schema_hash=HASH))
        for name, update, code, words in BAD:
            nack = await client.nack(update)
            assert (nack.code, words in nack.message) == (code, True), (name, nack)
            assert nack.message, name
            if isinstance(update, pb.DescriptorUpdate) and update.service_name:
                assert nack.last_good_version == good.table_version, (name, nack)
        async with stream(port) as late:
            table = (await late.snapshot())["chat"]
        assert table.table_version == good.table_version
        assert {version.name: version.weight for version in table.versions} == {"v1": 0.9, "v2": 0.1}
        assert (await client.ack(put(0.2, "v2"))).number == 2 + len(BAD) + 1


async def test_a_service_that_no_file_names_is_made(serves: Served) -> None:
    async with serves() as port, stream(port) as client:
        ack = await client.ack(put(1.0, "v1", "embed", engine="triton", endpoints=[V2], models=["embed-*"]))
        assert dict(ack.weights) == {"v1": 1.0}
        table = await client.table()
        assert (table.service_name, [*table.models]) == ("embed", ["embed-*"])


async def test_a_plan_begins_a_rollout_that_all_are_told(serves: Served) -> None:
    step = pb.CanaryPlan.Step(weight=0.05, min_s=60, min_samples=100)
    plan = pb.CanaryPlan(baseline="v1", steps=[step, pb.CanaryPlan.Step(weight=0.5, min_s=60, min_samples=100)])
    async with serves() as port, stream(port) as client:
        ack = await client.ack(put(None, "v2", engine="vllm", endpoints=[V2], plan=plan))
        assert dict(ack.weights) == {"v1": 0.95, "v2": 0.05}
        rollout = (await client.table()).rollout
        assert (rollout.version, rollout.phase, rollout.step) == ("v2", pb.Rollout.RUNNING, 0)
        assert rollout.plan.steps[0] == step
        await client.ack(put(0.3, "v2"))
        assert (await client.table()).rollout.phase == pb.Rollout.SUPERSEDED


# --- who listens ------------------------------------------------------------------------------------------------------


async def test_who_only_listens_need_not_say_anything() -> None:
    desk = FakeDesk()
    async with served(desk) as control, stream(control.port) as silent, stream(control.port) as closed:
        await closed.say_last()
        for client in (silent, closed):
            assert await client.snapshot() == {}
        desk.put(Table("chat", (Version("v1", 10_000),)), "me", "zone", "slow")
        desk.notice(Notice("chat", "version_down", "all open"))
        for client in (silent, closed):
            assert (await client.table()).evidence == "slow"
            assert (await client.kind("notice")).notice.kind == "version_down"


async def test_who_names_services_hears_of_them_alone() -> None:
    desk = FakeDesk()
    for name in ("a", "b", "c"):
        desk.put(Table(name), "me", "update")
    async with served(desk) as control, stream(control.port) as client:
        await client.subscribe("a", "c")
        assert (await client.snapshot()).keys() == {"a", "c"}
        for name in ("a", "b", "c"):
            desk.put(Table(name), "me", "update")
            desk.notice(Notice(name, "version_down", ""))
        desk.notice(Notice("", "draining", "the sidecar's own"))
        assert [(await client.table()).service_name for _ in range(2)] == ["a", "c"]
        await client.until(lambda event: event.notice.text == "the sidecar's own")
        assert {event.notice.service_name for event in client.passed if event.HasField("notice")} == {"a", "c"}
        await client.subscribe("b")
        assert (await client.snapshot()).keys() == {"b"}
        await client.subscribe()
        assert (await client.snapshot()).keys() == {"a", "b", "c"}
        assert [len(desk.feeds), control.streams] == [1, 1]


async def test_who_wants_answers_only_gets_them_and_the_end() -> None:
    desk = FakeDesk()
    async with served(desk) as control, stream(control.port) as client:
        await client.subscribe(answers_only=True)
        await client.ack(grow(0.1))
        await client.ack(grow(0.2))
        assert client.passed == []
        await client.send(grow(0.3, update_id="last"))
        await client.say_last()
        end = await client.end()
        assert end.code is grpc.StatusCode.OK
        assert [event.ack.update_id for event in client.passed] == ["last"]
        assert desk.feeds == []


async def test_who_reads_too_slowly_is_told_the_state_anew() -> None:
    desk = FakeDesk(limit=4)
    async with served(desk) as control, stream(control.port) as client:
        await client.snapshot()
        for number in range(10):  # in one turn of the loop: nobody could have taken any of them
            desk.put(Table("chat", (Version("v1", number),)), "me", "update")
        table = (await client.snapshot())["chat"]
        assert (table.table_version, table.versions[0].weight) == (10, 0.0009)
        assert control.counts.lagged == 1
        desk.put(Table("chat"), "me", "update")
        assert (await client.table()).table_version == 11
        assert not any(event.HasField("table") for event in client.passed)


async def test_a_client_that_does_not_read_holds_nobody_and_hears_all_at_last() -> None:
    versions = tuple(Version(f"v{number}", 0, signature={"a": "x" * 1_000}) for number in range(50))
    desk = FakeDesk(limit=8)
    async with served(desk) as control, stream(control.port) as stuck, stream(control.port) as other:
        await stuck.snapshot()
        await other.snapshot()
        for _ in range(200):
            desk.put(Table("chat", versions), "me", "update")
            await other.until(lambda event: event.HasField("table") or event.HasField("snapshot"))
        assert max(len(feed._events) for feed in desk.feeds) <= 8
        last = await stuck.until(lambda e: any(t.table_version == 200 for t in [e.table, *e.snapshot.tables]))
        assert last.HasField("snapshot") or last.HasField("table")
        assert control.counts.lagged >= 1


async def test_a_hundred_streams_hear_the_same() -> None:
    desk = FakeDesk()
    async with served(desk) as control, channel(control.port) as made, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(on(made)) for _ in range(100)]
        for client in clients:
            await client.snapshot()
        assert control.streams == len(desk.feeds) == 100
        desk.put(Table("chat", (Version("v1", 10_000),)), "me", "update")
        assert {(await client.table()).table_version for client in clients} == {1}
        for number, client in enumerate(clients[:10]):
            await client.send(grow(0.1, update_id=f"u-{number}"))
        acks = [(await client.kind("ack")).ack for client in clients[:10]]
        assert len({ack.table_version for ack in acks}) == 10


# --- who goes, and what fails -----------------------------------------------------------------------------------------


async def test_a_client_that_goes_leaves_nothing() -> None:
    desk = FakeDesk()
    async with served(desk) as control:
        for leave in ("cancel", "close"):
            async with channel(control.port) as made, on(made) as client:
                await client.snapshot()
                assert control.streams == 1
                if leave == "cancel":
                    client.call.cancel()
                    await eventually(lambda: control.streams == 0, "the stream's end")
            await eventually(lambda: control.streams == len(desk.feeds) == 0, "the stream's end")


async def test_a_client_that_goes_while_it_does_not_read_leaves_nothing() -> None:
    versions = tuple(Version(f"v{number}", 0, signature={"a": "x" * 1_000}) for number in range(90))
    desk = FakeDesk()
    async with served(desk) as control:
        for leave in ("cancel", "close"):
            async with channel(control.port) as made, on(made) as client:
                await client.snapshot()
                for _ in range(20):
                    desk.put(Table("chat", versions), "me", "update")
                    await asyncio.sleep(0.001)
                if leave == "cancel":
                    client.call.cancel()
                    await eventually(lambda: control.streams == 0, "the stream's end")
            await eventually(lambda: control.streams == len(desk.feeds) == 0, "the stream's end")


async def test_a_client_that_goes_in_the_middle_of_an_update_may_ask_again() -> None:
    desk = FakeDesk()
    async with served(desk) as control:
        desk.gate.clear()
        async with stream(control.port) as client:
            await client.send(grow(0.1, update_id="u"))
            await eventually(lambda: len(desk.submitted) == 1, "the update")
        await eventually(lambda: control.streams == 0, "the stream's end")
        desk.gate.set()
        async with stream(control.port) as again:
            assert not (await again.ack(grow(0.1, update_id="u"))).repeated


async def test_the_next_update_begins_after_the_answer() -> None:
    desk = FakeDesk()
    async with served(desk) as control, stream(control.port) as client, stream(control.port) as other:
        desk.gate.clear()
        for _ in range(3):
            await client.send(grow(0.1))
        await other.snapshot()
        assert len(desk.submitted) == 1
        desk.gate.set()
        for _ in range(3):
            await client.kind("ack")
        assert len(desk.submitted) == 3


async def test_a_log_that_is_away_is_said_and_the_stream_goes_on() -> None:
    desk, answers = FakeDesk(), []  # type: ignore[var-annotated]
    async with served(desk, None, answers) as control, stream(control.port) as client:
        desk.away = True
        assert (await client.nack(grow(0.1))).code == pb.Nack.UNAVAILABLE
        desk.away = False
        await client.ack(grow(0.1, update_id="u"))
        await client.ack(grow(0.1, update_id="u"))
        await client.nack(put(2.0))
    assert answers == ["unavailable", "accepted", "repeated", "invalid"]


async def test_a_fault_of_ours_ends_one_stream_and_is_logged() -> None:
    desk, lines = FakeDesk(), list[Line]()
    async with served(desk, lines) as control, stream(control.port) as client, stream(control.port) as other:
        await other.snapshot()
        desk.broken = ZeroDivisionError()
        await client.send(grow(0.1))
        assert (await client.end()).code is grpc.StatusCode.INTERNAL
        assert [(level, event) for level, event, _ in lines] == [("error", "control_stream_crashed")]
        desk.broken = None
        await other.ack(grow(0.1))


async def test_a_message_that_is_too_large_ends_its_stream_alone() -> None:
    desk = FakeDesk()
    async with served(desk) as control, stream(control.port) as client, stream(control.port) as other:
        await other.snapshot()
        with contextlib.suppress(asyncio.InvalidStateError):
            await client.send(grow(0.1, signature={"a": "x" * MESSAGE_BYTES}))
        assert (await client.end()).code is grpc.StatusCode.RESOURCE_EXHAUSTED
        large = [pb.Endpoint(url=f"http://10.0.{n // 250}.{n % 250 + 1}:8000") for n in range(5_000)]
        await other.ack(put(1.0, "v1", "large", engine="vllm", endpoints=large))
        assert len((await other.table()).versions[0].endpoints) == 5_000
        assert desk.submitted[0].service == "large"


# --- drain ------------------------------------------------------------------------------------------------------------


async def health(made: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(made)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_drain_answers_what_is_under_way_and_ends_every_stream() -> None:
    desk = FakeDesk()
    async with served(desk) as control, channel(control.port) as made:
        async with on(made) as idle, on(made) as busy, on(made) as done, on(made) as quiet:
            await quiet.subscribe(answers_only=True)
            for client in (idle, busy, done):
                await client.snapshot()
            await done.say_last()
            desk.gate.clear()
            await busy.send(grow(0.1, update_id="u"))
            await busy.send(grow(0.2, update_id="never"))
            await eventually(lambda: len(desk.submitted) == 1, "the update")
            control.drain()
            control.drain()
            await eventually(lambda: control.streams == 1, "the others' end")
            desk.gate.set()
            for client in (idle, busy, done, quiet):
                end = await client.end()
                assert (end.code, end.details) == (grpc.StatusCode.UNAVAILABLE, "draining")
            for client in (idle, busy, done):
                assert client.passed[-1].notice.kind == "draining"
            assert quiet.passed == []
            assert [event.ack.update_id for event in busy.passed if event.HasField("ack")] == ["u"]
        async with on(made) as late:
            assert (await late.end()).code is grpc.StatusCode.UNAVAILABLE
        assert await health(made) == NOT_SERVING
        assert desk.feeds == []


async def test_a_stream_that_hangs_does_not_hold_a_drain() -> None:
    versions = tuple(Version(f"v{number}", 0, signature={"a": "x" * 1_000}) for number in range(90))
    desk = FakeDesk()
    async with contextlib.AsyncExitStack() as stack:
        control = await stack.enter_async_context(served(desk))
        stuck = await stack.enter_async_context(stream(control.port))
        waiting = await stack.enter_async_context(stream(control.port))
        await stuck.snapshot()
        for _ in range(40):
            desk.put(Table("chat", versions), "me", "update")
        desk.gate.clear()
        await waiting.send(grow(0.1))
        await eventually(lambda: len(desk.submitted) == 1, "the update")
        async with awake() as ran:
            control.drain()
            await eventually(lambda: control.streams == 0, "the end of all")
            assert ran() < 1.0
        assert (await waiting.end()).code is grpc.StatusCode.UNAVAILABLE


async def test_leaving_the_server_ends_streams_and_frees_the_port() -> None:
    async with contextlib.AsyncExitStack() as clients:
        async with served(FakeDesk()) as control:
            client = await clients.enter_async_context(stream(control.port))
            await client.snapshot()
        assert (await client.end()).code is grpc.StatusCode.UNAVAILABLE
    before = asyncio.all_tasks()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", control.port))
    assert asyncio.all_tasks() == before == {asyncio.current_task()}


# --- who may ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("tls"))


async def test_writers_bring_the_token_and_readers_need_none(tmp_path: Path) -> None:
    path, lines, answers = tmp_path / "token", list[Line](), list[str]()
    path.write_text("secret\n")
    async with served(FakeDesk(), lines, answers, token_file=path) as control:
        async with stream(control.port) as client, stream(control.port, authorization="Bearer wrong") as wrong:
            assert await client.snapshot() == {}
            for each in (client, client, wrong):
                nack = await each.nack(grow(0.1, update_id="u"))
                assert (nack.code, nack.update_id) == (pb.Nack.DENIED, "u")
                assert "secret" not in nack.message
        async with stream(control.port, authorization="Bearer secret") as writer:
            ack = await writer.ack(grow(0.1))
            path.write_text("another")
            nack = await writer.nack(grow(0.2))
            assert (nack.code, nack.last_good_version) == (pb.Nack.DENIED, ack.table_version)
    assert [(level, event) for level, event, _ in lines] == [("warning", "control_denied")] * 3  # once a stream
    assert answers == ["denied"] * 3 + ["accepted", "denied"]


async def test_what_a_proxy_hands_on_may_not_write() -> None:
    async with served(FakeDesk(), []) as control, stream(control.port, x_forwarded_for="10.0.0.1") as client:
        assert (await client.nack(grow(0.1))).code == pb.Nack.DENIED


@pytest.mark.parametrize("where", ["a socket", "nowhere"])
async def test_in_a_pod_the_engine_beside_may_not_write(where: str, tmp_path: Path) -> None:
    from sidecar.policy.schema import Endpoint
    from sidecar.settings import Listen

    file = plain_service(Endpoint(url=V1.url, version="v1"), name="chat")
    taken = {"operators": Listen("", 0, str(tmp_path / "orders"))} if where == "a socket" else {"orders": False}
    async with sidecar(file, control=Listen("127.0.0.1", 0), log_level="error", **taken) as proxy:
        assert proxy.running.descriptors is not None
        async with stream(proxy.running.descriptors.port) as client:
            await client.snapshot()
            nack = await client.nack(grow(0.1))
            assert nack.code == pb.Nack.DENIED and "--operators" in nack.message


async def test_tls(certificates: Certificates) -> None:
    cert, key = certificates.leaf("localhost")
    async with served(FakeDesk(), tls_cert=cert, tls_key=key) as control:
        async with stream(control.port, trusting(certificates.ca)) as client:
            assert await client.snapshot() == {}
            await client.ack(grow(0.1))
        async with stream(control.port) as plain:
            assert (await plain.end()).code is grpc.StatusCode.UNAVAILABLE


async def test_a_certificate_of_the_authority_is_needed_and_names_who_wrote(certificates: Certificates) -> None:
    cert, key = certificates.leaf("localhost")
    async with served(FakeDesk(), tls_cert=cert, tls_key=key, tls_ca=certificates.ca) as control:
        async with stream(control.port, trusting(certificates.ca, certificates.leaf("ci.example"))) as client:
            await client.ack(grow(0.1, by="argo"))
            assert (await client.table()).by == "ci.example (argo)"
        async with stream(control.port, trusting(certificates.ca)) as nobody:
            assert (await nobody.end()).code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
@pytest.mark.parametrize("content", [None, "nonsense"], ids=["missing", "nonsense"])
async def test_a_file_that_cannot_be_used_is_named(
    name: str, content: str | None, certificates: Certificates, tmp_path: Path
) -> None:
    cert, key = certificates.leaf("localhost")
    files: dict[str, Any] = {"tls_cert": cert, "tls_key": key, "tls_ca": certificates.ca, name: tmp_path / "bad.pem"}
    if content is not None:
        (tmp_path / "bad.pem").write_text(content)
    with pytest.raises(OSError, match=r"bad\.pem"):
        await _enter(served(FakeDesk(), **files))


async def test_a_token_s_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-token"):
        await _enter(served(FakeDesk(), token_file=tmp_path / "no-token"))


async def test_a_taken_port_is_told_in_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    async with served(FakeDesk()) as control:
        with pytest.raises(OSError, match=rf"cannot listen at 127\.0\.0\.1:{control.port} \(--control\): .*in use"):
            await _enter(served(FakeDesk(), port=control.port))
    assert capfd.readouterr().err == ""


async def test_a_host_that_is_none_is_told_in_a_line() -> None:
    with pytest.raises(OSError, match=r"cannot listen at nowhere\.invalid:0 \(--control\)"):
        await _enter(served(FakeDesk(), host="nowhere.invalid"))


async def _enter(entering: contextlib.AbstractAsyncContextManager[Control]) -> None:
    try:
        async with entering:
            raise AssertionError("it serves")
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


# --- what tools ask first ---------------------------------------------------------------------------------------------


async def test_health_says_that_we_serve() -> None:
    async with served(FakeDesk()) as control, channel(control.port) as made:
        assert await health(made) == await health(made, SERVICE) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as told:
            await health(made, "nobody")
        assert told.value.code() is grpc.StatusCode.NOT_FOUND


async def test_who_watches_health_is_told_of_the_drain_and_holds_no_end() -> None:
    async with contextlib.AsyncExitStack() as clients:
        async with served(FakeDesk()) as control:
            made = await clients.enter_async_context(channel(control.port))
            watched = health_pb2_grpc.HealthStub(made).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watched.read()).status == SERVING
            control.drain()
            assert (await watched.read()).status == NOT_SERVING
            ran = await clients.enter_async_context(awake())
        assert ran() < STOP_S + 0.5
        assert await watched.code() is not grpc.StatusCode.OK


async def test_reflection_tells_the_protocol() -> None:
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE),
    ]
    async with served(FakeDesk()) as control, channel(control.port) as made:
        stub = reflection_pb2_grpc.ServerReflectionStub(made)
        names, file = [answer async for answer in stub.ServerReflectionInfo(iter(asked))]
    assert SERVICE in {service.name for service in names.list_services_response.service}
    assert file.file_descriptor_response.file_descriptor_proto == [pb.DESCRIPTOR.serialized_pb]


async def test_another_method_is_not_implemented() -> None:
    async with served(FakeDesk()) as control, channel(control.port) as made:
        with pytest.raises(grpc.aio.AioRpcError) as told:
            nothing: Any = made.unary_unary(f"/{SERVICE}/Nothing")
            await nothing(b"")
        assert told.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_what_ends_a_stream_has_words() -> None:
    assert "draining" in str(Ended(grpc.StatusCode.UNAVAILABLE, "draining"))
    assert Client.__doc__
