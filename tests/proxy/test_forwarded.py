"""The head that an engine gets, to the byte."""

from collections.abc import Iterable

import pytest

from sidecar.proxy.forwarded import engine_head, held_body
from tests.harness import request
from tests.proxy.bench import request_of

CHAT = b"/v1/chat/completions"


def head(data: bytes, *, peer: str = "", request_id: bytes = b"id", scheme: bytes = b"http") -> list[bytes]:
    """The head's lines, without the two empty ones at its end."""
    made = engine_head(request_of(data), request_id, peer, scheme, "e1:80")
    lines = made.split(b"\r\n")
    assert lines[-2:] == [b"", b""] and b"" not in lines[:-2]
    return lines[:-2]


OURS = [b"x-forwarded-proto: http", b"x-request-id: id"]


def test_the_start_line_and_every_end_to_end_header_go_as_written() -> None:
    target = b"/a%2Fb/../?q=%20&x=a;b"
    headers = [b"X-Case:  spaced ", b"aCCEPT: */*", b"Accept: second", b"Cookie: \xff\xfe"]
    assert head(request(target, headers=headers)) == [
        b"GET " + target + b" HTTP/1.1",
        b"Host: engine.test",
        b"X-Case: spaced ",
        b"aCCEPT: */*",
        b"Accept: second",
        b"Cookie: \xff\xfe",
        *OURS,
    ]


@pytest.mark.parametrize(
    "dropped",
    [
        [b"Connection: keep-alive"],
        [b"Connection: close"],
        [b"Keep-Alive: timeout=5"],
        [b"Proxy-Connection: keep-alive"],
        [b"Proxy-Authorization: Basic x"],
        [b"TE: trailers"],
        [b"HTTP2-Settings: x"],
        [b"Upgrade: h2c", b"Connection: upgrade"],
        [b"Connection: X-Hop, x-other", b"x-hop: 1", b"X-Other: 2"],
        [b"Connection: x-hop", b"connection: X-Two", b"X-Hop: 1", b"x-two: 2"],
        [b"x-sidecar-version: v9"],
        [b"X-Sidecar-Anything: 1"],
    ],
    ids=lambda lines: lines[0].decode(),
)
def test_what_speaks_of_one_connection_or_in_our_name_ends_here(dropped: Iterable[bytes]) -> None:
    made = head(request(headers=[*dropped, b"X-Kept: 1"]))
    assert made == [b"GET /x HTTP/1.1", b"Host: engine.test", b"X-Kept: 1", *OURS]


@pytest.mark.parametrize("name", [b"host", b"content-length", b"Expect"])
def test_framing_cannot_be_named_away(name: bytes) -> None:
    made = head(request(method=b"PUT", headers=[b"Connection: " + name], body=b"x"))
    assert b"Host: engine.test" in made and b"content-length: 1" in made


@pytest.mark.parametrize(
    ("headers", "peer", "wanted"),
    [
        ([], "10.0.0.9", b"10.0.0.9"),
        ([b"X-Forwarded-For: 1.1.1.1"], "10.0.0.9", b"1.1.1.1, 10.0.0.9"),
        ([b"X-Forwarded-For: 1.1.1.1", b"x-forwarded-for: 2.2.2.2"], "::1", b"1.1.1.1, 2.2.2.2, ::1"),
        ([b"X-Forwarded-For: 1.1.1.1"], "", b"1.1.1.1"),
        ([], "", None),
    ],
    ids=["peer", "one before", "two before", "unix client after one", "unix client"],
)
def test_forwarded_for_grows_by_the_peer(headers: list[bytes], peer: str, wanted: bytes | None) -> None:
    lines = [line for line in head(request(headers=headers), peer=peer) if line.lower().startswith(b"x-forwarded-for")]
    assert lines == ([] if wanted is None else [b"x-forwarded-for: " + wanted])


