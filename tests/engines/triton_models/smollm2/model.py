"""SmolLM2-135M-Instruct in Triton's Python backend: greedy, token by token, on one core.

The prompt is taken as it comes, as the vLLM backend takes it: a chat template is its sender's to apply. Known
parameters are `max_tokens`, `stop` (a string or a list), `ignore_eos` and `min_tokens`; the rest, temperature too, is
passed over. `model_dir` in `settings.json` names the folder with the weights; the launcher writes it.

1. Greedy, so that it says the same words each time; in bfloat16, which reads a prompt twice as fast as float32 here
   and says tokens as fast.
2. One step of one request at a time, in turns, so that no stream waits for another's end.
3. Text is held back while it may still become something else: bytes of an unfinished character, or the beginning of a
   stop string, which is never said.
"""

from collections.abc import Iterator

import torch  # type: ignore[import-not-found]
from generation import Ask, Generation, Piece  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer  # type: ignore[import-not-found]

UNFINISHED = "\ufffd"  # what the tokenizer decodes half a character to


class TritonPythonModel(Generation):  # type: ignore[misc]
    """The name that the Python backend asks for."""

    def load(self) -> None:
        """Reads the weights; a version without `model_dir` fails here."""
        torch.set_num_threads(1)
        folder = self.settings["model_dir"]
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def pieces(self, ask: Ask) -> Iterator[Piece]:
        """One piece a token, some without text. A prompt longer than the context is refused, as vLLM refuses it."""
        ids = self._tokenizer(ask.text, return_tensors="pt").input_ids
        ask.input_tokens = ids.shape[1]
        room = self._model.config.max_position_embeddings
        if ask.input_tokens + ask.max_tokens > room:
            raise ValueError(
                f"{ask.input_tokens} input and {ask.max_tokens} output tokens exceed the context of {room}"
            )
        spoken = Spoken(self._tokenizer, ask.parameters.get("stop") or [])
        at_least = ask.max_tokens if ask.parameters.get("ignore_eos") else int(ask.parameters.get("min_tokens", 0))
        cache = None
        for n in range(ask.max_tokens):
            ids, cache = self._step(ids, cache, may_end=n >= at_least)
            if ids.item() == self._tokenizer.eos_token_id:
                yield Piece(spoken.rest(), 1, "stop")
                return
            text = spoken.add(ids.item())
            if spoken.stopped:
                yield Piece(text, 1, "stop")
                return
            if n + 1 < ask.max_tokens:
                yield Piece(text)
            else:
                yield Piece(text + spoken.rest(), 1, "length")

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def _step(self, ids: torch.Tensor, cache: object, *, may_end: bool) -> tuple[torch.Tensor, object]:
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        scores = out.logits[:, -1]
        if not may_end:
            scores[:, self._tokenizer.eos_token_id] = -torch.inf
        return scores.argmax(-1, keepdim=True), out.past_key_values


class Spoken:
    """Token ids to text, in the order they come. `stopped` once a stop string was met."""

    def __init__(self, tokenizer: AutoTokenizer, stop: str | list[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = [stop] if isinstance(stop, str) else stop
        self._keep = max((len(each) for each in self._stop), default=1) - 1
        self._ids: list[int] = []
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """What may be said now that this token has come."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        if text.endswith(UNFINISHED):
            return ""
        self._ids.clear()
        self._held += text
        met = [place for each in self._stop if (place := self._held.find(each)) >= 0]
        if met:
            self.stopped = True
            said, self._held = self._held[: min(met)], ""
            return said
        split = len(self._held) - self._keep
        if split <= 0:
            return ""
        said, self._held = self._held[:split], self._held[split:]
        return said

    def rest(self) -> str:
        """What was held back, at the end of the answer."""
        return self._held + (self._tokenizer.decode(self._ids) if self._ids else "")
