"""One client of a chat stream: sends, reads to the end, and says what it saw and whether it was whole.

Blocking sockets and llhttp, and no client library: libraries hide what is to be measured here, the moment at which
each event arrives, and how exactly a stream ended. Under locust these sockets are gevent's, and a user waits without
holding up the others; without it they are the system's, and nothing here knows the difference.

1. A stream is whole if its body ended cleanly after a finish reason and `[DONE]`, with no error in it. Where the answer
   can be known (`Ask.checked`: simulated engines count their tokens in the text), every token must be there, once, in
   order.
2. All tokens of one read have one arrival time: that is when the client got them.
3. A connection is kept after a clean end, while the peer keeps it too, and closed after any other.
"""

import contextlib
import re
import socket
import ssl
import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

READ_BYTES = 65536
EVENT_END = re.compile(rb"\r?\n\r?\n")
MAX_ERROR_BYTES = 65536


class Ended(StrEnum):
    """How a stream ended, as its client sees it."""

    WHOLE = "whole"
    LEFT = "left"  # we closed it, on purpose; right as far as it went
    REFUSED = "refused"  # a status of 400 or more in place of a stream
    TOLD = "cut, told in band"
    SILENT = "cut in silence"
    WRONG = "wrong"  # ends well, but tokens are missing, doubled or swapped
    UNREACHED = "unreached"  # no connection, or none that lasted until a head
    WAITED = "waited in vain"  # nothing came for as long as the client had patience


BROKEN = frozenset({Ended.TOLD, Ended.SILENT, Ended.WRONG, Ended.UNREACHED, Ended.WAITED})
"""What no user should see: neither an answer nor an honest refusal."""


class Target(msgspec.Struct, frozen=True):
    """Where to send: `path` stands before `/v1/...`, empty for most."""

    host: str
    port: int
    path: str = ""
    tls: bool = False

    @classmethod
    def of(cls, url: str) -> "Target":
        """From `http://host[:port][/path]`; ValueError says what is wrong with it."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no URL such as http://127.0.0.1:9400")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), path, tls)


class Ask(msgspec.Struct, frozen=True):
    """One request. `checked`: the answer is a simulated engine's and has exactly `tokens` tokens."""

    tokens: int
    model: str = "demo"
    session: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    checked: bool = False


class Pace(msgspec.Struct, frozen=True):
    """A slow reader: `size` bytes each `period_s`, with a receive buffer of `buffer_bytes`, until `over()`."""

    over: Callable[[], bool]
    size: int = 2048
    period_s: float = 0.5
    buffer_bytes: int = 8192


class Stream(msgspec.Struct):
    """What became of one stream. Times in s; `ttft_s` None where no token came."""

    began_s: float
    ended: Ended = Ended.UNREACHED
    total_s: float = 0.0
    ttft_s: float | None = None
    gaps_s: list[float] = []
    tokens: int = 0
    size: int = 0
    status: int = 0
    endpoint: str = ""
    version: str = ""
    reason: str = ""
    retry_after_s: float = 0.0
    detail: str = ""

    @property
    def longest_gap_s(self) -> float:
        """0 where there was none."""
        return max(self.gaps_s, default=0.0)


