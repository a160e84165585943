r"""An engine's answer on its way to becoming an OpenAI one: the part that is the same for every engine.

```
engine's head -> head() | engine's bytes -> feed() ... | its clean end -> end()
```

`feed` and `end` give what goes to the client next, `status` what the client's head says once that is known:

1. A client's stream begins with the engine's (200 and an event stream). Anything else is known at its end only: errors
   are re-worded under a status that tells the truth, answers are made whole.
2. An engine may stream though its client does not (a Triton model hears of a hang-up only while it writes); its events
   are collected then, and an error among them still becomes a status.
3. An event stream whose engine ends it within an event, or without saying all (`on_end` of a dialect decides), stays
   unfinished for a client that streams: no finish, no `[DONE]`, so that whoever judges the stream sees it broken off.
   One that does not stream gets 502.
4. An engine that has an end marker says `over` with it: what follows in its framing carried nothing, so the client gets
   its end at once, and a connection that breaks in between takes nothing away.
5. A subclass reads one engine's words: `on_event` for an event, `on_end` for the end of an event stream, `on_whole` for
   any body that is none. They call `said`, `finished`, `counted` and `fail`.
6. Never raises on what an engine sends.
"""

import re
from typing import Final

from sidecar.adapters.ask import Ask
from sidecar.adapters.openai import DONE, Chunks, error_body, error_event
from sidecar.wire.sse import SseReader

MAX_BODY: Final = 4 << 20
"""Of a body that is held until its end; a longer one is an answer that nobody waits for whole."""

_MOST_TOKENS: Final = 1 << 53
"""More is no count, and long enough a number could not even be written."""

_SSE: Final = b"text/event-stream"
_PATH: Final = re.compile(r"(?:/[\w.@+-]+){2,}")


