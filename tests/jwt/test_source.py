"""Where keys come from: files and URLs, when they are read again, and what stays while they cannot be."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from sidecar.adapters.errand import Answer, Request
from sidecar.jwt.source import (
    ASK_AGAIN_S,
    FETCH_S,
    FIRST_RETRY_S,
    LAST_BARE_RETRY_S,
    LAST_RETRY_S,
    MAX_SET_BYTES,
    POLL_S,
    READ_ANYWAY,
    Source,
    Unread,
)
from sidecar.kernel.ids import EndpointKey
from sidecar.policy.schema import Endpoint, LongSeconds
from tests.clock import Clock
from tests.jwt.issuing import ec, jwks, okp, provider, rsa
from tests.jwt.publishing import Publisher

REFRESH_S = 300.0
STALE_S = 1000.0


def source(**changed: object) -> Source:
    return Source(provider(refresh_s=LongSeconds(REFRESH_S), stale_s=LongSeconds(STALE_S), **changed))


def has_keys(of: Source) -> bool:
    return of.keys is not None


async def read(of: Source, publisher: Publisher, clock: Clock, chance: float = 0.0) -> bool:
    return await of.read(publisher, clock.time, lambda: chance)


URLS = [
    ("https://i.test/keys", "i.test", "https://i.test", b"/keys"),
    ("https://i.test:443/keys", "i.test", "https://i.test", b"/keys"),
    ("http://i.test:80/a/b?c=d/e", "i.test", "http://i.test", b"/a/b?c=d/e"),
    ("http://i.test:8080", "i.test:8080", "http://i.test:8080", b"/"),
    ("https://i.test?x=1", "i.test", "https://i.test", b"/?x=1"),
    ("https://[::1]:8443/k", "[::1]:8443", "https://[::1]:8443", b"/k"),
]


@pytest.mark.parametrize(("url", "key", "origin", "target"), URLS, ids=[case[0] for case in URLS])
async def test_a_url_is_asked_for_at_its_host(url: str, key: str, origin: str, target: bytes) -> None:
    publisher = Publisher(jwks(rsa()))
    assert await read(source(jwks_url=url), publisher, Clock())
    assert publisher.asked == [(key, origin, target)]


async def test_the_authority_of_its_certificate_is_handed_on() -> None:
    seen: list[tuple[str, float]] = []

    async def ask(key: EndpointKey, endpoint: Endpoint, request: Request, timeout_s: float) -> Answer:
        seen.append((endpoint.tls_ca, timeout_s))
        return Answer(200, jwks(rsa()))

    assert await source(tls_ca="/ca.pem").read(ask, Clock().time, lambda: 0.0)
    assert seen == [("/ca.pem", FETCH_S)]


@pytest.mark.parametrize("chance", [0.0, 0.999])
async def test_it_is_due_again_after_its_refresh_less_some_chance(chance: float) -> None:
    clock, keys = Clock(), source()
    assert keys.due <= clock.now
    assert await read(keys, Publisher(jwks(rsa())), clock, chance)
    assert 0.8 * REFRESH_S <= keys.due - clock.now <= REFRESH_S
    assert (keys.due - clock.now == REFRESH_S) is (chance == 0.0)
    assert (keys.read_at, keys.stale_since, keys.fetches, keys.failures) == (clock.now, -1.0, 1, 0)


async def test_the_same_keys_are_no_change_and_others_are() -> None:
    clock, keys, publisher = Clock(), source(), Publisher(jwks(rsa()))
    assert await read(keys, publisher, clock)
    publisher.publish(json.dumps({"more": 1, **json.loads(jwks(rsa()))}, indent=1).encode())
    assert not await read(keys, publisher, clock)
    for text in (jwks(rsa(), ec()), jwks(ec()), jwks(ec(), kid="renamed")):
        publisher.publish(text)
        assert await read(keys, publisher, clock)
        assert not await read(keys, publisher, clock)


BAD = [
    (0, b"", "cannot connect", "cannot connect"),
    (500, jwks(rsa()), "", "answered 500"),
    (404, b"", "", "answered 404"),
    (301, b"", "", "answered 301"),
    (206, jwks(rsa()), "", "answered 206"),
    (200, b"<html>Sign in</html>", "", "is no JSON"),
    (200, b"", "", "is no JSON"),
    (200, b'{"keys":[]}', "", "no key that could verify"),
    (200, jwks(okp("x", "X25519")), "", "no key that could verify"),
    (200, jwks(rsa())[:-1] + b" " * MAX_SET_BYTES + b"}", "", f"exceeds {MAX_SET_BYTES} bytes"),
]


@pytest.mark.parametrize(("status", "body", "detail", "why"), BAD, ids=[case[3] or str(case[0]) for case in BAD])
async def test_what_is_no_set_of_keys_leaves_the_last_one_until_it_is_stale(
    status: int, body: bytes, detail: str, why: str
) -> None:
    clock, keys, publisher = Clock(), source(), Publisher(jwks(rsa()))
    assert await read(keys, publisher, clock)
    good = keys.keys
    publisher.fail(status, body, detail)
    clock.advance(STALE_S - 1)
    failed_at = clock.now
    assert not await read(keys, publisher, clock)
    assert keys.keys is good and why in keys.why and keys.why.startswith("https://issuer.test/keys: ")
    assert (keys.failures, keys.stale_since) == (1, failed_at)
    assert keys.due <= keys.read_at + STALE_S
    clock.advance(1)
    assert await read(keys, publisher, clock)
    assert not has_keys(keys) and keys.stale_since == failed_at
    publisher.publish(jwks(rsa()))
    assert await read(keys, publisher, clock)
    assert has_keys(keys) and keys.why == "" and keys.stale_since == -1.0


@pytest.mark.parametrize("with_keys", [True, False])
async def test_failures_are_tried_again_ever_later_up_to_a_bound(with_keys: bool) -> None:
    clock, keys, publisher = Clock(), source(), Publisher(jwks(rsa()))
    if with_keys:
        await read(keys, publisher, clock)
    publisher.fail()
    waits = []
    for _ in range(12):
        await read(keys, publisher, clock)
        waits.append(keys.due - clock.now)
        assert keys.retry_after_s(clock.now) == max(1.0, waits[-1])
    assert waits[:3] == [FIRST_RETRY_S, 2 * FIRST_RETRY_S, 4 * FIRST_RETRY_S]
    assert waits[-1] == (LAST_RETRY_S if with_keys else LAST_BARE_RETRY_S)
    await read(keys, publisher, clock, chance=0.999)
    assert 0.8 * waits[-1] < keys.due - clock.now < waits[-1]


async def test_unknown_keys_are_asked_for_once_in_a_while() -> None:
    clock, keys, publisher = Clock(), source(), Publisher(jwks(rsa()))
    assert keys.ask(clock.now) and keys.ask(clock.now)  # nothing was read yet: all wait for the first reading
    await asyncio.wait_for(keys.wait(clock), 1)
    await read(keys, publisher, clock)
    assert not keys.ask(clock.now)
    clock.advance(ASK_AGAIN_S)
    assert keys.ask(clock.now) and keys.ask(clock.now)  # the second one joins the first
    await asyncio.wait_for(keys.wait(clock), 1)
    publisher.hold()
    reading = asyncio.ensure_future(read(keys, publisher, clock))
    await asyncio.sleep(0)
    assert keys.ask(clock.now)
    publisher.go_on()
    await reading
    assert not keys.ask(clock.now + ASK_AGAIN_S - 0.1)
    assert keys.ask(clock.now + ASK_AGAIN_S)


async def test_a_provider_that_just_failed_is_not_asked_for_each_token() -> None:
    clock, keys, publisher = Clock(), source(), Publisher()
    publisher.fail()
    await read(keys, publisher, clock)
    assert not keys.ask(clock.now)
    assert keys.ask(keys.due)


async def test_a_reading_that_is_cancelled_leaves_all_as_it_was() -> None:
    clock, keys, publisher = Clock(), source(), Publisher(jwks(rsa()))
    publisher.hold()
    reading = asyncio.ensure_future(read(keys, publisher, clock))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert (keys.reading, keys.keys, keys.failures) == (False, None, 0)


async def test_it_waits_until_it_is_due() -> None:
    clock, keys = Clock(), source()
    await read(keys, Publisher(jwks(rsa())), clock)
    waiting = asyncio.ensure_future(keys.wait(clock))
    await asyncio.sleep(0)
    clock.advance(REFRESH_S - 1)
    await asyncio.sleep(0)
    assert not waiting.done()
    clock.advance(1)
    await asyncio.wait_for(waiting, 1)
    assert clock.armed == []


# --- files ------------------------------------------------------------------------------------------------------------


def of_file(path: Path) -> Source:
    return source(jwks_url="", jwks_file=str(path))


async def test_a_file_is_read_when_it_changed(tmp_path: Path) -> None:
    path, clock, nobody = tmp_path / "keys.json", Clock(), Publisher()
    path.write_bytes(jwks(rsa()))
    keys = of_file(path)
    assert await read(keys, nobody, clock)
    assert keys.due == clock.now + POLL_S
    assert not await read(keys, nobody, clock)
    path.write_bytes(jwks(ec()))
    assert await read(keys, nobody, clock)
    assert keys.keys is not None and keys.keys.choose("ec", "ES256") != "key_unknown"
    assert nobody.asked == []


async def test_a_mounted_secret_is_a_symlink_that_is_swapped(tmp_path: Path) -> None:
    for name, key in (("one", rsa()), ("two", ec())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keys.json").write_bytes(jwks(key))
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "keys.json").symlink_to("data/keys.json")
    keys, clock = of_file(tmp_path / "keys.json"), Clock()
    assert await read(keys, Publisher(), clock)
    (tmp_path / "new").symlink_to("two")
    (tmp_path / "new").rename(tmp_path / "data")
    assert await read(keys, Publisher(), clock)
    assert keys.keys is not None and keys.keys.choose("rsa", "RS256") == "key_unknown"


async def test_a_change_within_one_tick_of_the_file_s_clock_is_found_in_the_end(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    text, other = jwks(ec("one")), jwks(ec("two"))
    assert len(text) == len(other)
    path.write_bytes(text)
    os.utime(path, ns=(1, 1))
    keys = of_file(path)
    assert await read(keys, Publisher(), clock)
    path.write_bytes(other)
    os.utime(path, ns=(1, 1))
    assert any([await read(keys, Publisher(), clock) for _ in range(READ_ANYWAY)])


async def test_a_file_that_is_half_written_or_gone_leaves_the_last_keys(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    path.write_bytes(jwks(rsa()))
    keys = of_file(path)
    await read(keys, Publisher(), clock)
    path.write_bytes(jwks(ec())[:40])
    assert not await read(keys, Publisher(), clock)
    assert has_keys(keys) and keys.failures == 1 and f"{path}: is no JSON" in keys.why
    path.write_bytes(jwks(ec()))
    assert await read(keys, Publisher(), clock)
    path.unlink()
    assert not await read(keys, Publisher(), clock)
    assert "No such file" in keys.why
    clock.advance(STALE_S)
    assert await read(keys, Publisher(), clock) and not has_keys(keys)
    path.write_bytes(jwks(ec()))
    assert await read(keys, Publisher(), clock) and has_keys(keys)


def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path, why in ((pipe, "is not a file"), (tmp_path, "is not a file"), (tmp_path / "none", "No such file")):
        with pytest.raises(Unread, match=why):
            of_file(path).look()
    large = tmp_path / "large"
    large.write_bytes(b" " * (MAX_SET_BYTES + 2))
    with pytest.raises(Unread, match="exceeds"):
        of_file(large).look()


def test_what_was_looked_at_elsewhere_counts_as_read(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    path.write_bytes(jwks(rsa()))
    keys = of_file(path)
    assert keys.take(keys.look(), clock.now, 0.0) and keys.read_at == clock.now
    assert not keys.take(keys.look(), clock.now, 0.0)
    assert not keys.fail("why", clock.now, 0.0) and keys.why == "why"
