import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.wire.headers import (
    FRAMING,
    HOP_BY_HOP,
    MAX_KNOWN,
    MAX_KNOWN_BYTES,
    Lines,
    connection_tokens,
    is_safe_id,
    media_type,
    without_named,
)


@pytest.mark.parametrize(
    ("value", "tokens"),
    [
        (b"close", [b"close"]),
        (b"Keep-Alive, X-Thing", [b"keep-alive", b"x-thing"]),
        (b" close\t,\t upgrade ", [b"close", b"upgrade"]),
        (b"", []),
        (b",, ,", []),
        (b"a,a", [b"a", b"a"]),
        (b"X-\xe9", [b"x-\xe9"]),
    ],
)
def test_connection_tokens_are_lower_case_and_never_empty(value: bytes, tokens: list[bytes]) -> None:
    assert connection_tokens(value) == tokens


LINES = [b"X-Thing: 1\r\n", b"x-thing: 2\r\n", b"X-Thing-Else: 3\r\n", b"Host: a\r\n", b"Content-Length: 5\r\n"]


def test_named_headers_are_removed_in_any_case_and_whole_names_only() -> None:
    assert without_named(LINES, [b"x-thing"]) == LINES[2:]


def test_what_frames_or_routes_cannot_be_named_away() -> None:
    assert without_named(LINES, [b"host", b"content-length", b"expect"]) == LINES


def test_naming_nothing_removes_nothing() -> None:
    assert without_named(LINES, []) == LINES
    assert without_named(LINES, [b"x-absent"]) == LINES


def test_value_that_resembles_a_name_is_no_name() -> None:
    assert without_named([b"A: b: c\r\n"], [b"b"]) == [b"A: b: c\r\n"]


@given(st.lists(st.sampled_from([b"x-thing", b"x-thing-else", b"host", b"content-length", b"other"])))
def test_what_is_left_is_what_was_there_in_order(named: list[bytes]) -> None:
    left = without_named(LINES, named)
    assert left == [line for line in LINES if line in left]
    assert without_named(left, named) == left


@pytest.mark.parametrize(
    ("value", "media"),
    [
        (b"text/event-stream", b"text/event-stream"),
        (b"Text/Event-Stream; charset=utf-8", b"text/event-stream"),
        (b" application/json ;a=b;c", b"application/json"),
        (b"", b""),
        (b";", b""),
    ],
)
def test_media_type_is_the_word_before_its_parameters(value: bytes, media: bytes) -> None:
    assert media_type(value) == media


@pytest.mark.parametrize("value", [b"a", b"x" * 128, b"0f8fad5b-d9cb-469f-a165-70867728950e", b"a/b:c=d~!"])
def test_visible_ascii_is_a_safe_id(value: bytes) -> None:
    assert is_safe_id(value)


@pytest.mark.parametrize(
    "value", [b"", b"x" * 129, b"a b", b" ", b"a\tb", b"a\r\nx: y", b"a\x00", b"a\x7f", b"\xc3\xa9", b"\x1b[31m"]
)
def test_what_could_act_on_a_log_or_a_header_is_no_safe_id(value: bytes) -> None:
    assert not is_safe_id(value)


def test_framing_headers_do_not_end_at_a_hop() -> None:
    assert HOP_BY_HOP.isdisjoint(FRAMING)
    assert all(name == name.lower() for name in HOP_BY_HOP | FRAMING)


READER = Lines({b"host": 0}, frozenset({b"x-request-id"}))


@pytest.mark.parametrize(
    "line", [b"Host: h", b"User-Agent: u", b"Accept: */*", b"Date: now"], ids=lambda line: line.decode()
)
def test_a_line_that_came_before_is_the_same_object(line: bytes) -> None:
    assert READER.read(line) is READER.read(bytes(bytearray(line)))


@pytest.mark.parametrize(
    "name",
    ["Authorization", "Cookie", "Set-Cookie", "X-Api-Key", "X-Goog-Api-Key", "X-Auth-Token", "Client-Secret",
     "Ocp-Apim-Subscription-Key", "X-Request-Id"],
)  # fmt: skip
def test_credentials_and_what_never_comes_twice_are_not_remembered(name: str) -> None:
    line = f"{name}: v".encode()
    assert READER.read(line) is not READER.read(line)


@pytest.mark.parametrize(
    "line", [b"", b"A", b"A:", b"A: ", b"A:b", b"A:  b", b"A:\tb", b"A: b ", b"A: b\t", b": b", b"A: \tb"], ids=repr
)
def test_a_line_of_another_form_is_not_read(line: bytes) -> None:
    assert READER.read(line) is None


def test_memory_of_lines_is_bounded() -> None:
    lines = Lines({}, frozenset())
    first = lines.read(b"A: 0")
    for number in range(MAX_KNOWN - 1):
        lines.read(b"A: x%d" % number)
    assert lines.read(b"A: 0") is first
    lines.read(b"A: one more")
    assert lines.read(b"A: 0") is not first
    long = b"A: " + b"x" * MAX_KNOWN_BYTES
    assert lines.read(long) is not lines.read(long)


def test_lines_are_compared_with_those_that_stood_there() -> None:
    raws = [b"start", b"X-Token: a", b"B: c"]
    before = READER.read_all(raws, [])
    assert before is not None
    again = READER.read_all(list(raws), before)
    assert again is not None and again[0] is before[0]
    moved = READER.read_all([b"start", b"B: c", b"X-Token: a"], before)
    assert moved is not None and [line.raw for line in moved] == [b"B: c", b"X-Token: a"]
    assert READER.read_all([b"start", b"odd"], before) is None
