"""An engine's own paths go by untouched, also where its inference is translated: every recording of one crosses."""

import re
from pathlib import Path

import pytest

from tests import captures
from tests.captures import body, status
from tests.harness import Upstream, answers, request
from tests.under_test import JSON, endpoint, service, sidecar

HERE = Path(captures.__file__).parent
ENGINES = {"triton": "triton", "triton_stub_dead": "triton", "mii": "deepspeed"}
_ASKED = re.compile(r"^> (\w+) (\S+) HTTP", re.M)
_TYPE = re.compile(rb"^< content-type: (.*?)\r?$", re.M | re.I)


def recordings() -> list[str]:
    return [
        f"{folder}/{path.name}"
        for folder in ENGINES
        for path in sorted((HERE / folder).glob("*.txt"))
        if b"\n< HTTP/1." in path.read_bytes()
    ]


def sent(name: str) -> bytes:
    """The answer that a transcript shows."""
    return body(name) if b"bytes data]" in (HERE / name).read_bytes().partition(b"\n< HTTP")[2] else b""


def asked(name: str) -> tuple[bytes, bytes]:
    found = _ASKED.search((HERE / name).read_text(encoding="utf-8"))
    assert found is not None, name
    return found[1].encode(), found[2].encode()


def is_inference(path: bytes) -> bool:
    return path.startswith(b"/v1/") or path == b"/generate"


@pytest.mark.parametrize("name", [name for name in recordings() if not is_inference(asked(name)[1])])
async def test_a_recorded_answer_of_an_engines_own_crosses(name: str, split: bool) -> None:
    method, path = asked(name)
    said, told = sent(name), status(name)
    media = _TYPE.search((HERE / name).read_bytes())
    lines = [b"HTTP/1.1 %d X" % told, b"content-length: %d" % len(said)]
    if media is not None:
        lines.append(b"content-type: " + media[1])
    answer = b"\r\n".join(lines) + b"\r\n\r\n" + said
    kind = ENGINES[name.partition("/")[0]]
    wanted = b'{"text_input":"hi","unknown":[1]}' if method == b"POST" else b""
    async with Upstream(answers(answer), split=split, eager=True) as upstream:
        plan = service(endpoint(upstream, engine=kind))
        async with sidecar(plan) as proxy, proxy.client(split=split) as client:
            headers = [JSON] if wanted else []
            got = await client.ask(request(path, method=method, headers=headers, body=wanted), method)
            assert (got.status, got.body) == (told, said)
            assert upstream.requests[0].body == wanted
            assert upstream.requests[0].start == b"%b %b HTTP/1.1" % (method, path)
            if media is not None:
                assert got.header(b"content-type") == media[1]
