"""Connections to servers, and what their errors mean: every error a server or a socket has, by its own words."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import InvalidResponse, RedisError, ResponseError

from sidecar.txlog.connect import WORDS, Link, down, link_to
from sidecar.txlog.store import StoreDown, StoreUnfit
from sidecar.txlog.target import parse_target
from tests.servers import refused, valkey


@contextlib.asynccontextmanager
async def linked(url: str, *, sentinel: bool = False) -> AsyncIterator[Link]:
    target = parse_target(url)
    link = link_to(target.addresses[0], target, sentinel=sentinel)
    try:
        yield link
    finally:
        await link.drop()


@contextlib.asynccontextmanager
async def answering(path: Path, *answers: bytes) -> AsyncIterator[str]:
    """A server that says these things, whatever it is asked, and then hangs up; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.read(65536)
            writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(serve, path):
        yield f"unix://{path}"


async def test_replies_are_raw_and_refusals_in_their_places(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server, linked(server.url) as link:
        await link.connect()
        replies = await link.ask((b"SET", b"k", b"\xff\x00"), (b"INCR", b"k"), (b"GET", b"k"))
        assert replies[0] == b"OK"
        assert isinstance(replies[1], ResponseError)
        assert replies[2] == b"\xff\x00"


async def test_a_link_that_the_server_closed_is_not_usable(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server, linked(server.url) as link:
        assert not await link.is_usable()
        await link.connect()
        assert await link.is_usable()
        await server.kill()
        async with asyncio.timeout(5):
            while await link.is_usable():
                await asyncio.sleep(0.001)


async def test_a_link_that_is_owed_a_reply_is_not_usable(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server, linked(server.url) as link:
        await link.connect()
        await link.send([(b"PING",)])
        async with asyncio.timeout(5):
            while await link.is_usable():
                await asyncio.sleep(0.001)


async def test_a_cancelled_wait_closes_the_link(tmp_path: Path) -> None:
    async with valkey(tmp_path) as server, linked(server.url) as link:
        await link.connect()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await link.ask((b"BLPOP", b"none", b"0"))
        assert not await link.is_usable()


SERVER_ERRORS = {
    "READONLY You can't write against a read only replica.": "readonly",
    "OOM command not allowed when used memory > 'maxmemory'.": "oom",
    "LOADING Redis is loading the dataset in memory": "loading",
    "MISCONF Errors writing to the AOF file: No space left on device": "misconf",
    "NOREPLICAS Not enough good replicas to write.": "misconf",
    "BUSY Redis is busy running a script.": "busy",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.": "masterdown",
    "CLUSTERDOWN The cluster is down": "clusterdown",
    "CLUSTERDOWN Hash slot not served": "clusterdown",
    "MOVED 3999 127.0.0.1:6381": "moved",
    "ASK 3999 127.0.0.1:6381": "moved",
    "TRYAGAIN Multiple keys request during rehashing of slot": "moved",
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)": "reset",
    "ERR max number of clients reached": "crowded",
    "ERR Error running script (call to f_1): @user_script:9: -READONLY You can't write against a replica.": "readonly",
    "ERR Error running script (call to f_1): @user_script:9: -OOM command not allowed": "oom",
    "ERR something new": "server",
    "SURPRISE something newer": "server",
    "NOAUTH Authentication required.": "noauth",
    "WRONGPASS invalid username-password pair or user is disabled.": "noauth",
    "ERR invalid password": "noauth",
    "ERR AUTH <password> called without any password configured for the default user. Are you sure your"
    " configuration is correct?": "noauth",
    "NOPERM User me has no permissions to run the 'fcall' command": "noperm",
    "WRONGTYPE Operation against a key holding the wrong kind of value": "foreign",
    "ERR Error running script: @user_script: 9: -WRONGTYPE Operation against a key": "foreign",
}
UNFIT = {"noauth", "noperm", "foreign", "tls", "protocol", "version"}


@pytest.mark.parametrize(("said", "word"), SERVER_ERRORS.items(), ids=[said[:40] for said in SERVER_ERRORS])
async def test_a_servers_refusal_has_a_word(tmp_path: Path, said: str, word: str) -> None:
    async with answering(tmp_path / "s", f"-{said}\r\n".encode()) as url, linked(url) as link:
        await link.connect()
        try:
            (reply,) = await link.ask((b"ANYTHING",))
        except RedisError as exc:
            reply = exc
        found = down(reply, url)
    assert found.word == word
    assert isinstance(found, StoreUnfit) == (word in UNFIT)
    assert str(found).startswith(url)
    assert "\n" not in str(found)


@pytest.mark.parametrize("url", ["unix:///nowhere/s", refused()], ids=["socket", "port"])
async def test_nobody_there_is_refused(url: str) -> None:
    async with linked(url) as link:
        with pytest.raises(RedisError) as raised:
            await link.connect()
    assert down(raised.value, url).word == "refused"


async def test_a_socket_that_is_not_ours_to_open_is_a_persons_to_mend() -> None:
    error = RedisError("Error 13 connecting to /s. Permission denied.")
    error.__cause__ = PermissionError(13, "Permission denied")
    assert isinstance(down(error, "unix:///s"), StoreUnfit)


async def test_a_server_that_hangs_up_has_reset(tmp_path: Path) -> None:
    async with answering(tmp_path / "s", b"") as url, linked(url) as link:
        await link.connect()
        with pytest.raises(RedisError) as raised:
            await link.ask((b"PING",))
    assert down(raised.value, url).word == "reset"


@pytest.mark.parametrize("said", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x50"])
async def test_what_is_no_redis_is_a_persons_to_mend(tmp_path: Path, said: bytes) -> None:
    async with answering(tmp_path / "s", said) as url, linked(url) as link:
        await link.connect()
        with pytest.raises(RedisError) as raised:
            await link.ask((b"PING",))
    found = down(raised.value, url)
    assert (type(found), found.word) == (StoreUnfit, "protocol")


async def test_a_wrong_password_is_found_through_a_unix_socket(tmp_path: Path) -> None:
    """There the client signs in while it connects, and wraps what came of it."""
    async with valkey(tmp_path) as server, linked(server.url.replace("unix://", "unix://:s3cret@")) as link:
        await server.ask("CONFIG", "SET", "requirepass", "right")
        with pytest.raises(RedisError) as raised:
            await link.connect()
    found = down(raised.value, server.url)
    assert (type(found), found.word) == (StoreUnfit, "noauth")
    assert "s3cret" not in str(found)


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (socket.gaierror(-2, "Name or service not known"), "unresolved"),
        (ConnectionResetError(104, "reset"), "reset"),
        (BrokenPipeError(32, "pipe"), "reset"),
        (OSError(113, "No route to host"), "reset"),
        (ssl.SSLCertVerificationError(1, "certificate verify failed"), "tls"),
        (ssl.SSLEOFError(8, "EOF"), "reset"),
        (InvalidResponse("what"), "protocol"),
        (RedisError("what"), "server"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_every_error_has_a_word(error: Exception, word: str) -> None:
    assert down(error, "redis://cache:6379").word == word
    assert word in WORDS


async def test_what_is_known_stays_as_it_is() -> None:
    known = StoreDown("oom", "known")
    assert down(known, "redis://cache:6379") is known


async def test_sentinels_have_credentials_of_their_own() -> None:
    target = parse_target("redis+sentinel://me:mine@a/main/3?sentinel_password=theirs")
    address = target.addresses[0]
    ours, theirs = (link_to(address, target, sentinel=sentinel)._connection for sentinel in (False, True))
    assert (ours.username, ours.password, ours.db) == ("me", "mine", 3)
    assert (theirs.username, theirs.password, theirs.db) == (None, "theirs", 0)


def test_no_link_shows_a_password() -> None:
    target = parse_target("redis://me:s3cret@cache")
    link = link_to(target.addresses[0], target)
    assert "s3cret" not in repr(link) + str(link.address) + repr(link._connection)
