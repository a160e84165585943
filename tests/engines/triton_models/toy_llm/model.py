"""A model that counts: `v1-0 v1-1 v1-2 ...`, so that an answer names the version that gave it.

For everything but the words themselves: it loads at once, says as many tokens as it is told, as slowly as it is told,
and fails when it is told. The prompt counts a token a word.

What it is told stands in the request's parameters, or as `name=value` in the prompt, which passes through any front:

* `delay_ms`: before each token; a version's `settings.json` may say what holds where the request says nothing.
* `fail_after`: so many tokens, then an error instead of the next.
* `stop_after`: so many tokens, then an end with the reason "stop"; `max_tokens` ends with "length".

`says` in `settings.json` gives the version other words, said again and again; none, an answer that is empty.
"""

import re
from collections.abc import Iterator

from generation import Ask, Generation, Piece  # type: ignore[import-not-found]

KNOBS = re.compile(r"\b(delay_ms|fail_after|stop_after)=(\d+)")


class TritonPythonModel(Generation):  # type: ignore[misc]
    """The name that the Python backend asks for."""

    def pieces(self, ask: Ask) -> Iterator[Piece]:
        """One piece a token; no text at all is one piece too."""
        ask.input_tokens = len(ask.text.split())
        knobs = ask.parameters | {name: int(value) for name, value in KNOBS.findall(ask.text)}
        delay_s = float(knobs.get("delay_ms", self.settings.get("delay_ms", 0))) / 1000
        fail_after = int(knobs.get("fail_after", ask.max_tokens))
        count = min(ask.max_tokens, int(knobs.get("stop_after", ask.max_tokens)))
        reason = "length" if count == ask.max_tokens else "stop"
        words = self.settings["says"].split() if "says" in self.settings else None
        if words == []:
            yield Piece("", 0, "stop")
            return
        for n in range(count):
            if n == fail_after:
                raise RuntimeError(f"told to fail after {n} tokens")
            word = f"v{self.version}-{n}" if words is None else words[n % len(words)]
            yield Piece(f" {word}", 1, reason if n + 1 == count else None, delay_s)
