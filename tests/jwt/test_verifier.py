"""Tokens verified: attacks refused, keys rotated, providers that are down, and requests that wait for keys."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar.jwt.source import ASK_AGAIN_S, MAX_SET_BYTES
from sidecar.jwt.token import SAID
from sidecar.jwt.verifier import BAD_S, MAX_REMEMBERED, MAX_WAITING, NO_TOKEN, WAIT_S, TokenVerifier
from sidecar.kernel.errors import Reason
from sidecar.policy.schema import Identity, Jwt, JwtProvider, LongSeconds, Service, Snapshot
from sidecar.proxy.ports import Unverified, Verified
from tests.clock import Clock
from tests.harness import eventually
from tests.jwt.issuing import (
    AUDIENCE,
    ISSUER,
    NOW,
    Private,
    bearer,
    claims,
    decoded,
    ec,
    encoded,
    jwks,
    okp,
    policy,
    provider,
    rsa,
    signed,
    token,
    with_secret,
)
from tests.jwt.publishing import Publisher

OTHER = "https://other.test"


class Asker:
    """A request that may have to wait."""

    def __init__(self, then: Callable[[], None] | None = None) -> None:
        self.woken_times = 0
        self._then = then

    def woken(self) -> None:
        self.woken_times += 1
        if self._then is not None:
            self._then()


class World:
    """A verifier on a clock of its own, with a provider."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.said: list[tuple[str, str, dict[str, Any]]] = []
        self.verifier = TokenVerifier(self.clock, lambda: 0.0, self._say)
        self.publisher = Publisher(jwks(rsa(), ec(), okp()))

    def _say(self, level: str, event: str, **fields: Any) -> None:
        self.said.append((level, event, fields))

    @property
    def events(self) -> list[str]:
        return [event for _, event, _ in self.said]

    def ask(self, value: bytes, now: float = NOW, asker: Asker | None = None) -> Verified | Unverified | None:
        return self.verifier.verify(value, now, asker or Asker())

    def word(self, value: bytes, now: float = NOW) -> str:
        """What a token is refused for, "" if it is good; by what was counted."""
        before = dict(self.verifier.refused)
        verdict = self.ask(value, now)
        found = [word for word, count in self.verifier.refused.items() if count != before[word]]
        if isinstance(verdict, Verified):
            assert found == []
            return ""
        assert isinstance(verdict, Unverified) and verdict.reason is Reason.UNAUTHORIZED
        assert found == [verdict.why] and verdict.detail == SAID[verdict.why] and verdict.retry_after_s is None
        return found[0]

    @contextlib.asynccontextmanager
    async def running(self, jwt: Jwt, *, ready: bool = True) -> AsyncIterator["World"]:
        assert self.verifier.use(jwt) is self.verifier
        task = asyncio.ensure_future(self.verifier.run(self.publisher))
        try:
            if ready:
                await eventually(lambda: all(view.keys for view in self.verifier.views()), "keys")
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def settled(self) -> None:
        """Whatever is being read is read, and whoever waits is told."""
        await eventually(lambda: not any(i.source.reading for i in self.verifier._issuers.values()), "reading")
        for _ in range(5):
            await asyncio.sleep(0)
        self.clock.advance(0.0)

    async def passes(self, seconds: float) -> None:
        self.clock.advance(seconds)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await self.settled()


PROVIDERS = (
    provider(algorithms=("RS256", "ES256", "EdDSA")),
    provider(issuer=OTHER, jwks_url="https://other.test/keys", algorithms=("RS256",)),
)


class TwoPublishers(Publisher):
    """Two providers: the other one has a key of its own, and one of the same name."""

    def __call__(self, key: Any, endpoint: Any, request: Any, timeout_s: float) -> Any:
        if "other" in endpoint.url:
            return Publisher(jwks(rsa("other")))(key, endpoint, request, timeout_s)
        return super().__call__(key, endpoint, request, timeout_s)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    made.publisher = TwoPublishers(jwks(rsa(), ec(), okp()))
    async with made.running(policy(*PROVIDERS)):
        yield made


GOOD = [
    ("RS256", rsa(), "RS256"),
    ("ES256", ec(), "ES256"),
    ("EdDSA", okp(), "EdDSA"),
]


