"""What Triton's and DeepSpeed-MII's fronts say of themselves; vLLM's, which says most, is in `vllm`.

1. Triton's own readiness (`/v2/health/ready`) is 400 while any of its models loads, unloads or failed to load, and 200
   while the one that is asked for has a dead process (2.51, seen). So the repository's index is read, which tells every
   model's own state; who is dead behind a state of READY is found out by asking it for a token (`upstream.canary`).
2. An index without our model is the truth and no accident: unlike a list of vLLM's, an empty one is believed.
3. Triton counts its queue on another port, so it is read where the policy names that (`metrics_url`). It counts an
   answer at its end, and a stream that ended in an error as a success: nothing there tells that it gets anywhere.
4. MII tells only that its front lives, which goes on when the engine behind it is gone. Its list of models is how it
   was started, and no news.
"""

import msgspec

from sidecar.adapters.dialect import Load, Query, Signs
from sidecar.adapters.page import count
from sidecar.adapters.vllm import listed_models

_PENDING = b"nv_inference_pending_request_count"


class _State(msgspec.Struct, frozen=True, gc=False):
    name: str
    version: str = ""
    state: str = ""


_index = msgspec.json.Decoder(list[_State])


_NONE = Signs((), False)


def _queue(text: bytes) -> Load | None:
    """The requests that wait for any model. What is being worked on, Triton does not count."""
    waiting = count(text, _PENDING)
    return None if waiting is None else Load(0, waiting)


class Triton:
    """The dialect of Triton's own HTTP server: KServe's protocol with Triton's extensions."""

    __slots__ = ()

    alive = Query(b"/v2/health/live")
    load = Query(b"/metrics")
    load_apart = True
    models = Query(b"/v2/repository/index", b"{}")
    models_every = 1
    """A few hundred bytes, and a model that unloads answers 404 from then on."""
    nameless = False

    def read_load(self, text: bytes) -> Load | None:
        """The queue of all models; None if the page does not count it."""
        return _queue(text)

    def read_signs(self, text: bytes) -> Signs:
        """None."""
        return _NONE

    def read_models(self, body: bytes, engine_model: str = "") -> frozenset[str] | None:
        """The models of which a version is ready; `engine_model` too, as `name/versions/version` of such a one."""
        try:
            states = _index.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        ready = [state for state in states if state.state == "READY"]
        names = {state.name for state in ready}
        name, _, version = engine_model.partition("/versions/")
        if version and any(state.name == name and state.version == version for state in ready):
            names.add(engine_model)
        return frozenset(names)


class TritonOpenai:
    """The dialect of Triton's OpenAI front end, which has the metrics at its own port."""

    __slots__ = ()

    alive = Query(b"/health/ready")
    load = Query(b"/metrics")
    load_apart = False
    models = Query(b"/v1/models")
    models_every = 10
    nameless = False

    def read_load(self, text: bytes) -> Load | None:
        """The queue of all models; None if the page does not count it."""
        return _queue(text)

    def read_signs(self, text: bytes) -> Signs:
        """None."""
        return _NONE

    def read_models(self, body: bytes, engine_model: str = "") -> frozenset[str] | None:
        """The models that it lists; an empty list is None, as vLLM's."""
        return listed_models(body)


class Deepspeed:
    """The dialect of MII's fronts; `alive` is the page that the front in question has."""

    __slots__ = ("alive",)

    load = None
    load_apart = False
    models = None
    models_every = 1
    nameless = False

    def __init__(self, alive: bytes) -> None:
        self.alive = Query(alive)

    def read_load(self, text: bytes) -> Load | None:
        """Nothing: there is no such page."""
        return None

    def read_signs(self, text: bytes) -> Signs:
        """None."""
        return _NONE

    def read_models(self, body: bytes, engine_model: str = "") -> frozenset[str] | None:
        """Nothing, likewise."""
        return None
