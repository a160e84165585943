"""The way of a request, stage by stage: `Arrival._begin`, then `_serve` and `_judged` once per attempt.

Between the stages nothing waits, so nothing can interleave and nothing needs a lock. Once it has arrived, a request
waits in one place, for an attempt to end: `_serve` returns, and whoever ends the attempt calls `attempt_done`, which
goes on. No task and no coroutine: a task would cost three turns of the event loop per request, a coroutine a kilobyte
per stream (docs/adr/0008).

Bytes do not pass through here: an attempt hands them from the engine's connection to the client's.
"""

from typing import Final

from sidecar.adapters.salt import salt_of, salted
from sidecar.core import evidence
from sidecar.core.balance import Choice, Unavailable, bind, pick
from sidecar.core.breaker import OUTSIDER
from sidecar.core.classify import tells_death
from sidecar.core.poison import Suspects
from sidecar.core.service import ServiceState, Session
from sidecar.core.split import may_move, pick_version
from sidecar.kernel.errors import Reason
from sidecar.kernel.ids import VersionName
from sidecar.kernel.outcome import DEADLY, DOCTRINE, HANGS, Ending, Result
from sidecar.proxy.admission import Admission
from sidecar.proxy.arrival import Arrival
from sidecar.proxy.attempt import Attempt
from sidecar.proxy.closing import NO_STEP, SAID, attempts_line
from sidecar.proxy.forwarded import engine_head
from sidecar.proxy.probe import Probe, may_copy
from sidecar.proxy.request import Request
from sidecar.proxy.translated import TranslatedAttempt
from sidecar.wire.call import Call

_STILL_DEAF: Final = frozenset(
    {Ending.HEAD_TIMEOUT, Ending.TTFT_TIMEOUT, Ending.LATE, Ending.OVERLOADED, Ending.OVERLOADED_IN_BAND}
)
"""Endings after which the same endpoint is not asked again by the same request: it would only take as long."""

_TOLD: Final = frozenset({Ending.SERVER_ERROR, Ending.ERROR_IN_BAND})
"""Endings that an engine's own words make."""

_IGNORED: Final = Result.IGNORED
_OVERLOADED: Final = Result.OVERLOADED
_FAILURE: Final = Result.FAILURE
_COMPLETE: Final = Ending.COMPLETE
_CONNECT_FAILED: Final = Ending.CONNECT_FAILED


class Exchange(Arrival):
    """One request, from its head to its record."""

    __slots__ = ()

    # The way.

    def attempt_done(self, attempt: Attempt) -> None:
        """The attempt ended: go on, unless it ended before there was a wait."""
        if not self._waiting:
            return
        self._waiting = False
        over = True
        try:
            over = self._judged(attempt) or self._serve()
        except Exception as exc:  # noqa: BLE001 - as in `Arrival.start`
            self._failed(exc)
        if over:
            self._end()

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
        last = self._attempt
        if last is not None and last.sent_at:
            self._asked = True
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

    def _resendable(self, ending: Ending, now: float) -> bool:
        if not DOCTRINE[ending].resend or now >= self._total_at:
            return False
        return self._request.resendable or ending is _CONNECT_FAILED

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
        self._refuse(unavailable.reason, SAID.get(unavailable.reason, unavailable.reason.value), wait_s)

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
            attempts_line(self._attempts),
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
        if self._step is not NO_STEP:
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
        if self._step is not NO_STEP:
            self._leave_step()
            self._refuse(reason, message or SAID.get(reason, reason.value))
            self._end()
            return
        if attempt is None or attempt.ending is not None:
            return
        self._cut_reason = reason
        attempt.detail = message
        attempt.stop(_CUT.get(reason, Ending.CLIENT_MALFORMED))


def _died(attempt: Attempt, ending: Ending) -> bool:
    """Whether the node crashed or hung on the attempt."""
    if ending in DEADLY:
        return True
    if ending is _CONNECT_FAILED:
        # It died at once, which looked like a stale connection, and nobody listens there any more.
        return attempt.restarted
    return ending in _TOLD and tells_death(attempt.detail)


_CUT: Final = {Reason.DRAINING: Ending.ABANDONED, Reason.CLIENT_TIMEOUT: Ending.CLIENT_SLOW}
