"""Pass marks, and what they are made of: the streams' tally and what was noted besides."""

import operator
from collections.abc import Callable
from math import isnan
from typing import Literal

import msgspec

from loadtest.tally import Tally, quantile

_COMPARE: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


class Mark(msgspec.Struct, frozen=True):
    """One figure against its limit. `measured` None: not to be had here; nan: nothing was there to measure, a fail."""

    name: str
    measured: float | None
    sign: Literal["<=", ">=", "=="]
    limit: float
    unit: str = ""

    @property
    def ok(self) -> bool | None:
        """None where it was not measured."""
        if self.measured is None:
            return None
        return not isnan(self.measured) and _COMPARE[self.sign](self.measured, self.limit)


class Facts(msgspec.Struct):
    """What the scenario and the watcher noted besides the streams. `rss_bytes`: (time s, bytes) of the proxy."""

    notes: dict[str, float] = {}
    victim: str = ""
    opened: int = 0
    """Transitions of any breaker to open during the run, by the sidecar's metrics."""
    final_states: dict[str, str] = {}
    """Node breakers at the end."""
    changes: list[tuple[float, str, str]] = []
    """(time s, breaker, new state) as polled: short states may be missed, `opened` misses none."""
    rss_bytes: list[tuple[float, float]] = []
    lags_s: list[tuple[float, float]] = []
    """(time s, how late the load's own process woke, s): what of the clients' figures is its own doing."""
    has_admin: bool = True
    faulted: bool = True
    """False against a real URL, where nothing is broken on purpose."""


class Evidence(msgspec.Struct, frozen=True):
    """All that the marks are made of. `ttft_s`: a first token later than this is no good service."""

    tally: Tally
    facts: Facts
    seconds: float
    ttft_s: float

    def lag_s(self, at: float, since_s: float = 0.0) -> float:
        """The quantile `at` (0-1) of the load's own lateness since then, s; nan where it was not measured."""
        return quantile((lag for when, lag in self.facts.lags_s if when >= since_s), at)


def accounted(evidence: Evidence) -> Mark:
    """The mark that every scenario has: no stream is lost from sight."""
    return Mark("streams unaccounted for", evidence.tally.unaccounted, "==", 0)


def with_admin(facts: Facts, value: float) -> float | None:
    """`value`, where there is an admin page it came from."""
    return value if facts.has_admin else None


def with_fault(facts: Facts, value: float) -> float | None:
    """`value`, where there was a fault it speaks of."""
    return value if facts.faulted else None
