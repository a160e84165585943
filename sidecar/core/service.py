"""One service: its policy as it stands, and everything learnt about its nodes, sessions and kinds of request.

1. The request path finds everything by dictionary. Which nodes serve a model is worked out once and cached; the cache
   goes when the policy, the models that an engine reports or who drains changes.
2. Memory is bounded: sessions and request breakers are LRU, model caches are emptied when full. A session gets a
   breaker of its own only when something failed, and loses it when that was lived down: most never have one.
3. What sidecars agreed on reaches a breaker here in two ways: at once, if it is known (`adopt`), and when it is made
   (`Agreement.recall`): an endpoint that joins, a session that comes to this pod, may long be open.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import inf
from typing import Final, Protocol

from msgspec.structs import replace

from sidecar.core.breaker import (
    FRESH,
    Agreed,
    Breaker,
    Denied,
    Lender,
    Permit,
    Roster,
    Scope,
    State,
    Transition,
)
from sidecar.core.budget import RetryBudget
from sidecar.core.canary import Trial
from sidecar.core.classes import Classes
from sidecar.core.detection import Detection
from sidecar.core.detector import Detector
from sidecar.core.gate.admit import Gate
from sidecar.core.gate.limit import Limiter
from sidecar.core.models import MAX_MODEL_NAME
from sidecar.core.models import matches as matches
from sidecar.core.normal import STRAINED_S
from sidecar.core.poison import Suspects
from sidecar.core.pool import Node as Node
from sidecar.core.pool import Pool as Pool
from sidecar.core.pool import Without as Without
from sidecar.core.zone import ZoneTally
from sidecar.kernel.ids import EndpointKey, ServiceName, SessionId, VersionName
from sidecar.kernel.outcome import Result
from sidecar.policy.address import endpoint_key
from sidecar.policy.schema import Adaptive, Deadlines, Engine, Front, NodeBreaker, Service, front_of

MAX_REQUEST_BREAKERS: Final = 1000  # kinds of request; a header as key may hold anything
MAX_POOLS: Final = 128  # (model, version) pairs whose pool is remembered
MAX_LIMITERS: Final = 256  # of endpoints that left and may come back
MAX_COUNTED: Final = 400  # sessions and kinds of request whose results are counted between two tellings
LEASE_SLACK_S: Final = 5.0  # a probe may take its total deadline; what comes this much later is lost


_FAILURE: Final = Result.FAILURE
_SUCCESS: Final = Result.SUCCESS


class Agreement(Lender, Protocol):
    """What all sidecars agree on, as the fleet asks for it: the transaction log."""

    def recall(self, scope: Scope, service: str, key: str, now: float) -> Agreed | None:
        """What they agreed on about one breaker; None where that is nothing, or the log is away."""


class Times:
    """A service's deadlines as plain seconds: every request reads them, and reading a policy's struct is slow."""

    __slots__ = ("connect_s", "first_token_s", "head_s", "token_gap_s", "tool_gap_s", "total_s")

    def __init__(self, deadlines: Deadlines) -> None:
        self.connect_s = float(deadlines.connect_s)
        self.head_s = float(deadlines.head_s)
        self.first_token_s = float(deadlines.first_token_s)
        self.token_gap_s = float(deadlines.token_gap_s)
        self.tool_gap_s = float(deadlines.tool_gap_s)
        self.total_s = float(deadlines.total_s)


class Session:
    """What is remembered of a session. Written by `balance.bind` and by the service, in memory only.

    `node_key` is the node it is bound to, `home_key` the one it was moved away from and may return to, `version` that
    of the node it was bound to, `share` what that node got when it was bound.
    """

    __slots__ = ("breaker", "home_key", "id", "node_key", "seen_at", "share", "version")

    def __init__(self, session: SessionId, now: float) -> None:
        self.id = session
        self.breaker: Breaker | None = None
        self.node_key: EndpointKey | None = None
        self.home_key: EndpointKey | None = None
        self.version: VersionName | None = None
        self.share = 1.0
        self.seen_at = now


class ServiceState:
    """One service: its policy as it stands, and everything learnt about its nodes, sessions and kinds of request."""

    __slots__ = (
        "_limiters",
        "_max_sessions",
        "_pools",
        "_session_breakers",
        "_session_idle_s",
        "agreement",
        "asked_at",
        "attempts",
        "body_bytes",
        "budget",
        "copies",
        "counted",
        "detection",
        "fallback",
        "foreign",
        "gate",
        "hedge",
        "hedge_shadowed",
        "local_first",
        "name",
        "nodes",
        "policy",
        "request_breakers",
        "request_key",
        "return_home",
        "roster",
        "salt_generation",
        "salts",
        "sessions",
        "split",
        "sticky",
        "suspects",
        "times",
        "trial",
        "trial_since",
        "turned",
        "zone_seen",
        "zone_shares",
    )

    def __init__(
        self, policy: Service, now: float, poison_key: bytes = b"", agreement: Agreement | None = None
    ) -> None:
        self.name = ServiceName(policy.name)
        self.policy = policy
        self.agreement = agreement
        self.asked_at = -inf
        """When a request last wanted to be served here: who has none needs no probes."""
        self.nodes: dict[EndpointKey, Node] = {}
        self.foreign: dict[tuple[Engine, Front, str], list[EndpointKey]] = {}
        """Endpoints whose requests are translated, by engine, front and chat template; mostly there are none."""
        self.roster = Roster()
        self.split: tuple[tuple[VersionName, float], ...] = ()
        """The versions that may be chosen, with their parts; empty: no split, any version serves."""
        self.sessions: OrderedDict[SessionId, Session] = OrderedDict()
        self.request_breakers: OrderedDict[str, Breaker] = OrderedDict()
        self.budget = RetryBudget(policy.retry.budget_ratio, policy.retry.budget_min, policy.retry.window_s, now)
        self.suspects = Suspects(policy.name, policy.breakers.request.poison, poison_key)
        self.detection: Detection | None = None
        """The detector; None where the policy has the fixed rules alone."""
        self.salt_generation = 0
        """Of the salts that keep tenants' caches apart: another one is a new cache for each."""
        self.hedge_shadowed = 0
        """Late requests that enforcing would have moved."""
        self.counted: list[Breaker] = []
        """Sessions and kinds of request that have results to be told; none that has none to live down."""
        self.gate: Gate | None = None
        """Who runs, who waits; None: everybody runs."""
        self.zone_shares: dict[str, float] = {}
        """The zones that are turned down, with what their endpoints get of what they would (`turn`)."""
        self.turned = False
        """Whether any endpoint's share is less than 1."""
        self.zone_seen: ZoneTally | None = None
        """First tokens by zone, to be told; None where the policy has no zone decay."""
        self.trial: Trial | None = None
        """The rollout's step that is observed; None while none is under way."""
        self.trial_since = inf
        """What is observed began then, or later."""
        self._limiters: OrderedDict[tuple[EndpointKey, VersionName], Limiter] = OrderedDict()
        """Of endpoints that left: what one takes is the same when it comes back, unlike whether it is well."""
        self._session_breakers: dict[SessionId, Breaker] = {}
        self._pools: dict[tuple[str, VersionName | None, Without], Pool] = {}
        self._read(policy)

    @property
    def lease_s(self) -> float:
        """How long a probe of this service may take."""
        return self.times.total_s + LEASE_SLACK_S

    def use(self, policy: Service, now: float) -> list[Transition]:
        """Takes a new policy and keeps what is known of every endpoint that is still in it."""
        before = self.policy
        if policy.endpoints is before.endpoints and self.nodes and policy == replace(before, split=policy.split):
            self.policy = policy
            self._divide(policy)
            return []
        lease_before_s = self.lease_s
        self.policy = policy
        self._read(policy)
        self._pools.clear()
        self._divide(policy)
        retry = policy.retry
        self.budget.use(retry.budget_ratio, retry.budget_min, retry.window_s, now)
        breakers = policy.breakers
        self.suspects.use(breakers.request.poison)
        lease_s = self.lease_s
        same = breakers == before.breakers and lease_s == lease_before_s
        moved: list[Transition | None] = []
        self._detect(breakers.node, now)
        detection = self.detection
        left = dict(self.nodes)  # who goes through those that were may wait in between
        nodes: dict[EndpointKey, Node] = {}
        fresh: dict[EndpointKey, Node] = {}
        for endpoint in policy.endpoints:
            key = endpoint_key(endpoint.url)
            node = left.pop(key, None)
            if node is None:
                breaker = Breaker(Scope.NODE, key, policy.name, breakers.node, now, lease_s=lease_s, roster=self.roster)
                node = Node(key, self.name, endpoint, breaker, self._pools)
                fresh[key] = node
            else:
                if node.endpoint != endpoint:
                    node.use(endpoint)
                if not same:
                    moved.append(node.breaker.use_rule(breakers.node, now, lease_s=lease_s))
            if detection is None:
                node.detector = None
            elif node.detector is None or node.detector.version != node.version:
                node.detector = Detector(node.breaker, node.version)
            nodes[key] = node
        for gone in left.values():
            gone.draining = True
            gone.detector = None
            gone.breaker.forget()
            if gone.limiter is not None:
                self._limiters[gone.key, gone.version] = gone.limiter
        while len(self._limiters) > MAX_LIMITERS:
            self._limiters.popitem(last=False)
        self.nodes = nodes
        self.foreign = {}
        for node in nodes.values():
            if node.translated:
                endpoint = node.endpoint
                kind = endpoint.engine, front_of(endpoint), endpoint.chat_template
                self.foreign.setdefault(kind, []).append(node.key)
        if detection is not None:
            detection.size = len(nodes)
            detection.keep([node.detector for node in nodes.values() if node.detector is not None])
        if self.turned or self.zone_shares:
            self._share()
        self.roster.resize(len(nodes), breakers.node.min_closed_ratio)
        if detection is not None:
            detection.floor = self.roster.minimum
        moved.extend(self._restore_floor(now))
        moved.extend(self._recall(node.breaker, now) for node in fresh.values())
        if not same:
            moved.extend(b.use_rule(breakers.session, now, lease_s=lease_s) for b in self._session_breakers.values())
            moved.extend(b.use_rule(breakers.request, now, lease_s=lease_s) for b in self.request_breakers.values())
            # What was off closed everything here, and the others have it open still.
            if before.breakers.node.mode == "off":
                moved.extend(self._recall(node.breaker, now) for key, node in nodes.items() if key not in fresh)
            if before.breakers.session.mode == "off":
                moved.extend(self._recall(breaker, now) for breaker in self._session_breakers.values())
            if before.breakers.request.mode == "off":
                moved.extend(self._recall(breaker, now) for breaker in self.request_breakers.values())
        self._trim_sessions(now, len(self.sessions))
        return [transition for transition in moved if transition is not None]

    def govern(self, classes: Classes, any_class: bool, now: float) -> None:
        """Takes the classes of the policy (`any_class`: it has some), after `use`: who may run, and where the limits
        are. A gate that is no more keeps whoever waits: `Gate.abandon`."""
        policy = self.policy.admission
        off = policy.mode == "off" or (policy.mode == "auto" and not any_class)
        if off and self.gate is None:
            return  # as it was, and nodes that are new have no limit
        if off:
            self.gate = None
        elif self.gate is None:
            self.gate = Gate(policy, classes, now)
        else:
            self.gate.use(policy, classes, now)
        owed_s = max([each.sla_s for each in classes.all])
        for node in self.nodes.values():
            limiter = node.limiter
            if self.gate is None or policy.limit == "fixed":
                node.limiter = None
            elif limiter is None:
                limiter = node.limiter = self._limiters.pop((node.key, node.version), None) or Limiter(policy)
                limiter.use(policy, owed_s)
            else:
                limiter.use(policy, owed_s)
            self._limit(node, now)

    def _limit(self, node: Node, now: float) -> None:
        """How much it takes at once: less while its zone is turned down, and while it comes back."""
        if self.gate is None:
            node.limit = inf
            return
        limiter = node.limiter
        limit = float(self.policy.admission.concurrency) if limiter is None else limiter.limit
        if now < node.breaker.ramp_until:
            limit *= node.breaker.share(now)
        node.limit = max(1.0, limit * node.share)

    def turn(self, zones: Mapping[str, float]) -> None:
        """Gives every endpoint the share that its zone has; a zone that is not among them has all."""
        shares = {zone: max(0.0, share) for zone, share in zones.items() if zone and share < 1.0}
        if shares != self.zone_shares:
            self.zone_shares = shares
            self._share()

    def _share(self) -> None:
        # A policy that does not ask for it is obeyed at once, whatever the table still says.
        shares = self.zone_shares if self.policy.zone_decay is not None else {}
        self.turned = False
        for node in self.nodes.values():
            node.share = shares.get(node.endpoint.zone, 1.0)
            self.turned = self.turned or node.share < 1.0

    def tick(self, now: float) -> list[Transition]:
        """Once a second: what the detector learns. Returns the breakers that it closes, or the end of an order."""
        moved: list[Transition] = []
        for breaker in list(self.roster.not_closed.values()):
            closed = breaker.expire(now)
            if closed is not None:
                moved.append(closed)
        if self.gate is not None:
            for each in self.nodes.values():
                limiter = each.limiter
                if limiter is not None and (each.in_flight or limiter.heard):
                    limiter.tick(each.waiting, each.in_flight, now)
                self._limit(each, now)
        detection = self.detection
        if detection is None:
            return moved
        for detector in detection.active:
            node = self.nodes.get(EndpointKey(detector.breaker.key))
            detector.in_flight = node.in_flight if node is not None else 0
        began = detection.tick(len(self.roster.not_closed), now)
        normal, roster = detection.normal, self.roster
        roster.panic = normal.panic
        roster.load = normal.closed_load
        roster.load_most = normal.load_most
        roster.rate = normal.rate
        roster.rate_most = normal.rate_most
        if began:
            moved.extend([breaker.close_in_panic(now) for breaker in self._opened()])
        elif normal.strained_s >= STRAINED_S and roster.minimum:
            normal.strained_s = 0.0
            moved.extend([breaker.close_for_load(now) for breaker in self._opened()[:1]])
        return moved

    def _opened(self) -> list[Breaker]:
        """Who is open on evidence, the longest first; an operator's order stands."""
        opened = [breaker for breaker in self.roster.not_closed.values() if not breaker.held_open]
        return sorted(opened, key=lambda breaker: breaker.since)

    def ready_zones(self, now: float) -> dict[str, int]:
        """How many endpoints of each zone any request may go to; zones without one too."""
        ready: dict[str, int] = {}
        for node in self.nodes.values():
            well = node.breaker.passes and not node.draining and node.overload_until <= now
            ready[node.endpoint.zone] = ready.get(node.endpoint.zone, 0) + well
        return ready

    def _divide(self, policy: Service) -> None:
        self.split = tuple((VersionName(version), part) for version, part in policy.split.items() if part > 0)

    def _detect(self, rule: NodeBreaker, now: float) -> None:
        numbers = adaptive(rule)
        # In shadow nobody is kept from who is on trial: a copy would be twice the load, perhaps on the same endpoint.
        self.copies = numbers is not None and numbers.probe == "copy" and rule.mode == "enforce"
        if numbers is None:
            self.detection = None
            self.roster.unlearn()
        elif self.detection is None:
            self.detection = Detection(numbers, now)
        else:
            self.detection.use(numbers)

    def _read(self, policy: Service) -> None:
        """What every request reads, as plain attributes: read from the policy once per policy."""
        self.times = Times(policy.deadlines)
        self.attempts = policy.retry.attempts
        self.hedge = policy.hedge.mode
        self.body_bytes = policy.limits.body_bytes
        self.salts = policy.cache_salt != "off"
        self.fallback = ServiceName(policy.fallback)
        self.request_key = policy.breakers.request.key
        self.sticky = policy.balance.affinity != "off"
        self.local_first = policy.balance.local_first
        self.return_home = policy.balance.return_home
        self._max_sessions = policy.breakers.session.max_sessions
        self._session_idle_s = float(policy.breakers.session.idle_s)
        if policy.zone_decay is None:
            self.zone_seen = None
        elif self.zone_seen is None:
            self.zone_seen = ZoneTally()

    def pool(self, model: str, version: VersionName | None, without: Without = ()) -> Pool:
        """The nodes for a model and version (None: any), cached; `without` those that cannot do what is asked."""
        asked = (model, version, without)
        pool = self._pools.get(asked)
        if pool is not None:
            return pool
        if not model:
            nodes = tuple(node for node in self.nodes.values() if not node.draining and version in (None, node.version))
            if without:
                barred = {key for foreign in without for key in self.foreign.get(foreign, ())}
                nodes = tuple(node for node in nodes if node.key not in barred)
            pool = Pool(nodes, False, self.roster)
        else:
            pool = self.pool("", version, without).serving(model)
        if len(model) <= MAX_MODEL_NAME:
            if len(self._pools) >= MAX_POOLS:
                # Names only: the pools themselves are dear to make.
                for name in [name for name in self._pools if name[0]]:
                    del self._pools[name]
            self._pools[asked] = pool
        return pool

    def ready(self, version: str) -> float:
        """Which part of a version's endpoints any request may go to now, 0-1; 0 where it has none."""
        nodes = [node for node in self.nodes.values() if node.version == version and not node.draining]
        return sum(node.breaker.passes for node in nodes) / len(nodes) if nodes else 0.0

    def _restore_floor(self, now: float) -> list[Transition]:
        """Closes those that have been open longest until the floor holds again; an operator's order stands."""
        return [breaker.close_for_floor(now) for breaker in self._opened()[: self.roster.missing]]

    def overloaded(self, node: Node, retry_after_s: float | None, now: float) -> None:
        """Leaves a node that said it is full alone: for what it asked (None: the default), capped; the later wins."""
        overload = self.policy.overload
        wait_s = overload.retry_after_default_s if retry_after_s is None else retry_after_s
        node.overload_until = max(node.overload_until, now + min(float(wait_s), float(overload.retry_after_cap_s)))

    def session(self, session: SessionId, now: float) -> Session:
        """The session's record, made if need be; forgets those that are idle or too many."""
        found = self.sessions.get(session)
        if found is None:
            found = self.sessions[session] = Session(session, now)
            self._trim_sessions(now, 2)
            if self.agreement is not None:
                agreed = self.agreement.recall(Scope.SESSION, self.name, session, now)
                if agreed is not None:
                    self._breaker_of(found, now).adopt(agreed, self.agreement, now)
            return found
        found.seen_at = now
        self.sessions.move_to_end(session)
        return found

    def admit_session(self, session: Session, now: float) -> Permit | Denied:
        """Asks the session's breaker; a session that has none is let through."""
        return FRESH if session.breaker is None else session.breaker.acquire(now)

    def record_session(
        self, session: Session, permit: Permit, result: Result, now: float, why: str = ""
    ) -> Transition | None:
        """Gives a session's permit back; makes its breaker at the first failure and drops it when lived down.

        The result of a session that was forgotten meanwhile is forgotten too.
        """
        breaker = session.breaker
        if breaker is None:
            if result is not _FAILURE or permit.generation != FRESH.generation:
                return None
            if self.policy.breakers.session.mode == "off" or self.sessions.get(session.id) is not session:
                return None
            breaker = self._breaker_of(session, now)
        self._count(breaker, result)
        transition = breaker.record(permit, result, now, why)
        if breaker.generation == 0 and breaker.unblemished:
            session.breaker = None
            if self._session_breakers.get(session.id) is breaker:
                del self._session_breakers[session.id]
        return transition

    def record_request(
        self, breaker: Breaker, permit: Permit, result: Result, now: float, why: str = ""
    ) -> Transition | None:
        """Gives a permit of a kind of request back."""
        self._count(breaker, result)
        return breaker.record(permit, result, now, why)

    def take_counted(self) -> list[tuple[Scope, str, int, int]]:
        """Successes and failures since the last call: of each kind of request, of sessions that had a failure."""
        told = [(breaker.scope, breaker.key, breaker.good, breaker.bad) for breaker in self.counted]
        for breaker in self.counted:
            breaker.good = breaker.bad = 0
        self.counted = []
        return told

    def _count(self, breaker: Breaker, result: Result) -> None:
        if result is not _SUCCESS and result is not _FAILURE:
            return
        if not breaker.good and not breaker.bad:
            if len(self.counted) >= MAX_COUNTED:
                return
            self.counted.append(breaker)
        if result is _SUCCESS:
            breaker.good += 1
        else:
            breaker.bad += 1

    def request_breaker(self, key: str, now: float) -> Breaker:
        """The breaker of a kind of request, made if need be; the least used of too many is forgotten."""
        breaker = self.request_breakers.get(key)
        if breaker is not None:
            self.request_breakers.move_to_end(key)
            return breaker
        rule = self.policy.breakers.request
        breaker = Breaker(Scope.REQUEST, key, self.name, rule, now, lease_s=self.lease_s)
        self.request_breakers[key] = breaker
        if len(self.request_breakers) > MAX_REQUEST_BREAKERS:
            self.request_breakers.popitem(last=False)
        self._recall(breaker, now)
        return breaker

    def _recall(self, breaker: Breaker, now: float) -> Transition | None:
        """Gives a new breaker what was agreed on before it was made."""
        agreement = self.agreement
        agreed = None if agreement is None else agreement.recall(breaker.scope, self.name, breaker.key, now)
        return None if agreed is None or agreement is None else breaker.adopt(agreed, agreement, now)

    def adopt(self, scope: Scope, key: str, agreed: Agreed, now: float) -> Transition | None:
        """Takes over what all sidecars agreed on about a breaker; one that is not known here will be `recall`ed."""
        agreement = self.agreement
        breaker = self.known(scope, key)
        if breaker is None and agreed.state is not State.CLOSED:
            session = self.sessions.get(SessionId(key)) if scope is Scope.SESSION else None
            breaker = None if session is None else self._breaker_of(session, now)
        return None if breaker is None or agreement is None else breaker.adopt(agreed, agreement, now)

    def knows(self, scope: Scope, key: str) -> bool:
        """Whether there is something here that a breaker of `key` could judge."""
        return self.known(scope, key) is not None or (scope is Scope.SESSION and SessionId(key) in self.sessions)

    def known(self, scope: Scope, key: str) -> Breaker | None:
        """The breaker of `key`, if it was made."""
        if scope is Scope.NODE:
            node = self.nodes.get(EndpointKey(key))
            return None if node is None else node.breaker
        if scope is Scope.REQUEST:
            return self.request_breakers.get(key)
        return self._session_breakers.get(SessionId(key))

    def suspect(self, key: str, now: float) -> None:
        """Another sidecar has evidence against an endpoint, too little for all: here it weighs half of what opens."""
        node = self.nodes.get(EndpointKey(key))
        if node is None:
            return
        node.breaker.suspect()
        if self.detection is not None and node.detector is not None:
            self.detection.suspect(node.detector)

    def breakers(self) -> Iterator[Breaker]:
        """Every node's breaker, and those of sessions and requests that ever moved; the service may change meanwhile.

        There may be 100,000: a list of the candidates is made at once, and each looked at when its turn comes.
        """
        nodes, sessions = list(self.nodes.values()), list(self._session_breakers.values())
        requests = list(self.request_breakers.values())
        for node in nodes:
            yield node.breaker
        # Not `yield from` an expression: compiled, it would be a list first.
        for some in (sessions, requests):
            for breaker in some:
                if breaker.generation:
                    yield breaker

    def find(self, scope: Scope, key: str, now: float) -> Breaker | None:
        """The breaker an operator means; None where this service has never met `key`."""
        if scope is not Scope.SESSION:
            return self.known(scope, key)
        session = self.sessions.get(SessionId(key))
        if session is None:
            return None
        return session.breaker or self._breaker_of(session, now)

    def _breaker_of(self, session: Session, now: float) -> Breaker:
        rule = self.policy.breakers.session
        breaker = Breaker(Scope.SESSION, session.id, self.name, rule, now, lease_s=self.lease_s)
        session.breaker = self._session_breakers[session.id] = breaker
        return breaker

    def _trim_sessions(self, now: float, at_most: int) -> None:
        sessions = self.sessions
        oldest_kept = now - self._session_idle_s
        for _ in range(at_most):
            oldest = next(iter(sessions.values()), None)
            if oldest is None or (len(sessions) <= self._max_sessions and oldest.seen_at >= oldest_kept):
                return
            del sessions[oldest.id]
            self._session_breakers.pop(oldest.id, None)


def adaptive(rule: NodeBreaker) -> Adaptive | None:
    """The detector's numbers; None where it is off."""
    if rule.mode == "off" or rule.adaptive is False:
        return None
    return Adaptive() if rule.adaptive is True else rule.adaptive