@pytest.mark.parametrize(("key", "algorithm"), [case[1:] for case in GOOD], ids=[case[0] for case in GOOD])
async def test_a_good_token_s_claims_are_given(world: World, key: Private, algorithm: str) -> None:
    value = bearer(token(key, algorithm, tenant="größe ✓"))
    for _ in range(2):
        verdict = world.ask(value)
        assert isinstance(verdict, Verified)
        assert verdict.claims == claims(tenant="größe ✓")
    assert (world.verifier.verified, world.verifier.remembered, world.verifier.signatures) == (2, 1, 1)


def pem(key: Private) -> bytes:
    return key.as_pem(private=False)


def der(key: Private) -> bytes:
    return key.as_der(private=False)


def unsigned(algorithm: str) -> bytes:
    return signed(b'{"alg":"%b","kid":"rsa"}' % algorithm.encode(), json.dumps(claims()).encode(), rsa())


def stripped(value: bytes) -> bytes:
    return value.rpartition(b".")[0] + b"."


def resigned(value: bytes, signature: bytes) -> bytes:
    return value.rpartition(b".")[0] + b"." + encoded(signature)


def payload_changed(value: bytes, **changed: object) -> bytes:
    head, _, last = value.split(b".")
    return b".".join((head, encoded(json.dumps(claims(**changed)).encode()), last))


def head_of(**members: object) -> bytes:
    return encoded(json.dumps({"alg": "RS256", "kid": "rsa", **members}).encode())


ATTACKER = rsa("attacker")
PUBLIC = ATTACKER.as_dict(private=False)
ATTACKS: list[tuple[str, bytes, str]] = [
    *[
        (f"alg {word}, {how}", cut(unsigned(word)), "algorithm")
        for word in ("none", "None", "NONE", "nOnE", "nonE", "")
        for how, cut in (("signed", bytes), ("unsigned", stripped))
    ],
    ("HS256 with the PEM of the public key", with_secret(pem(rsa())), "algorithm"),
    ("HS256 with its DER", with_secret(der(rsa())), "algorithm"),
    ("HS256 with its JWK", with_secret(jwks(rsa())), "algorithm"),
    ("HS256 called RS256", with_secret(pem(rsa()), alg="RS256"), "signature"),
    ("an attacker's key under a known name", token(ATTACKER, header={"kid": "rsa"}), "signature"),
    ("an attacker's key embedded", token(ATTACKER, header={"kid": "rsa", "jwk": PUBLIC}), "signature"),
    ("an attacker's key at a URL", token(ATTACKER, header={"kid": "rsa", "jku": "https://evil.test/k"}), "signature"),
    ("a certificate at a URL", token(ATTACKER, header={"kid": "rsa", "x5u": "https://evil.test/c"}), "signature"),
    ("a certificate in the header", token(ATTACKER, header={"kid": "rsa", "x5c": ["MIIB"]}), "signature"),
    ("an issuer nobody trusts", token(iss="https://evil.test"), "issuer"),
    ("an issuer that is nearly one", token(iss=ISSUER + "/"), "issuer"),
    ("no issuer", token(iss=None), "issuer"),
    ("another provider's token with this one's name", token(iss=OTHER), "key_unknown"),
    ("another provider's key", token(rsa("other"), header={"kid": "rsa"}), "signature"),
    ("another provider's key under its own name", token(rsa("other")), "key_unknown"),
    ("an algorithm that only the other provider lacks", token(ec(), "ES256", iss=OTHER), "algorithm"),
    ("another audience", token(aud="other"), "audience"),
    ("no audience", token(aud=None), "audience"),
    ("expired", token(exp=NOW - 31), "expired"),
    ("no expiry", token(exp=None), "times"),
    ("not yet valid", token(nbf=NOW + 31), "early"),
    ("of the future", token(iat=NOW + 31), "future"),
    ("huge", token(pad="x" * 16_384), "too_large"),
    ("nested", token(header={"cty": "JWT"}), "nested"),
    ("encrypted", encoded(b'{"alg":"RSA-OAEP","enc":"A256GCM","kid":"rsa"}') + b".a.b.c.d", "encrypted"),
    ("truncated", token()[:-1], "malformed"),
    ("truncated by a signature", token().rpartition(b".")[0], "malformed"),
    ("without a signature", stripped(token()), "signature"),
    ("an extra dot", token() + b".", "malformed"),
    ("critical", token(header={"crit": ["exp"]}), "critical"),
    ("unencoded payload", token(header={"b64": False, "crit": ["b64"]}), "critical"),
    ("a tenant twice", signed(b'{"alg":"RS256","kid":"rsa"}', b'{"iss":"x","a":1,"a":2}', rsa()), "malformed"),
    ("ES256 by a key of RSA", token(header={"alg": "ES256"}), "key_unfit"),
    ("RS256 by a key of a curve", token(ec(), "ES256", header={"alg": "RS256"}), "key_unfit"),
    ("PS256 where RS256 is allowed", token(rsa(), "PS256"), "algorithm"),
    ("ES384 under ES256's name", token(ec("b", "P-384"), "ES384", header={"alg": "ES256", "kid": "ec"}), "signature"),
    ("a signature of zeros", resigned(token(ec(), "ES256"), bytes(64)), "signature"),
    ("a signature in DER", resigned(token(ec(), "ES256"), b"0E\x02\x20" + bytes(67)), "signature"),
    ("no name of a key, of several", token(header={"kid": None}, algorithm="RS256"), ""),
    ("a path for a key's name", token(header={"kid": "../../dev/null"}), "key_unknown"),
    ("SQL for a key's name", token(header={"kid": "' OR 1=1 --"}), "key_unknown"),
    ("a payload changed", payload_changed(token(), tenant="b"), "signature"),
    ("a signature of another token", resigned(token(), decoded(token(sub="x").split(b".")[2])), "signature"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "word"), [case[1:] for case in ATTACKS], ids=[case[0] for case in ATTACKS])
