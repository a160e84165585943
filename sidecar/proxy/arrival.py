"""What comes before a request is sent: whose it is, whether it may run, what it costs and whose turn it is.

Each stage is a plain call and gives True once the request is over, False while it waits. It may wait for three things
here, its token's keys, its prompt's count and its turn (`_step`); each has an end, and a client that leaves is
forgotten wherever it waited.
"""

from typing import Final

from sidecar.core.breaker import Permit
from sidecar.core.classes import QosClass, modality_of
from sidecar.core.gate.admit import Ticket, TurnedAway
from sidecar.core.identify import Who, authorization
from sidecar.core.poison import Suspects
from sidecar.core.quotas.quota import Exceeded, allowance
from sidecar.core.service import ServiceState
from sidecar.core.split import pick_version
from sidecar.kernel.errors import Reason
from sidecar.kernel.outcome import Ending
from sidecar.proxy.admission import MOST_TOKENS, UNREAD_TOKENS, Admission
from sidecar.proxy.closing import NO_STEP, SAID, Closing
from sidecar.proxy.models import PATH as MODELS_PATH
from sidecar.proxy.models import model_list
from sidecar.proxy.ports import Unverified
from sidecar.proxy.request import Request
from sidecar.proxy.translated import Translation
from sidecar.wire.call import API_BY_PATH, Api, Call, read_call
from sidecar.wire.prompt import answers_of, prompt_of

KEYS_S: Final = 2.5
"""What a request waits at most for the keys of its token."""

COUNT_S: Final = 1.0
COUNT_PART: Final = 0.2
"""What counting its prompt exactly may take at most, and of its class's SLA."""

KEPT_BYTES: Final = 64 * 1024
"""Of a prompt, until the engine says how many tokens it had: longer ones teach nobody anything."""

LOOK_BYTES: Final = 4 << 20
"""Of a body that is looked into for its prompt: more is only estimated, from a few looks at all of it."""

SPEECH_PATH: Final = b"/v1/audio/"
"""Uploads that stream through unread, and take a turn all the same where there are turns."""

_KEYS: Final = 1
_COUNT: Final = 2
_TURN: Final = 3
"""What a request waits for before it is sent anywhere (`NO_STEP`: nothing): its token's keys, its prompt's count, its
turn."""

_EMBEDDINGS: Final = Api.EMBEDDINGS
_COMPLETIONS: Final = Api.COMPLETIONS
_OTHER: Final = Api.OTHER


class Arrival(Closing):
    """One request, from its head to where it may be sent."""

    __slots__ = ()

    def _serve(self) -> bool:
        """Have it served; as of all stages: True once it is over, False while it waits."""
        raise NotImplementedError

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
                self._why = verdict.why
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
            named = model if model or call is None else None  # the engine has a model all the same
            budgets = ledger.budgets(who.tenant, named) if ledger.any else ()
            if not budgets and (service.gate is None or not self._takes_turn()):
                if call is not None:
                    call.whole = None  # it holds the body
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
        modality = ""
        if classes.reads_modality:
            call = self._call
            modality = modality_of(request.path, model, request.body, call.whole if call is not None else None)
        return classes.classify(who.qos, request.headers, who.claims, request.path, model, who.tenant, modality)

    def _counted(self, service: ServiceState, admission: Admission, now: float) -> bool:
        """Whether it is known how long the prompt is; False while that is waited for."""
        pipeline, call = self._pipeline, self._call
        if call is None:
            admission.prompt_tokens = admission.tokens = UNREAD_TOKENS
            return True
        time_s = 0.0 if admission.hurried else min(COUNT_S, admission.qos.sla_s * COUNT_PART + self.started_at - now)
        body = self._request.body
        prompt = admission.prompt or (prompt_of(body, call.whole) if len(body) <= LOOK_BYTES else body)
        call.whole = None  # nobody looks at it any more, and it holds the body
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
        listed = call.api is _COMPLETIONS or call.api is _OTHER
        admission.answers = answers_of(body, call.n) if listed and answer else call.n
        admission.tokens = min(MOST_TOKENS, counted.tokens + answer * admission.answers)
        return True

    def _reserve(self, service: ServiceState, admission: Admission, now: float) -> bool:
        """Take what the request may use out of its tenant's budgets; False: it was refused."""
        call, ledger = self._call, self._pipeline.ledger
        limit = service.policy.request_tokens
        if limit and call is not None and call.max_tokens is not None and admission.enforced:
            allowed = allowance(limit, call.stream, admission.qos.budget_factor)
            answers = admission.answers
            if call.max_tokens * answers > allowed:
                times = f" for each of {answers} answers" if answers > 1 else ""
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
        self._step = NO_STEP
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
        if self._step is not NO_STEP and self._step is not _TURN:
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
            self._step = NO_STEP
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
            self._refuse(Reason.KEYS_UNAVAILABLE, SAID[Reason.KEYS_UNAVAILABLE])
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
        self._step = NO_STEP
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

    # Where it is to be served.

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

    def _list_models(self, service: ServiceState) -> None:
        """Answers for engines that have no list of models, or one of other names."""
        head, body = model_list(service, int(self._pipeline.now_wall()))
        self._status = head.status
        self._client.send_head(head, b"x-request-id: %b\r\n" % self._request_id, body)
        self._client.send_end([])

    def _poisoned(self, suspects: Suspects, now: float) -> bool:
        """Refuse a prompt that too many nodes died of; False if it is none of those, or may be tried."""
        mark = self._mark_of(suspects, now, anew=False)
        if not mark or not suspects.refuses(mark, now):
            return False
        if not self._attempts:
            self._trial = suspects.trial(mark, now)
            if self._trial:
                return False
        self._refuse(Reason.POISONED_REQUEST, SAID[Reason.POISONED_REQUEST])
        return True

    def _mark_of(self, suspects: Suspects, now: float, *, anew: bool) -> bytes:
        """The prompt's fingerprint; empty where its bytes are gone, or where it is no suspect's and not `anew`."""
        call, body = self._call, self._request.body or self._kept
        if self._mark or call is None or not body:
            return self._mark
        prompt = prompt_of(body, call.whole)
        self._prompt_bytes = len(prompt)
        if anew or suspects.as_long(len(prompt), now):
            self._mark = suspects.mark(call.model, prompt)
        return self._mark


def _strip(request: Request, names: frozenset[bytes]) -> None:
    """Forget headers that their sender may not send."""
    gone = [line.text for line in request.headers if line.name in names]
    if gone:
        request.headers = [line for line in request.headers if line.name not in names]
        request.lines = [text for text in request.lines if text not in gone]


def _request_key(rule: str, request: Request) -> str | None:
    """What kind of request this is; None where the rule's header is absent: of no kind that could fail."""
    if rule == "route":
        return _ROUTES[request.path]
    wanted = rule.removeprefix("header:").lower().encode()
    for line in request.headers:
        if line.name == wanted:
            return line.value[:128].decode("latin-1") or None
    return None


# Only inference has a request breaker, and its paths are known.
_ROUTES: Final = {path: f"POST {path.decode()}" for path in API_BY_PATH}
