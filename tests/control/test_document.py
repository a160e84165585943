"""What docs/descriptor-stream.md shows works, and what it says in numbers is what the code has."""

import asyncio
import os
import re
import sys

from sidecar.control import server, stream
from sidecar.control.convert import CODES, PIECE_BYTES
from sidecar.control.pb import control_pb2 as pb
from sidecar.routes import QUEUE
from tests.checks.drift import ROOT
from tests.control.client import served
from tests.control.desk import FakeDesk

TEXT = (ROOT / "docs" / "descriptor-stream.md").read_text(encoding="utf-8")


async def example(port: int) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    environ = {**os.environ, "CONTROL": f"127.0.0.1:{port}"}
    run = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=environ, stdout=asyncio.subprocess.PIPE)
    async with asyncio.timeout(20):
        said, _ = await run.communicate()
    assert run.returncode == 0
    return said.decode()


async def test_the_example_works_and_ends() -> None:
    desk = FakeDesk()
    async with served(desk) as control:
        assert await example(control.port) == "version 1 {'v1': 0.85, 'v2': 0.15}\n"
        assert desk.submitted[0].by == "stream@127.0.0.1 (ci)"


def test_every_code_is_explained() -> None:
    assert set(re.findall(r"^\| `([A-Z_]+)` +\|", TEXT, re.MULTILINE)) == {pb.Nack.Code.Name(n) for n in CODES.values()}


def test_its_numbers_are_the_code_s() -> None:
    said = " ".join(TEXT.split())
    assert f"at most {server.MESSAGE_BYTES >> 20} MiB" in said
    assert f"| {server.CALLS:,} |" in said
    assert f"pinged every {server.PING_S} s, ended if it does not answer in {server.PONG_S} s" in said
    assert f"within {stream.FIRST_S * 1000:.0f} ms" in said
    assert f"pieces of {PIECE_BYTES >> 20} MiB" in said
    assert f"at most {QUEUE:,} events wait" in said
