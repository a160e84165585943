"""vLLM: its Prometheus page and its OpenAI list of models.

The page has 60 KB and is read every second: a few names are looked for (`page`). The two gauges of requests are called
the same in every version from 0.5 to 0.33, and so is the counter of tokens; the use of the cache was renamed
(`gpu_cache_usage_perc` until 0.11, `kv_cache_usage_perc` since 0.9), `engine_sleep_state` came with 0.11. Versions
differ in their labels and in `num_requests_waiting_by_reason` (since 0.22), which counts the same requests once more
and is left out.

1. Tokens alone would not tell an engine that hangs from one that reads a long prompt: that is counted when it is whole.
   With every step of it the engine takes more of its cache, so the use of the cache is a sign of life as well. One of
   embeddings gives no token and may have no cache: it is known by the prompts that it has read.
2. `/load` would be shorter, but says 0 for ever unless the server was started with `--enable-server-load-tracking`;
   `/is_sleeping` and `/is_paused` are there in development mode only.
3. `/health` answers 200 for a core that hangs, sleeps or is paused, and so do all other pages (0.32, seen).
"""

import msgspec

from sidecar.adapters.dialect import Load, Query, Signs
from sidecar.adapters.page import count, total

_RUNNING = b"vllm:num_requests_running"
_WAITING = b"vllm:num_requests_waiting"
_GENERATED = b"vllm:generation_tokens_total"
_PROMPTS = b"vllm:prompt_tokens_total"
_CACHE = b"vllm:kv_cache_usage_perc"
_CACHE_ONCE = b"vllm:gpu_cache_usage_perc"
_SLEEP = b"vllm:engine_sleep_state"
_AWAKE = b'sleep_state="awake"'


class _Model(msgspec.Struct, frozen=True, gc=False):
    id: str


class _Models(msgspec.Struct, frozen=True, gc=False):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models)


class Vllm:
    """The dialect of vLLM's OpenAI server."""

    __slots__ = ()

    alive = Query(b"/health")
    load = Query(b"/metrics")
    load_apart = False
    models = Query(b"/v1/models")
    models_every = 10
    """They change when somebody loads one, not with every request."""
    nameless = True

    def read_load(self, text: bytes) -> Load | None:
        """Both gauges, each summed over engines (data parallel ranks) and model names; None if one is missing."""
        running = count(text, _RUNNING)
        waiting = count(text, _WAITING)
        return None if running is None or waiting is None else Load(running, waiting)

    def read_signs(self, text: bytes) -> Signs:
        """The tokens generated, those read, and the use of the cache, summed likewise; asleep where all engines are.

        Without a count of tokens there is no mark.
        """
        asleep = total(text, _SLEEP, _AWAKE) == 0.0
        generated = total(text, _GENERATED)
        if generated is None:
            return Signs((), asleep)
        cache = total(text, _CACHE)
        if cache is None:
            cache = total(text, _CACHE_ONCE)
        return Signs((generated, total(text, _PROMPTS) or 0.0, cache or 0.0), asleep)

    def read_models(self, body: bytes, engine_model: str = "") -> frozenset[str] | None:
        """Served names and loaded LoRA adapters, which the list has side by side.

        An empty list is None, too: an engine that has no name for its model may serve any, and believing it would
        take a whole fleet out of rotation.
        """
        return listed_models(body)


def listed_models(body: bytes) -> frozenset[str] | None:
    """The ids of OpenAI's list of models; None where it has none, or is no such list."""
    try:
        models = _models.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return frozenset(model.id for model in models.data if model.id) or None