async def test_attacks(world: World, value: bytes, word: str) -> None:
    for issuer in world.verifier._issuers.values():
        issuer.source.asked_at = world.clock.now  # keys were just read: nobody waits for a name that was made up
    asked = len(world.publisher.asked)
    assert world.word(bearer(value)) == word
    assert world.word(bearer(value)) == word
    assert len(world.publisher.asked) == asked, "the token had something fetched"
    world.verifier.use(policy(*PROVIDERS, required=False))
    assert world.word(bearer(value)) == word, "where none is required, a bad one is refused all the same"


async def test_one_key_that_fits_needs_no_name_and_several_do() -> None:
    made = World()
    made.publisher.publish(jwks(rsa(), ec(), ec("ec2")))
    async with made.running(policy(provider(algorithms=("RS256", "ES256")))):
        assert made.word(bearer(token(header={"kid": None}))) == ""
        assert made.word(bearer(token(ec(), "ES256", header={"kid": None}))) == "key_unnamed"


@pytest.mark.parametrize(
    ("value", "word"),
    [(b"", "missing"), (b"Basic eDp5", "missing"), (bearer(b""), "missing"), (bearer(b"sk-123"), "opaque")],
)
async def test_without_a_token_a_request_is_nobody_s(world: World, value: bytes, word: str) -> None:
    required = [world.verifier.required]
    assert world.word(value) == word
    assert world.verifier.use(policy(*PROVIDERS, required=False)) is world.verifier
    assert [*required, world.verifier.required] == [True, False]
    assert world.ask(value) is NO_TOKEN and not NO_TOKEN.claims
    assert world.verifier.verified == 0


@pytest.mark.parametrize("required", [True, False])
async def test_two_headers_are_refused_either_way(world: World, required: bool) -> None:
    world.verifier.use(policy(*PROVIDERS, required=required))
    assert world.word(bearer(token()) + b", " + bearer(token())) == "ambiguous"
    assert world.word(b"Bearer sk-1, " + bearer(token())) == "ambiguous"
    assert world.word(bearer(token()) + b", Basic eDp5") == "ambiguous"


async def test_no_message_tells_of_token_or_keys(world: World) -> None:
    for _, value, word in ATTACKS:
        verdict = world.ask(bearer(value)) if word != "key_unknown" else None
        if isinstance(verdict, Unverified):
            for secret in (*value.split(b"."), AUDIENCE.encode(), ISSUER.encode(), b"acme"):
                assert len(secret) < 2 or secret not in verdict.detail.encode()


