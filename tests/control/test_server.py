from sidecar.control.pb import control_pb2 as pb
from tests.control.client import put, served, stream
from tests.control.desk import FakeDesk

V2 = pb.Endpoint(url="http://10.0.0.2:8000", zone="a", node="n-2")


async def test_a_snapshot_comes_first_then_every_change() -> None:
    desk = FakeDesk()
    async with served(desk) as control, stream(control.port) as client, stream(control.port) as other:
        assert await client.snapshot() == await other.snapshot() == {}
        ack = await client.ack(put(0.15, "v2", engine="vllm", endpoints=[V2], update_id="u-1"))
        assert (ack.update_id, ack.service_name, ack.table_version, ack.repeated, ack.number) == (
            "u-1",
            "chat",
            1,
            False,
            1,
        )
        assert dict(ack.weights) == {"v1": 0.85, "v2": 0.15}
        table = await other.table()
        assert (table.service_name, table.table_version, table.why) == ("chat", 1, "update")
        assert [(v.name, v.weight, v.engine) for v in table.versions] == [("v1", 0.85, "vllm"), ("v2", 0.15, "vllm")]
        assert table.versions[1].endpoints == [V2]
        async with stream(control.port) as late:
            assert await late.snapshot() == {"chat": table}
