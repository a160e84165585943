"""Requests out of bytes: what is read of a head, what is refused and how, tunnels and bodies that llhttp mistakes.

Over sockets every clause is a conformance case; that no cut changes anything is a fuzz test.
"""

import gc

import pytest

from sidecar.downstream.parser import Refused, RequestParser
from sidecar.kernel.errors import STATUS, Reason
from sidecar.proxy.request import Request
from sidecar.wire.call import Api
from sidecar.wire.headers import MAX_HEAD_BYTES
from tests.harness import request

LIMIT = 1000
CHAT = b"/v1/chat/completions"
HEAD = b"GET /x HTTP/1.1\r\nHost: h\r\n"


def parser(*, trusted: bool = False) -> RequestParser:
    return RequestParser(lambda: LIMIT, trusted)


def one(data: bytes, *, trusted: bool = False) -> Request:
    """The only request in `data`."""
    made = parser(trusted=trusted)
    made.feed(data)
    (found,) = made.requests
    return found


def refusal(data: bytes) -> Reason:
    with pytest.raises(Refused) as caught:
        parser().feed(data)
    assert caught.value.refusal.message
    return caught.value.refusal.reason


def test_a_head_is_read_once_and_kept_as_written() -> None:
    headers = [
        b"X-A: 1",
        b"x-a:  2",
        b"Cookie: \xff",
        b"X-Request-Id:  r1 ",
        b"traceparent: 00-ab",
        b"Expect: 100-CONTINUE",
    ]
    found = one(request(b"/p?q=1", headers=headers))
    assert (found.method, found.target, found.path) == (b"GET", b"/p?q=1", b"/p")
    assert (found.host, found.request_id, found.traceparent) == (b"engine.test", b"r1", b"00-ab")
    assert found.expect_continue and found.keep_alive and found.complete and not found.held
    assert found.lines == [
        b"Host: engine.test\r\n",
        b"X-A: 1\r\n",
        b"x-a: 2\r\n",
        b"Cookie: \xff\r\n",
        b"traceparent: 00-ab\r\n",
    ]
    pairs = [(line.name, line.value) for line in found.headers]
    assert (b"x-a", b"2") in pairs and (b"x-request-id", b"r1 ") in pairs


@pytest.mark.parametrize("held", [False, True], ids=["any", "plain"])
@pytest.mark.parametrize("trusted", [False, True])
def test_headers_of_ours_pass_from_trusted_peers_alone(trusted: bool, held: bool) -> None:
    headers = [b"X-A: 1", b"X-Sidecar-Version: v2", b"x-sidecar-priority: voice"]
    data = request(CHAT, method=b"POST", body=b"{}", headers=headers) if held else request(headers=headers)
    found = one(data, trusted=trusted)
    assert found.held is held
    assert (b"X-Sidecar-Version: v2\r\n" in found.lines) is trusted
    pairs = [(line.name, line.value) for line in found.headers]
    assert (b"x-a", b"1") in pairs and ((b"x-sidecar-version", b"v2") in pairs) is trusted
    assert ((b"x-sidecar-priority", b"voice") in pairs) is trusted


@pytest.mark.parametrize(
    ("method", "target", "api", "held"),
    [
        (b"POST", CHAT, Api.CHAT, True),
        (b"POST", CHAT + b"?x=1", Api.CHAT, True),
        (b"POST", b"http://engine.test" + CHAT, Api.CHAT, True),
        (b"GET", CHAT, None, False),
        (b"POST", CHAT + b"/", None, False),
        (b"POST", b"/V1/chat/completions", None, False),
    ],
    ids=["chat", "query", "absolute", "GET", "slash", "case"],
)
def test_inference_is_held(method: bytes, target: bytes, api: Api | None, held: bool) -> None:
    found = one(request(target, method=method, body=b"{}"))
    assert (found.api, found.held) == (api, held)
    assert (found.body, b"".join(found.pieces)) == ((b"{}", b"") if held else (b"", b"{}"))


@pytest.mark.parametrize(
    "target",
    [b"/v1/%63hat/completions", b"/v1/chat%2fcompletions", b"/%761/chat/completions?x=%23", b"/v1/chat/completion%73"],
)
def test_an_encoded_path_is_the_one_it_means(target: bytes) -> None:
    found = one(request(target, method=b"POST", body=b"{}"))
    assert (found.path, found.api, found.held, found.target) == (CHAT, Api.CHAT, True, target)


@pytest.mark.parametrize(
    "target",
    [
        CHAT + b"#x",
        CHAT + b"#?",
        b"http://engine.test" + CHAT + b"#x",
        b"ftp://engine.test" + CHAT,
        b"ws://engine.test" + CHAT,
    ],
)
def test_a_target_that_engines_read_as_another_is_refused(target: bytes) -> None:
    assert refusal(request(target, method=b"POST", body=b"{}")) is Reason.BAD_REQUEST