# --- what is remembered -----------------------------------------------------------------------------------------------


async def test_a_token_is_remembered_until_it_expires_and_no_longer(world: World) -> None:
    value = bearer(token(exp=NOW + 60))
    assert world.word(value) == "" and world.word(value, NOW + 89) == ""
    assert world.verifier.signatures == 1
    assert world.word(value, NOW + 90) == "expired"
    assert world.word(value, NOW + 90.1) == "expired"


async def test_a_bad_token_costs_a_signature_once_in_a_while(world: World) -> None:
    value = bearer(token(ATTACKER, header={"kid": "rsa"}))
    for _ in range(100):
        assert world.word(value) == "signature"
    assert world.verifier.signatures == 1
    assert world.word(value, NOW + BAD_S - 0.1) == "signature" and world.verifier.signatures == 1
    assert world.word(value, NOW + BAD_S) == "signature" and world.verifier.signatures == 2


async def test_expired_and_foreign_tokens_cost_none(world: World) -> None:
    for number in range(50):
        assert world.word(bearer(token(exp=NOW - 100 - number))) == "expired"
        assert world.word(bearer(token(aud=f"a{number}"))) == "audience"
        assert world.word(bearer(token(iss=f"i{number}"))) == "issuer"
    assert world.verifier.signatures == 0


async def test_a_token_that_was_early_is_good_in_time(world: World) -> None:
    value = bearer(token(nbf=NOW + 31))
    assert world.word(value) == "early"
    assert world.word(value, NOW + 1) == ""


async def test_a_flood_of_tokens_is_remembered_within_bounds(world: World) -> None:
    head = head_of(alg="XX256")
    for number in range(2 * MAX_REMEMBERED + 100):
        value = bearer(b".".join((head, encoded(b'{"iss":"%b","n":%d}' % (ISSUER.encode(), number)), b"")))
        assert isinstance(world.ask(value), Unverified)
        assert len(world.verifier._bad) <= MAX_REMEMBERED


async def test_a_policy_that_changes_makes_all_forgotten(world: World) -> None:
    value = bearer(token())
    assert world.word(value) == ""
    world.verifier.use(policy(*PROVIDERS))
    assert world.word(value) == "" and world.verifier.signatures == 1
    world.verifier.use(policy(provider(audiences=("another",)), PROVIDERS[1]))
    assert world.word(value) == "audience"
    world.verifier.use(policy(provider(algorithms=("ES256",))))
    assert world.word(value) == "algorithm"
    world.verifier.use(policy(PROVIDERS[1]))
    assert world.word(value) == "issuer"


async def test_keys_stay_through_a_change_of_policy_that_is_not_theirs(world: World) -> None:
    asked = len(world.publisher.asked)
    for _ in range(3):
        world.verifier.use(policy(provider(audiences=(AUDIENCE, "x"), algorithms=("RS256",)), *PROVIDERS[1:]))
        world.verifier.use(policy(*PROVIDERS))
    await world.settled()
    assert world.word(bearer(token())) == ""
    assert len(world.publisher.asked) == asked


async def test_a_policy_without_providers_verifies_nothing(world: World) -> None:
    for jwt in (Jwt(), Jwt(issuers=(ISSUER,)), Jwt(verified_by="mesh", providers=PROVIDERS)):
        assert world.verifier.use(jwt) is None
        assert world.verifier.views() == []
    assert world.verifier.use(policy(*PROVIDERS)) is world.verifier
    await eventually(lambda: all(view.keys for view in world.verifier.views()), "keys")
    assert world.word(bearer(token())) == ""


# --- keys that come and go --------------------------------------------------------------------------------------------

ONE = policy(provider(algorithms=("RS256", "ES256"), refresh_s=LongSeconds(300), stale_s=LongSeconds(1000)))


async def test_the_first_requests_wait_for_the_first_keys() -> None:
    made = World()
    made.publisher.hold()
    async with made.running(ONE, ready=False):
        askers = [Asker() for _ in range(3)]
        assert [made.ask(bearer(token()), asker=asker) for asker in askers] == [None] * 3
        assert made.verifier.waiting == 3
        made.publisher.go_on()
        await eventually(lambda: made.verifier.waiting == 0, "keys")
        assert [asker.woken_times for asker in askers] == [0, 0, 0], "told from a timer, not from within"
        made.clock.advance(0.0)
        assert [asker.woken_times for asker in askers] == [1, 1, 1]
        assert all(isinstance(made.ask(bearer(token()), asker=asker), Verified) for asker in askers)
        assert len(made.publisher.asked) == 1
        made.clock.advance(WAIT_S)
        assert [asker.woken_times for asker in askers] == [1, 1, 1]


