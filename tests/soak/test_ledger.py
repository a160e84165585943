"""The soak's accounts: what agrees passes, and each way of not agreeing is found."""

import msgspec
import pytest

from soak.answers import Got, Must, Seen
from soak.ledger import MAX_TOLD, Ledger, Line, disagreements
from soak.plan import Ask, Kind
from soak.requests import body_of, whole

ASK = Ask(3, Kind.CHAT_STREAM, "chat-large", "s1", tokens=5)
SIZE = len(whole(ASK)[1])
SEEN = Seen(Got.WHOLE, 200, "", SIZE, Must.ONE)
LINE = Line(
    request_id="soak-3",
    method="POST",
    path="/v1/chat/completions",
    service="chat",
    version="v1",
    session="s1",
    status=200,
    reason=None,
    flag="",
    result="success",
    attempts=1,
    bytes_in=len(body_of(ASK)),
    bytes_out=SIZE,
    tokens=5,
)
LEFT = Seen(Got.LEFT, 200, "", 10, Must.ONE, left=True)
CUT = Seen(Got.CUT, 200, "token_gap_timeout", 90, Must.ONE)


def line(**changes: object) -> Line:
    return msgspec.structs.replace(LINE, **changes)


def seen(**changes: object) -> Seen:
    return msgspec.structs.replace(SEEN, **changes)


@pytest.mark.parametrize(
    ("client", "log"),
    [
        pytest.param(SEEN, LINE, id="whole"),
        pytest.param(LEFT, line(flag="DC", result="ignored", bytes_out=20), id="left"),
        pytest.param(LEFT, LINE, id="left when all had been sent"),
        pytest.param(
            seen(left=True, got=Got.LEFT, status=0, body_bytes=0), line(status=499, flag="DC"), id="left early"
        ),
        pytest.param(CUT, line(reason="token_gap_timeout", flag="SI", result="failure"), id="cut"),
        pytest.param(seen(got=Got.BROKEN), line(reason="upstream_truncated", result="failure"), id="broken"),
        pytest.param(seen(got=Got.ENGINE_ERROR), line(result="failure"), id="the engine's error"),
        pytest.param(
            seen(got=Got.BROKEN, status=0, body_bytes=0, slow=True),
            line(reason="client_timeout", flag="DC", result="ignored"),
            id="deaf",
        ),
    ],
)
def test_client_and_log_agree(client: Seen, log: Line) -> None:
    assert disagreements(ASK, client, log) == []


@pytest.mark.parametrize(
    ("client", "log"),
    [
        pytest.param(SEEN, line(status=502), id="status"),
        pytest.param(SEEN, line(path="/v1/completions"), id="path"),
        pytest.param(SEEN, line(session="s2"), id="session"),
        pytest.param(SEEN, line(bytes_out=SIZE - 1), id="bytes out"),
        pytest.param(SEEN, line(bytes_in=1), id="bytes in"),
        pytest.param(SEEN, line(result="failure"), id="whole, and a failure in the log"),
        pytest.param(SEEN, line(flag="DC", result="ignored"), id="said to have left, and stayed"),
        pytest.param(SEEN, line(reason="client_timeout"), id="said to be slow, and was not"),
        pytest.param(CUT, LINE, id="cut, and a success in the log"),
        pytest.param(CUT, line(reason="total_timeout", result="ignored"), id="cut for another reason"),
        pytest.param(seen(got=Got.BROKEN), LINE, id="broken, and a success in the log"),
        pytest.param(seen(got=Got.ENGINE_ERROR), LINE, id="the engine's error, and a success in the log"),
        pytest.param(LEFT, line(bytes_out=5, flag="DC"), id="more came than went out"),
        pytest.param(seen(status=0, got=Got.NOTHING), line(), id="no head"),
    ],
)
def test_client_and_log_disagree(client: Seen, log: Line) -> None:
    assert disagreements(ASK, client, log)


@pytest.mark.parametrize("log_first", [False, True])
def test_both_entries_settle_a_request_whichever_comes_first(log_first: bool) -> None:
    ledger = Ledger()
    if log_first:
        ledger.read(LINE, "raw")
        assert ledger.open == 1
        ledger.saw(ASK, SEEN)
    else:
        ledger.saw(ASK, SEEN)
        assert ledger.open == ledger.lines_due == 1
        ledger.read(LINE, "raw")
    ledger.close()
    assert not ledger.broken and ledger.open == 0
    assert ledger.totals.series == {("chat", "v1", "success", "200", ""): 1}


def test_a_line_that_is_missing_is_found() -> None:
    ledger = Ledger()
    ledger.saw(ASK, SEEN)
    ledger.close()
    assert ledger.broken == {"every request has its line": 1}


def test_a_client_that_left_before_it_was_read_may_have_none() -> None:
    ledger = Ledger()
    ledger.saw(ASK, msgspec.structs.replace(LEFT, must=Must.MAYBE))
    ledger.close()
    assert not ledger.broken


@pytest.mark.parametrize("early", [False, True])
def test_a_second_line_is_found(early: bool) -> None:
    ledger = Ledger()
    ledger.read(LINE, "raw")
    if early:
        ledger.read(LINE, "raw")
    ledger.saw(ASK, SEEN)
    if not early:
        ledger.read(LINE, "raw")
    assert ledger.broken == {"no request has two lines, and what is no request has none": 1}


@pytest.mark.parametrize("log_first", [False, True])
def test_a_line_of_what_is_no_request_is_found(log_first: bool) -> None:
    ledger = Ledger()
    none = msgspec.structs.replace(LEFT, must=Must.NONE, status=0, body_bytes=0)
    if log_first:
        ledger.read(LINE, "raw")
    ledger.saw(ASK, none)
    if not log_first:
        ledger.read(LINE, "raw")
    ledger.close()
    assert ledger.broken == {"no request has two lines, and what is no request has none": 1}


@pytest.mark.parametrize("request_id", ["soak-9", "another", "soak-x"])
def test_a_line_of_nobodys_request_is_found(request_id: str) -> None:
    ledger = Ledger()
    ledger.read(line(request_id=request_id), "raw")
    ledger.close()
    assert ledger.broken == {"every line is of a request": 1}


@pytest.mark.parametrize("got", [Got.WRONG, Got.NOTHING, Got.HUNG])
def test_what_nobody_should_get_is_found(got: Got) -> None:
    ledger = Ledger()
    ledger.saw(ASK, seen(got=got, must=Must.MAYBE))
    assert ledger.broken == {"what clients get is lawful": 1}


def test_all_breaches_are_counted_and_the_first_are_told() -> None:
    ledger = Ledger()
    for number in range(MAX_TOLD + 5):
        ledger.breach("rule", str(number))
    assert ledger.broken["rule"] == MAX_TOLD + 5 and len(ledger.breaches) == MAX_TOLD
