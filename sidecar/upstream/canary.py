"""A request of our own for one token: what an engine says of itself is held against an answer.

Fronts go on saying that all is well while the engine behind them hangs, sleeps or is gone; Triton says that a model is
ready whose process is dead; MII says nothing at all. One token, asked for in the engine's own words and judged as any
client's answer is, tells. It is nobody's traffic: no session, no kind of request, no rollout and no detector hears of
it, and it is counted apart.
"""

from collections.abc import Callable
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from sidecar.adapters import TRANSLATORS
from sidecar.core.breaker import Transition
from sidecar.core.models import matches
from sidecar.core.pool import Node
from sidecar.core.service import ServiceState, Times
from sidecar.kernel.errors import SidecarError
from sidecar.kernel.outcome import DOCTRINE, Ending, Result
from sidecar.policy.schema import Seconds, front_of
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.forwarded import engine_head
from sidecar.proxy.ports import Connector, NoTemplates
from sidecar.proxy.probe import Nobody
from sidecar.proxy.request import Request
from sidecar.proxy.translated import TranslatedAttempt, Translation
from sidecar.proxy.watchdog import Watchdog
from sidecar.wire.call import Api, read_call

PATH: Final = b"/v1/completions"
PROMPT: Final = "1"
"""A token in every vocabulary. Text completion, not chat: it needs no template, which not every model has."""

_GLOB: Final = frozenset("*?[")
_TEMPLATES: Final = NoTemplates()


class HealthRecorder(Protocol):
    """Telemetry of health checks. Never waits, never raises."""

    def transition(self, transition: Transition, trace: str = "") -> None: ...

    def canary(self, node: Node, ending: Ending, result: Result) -> None:
        """One ended so, which comes to this for its node."""

    def canary_refused(self, node: Node, said: str) -> None:
        """The engine does not take such requests of ours, and says why: it cannot be found out by asking it."""


class Canary:
    """One on its way; owns its attempt. `told(result, attempt)` comes once, at its end, unless it is stopped.

    `request_id` must be like no other at that engine: vLLM refuses a second request of one id while the first runs.
    """

    __slots__ = ("_attempt", "_clock", "_id", "_node", "_told", "model", "sent_at")

    def __init__(
        self,
        node: Node,
        model: str,
        request_id: bytes,
        clock: Callable[[], float],
        told: Callable[[Result, Attempt], None],
    ) -> None:
        self._id = request_id
        self._node = node
        self._clock = clock
        self._told: Callable[[Result, Attempt], None] | None = told
        self._attempt: Attempt | None = None
        self.model = model
        self.sent_at = 0.0

    def start(self, service: ServiceState, connector: Connector, watchdog: Watchdog, within_s: float) -> bool:
        """Send it; False where it cannot be put into the engine's words. It may have ended when this returns."""
        node, now = self._node, self._clock()
        request = request_for(self.model)
        call = read_call(Api.COMPLETIONS, request.body)
        within = Seconds(within_s)
        times = Times(replace(service.policy.deadlines, head_s=within, first_token_s=within))
        until = now + times.connect_s + within_s
        if node.translated:
            endpoint = node.endpoint
            translation = Translation(call, request.body, self._id.decode(), 0, _TEMPLATES)
            if (endpoint.engine, front_of(endpoint)) not in TRANSLATORS or not translation.translates(node):
                return False
            try:
                prepared = translation.prepare(node, request)
            except SidecarError:
                return False
            request = prepared.request
            attempt: Attempt = TranslatedAttempt(
                self, prepared, call, Nobody(), node, connector, self._clock, watchdog, times, until
            )
        else:
            attempt = Attempt(self, request, call, Nobody(), node, connector, self._clock, watchdog, times, until)
        self._attempt = attempt
        self.sent_at = now
        node.in_flight += 1
        attempt.start(engine_head(request, self._id, "", b"http", node.key))
        return True

    def stop(self) -> None:
        """Give it up; nothing is told any more."""
        self._told = None
        if self._attempt is not None:
            self._attempt.stop(Ending.ABANDONED)

    # What the attempt calls.

    def reply_lines(self, attempt: Attempt) -> bytes:
        """Nobody gets a reply."""
        return b""

    def attempt_accepted(self, attempt: Attempt) -> None:
        """Its answer is being committed, to nobody."""

    def attempt_late(self, attempt: Attempt) -> None:
        """Nothing is expected of it: its deadline alone counts."""

    def attempt_done(self, attempt: Attempt) -> None:
        """Judge it."""
        self._node.in_flight -= 1
        self._attempt = None
        ending = attempt.ending
        assert ending is not None
        result = DOCTRINE[ending].node
        if ending is Ending.TOTAL_TIMEOUT:
            # One token was asked for. An engine that gives more than that, for longer, gave it.
            result = Result.SUCCESS if attempt.spoke else Result.FAILURE
        if self._told is not None:
            self._told(result, attempt)


def request_for(model: str) -> Request:
    """A request for one token of `model`; of none in particular where that is empty."""
    asked: dict[str, object] = {"model": model} if model else {}
    asked.update(prompt=PROMPT, max_tokens=1, stream=False)
    request = Request()
    request.method, request.target, request.path = b"POST", PATH, PATH
    request.lines = [b"content-type: application/json\r\n", b"user-agent: llm-sidecar\r\n"]
    request.api = Api.COMPLETIONS
    request.held = request.complete = True
    request.body = msgspec.json.encode(asked)
    request.body_size = request.content_length = len(request.body)
    return request


def models_to_ask(service: ServiceState, node: Node, *, nameless: bool) -> tuple[str, ...]:
    """The models that a canary may ask for at `node`; `("",)`: none need be named; empty: there is none to ask for.

    The engine's own name; else those that the policy names in full; else, if one has to be named, those that the engine
    lists. What the engine says that it does not serve now is not asked for.
    """
    endpoint, reported = node.endpoint, node.models
    if not endpoint.models or (reported is not None and not reported):
        return ()
    if endpoint.engine_model:
        return (endpoint.engine_model,)
    named = tuple(
        dict.fromkeys(
            name
            for name in (*endpoint.models, *service.policy.models)
            if not _GLOB.intersection(name) and (reported is None or name in reported) and _has(service, node, name)
        )
    )
    if named or nameless:
        return named or ("",)
    return tuple(sorted(name for name in reported or () if _has(service, node, name)))


def is_named(service: ServiceState, node: Node, model: str) -> bool:
    """Whether the policy says that `node` answers for `model` (empty: the engine's own), and not the engine alone."""
    endpoint = node.endpoint
    return not model or bool(endpoint.engine_model) or model in endpoint.models or model in service.policy.models


def _has(service: ServiceState, node: Node, name: str) -> bool:
    models = service.policy.models  # empty: it is reached as a fallback, by any name
    return matches(node.endpoint.models, name) and (not models or matches(models, name))
