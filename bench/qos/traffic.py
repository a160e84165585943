"""Who asks for what: three classes, twenty tenants, one of which asks for ten times its part.

1. A tenant's ordinary requests are drawn from a stream of chance of its own, and what the flooding tenant sends beyond
   its part from another: with and without the flood the others send the same requests at the same moments with the same
   luck, and so they do under every policy.
2. Load 1 is what fills every slot of every engine: the slot-seconds that all requests together want per second, each
   beside a full batch, over the number of slots. It counts the flood. Without it, load 1 is 20/29.
"""

from collections.abc import Sequence
from math import exp
from random import Random

import msgspec

from sidecar.policy.schema import QosPolicy, Seconds
from sidecar.simulate.profile import Profile
from sidecar.simulate.workload import Arrival

TENANTS = 20
FLOODER = 0
"""The number of the tenant that floods."""
FLOOD = 10
"""How many times its part it asks for."""
PARTS = TENANTS - 1 + FLOOD

ENGINE = Profile(
    name="qos",
    prompt_median=512.0,
    prompt_sigma=1.0,
    prompt_max=16384,
    output_median=40.0,
    output_sigma=0.7,
    output_max=1000,
    slots=64,
    speed_sigma=0.05,
    errors=0.0,
    pauses=0.0,
)
"""Steps, prefill, noise and stragglers are the breaker's (docs/breaker.md); no faults: those have a bench of theirs."""
PODS = 3


class Kind(msgspec.Struct, frozen=True):
    """A class of requests: its policy, its part of the load, and its tokens (medians, sigmas of the logarithm)."""

    policy: QosPolicy
    part: float
    prompt: tuple[float, float, int]
    output: tuple[float, float, int]

    @property
    def name(self) -> str:
        return self.policy.name

    @property
    def sla_s(self) -> float:
        return self.policy.latency_sla_ms / 1000.0


KINDS = (
    Kind(
        QosPolicy(name="voice", latency_sla_ms=300, priority=9, late="reject", max_wait_s=Seconds(5)),
        0.15,
        (80.0, 0.5, 512),
        (40.0, 0.5, 150),
    ),
    Kind(
        QosPolicy(name="text", latency_sla_ms=2000, priority=6, late="reject", max_wait_s=Seconds(30)),
        0.35,
        (512.0, 1.0, 4096),
        (120.0, 0.7, 800),
    ),
    Kind(
        QosPolicy(name="code", latency_sla_ms=10_000, priority=3, preemptible=True, max_wait_s=Seconds(60)),
        0.5,
        (3000.0, 0.6, 16384),
        (200.0, 0.7, 1000),
    ),
)
VOICE, TEXT, CODE = range(3)


class Asked(Arrival):
    """One request, and what became of it. Times are the clock's, -1 where it did not happen.

    `kind` and `tenant` are numbers. `word` is "" while it is under way, "served", or why it was not.
    `evicted`: how often it was; `began_at`: when it came again.
    """

    __slots__ = ("began_at", "ended_at", "evicted", "first_at", "flood", "kind", "sent_at", "tenant", "word")

    def __init__(self, id: int, at: float, prompt: int, output: int, kind: int, tenant: int, flood: bool) -> None:
        super().__init__(id, at, prompt, output, None, 0)
        self.kind = kind
        self.tenant = tenant
        self.flood = flood
        self.began_at = self.sent_at = self.first_at = self.ended_at = -1.0
        self.word = ""
        self.evicted = 0

    @property
    def tokens(self) -> int:
        """Of prompt and answer."""
        return self.prompt_tokens + self.output_tokens


def slot_s(prompt: float, output: float, profile: Profile = ENGINE) -> float:
    """How long a request holds a slot beside a full batch."""
    return profile.ttft_s(int(prompt), profile.slots) + (output - 1.0) * profile.step_s(profile.slots)


def mean(tokens: tuple[float, float, int]) -> float:
    """Of a lognormal; its cap costs the mean a hundredth at most."""
    return tokens[0] * exp(tokens[1] * tokens[1] / 2.0)


def rate_of(kind: Kind, load: float, pods: int = PODS, profile: Profile = ENGINE) -> float:
    """Requests per second of all tenants of a class at a load, the flood among them."""
    return load * kind.part * pods * profile.slots / slot_s(mean(kind.prompt), mean(kind.output), profile)


def requests(
    load: float, seconds: float, seed: int, *, flood: bool, kinds: Sequence[int] = (), pods: int = PODS
) -> list[Asked]:
    """All that is asked from 0 to `seconds`, in order. `kinds`: those in which the tenant floods; empty: all."""
    found: list[Asked] = []
    for number, kind in enumerate(KINDS):
        part = rate_of(kind, load, pods) / PARTS
        for tenant in range(TENANTS):
            _draw(found, part, seconds, number, tenant, f"{seed}:{tenant}", flood=False)
        if flood and (not kinds or number in kinds):
            _draw(found, part * (FLOOD - 1), seconds, number, FLOODER, f"{seed}:flood", flood=True)
    found.sort(key=_when)
    for id, asked in enumerate(found, 1):
        asked.id = id
    return found


def _draw(found: list[Asked], rate: float, seconds: float, number: int, tenant: int, name: str, *, flood: bool) -> None:
    kind = KINDS[number]
    rng = Random(f"qos:{kind.name}:{name}")
    (prompt, prompt_sigma, prompt_max), (output, output_sigma, output_max) = kind.prompt, kind.output
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        if now >= seconds:
            return
        asked = Asked(
            0,
            now,
            max(1, min(prompt_max, int(prompt * exp(prompt_sigma * rng.gauss(0.0, 1.0))))),
            max(1, min(output_max, int(output * exp(output_sigma * rng.gauss(0.0, 1.0))))),
            number,
            tenant,
            flood,
        )
        asked.draw(rng, ENGINE)
        found.append(asked)


def _when(asked: Asked) -> float:
    return asked.at
