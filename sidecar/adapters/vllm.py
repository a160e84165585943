"""vLLM: its Prometheus page and its OpenAI list of models.

The page has 60 KB, nearly all of it histograms, and is read every second: two names are searched for, and no line
else is looked at. These two gauges are called the same in every version from 0.5 to 0.33, while most others were
renamed once (`gpu_cache_usage_perc`, `time_per_output_token_seconds`); versions differ in their labels and in
`num_requests_waiting_by_reason` (since 0.22), which counts the same requests once more and is left out.

`/load` would be shorter, but says 0 for ever unless the server was started with `--enable-server-load-tracking`.
"""

from math import isfinite

import msgspec

from sidecar.adapters.dialect import Load

_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"

_NEWLINE = ord("\n")
_AFTER_NAME = frozenset(b"{ \t")


class _Model(msgspec.Struct, frozen=True, gc=False):
    id: str


class _Models(msgspec.Struct, frozen=True, gc=False):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class Vllm:
    """The dialect of vLLM's OpenAI server."""

    __slots__ = ()

    load_path = b"/metrics"
    models_path = b"/v1/models"

    def read_load(self, text: bytes) -> Load | None:
        """Both gauges, each summed over engines (data parallel ranks) and model names; None if one is missing."""
        running = _sum(text, _RUNNING)
        waiting = _sum(text, _WAITING)
        return None if running is None or waiting is None else Load(running, waiting)

    def read_models(self, body: bytes) -> frozenset[str] | None:
        """Served names and loaded LoRA adapters, which the list has side by side.

        An empty list is None, too: an engine that has no name for its model may serve any, and believing it would
        take a whole fleet out of rotation.
        """
        try:
            models = _models.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return frozenset(model.id for model in models.data if model.id) or None


def _sum(text: bytes, name: bytes) -> int | None:
    """A gauge summed over all its label sets; None if there is no sample, or one that counts nothing."""
    total = 0.0
    found = False
    at = text.find(name)
    while at >= 0:
        after = at + len(name)
        if (at == 0 or text[at - 1] == _NEWLINE) and after < len(text) and text[after] in _AFTER_NAME:
            end = text.find(b"\n", after)
            if end < 0:
                end = len(text)
            # Labels may hold spaces and braces; a line feed in one is escaped, and after the last brace there is none.
            sample = text[max(after, text.rfind(b"}", after, end) + 1) : end].split(None, 1)
            try:
                total += float(sample[0])
            except (IndexError, ValueError):
                return None
            found = True
            after = end
        at = text.find(name, after)
    return int(total) if found and isfinite(total) and total >= 0 else None
