"""The soak's reading of answers: strict over any split, and never lenient about whose bytes they are."""

import pytest

from sidecar.demo.dialect import DONE, error_body
from sidecar.kernel.errors import Reason
from sidecar.wire.refusal import error_event
from soak.answers import BROKEN_EVENT, Answer, Got, is_lawful_part, what_it_was
from soak.plan import Ask, Kind
from soak.requests import id_of, whole
from tests.harness import chunked, response

ASK = Ask(7, Kind.CHAT_STREAM, "chat-large", tokens=5)
PLAIN = Ask(8, Kind.CHAT, "chat-large", tokens=5)
EVENTS = whole(ASK)[1]
FIRST = EVENTS[: EVENTS.index(b"t2 ") - 40]
"""The beginning, torn inside an event."""


def head(ask: Ask, status: bytes = b"200 OK", *more: bytes) -> bytes:
    lines = [b"HTTP/1.1 " + status, b"x-request-id: " + id_of(ask).encode(), *more]
    return b"\r\n".join(lines) + b"\r\n"


def streamed(*parts: bytes, end: bool = True) -> bytes:
    return head(ASK) + b"transfer-encoding: chunked\r\n\r\n" + chunked(*parts, end=end)


def plain(body: bytes, status: bytes = b"200 OK", *more: bytes) -> bytes:
    return head(PLAIN, status, *more) + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def read(data: bytes, *, split: bool = False, lost: bool = True, http_10: bool = False) -> Answer:
    answer = Answer(http_10=http_10)
    for at in range(0, len(data), 1 if split else max(1, len(data))):
        assert answer.feed(data[at : at + 1] if split else data) == b""
    if lost and not answer.done:
        answer.lost()
    return answer


TORN = error_event(Reason.TOKEN_GAP_TIMEOUT, "the engine stopped producing tokens")
ENGINES_ERROR = b"data: " + error_body(500, "simulated fault") + b"\n\n"

CASES = [
    pytest.param(ASK, streamed(EVENTS), Got.WHOLE, "", id="whole"),
    pytest.param(ASK, streamed(EVENTS[:100], EVENTS[100:]), Got.WHOLE, "", id="whole in parts"),
    pytest.param(ASK, streamed(FIRST, b"\n\n" + TORN), Got.CUT, "token_gap_timeout", id="cut within an event"),
    pytest.param(ASK, streamed(FIRST, ENGINES_ERROR + DONE), Got.WRONG, "", id="torn, then the engine's error"),
    pytest.param(ASK, streamed(ENGINES_ERROR + DONE), Got.ENGINE_ERROR, "", id="the engine's error"),
    pytest.param(ASK, streamed(EVENTS, TORN), Got.CUT, "token_gap_timeout", id="cut behind the end"),
    pytest.param(ASK, streamed(BROKEN_EVENT, EVENTS), Got.MARRED, "", id="a malformed event first"),
    pytest.param(ASK, streamed(EVENTS.replace(b"t3 ", b"t4 ")), Got.WRONG, "", id="a token that is another"),
    pytest.param(ASK, streamed(EVENTS, EVENTS), Got.WRONG, "", id="twice"),
    pytest.param(ASK, streamed(FIRST), Got.WRONG, "", id="ended cleanly in the middle"),
    pytest.param(ASK, streamed(FIRST, end=False), Got.BROKEN, "", id="broken"),
    pytest.param(ASK, streamed(b"x" + FIRST, end=False), Got.WRONG, "", id="broken, and wrong before"),
    pytest.param(ASK, streamed(EVENTS).replace(b"soak-7", b"soak-9"), Got.WRONG, "", id="another's answer"),
    pytest.param(ASK, b"", Got.NOTHING, "", id="nothing"),
    pytest.param(PLAIN, plain(whole(PLAIN)[1]), Got.WHOLE, "", id="plain"),
    pytest.param(PLAIN, plain(whole(PLAIN)[1])[:-1], Got.BROKEN, "", id="plain, short of its length"),
    pytest.param(PLAIN, plain(error_body(500, "boom")), Got.ENGINE_ERROR, "", id="plain, an error under 200"),
    pytest.param(PLAIN, plain(b"{}", b"500 Error"), Got.ENGINE_STATUS, "", id="the engine's 500"),
    pytest.param(PLAIN, plain(b"{}"), Got.WRONG, "", id="plain, other bytes"),
    pytest.param(
        PLAIN,
        plain(b'{"error":{"code":"breaker_open"}}', b"503 X", b"x-sidecar-reason: breaker_open"),
        Got.REFUSED,
        "breaker_open",
        id="refused",
    ),
    pytest.param(
        PLAIN,
        plain(b'{"error":{"code":"breaker_open"}}', b"502 X", b"x-sidecar-reason: breaker_open"),
        Got.WRONG,
        "breaker_open",
        id="refused with another reason's status",
    ),
]


@pytest.mark.parametrize("split", [False, True], ids=["at once", "byte by byte"])
@pytest.mark.parametrize(("ask", "data", "got", "word"), CASES)
def test_what_a_client_got(ask: Ask, data: bytes, got: Got, word: str, split: bool) -> None:
    assert what_it_was(ask, read(data, split=split))[:2] == (got, word)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"HTTP/1.0 200 OK\r\ncontent-length: 0\r\n\r\n", id="version"),
        pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", id="two framings"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", id="no framing"),
        pytest.param(b"HTTP/1.1 200 OK\r\na: 1\r\na: 2\r\ncontent-length: 0\r\n\r\n", id="a header twice"),
        pytest.param(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxy\r\n", id="a chunk size"),
        pytest.param(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc", id="a chunk's end"),
    ],
)
def test_what_is_no_http_is_wrong(data: bytes) -> None:
    assert what_it_was(PLAIN, read(data))[0] is Got.WRONG


def test_what_follows_an_answer_is_left_over_and_an_interim_answer_is_none() -> None:
    answer = Answer()
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.feed(interim + response(b"abc", headers=[b"connection: close"]) + b"HTTP/1.1") == b"HTTP/1.1"
    assert answer.done and answer.continued and answer.closes and answer.body == b"abc"


def test_http_10_is_framed_by_its_end() -> None:
    data = head(ASK) + b"\r\n" + EVENTS
    assert what_it_was(ASK, read(data, http_10=True))[0] is Got.WHOLE
    assert what_it_was(ASK, read(data[:-10], http_10=True))[0] is Got.WRONG


def test_a_part_is_lawful_if_it_may_become_an_answer() -> None:
    assert is_lawful_part(ASK, read(streamed(FIRST, end=False), lost=False))
    assert not is_lawful_part(ASK, read(streamed(FIRST + b"?", end=False), lost=False))
    assert is_lawful_part(ASK, read(b"HTTP/1.1 2", lost=False))