async def test_before_the_first_reading_began_requests_wait_too() -> None:
    made = World()
    made.verifier.use(ONE)
    asker = Asker()
    assert made.ask(bearer(token()), asker=asker) is None
    made.clock.advance(WAIT_S)
    assert asker.woken_times == 1
    assert isinstance(made.ask(bearer(token()), asker=asker), Unverified)


async def test_a_rotation_is_noticed_by_the_first_token_of_the_new_key() -> None:
    made = World()
    async with made.running(ONE):
        old, new = bearer(token()), bearer(token(ec("new"), "ES256"))
        assert made.word(old) == ""
        made.publisher.publish(jwks(ec("new")))
        asker, other = Asker(), Asker()
        assert made.ask(new, asker=asker) is None and made.ask(new, asker=other) is None
        await eventually(lambda: made.verifier.waiting == 0, "the reading")
        made.clock.advance(0.0)
        assert asker.woken_times == other.woken_times == 1
        assert isinstance(made.ask(new, asker=asker), Verified) and isinstance(made.ask(new, asker=other), Verified)
        assert len(made.publisher.asked) == 2
        assert made.word(old) == "key_unknown", "and the old one's tokens are good no longer"
        assert made.events == ["jwt_keys_read", "jwt_keys_read"]


async def test_made_up_keys_have_them_read_once_in_a_while() -> None:
    made = World()
    async with made.running(ONE):

        def forged(number: int) -> bytes:
            return bearer(token(ATTACKER, header={"kid": f"k{number}"}))

        for round_ in range(1, 4):
            asker = Asker()
            assert made.ask(forged(0), asker=asker) is None
            await eventually(lambda: made.verifier.waiting == 0, "the reading")
            made.clock.advance(0.0)
            assert asker.woken_times == 1
            verdict = made.ask(forged(0), asker=asker)
            assert isinstance(verdict, Unverified) and verdict.detail == SAID["key_unknown"]
            for number in range(1, 30):
                assert made.word(forged(number)) == "key_unknown"
            assert len(made.publisher.asked) == 1 + round_
            await made.passes(ASK_AGAIN_S)
        assert made.verifier.signatures == 0


async def test_a_slow_provider_keeps_nobody_longer_than_two_seconds() -> None:
    made = World()
    async with made.running(ONE):
        made.publisher.hold()
        first, second, new = Asker(), Asker(), bearer(token(ec("new"), "ES256"))
        assert made.ask(new, asker=first) is None
        made.clock.advance(0.5)
        assert made.ask(new, asker=second) is None
        made.clock.advance(WAIT_S - 0.5)
        assert (first.woken_times, second.woken_times) == (1, 0)
        verdict = made.ask(new, asker=first)
        assert isinstance(verdict, Unverified) and verdict.reason is Reason.KEYS_UNAVAILABLE
        assert verdict.retry_after_s is not None and verdict.retry_after_s >= 1.0
        made.clock.advance(0.5)
        assert second.woken_times == 1
        assert isinstance(made.ask(new, asker=second), Unverified)
        assert made.word(bearer(token())) == "", "who has a known key is not kept"
        assert made.verifier.unavailable == 2


DOWN: list[tuple[str, int, bytes]] = [
    ("down", 0, b""),
    ("500", 500, b""),
    ("HTML", 200, b"<html>"),
    ("huge", 200, b" " * (MAX_SET_BYTES + 1)),
    ("other keys than any", 200, b'{"keys":[{"kty":"oct","k":"AA","kid":"rsa"}]}'),
]


