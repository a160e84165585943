"""Who comes when, asks what, and has which luck.

All that is random about a request is drawn here, once, in the order of arrival: every method under test sees the same
requests with the same luck (common random numbers), so that a difference between two methods is theirs. A second
attempt has luck of its own, which depends on nothing but the seed, the request and the number of the attempt.
"""

from collections.abc import Iterator, Sequence
from math import exp, pi, sin
from random import Random
from typing import Final, Literal

import msgspec

from sidecar.simulate.profile import Profile

DAY_S: Final = 600.0
SWING: Final = 0.4  # how far the rate goes up and down over a day
USERS_PER_POD: Final = 100
TENANT: Final = "tenant"
MOST_STRAGGLING: Final = 100.0  # a Pareto has no end, a request has its deadline
_ATTEMPTS: Final = 1 << 12


class Modifier(msgspec.Struct, frozen=True):
    """What is unusual about the traffic, and no fault: between two moments, by a factor (`tenant`: a share)."""

    kind: Literal["surge", "mix", "tenant"]
    begin: float
    end: float
    strength: float


class Luck:
    """What is random about one attempt.

    `noise`: standard normal. `straggler`: a factor, 0 for none. `pause_s`: a silence that means nothing, 0 for none,
    after the share `pause_at` of the tokens. `error_u`, `fault_u`, `fault_v`: in [0, 1).
    """

    __slots__ = ("error_u", "fault_u", "fault_v", "noise", "pause_at", "pause_s", "straggler")

    noise: float
    straggler: float
    error_u: float
    pause_s: float
    pause_at: float
    fault_u: float
    fault_v: float

    def draw(self, rng: Random, profile: Profile) -> None:
        """Fills it."""
        random = rng.random
        self.noise = rng.gauss(0.0, 1.0)
        self.straggler = 0.0
        if random() < profile.stragglers:
            self.straggler = min(MOST_STRAGGLING, 2.0 * (1.0 - random()) ** (-1.0 / 1.5))
        self.error_u = random()
        self.pause_s = 0.0
        self.pause_at = random()
        if random() < profile.pauses:
            self.pause_s = min(12.0, profile.pause_median_s * exp(profile.pause_sigma * rng.gauss(0.0, 1.0)))
        self.fault_u = random()
        self.fault_v = random()


class Arrival(Luck):
    """One request. `user_pod` is where a random balancer would send it, and where its session lives.

    `affected`, `after_open`, `touched` and `flights` are the ledger's: whether a fault would have bitten it there,
    whether the breaker of that engine had opened before, whether a fault did bite an attempt, how many there were.
    """

    __slots__ = (
        "affected",
        "after_open",
        "at",
        "flights",
        "id",
        "output_tokens",
        "poisoned",
        "prompt_tokens",
        "session",
        "sidecar",
        "touched",
        "user_pod",
    )

    def __init__(
        self,
        id: int,
        at: float,
        prompt_tokens: int,
        output_tokens: int,
        session: str | None,
        user_pod: int,
        sidecar: int = 0,
        poisoned: bool = False,
    ) -> None:
        self.id = id
        self.at = at
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.session = session
        self.user_pod = user_pod
        self.sidecar = sidecar
        self.poisoned = poisoned
        self.affected = False
        self.after_open = False
        self.touched = False
        self.flights = 0


def luck_of(seed: int, id: int, attempt: int, profile: Profile) -> Luck:
    """The luck of an attempt after the first."""
    luck = Luck()
    luck.draw(Random((seed << 48) ^ (id * _ATTEMPTS + attempt)), profile)
    return luck


def rng_of(seed: int, what: str) -> Random:
    """A stream of numbers of its own for each purpose; text is hashed by SHA-512, not by the process."""
    return Random(f"{what}:{seed}")


def synthetic(
    profile: Profile,
    rate_per_pod: float,
    pods: int,
    seconds: float,
    seed: int,
    modifiers: Sequence[Modifier] = (),
    *,
    sidecars: int = 1,
) -> Iterator[Arrival]:
    """Poisson arrivals on a sine day, from 0 to `seconds`; `rate_per_pod` per second and pod at its mean."""
    rng = rng_of(seed, "arrivals")
    random, gauss = rng.random, rng.gauss
    users = USERS_PER_POD * pods
    names = [f"user-{number}" for number in range(users)]
    mean = rate_per_pod * pods
    output_median, output_sigma, output_max = profile.output_median, profile.output_sigma, profile.output_max
    now = 0.0
    number = 0
    while True:
        rate = mean * (1.0 + SWING * sin(2.0 * pi * now / DAY_S))
        prompt_factor = 1.0
        tenant_share = 0.0
        for modifier in modifiers:
            if modifier.begin <= now < modifier.end:
                if modifier.kind == "surge":
                    rate *= modifier.strength
                elif modifier.kind == "mix":
                    prompt_factor *= modifier.strength
                else:
                    tenant_share = modifier.strength
        now += rng.expovariate(rate)
        if now >= seconds:
            return
        prompt = profile.prompt_median * exp(profile.prompt_sigma * gauss(0.0, 1.0)) * prompt_factor
        output = output_median * exp(output_sigma * gauss(0.0, 1.0))
        user = int(random() * users)
        sidecar = int(random() * sidecars)
        poisoned = random() < tenant_share
        number += 1
        arrival = Arrival(
            number,
            now,
            max(1, min(profile.prompt_max, int(prompt))),
            max(1, min(output_max, int(output))),
            TENANT if poisoned else names[user],
            user % pods,
            sidecar,
            poisoned,
        )
        arrival.draw(rng, profile)
        yield arrival
