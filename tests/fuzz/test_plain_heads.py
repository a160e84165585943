"""What is read off a head's lines is what callbacks would have read, whatever the lines say and whatever comes next.

Both parsers read the plain kind of message in a way of its own when its head comes in one read. A read that ends within
the first word of a head forbids that; so the same bytes are read once message by message, and once with every message
cut behind its first byte. Several messages go over one connection: the two llhttps must not lose each other's place,
and what one message left in the memory of lines must not show in the next.
"""

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.downstream.parser import Refused, RequestParser
from sidecar.kernel.errors import Reason
from sidecar.kernel.exchange import ResponseHead
from sidecar.upstream.connection import EngineConnection
from tests.facts import facts
from tests.fuzz.test_http import BODY_LIMIT, Heard, summary
from tests.transport import FakeTransport

NASTY = settings(max_examples=800, deadline=None)

# A line's end, and what two readers may take for one; mostly the right one, or no head would come to its end.
ENDS = st.sampled_from(
    [b"\r\n"] * 150 + [b"\n", b"\r", b"\r\r\n", b"\n\r\n", b"\r\n ", b"\r\n\t", b"\0\r\n", b" \r\n", b"\t\r\n"]
)
BETWEEN = st.sampled_from([b": "] * 12 + [b":", b":  ", b":\t", b" : ", b" ", b"", b":\x0b", b": \t", b":\r\n "])
LAST_LINE = st.sampled_from([b"\r\n"] * 20 + [b"\n", b"\r", b""])
BODIES = st.sampled_from(
    [
        *(b"hello", b"abc", b"0\r\n\r\n", b"POST ", b"HTTP/1.1 200 OK\r\n", b"\r\n\r\n", b"x" * 300),
        *(b"5\r\nhello\r\n0\r\n\r\n", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"),
    ]
)
NAMES = [
    *(b"Host", b"HOST", b"Content-Length", b"content-length", b"Transfer-Encoding", b"Connection", b"Upgrade"),
    *(b"Expect", b"X-Request-Id", b"traceparent", b"X-Forwarded-For", b"X-Forwarded-Proto", b"Keep-Alive", b"TE"),
    *(b"X-Sidecar-Foo", b"x-sidecar-", b"Authorization", b"A", b"", b"X A", b"X:A", b"X\tA", b"\0", b"X\xff"),
    *(b"Content-Length ", b" Host", b"Content_Length", b"http2-settings", b"Content-Type", b"Content-Encoding"),
    *(b"Retry-After", b"Set-Cookie"),
]
VALUES = [
    *(b"h", b"5", b"3", b"0", b"5, 5", b"+5", b"05", b"0x5", b"-1", b"9" * 18, b"9" * 19, b"18446744073709551616"),
    *(b"2000", b"2001", b"5 ", b" 5", b"close", b"Close", b"keep-alive, close", b"keep-alive,\tclose", b"close\t"),
    *(b"clo\x80se", b"close;x", b"close x", b", close", b"keep-alive , close ,", b"keep-alive close", b"\xa0close"),
    *(b"keep-alive", b"host", b"x-a, content-length", b"upgrade", b"websocket", b"h2c", b"100-continue", b"chunked"),
    *(b"identity", b"gzip, chunked", b"", b" ", b"\t", b"a\tb", b"a\0b", b"a\rb", b"a\nb", b"a\r\n b", b"a\xffb"),
    *(b"a\x7fb", b"x" * 300, b"1.2.3.4", b"id id", b"\x0bh", b"h\x0c", b"text/event-stream", b"Text/HTML; x"),
]
ODD = st.builds(
    lambda name, between, value: name + between + value, st.sampled_from(NAMES), BETWEEN, st.sampled_from(VALUES)
)


@st.composite
def messages(draw: st.DrawFn, starts: Sequence[bytes], usual: Sequence[bytes], first: Sequence[bytes]) -> bytes:
    """One message: a start line, a framing, a few usual lines and perhaps an odd one."""
    lines = [*first, *draw(st.lists(st.sampled_from(usual), max_size=3)), *draw(st.lists(ODD, max_size=1))]
    body = draw(BODIES)
    match draw(st.sampled_from(["length"] * 8 + ["chunked", "trailers", "none"])):
        case "length":
            lines.append(b"Content-Length: %d" % len(body))
        case "chunked" | "trailers" as framing:
            lines.append(b"Transfer-Encoding: chunked")
            trailers = b"X-T: 1\r\nHost: z\r\n" if framing == "trailers" else b""
            body = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)
        case _:
            body = b""
    head = [draw(st.sampled_from(starts)), *draw(st.permutations(lines))]
    return b"".join([line + draw(ENDS) for line in head]) + draw(LAST_LINE) + body