@pytest.mark.parametrize(("status", "body"), [case[1:] for case in DOWN], ids=[case[0] for case in DOWN])
async def test_a_provider_that_is_down_from_the_beginning(status: int, body: bytes) -> None:
    made = World()
    made.publisher.fail(status, body)
    async with made.running(ONE, ready=False):
        await eventually(lambda: made.verifier.views()[0].failures == 1, "the failure")
        verdict = made.ask(bearer(token()))
        assert isinstance(verdict, Unverified) and verdict.reason is Reason.KEYS_UNAVAILABLE
        assert verdict.retry_after_s == 1.0 and "issuer.test" not in verdict.detail
        assert made.word(bearer(token(iss="other"))) == "issuer"
        (view,) = made.verifier.views()
        assert (view.issuer, view.keys, view.age_s, view.stale_s) == (ISSUER, 0, -1.0, 0.0) and view.why
        made.publisher.publish(jwks(rsa()))
        await made.passes(1.0)
        await eventually(lambda: made.verifier.views()[0].keys == 1, "the provider's return")
        assert made.word(bearer(token())) == ""
        assert made.events == ["jwt_keys_unavailable", "jwt_keys_read"]


async def test_a_provider_that_goes_down_is_believed_until_its_keys_are_stale() -> None:
    made = World()
    async with made.running(ONE):
        value = bearer(token())
        assert made.word(value) == ""
        made.publisher.fail(500)
        await made.passes(300)
        assert made.verifier.views()[0].failures == 1
        assert made.word(value) == "" and made.verifier.signatures == 1, "stale keys are no other keys"
        unknown = made.ask(bearer(token(rsa("new"))))
        assert isinstance(unknown, Unverified) and unknown.reason is Reason.KEYS_UNAVAILABLE
        for _ in range(20):
            await made.passes(40)
        verdict = made.ask(value)
        assert isinstance(verdict, Unverified) and verdict.reason is Reason.KEYS_UNAVAILABLE
        made.publisher.publish(jwks(rsa()))
        await made.passes(5)
        await eventually(lambda: made.verifier.views()[0].keys == 1, "the provider's return")
        assert made.word(value) == ""
        assert made.events == ["jwt_keys_read", "jwt_keys_unavailable", "jwt_keys_expired", "jwt_keys_read"]
        assert [level for level, _, _ in made.said] == ["info", "warning", "error", "info"]


async def test_one_provider_that_is_down_is_no_other_s_affair(world: World) -> None:
    world.publisher.hold()
    assert world.ask(bearer(token(rsa("new")))) is None
    assert world.word(bearer(token(rsa("other"), iss=OTHER))) == ""


