"""One client connection: reads requests, starts one exchange at a time, writes its reply.

The parser's callbacks only build requests; `_pump` acts on them after each read, so that no exchange ever runs inside
a parser callback. Replies go straight from the caller to the transport; the transport's buffer is the only queue, and
its high-water mark stops the engine's side from reading.

A client that sends FIN while its request is in flight has left: TCP cannot tell a close from a half-close, engines
treat both as a hang-up, and an answer nobody waits for costs a GPU.
"""

import asyncio
import socket
from typing import Final, cast

from sidecar.downstream.parser import Refused, RequestParser
from sidecar.kernel.errors import Reason, Refusal
from sidecar.kernel.exchange import ResponseHead
from sidecar.proxy.exchange import Exchange
from sidecar.proxy.pipeline import Pipeline
from sidecar.proxy.request import Request
from sidecar.proxy.watchdog import grace_s
from sidecar.wire.headers import chunk_line, length_line
from sidecar.wire.peer import came_by_loopback
from sidecar.wire.refusal import refusal_answer

# Bytes of requests that a client may send ahead of its turn before we stop reading it.
_AHEAD_BYTES: Final = 256 * 1024
# How long, and for how much, we go on reading after a reply that ended before its request did: closing at once
# would reset the connection and could take the reply with it (RFC 9112 section 9.6).
_LINGER_S: Final = 2.0
_LINGER_BYTES: Final = 4 << 20
_OK: Final = b"HTTP/1.1 200 "
_BODILESS: Final = frozenset({204, 304})
# While we do not read a client, its leaving raises no event: then we look, this often. TCP_INFO's first byte is the
# connection's state in Linux.
_LOOK_S: Final = 0.05
_TCP_INFO: Final = getattr(socket, "TCP_INFO", None)
_RESET: Final = 7  # TCP_CLOSE
_FIN: Final = 8  # TCP_CLOSE_WAIT