def cut_open(parts: Sequence[bytes]) -> list[bytes]:
    """The same bytes, each part in two reads: its first byte, and the rest."""
    return [piece for part in parts for piece in (part[:1], part[1:]) if piece]


# --- requests ---------------------------------------------------------------------------------------------------------

# A start line that llhttp forgives is refused by searching the read for the right one, which an earlier message of the
# same read may hold: those are sent alone.
CHAT = b"POST /v1/chat/completions HTTP/1.1"
STARTS = [
    *[CHAT] * 12,
    *(b"POST /v1/embeddings?x=1 HTTP/1.1", b"POST /v1/chat/completions HTTP/1.0", b"POST /other HTTP/1.1"),
    *(b"POST http://h/v1/chat/completions HTTP/1.1", b"POST /v1/chat/completions HTTP/1.2", b"GET / HTTP/1.1"),
    *(b"POST /v1/chat/completions?\x80 HTTP/1.1", b"POST /v1/chat/completions?a\tb HTTP/1.1", b"\r\n" + CHAT),
    *(b"POST /v1/chat/completions?# HTTP/1.1", b"HEAD /v1/models HTTP/1.1", b"post /v1/chat/completions HTTP/1.1"),
    *(b"POST /v1/chat/completions\0 HTTP/1.1", b"CONNECT h:1 HTTP/1.1", b"PUT /x HTTP/1.1", b"\n" + CHAT),
]
FORGIVEN = [
    *(b"POST  /v1/chat/completions HTTP/1.1", b"POST /v1/chat/completions  HTTP/1.1", CHAT + b" ", b"POST\t/ HTTP/1.1"),
    *(b"POST /v1/chat/completions RTSP/1.1", b"POST /v1/chat/completions http/1.1", b"POST /v1/chat/completions"),
]
USUAL = [
    *(b"Connection: keep-alive", b"X-A: b", b"X-A: c", b"User-Agent: u", b"Upgrade: websocket", b"Upgrade: h2c"),
    *(
        b"Connection: upgrade",
        b"Proxy-Connection: keep-alive",
        b"Proxy-Connection: close",
        b"Expect: 100-continue",
        b"Connection: x-a",
    ),
    *(b"Connection: close", b"Accept: */*", b"X-Sidecar-A: b", b"Authorization: Bearer t"),
]
REQUESTS = messages(STARTS, USUAL, [b"Host: h"])
HOSTLESS = messages(STARTS, USUAL, [])


def read(parts: Sequence[bytes], trusted: bool) -> tuple[list[tuple[object, ...]], Reason | None, bytes | None]:
    """Requests up to the connection's last, why reading stopped before it, and what is left to a tunnel.

    Tunnels come to nothing, as when the engine refuses them.
    """
    parser = RequestParser(lambda: BODY_LIMIT, trusted)
    reason: Reason | None = None
    for part in parts:
        try:
            parser.feed(part)
            if parser.tunnel:
                parser.resume()
        except Refused as refused:
            reason = refused.refusal.reason
            break
    told = []
    for request in parser.requests:
        seen = (request.path, request.host, request.named, request.http_10, request.api, request.held)
        ids = (request.request_id, request.traceparent, request.forwarded_for, request.forwarded_proto)
        fields = [(line.name, line.value, line.text) for line in request.headers]
        told.append((*summary(request), request.body_size, *seen, *ids, fields))
        if not request.keep_alive:
            return told, None, None  # what comes behind it is never served
    return told, reason, parser.tunnel


