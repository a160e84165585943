"""A transport of no socket, for protocols under test: what was written, and how the connection stands."""

import asyncio
from typing import Any

HIGH_WATER_BYTES = 64 * 1024


class FakeTransport(asyncio.Transport):
    """Takes everything at once while `stuck` is false; a stuck one buffers and tells its protocol, as real ones do."""

    def __init__(self, protocol: Any = None, *, peer: object = ("10.0.0.9", 4711)) -> None:
        super().__init__({"peername": peer})
        self._protocol = protocol
        self.written = b""
        self.reading = True
        self.closed = False
        self.aborted = False
        self.eof = False
        self.stuck = False
        self.buffered = 0
        self._paused = False

    def write(self, data: Any) -> None:
        assert not self.eof, "written after the end"
        if self.closed or self.aborted:
            return
        self.written += bytes(data)
        if self.stuck:
            self.buffered += len(data)
            if self.buffered > HIGH_WATER_BYTES and not self._paused:
                self._paused = True
                self._protocol.pause_writing()

    def drains(self) -> None:
        """The peer reads everything."""
        self.stuck = False
        self.buffered = 0
        if self._paused:
            self._paused = False
            self._protocol.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