class Client:
    """One user's connection to `target`; opened when it is needed, kept while it is good."""

    def __init__(
        self, target: Target, patience_s: float = 30.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._target = target
        self._patience_s = patience_s
        self._clock = clock
        self._sock: socket.socket | None = None

    def close(self) -> None:
        """Leave. Harmless when nothing is open."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def stream(self, ask: Ask, pace: Pace | None = None) -> Stream:
        """Ask and read to the end; never raises for what a peer does. `pace`: slowly, on a connection of its own."""
        stream = Stream(began_s=self._clock(), gaps_s=[])
        answer = Answer(stream, ask)
        if pace is not None or not self._fresh():
            self.close()
        try:
            if self._sock is None:
                self._sock = self._connect(pace)
            self._sock.sendall(self._request(ask))
            self._read(self._sock, answer, pace)
        except TimeoutError:
            stream.ended, stream.detail = Ended.WAITED, f"nothing for {self._patience_s:g} s"
        except (OSError, httptools.HttpParserError) as exc:
            stream.ended, stream.detail = answer.cut(), f"{type(exc).__name__}: {exc}"
        stream.total_s = self._clock() - stream.began_s
        if not answer.keep or pace is not None:
            self.close()
        return stream

    def _fresh(self) -> bool:
        """Whether the kept connection is still good: nothing has arrived on it, no end and no stray byte."""
        if self._sock is None:
            return False
        self._sock.settimeout(0.0)
        try:
            self._sock.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._sock.settimeout(self._patience_s)
            return True
        except OSError:
            pass
        return False

    def _connect(self, pace: Pace | None) -> socket.socket:
        target = self._target
        family, kind, protocol, _, address = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(self._patience_s)
            if pace is not None:
                # Before the connect, since the window that is offered follows it.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, pace.buffer_bytes)
            sock.connect(address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if target.tls:
                return ssl.create_default_context().wrap_socket(sock, server_hostname=target.host)
        except OSError:
            sock.close()
            raise
        return sock

    def _request(self, ask: Ask) -> bytes:
        body = msgspec.json.encode(
            {
                "model": ask.model,
                "stream": True,
                "max_tokens": ask.tokens,
                "messages": [{"role": "user", "content": "Tell me what a circuit breaker is for."}],
            }
        )
        extra = [*ask.headers, ("x-session-id", ask.session)] if ask.session else ask.headers
        lines = "".join(f"{name}: {value}\r\n" for name, value in extra)
        target = self._target
        head = (
            f"POST {target.path}/v1/chat/completions HTTP/1.1\r\nhost: {target.host}:{target.port}\r\n"
            f"content-type: application/json\r\naccept: text/event-stream\r\n{lines}content-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _read(self, sock: socket.socket, answer: "Answer", pace: Pace | None) -> None:
        size = READ_BYTES if pace is None else pace.size
        while not answer.over:
            data = sock.recv(size)
            if not data:
                answer.stream.ended, answer.stream.detail = answer.cut(), "closed"
                return
            answer.feed(data, self._clock())
            if pace is not None:
                if pace.over() and not answer.over:
                    answer.leave()
                    return
                time.sleep(pace.period_s)


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[msgspec.Raw, ...] | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class Answer:
    """An answer as it arrives: fills `stream`; `over` once it has ended, `keep` if the connection is good for more."""

    def __init__(self, stream: Stream, ask: Ask) -> None:
        self.stream = stream
        self.over = False
        self.keep = False
        self._ask = ask
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = stream.began_s
        self._last = 0.0
        self._keep_alive = False
        self._finished = False
        self._done = False
        self._error = ""
        self._order = True

    def feed(self, data: bytes, now: float) -> None:
        """Take what was read at `now`; httptools.HttpParserError where it is no HTTP."""
        self._now = now
        self.stream.size += len(data)
        self._parser.feed_data(data)

    def leave(self) -> None:
        """The client closes by itself."""
        self.over = True
        self.stream.ended = Ended.LEFT if self._order and not self._error else Ended.WRONG

    def cut(self) -> Ended:
        """What an end of the connection, now, means."""
        if self._error:
            return Ended.TOLD
        if self.stream.status >= 400:
            return Ended.REFUSED
        return Ended.SILENT if self.stream.status else Ended.UNREACHED

    # llhttp's side.

    def on_status(self, phrase: bytes) -> None:
        self.stream.status = self._parser.get_status_code()

    def on_header(self, name: bytes, value: bytes) -> None:
        lower, text = name.lower(), value.decode("latin-1")
        if lower == b"x-sidecar-endpoint":
            self.stream.endpoint = text
        elif lower == b"x-sidecar-version":
            self.stream.version = text
        elif lower == b"x-sidecar-reason":
            self.stream.reason = text
        elif lower == b"retry-after":
            with contextlib.suppress(ValueError):
                self.stream.retry_after_s = float(text)

    def on_headers_complete(self) -> None:
        # Asked here, since llhttp says no once the message is complete.
        self._keep_alive = self._parser.should_keep_alive()

    def on_body(self, data: bytes) -> None:
        if self.stream.status >= 400:
            self._rest = (self._rest + data)[:MAX_ERROR_BYTES]
            return
        *events, self._rest = EVENT_END.split(self._rest + data)
        for event in events:
            self._event(event)

    def on_message_complete(self) -> None:
        stream = self.stream
        self.over = True
        if stream.status >= 400:
            stream.ended, stream.detail = Ended.REFUSED, self._rest.decode("utf-8", "replace")[:200]
        elif self._error:
            stream.ended, stream.detail = Ended.TOLD, self._error
        elif not self._done or not self._finished:
            stream.ended, stream.detail = Ended.SILENT, "ended without finish reason and [DONE]"
        elif not self._order or (self._ask.checked and stream.tokens != self._ask.tokens):
            stream.ended, stream.detail = Ended.WRONG, f"{stream.tokens} tokens of {self._ask.tokens}, or out of order"
        else:
            stream.ended = Ended.WHOLE
        self.keep = self._keep_alive and stream.ended in (Ended.WHOLE, Ended.REFUSED)

    def _event(self, event: bytes) -> None:
        data = b"".join(line[5:].lstrip(b" ") for line in event.splitlines() if line.startswith(b"data:"))
        if not data:
            return
        if data == b"[DONE]":
            self._done = True
            return
        try:
            decoded = _decode(data)
        except msgspec.MsgspecError as exc:
            self._order, self.stream.detail = False, f"no chunk: {exc}"
            return
        if decoded.error is not None:
            self._error = str(decoded.error)[:200]
        for choice in decoded.choices:
            self._finished = self._finished or choice.finish_reason is not None
            delta = choice.delta
            if delta.content or delta.reasoning_content or delta.tool_calls:
                self._token(delta.content or "")

    def _token(self, text: str) -> None:
        stream, now = self.stream, self._now
        if stream.ttft_s is None:
            stream.ttft_s = now - stream.began_s
        else:
            stream.gaps_s.append(now - self._last)
        self._last = now
        if self._ask.checked and not text.startswith(f"t{stream.tokens} "):
            self._order = False
        stream.tokens += 1


class StreamError(Exception):
    """What locust counts as a failure."""


def report(fire: Callable[..., None], stream: Stream, name: str) -> None:
    """Tell locust of a stream: three events, `stream`, `first token` and `longest gap`, in ms.

    `fire` is `environment.events.request.fire`. Not one event per token: firing costs as much as reading a chunk.
    """
    failed = stream.ended in BROKEN or stream.ended is Ended.REFUSED
    exception = StreamError(f"{stream.ended}: {stream.reason or stream.detail}"[:120]) if failed else None
    fire(
        request_type="stream",
        name=name,
        response_time=stream.total_s * 1000,
        response_length=stream.size,
        exception=exception,
        context={},
    )
    for kind, value in (("first token", stream.ttft_s), ("longest gap", stream.longest_gap_s or None)):
        if value is not None:
            fire(
                request_type=kind,
                name=name,
                response_time=value * 1000,
                response_length=0,
                exception=None,
                context={},
            )
