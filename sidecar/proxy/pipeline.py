"""The way of a request, stage by stage: `Exchange._begin`, then `_serve` and `_judged` once per attempt.

Between the stages nothing waits, so nothing can interleave and nothing needs a lock. A request waits in one place, for
an attempt to end: `_serve` returns, and whoever ends the attempt calls `attempt_done`, which goes on. No task and no
coroutine: a task would cost three turns of the event loop per request, a coroutine a kilobyte per stream
(docs/adr/0008).

Bytes do not pass through here: an attempt hands them from the engine's connection to the client's.
"""

from collections.abc import Callable
from typing import Final

from sidecar.adapters.salt import salt_of, salted
from sidecar.core import evidence
from sidecar.core.admit import Ticket, TurnedAway
from sidecar.core.answer_lengths import AnswerLengths
from sidecar.core.balance import Choice, Unavailable, bind, pick
from sidecar.core.breaker import OUTSIDER, Breaker, Denied, Permit, Transition
from sidecar.core.classes import QosClass, modality_of
from sidecar.core.classify import tells_death
from sidecar.core.fleet import Fleet
from sidecar.core.identify import NOBODY, Who, authorization
from sidecar.core.poison import Suspects
from sidecar.core.quota import Exceeded, Ledger, allowance
from sidecar.core.service import ServiceState, Session
from sidecar.core.split import may_move, pick_version
from sidecar.kernel.errors import STATUS, Reason, Refusal, SidecarError
from sidecar.kernel.ids import EndpointKey, VersionName
from sidecar.kernel.outcome import DEADLY, DOCTRINE, HANGS, Ending, Result
from sidecar.policy.store import PolicyStore
from sidecar.proxy.admission import MOST_TOKENS, UNREAD_TOKENS, Admission
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.door import Doors
from sidecar.proxy.flags import flag_of
from sidecar.proxy.forwarded import engine_head
from sidecar.proxy.models import PATH as MODELS_PATH
from sidecar.proxy.models import model_list
from sidecar.proxy.ports import (
    Client,
    Connector,
    NoCounter,
    NoTemplates,
    Recorder,
    RequestRecord,
    Templates,
    TokenCounter,
    Unverified,
    Verifier,
)
from sidecar.proxy.probe import Probe, may_copy
from sidecar.proxy.request import Request
from sidecar.proxy.translated import TranslatedAttempt, Translation
from sidecar.proxy.watchdog import Timers, Watchdog
from sidecar.wire.call import API_BY_PATH, Api, Call, read_call
from sidecar.wire.headers import is_safe_id
from sidecar.wire.prompt import prompt_of
from sidecar.wire.refusal import error_event

_STILL_DEAF: Final = frozenset(
    {Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.LATE, Ending.OVERLOADED, Ending.OVERLOADED_IN_BAND}
)
"""Endings after which the same endpoint is not asked again by the same request: it would only take as long."""


_TOLD: Final = frozenset({Ending.SERVER_ERROR, Ending.ERROR_IN_BAND})
"""Endings that an engine's own words make."""

KEYS_S: Final = 2.5
"""What a request waits at most for the keys of its token."""

COUNT_S: Final = 1.0
COUNT_PART: Final = 0.2
"""What counting its prompt exactly may take at most, and of its class's SLA."""

KEPT_BYTES: Final = 64 * 1024
"""Of a prompt, until the engine says how many tokens it had: longer ones teach nobody anything."""

MOST_CHARS: Final = 6
"""Of a token, on average over an answer: an event with more has several, and a client need not ask for the usage."""

LOOK_BYTES: Final = 4 << 20
"""Of a body that is looked into for its prompt: more is only estimated, from a few looks at all of it."""

SPEECH_PATH: Final = b"/v1/audio/"
"""Uploads that stream through unread, and take a turn all the same where there are turns."""

_NO_STEP: Final = 0
_KEYS: Final = 1
_COUNT: Final = 2
_TURN: Final = 3
"""What a request waits for before it is sent anywhere: nothing, its token's keys, its prompt's count, its turn."""

_EMBEDDINGS: Final = Api.EMBEDDINGS
_OTHER: Final = Api.OTHER
_IGNORED: Final = Result.IGNORED
_OVERLOADED: Final = Result.OVERLOADED
_FAILURE: Final = Result.FAILURE
_CLIENT_LEFT: Final = Ending.CLIENT_LEFT
_COMPLETE: Final = Ending.COMPLETE
_CONNECT_FAILED: Final = Ending.CONNECT_FAILED
_UPSTREAM_RESET: Final = Reason.UPSTREAM_RESET


class Pipeline:
    """What every exchange shares. `now_wall` gives seconds since the epoch, `new_id` a fresh request id."""

    def __init__(
        self,
        store: PolicyStore,
        fleet: Fleet,
        connector: Connector,
        recorder: Recorder,
        timers: Timers,
        *,
        now_wall: Callable[[], float],
        new_id: Callable[[], bytes],
        on_crash: Callable[[BaseException], None],
        templates: Templates | None = None,
        salt_key: bytes = b"",
        ledger: Ledger | None = None,
        counter: TokenCounter | None = None,
    ) -> None:
        self.ledger = ledger or Ledger()
        self.answers = AnswerLengths()
        self.counter = counter or NoCounter()
        self.verifier: Verifier | None = None
        """Checks tokens; None where the policy leaves that to the mesh."""
        self.templates = templates or NoTemplates()
        self.salt_key = salt_key
        self.store = store
        self.fleet = fleet
        self.connector = connector
        self.recorder = recorder
        self.clock = timers.time
        self.watchdog = Watchdog(timers)
        self.doors = Doors(timers, on_crash)
        self.now_wall = now_wall
        self.new_id = new_id
        self.on_crash = on_crash
        self.draining = False
        self.live = 0
        self._idle_client_s = 60.0
        self._body_limit = 0
        self.policy_changed()

    def policy_changed(self) -> None:
        """Work out anew what connections need before a request's service is known."""
        policies = [service.policy for service in self.fleet.services.values()]
        self._idle_client_s = max((float(policy.deadlines.idle_client_s) for policy in policies), default=60.0)
        self._body_limit = max((policy.limits.body_bytes for policy in policies), default=1 << 20)
        self.doors.policy_changed(self.fleet.services)

    def idle_client_s(self) -> float:
        """How long a client may be silent, in seconds."""
        return self._idle_client_s

    def body_limit(self) -> int:
        """The largest inference body that any service takes, in bytes."""
        return self._body_limit

    def exchange(self, request: Request, client: Client) -> "Exchange":
        """One request's way through; `start` it."""
        return Exchange(self, request, client)


