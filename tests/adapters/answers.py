"""What a client makes of a translated answer, and how the core judges it: for the tests of every translator."""

import json
from dataclasses import dataclass
from typing import Any

from sidecar.adapters.ask import Ask, Body, prompt_of
from sidecar.adapters.reading import Reading
from sidecar.core.classify import ending_of_error, ending_of_status, ending_of_stream
from sidecar.kernel.outcome import Ending
from sidecar.wire.answer import AnswerError, Usage, read_answer
from sidecar.wire.call import Api, Call
from sidecar.wire.stream import StreamReader

SSE = b"text/event-stream"
JSON = b"application/json"


def asked(
    api: Api = Api.CHAT,
    *,
    stream: bool = True,
    model: str = "m",
    engine_model: str = "",
    max_tokens: int | None = None,
    body: Body | None = None,
    prompt: str = "Hi",
    request_id: str = "req-42",
) -> Ask:
    """One request, as a dialect gets it."""
    body = body or Body()
    return Ask(
        Call(api, model, stream, "", max_tokens, 1),
        body,
        engine_model=engine_model,
        prompt=prompt_of(body) or prompt,
        request_id=request_id,
        created=1796000000,
    )


@dataclass(frozen=True)
class Answered:
    """An answer to its end. `body` is every byte of it."""

    api: Api
    status: int
    media_type: bytes
    body: bytes

    @property
    def events(self) -> list[Any]:
        """The events of a stream, each as JSON; the marker as it is."""
        assert self.media_type == SSE
        assert self.body == b"" or self.body.endswith(b"\n\n")
        lines = [line.removeprefix(b"data: ") for line in self.body.split(b"\n\n") if line]
        return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in lines]

    @property
    def text(self) -> str:
        """All that was said."""
        if self.media_type != SSE:
            choice = json.loads(self.body)["choices"][0]
            return joined(choice["message"]["content"] if self.api is Api.CHAT else choice["text"])
        choices = [each["choices"][0] for each in self.events if each != "[DONE]" and each.get("choices")]
        said = "".join(each["delta"]["content"] if self.api is Api.CHAT else each["text"] for each in choices)
        return joined(said)

    @property
    def error(self) -> AnswerError | None:
        """The error that it tells."""
        return self._stream.error if self.media_type == SSE else read_answer(self.api, self.body).error

    @property
    def finish_reason(self) -> str | None:
        """Why it ended."""
        answer = self._stream if self.media_type == SSE else read_answer(self.api, self.body)
        return answer.finish_reason

    @property
    def usage(self) -> Usage | None:
        """What it cost."""
        answer = self._stream if self.media_type == SSE else read_answer(self.api, self.body)
        return answer.usage

    @property
    def ending(self) -> Ending:
        """What the core takes it for, as it takes a vLLM's answer."""
        if self.media_type == SSE:
            return ending_of_stream(self._stream, True)
        error = read_answer(self.api, self.body, status=self.status).error
        if self.status == 200 and error is not None:
            return ending_of_error(error)
        return ending_of_status(self.status, error, False)

    @property
    def _stream(self) -> StreamReader:
        reader = StreamReader(self.api)
        reader.feed(self.body)
        assert not reader.malformed
        return reader


def answered(reading: Reading, status: int, media_type: bytes, *parts: bytes) -> Answered:
    """The answer to an engine's, whose body comes in `parts` and ends well."""
    reading.head(status, media_type)
    early = reading.status
    out = [reading.feed(part) for part in parts]
    assert early or not any(out), "bytes before there is a head for them"
    out.append(reading.end())
    assert reading.status == early if early else reading.status >= 200
    return Answered(reading.ask.api, reading.status, reading.media_type, b"".join(out))


def joined(text: str) -> str:
    """`text` with the halves of surrogate pairs, perhaps from two events, made one character where they can be."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def halves(data: bytes) -> list[tuple[bytes, bytes]]:
    """`data` split at every byte."""
    return [(data[:at], data[at:]) for at in range(len(data) + 1)]


def bytewise(data: bytes) -> list[bytes]:
    """`data` in single bytes."""
    return [data[at : at + 1] for at in range(len(data))]