@NASTY
@given(st.lists(REQUESTS | HOSTLESS, min_size=1, max_size=4), st.booleans())
def test_requests_are_read_off_lines_as_by_callbacks(sent: list[bytes], trusted: bool) -> None:
    by_callbacks = read(cut_open(sent), trusted)
    assert read(sent, trusted) == by_callbacks
    assert read([b"".join(sent)], trusted) == by_callbacks


@NASTY
@given(messages(FORGIVEN, USUAL, [b"Host: h"]), st.booleans())
def test_request_lines_that_llhttp_forgives_are_refused_both_ways(sent: bytes, trusted: bool) -> None:
    taken, _, _ = read([sent], trusted)
    assert read([sent], trusted) == read(cut_open([sent]), trusted)
    assert not taken


@settings(max_examples=200, deadline=None)
@given(REQUESTS, REQUESTS, REQUESTS, st.data())
def test_a_plain_request_between_others_may_be_cut_anywhere(
    before: bytes, sent: bytes, behind: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(sent)))
    whole = read([before, sent, behind], False)
    assert read([before, *[part for part in (sent[:at], sent[at:] + behind) if part]], False) == whole


# --- answers ----------------------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK"
STATUSES = [
    *[OK] * 12,
    *(b"HTTP/1.1 200 ", b"HTTP/1.1 200", b"HTTP/1.1 200  OK", OK + b" ", b"HTTP/1.1 200 O\xffK", b"HTTP/1.1 200 O\tK"),
    *(b"HTTP/1.1 200 O\0K", b"HTTP/1.1 200 \t", b"HTTP/1.0 200 OK", b"HTTP/1.1 204 No", b"HTTP/1.1 304 N"),
    *(b"HTTP/1.1 404 N", b"HTTP/1.1 100 C\r\n\r\n" + OK, b"HTTP/1.1 103 C\r\nLink: x\r\n\r\n" + OK, b"\r\n" + OK),
    *(b"HTTP/1.1 2000 OK", b"HTTP/1.1 200 O\rK", b"RTSP/1.0 200 OK"),
]
SAID = [
    *(b"Connection: keep-alive", b"X-A: b", b"Server: u", b"Date: x", b"Content-Type: application/json"),
    *(b"X-Request-Id: i", b"X-Sidecar-A: b", b"Connection: close", b"Keep-Alive: timeout=5"),
    b"Proxy-Connection: close",
]
# Line ends behind an answer cost the connection or not by the read that they come in; all else must be told alike.
ANSWERS = messages(STATUSES, SAID, []).filter(lambda answer: answer[-1:] not in (b"\r", b"\n"))
BEHIND = st.sampled_from([b""] * 8 + [b"x", OK + b"\r\nContent-Length: 1\r\n\r\nx"])


def hear(answers: Sequence[tuple[bool, Sequence[bytes]]]) -> list[object]:
    """What each request on one connection hears, and whether the connection was lent again after it."""
    pool: list[EngineConnection] = []
    gone: list[bool] = []
    connection = EngineConnection(pool.append, lambda _, poisoned: gone.append(poisoned))
    transport = FakeTransport(connection)
    connection.connection_made(transport)
    pool.append(connection)
    told: list[object] = []
    for head_only, parts in answers:
        if not pool:
            break
        sink = Heard()
        pool.pop().send(sink, b"GET / HTTP/1.1\r\n\r\n", b"", head_only=head_only, upgrade=False)
        for part in parts:
            if not transport.is_closing():
                connection.data_received(part)
        told.append([[facts(part) if isinstance(part, ResponseHead) else part for part in e] for e in sink.events])
        told.append((bool(pool), transport.is_closing()))
    connection.connection_lost(None)
    assert len(gone) == 1
    return [*told, gone]


@NASTY
@given(st.lists(st.tuples(st.booleans(), ANSWERS, BEHIND), min_size=1, max_size=4))
def test_answers_are_read_off_lines_as_by_callbacks(said: list[tuple[bool, bytes, bytes]]) -> None:
    whole = [(head_only, [answer + behind]) for head_only, answer, behind in said]
    cut = [(head_only, cut_open(parts)) for head_only, parts in whole]
    assert hear(whole) == hear(cut)
