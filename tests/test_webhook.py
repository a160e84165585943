"""The webhook as an API server meets it: over TLS, with reviews as JSON."""

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import sidecar.webhook
from sidecar.cli import main
from sidecar.inject.pod import Defaults, Injected, inject
from sidecar.inject.review import Rules
from sidecar.settings import Listen
from sidecar.webhook import MAX_BYTES, Certificates, serving
from tests.certificates import Certificates as Authority
from tests.inject.applying import applied
from tests.inject.test_review import BAD, POD, review

LOCAL = Listen("127.0.0.1", 0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


Said = list[tuple[str, dict[str, object]]]


@asynccontextmanager
async def webhook(authority: Authority, rules: Rules | None = None, said: Said | None = None) -> AsyncIterator[int]:
    lines: Said = [] if said is None else said
    certificates = Certificates(*authority.leaf("localhost"))
    async with serving(
        LOCAL, certificates, rules or Rules(), lambda event, fields: lines.append((event, fields))
    ) as port:
        yield port


async def asked(authority: Authority, port: int, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    context = ssl.create_default_context(cafile=authority.ca)
    async with asyncio.timeout(20):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        head = f"{method} {path}?timeout=10s HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        answer = await reader.read()
        writer.close()
    first, _, rest = answer.partition(b"\r\n\r\n")
    return int(first.split()[1]), rest


async def test_a_review_is_answered_with_what_the_command_would_have_made(authority: Authority) -> None:
    said: Said = []
    async with webhook(authority, said=said) as port:
        status, body = await asked(authority, port, "POST", "/inject", review(POD))
        response = json.loads(body)["response"]
        expected = inject(POD, Defaults())
        assert isinstance(expected, Injected)
        assert status == 200 and response["allowed"]
        assert applied(POD, json.loads(b64decode(response["patch"]))) == expected.pod
        assert said == [("reviewed", {"pod": "llm/vllm-7d4-*", "result": "injected", "words": ()})]


async def test_pages_say_that_it_is_well_and_what_it_did(authority: Authority) -> None:
    async with webhook(authority) as port:
        assert await asked(authority, port, "GET", "/livez") == (200, b"ok\n")
        assert (await asked(authority, port, "GET", "/readyz"))[0] == 200
        for pod in (POD, POD, BAD, {}):
            await asked(authority, port, "POST", "/inject", review(pod))
        await asked(authority, port, "POST", "/inject", b"{}")
        status, body = await asked(authority, port, "GET", "/metrics")
        counts = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
        assert status == 200
        assert counts['sidecar_webhook_reviews_total{result="injected"}'] == "2"
        assert counts['sidecar_webhook_reviews_total{result="refused"}'] == "1"
        assert counts['sidecar_webhook_reviews_total{result="malformed"}'] == "1"
        assert (await asked(authority, port, "GET", "/inject"))[0] == 405
        assert (await asked(authority, port, "GET", "/else"))[0] == 404


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"[1]", 400), (b'{"a":' * 5000, 400), (b" " * (MAX_BYTES + 1), 413)],
    ids=["empty", "list", "deep", "long"],
)
async def test_what_is_no_review_is_refused(authority: Authority, body: bytes, status: int) -> None:
    async with webhook(authority) as port:
        assert (await asked(authority, port, "POST", "/inject", body))[0] == status


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        pytest.param(b"", b"", id="nothing"),
        pytest.param(b"POST /inject HT", b"", id="half a head"),
        pytest.param(
            b"POST /inject HTTP/1.1\r\nHost: w\r\nContent-Length: 9\r\n\r\n", b"HTTP/1.1 408", id="half a body"
        ),
    ],
)
async def test_who_does_not_come_to_the_end_does_not_stay(authority: Authority, sent: bytes, answered: bytes) -> None:
    certificates = Certificates(*authority.leaf("localhost"))
    context = ssl.create_default_context(cafile=authority.ca)
    async with serving(LOCAL, certificates, Rules(), lambda *_: None, body_s=0.1, idle_s=0.2) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
        writer.write(sent)
        got = await asyncio.wait_for(reader.read(), 20)
        assert got.startswith(answered) and bool(got) is bool(answered)
        writer.close()


