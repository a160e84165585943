"""What is told of tokens and keys at the scrape."""

from sidecar.telemetry.jwt import KeysView, Tokens
from sidecar.telemetry.metrics import Metrics
from tests.telemetry.records import scrape, value

ISSUER = 'https://issuer.example/"x"'


class Keys:
    def __init__(self, age_s: float = 12.5, stale_s: float = -1.0) -> None:
        self.issuer = ISSUER
        self.keys = 2
        self.age_s = age_s
        self.stale_s = stale_s
        self.fetches = 9
        self.failures = 4


class Verifier:
    def __init__(self, *keys: Keys) -> None:
        self.verified = 70
        self.refused = {"expired": 3, "issuer": 0}
        self.unavailable = 5
        self.signatures = 11
        self.waiting = 1
        self._keys = keys

    def views(self) -> tuple[KeysView, ...]:
        return self._keys


def watching(tokens: Tokens) -> Metrics:
    metrics = Metrics()
    metrics.watch_jwt(tokens)
    return metrics


async def test_good_and_refused_tokens_are_counted_by_what_is_wrong() -> None:
    metrics = watching(Verifier(Keys()))
    assert await value(metrics, "sidecar_jwt_verified_total") == 70
    assert await value(metrics, "sidecar_jwt_refused_total", why="expired") == 3
    assert await value(metrics, "sidecar_jwt_refused_total", why="issuer") == 0
    assert await value(metrics, "sidecar_jwt_unavailable_total") == 5
    assert await value(metrics, "sidecar_jwt_signatures_total") == 11
    assert await value(metrics, "sidecar_jwt_waiting") == 1


async def test_keys_are_told_by_issuer() -> None:
    metrics = watching(Verifier(Keys()))
    assert await value(metrics, "sidecar_jwt_keys", issuer=ISSUER) == 2
    assert await value(metrics, "sidecar_jwt_keys_age_seconds", issuer=ISSUER) == 12.5
    assert await value(metrics, "sidecar_jwt_keys_stale_seconds", issuer=ISSUER) == 0
    assert await value(metrics, "sidecar_jwt_key_reads_total", issuer=ISSUER) == 9
    assert await value(metrics, "sidecar_jwt_key_failures_total", issuer=ISSUER) == 4


async def test_keys_that_cannot_be_read_are_told_and_those_that_never_were_have_no_age() -> None:
    metrics = watching(Verifier(Keys(age_s=-1.0, stale_s=600.0)))
    assert await value(metrics, "sidecar_jwt_keys_age_seconds", issuer=ISSUER) is None
    assert await value(metrics, "sidecar_jwt_keys_stale_seconds", issuer=ISSUER) == 600


async def test_where_no_token_is_verified_there_is_nothing_to_tell() -> None:
    assert not [name for name, _ in await scrape(watching(Verifier())) if name.startswith("sidecar_jwt")]