class Reading:
    """One attempt's answer.

    `status`: the client's, 0 while unknown. `streams`: the engine's answer is an event stream. `tokens`: events with
    text so far. `failed`: an error was told; nothing good follows. `said_all`: that, or the engine's end marker came of
    an answer that is collected: only the framing has to end.
    """

    __slots__ = (
        "_body",
        "_ended",
        "_engine_status",
        "_held",
        "_out",
        "_role_due",
        "_sse",
        "_text",
        "ask",
        "chunks",
        "completion_tokens",
        "failed",
        "finish_reason",
        "prompt_tokens",
        "said_all",
        "status",
        "streams",
        "tokens",
    )

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.chunks = Chunks(ask.api, ask.request_id, ask.created, ask.model)
        self.status = 0
        self.streams = False
        self.tokens = 0
        self.failed = False
        self.said_all = False
        self.finish_reason = ""
        self.prompt_tokens = -1  # -1: not told
        self.completion_tokens = -1
        self._ended = False
        self._engine_status = 0
        self._held = 0
        self._role_due = True
        self._sse = SseReader()
        self._body: list[bytes] = []
        self._text = bytearray()  # a list of its pieces would weigh twenty times as much
        self._out: list[bytes] = []

    # What the attempt calls.

    def head(self, status: int, content_type: bytes) -> None:
        """The engine's status and media type (lower case, without parameters)."""
        self._engine_status = status
        self.streams = status == 200 and content_type == _SSE
        if self.streams and self.ask.stream:
            self.status = 200

    def feed(self, data: bytes) -> bytes:
        """Bytes of the engine's body; what the client gets of them, perhaps nothing."""
        if not self.streams:
            self._held += len(data)
            if self._held <= MAX_BODY:
                self._body.append(data)
            return b""
        for kind, payload in self._sse.feed(data):
            if not self.said_all and not self._ended:
                self.on_event(kind, payload)
        return self._take() if self.ask.stream else b""

    def end(self) -> bytes:
        """The engine's body came to its clean end; the rest of the client's. `status` is known afterwards."""
        if self._ended:
            return b""
        if self.streams:
            if self._sse.oversized:
                self.fail(502, "an event of the engine's is too long to be read")
            elif not self.failed and not self._sse.pending:
                self.on_end()
        elif self._held > MAX_BODY:
            self.fail(502, f"the engine's answer exceeds {MAX_BODY} bytes")
        else:
            self.on_whole(self._engine_status, b"".join(self._body))
        if not self.failed and not self.finish_reason and not (self.streams and self.ask.stream):
            self.fail(502, "the engine's answer ended before it was whole")
        if not self.failed and self.finish_reason:
            self._finish()
        return self._take()

    @property
    def pending(self) -> bool:
        """Whether the engine's bytes so far end within an event."""
        return self._sse.pending

    @property
    def media_type(self) -> bytes:
        """Of the client's body, once `status` is known."""
        return _SSE if self.status == 200 and self.ask.stream else b"application/json"

    # What a dialect has.

    def on_event(self, kind: bytes, data: bytes) -> None:
        """An event of the engine's stream."""
        raise NotImplementedError

    def on_end(self) -> None:
        """The engine's stream ended by its framing; call `finished` if that is a good end."""
        raise NotImplementedError

    def on_whole(self, status: int, body: bytes) -> None:
        """The engine's whole answer that is no stream: an error by any status, or an answer under 200."""
        raise NotImplementedError

    # What a dialect says.

    def said(self, text: bytes) -> None:
        """The answer goes on: a JSON string with its quotes. An empty one says nothing."""
        if len(text) <= 2:
            return
        self.tokens += 1
        if self.ask.stream and self.streams:
            if self._role_due:
                self._role_due = False
                self._out.append(self.chunks.role())
            self._out.append(self.chunks.text(text))
        else:
            self._held += len(text)
            if self._held > MAX_BODY:
                self._text.clear()
                self.fail(502, f"the engine's answer exceeds {MAX_BODY} bytes")
            else:
                self._text += text[1:-1]

    def finished(self, reason: str) -> None:
        """The answer ended, for one of OpenAI's reasons; the first one told stays."""
        self.finish_reason = self.finish_reason or reason

    def over(self) -> None:
        """The engine's end marker came after a good end."""
        if not self.finish_reason or self.failed or self._ended:
            return
        if self.ask.stream:
            self._finish()
        else:
            self.said_all = True

    def counted(self, prompt_tokens: int, completion_tokens: int) -> None:
        """What the engine counts; -1 where it does not say."""
        if 0 <= prompt_tokens < _MOST_TOKENS:
            self.prompt_tokens = prompt_tokens
        if 0 <= completion_tokens < _MOST_TOKENS:
            self.completion_tokens = completion_tokens

    def fail(self, status: int, message: str, kind: str = "") -> None:
        """The engine failed, with what HTTP status should say (400-599)."""
        if self.failed:
            return
        self.failed = self.said_all = True
        kind = kind or ("BadRequestError" if status < 500 else "InternalServerError")
        if self.status == 200:
            self._out.append(error_event(status, message, kind))
        else:
            self.status = status
            self._out.clear()
            self._out.append(error_body(status, message, kind))

    def _finish(self) -> None:
        """The end of a good answer."""
        self._ended = True
        # Who does not count leaves it to us: a token an event, and four bytes of the prompt a token.
        prompt_tokens = self.prompt_tokens if self.prompt_tokens >= 0 else estimated_tokens(self.ask)
        completion_tokens = self.completion_tokens if self.completion_tokens >= 0 else self.tokens
        chunks, ask = self.chunks, self.ask
        text = b'"%b"' % bytes(self._text)
        if not ask.stream:
            self.status = 200
            self._out.append(chunks.whole(text, self.finish_reason, prompt_tokens, completion_tokens))
            return
        if not self.streams:
            # A front that cannot stream: its answer comes in one chunk.
            self.status = 200
            self._out.append(chunks.role())
            if len(text) > 2:
                self._out.append(chunks.text(text))
        elif self._role_due:
            self._out.append(chunks.role())
        self._out.append(chunks.finish(self.finish_reason))
        if ask.usage:
            self._out.append(chunks.usage(prompt_tokens, completion_tokens))
        self._out.append(DONE)

    def _take(self) -> bytes:
        out = self._out
        if not out:
            return b""
        data = out[0] if len(out) == 1 else b"".join(out)
        out.clear()
        return data


def without_paths(words: str) -> str:
    """An engine's words without the places of its files, which are nobody's business."""
    return _PATH.sub("...", words)


def estimated_tokens(ask: Ask) -> int:
    """A prompt's tokens where nobody counts them: a token for four characters, from 1 (English prose has 4.2)."""
    return max(1, (ask.prompt_size + 3) // 4)
