"""What is around a rollout, and what is wrong with its canary: the shapes alone, which msgspec reads."""

import msgspec


class World(msgspec.Struct, frozen=True):
    """What is around a rollout.

    `rate`: requests per second, drawn evenly in its logarithm. `engines` of which a part serves the canary: as large as
    its share, or `alone`, one whatever its share. `speeds`: how much machines differ, sigma of the logarithm. `wander`:
    how much the speed of each comes and goes within a minute. `deaths` per engine and hour. `surges`: the load grows
    2 to 2.6 times for a minute, every 5 minutes. `cold`: how many times slower first tokens are after sessions moved,
    decaying by `cold_s`. `sessions`, and how much they differ (`differ`, sigma of the logarithm).
    """

    rate: tuple[float, float] = (5.0, 20.0)
    engines: int = 20
    alone: bool = False
    speeds: float = 0.03
    wander: float = 0.0
    deaths: float = 0.3
    surges: bool = False
    swing: float = 0.4
    cold: float = 2.0
    cold_s: float = 30.0
    sessions: int = 1000
    differ: float = 0.3


class Fault(msgspec.Struct, frozen=True):
    """What is wrong with a canary.

    `slow`, `gap`: times, of first tokens (from prompts of `least_prompt` tokens) and gaps. `broken`, `failed`: more
    answers that break in their stream, or fail before. `cut_at`: tokens after which answers are cut; 0: never.
    """

    slow: float = 1.0
    gap: float = 1.0
    broken: float = 0.0
    failed: float = 0.0
    cut_at: int = 0
    least_prompt: int = 0