class Exchange:
    """One request, from its head to its record. Owned by its client connection, which ends with `exchange_done`."""

    __slots__ = (
        "_admission",
        "_attempt",
        "_attempts",
        "_barred",
        "_call",
        "_choice",
        "_client",
        "_client_gone",
        "_cut_reason",
        "_deaf",
        "_home",
        "_kept",
        "_lent",
        "_mark",
        "_node_failing",
        "_pipeline",
        "_prompt_bytes",
        "_reason",
        "_request",
        "_request_breaker",
        "_request_id",
        "_request_permit",
        "_service",
        "_serving",
        "_session",
        "_session_permit",
        "_shed",
        "_slot",
        "_status",
        "_step",
        "_total_at",
        "_translation",
        "_trial",
        "_tried",
        "_waiting",
        "_who",
        "started_at",
    )

    def __init__(self, pipeline: Pipeline, request: Request, client: Client) -> None:
        self._pipeline = pipeline
        self._request = request
        self._client = client
        self._admission: Admission | None = None
        self._attempt: Attempt | None = None
        self._attempts = 0
        self._choice: Choice | None = None
        self._session: Session | None = None
        self._home = True
        self._call: Call | None = None
        self._service: ServiceState | None = None
        self._serving: ServiceState | None = None
        self._tried: list[EndpointKey] = []
        self._deaf: list[EndpointKey] = []
        self._barred = 0
        self._request_breaker: Breaker | None = None
        self._request_permit: Permit | None = None
        self._session_permit: Permit | None = None
        self._who = NOBODY
        self._reason: Reason | None = None
        self._client_gone = False
        self._cut_reason: Reason | None = None
        self._lent: Choice | None = None
        self._node_failing = False
        self._kept = b""
        self._mark = b""
        self._prompt_bytes = 0
        self._trial: tuple[EndpointKey, ...] = ()
        self._translation: Translation | None = None
        self._shed = False
        self._slot = 0
        self._status = 0
        self._step = _NO_STEP
        self._waiting = False
        self._request_id = request.request_id if is_safe_id(request.request_id) else pipeline.new_id()
        self.started_at = pipeline.clock()
        self._total_at = self.started_at

    # The way.

    def start(self) -> None:
        """Run until the first wait, or to the end."""
        self._pipeline.live += 1
        over = True
        try:
            over = self._begin()
        except Exception as exc:  # noqa: BLE001 - here a request begins: its crash is its own
            self._failed(exc)
        if over:
            self._end()

    def attempt_done(self, attempt: Attempt) -> None:
        """The attempt ended: go on, unless it ended before there was a wait."""
        if not self._waiting:
            return
        self._waiting = False
        over = True
        try:
            over = self._judged(attempt) or self._serve()
        except Exception as exc:  # noqa: BLE001 - as above
            self._failed(exc)
        if over:
            self._end()

    def _begin(self) -> bool:
        """Parse, and find the service. As of all that follow: True once the request is over, False while it waits."""
        pipeline, request = self._pipeline, self._request
        if pipeline.draining:
            self._refuse(Reason.DRAINING, "this sidecar is shutting down", 1.0)
            return True
        # parse
        model = ""
        if request.api is not None:
            self._call = call = read_call(request.api, request.body)
            model = call.model
        self._service = service = pipeline.fleet.service_for(model)
        if service is None:
            self._refuse(Reason.UNKNOWN_MODEL, f"no service has the model {model[:128]!r}", param="model")
            return True
        self._total_at = self.started_at + service.times.total_s
        if self._call is not None and len(request.body) > service.body_bytes:
            limit = service.body_bytes
            self._refuse(Reason.TOO_LARGE, f"the body exceeds {limit} bytes (limits.body_bytes)")
            return True
        return self._identify()

    def _identify(self) -> bool:
        """Whose request it is; waits while the keys of its token are fetched."""
        pipeline, request, service, call = self._pipeline, self._request, self._service, self._call
        assert service is not None
        identifier = pipeline.fleet.identifier
        near = self._client.loopback
        if not near and identifier.loopback_headers:
            _strip(request, identifier.loopback_headers)
        for named in request.named:
            if named in identifier.names:
                said = named.decode("latin-1")
                self._refuse(
                    Reason.BAD_REQUEST, f"Connection names {said}, which says whose the request is", param=said
                )
                return True
        claims = None
        verifier = pipeline.verifier
        if verifier is not None:
            verdict = verifier.verify(authorization(request.headers), pipeline.now_wall(), self)
            if verdict is None:
                self._park(_KEYS, pipeline.clock() + KEYS_S)
                return False
            if isinstance(verdict, Unverified):
                self._refuse(verdict.reason, verdict.detail, verdict.retry_after_s)
                return True
            claims = verdict.claims
        if call is not None:
            return self._is(identifier.identify(request.headers, call.user, near, claims)) or self._admit()
        if service.foreign and request.path == MODELS_PATH and request.method == b"GET":
            self._list_models(service)
            return True
        self._turn_to(service, pipeline.clock())
        if (pipeline.ledger.any and (request.method == b"POST" or request.upgrade)) or (
            service.gate is not None and self._takes_turn()
        ):
            return self._is(identifier.identify(request.headers, "", near, claims)) or self._meter()
        return self._serve()

    def _takes_turn(self) -> bool:
        """Whether it is work for an engine: what is no inference that we know passes a gate, as health checks do."""
        request = self._request
        return self._call is not None or (request.method == b"POST" and request.path.startswith(SPEECH_PATH))

    def _is(self, who: Who) -> bool:
        """Take it for whose request it is; True where nobody could say whose."""
        self._who = who
        if who.conflict:
            self._refuse(Reason.BAD_REQUEST, f"{who.conflict} is there twice and says two things", param=who.conflict)
            return True
        return False

    def _admit(self) -> bool:
        """The prompt, the kind of request, and the session: is any of them known to fail?"""
        pipeline, request, service, who = self._pipeline, self._request, self._service, self._who
        assert service is not None
        now = pipeline.clock()
        suspects = service.suspects
        if len(request.body) <= suspects.kept_bytes:
            self._kept = request.body
        if suspects.armed and self._poisoned(suspects, now):
            return True
        fallback = self._fallback_of(service)
        admitted = True
        key = _request_key(service.request_key, request)
        if key is not None:
            self._request_breaker = breaker = service.request_breaker(key, now)
            permit = breaker.acquire(now)
            if isinstance(permit, Permit):
                self._request_permit = permit
                self._note(permit)
            elif fallback is None:
                self._deny(Reason.REQUEST_OPEN, "requests of this kind keep failing", permit)
                return True
            else:
                admitted = False
        if who.session is not None:
            self._session = session = service.session(who.session, now)
            permit = service.admit_session(session, now)
            if isinstance(permit, Permit):
                self._session_permit = permit
                self._note(permit)
            elif fallback is None:
                self._deny(Reason.SESSION_OPEN, "this session's requests keep failing", permit)
                return True
            else:
                admitted = False
        if admitted or fallback is None:
            self._turn_to(service, now)
        else:
            self._home = False
            self._turn_to(fallback, now)
        return self._meter()

    def _meter(self) -> bool:
        """Count what is asked for and take it out of the tenant's budgets, where there are any or a gate wants to know;
        waits for a count where its class has the time."""
        pipeline, service, call, who = self._pipeline, self._serving, self._call, self._who
        assert service is not None
        admission = self._admission
        if admission is None:
            ledger = pipeline.ledger
            model = call.model if call is not None else ""
            budgets = ledger.budgets(who.tenant, model) if ledger.any else ()
            if not budgets and (service.gate is None or not self._takes_turn()):
                return self._serve()
            self._admission = admission = Admission(self._class_of(model), budgets)
        now = pipeline.clock()
        if not self._counted(service, admission, now):
            return False
        if admission.budgets and not self._reserve(service, admission, now):
            return True
        return self._serve()

    def _class_of(self, model: str) -> QosClass:
        request, who, classes = self._request, self._who, self._pipeline.fleet.classes
        modality = modality_of(request.path, model, request.body) if classes.reads_modality else ""
        return classes.classify(who.qos, request.headers, who.claims, request.path, model, who.tenant, modality)

    def _counted(self, service: ServiceState, admission: Admission, now: float) -> bool:
        """Whether it is known how long the prompt is; False while that is waited for."""
        pipeline, call = self._pipeline, self._call
        if call is None:
            admission.prompt_tokens = admission.tokens = UNREAD_TOKENS
            return True
        time_s = 0.0 if admission.hurried else min(COUNT_S, admission.qos.sla_s * COUNT_PART + self.started_at - now)
        body = self._request.body
        prompt = admission.prompt or (prompt_of(body) if len(body) <= LOOK_BYTES else body)
        counted = pipeline.counter.count(service.name, call.model, prompt, time_s, self)
        if counted is None:
            admission.prompt = prompt
            self._park(_COUNT, now + max(0.0, time_s))
            return False
        admission.prompt = prompt if len(prompt) <= KEPT_BYTES else b""
        admission.prompt_tokens = counted.tokens
        admission.how = counted.how
        answer, limit = call.max_tokens, service.policy.request_tokens
        if answer is None or answer < 0:  # to llama.cpp -1 is no bound
            answer = 0 if call.api is _EMBEDDINGS else pipeline.answers.usual(service.name, call.model)
            if limit:
                answer = min(answer, allowance(limit, call.stream, admission.qos.budget_factor))
        admission.tokens = min(MOST_TOKENS, counted.tokens + answer * call.n)
        return True

    def _reserve(self, service: ServiceState, admission: Admission, now: float) -> bool:
        """Take what the request may use out of its tenant's budgets; False: it was refused."""
        call, ledger = self._call, self._pipeline.ledger
        limit = service.policy.request_tokens
        if limit and call is not None and call.max_tokens is not None and admission.enforced:
            allowed = allowance(limit, call.stream, admission.qos.budget_factor)
            if call.max_tokens * call.n > allowed:
                times = f" for each of {call.n} answers" if call.n > 1 else ""
                said = f"max_tokens {call.max_tokens}{times} is above the {allowed} that one request may ask for"
                self._refuse(Reason.QUOTA_EXCEEDED, said, None, "max_tokens", final=True)
                return False
        reservation = ledger.reserve(admission.budgets, admission.tokens, now)
        if isinstance(reservation, Exceeded):
            wait_s = reservation.retry_after_s
            self._refuse(Reason.QUOTA_EXCEEDED, reservation.detail, wait_s, final=wait_s is None)
            return False
        admission.reservation = reservation
        admission.reserved = admission.tokens
        return True

    def _enter(self, service: ServiceState, admission: Admission, model: str) -> bool | None:
        """Go in at the gate of the service that is to serve; None: it is in. All else is for `_serve`'s caller."""
        gate, door = service.gate if self._takes_turn() else None, admission.door
        if door is not None and door.service is service:
            return None
        pipeline, call, session = self._pipeline, self._call, self._session if self._home else None
        now = pipeline.clock()
        admission.leave(0, now)
        if gate is None:
            return None
        streams = call is not None and call.stream
        ticket = Ticket(self, admission.qos, self._who.tenant, model, admission.tokens, self.started_at, streams)
        if service.foreign and self._translation is not None:
            ticket.without = self._translation.without
        ticket.version = pick_version(service, session, model, self._tried, now, pipeline.fleet.chance)
        admission.ticket, admission.door = ticket, pipeline.doors.door(service, gate)
        self._step = _TURN
        admission.queued_at = now
        verdict = admission.door.enter(ticket, now)
        if verdict is False:
            self._hold_upload()
            return False
        self._step = _NO_STEP
        admission.queued_at = 0.0
        if verdict is True:
            return None
        return self._turn_away(verdict)

    def _turn_away(self, away: TurnedAway) -> bool:
        """There is no turn for it at this service."""
        service, admission, now = self._serving, self._admission, self._pipeline.clock()
        assert service is not None
        if admission is not None:
            admission.let_in(now)
            admission.leave(0, now)
        if self._fall_back(service, now):
            return self._serve()
        last = self._attempt
        if last is not None and last.ending is not None:
            self._finish(last, last.ending)
        else:
            self._shed = True
            self._refuse(away.reason, away.detail, away.retry_after_s)
        return True

    # What a waiting request hears.

    def woken(self) -> None:
        """The keys, or the count, are there."""
        if self._step is not _NO_STEP and self._step is not _TURN:
            self._go_on()

    def turn_came(self) -> None:
        """It may run."""
        if self._step is _TURN:
            admission = self._admission
            if admission is not None:
                admission.let_in(self._pipeline.clock())
            self._go_on()

    def turned_away(self, away: TurnedAway) -> None:
        """It has waited for too long; or it runs, and has to make room."""
        attempt = self._attempt
        if self._step is _TURN:
            self._step = _NO_STEP
            over = True
            try:
                over = self._turn_away(away)
            except Exception as exc:  # noqa: BLE001 - as in `start`
                self._failed(exc)
            if over:
                self._end()
        elif attempt is not None and attempt.ending is None:
            attempt.detail = away.detail
            attempt.stop(Ending.PREEMPTED)

    def look(self, now: float) -> None:
        """The keys, or the count, did not come in time."""
        self._slot = 0
        step, admission = self._step, self._admission
        if step is _COUNT and admission is not None:
            self._pipeline.counter.forget(self)
            admission.hurried = True
            self._go_on()
        elif step is _KEYS:
            self._leave_step()
            self._refuse(Reason.KEYS_UNAVAILABLE, _SAID[Reason.KEYS_UNAVAILABLE])
            self._end()

    def _park(self, step: int, until: float) -> None:
        """Wait for what `step` says, until then at the latest."""
        self._step = step
        self._slot = self._pipeline.watchdog.add(self, until)
        self._hold_upload()

    def _hold_upload(self) -> None:
        """Nobody takes what comes of a streamed body; the attempt, when there is one, wants it again."""
        if not self._request.held and not self._request.complete:
            self._client.pause_upload()

    def _leave_step(self) -> None:
        """Wait for nothing any more."""
        step, admission = self._step, self._admission
        self._rest()
        verifier = self._pipeline.verifier
        if step is _TURN and admission is not None:
            admission.let_in(self._pipeline.clock())  # its record says how long it waited in vain
        elif step is _KEYS and verifier is not None:
            verifier.forget(self)
        elif step is _COUNT:
            self._pipeline.counter.forget(self)

    def _rest(self) -> None:
        self._step = _NO_STEP
        if self._slot:
            self._pipeline.watchdog.remove(self, self._slot)
            self._slot = 0

    def _go_on(self) -> None:
        """Do what had to wait."""
        step = self._step
        self._rest()
        over = True
        try:
            if step is _KEYS:
                over = self._identify()
            elif step is _COUNT:
                over = self._meter()
            else:
                over = self._serve()
        except Exception as exc:  # noqa: BLE001 - as in `start`
            self._failed(exc)
        if over:
            self._end()

    # On.

    def _serve(self) -> bool:
        """Go in where there is a gate, pick a version and a node, and try; again while that is allowed."""
        pipeline, call = self._pipeline, self._call
        chance = pipeline.fleet.chance
        model = call.model if call is not None else ""
        while True:
            service = self._serving
            assert service is not None
            admission = self._admission
            if admission is None and service.gate is not None and call is not None:  # a fallback's
                self._admission = admission = Admission(self._class_of(model), ())
                admission.hurried = True
                self._counted(service, admission, pipeline.clock())
            if admission is not None:
                entered = self._enter(service, admission, model)
                if entered is not None:
                    return entered
            session = self._session if self._home else None
            tried = self._tried
            now = pipeline.clock()
            version: VersionName | None
            if admission is not None and admission.chosen(service, model):
                version = admission.version
            else:
                version = pick_version(service, session, model, tried, now, chance)
            may_probe, barred = call is not None, self._barred
            choice = pick(service, session, version, model, tried, now, chance, may_probe=may_probe, barred=barred)
            if isinstance(choice, Unavailable):
                if self._fall_back(service, now):
                    continue
                deaf = self._deaf
                if len(tried) > len(deaf):
                    choice = pick(
                        service, session, version, model, deaf, now, chance, may_probe=may_probe, barred=barred
                    )
                if isinstance(choice, Unavailable):
                    self._give_up(choice, now)
                    return True
            if choice.permit.probe and service.copies and call is not None and self._may_copy(call):
                choice = self._spare(service, session, version, choice, call, now)
            attempt = self._try(service, choice)
            if attempt.ending is None:
                self._waiting = True
                return False
            if self._judged(attempt):
                return True

    def _judged(self, attempt: Attempt) -> bool:
        """Judge an attempt that ended; False if the request is to be tried again."""
        ending, service, choice = attempt.ending, self._serving, self._choice
        assert ending is not None and service is not None and choice is not None
        now = self._pipeline.clock()
        self._judge(service, choice, attempt, ending, now)
        if attempt.committed or not self._resendable(ending, now):
            self._finish(attempt, ending)
            return True
        home = self._service
        if home is not None and home.suspects.armed and self._poisoned(home.suspects, now):
            return True
        if self._attempts >= service.attempts or not service.budget.take(now):
            if service.attempts > 1 and self._fall_back(service, now):
                return False
            self._finish(attempt, ending)
            return True
        key = choice.node.key
        self._tried.append(key)
        if ending in _STILL_DEAF:
            self._deaf.append(key)
        if service.foreign and self._call is not None:
            self._bar(service, self._call)  # anew: the policy may have changed meanwhile
        return False

    def _may_copy(self, call: Call) -> bool:
        """Whether a copy may be the probe. Not of a prompt that a node died of: that would be two more at once."""
        home = self._service
        return may_copy(self._request, call) and (home is None or not home.suspects.suspected(self._mark))

    def _spare(
        self,
        service: ServiceState,
        session: Session | None,
        version: VersionName | None,
        probe: Choice,
        call: Call,
        now: float,
    ) -> Choice:
        """Probe with a copy, and serve by another node; the probe itself where there is no other."""
        pipeline, request = self._pipeline, self._request
        if service.salts:
            request = self._salted(service, probe)
        other = pick(service, session, version, call.model, self._tried, now, pipeline.fleet.chance, may_probe=False)
        if isinstance(other, Unavailable) or other.permit.probe or other.permit is OUTSIDER:
            return probe
        copy = Probe(
            service,
            probe,
            request,
            call,
            pipeline.connector,
            pipeline.recorder,
            pipeline.watchdog,
            pipeline.clock,
            pipeline.now_wall,
            self._translation,
        )
        copy.start(self._request_id, self._client.peer, self._client.scheme, request)
        return other

    def _turn_to(self, service: ServiceState, now: float) -> None:
        self._serving = service
        service.asked_at = now
        self._tried = []
        self._deaf = []
        self._barred = 0
        if self._trial:
            self._tried = [key for key in service.nodes if key not in self._trial]
            self._deaf = list(self._tried)
        if service.foreign and self._call is not None:
            self._bar(service, self._call)
        service.budget.request(now)

    def _bar(self, service: ServiceState, call: Call) -> None:
        """Leave out the endpoints whose engines cannot be asked this."""
        translation = self._translation
        if translation is None:
            pipeline = self._pipeline
            translation = self._translation = Translation(
                call,
                self._request.body,
                self._request_id.decode(),
                int(pipeline.now_wall()),
                pipeline.templates,
                self._request.path,
            )
        for key in translation.barred(service):
            if key not in self._tried:
                self._tried.append(key)
                self._deaf.append(key)
                self._barred += 1

    def _fall_back(self, service: ServiceState, now: float) -> bool:
        """Turn to the fallback, once, if there is one."""
        fallback = self._fallback_of(service) if self._home else None
        if fallback is None:
            return False
        self._home = False
        self._turn_to(fallback, now)
        return True

    def _fallback_of(self, service: ServiceState) -> ServiceState | None:
        fallback = self._pipeline.fleet.services.get(service.fallback) if service.fallback else None
        return None if fallback is service else fallback

    def _try(self, service: ServiceState, choice: Choice) -> Attempt:
        """Forward; the attempt may have ended already when this returns."""
        pipeline, request, node = self._pipeline, self._request, choice.node
        node.in_flight += 1
        admission = self._admission
        if admission is not None and admission.ticket is not None:
            admission.ticket.node = node
        self._lent = choice
        self._note(choice.permit)
        self._choice = choice
        call, translation = self._call, self._translation
        if translation is not None and translation.translates(node):
            prepared = translation.prepare(node, request)
            request = prepared.request
            attempt: Attempt = TranslatedAttempt(
                self,
                prepared,
                call,
                self._client,
                node,
                pipeline.connector,
                pipeline.clock,
                pipeline.watchdog,
                service.times,
                self._total_at,
            )
        else:
            if service.salts and call is not None:
                request = self._salted(service, choice)
            attempt = Attempt(
                self,
                request,
                call,
                self._client,
                node,
                pipeline.connector,
                pipeline.clock,
                pipeline.watchdog,
                service.times,
                self._total_at,
            )
        self._attempt = attempt
        self._attempts += 1  # not before: what cannot be put into an engine's words is no attempt
        if call is not None:
            attempt.expectation = evidence.expect(
                service, node, choice.permit, call.model if call.stream else "", request.body_size, self._who.session
            )
        attempt.start(engine_head(request, self._request_id, self._client.peer, self._client.scheme, node.key))
        return attempt

    def _salted(self, service: ServiceState, choice: Choice) -> Request:
        """The request as a vLLM gets it that keeps tenants' prompts apart; as it is for another engine."""
        request = self._request
        if choice.node.endpoint.engine != "vllm":
            return request
        twin = request.copy()
        salt = salt_of(self._pipeline.salt_key, service.name, self._who.tenant, service.salt_generation)
        twin.body = salted(request.body, salt)
        return twin

    def _judge(self, service: ServiceState, choice: Choice, attempt: Attempt, ending: Ending, now: float) -> None:
        """Record one wire attempt, on the node that made it."""
        pipeline, node = self._pipeline, choice.node
        node.in_flight -= 1
        self._lent = None
        result = DOCTRINE[ending].node
        if attempt.call is None:
            # Engines that hang answer health checks and model lists; and failures that no success of the same kind
            # could ever outweigh must not add up.
            result = _IGNORED
        if result is _OVERLOADED:
            service.overloaded(node, attempt.retry_after_s(pipeline.now_wall()), now)
            if node.limiter is not None:
                node.limiter.pushed_back(now)
        self._transition(
            evidence.ended(service, node, choice.permit, attempt.expectation, ending, result, attempt.max_gap_s, now)
        )
        if service.zone_seen is not None and ending in evidence.CUT and not attempt.first_token_at and attempt.sent_at:
            call = attempt.call
            if call is not None and call.stream:
                evidence.zone_token(service, node, attempt.expectation, now - attempt.sent_at)
        trial = service.trial
        if trial is not None and attempt.call is not None and attempt.started_at >= service.trial_since:
            attempt.observe(trial, result, self._who.session, now)
        self._node_failing = node.breaker.failing
        home = self._service
        if home is not None and (home.suspects.armed or result is _FAILURE):
            self._suspect(home.suspects, attempt, ending, now)
        pipeline.recorder.attempt(attempt.record(service.name, result, now))

    def _poisoned(self, suspects: Suspects, now: float) -> bool:
        """Refuse a prompt that too many nodes died of; False if it is none of those, or may be tried."""
        mark = self._mark_of(suspects, now, anew=False)
        if not mark or not suspects.refuses(mark, now):
            return False
        if not self._attempts:
            self._trial = suspects.trial(mark, now)
            if self._trial:
                return False
        self._refuse(Reason.POISONED_REQUEST, _SAID[Reason.POISONED_REQUEST])
        return True

    def _suspect(self, suspects: Suspects, attempt: Attempt, ending: Ending, now: float) -> None:
        """What the end of an attempt says of its prompt."""
        node = attempt.node
        if attempt.call is None:
            return
        if _died(attempt, ending):
            mark = self._mark_of(suspects, now, anew=True)
            if mark:
                size, sent_at = self._prompt_bytes, attempt.sent_at
                hung = ending in HANGS
                condemned = suspects.strike(mark, size, node.key, sent_at, node.in_flight, now, hung=hung)
                if condemned is not None:
                    self._pipeline.recorder.condemned(condemned)
        elif ending is _COMPLETE:
            mark = self._mark_of(suspects, now, anew=False)
            suspects.served(mark, node.key, attempt.sent_at, now)
            if mark:
                suspects.clear(mark, now)

    def _mark_of(self, suspects: Suspects, now: float, *, anew: bool) -> bytes:
        """The prompt's fingerprint; empty where its bytes are gone, or where it is no suspect's and not `anew`."""
        call, body = self._call, self._request.body or self._kept
        if self._mark or call is None or not body:
            return self._mark
        prompt = prompt_of(body)
        self._prompt_bytes = len(prompt)
        if anew or suspects.as_long(len(prompt), now):
            self._mark = suspects.mark(call.model, prompt)
        return self._mark

    def _resendable(self, ending: Ending, now: float) -> bool:
        if not DOCTRINE[ending].resend or now >= self._total_at:
            return False
        return self._request.resendable or ending is _CONNECT_FAILED

    def _finish(self, attempt: Attempt, ending: Ending) -> None:
        """Give the client the end it is owed."""
        self._reason = reason = self._cut_reason or DOCTRINE[ending].reason
        if self._client_gone or (attempt.head is not None and attempt.head.status == 101):
            return  # nobody to tell; and a tunnel has no end but the connection's
        if attempt.committed and reason is not None:
            self._cut(attempt, reason)
        elif attempt.head is not None and reason is None:
            if not attempt.committed:
                attempt.deliver()
            self._close_reply(attempt)
        else:
            reason = reason or _UPSTREAM_RESET
            self._refuse(reason, attempt.detail or _SAID.get(reason, reason.value))

    def _close_reply(self, attempt: Attempt) -> None:
        """The engine said all it had to say, good or bad; end the reply as its framing can be ended."""
        client = self._client
        if not attempt.whole:
            if not client.can_append:
                client.cut()
                return
            client.close_after_reply()
        client.send_end(attempt.trailers)

    def _cut(self, attempt: Attempt, reason: Reason) -> None:
        """End a reply that has begun: in band where the body is an event stream, else by breaking the connection."""
        client = self._client
        if not attempt.is_stream or not client.can_append:
            client.cut()
            return
        # An event that was cut in two must not swallow ours.
        event = error_event(reason, attempt.detail or _SAID.get(reason, reason.value))
        client.close_after_reply()
        client.send_body(b"\n\n" + event if attempt.reader is not None and attempt.reader.pending else event)
        client.send_end([])

    def _list_models(self, service: ServiceState) -> None:
        """Answers for engines that have no list of models, or one of other names."""
        head, body = model_list(service, int(self._pipeline.now_wall()))
        self._status = head.status
        self._client.send_head(head, b"x-request-id: %b\r\n" % self._request_id, body)
        self._client.send_end([])

    def _give_up(self, unavailable: Unavailable, now: float) -> None:
        """Nothing can serve: the last attempt's own answer if there was one, else why."""
        last = self._attempt
        if last is not None and last.ending is not None:
            self._finish(last, last.ending)
            return
        translation, service = self._translation, self._serving
        if translation is not None and translation.why and service is not None and translation.bars_all(service):
            self._refuse(translation.reason, translation.why, param=translation.param)
            return
        wait_s = None if unavailable.retry_at is None else max(0.0, unavailable.retry_at - now)
        self._refuse(unavailable.reason, _SAID.get(unavailable.reason, unavailable.reason.value), wait_s)

    def _deny(self, reason: Reason, message: str, denied: Denied) -> None:
        self._refuse(reason, message, max(0.0, denied.retry_at - self.started_at))

    def _refuse(
        self,
        reason: Reason,
        message: str,
        wait_s: float | None = None,
        param: str | None = None,
        *,
        final: bool = False,
    ) -> None:
        if wait_s is None and not final and STATUS[reason] in (408, 429, 503):
            wait_s = 1.0
        self._reason = reason
        self._status = STATUS[reason]
        extra = _attempts_line(self._attempts) if self._attempts else b""
        admission = self._admission
        if admission is not None and admission.budgets:
            extra += self._pipeline.ledger.headers(admission.budgets, self._pipeline.clock())
        self._client.refuse(Refusal(reason, message, wait_s, param, final), self._request_id, extra)

    def _failed(self, exc: Exception) -> None:
        """Tell the client, as far as it can be told; never raises, for the end must follow."""
        try:
            if isinstance(exc, SidecarError):
                self._refuse(exc.reason, exc.detail)
            else:
                self._crashed(exc)
        except Exception as worse:  # noqa: BLE001 - as above
            self._pipeline.on_crash(worse)
            self._client.cut()

    def _crashed(self, exc: Exception) -> None:
        self._pipeline.on_crash(exc)
        attempt = self._attempt
        if attempt is not None:
            attempt.stop(Ending.ABANDONED)
        if self._status or (attempt is not None and attempt.committed):
            self._client.cut()
        else:
            self._refuse(Reason.INTERNAL, "this sidecar failed; its log says how")

    def _end(self) -> None:
        try:
            self._record()
        except Exception as exc:  # noqa: BLE001 - not even its end could be recorded
            self._pipeline.on_crash(exc)
            self._client.cut()
        admission = self._admission
        if admission is not None:
            try:
                self._leave(admission)
            except Exception as exc:  # noqa: BLE001 - as above
                self._pipeline.on_crash(exc)
        # The attempt and we know each other: without this only the garbage collector could part us.
        self._attempt = self._choice = None
        self._kept = b""
        self._pipeline.live -= 1
        self._client.exchange_done()

    def _leave(self, admission: Admission) -> None:
        """Pay for what was used, and let the next one in."""
        pipeline, call, now = self._pipeline, self._call, self._pipeline.clock()
        self._admission = None
        used = 0
        try:
            used = self._used(admission, call)
        finally:
            admission.settle(pipeline.ledger, used, now, asked=self._attempts > 0)
            admission.leave(used, now)

    def _used(self, admission: Admission, call: Call | None) -> int:
        """Tokens that the last attempt took: as the engine says, else as we counted; what gave nothing is free."""
        attempt, service = self._attempt, self._serving
        if attempt is None or attempt.ending is None or not attempt.sent_at:
            return 0
        if attempt.head is not None and attempt.head.status >= 400:
            return 0
        if call is None:
            return admission.prompt_tokens if attempt.head is not None else 0
        usage, reader = attempt.usage, attempt.reader
        told = usage.prompt_tokens if usage is not None else None
        answer = usage.completion_tokens if usage is not None else None
        if answer is not None and answer < 0:
            answer = None
        counted = attempt.bytes_out // 4 if attempt.committed and reader is None else 0
        if reader is not None:
            counted = max(reader.tokens, reader.chars // MOST_CHARS)
        if call.api is _EMBEDDINGS or (call.api is _OTHER and told):
            counted = 0  # numbers about the prompt
        if service is not None and attempt.ending is _COMPLETE:
            if told and told > 0 and admission.prompt:
                self._pipeline.counter.reported(service.name, call.model, admission.prompt, told)
            if call.api is not _EMBEDDINGS:
                self._pipeline.answers.heard(service.name, call.model, answer if answer is not None else counted)
        if attempt.ending is not _COMPLETE and attempt.ending is not _CLIENT_LEFT and not counted and not answer:
            return 0
        used = (told if told and told > 0 else admission.prompt_tokens) + (answer if answer is not None else counted)
        return max(0, min(MOST_TOKENS, used))

    def _record(self) -> None:
        """The request's own outcome, once, to whoever admitted it; then the line in the log."""
        pipeline, attempt, session = self._pipeline, self._attempt, self._session
        now = pipeline.clock()
        if self._lent is not None:
            # The request could not be put into the engine's words, or we crashed: what was lent goes back all the same.
            self._lent.node.in_flight -= 1
            self._transition(self._lent.node.breaker.record(self._lent.permit, _IGNORED, now))
        ending = attempt.ending if attempt is not None else None
        verdict = DOCTRINE[ending] if ending is not None else None
        why = ending if ending is not None else ""
        service, session_permit = self._service, self._session_permit
        request_breaker, request_permit = self._request_breaker, self._request_permit
        if request_permit is not None and request_breaker is not None and service is not None:
            # A kind of request fails where its endpoint serves others; what could not even connect, or met an endpoint
            # that fails anyway, says nothing about its kind.
            result = _IGNORED
            if (
                verdict is not None
                and verdict.node is verdict.session
                and not (verdict.node is _FAILURE and self._node_failing)
            ):
                result = verdict.node
            self._transition(service.record_request(request_breaker, request_permit, result, now, why))
        if session_permit is not None and service is not None and session is not None:
            result = _IGNORED
            if verdict is not None:
                node = attempt.node if attempt is not None else None
                result = evidence.session_result(service, node, verdict.session)
            self._transition(service.record_session(session, session_permit, result, now, why))
        pipeline.recorder.request(self._request_record(ending, now))

    def _request_record(self, ending: Ending | None, now: float) -> RequestRecord:
        request, attempt, choice = self._request, self._attempt, self._choice
        service, call = self._service, self._call
        usage = attempt.usage if attempt is not None else None
        reader = attempt.reader if attempt is not None else None
        admission = self._admission
        ticket = admission.ticket if admission is not None else None
        status = self._status
        if not status and attempt is not None and attempt.committed and attempt.head is not None:
            status = attempt.head.status
        reason = self._reason
        return RequestRecord(
            request_id=self._request_id.decode(),
            trace_id=request.traceparent[3:35].decode("ascii", "replace"),
            client=self._client.peer,
            method=request.method.decode("ascii", "replace"),
            path=request.path.decode("ascii", "replace"),
            service=service.name if service is not None else "",
            model=call.model if call is not None else "",
            version=choice.node.version if choice is not None else "",
            endpoint=choice.node.key if choice is not None else "",
            session=self._who.session or "",
            status=status or 499,
            reason=reason,
            flag="DC" if self._client_gone and ending is None else flag_of(reason, ending, self._attempts, self._shed),
            result=_request_result(ending, reason, status),
            stream=reader is not None,
            attempts=self._attempts,
            bytes_in=request.body_size,
            bytes_out=attempt.bytes_out if attempt is not None else 0,
            duration_s=now - self.started_at,
            ttft_s=attempt.first_token_at - self.started_at if attempt is not None and attempt.first_token_at else None,
            tokens=reader.tokens if reader is not None else 0,
            max_gap_s=attempt.max_gap_s if attempt is not None and attempt.max_gap_s else None,
            prompt_tokens=usage.prompt_tokens if usage is not None else None,
            completion_tokens=usage.completion_tokens if usage is not None else None,
            finish_reason=attempt.finish_reason if attempt is not None else None,
            tenant=self._who.tenant,
            qos=admission.qos.name if admission is not None else "",
            queued_s=admission.queued_s if admission is not None else None,
            counted=admission.how if admission is not None else "",
            reserved_tokens=admission.reserved if admission is not None else 0,
            shadowed=ticket.shadowed if ticket is not None else "",
        )

    def _note(self, permit: Permit) -> None:
        if permit.moved is not None:
            self._transition(permit.moved)

    def _transition(self, transition: Transition | None) -> None:
        if transition is not None:
            trace = self._request.traceparent[3:35].decode("ascii", "replace")
            self._pipeline.recorder.transition(transition, trace)

    # What the attempt asks.

    def attempt_accepted(self, attempt: Attempt) -> None:
        """The engine took the request: now, and not before, the session is bound to it."""
        head, choice, session = attempt.head, self._choice, self._session
        good = attempt.ending in (None, _COMPLETE) and head is not None and head.status < 400
        if self._home and session is not None and choice is not None and good:
            bind(session, choice, self._pipeline.clock())
        admission = self._admission
        if admission is not None and admission.ticket is not None and admission.door is not None:
            admission.door.gate.spoke(admission.ticket, self._pipeline.clock())
        self._translation = None  # it is not sent again, so what it asked need not be kept
        expectation, service = attempt.expectation, self._serving
        if service is not None and service.salts:
            self._request.body = b""  # the attempt had, and let go of, one of its own
        limiter = attempt.node.limiter
        if limiter is not None and attempt.first_token_at:
            limiter.sample(
                attempt.first_token_at - attempt.sent_at,
                self._request.body_size,
                attempt.node.in_flight,
                attempt.first_token_at,
            )
        if expectation is not None and service is not None and attempt.first_token_at:
            first_at = attempt.first_token_at
            self._transition(
                evidence.first_token(service, attempt.node, expectation, first_at - attempt.sent_at, first_at)
            )
        if service is not None and service.zone_seen is not None and attempt.first_token_at:
            evidence.zone_token(service, attempt.node, expectation, attempt.first_token_at - attempt.sent_at)

    def attempt_late(self, attempt: Attempt) -> None:
        """No token came in the time that was expected: that counts now, not when its deadline ends it."""
        try:
            self._late(attempt)
        except Exception as exc:  # noqa: BLE001 - called by the clock alone: the request goes on, and its deadlines count
            self._pipeline.on_crash(exc)

    def _late(self, attempt: Attempt) -> None:
        expectation, service = attempt.expectation, self._serving
        if expectation is not None and service is not None:
            silent = attempt.first_token_at > 0.0
            now = self._pipeline.clock()
            attempt.node.late += 1
            self._transition(evidence.late(service, attempt.node, expectation, silent, now))
            if service.hedge != "off" and self._may_move(service, attempt, now):
                if service.hedge == "enforce":
                    attempt.stop(Ending.LATE)
                else:
                    service.hedge_shadowed += 1

    def _may_move(self, service: ServiceState, attempt: Attempt, now: float) -> bool:
        """Whether a late request may be tried elsewhere: nothing was committed, somebody else is well, and it is not
        all of them that are late."""
        call, detection = self._call, service.detection
        if attempt.committed or call is None or not self._waiting or self._attempts >= service.attempts:
            return False
        if detection is None or detection.normal.excuses or not self._request.resendable or not service.budget.has(now):
            return False
        return may_move(service, call.model, [*self._tried, attempt.node.key], now)

    def reply_lines(self, attempt: Attempt) -> bytes:
        """Our header lines on an engine's answer."""
        choice = self._choice
        assert choice is not None
        lines = b"x-request-id: %b\r\n%b%b" % (
            self._request_id,
            choice.node.reply_lines,
            _attempts_line(self._attempts),
        )
        if choice.affinity in ("moved", "returned"):
            lines += b"x-sidecar-session: %b\r\n" % choice.affinity.encode()
        admission = self._admission
        if admission is not None and admission.budgets:
            lines += self._pipeline.ledger.headers(admission.budgets, self._pipeline.clock())
        return lines

    # What the client's connection tells.

    def upload(self) -> None:
        """More of the body came, or its end."""
        if self._attempt is not None:
            self._attempt.push_upload()

    def tunnel(self, data: bytes) -> None:
        """Bytes for the tunnel."""
        if self._attempt is not None:
            self._attempt.push_tunnel(data)

    def client_left(self) -> None:
        """The client is gone, before its reply ended."""
        if self._step is not _NO_STEP:
            self._client_gone = True
            self._leave_step()
            self._end()
        elif self._attempt is not None:
            self._client_gone = True
            self._attempt.leave()

    def client_slow(self) -> None:
        """The client did not read for too long."""
        if self._attempt is not None:
            self._attempt.stop(Ending.CLIENT_SLOW)

    def client_paused(self) -> None:
        """The client does not read as fast as it is written to."""
        if self._attempt is not None:
            self._attempt.pause()

    def client_resumed(self) -> None:
        """The client reads again."""
        if self._attempt is not None:
            self._attempt.resume()

    def cut(self, reason: Reason, message: str = "") -> None:
        """End what is under way, for a reason on our side or the client's."""
        attempt = self._attempt
        if self._step is not _NO_STEP:
            self._leave_step()
            self._refuse(reason, message or _SAID.get(reason, reason.value))
            self._end()
            return
        if attempt is None or attempt.ending is not None:
            return
        self._cut_reason = reason
        attempt.detail = message
        attempt.stop(_CUT.get(reason, Ending.CLIENT_MALFORMED))


def _strip(request: Request, names: frozenset[bytes]) -> None:
    """Forget headers that their sender may not send."""
    gone = [line.text for line in request.headers if line.name in names]
    if gone:
        request.headers = [line for line in request.headers if line.name not in names]
        request.lines = [text for text in request.lines if text not in gone]


def _died(attempt: Attempt, ending: Ending) -> bool:
    """Whether the node crashed or hung on the attempt."""
    if ending in DEADLY:
        return True
    if ending is _CONNECT_FAILED:
        # It died at once, which looked like a stale connection, and nobody listens there any more.
        return attempt.restarted
    return ending in _TOLD and tells_death(attempt.detail)


def _attempts_line(attempts: int) -> bytes:
    return _FIRST_ATTEMPT if attempts == 1 else b"x-sidecar-attempts: %d\r\n" % attempts


_FIRST_ATTEMPT: Final = b"x-sidecar-attempts: 1\r\n"


def _request_key(rule: str, request: Request) -> str | None:
    """What kind of request this is; None where the rule's header is absent: of no kind that could fail."""
    if rule == "route":
        return _ROUTES[request.path]
    wanted = rule.removeprefix("header:").lower().encode()
    for line in request.headers:
        if line.name == wanted:
            return line.value[:128].decode("latin-1") or None
    return None


def _request_result(ending: Ending | None, reason: Reason | None, status: int) -> Result:
    if ending is None:
        return _IGNORED if reason is None or status < 500 else _FAILURE
    return DOCTRINE[ending].node


# Only inference has a request breaker, and its paths are known.
_ROUTES: Final = {path: f"POST {path.decode()}" for path in API_BY_PATH}

_CUT: Final = {Reason.DRAINING: Ending.ABANDONED, Reason.CLIENT_TIMEOUT: Ending.CLIENT_SLOW}

_SAID: Final = {
    Reason.POISONED_REQUEST: "engines crashed or hung on this prompt; it is not sent to one more",
    Reason.BREAKER_OPEN: "every endpoint that could serve this has an open breaker",
    Reason.OVERLOADED: "every endpoint that could serve this is at its limit",
    Reason.NO_ENDPOINT: "no endpoint can serve this",
    Reason.UNKNOWN_MODEL: "no endpoint has this model",
    Reason.HEAD_TIMEOUT: "the engine did not answer in time",
    Reason.TTFT_TIMEOUT: "the engine produced no token in time",
    Reason.TOKEN_GAP_TIMEOUT: "the engine stopped producing tokens",
    Reason.TOTAL_TIMEOUT: "the request took longer than is allowed in all",
    Reason.UPSTREAM_TRUNCATED: "the engine's answer broke off",
    Reason.DRAINING: "this sidecar is shutting down",
    Reason.KEYS_UNAVAILABLE: "the keys that tokens are checked with are not to be had at the moment",
}