@pytest.mark.parametrize(
    ("target", "relative"),
    [
        (b"http://engine.test/a?b", b"/a?b"),
        (b"HTTP://ENGINE.test/a", b"/a"),
        (b"https://engine.test", b"/"),
        (b"http://engine.test?b", b"/?b"),
        (b"/http://other/", b"/http://other/"),
        (b"*", b"*"),
    ],
)
def test_an_absolute_target_becomes_a_path(target: bytes, relative: bytes) -> None:
    assert one(request(target, method=b"OPTIONS")).target == relative


REFUSED: list[tuple[str, bytes, Reason]] = [
    ("no Host", b"GET / HTTP/1.1\r\n\r\n", Reason.BAD_REQUEST),
    ("two Hosts", b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", Reason.BAD_REQUEST),
    ("empty Host", b"GET / HTTP/1.1\r\nHost: \r\n\r\n", Reason.BAD_REQUEST),
    ("another authority", request(b"http://other/"), Reason.BAD_REQUEST),
    ("HTTP/2", b"GET / HTTP/2.0\r\nHost: h\r\n\r\n", Reason.BAD_REQUEST),
    ("HTTP/0.9", b"GET / HTTP/0.9\r\nHost: h\r\n\r\n", Reason.BAD_REQUEST),
    ("RTSP", b"GET / RTSP/1.0\r\nHost: h\r\n\r\n", Reason.BAD_REQUEST),
    ("two spaces", b"GET  / HTTP/1.1\r\nHost: h\r\n\r\n", Reason.BAD_REQUEST),
    ("CONNECT", b"CONNECT h:1 HTTP/1.1\r\nHost: h:1\r\n\r\n", Reason.BAD_REQUEST),
    ("chunked in 1.0", b"PUT / HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n", Reason.BAD_REQUEST),
    ("gzip, chunked", HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", Reason.BAD_REQUEST),
    ("identity", HEAD + b"Transfer-Encoding: identity\r\n\r\n", Reason.BAD_REQUEST),
    ("bare LF", b"GET / HTTP/1.1\nHost: h\n\n", Reason.BAD_REQUEST),
    ("NUL", HEAD + b"X: a\0b\r\n\r\n", Reason.BAD_REQUEST),
    ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", Reason.BAD_REQUEST),
    ("announced too large", request(CHAT, method=b"POST", headers=[b"Content-Length: 1001"]), Reason.TOO_LARGE),
    ("grown too large", request(CHAT, method=b"POST", headers=[b"Transfer-Encoding: chunked"])
     + b"3e9\r\n" + b"x" * 1001 + b"\r\n", Reason.TOO_LARGE),
    ("many headers", HEAD + b"X-A: 123456\r\n" * (MAX_HEAD_BYTES // 12) + b"\r\n", Reason.HEAD_TOO_LARGE),
    ("one long header", HEAD + b"X-A: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n", Reason.HEAD_TOO_LARGE),
    ("a header without end", HEAD + b"X-A: " + b"x" * (2 * MAX_HEAD_BYTES), Reason.HEAD_TOO_LARGE),
    ("a long target", b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: h\r\n\r\n", Reason.HEAD_TOO_LARGE),
    ("long trailers", request(b"/up", method=b"PUT", headers=[b"Transfer-Encoding: chunked"]) + b"0\r\n"
     + b"X-T: 123456\r\n" * (MAX_HEAD_BYTES // 12), Reason.HEAD_TOO_LARGE),
    ("a long chunk extension", request(b"/up", method=b"PUT", headers=[b"Transfer-Encoding: chunked"]) + b"1;"
     + b"x" * (2 * MAX_HEAD_BYTES), Reason.HEAD_TOO_LARGE),
]  # fmt: skip


@pytest.mark.parametrize(("data", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_two_readers_could_read_differently_is_refused(data: bytes, reason: Reason) -> None:
    assert refusal(data) is reason
    assert STATUS[reason] in (400, 413, 431)


@pytest.mark.parametrize("step", [1, 1000, 65536])
@pytest.mark.parametrize(
    "name", ["a header without end", "a long target", "long trailers", "a long chunk extension", "many headers"]
)
def test_no_size_slips_through_in_small_reads(name: str, step: int) -> None:
    data = next(case[1] for case in REFUSED if case[0] == name)
    made = parser()
    with pytest.raises(Refused) as caught:
        for at in range(0, len(data), step):
            made.feed(data[at : at + step])
    assert caught.value.refusal.reason is Reason.HEAD_TOO_LARGE


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT, LIMIT + 1])
def test_the_body_limit_is_a_limit_to_the_byte_and_holds_for_inference_alone(size: int) -> None:
    data = request(CHAT, method=b"POST", body=b"x" * size)
    if size > LIMIT:
        assert refusal(data) is Reason.TOO_LARGE
    else:
        assert one(data).body_size == size
    assert one(request(b"/up", method=b"POST", body=b"x" * size)).body_size == size


def test_requests_before_a_bad_one_are_read_and_none_after_it() -> None:
    made = parser()
    with pytest.raises(Refused):
        made.feed(request(b"/1") + request(b"/2") + b"GET /3 HTTP/1.1\r\n\r\n" + request(b"/4"))
    assert [found.target for found in made.requests] == [b"/1", b"/2"]


def test_a_refusal_behind_an_upgrade_that_is_none_is_a_refusal() -> None:
    h2c = request(b"/up", method=b"POST", headers=[b"Connection: Upgrade", b"Upgrade: h2c"], body=b"x")
    made = parser()
    with pytest.raises(Refused):
        made.feed(h2c + b"GET /3 HTTP/1.1\r\n\r\n")
    assert [found.target for found in made.requests] == [b"/up"]


def test_in_head_tells_a_request_begun_and_not_come() -> None:
    made = parser()
    states = []
    for part in (b"", b"GET / HT", b"TP/1.1\r\nHost: h\r\n", b"\r\n", b"P"):
        made.feed(part)
        states.append(made.in_head)
    assert states == [False, True, True, False, True]


@pytest.mark.parametrize("body", [b"", b"x", b"GET /evil HTTP/1.1\r\nHost: h\r\n\r\n"], ids=["none", "byte", "request"])
@pytest.mark.parametrize("chunked", [False, True], ids=["by length", "chunked"])
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_body_behind_an_offer_of_h2c_is_a_body(body: bytes, chunked: bool, step: int) -> None:
    headers = [b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: x"]
    if chunked:
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        data = request(b"/up", method=b"POST", headers=[*headers, b"Transfer-Encoding: chunked"])
        data += chunk + b"0\r\n\r\n"
    else:
        data = request(b"/up", method=b"POST", headers=headers, body=body)
    data += request(b"/next")
    made = parser()
    for at in range(0, len(data), step):
        made.feed(data[at : at + step])
    assert [(found.target, found.complete) for found in made.requests] == [(b"/up", True), (b"/next", True)]
    assert b"".join(made.requests[0].pieces) == body and not made.requests[0].upgrade


WEBSOCKET = request(b"/ws", headers=[b"Connection: Upgrade", b"Upgrade: websocket"])


def test_what_follows_an_upgrade_waits_for_the_engines_word() -> None:
    made = parser()
    made.feed(WEBSOCKET + b"fra")
    made.feed(b"mes")
    assert made.tunnel == b"frames" and made.requests[0].upgrade == b"websocket"


def test_a_refused_upgrade_goes_on_as_http() -> None:
    made = parser()
    made.feed(WEBSOCKET + request(b"/next"))
    made.resume()
    assert made.tunnel is None
    assert [found.target for found in made.requests] == [b"/ws", b"/next"]
    made.feed(request(b"/third"))
    assert len(made.requests) == 3


def test_a_refused_upgrade_may_be_followed_by_rubbish_which_is_refused() -> None:
    made = parser()
    made.feed(WEBSOCKET + b"\0")
    with pytest.raises(Refused):
        made.resume()


@pytest.mark.parametrize(
    ("version", "headers", "kept"),
    [
        (b"HTTP/1.1", [], True),
        (b"HTTP/1.1", [b"Connection: close"], False),
        (b"HTTP/1.0", [], False),
        (b"HTTP/1.0", [b"Connection: keep-alive"], True),
    ],
)
def test_keep_alive_is_what_version_and_connection_say(version: bytes, headers: list[bytes], kept: bool) -> None:
    found = one(request(version=version, headers=headers))
    assert found.keep_alive is kept and found.http_10 is (version == b"HTTP/1.0")


@pytest.mark.parametrize("name", [b"Host", b"Transfer-Encoding", b"Content-Length", b"X-Request-Id", b"X-Fine"])
def test_trailers_that_frame_or_route_are_dropped(name: bytes) -> None:
    data = request(b"/up", method=b"PUT", headers=[b"Transfer-Encoding: chunked"]) + b"0\r\n" + name + b": 5\r\n\r\n"
    try:
        found = one(data)
    except Refused:
        assert name in (b"Transfer-Encoding", b"Content-Length")
        return
    assert found.trailers == ([b"X-Fine: 5\r\n"] if name == b"X-Fine" else [])
    assert found.host == b"engine.test" and found.request_id == b""


@pytest.mark.parametrize("step", [1, 37, 38, 39, 1000, 16_384])
@pytest.mark.parametrize("many", [b"/x", b"/x%d"], ids=["alike", "different"])
def test_many_requests_in_a_row_are_all_read_however_they_are_cut(many: bytes, step: int) -> None:
    targets = [many % number if b"%d" in many else many for number in range(2000)]
    data = b"".join(request(target) for target in targets)
    made = parser()
    for at in range(0, len(data), step):
        made.feed(data[at : at + step])
    assert [found.target for found in made.requests] == targets


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\nHost: a\n\n",
    ],
)
def test_a_refusal_leaves_nothing_for_the_garbage_collector(data: bytes) -> None:
    def refuse() -> None:
        parser = RequestParser(lambda: 1024, False)
        with pytest.raises(Refused):
            parser.feed(data)
        parser.close()

    refuse()
    gc.collect()
    gc.disable()
    try:
        refuse()
        assert gc.collect() == 0
    finally:
        gc.enable()
