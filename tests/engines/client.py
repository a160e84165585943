"""A plain HTTP/1.1 client for the engine tests: it shows the bytes and the way they ended, and mends nothing.

On a bare socket and not by a library, since a test here asks what libraries hide: whether a body ended with its own
terminator or was cut (`http.client` gives both as an end), what came before a cut, and when.
"""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

CHAT = "/v1/chat/completions"


@dataclass(frozen=True)
class Answer:
    """One whole response. `seconds` runs from before the connect to the last byte."""

    status: int
    headers: dict[str, str]
    body: bytes
    seconds: float

    def json(self) -> dict[str, object]:
        """The body as a JSON object; anything else fails the test."""
        decoded = json.loads(self.body)
        assert isinstance(decoded, dict), decoded
        return decoded

    def error_code(self) -> object:
        """The `code` of an error body; the whole body if it is shaped otherwise, so that an assert shows it."""
        error = self.json().get("error")
        return error.get("code") if isinstance(error, dict) else self.body


class Exchange:
    """One request on a connection of its own, its response read as far as asked. Leaving the `with` block aborts it."""

    def __init__(
        self, address: str, method: str, path: str, body: bytes, headers: dict[str, str], timeout_s: float
    ) -> None:
        host, _, port = address.rpartition(":")
        self._started = time.monotonic()
        self._socket = socket.create_connection((host, int(port)), timeout_s)
        self._file = self._socket.makefile("rb")
        lines = [f"{method} {path} HTTP/1.1", f"host: {address}"]
        if body:
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.cut = False  # the connection ended before the body's own end
        self._events = self._split(self._pieces())

    def __enter__(self) -> "Exchange":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the socket at once, whatever is still on its way."""
        self._file.close()
        self._socket.close()

    def head(self) -> "Exchange":
        """Reads status and headers (names in lower case); interim responses are passed over."""
        while True:
            status_line = self._file.readline()
            assert status_line, "the connection was closed before a response"
            self.status = int(status_line.split()[1])
            self.headers = {}
            while line := self._file.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                self.headers[name.lower()] = value.strip()
            if self.status >= 200:
                return self

    def events(self) -> Iterator[bytes]:
        """Each SSE event's lines, without the blank line after it; going on where the last reader stopped.

        Ends with the body; `cut` then says how that ended.
        """
        return self._events

    def whole(self) -> Answer:
        """Head, unless that was read already, and body; a cut body fails the test."""
        if not self.status:
            self.head()
        body = b"".join(self._pieces())
        assert not self.cut, f"cut after {body!r}"
        return Answer(self.status, self.headers, body, time.monotonic() - self._started)

    def _split(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        held = b""
        for piece in pieces:
            *events, held = (held + piece).split(b"\n\n")
            yield from events
        assert self.cut or not held, f"the body ended inside an event: {held!r}"

    def _pieces(self) -> Iterator[bytes]:
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                yield from self._chunks()
            elif "content-length" in self.headers:
                length = int(self.headers["content-length"])
                body = self._file.read(length)
                self.cut = len(body) < length
                yield body
            else:
                yield self._file.read()
        except ConnectionResetError:
            self.cut = True

    def _chunks(self) -> Iterator[bytes]:
        while line := self._file.readline():
            size = int(line, 16)
            data = self._file.read(size + 2)
            if len(data) < size + 2:
                break
            if size == 0:
                return
            yield data[:-2]
        self.cut = True


def call(address: str, method: str, path: str, body: bytes = b"", *, timeout_s: float = 60, **headers: str) -> Answer:
    """One request and its whole answer; header names are written with `_` for `-`."""
    with Exchange(address, method, path, body, _dashed(headers), timeout_s) as exchange:
        return exchange.whole()


def post(address: str, path: str, body: bytes, *, timeout_s: float = 60, **headers: str) -> Exchange:
    """Sends a request and reads nothing of its answer yet."""
    return Exchange(address, "POST", path, body, _dashed(headers), timeout_s)


def chat_body(**fields: object) -> bytes:
    """Greedy, as long as it is told and never shorter: the same answer whenever it is asked."""
    request: dict[str, object] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "def main(argv):"}],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    return json.dumps(request | fields).encode()


def answers(address: str) -> bool:
    """Whether anything accepts a connection there."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 2):
        return True
    return False


def _dashed(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}
