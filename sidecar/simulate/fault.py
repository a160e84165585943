"""What can be wrong with an engine, for how long, and what it does to a request that is sent there.

A fault bites by two numbers that belong to the request (`fault_u`, `fault_v`), drawn once: so every method under test
sees the same requests bitten on the same engine, and whether a request *would have been* bitten can be asked of an
engine that it never went to.
"""

from enum import IntEnum, StrEnum
from typing import Final

import msgspec

COLD_S: Final = 75.0  # how long a cold engine takes to be as fast as ever
RELOAD_S: Final = 20.0  # how long an engine that loads its model refuses connections
RAMP_S: Final = 90.0  # how long a ramp climbs before it stays at its height
GRACE_S: Final = 20.0  # after a fault its traces (queues, answers under way) are still there

_HTTP500_SHARE: Final = 2 / 3  # of failed requests; the others lose their connection before the head


class Kind(StrEnum):
    """What is wrong. `strength` is a factor of slowness unless said otherwise, `share` that of requests bitten."""

    __hash__ = str.__hash__

    STEP = "step"  # slower at once
    RAMP = "ramp"  # slower and slower
    ERRORS = "errors"
    STALL = "stall"  # answers that never go on, half of them before their first token
    GRAY = "gray"  # few requests, half of them slow, half of them failing
    COLD = "cold"  # slow at first, less and less
    ZONE = "zone"  # `strength` seconds later
    MULTI = "multi"  # errors, on most engines
    OUTAGE = "outage"  # nobody listens
    RELOAD = "reload"  # nobody listens until `end`, then cold


class Fate(IntEnum):
    """What becomes of one attempt."""

    SERVE = 0
    HTTP500 = 1
    RESET = 2
    REFUSE = 3
    STALL = 4


class Fault(msgspec.Struct, frozen=True):
    """One fault on some engines (their indexes), between two moments of the clock."""

    kind: Kind
    pods: tuple[int, ...]
    begin: float
    end: float
    strength: float = 1.0
    share: float = 1.0

    @property
    def until(self) -> float:
        """When it bites no more: a reload leaves a cold engine behind."""
        return self.end + COLD_S if self.kind is Kind.RELOAD else self.end

    def slowness(self, now: float) -> float:
        """By which factor everything on the engine is slower now."""
        match self.kind:
            case Kind.STEP:
                return self.strength
            case Kind.RAMP:
                return 1.0 + (self.strength - 1.0) * min(1.0, (now - self.begin) / RAMP_S)
            case Kind.COLD:
                return 1.0 + (self.strength - 1.0) * max(0.0, 1.0 - (now - self.begin) / COLD_S)
            case Kind.RELOAD if now >= self.end:
                return 1.0 + (self.strength - 1.0) * max(0.0, 1.0 - (now - self.end) / COLD_S)
            case _:
                return 1.0

    def fate(self, u: float, v: float, now: float) -> Fate:
        """What it makes of a request with these numbers, each in [0, 1)."""
        match self.kind:
            case Kind.OUTAGE:
                return Fate.REFUSE
            case Kind.RELOAD:
                return Fate.REFUSE if now < self.end else Fate.SERVE
            case Kind.ERRORS | Kind.MULTI if u < self.share:
                return Fate.HTTP500 if v < _HTTP500_SHARE else Fate.RESET
            case Kind.STALL if u < self.share:
                return Fate.STALL
            case Kind.GRAY if u < self.share and v >= 0.5:
                return Fate.HTTP500 if 2.0 * v - 1.0 < _HTTP500_SHARE else Fate.RESET
            case _:
                return Fate.SERVE

    def own_slowness(self, u: float, v: float) -> float:
        """By which factor it slows this one request; gray: x8-20."""
        return 8.0 + 24.0 * v if self.kind is Kind.GRAY and u < self.share and v < 0.5 else 1.0