@pytest.mark.parametrize(
    ("headers", "scheme", "wanted"),
    [([], b"http", b"http"), ([], b"https", b"https"), ([b"X-Forwarded-Proto: https"], b"http", b"https")],
    ids=["http", "https", "as the one before said"],
)
def test_forwarded_proto_is_the_first_hops(headers: list[bytes], scheme: bytes, wanted: bytes) -> None:
    lines = [line for line in head(request(headers=headers), scheme=scheme) if b"proto" in line]
    assert lines == [b"x-forwarded-proto: " + wanted]


def test_the_request_id_replaces_the_clients() -> None:
    made = head(request(headers=[b"X-Request-Id: theirs"]), request_id=b"ours")
    assert [line for line in made if b"equest-" in line] == [b"x-request-id: ours"]


def test_an_http_1_0_client_without_a_host_gets_the_endpoints() -> None:
    made = head(b"GET /x HTTP/1.0\r\n\r\n")
    assert made == [b"GET /x HTTP/1.1", b"host: e1:80", *OURS]


@pytest.mark.parametrize(
    ("data", "framing"),
    [
        (request(CHAT, method=b"POST", body=b"{}"), [b"content-length: 2"]),
        (request(CHAT, method=b"POST", headers=[b"Transfer-Encoding: chunked"]) + b"2\r\n{}\r\n0\r\n\r\n",
         [b"content-length: 2"]),
        (request(CHAT, method=b"POST", headers=[b"Transfer-Encoding: chunked"]) + b"2\r\n{}\r\n0\r\nX-T: 1\r\n\r\n",
         [b"transfer-encoding: chunked"]),
        (request(CHAT, method=b"POST", body=b""), [b"content-length: 0"]),
        (request(method=b"PUT", body=b"abc"), [b"content-length: 3"]),
        (request(method=b"PUT", body=b""), [b"content-length: 0"]),
        (request(method=b"PUT", headers=[b"Transfer-Encoding: Chunked"]) + b"0\r\n\r\n",
         [b"transfer-encoding: chunked"]),
        (request(), []),
    ],
    ids=["held", "held, was chunked", "held with trailers", "held, empty", "length", "empty", "chunked", "none"],
)  # fmt: skip
def test_framing_is_stated_anew_and_once(data: bytes, framing: list[bytes]) -> None:
    made = head(data)
    named = (b"content-length", b"transfer-encoding")
    assert [line for line in made if line.lower().startswith(named)] == framing


@pytest.mark.parametrize(("target", "passed"), [(b"/up", True), (CHAT, False)], ids=["streamed", "held"])
def test_expect_goes_on_only_where_the_engine_must_answer_it(target: bytes, passed: bool) -> None:
    made = head(request(target, method=b"POST", headers=[b"Expect: 100-Continue"], body=b"{}"))
    assert (b"expect: 100-continue" in made) is passed
    assert sum(line.lower().startswith(b"expect") for line in made) == passed


def test_a_tunnel_is_asked_for_with_connection_upgrade_alone() -> None:
    asked = request(headers=[b"Connection: keep-alive, Upgrade, x-hop", b"Upgrade: websocket", b"X-Hop: 1", b"K: 1"])
    made = head(asked)
    assert b"connection: upgrade" in made and b"upgrade: websocket" in made
    assert b"X-Hop: 1" not in made and b"K: 1" in made


@pytest.mark.parametrize(
    ("body", "trailers", "wire"),
    [
        (b"{}", b"", b"{}"),
        (b"{}", b"X-T: 1\r\n", b"2\r\n{}\r\n0\r\nX-T: 1\r\n\r\n"),
        (b"x" * 300, b"A: 1\r\nB: 2\r\n", b"12c\r\n" + b"x" * 300 + b"\r\n0\r\nA: 1\r\nB: 2\r\n\r\n"),
        (b"", b"X-T: 1\r\n", b"0\r\nX-T: 1\r\n\r\n"),
    ],
    ids=["bare", "trailers", "two trailers", "trailers alone"],
)
def test_a_held_body_is_bare_unless_trailers_must_follow(body: bytes, trailers: bytes, wire: bytes) -> None:
    chunks = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
    data = (
        request(CHAT, method=b"POST", headers=[b"Transfer-Encoding: chunked"]) + chunks + b"0\r\n" + trailers + b"\r\n"
    )
    assert held_body(request_of(data)) == wire
