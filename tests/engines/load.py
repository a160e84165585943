"""Clients that stream, many at once, and how each stream ended: whole, with an error, or with neither, which is a lie.

OpenAI's client in threads. Answers are of a fixed length that is asked for, with usage, so that a whole one is known:
a finish reason, and that many tokens. The model that counts (`toy_llm`) says which token is which, besides: an answer
that has its words has all of them, in order, and no others.
"""

import re
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Any

import openai

from tests.engines.backend import MODEL

PROMPT = "Count, delay_ms=20"  # which slows the model that counts, and says nothing to others
WAIT_S = 60.0  # longer than any deadline of a sidecar's here
AGAIN_S = 0.1

COUNTED = re.compile(r" v(\d+)-(\d+)")


class End:
    """How one stream ended. `code` is the error's, or what the client calls it; empty: it ended well."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first = 0.0
        self.last = self.began  # when something came last
        self.ended = 0.0
        self.text = ""
        self.finish_reasons: list[str] = []
        self.tokens = 0
        self.ids: set[str] = set()
        self.endpoint = ""  # who the sidecar says has answered
        self.code = ""
        self.message = ""

    @property
    def version(self) -> str:
        """The version of the counting model that said it; empty where another model spoke."""
        return found[1] if (found := COUNTED.match(self.text)) else ""

    def whole(self, tokens: int) -> bool:
        """Whether it is one answer, all of it and nothing else, and was told so."""
        said = [(version, int(number)) for version, number in COUNTED.findall(self.text)]
        in_order = not said or (
            said == [(self.version, number) for number in range(tokens)] and not COUNTED.sub("", self.text)
        )
        ended = (self.finish_reasons, self.tokens, len(self.ids), self.code) == (["length"], tokens, 1, "")
        return ended and in_order and bool(self.text)

    def told(self) -> bool:
        """Whether the client knows how it ended."""
        return bool(self.code) or len(self.finish_reasons) == 1

    def __repr__(self) -> str:
        return (
            f"End({self.code or self.finish_reasons}, {self.tokens} tokens, {self.text[-30:]!r}, "
            f"{self.ended - self.began:.1f} s, {self.message[:80]!r})"
        )


def stream(client: Any, tokens: int, prompt: str = PROMPT, model: str = MODEL) -> End:
    """One stream, read to its end, whichever that is."""
    end = End()
    try:
        with client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_tokens": tokens},
        ) as chunks:
            end.endpoint = chunks.response.headers.get("x-sidecar-endpoint", "")
            for chunk in chunks:
                end.last = time.monotonic()
                end.ids.add(chunk.id)
                if chunk.usage is not None:
                    end.tokens = chunk.usage.completion_tokens
                for choice in chunk.choices:
                    if choice.text and not end.first:
                        end.first = end.last
                    end.text += choice.text
                    if choice.finish_reason:
                        end.finish_reasons.append(choice.finish_reason)
    except openai.APIError as error:
        end.code = str(error.code or type(error).__name__)
        end.message = error.message
    except Exception as error:  # noqa: BLE001 (a cut within the body comes as the transport's own; it is an end)
        end.code = type(error).__name__
        end.message = str(error)
    end.ended = time.monotonic()
    return end


class Load:
    """So many clients, each with one stream after another, while the block lasts; its end waits for theirs."""

    def __init__(
        self,
        address: str,
        clients: int,
        tokens: int,
        prompt: str = PROMPT,
        model: str = MODEL,
        spread_s: float = 0,
    ) -> None:
        """`spread_s`: the time over which the clients begin."""
        self.tokens = tokens
        self._model = model
        self.ends: list[End] = []
        self._prompt = prompt
        self._address = address
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._client, args=(spread_s * n / clients,), daemon=True) for n in range(clients)
        ]

    def __enter__(self) -> "Load":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.finish()

    def finish(self) -> None:
        """Begins no more streams, and returns when the last has ended."""
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a client waits for ever"

    def wait(self, whole: int, within_s: float = 60) -> None:
        """Returns when so many streams have ended whole."""
        give_up = time.monotonic() + within_s
        while sum(end.whole(self.tokens) for end in list(self.ends)) < whole:
            assert time.monotonic() < give_up, self.ends[-3:]
            time.sleep(0.05)

    def codes(self) -> dict[str, int]:
        """How often each end came: "whole", an error's code, or the finish reason of what is not whole."""
        return dict(
            Counter(end.code or ("whole" if end.whole(self.tokens) else str(end.finish_reasons)) for end in self.ends)
        )

    def _client(self, wait_s: float) -> None:
        self._over.wait(wait_s)
        with openai.OpenAI(
            base_url=f"http://{self._address}/v1", api_key="none", max_retries=0, timeout=WAIT_S
        ) as client:
            while not self._over.is_set():
                end = stream(client, self.tokens, self._prompt, self._model)
                with self._lock:
                    self.ends.append(end)
                if end.code:
                    time.sleep(AGAIN_S)
