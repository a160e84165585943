"""Lines as bytes: machines read them back, people are not fooled by them."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import Result
from sidecar.telemetry.line import line_of
from sidecar.telemetry.render import CLIP, MAX_LINE_BYTES, TEXTS, Stamp, console_line, fields_of, json_line, printable
from sidecar.telemetry.shapes import RequestLine
from tests.telemetry.records import request


def line_with(**changes: object) -> RequestLine:
    return line_of(request(**changes))


HEAD = b'{"level":"info",'
NOON = b"2026-01-02T12:00:01.234Z"

HOSTILE = [
    pytest.param("a\r\nlevel=error forged", id="line feed"),
    pytest.param("\x1b[2J\x1b[31m", id="escape sequence"),
    pytest.param("\x9b31m", id="C1 control"),
    pytest.param("a\u202eb", id="direction override"),
    pytest.param("\ud800", id="lone surrogate"),
    pytest.param('","level":"error', id="quote"),
    pytest.param("\x00", id="nul"),
    pytest.param("x\u2028y", id="line separator"),
    pytest.param("\x7f", id="delete"),
]


def text_of(line: bytes) -> str:
    """The line without its end, which must be the only one in it."""
    assert line.endswith(b"\n")
    return line[:-1].decode()


@pytest.mark.parametrize("value", HOSTILE)
def test_json_line_cannot_be_broken_out_of(value: str) -> None:
    line = json_line(HEAD, line_with(model=value))
    text = text_of(line)
    assert text.replace("\x7f", "").isprintable()
    decoded = json.loads(text)
    assert decoded["level"] == "info"
    assert decoded["model"] == value


@pytest.mark.parametrize("value", HOSTILE)
def test_console_line_cannot_be_broken_out_of(value: str) -> None:
    text = text_of(console_line(NOON, "info", "request", {"model": value, "status": 200}))
    assert text.isprintable()
    assert text.startswith("12:00:01.234 info    request model=")
    assert text.endswith(" status=200")


@given(st.text())
def test_any_text_gives_one_readable_line(value: str) -> None:
    line = json_line(HEAD, {"model": value})
    assert line.count(b"\n") == 1
    decoded = json.loads(line)
    assert decoded["model"] == value or len(value) > CLIP
    assert console_line(NOON, "info", "x", {"model": value}).count(b"\n") == 1


@given(
    st.dictionaries(
        st.text(min_size=1),
        st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False),
        max_size=5,
    )
)
def test_numbers_come_back_as_they_were(fields: dict[str, bool | int | float | None]) -> None:
    assert json.loads(json_line(b'{"":0,', {**fields, "z": 1})) == {"": 0, **fields, "z": 1}


def test_request_is_all_there() -> None:
    record = line_with(result=Result.FAILURE, reason=Reason.TTFT_TIMEOUT)
    decoded = json.loads(json_line(b'{"first":1,', record))
    assert set(decoded) == {"first", *record.__struct_fields__}
    assert decoded["result"] == "failure"
    assert decoded["reason"] == "ttft_timeout"
    assert decoded["ttft_s"] == 0.5


def test_both_paths_give_the_same_members() -> None:
    """The fast path encodes the struct, the slow one its fields."""
    fast = json.loads(json_line(HEAD, line_with(model="x")))
    slow = json.loads(json_line(HEAD, line_with(model="\ud800")))
    assert fast | {"model": ""} == slow | {"model": ""}


@pytest.mark.parametrize("filler", ["x", "é", "\ud800", "\x1b"], ids=["ascii", "accent", "surrogate", "escape"])
def test_endless_name_gives_a_short_line(filler: str) -> None:
    line = json_line(HEAD, line_with(model=filler * 1_000_000, path="/" + filler * 60_000))
    decoded = json.loads(line)
    assert decoded["model"] == filler * CLIP + "..."
    assert len(line) <= MAX_LINE_BYTES + 6 * CLIP
    assert len(console_line(NOON, "info", "request", {"model": filler * 1_000_000})) < 8 * CLIP


def test_readable_names_stay_readable() -> None:
    assert "模型" in json_line(HEAD, line_with(model="模型")).decode()
    assert "模型" in console_line(NOON, "info", "request", {"model": "模型"}).decode()


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param("plain", " k=plain", id="word"),
        pytest.param("two words", ' k="two words"', id="space"),
        pytest.param('a"b', ' k="a\\"b"', id="quote"),
        pytest.param("a=b", ' k="a=b"', id="equals sign"),
        pytest.param(1.23456, " k=1.235", id="seconds"),
        pytest.param(7, " k=7", id="integer"),
        pytest.param(True, " k=true", id="true"),
        pytest.param(False, " k=false", id="false"),
        pytest.param(0, " k=0", id="nought is shown"),
        pytest.param(None, "", id="None is not"),
        pytest.param("", "", id="empty is not"),
    ],
)
def test_console_word(value: str | float | bool | None, shown: str) -> None:
    assert text_of(console_line(NOON, "info", "e", {"k": value})) == "12:00:01.234 info    e" + shown


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_text_of_lines_is_indented_so_that_it_forges_no_line(name: str) -> None:
    text = console_line(NOON, "error", "e", {name: "First\n12:00:00.000 info forged\x1b", "k": 1}).decode()
    first, *rest = text.splitlines()
    assert first == "12:00:01.234 error   e k=1"
    assert rest == ["    First", "    12:00:00.000 info forged\\x1b"]


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_text_of_one_line_stands_with_the_others(name: str) -> None:
    assert text_of(console_line(NOON, "error", "e", {name: "gone"})) == f"12:00:01.234 error   e {name}=gone"


def test_printable_text_is_not_touched() -> None:
    assert printable("a b") == "a b"


def test_fields_are_plain_words() -> None:
    fields = fields_of(line_with(reason=Reason.DRAINING))
    assert fields["reason"] == "draining"
    assert fields["result"] == "success"
    assert all(value is None or type(value) in (str, int, float, bool) for value in fields.values())
    assert fields_of({"a": 1}) == {"a": 1}


@pytest.mark.parametrize(
    ("unix_s", "text"),
    [
        pytest.param(0.0, b"1970-01-01T00:00:00.000Z", id="epoch"),
        pytest.param(1_700_000_000.25, b"2023-11-14T22:13:20.250Z", id="now and then"),
        pytest.param(1_700_000_000.9999, b"2023-11-14T22:13:20.999Z", id="rounds down"),
    ],
)
def test_stamp(unix_s: float, text: bytes) -> None:
    assert Stamp(lambda: unix_s)() == text


def test_stamp_follows_a_clock_that_runs_and_jumps() -> None:
    times = [10.0, 10.0005, 10.001, 11.0, 10.0]
    stamp = Stamp(iter(times).__next__)
    ends = [stamp()[-8:] for _ in times]
    assert ends == [b":10.000Z"[1:].rjust(8, b":"), b":10.000Z", b":10.001Z", b":11.000Z", b":10.000Z"]


def test_long_line_leaves_out_what_a_short_one_does() -> None:
    plain = line_with(tenant="", qos="", queued_s=None, counted="", reserved_tokens=0, shadowed="", why="")
    short = msgspec.json.decode(json_line(HEAD, plain))
    long = msgspec.json.decode(json_line(HEAD, msgspec.structs.replace(plain, path="/" * 9000)))
    assert list(short) == list(long)
    assert "reason" in short
    assert not {"tenant", "qos", "queued_s", "counted", "reserved_tokens", "shadowed", "why"} & set(short)


def test_encoder_and_field_names_agree() -> None:
    assert list(msgspec.json.decode(msgspec.json.encode(line_with()))) == list(RequestLine.__struct_fields__)
