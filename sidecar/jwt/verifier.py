"""Whether the token of a request is good: the pipeline's `Verifier`, with the keys that it is held against.

1. A token is its provider's whose `issuer` its `iss` names, and is held against that one's rules and keys alone.
2. A good token is remembered until time makes it a bad one, a bad one for `BAD_S`; both until keys or policy change.
   So a token costs a signature once, and a bad one that is sent again and again one in `BAD_S`. Different bad ones cost
   one each, if all but their signature is right: naming no issuer's key, an expired or a foreign token costs none.
3. A token whose key is not there waits for its provider's keys to be read, `WAIT_S` at most, and `MAX_WAITING` requests
   at a time. Then it is judged by what there is. While a provider's keys cannot be read, or never were, nobody can tell
   whether such a token is good: that is answered `keys_unavailable`, and no fault of the token's.
4. A request without a token is nobody's, and refused only where one is required. So is one with an API key in the
   token's place. A token that is not good is always refused: it says something that is not true.
5. Waiters are woken from timers, never from within a call, so that one that fails harms none of the others, nor the
   reading of keys.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from msgspec.structs import replace

from sidecar.core.identify import NO_CLAIMS
from sidecar.jwt.remembered import Remembered, mark_of
from sidecar.jwt.source import Ask, Source, Unread
from sidecar.jwt.token import MAX_TOKEN_BYTES, SAID, Token, good_until, objection, read
from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Jwt, JwtProvider, Snapshot
from sidecar.proxy.ports import Unverified, Verified, Waiter
from sidecar.proxy.watchdog import Timers

WAIT_S: Final = 2.0
"""For keys: most providers answer within a tenth of it, and a client's request should rather be told than hang."""

MAX_WAITING: Final = 1000

BAD_S: Final = 10.0
"""A bad token is bad without another look."""

MAX_REMEMBERED: Final = 10_000
"""Good tokens, and as many bad ones."""

_MAX_HEADER_BYTES: Final = MAX_TOKEN_BYTES + 16
"""More is no token, and not worth a digest."""

_MAY_GET_BETTER: Final = frozenset({"early", "future"})

NO_TOKEN: Final = Verified(NO_CLAIMS)


class Say(Protocol):
    """Logs an event; never waits, never raises."""

    def __call__(self, level: str, event: str, **fields: Any) -> None: ...


class KeysView:
    """One provider's keys, for operators. `age_s`: since they were last read well, `stale_s`: since they could not be
    any more; -1.0: never, not. `why`: what the last attempt failed for."""

    __slots__ = ("age_s", "failures", "fetches", "issuer", "keys", "stale_s", "why")

    def __init__(self, source: Source, now: float) -> None:
        self.issuer = source.provider.issuer
        self.keys = 0 if source.keys is None else len(source.keys)
        self.age_s = now - source.read_at if source.read_at >= 0.0 else -1.0
        self.stale_s = now - source.stale_since if source.stale_since >= 0.0 else -1.0
        self.fetches = source.fetches
        self.failures = source.failures
        self.why = source.why


class _Issuer:
    """A provider with its keys."""

    __slots__ = ("audiences", "provider", "source")

    def __init__(self, provider: JwtProvider, source: Source) -> None:
        self.provider = provider
        self.audiences = frozenset(provider.audiences)
        self.source = source