@pytest.mark.parametrize("strict", [False, True])
async def test_a_fault_of_ours_is_no_fault_of_the_pod_s(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(sidecar.webhook, "reviewed", broken)
    async with webhook(authority, Rules(strict=strict)) as port:
        status, body = await asked(authority, port, "POST", "/inject", review(POD))
        response = json.loads(body)["response"]
        assert status == 200 and response["allowed"] is not strict
        assert "the webhook failed: KeyError" in json.dumps(response)


async def test_a_new_certificate_is_read_and_a_broken_one_is_not(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    for path, source in zip((cert, key), authority.leaf("localhost"), strict=True):
        path.write_bytes(source.read_bytes())
    said: Said = []
    certificates = Certificates(cert, key)
    say = lambda event, fields: said.append((event, fields))  # noqa: E731
    async with serving(LOCAL, certificates, Rules(), say, look_s=0.01) as port:
        assert (await asked(authority, port, "GET", "/livez"))[0] == 200
        new = other.leaf("localhost")
        cert.write_bytes(new[0].read_bytes())
        await told(said, "certificate_refused")
        assert (await asked(authority, port, "GET", "/livez"))[0] == 200, "half a pair is none"
        key.write_bytes(new[1].read_bytes())
        await told(said, "certificate_read")
        assert (await asked(other, port, "GET", "/livez"))[0] == 200
        with pytest.raises(ssl.SSLError):
            await asked(authority, port, "GET", "/livez")
        cert.unlink()
        await told(said, "certificate_refused", 2)
        assert (await asked(other, port, "GET", "/livez"))[0] == 200


async def told(said: Said, event: str, times: int = 1) -> None:
    async with asyncio.timeout(20):
        while [each for each, _ in said].count(event) < times:
            await asyncio.sleep(0.01)


def test_the_command_serves_until_it_is_told_to_end(authority: Authority) -> None:
    cert, key = authority.leaf("localhost")
    command = [sys.executable, "-m", "sidecar", "webhook", "--listen", "127.0.0.1:0"]
    command += ["--tls-cert", str(cert), "--tls-key", str(key), "--image", "r/x:1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            port = int(started["listen"].rpartition(":")[2])
            _, body = asyncio.run(asked(authority, port, "POST", "/inject", review(POD)))
            patch = msgspec.json.decode(b64decode(json.loads(body)["response"]["patch"]))
            assert applied(POD, patch)["spec"]["initContainers"][0]["image"] == "r/x:1"
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--tls-cert", "{folder}/none", "--tls-key", "{folder}/none"], 1, "cannot use certificate"),
        (["--tls-cert", "{cert}", "--tls-key", "{cert}"], 1, "cannot use certificate"),
        (
            ["--tls-cert", "{cert}", "--tls-key", "{key}", "--listen", "unix:///x"],
            2,
            "API servers connect by HOST:PORT",
        ),
        (["--tls-cert", "{cert}", "--tls-key", "{key}", "--listen", "x"], 2, "--listen"),
        (["--tls-cert", "{cert}", "--tls-key", "{key}", "--listen", "192.0.2.1:1"], 1, "192.0.2.1"),
        (["--tls-cert", "{cert}"], 2, "--tls-key"),
    ],
)
def test_what_cannot_be_served_is_told(
    arguments: list[str],
    code: int,
    words: str,
    authority: Authority,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cert, key = authority.leaf("localhost")
    given = [each.format(folder=tmp_path, cert=cert, key=key) for each in arguments]
    assert main(["webhook", *given]) == code
    assert words in capsys.readouterr().err