async def test_a_crash_while_keys_are_read_is_a_failure_like_others() -> None:
    made = World()
    calls = []

    def crashes(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("in asking")
        return Publisher(jwks(rsa()))(*args, **kwargs)

    made.publisher = crashes  # type: ignore[assignment]
    async with made.running(ONE, ready=False):
        await eventually(lambda: made.verifier.views()[0].failures == 1, "the crash")
        assert "ZeroDivisionError" in made.verifier.views()[0].why
        await made.passes(1.0)
        await eventually(lambda: made.verifier.views()[0].keys == 1, "keys")


# --- who waits --------------------------------------------------------------------------------------------------------


async def test_no_more_than_so_many_wait() -> None:
    made = World()
    made.publisher.hold()
    async with made.running(ONE, ready=False):
        askers = [Asker() for _ in range(MAX_WAITING)]
        assert all(made.ask(bearer(token()), asker=asker) is None for asker in askers)
        over = made.ask(bearer(token()))
        assert isinstance(over, Unverified) and over.reason is Reason.KEYS_UNAVAILABLE and over.retry_after_s == 1.0
        made.verifier.forget(askers[0])
        assert made.ask(bearer(token())) is None


async def test_who_leaves_is_forgotten() -> None:
    made = World()
    made.publisher.hold()
    async with made.running(ONE, ready=False):
        leaves, leaves_late, stays = Asker(), Asker(), Asker()
        for asker in (leaves, leaves_late, stays):
            assert made.ask(bearer(token()), asker=asker) is None
        made.verifier.forget(leaves)
        made.verifier.forget(leaves)
        made.verifier.forget(Asker())
        made.publisher.go_on()
        await eventually(lambda: made.verifier.waiting == 0, "keys")
        made.verifier.forget(leaves_late)  # it was to be told, and was not yet
        made.clock.advance(WAIT_S)
        assert [asker.woken_times for asker in (leaves, leaves_late, stays)] == [0, 0, 1]
        made.verifier.forget(stays)
        assert not made.verifier._woken and not made.verifier._waiting and not made.verifier._ready


async def test_a_waiter_that_fails_harms_no_other() -> None:
    made = World()
    made.publisher.hold()

    def fail() -> None:
        raise ZeroDivisionError

    async with made.running(ONE, ready=False):
        bad, good = Asker(fail), Asker()
        assert made.ask(bearer(token()), asker=bad) is None and made.ask(bearer(token()), asker=good) is None
        made.publisher.go_on()
        await eventually(lambda: made.verifier.waiting == 0, "keys")
        with pytest.raises(ZeroDivisionError):
            made.clock.advance(0.0)
        made.clock.advance(0.0)
        assert (bad.woken_times, good.woken_times) == (1, 1)


async def test_a_waiter_asks_again_as_it_is_woken() -> None:
    made = World()
    made.publisher.hold()
    verdicts: list[Verified | Unverified | None] = []
    async with made.running(ONE, ready=False):
        asker = Asker(lambda: verdicts.append(made.ask(bearer(token()), asker=asker)))
        assert made.ask(bearer(token()), asker=asker) is None
        made.publisher.go_on()
        await eventually(lambda: made.verifier.waiting == 0, "keys")
        made.clock.advance(0.0)
        assert [type(verdict) for verdict in verdicts] == [Verified]


async def test_a_policy_that_changes_wakes_who_waits() -> None:
    made = World()
    made.publisher.hold()
    async with made.running(ONE, ready=False):
        asker = Asker()
        assert made.ask(bearer(token()), asker=asker) is None
        assert made.verifier.use(Jwt()) is None
        made.clock.advance(0.0)
        assert asker.woken_times == 1 and made.verifier.waiting == 0 and not made.verifier._woken


async def test_stopping_ends_every_reading() -> None:
    made = World()
    made.publisher.hold()
    async with made.running(policy(*PROVIDERS), ready=False):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(made.publisher.asked) == 2
    assert not any(view.keys for view in made.verifier.views())
    assert made.clock.armed == []


# --- with the policy --------------------------------------------------------------------------------------------------


def snapshot(*providers: JwtProvider) -> Snapshot:
    return Snapshot(version=1, services=(Service(name="s"),), identity=Identity(jwt=policy(*providers)))


async def test_files_are_there_for_the_first_request(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_bytes(jwks(rsa()))
    made = World()
    asked = snapshot(
        provider(jwks_url="", jwks_file=str(good)),
        provider(issuer=OTHER, jwks_url="", jwks_file=str(bad)),
        provider(issuer="third"),
    )
    read = await asyncio.to_thread(made.verifier.read, asked)
    assert read.warnings == (f"identity.jwt: no keys of {OTHER}: {bad}: No such file or directory",)
    assert read.identity is asked.identity
    made.verifier.use(read.identity.jwt)
    assert made.word(bearer(token())) == ""
    assert [view.keys for view in made.verifier.views()] == [1, 0, 0]


async def test_a_policy_that_names_the_same_file_does_not_read_it_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(rsa()))
    made = World()
    asked = snapshot(provider(jwks_url="", jwks_file=str(path)))
    async with made.running(made.verifier.read(asked).identity.jwt):
        path.unlink()
        assert made.verifier.read(asked).warnings == ()
        made.verifier.use(asked.identity.jwt)
        assert made.word(bearer(token())) == ""


def test_without_providers_nothing_is_read_or_loaded() -> None:
    made = World()
    plain = Snapshot(version=1, services=(Service(name="s"),))
    assert made.verifier.read(plain) is plain


async def test_a_swapped_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(jwks(rsa()))
    made = World()
    async with made.running(policy(provider(algorithms=("RS256", "ES256"), jwks_url="", jwks_file=str(path)))):
        assert made.word(bearer(token())) == ""
        new = tmp_path / "new.json"
        new.write_bytes(jwks(ec("new")))
        new.rename(path)
        await made.passes(1.0)
        await eventually(lambda: made.word(bearer(token(ec("new"), "ES256"))) == "", "the new key")
        assert not isinstance(made.ask(bearer(token())), Verified)