class TokenVerifier:
    """Verifies the tokens that the policy in force says how to verify. `read` may be called on any thread, all else is
    the loop's; `run` keeps the keys.

    Counts: `verified` tokens, those that were `remembered` among them, `refused` ones by the word of what was wrong
    with them (`token.SAID`), those that nobody could tell (`unavailable`), `signatures` that were calculated.
    """

    __slots__ = (
        "_bad",
        "_chance",
        "_found",
        "_good",
        "_issuers",
        "_jwt",
        "_ready",
        "_refusals",
        "_say",
        "_timer",
        "_timers",
        "_turned",
        "_waiting",
        "_woken",
        "refused",
        "remembered",
        "signatures",
        "unavailable",
        "verified",
    )

    def __init__(self, timers: Timers, chance: Callable[[], float], say: Say) -> None:
        self._timers = timers
        self._chance = chance
        self._say = say
        self._jwt = Jwt()
        self._issuers: dict[str, _Issuer] = {}
        self._found: dict[tuple[str, str, str, str], Source] = {}
        self._good: Remembered[Verified] = Remembered(MAX_REMEMBERED)
        self._bad: Remembered[str] = Remembered(MAX_REMEMBERED)
        self._refusals = {word: Unverified(Reason.UNAUTHORIZED, said, why=word) for word, said in SAID.items()}
        self._waiting: dict[Waiter, tuple[Source, float]] = {}
        self._woken: set[Waiter] = set()
        self._ready: deque[Waiter] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._turned = asyncio.Event()
        self.verified = 0
        self.remembered = 0
        self.unavailable = 0
        self.signatures = 0
        self.refused = dict.fromkeys(SAID, 0)

    @property
    def required(self) -> bool:
        """Whether a request without a token is refused."""
        return self._jwt.required

    @property
    def waiting(self) -> int:
        """Requests that wait for keys."""
        return len(self._waiting)

    def views(self) -> list[KeysView]:
        """The keys of each provider, in the policy's order."""
        now = self._timers.time()
        return [KeysView(issuer.source, now) for issuer in self._issuers.values()]

    # What main calls.

    def read(self, snapshot: Snapshot) -> Snapshot:
        """Reads the files of keys that it names, and are not kept already; gives it back with warnings of bad ones.

        Waits for the disk, and for the library to be loaded. `use` follows, once it is applied.
        """
        providers = _providers(snapshot.identity.jwt)
        if not providers:
            return snapshot
        import sidecar.jwt.keys  # noqa: F401 - off the loop, which would stand still for it

        warnings = []
        kept = {issuer.source.place for issuer in self._issuers.values()}
        for provider in providers:
            source = Source(provider)
            if source.place in kept or not provider.jwks_file:
                continue
            try:
                source.take(source.look(), self._timers.time(), self._chance())
            except Unread as exc:
                warnings.append(f"identity.jwt: no keys of {provider.issuer}: {exc}")
            self._found[source.place] = source
        return replace(snapshot, warnings=(*snapshot.warnings, *warnings)) if warnings else snapshot

    def use(self, jwt: Jwt) -> "TokenVerifier | None":
        """Puts a policy in force; None: it has no token verified. Keys whose place stays are kept."""
        known = {issuer.source.place: issuer.source for issuer in self._issuers.values()}
        found, self._found = self._found, {}
        if jwt != self._jwt:
            self._jwt = jwt
            self._issuers = {}
            for provider in _providers(jwt):
                source = Source(provider)
                source = known.get(source.place) or found.get(source.place) or source
                source.provider = provider
                self._issuers[provider.issuer] = _Issuer(provider, source)
            self._forget_verdicts()
            self._wake(list(self._waiting))
            self._turned.set()
        return self if self._issuers else None

    async def run(self, ask: Ask) -> None:
        """Reads keys as they are needed, each provider's in its own time, until cancelled."""
        tasks: dict[Source, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                self._turned.clear()
                sources = {issuer.source for issuer in self._issuers.values()}
                for gone in tasks.keys() - sources:
                    tasks.pop(gone).cancel()
                for new in sources - tasks.keys():
                    tasks[new] = group.create_task(self._keep(new, ask))
                await self._turned.wait()

    # What the pipeline calls.

    def verify(self, authorization: bytes, now_wall: float, waiter: Waiter) -> Verified | Unverified | None:
        """As `Verifier` says."""
        waited = bool(self._woken) and waiter in self._woken
        if waited:
            self._woken.discard(waiter)
        if len(authorization) > _MAX_HEADER_BYTES:
            return self._judge(authorization, b"", now_wall, waiter, waited)
        mark = mark_of(authorization)
        good = self._good.get(mark, now_wall)
        if good is not None:
            self.verified += 1
            self.remembered += 1
            return good
        bad = self._bad.get(mark, now_wall)
        if bad is not None:
            self.refused[bad] += 1
            return self._refusals[bad]
        return self._judge(authorization, mark, now_wall, waiter, waited)

    def forget(self, waiter: Waiter) -> None:
        """As `Verifier` says."""
        self._waiting.pop(waiter, None)
        self._woken.discard(waiter)

    def _judge(
        self, authorization: bytes, mark: bytes, now_wall: float, waiter: Waiter, waited: bool
    ) -> Verified | Unverified | None:
        token = read(authorization)
        if isinstance(token, str):
            if token in ("missing", "opaque") and not self._jwt.required:
                return NO_TOKEN
            return self._refuse(token, mark, now_wall)
        issuer = self._issuers.get(token.issuer)
        if issuer is None:
            return self._refuse("issuer", mark, now_wall)
        word = objection(token, issuer.provider, issuer.audiences, now_wall)
        if word:
            return self._refuse(word, b"" if word in _MAY_GET_BETTER else mark, now_wall)
        keys = issuer.source.keys
        chosen = "key_unknown" if keys is None else keys.choose(token.kid, token.algorithm)
        if chosen == "key_unknown":
            return self._without_key(issuer.source, waiter, waited)
        if isinstance(chosen, str):
            return self._refuse(chosen, mark, now_wall)
        from sidecar.jwt.keys import has_signed  # it is loaded, since there are keys

        for key in chosen:
            self.signatures += 1
            if has_signed(key, token):
                return self._accept(token, issuer.provider, mark, len(authorization))
        return self._refuse("signature", mark, now_wall)

    def _accept(self, token: Token, provider: JwtProvider, mark: bytes, size: int) -> Verified:
        self.verified += 1
        verdict = Verified(token.claims)
        self._good.put(mark, verdict, good_until(token, provider), size)
        return verdict

    def _refuse(self, word: str, mark: bytes, now_wall: float) -> Unverified:
        """`mark` empty: it is not remembered."""
        self.refused[word] += 1
        if mark:
            self._bad.put(mark, word, now_wall + BAD_S, 0)
        return self._refusals[word]

    def _without_key(self, source: Source, waiter: Waiter, waited: bool) -> Unverified | None:
        now = self._timers.time()
        if not waited and source.ask(now):
            if len(self._waiting) + len(self._woken) >= MAX_WAITING:
                self.unavailable += 1
                return Unverified(Reason.KEYS_UNAVAILABLE, "too many requests wait for the keys of tokens", 1.0)
            self._waiting[waiter] = source, now + WAIT_S
            self._set_timer()
            return None
        if source.keys is None or source.reading or source.failed_in_a_row:
            self.unavailable += 1
            detail = "whether the token is good cannot be told: its issuer's keys cannot be read now"
            return Unverified(Reason.KEYS_UNAVAILABLE, detail, source.retry_after_s(now))
        return self._refuse("key_unknown", b"", 0.0)

    # Reading keys, and waking who waits for them.

    async def _keep(self, source: Source, ask: Ask) -> None:
        now = self._timers.time
        while True:
            await source.wait(self._timers)
            failed, had = source.failed_in_a_row, source.keys is not None
            try:
                changed = await source.read(ask, now, self._chance)
            except Exception as exc:  # noqa: BLE001 - here a task begins: what is wrong with one provider's keys is its own
                changed = source.fail(f"crashed: {exc!r}", now(), self._chance())
            if changed:
                self._forget_verdicts()
            self._tell(source, changed, failed, had)
            self._wake([waiter for waiter, (awaited, _) in self._waiting.items() if awaited is source])

    def _tell(self, source: Source, changed: bool, failed: int, had: bool) -> None:
        issuer, keys = source.provider.issuer, source.keys
        if source.failed_in_a_row and not failed:
            self._say(
                "warning", "jwt_keys_unavailable", issuer=issuer, why=source.why, keys=0 if keys is None else len(keys)
            )
        if had and keys is None:
            self._say("error", "jwt_keys_expired", issuer=issuer, why=source.why)
        if keys is not None and (changed or (failed and not source.failed_in_a_row)):
            self._say("info", "jwt_keys_read", issuer=issuer, keys=len(keys), left_out=keys.left_out)

    def _forget_verdicts(self) -> None:
        self._good.clear()
        self._bad.clear()

    def _wake(self, waiters: list[Waiter]) -> None:
        for waiter in waiters:
            del self._waiting[waiter]
            self._woken.add(waiter)
            self._ready.append(waiter)
        if waiters:
            self._timers.call_at(self._timers.time(), self._deliver)

    def _deliver(self) -> None:
        try:
            while self._ready:
                waiter = self._ready.popleft()
                if waiter in self._woken:
                    if not self._issuers:
                        self._woken.discard(waiter)  # nobody verifies any more, so it will not ask again
                    waiter.woken()
        finally:
            if self._ready:
                self._timers.call_at(self._timers.time(), self._deliver)

    def _set_timer(self) -> None:
        """For who has waited longest: all wait as long as each other."""
        if self._timer is None and self._waiting:
            _, due = next(iter(self._waiting.values()))
            self._timer = self._timers.call_at(due, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now = self._timers.time()
        self._wake([waiter for waiter, (_, due) in self._waiting.items() if due <= now])
        self._set_timer()


def _providers(jwt: Jwt) -> tuple[JwtProvider, ...]:
    return jwt.providers if jwt.verified_by == "sidecar" else ()