class ClientConnection:
    """The protocol object of one client socket. It is in `connections` while the socket is open."""

    __slots__ = (
        "_ahead",
        "_chunked",
        "_clock",
        "_close_after",
        "_connections",
        "_exchange",
        "_head_began_at",
        "_heard_at",
        "_length_promised",
        "_linger_left",
        "_lingering",
        "_listening",
        "_looking",
        "_loop",
        "_parser",
        "_paused_at",
        "_paused_size",
        "_pipeline",
        "_pumping",
        "_reading",
        "_refusal",
        "_request",
        "_scheme",
        "_timer",
        "_timer_at",
        "_transport",
        "_tunnel",
        "_upload_paused",
        "loopback",
        "peer",
    )

    def __init__(
        self,
        pipeline: Pipeline,
        loop: asyncio.AbstractEventLoop,
        connections: "set[ClientConnection]",
        *,
        scheme: bytes,
        trusted: bool,
    ) -> None:
        self._pipeline = pipeline
        self._loop = loop
        self._clock = loop.time
        self._connections = connections
        self._scheme = scheme
        self._parser = RequestParser(pipeline.body_limit, trusted)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]  # set before any other callback
        self._exchange: Exchange | None = None
        self._request: Request | None = None
        self._refusal: Refusal | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._heard_at = 0.0
        self._head_began_at: float | None = None
        self._paused_at: float | None = None
        self._paused_size = 0
        self._ahead = 0
        self._looking = False
        self._listening = False  # our loop stood still: what the client said meanwhile is read first
        self._reading = True
        self._upload_paused = False
        self._pumping = False
        self._chunked = False
        self._length_promised = False
        self._tunnel = False
        self._close_after = False
        self._lingering = False
        self._linger_left = _LINGER_BYTES
        self.peer = ""
        self.loopback = False

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport = cast("asyncio.Transport", transport)  # uvloop's is none by inheritance
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self.peer = str(peer[0]) if isinstance(peer, tuple) else ""
        self.loopback = came_by_loopback(peer, transport.get_extra_info("sockname"))
        self._heard_at = self._clock()
        self._arm(self._heard_at + self._pipeline.idle_client_s())

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._clock()
        if self._refusal is not None or self._lingering:
            self._discard(len(data))
            return
        parser = self._parser
        try:
            parser.feed(data)
        except Refused as refused:
            self._refuse_connection(refused.refusal)
        if parser.in_head:
            if self._head_began_at is None:
                self._head_began_at = self._heard_at
        else:
            self._head_began_at = None
        request = self._request
        if request is not None:
            ahead = request.complete or bool(request.upgrade)
        else:
            ahead = self._paused_at is not None
        if ahead:
            self._ahead += len(data)
        self._pump()

    def eof_received(self) -> bool:
        if self._exchange is not None:
            if not self._tunnel:
                self._transport.abort()
            self._exchange.client_left()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._exchange is not None:
            self._exchange.client_left()
        self._connections.discard(self)
        self._parser.close()

    def pause_writing(self) -> None:
        self._paused_at = self._clock()
        self._paused_size = self._transport.get_write_buffer_size()
        if self._exchange is not None:
            self._exchange.client_paused()

    def resume_writing(self) -> None:
        self._paused_at = None
        if self._exchange is not None:
            self._exchange.client_resumed()
        else:
            self._pump()

    # What the exchange calls: the reply.

    @property
    def scheme(self) -> bytes:
        """`http` or `https`, as the client spoke to us."""
        return self._scheme

    def send_informational(self, head: ResponseHead) -> None:
        """A 1xx on its way to the client; HTTP/1.0 knows none."""
        request = self._request
        if request is None or request.http_10 or self._transport.is_closing():
            return
        lines = b"".join(head.lines)
        self._transport.write(b"HTTP/1.1 %d %b\r\n%b\r\n" % (head.status, head.phrase, lines))

    def send_head(self, head: ResponseHead, extra: bytes, body: bytes) -> None:
        """The head with `extra` header lines, and the first bytes of the body (may be empty) in one write."""
        request = self._request
        assert request is not None
        self._chunked = False
        framing = b""
        length = head.content_length
        self._length_promised = length is not None
        if head.status in _BODILESS or request.method == b"HEAD":
            if length is not None and head.status != 204:
                framing = b"content-length: %d\r\n" % length
            body = b""
        elif length is not None:
            framing = length_line(length)
        elif request.http_10:
            self._close_after = True
        else:
            self._chunked = True
            framing = b"transfer-encoding: chunked\r\n"
            if body:
                body = b"%x\r\n%b\r\n" % (len(body), body)
        if self._must_close(request):
            framing += b"connection: close\r\n"
        elif request.http_10:
            framing += b"connection: keep-alive\r\n"
        lines = b"".join(head.lines)
        status = _OK if head.status == 200 else b"HTTP/1.1 %d " % head.status
        self._transport.write(b"%b%b\r\n%b%b%b\r\n%b" % (status, head.phrase, lines, framing, extra, body))

    def send_body(self, data: bytes) -> None:
        """More of the body; never empty."""
        if self._chunked:
            self._transport.write(b"%b%b\r\n" % (chunk_line(len(data)), data))
        else:
            self._transport.write(data)

    def send_end(self, trailers: list[bytes]) -> None:
        """The end of the body, where the framing has one."""
        if self._chunked:
            self._transport.write(b"0\r\n%b\r\n" % b"".join(trailers) if trailers else b"0\r\n\r\n")

    def refuse(self, refusal: Refusal, request_id: bytes, extra: bytes) -> None:
        """A whole answer of ours. Nothing of the reply may have been sent."""
        request = self._request
        assert request is not None
        close = self._must_close(request)
        answer = refusal_answer(refusal, request_id, extra, close, request.method == b"HEAD")
        self._transport.write(answer)

    def start_tunnel(self, head: ResponseHead, extra: bytes, data: bytes) -> None:
        """101: from here on bytes pass both ways unread."""
        self._tunnel = True
        self._close_after = True
        lines = b"".join(head.lines)
        self._transport.write(
            b"HTTP/1.1 101 %b\r\n%bconnection: upgrade\r\nupgrade: %b\r\n%b\r\n%b"
            % (head.phrase, lines, head.upgrade, extra, data)
        )
        self._push_tunnel()

    def cut(self) -> None:
        """Break the connection: the reply cannot be ended honestly."""
        self._close_after = True
        self._transport.abort()

    def close_after_reply(self) -> None:
        """Close once the reply that is under way has been written."""
        self._close_after = True

    @property
    def can_append(self) -> bool:
        """Whether bytes can still be added to the body under way: not if its length was promised."""
        return not self._length_promised

    def pause_upload(self) -> None:
        """The engine does not take the upload as fast as it comes."""
        self._upload_paused = True
        self._set_reading()

    def resume_upload(self) -> None:
        """The engine takes more."""
        self._upload_paused = False
        self._set_reading()

    def exchange_done(self) -> None:
        """The exchange recorded its end and let go of everything: the next request's turn."""
        request = self._request
        self._exchange = None
        self._request = None
        requests = self._parser.requests
        if not requests or not requests[0].complete:
            self._ahead = 0  # what was sent ahead is served, or is the next in turn
        self._upload_paused = False
        # Both clocks start anew: while it was served, the client was not to speak.
        self._heard_at = self._clock()
        if self._head_began_at is not None:
            self._head_began_at = self._heard_at
        if self._transport.is_closing() or request is None:
            return
        request.body = b""
        # The parser holds the request until its next one comes.
        request.headers = []
        request.lines = []
        if self._close_after or not request.keep_alive or not request.complete:
            self._close(request.complete or self._tunnel)
            return
        if request.upgrade and self._parser.tunnel is not None:
            try:
                self._parser.resume()
            except Refused as refused:
                self._refuse_connection(refused.refusal)
        self._set_reading()
        if not self._pumping:
            self._pump()

    # What the listener calls.

    @property
    def idle(self) -> bool:
        """Whether no request is being read or served."""
        return self._exchange is None and not self._parser.in_head and not self._parser.requests

    def close_if_idle(self) -> None:
        """Close a keep-alive connection that nobody is using."""
        if self.idle and not self._lingering:
            self._transport.close()

    def cut_exchange(self, reason: Reason) -> None:
        """End what is in flight, in band where that is possible."""
        if self._exchange is not None:
            self._exchange.cut(reason)
        else:
            self._transport.close()

    # Our own.

    def _must_close(self, request: Request) -> bool:
        """Whether the reply whose head goes out now is the connection's last; remembers that it is."""
        self._close_after |= not request.keep_alive or not request.complete or self._pipeline.draining
        return self._close_after

    def _pump(self) -> None:
        self._pumping = True
        parser = self._parser
        while not self._transport.is_closing() and not self._lingering:
            exchange = self._exchange
            if exchange is not None:
                request = self._request
                assert request is not None
                if self._tunnel:
                    self._push_tunnel()
                elif not request.held and (request.pieces or request.complete):
                    exchange.upload()
                break
            if not parser.requests or self._paused_at is not None:
                break  # a client that does not read its last reply gets no other
            request = parser.requests[0]
            if request.held and not request.complete:
                if self._refusal is None and request.expect_continue and not request.http_10:
                    request.expect_continue = False
                    self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                break
            if self._refusal is not None and not request.complete:
                break  # its body was refused before anything of it went on
            del parser.requests[0]
            self._request = request
            self._exchange = exchange = Exchange(self._pipeline, request, self)
            exchange.start()
        self._pumping = False
        if self._refusal is not None and not self._transport.is_closing() and not self._lingering:
            self._answer_refusal(self._refusal)
        else:
            self._set_reading()

    def _push_tunnel(self) -> None:
        data, self._parser.tunnel = self._parser.tunnel, b""
        self._ahead = 0
        self._set_reading()
        if data and self._exchange is not None:
            self._exchange.tunnel(data)

    def _refuse_connection(self, refusal: Refusal) -> None:
        self._refusal = refusal
        self._pipeline.recorder.refused(refusal.reason)

    def _answer_refusal(self, refusal: Refusal) -> None:
        exchange, request = self._exchange, self._request
        if exchange is not None and request is not None:
            if request.complete:
                return  # an earlier request's reply comes first
            # The upload under way is what broke.
            self._close_after = True
            exchange.cut(refusal.reason, refusal.message)
            return
        if self._parser.requests and self._parser.requests[0].complete:
            return
        self._close_after = True
        self._transport.write(refusal_answer(refusal, self._pipeline.new_id(), b"", True, False))
        self._close(False)

    def _close(self, clean: bool) -> None:
        if clean or not self._transport.can_write_eof():
            self._transport.close()
            return
        self._lingering = True
        self._reading = True
        self._transport.resume_reading()
        self._transport.write_eof()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_LINGER_S, self._transport.abort)

    def _discard(self, size: int) -> None:
        self._linger_left -= size
        if self._linger_left < 0:
            self._transport.abort()

    def _set_reading(self) -> None:
        wanted = not self._upload_paused and self._ahead <= _AHEAD_BYTES
        if wanted != self._reading and not self._transport.is_closing():
            self._reading = wanted
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
                if _TCP_INFO is not None and not self._looking:
                    self._looking = True
                    self._loop.call_later(_LOOK_S, self._look, self._transport.get_extra_info("socket"))

    def _look(self, sock: socket.socket) -> None:
        if self._reading or self._transport.is_closing() or _TCP_INFO is None:
            self._looking = False
            return
        state = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 1)[0]
        if state == _RESET or (state == _FIN and not self._tunnel):
            self._transport.abort()
            if self._exchange is not None:
                self._exchange.client_left()
            return
        self._loop.call_later(_LOOK_S, self._look, sock)

    def _arm(self, due: float) -> None:
        # Kept here: uvloop's handle of what is due within the millisecond cannot tell when it is.
        self._timer_at = due
        self._timer = self._loop.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        # One lazy timer per connection: it fires at most one idle period from now and looks at what is due.
        now = self._clock()
        grace = 0.0 if self._listening else grace_s(now - self._timer_at)
        self._listening = grace > 0.0
        if self._listening:
            self._arm(now + grace)
            return
        idle_s = self._pipeline.idle_client_s()
        due = now + idle_s
        request = self._request
        if self._paused_at is not None:
            size = self._transport.get_write_buffer_size()
            if size < self._paused_size:
                self._paused_at, self._paused_size = now, size
            due = self._paused_at + idle_s
            if now >= due:
                if self._exchange is not None:
                    self._exchange.client_slow()
                self._transport.abort()
                return
        elif self._exchange is not None:
            waits = request is not None and request.expect_continue and not request.body_size  # for the engine's 100
            if request is not None and not request.complete and self._reading and not self._tunnel and not waits:
                due = self._heard_at + idle_s
                if now >= due:
                    self._exchange.cut(Reason.CLIENT_TIMEOUT, "the request's body stopped coming")
                    return
        else:
            began = self._head_began_at
            due = (self._heard_at if began is None else began) + idle_s
            if now >= due:
                if self._transport.is_closing():
                    self._transport.abort()  # its last reply was never read
                elif began is None and not self._parser.requests:
                    self._transport.close()
                    self._arm(now + idle_s)
                else:
                    self._refuse_connection(Refusal(Reason.CLIENT_TIMEOUT, "the request did not come whole in time"))
                    self._parser.requests.clear()
                    self._pump()
                return
        self._arm(due)
