"""Clients that take one turn each: on a connection of their own or a kept one, in whatever manner the turn asks for.

On bare protocols: a client library would neither leave in the middle of a head nor show each byte, and would cost more
CPU than the sidecar under test. Every wait has a limit; what passes it is an entry of the ledger like any other.
"""

import asyncio
import socket
import struct
from typing import cast

from soak.answers import Answer, Got, Must, Seen, is_lawful_part, what_it_was
from soak.ledger import Ledger
from soak.plan import INFERENCE, REFUSED_HEADS, Ask, Carriage, Kind, Manner, Turn, When
from soak.policies import IDLE_CLIENT_S
from soak.requests import head_and_body

LIMIT_S = 45.0
"""No request may take longer: all attempts that it may have, a fallback's too, each up to its last deadline, come to
half of it; the rest is for a busy machine."""

KEPT_S = 1.0
"""A kept connection is not used again after this long: far less than the sidecar's patience with idle clients, so
that no request meets a connection that is being closed."""

PAUSE_S = 1.2
DEAF_S = IDLE_CLIENT_S + 2.5
DRIBBLES = 8
DRIBBLE_S = 0.01
RESET = struct.pack("ii", 1, 0)
SMALL_BUFFER = 16 << 10


class Line(asyncio.Protocol):
    """One connection to the sidecar."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self.lost = False
        self.used_at = 0.0
        self.mark = -1
        """Wakes its waiter once this many bytes of body are there; -1: only at the end."""
        self._rest = b""
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are this in all but name.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None or answer.done:
            self._rest += data
            return
        self._rest += answer.feed(data)
        if answer.done or answer.bad or answer.continued or 0 <= self.mark <= len(answer.body):
            self.wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.answer is not None and not self.answer.done:
            self.answer.lost()
        self.wake()

    def wake(self) -> None:
        """Let the waiter look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def transport(self) -> asyncio.Transport:
        """The transport below."""
        return self._transport

    @property
    def unasked(self) -> bytes:
        """Bytes that came when no answer was due."""
        return self._rest

    def expect(self, answer: Answer) -> None:
        """The next bytes are this answer's; some may be here already."""
        self.answer = answer
        rest, self._rest = self._rest, b""
        if rest:
            self._rest = answer.feed(rest)
        if self.lost and not answer.done:
            answer.lost()

    async def ended(self, limit_s: float, *, at_mark: bool = False, at_100: bool = False) -> bool:
        """Wait until the answer is whole, bad, or lost, or what else is asked for; False when the time is over."""
        loop = asyncio.get_running_loop()
        due = loop.time() + limit_s
        answer = self.answer
        assert answer is not None
        while not (answer.done or answer.bad or self.lost):
            if (at_mark and answer.status and len(answer.body) >= self.mark) or (at_100 and answer.continued):
                return True
            self._waiter = loop.create_future()
            timer = loop.call_at(due, self.wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
            if loop.time() >= due:
                return False
        return True

    def leave(self, reset: bool) -> None:
        """End the connection: RST at once, or FIN behind what was written."""
        if self.lost:
            return
        if reset:
            self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._transport.abort()
        else:
            self._transport.close()


class Crew:
    """All clients: takes turns, keeps connections, and enters what it saw into the ledger.

    `stale` counts kept connections that the sidecar had closed when they were used again: HTTP allows it, so the
    client asks anew, and the ledger would show a request that was served twice.
    """

    def __init__(self, port: int, ledger: Ledger) -> None:
        self._port = port
        self._ledger = ledger
        self._kept: dict[Carriage, list[Line]] = {Carriage.KEPT: [], Carriage.HTTP_10_KEPT: []}
        self.live = 0
        self.connections = 0
        self.stale = 0

    async def take(self, turn: Turn) -> None:
        """One turn, from its connection to its entries. A connection that is refused is a breach, not an error."""
        self.live += 1
        try:
            line = self._kept_line(turn)
            if line is None or not await self._take(turn, line, reused=True):
                await self._take(turn, await self._new_line(turn), reused=False)
        except (OSError, TimeoutError) as exc:
            self._ledger.breach("the sidecar accepts connections", f"{turn.asks[0].kind.value}: {exc!r}")
        finally:
            self.live -= 1

    def close(self) -> None:
        """Let go of the kept connections."""
        for lines in self._kept.values():
            for line in lines:
                line.leave(False)
            lines.clear()

    def _kept_line(self, turn: Turn) -> Line | None:
        kept = self._kept.get(turn.carriage)
        if turn.manner in _SLOW or not kept:
            return None
        now = asyncio.get_running_loop().time()
        while kept:
            line = kept.pop()
            if line.unasked:
                self._ledger.breach("nobody answers what was not asked", repr(line.unasked[:200]))
            elif not line.lost and now - line.used_at < KEPT_S:
                return line
            line.leave(False)
        return None

    async def _new_line(self, turn: Turn) -> Line:
        loop = asyncio.get_running_loop()
        raw = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            raw.setblocking(False)
            if turn.manner in _SLOW:
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
            async with asyncio.timeout(10.0):
                await loop.sock_connect(raw, ("127.0.0.1", self._port))
            _, line = await loop.create_connection(Line, sock=raw)
        except BaseException:
            raw.close()
            raise
        self.connections += 1
        return line

    async def _take(self, turn: Turn, line: Line, *, reused: bool) -> bool:
        """True when all of it was entered; False where a kept connection turned out to be closed."""
        line.expect(_answer_of(turn, turn.asks[0]))
        if turn.abort is not None and turn.abort.when is When.IN_REQUEST:
            self._leave_in_request(turn.asks[0], turn, line)
            return True
        await _send(turn, line)
        goes_on, closed = True, False
        for place, ask in enumerate(turn.asks):
            if not goes_on:
                # The sidecar closes behind an earlier one and must not begin this one; or it was we who left.
                self._ledger.saw(ask, Seen(Got.LEFT, 0, "", 0, Must.NONE if closed else Must.MAYBE, left=True))
                continue
            if place:
                line.expect(_answer_of(turn, ask))
            seen = await self._answered(turn, line, ask)
            if reused and not place and seen.got is Got.NOTHING:
                self.stale += 1
                return False
            self._ledger.saw(ask, seen)
            if seen.got is Got.REFUSED and ask.kind in REFUSED_HEADS:
                self._ledger.refused_heads += 1
            answer = line.answer
            closed = seen.got is Got.CUT or (answer is not None and answer.done and answer.closes)
            goes_on = seen.got in _ENDED_WELL and not line.lost and not closed
        if goes_on and turn.carriage in self._kept and turn.manner not in _SLOW:
            line.used_at = asyncio.get_running_loop().time()
            self._kept[turn.carriage].append(line)
        else:
            line.leave(False)
        return True

    def _leave_in_request(self, ask: Ask, turn: Turn, line: Line) -> None:
        abort = turn.abort
        assert abort is not None
        head, body = head_and_body(ask, turn.carriage)
        data = head + body
        part = data[: int(len(data) * abort.part)]
        line.transport.write(part)
        line.leave(abort.reset)
        # An inference is no request before its body is whole; anything else is one once its head is.
        begun = ask.kind not in INFERENCE and len(part) >= len(head)
        must = Must.NONE if not begun else Must.MAYBE if abort.reset else Must.ONE
        self._ledger.saw(ask, Seen(Got.LEFT, 0, "", 0, must, left=True))

    async def _answered(self, turn: Turn, line: Line, ask: Ask) -> Seen:
        """Wait for one answer, or leave as the turn says."""
        answer, abort = line.answer, turn.abort
        assert answer is not None
        if turn.manner in _SLOW and not line.lost:
            line.transport.pause_reading()
            await asyncio.sleep(DEAF_S if turn.manner is Manner.DEAF else PAUSE_S)
            if not line.lost:
                line.transport.resume_reading()
        if abort is None:
            in_time = await line.ended(LIMIT_S)
        elif abort.when is When.SENT:
            await asyncio.sleep(abort.after_s)
            in_time = True
        else:
            line.mark = abort.after_bytes
            in_time = await line.ended(LIMIT_S, at_mark=True)
        slow = turn.manner is Manner.DEAF
        size = len(answer.body)
        if not in_time:
            line.leave(True)
            return Seen(Got.HUNG, answer.status, "", size, Must.MAYBE, slow, True, f"no end within {LIMIT_S:g} s")
        if abort is not None and not (answer.done or answer.bad or line.lost):
            line.leave(abort.reset)
            must = Must.MAYBE if abort.reset and not answer.status else Must.ONE
            lawful = is_lawful_part(ask, answer)
            return Seen(Got.LEFT if lawful else Got.WRONG, answer.status, "", size, must, slow, True)
        got, word, detail = what_it_was(ask, answer)
        if got is Got.NOTHING and slow:
            got = Got.BROKEN  # the reset took along what was not read
        must = Must.NONE if ask.kind in REFUSED_HEADS else Must.MAYBE if got is Got.NOTHING else Must.ONE
        return Seen(got, answer.status, word, size, must, slow, False, detail)


_SLOW = frozenset({Manner.SLOW, Manner.DEAF})
_ENDED_WELL = frozenset({Got.WHOLE, Got.MARRED, Got.REFUSED, Got.ENGINE_STATUS})
"""Answers after which a connection may be used again. Behind a stream that was cut the sidecar closes, and could not
say so in a head that had gone out."""


def _answer_of(turn: Turn, ask: Ask) -> Answer:
    http_10 = turn.carriage in (Carriage.HTTP_10, Carriage.HTTP_10_KEPT)
    return Answer(head_only=ask.kind is Kind.MODELS_HEAD, http_10=http_10)


async def _send(turn: Turn, line: Line) -> None:
    if turn.manner is Manner.CONTINUE:
        head, body = head_and_body(turn.asks[0], turn.carriage, expect=True)
        line.transport.write(head)
        await line.ended(LIMIT_S, at_100=True)
        if line.answer is not None and not line.answer.status and not line.lost:
            line.transport.write(body)
        return
    data = b"".join(b"".join(head_and_body(ask, turn.carriage)) for ask in turn.asks)
    if turn.manner is not Manner.DRIBBLE:
        line.transport.write(data)
        return
    step = len(data) // DRIBBLES + 1
    for at in range(0, len(data), step):
        if line.lost:
            return
        line.transport.write(data[at : at + step])
        await asyncio.sleep(DRIBBLE_S)
