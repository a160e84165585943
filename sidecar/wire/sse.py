"""Server-sent events out of a byte stream, over any split: bytes in, complete events out.

Why by blocks and not by lines: an engine writes one whole event per write, so nearly every read is `data: ...` and a
blank line. That case is recognised by looking at the ends of the bytes and costs two slices; everything else takes
the slow path, which must give the same events for every input and every split (a property test holds it to that).

Rules (WHATWG HTML, "Parsing an event stream"):
1. A line ends with LF, CRLF or CR, mixed freely; a CR at the end of a read ends its line at once, and an LF that
   opens the next read belongs to it.
2. One BOM at the very start is dropped.
3. A line that opens with a colon is a comment; `id`, `retry` and unknown fields are ignored.
4. An event without a `data` field is not an event. An event that the stream's end cuts off is not one either.
5. Ours: an event longer than the limit is dropped whole and counted; memory held is bounded by the limit.
"""

from typing import Final

Event = tuple[bytes, bytes]
"""Event type (empty if none was named) and data, its lines joined by LF."""

LIMIT_BYTES: Final = 1024 * 1024 + 64 * 1024
"""Longest event read: 1 MiB of data (audio, long tool arguments) and its field names."""

# Numbers: looking for one in bytes costs a seventh of looking for a bytes object of length one.
_LF: Final = 0x0A
_CR: Final = 0x0D

_BOM: Final = b"\xef\xbb\xbf"


class SseReader:
    """One stream's reader. Never raises on what a peer sends.

    `limit`: longest event in bytes, counted from its first field to its last, line ends included.
    `comments` counts comment lines of finished events; `oversized` counts events dropped for their length.
    """

    __slots__ = ("_dropping", "_held", "_limit", "_skip_lf", "_slow", "_started", "comments", "oversized")

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self.comments = 0
        self.oversized = 0
        self._limit = limit
        self._held: bytearray | None = None
        self._skip_lf = False
        self._started = False
        self._dropping = False
        self._slow = True

    def feed(self, data: bytes) -> list[Event]:
        """The events that `data` completed, in order; empty if none."""
        if not self._slow and data[-2:] == b"\n\n":
            if data[:6] == b"data: ":
                value = data[6:-2]
                if _LF not in value and _CR not in value and len(data) - 2 <= self._limit:
                    return [(b"", value)]
            if _CR not in data:
                events: list[Event] = []
                self._split(data, events)
                return events
        return self._feed_any(data)

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished event are held; unfinished comments are none."""
        if self._dropping:
            return True
        held = self._held
        if not held:
            return False
        return not self._started or any(line and not line.startswith(b":") for line in held.split(b"\n"))

    @property
    def tail(self) -> bytes:
        """Data of the unfinished event, as far as it is known; empty if none."""
        events: list[Event] = []
        if self._held and not self._dropping:
            self._event(bytes(self._held), events, count=False)
        return events[0][1] if events else b""

    def _feed_any(self, data: bytes) -> list[Event]:
        events: list[Event] = []
        if not data:
            return events
        if self._skip_lf and data[0] == _LF:
            data = data[1:]
            self._skip_lf = False
            if not data:
                # A CR has been read, so this is past the place of a BOM.
                self._slow = self._held is not None
                return events
        self._skip_lf = data[-1] == _CR
        if _CR in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if not self._started:
            if self._held is not None:
                data = bytes(self._held) + data
                self._held = None
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._held = bytearray(data)
                return events
            self._started = True
            data = data.removeprefix(_BOM)
        self._cut(data, events)
        self._slow = self._skip_lf or self._held is not None
        return events

    def _cut(self, data: bytes, events: list[Event]) -> None:
        """Takes normalised bytes: finished blocks become events, the rest is held."""
        held = self._held
        if held is None:
            # Blank lines between events; kept, they would make the rest look like an unfinished event.
            data = data.lstrip(b"\n")
            end = data.rfind(b"\n\n")
            if end >= 0:
                self._split(data[: end + 2], events)
                data = data[end + 2 :]
            if not data:
                return
            held = self._held = bytearray(data)
        else:
            scan = max(len(held) - 1, 0)
            held += data
            if self._dropping:
                start = held.find(b"\n\n", scan)
                if start < 0:
                    del held[:-1]
                    return
                del held[: start + 2]
                self._dropping = False
                self._held = None
                self._cut(bytes(held), events)
                return
            end = held.rfind(b"\n\n", scan)
            if end >= 0:
                self._split(bytes(held[: end + 2]), events)
                del held[: end + 2]
                if not held:
                    self._held = None
                    return
        if len(held) > self._limit + 1:
            # One more than the limit may still be an event of exactly the limit and the first of its two line ends.
            self._dropping = True
            self.oversized += 1
            del held[:-1]

    def _split(self, data: bytes, events: list[Event]) -> None:
        for block in data.split(b"\n\n"):
            if not block:
                continue
            if block[0] == _LF:
                # Of three line ends in a row the third opens the next block.
                block = block[1:]
            if len(block) > self._limit:
                self.oversized += 1
                continue
            if block[:6] == b"data: ":
                value = block[6:]
                if _LF not in value:
                    events.append((b"", value))
                    continue
            elif block[:7] == b"event: ":
                end = block.find(b"\n")
                value = block[end + 7 :]
                if block[end : end + 7] == b"\ndata: " and _LF not in value:
                    events.append((block[7:end], value))
                    continue
            self._event(block, events)

    def _event(self, block: bytes, events: list[Event], *, count: bool = True) -> None:
        kind = b""
        data: bytes | None = None
        more: list[bytes] | None = None
        for line in block.split(b"\n"):
            if line[:5] == b"data:":
                value = line[6:] if line[5:6] == b" " else line[5:]
            elif line[:6] == b"event:":
                kind = line[7:] if line[6:7] == b" " else line[6:]
                continue
            elif line[:1] == b":":
                if count:
                    self.comments += 1
                continue
            elif line == b"data":
                value = b""
            elif line == b"event":
                kind = b""
                continue
            else:
                continue
            # Many `data` lines are rare: a list is for those alone. But they may be as many as fit into an event.
            if data is None:
                data = value
            elif more is None:
                more = [data, value]
            else:
                more.append(value)
        if more is not None:
            data = b"\n".join(more)
        if data is not None:
            events.append((kind, data))
