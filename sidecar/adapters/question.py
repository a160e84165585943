"""A canary: one real request to one endpoint, in whatever its server speaks, and the answer in OpenAI's words.

It is a completion and no chat, for that is what every server can be asked, with a template or without.
"""

import msgspec

from sidecar.adapters import TRANSLATORS
from sidecar.adapters.ask import Ask, Body
from sidecar.adapters.errand import Answer, Request
from sidecar.adapters.reading import Reading
from sidecar.policy.schema import Endpoint, front_of, is_translated
from sidecar.wire.call import Api, Call


class Question:
    """A canary on its way: what to send to an endpoint, and what its answer is in OpenAI's words."""

    __slots__ = ("_reading", "request")

    def __init__(
        self,
        endpoint: Endpoint,
        model: str,
        prompt: str,
        max_tokens: int,
        id: str,
        created: int,
        *,
        salted: bool = False,
    ) -> None:
        """`model`: as the engine calls it; `salted`: no prefix cache may answer, of whatever vLLM was asked before.
        SidecarError (`BAD_REQUEST`) for a value that it cannot be told."""
        self._reading: Reading | None = None
        if not is_translated(endpoint):
            said = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
            if salted and endpoint.engine == "vllm":
                said["cache_salt"] = id
            self.request = Request(b"POST", b"/v1/completions", msgspec.json.encode(said))
            return
        translator = TRANSLATORS[endpoint.engine, front_of(endpoint)]
        call = Call(Api.COMPLETIONS, model, False, "", max_tokens, 1)
        ask = Ask(
            call,
            Body(prompt=prompt, temperature=0.0),
            engine_model=model,
            prompt=prompt,
            request_id=id,
            created=created,
        )
        outgoing = translator.outgoing(ask)
        self.request = Request(b"POST", outgoing.target, outgoing.body)
        self._reading = translator.reading(ask)

    def read(self, answer: Answer) -> Answer:
        """The answer as clients would get it."""
        reading = self._reading
        if reading is None or not answer.status:
            return answer
        reading.head(answer.status, answer.content_type)
        body = reading.feed(answer.body) + reading.end()
        return Answer(reading.status, body, reading.media_type)


def told_version(body: bytes) -> str:
    """The version of the model that answered, where its engine tells it (Triton, in each event); empty: it does not."""
    start = body.lstrip()
    if start.startswith(b"data:"):
        start = start[5:].split(b"\n", 1)[0]
    try:
        return msgspec.json.decode(start, type=_Told).model_version
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""


class _Told(msgspec.Struct, frozen=True):
    model_version: str = ""
