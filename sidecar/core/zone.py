"""Zones that slow down: when one is turned down, by how much, and how it comes back.

A slow endpoint is its breaker's affair; a zone is slow as a whole (a link, a power cap, a noisy neighbour), and its
endpoints need not be refused but spared. Judged is the time to the first token, of all sidecars together: each tells
what it saw of each zone (`ZoneTally`) in its summaries, all read them in the log's order, and whoever concludes first
writes it into the service's table, held against the version it was concluded from.

```
            slow: share = policy's weight                well for its hold            well for STEP_S
all ------------------------------------> turned down ------------------> 0.25 -> 0.5 ------------> all
                                               ^                            |      |                 |
                                               +------- slow again: its hold doubles ---------------+
```

1. The median, and not a high quantile: half of a zone's answers being late is the zone, a few are one endpoint or long
   prompts. More than half must have taken longer than the bar by so much that chance would not do it (a sign test, at
   `SIGMAS`): of 20 answers 19, of 200 about 129. What was cut off before its first token counts with the time it had
   taken by then, which is less than it would have.
2. The bar is the highest of three: the policy's `latency`, twice what is usual for the zone, twice the other zones'
   median now. So a zone whose prompts are long does not decay, nor do all when all are slow.
3. Where the detector has a line (`latency`) for what prompt and load explain, and it explains the slowness, the zone is
   not slow either: the prompts are.
4. A zone is judged by the shortest time, of `WINDOW_S` to `MOST_WINDOW_S`, in which it had `MIN_SAMPLES` answers; with
   fewer it is as it was. Nothing is usual before `LEAST_USUAL` windows; what is slow from the beginning is usual.
5. One with the empty name is none: it is never turned down, and is one of the others. The rest must be able to bear it:
   at least `LEAST_REST` of all endpoints that may serve are outside, with nothing taken from them.
6. It comes back by `RAMP`, each step a record, so that all sidecars and Envoys have the same share at any time. A step
   needs the zone to be well: its median within the highest of 0.8 of the limit, 1.25 of what was usual, 1.5 of the
   others'. Between well and slow nothing changes. Too few answers for `BLIND_S`, while others have some, is a step too,
   unless those few were slow: little harm is done with little traffic, and else nobody would ever know.
7. Its hold begins at `HOLD_S` and doubles each time it must be turned down again within `FORGIVEN_S`.
"""

from collections import deque
from collections.abc import Mapping
from math import inf, sqrt
from typing import Final

import msgspec
from msgspec.structs import replace

from sidecar.core.sketch import BUCKETS, bucket_of, quantile
from sidecar.core.table import Decay, Table
from sidecar.policy.schema import ZoneDecay

WINDOW_S: Final = 10
"""Long enough that a hiccup is not half of it."""
MOST_WINDOW_S: Final = 60
LEAST_SPAN_S: Final = 5
"""The same where traffic has just begun."""
MIN_SAMPLES: Final = 20
SIGMAS: Final = 4.0
"""Of the sign test: a window of a zone whose median is at the bar passes it once in 30,000."""
TIMES: Final = 2.0
"""Of what is usual, and of the others: less has reasons that moving requests about does not mend."""
WELL_LIMIT: Final = 0.8
WELL_USUAL: Final = 1.25
WELL_OTHERS: Final = 1.5
EXPLAINED: Final = 0.15
"""ln: slower than prompt and load explain by less than this on average is explained. What is late while it runs enters
with 3.5 spreads, of which the least is 0.05."""
LEAST_USUAL: Final = 3
USUAL_WINDOWS: Final = 30
STRANGE_WINDOWS: Final = 60
"""So many windows in a row that teach nothing: it is how things are now, and is learnt anew."""
SETTLE_S: Final = 5
"""Answers that came so soon after a change of the share had been sent before it."""
HOLD_S: Final = 30
MOST_HOLD_S: Final = 600
STEP_S: Final = 10
BLIND_S: Final = 60
RAMP: Final = (0.05, 0.25, 0.5, 1.0)
"""The shares on the way back, those of them that are more than the policy's."""
FORGIVEN_S: Final = 600
LEAST_REST: Final = 0.4
"""Of two equal zones one may go, of three not two: the rest would be slow in its place."""
MOST_ZONES: Final = 64
"""Of a service; of more, those heard of first are watched."""

Told = tuple[dict[int, int], int, int]
"""A zone in one interval: a sketch of the seconds to first tokens (`sketch`), how many of them had been foretold, and
the sum of how much longer than that they took, in thousandths of ln seconds."""


class _Count:
    __slots__ = ("first_tokens", "left", "timed")

    def __init__(self) -> None:
        self.first_tokens: dict[int, int] = {}
        self.timed = 0
        self.left = 0.0


class ZoneTally:
    """What one sidecar saw of its zones since it last said so. Written on the request's path."""

    __slots__ = ("_zones",)

    def __init__(self) -> None:
        self._zones: dict[str, _Count] = {}

    def add(self, zone: str, bucket: int) -> None:
        """A first token that nobody had foretold."""
        self._count(zone, bucket)

    def add_timed(self, zone: str, bucket: int, left: float) -> None:
        """A first token that took `left` longer than foretold, ln seconds."""
        count = self._count(zone, bucket)
        if count is not None and left == left:
            count.timed += 1
            count.left += min(8.0, max(-8.0, left))

    def take(self) -> dict[str, Told]:
        """What was added since the last call."""
        zones, self._zones = self._zones, {}
        return {zone: (count.first_tokens, count.timed, round(count.left * 1000)) for zone, count in zones.items()}

    def _count(self, zone: str, bucket: int) -> _Count | None:
        count = self._zones.get(zone)
        if count is None:
            if len(self._zones) >= MOST_ZONES:
                return None
            count = self._zones[zone] = _Count()
        count.first_tokens[bucket] = count.first_tokens.get(bucket, 0) + 1
        return count


class Turn(msgspec.Struct, frozen=True):
    """A zone's next share, and why: `zone_slow`, `zone_ramp`, `zone_back` or `zone_off`, `evidence` in a sentence.

    It was concluded from a decay of `basis_us` (0: there was none), and holds for no other.
    """

    zone: str
    share: float
    why: str
    evidence: str
    basis_us: int
    times: int
    usual_s: float = 0.0


class _Slot:
    """One second of a zone, by the log server's clock."""

    __slots__ = ("at_s", "left", "sketch", "timed")

    def __init__(self, at_s: int) -> None:
        self.at_s = at_s
        self.sketch: dict[int, int] = {}
        self.timed = 0
        self.left = 0


class _Seen:
    """A zone over some seconds, or several zones together."""

    __slots__ = ("left", "n", "sketch", "span_s", "timed")

    def __init__(self) -> None:
        self.sketch: dict[int, int] = {}
        self.n = 0
        self.timed = 0
        self.left = 0
        self.span_s = 0

    def add(self, sketch: Mapping[int, int], timed: int, left: int) -> None:
        for bucket, count in sketch.items():
            self.sketch[bucket] = self.sketch.get(bucket, 0) + count
            self.n += count
        self.timed += timed
        self.left += left

    @property
    def median_s(self) -> float:
        return quantile(self.sketch, 0.5) or 0.0

    def above(self, bar_s: float) -> int:
        """How many took longer, as far as a sketch can tell: those in the bar's own bucket did not."""
        bar = bucket_of(bar_s)
        return sum([count for bucket, count in self.sketch.items() if bucket > bar])

    def mostly_above(self, bar_s: float) -> bool:
        """Whether more than half of all that there could have been are longer, by what was seen."""
        return self.n >= MIN_SAMPLES and self.above(bar_s) >= 0.5 * (self.n + SIGMAS * sqrt(self.n))

    @property
    def explained(self) -> bool:
        return 2 * self.timed >= self.n and self.left < 1000 * EXPLAINED * self.timed


class _Zone:
    __slots__ = ("_slots", "_strange", "_taught_s", "_usual")

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._usual: deque[float] = deque(maxlen=USUAL_WINDOWS)
        self._strange = 0
        self._taught_s = 0

    def add(self, at_s: int, told: Told) -> None:
        sketch, timed, left = told
        slots = self._slots
        if not slots or slots[-1].at_s < at_s:
            slots.append(_Slot(at_s))
            while slots[0].at_s <= at_s - MOST_WINDOW_S:
                slots.popleft()
        slot = slots[-1]  # what was told late counts as of now
        for bucket, count in sketch.items():
            if 0 <= bucket < BUCKETS:
                slot.sketch[bucket] = slot.sketch.get(bucket, 0) + count
        slot.timed += timed
        slot.left += left

    def seen(self, now_s: int, since_s: int) -> _Seen:
        """The shortest window that is long enough and has enough, within the longest; nothing before `since_s`."""
        seen = _Seen()
        for slot in reversed(self._slots):
            age_s = now_s - slot.at_s
            if slot.at_s < since_s or age_s >= MOST_WINDOW_S or (age_s >= WINDOW_S and seen.n >= MIN_SAMPLES):
                break
            seen.add(slot.sketch, slot.timed, slot.left)
            seen.span_s = age_s + 1
        return seen

    @property
    def usual_s(self) -> float | None:
        """What the median usually is; None: not known yet."""
        if len(self._usual) < LEAST_USUAL:
            return None
        return sorted(self._usual)[len(self._usual) // 2]

    def learn(self, now_s: int, since_s: int, limit_s: float) -> None:
        """Once in a window, of a zone that has its whole share."""
        if now_s - self._taught_s < WINDOW_S:
            return
        seen = self.seen(now_s, max(since_s, self._taught_s))
        if seen.n < MIN_SAMPLES:
            return
        self._taught_s = now_s
        usual_s, median_s = self.usual_s, seen.median_s
        if usual_s is not None and median_s > max(limit_s, TIMES * usual_s):
            self._strange += 1
            if self._strange < STRANGE_WINDOWS:
                return
            self._usual.clear()
        self._strange = 0
        self._usual.append(median_s)


class ZoneWatch:
    """What is known of one service's zones. Times are microseconds of the log server's clock."""

    __slots__ = ("_zones",)

    def __init__(self) -> None:
        self._zones: dict[str, _Zone] = {}

    def heard(self, at_us: int, zone: str, told: Told) -> None:
        """What a sidecar, this one or another, told of a zone."""
        known = self._zones.get(zone)
        if known is None:
            if len(self._zones) >= MOST_ZONES:
                return
            known = self._zones[zone] = _Zone()
        known.add(at_us // 1_000_000, told)

    def conclude(
        self, rule: ZoneDecay | None, ready: Mapping[str, int], decays: Mapping[str, Decay], now_us: int
    ) -> Turn | None:
        """The next change of a zone, by urgency; to be asked once a second. Only one: each changes what the next means.

        `ready`: how many endpoints of each zone may serve. `decays` is the table's. `rule` None: all that is turned
        down is to come back at once.
        """
        if rule is None:
            for zone, down in sorted(decays.items()):
                if down.share < 1.0:
                    return Turn(zone, 1.0, "zone_off", "the policy has no zone_decay", down.since_us, 1)
            return None
        for zone in [zone for zone in self._zones if zone not in ready and zone not in decays]:
            del self._zones[zone]
        now_s = now_us // 1_000_000
        named = sorted({zone for zone in (*ready, *decays) if zone})
        seen = {zone: known.seen(now_s, _settled_s(decays.get(zone))) for zone, known in self._zones.items()}
        slow: list[Turn] = []
        well: list[Turn] = []
        for zone in named:
            turn = self._judge(rule, zone, seen, ready, decays, now_us)
            if turn is not None:
                (slow if turn.why == "zone_slow" else well).append(turn)
        limit_s = float(rule.latency_s)
        for zone, known in self._zones.items():
            decay = decays.get(zone)
            if decay is None or decay.share >= 1.0:
                known.learn(now_s, _settled_s(decay), limit_s)
        return slow[0] if slow else well[0] if well else None

    def _judge(
        self,
        rule: ZoneDecay,
        zone: str,
        all_seen: Mapping[str, _Seen],
        ready: Mapping[str, int],
        decays: Mapping[str, Decay],
        now_us: int,
    ) -> Turn | None:
        seen, decay = all_seen.get(zone) or _Seen(), decays.get(zone)
        share = 1.0 if decay is None else decay.share
        limit_s = float(rule.latency_s)
        if share >= 1.0 and not seen.mostly_above(limit_s):
            return None
        others = _others(zone, all_seen, decays)
        others_s = others.median_s
        known = self._zones.get(zone)
        usual_s = None if known is None else known.usual_s
        if usual_s is None and decay is not None and decay.usual_s > 0.0:
            usual_s = decay.usual_s
        enough = others.n >= MIN_SAMPLES
        slow_s = max(limit_s, TIMES * others_s, TIMES * (usual_s or 0.0))
        lasting = seen.span_s >= LEAST_SPAN_S and seen.mostly_above(slow_s)
        slow = lasting and enough and usual_s is not None and not seen.explained
        words = _words(seen, slow_s, usual_s, others_s)
        basis_us = 0 if decay is None else decay.since_us
        turned_down = decay is not None and share < 1.0
        if slow and share > rule.weight and (turned_down or _bearable(zone, ready, decays)):
            times = 1 if decay is None or _forgiven(decay, now_us) else decay.times + 1
            return Turn(zone, rule.weight, "zone_slow", words, basis_us, times, usual_s or 0.0)
        if decay is None or not turned_down or slow:
            return None
        since_s = (now_us - decay.since_us) / 1_000_000
        hold_s = hold_of(decay.times) if share < RAMP[0] or share <= rule.weight else STEP_S
        if since_s < SETTLE_S + hold_s:
            return None
        if seen.n >= MIN_SAMPLES:
            well_s = max(WELL_LIMIT * limit_s, WELL_OTHERS * others_s, WELL_USUAL * (usual_s or 0.0))
            if not enough or seen.median_s > well_s:
                return None
        elif since_s < BLIND_S or not others.n or 2 * seen.above(slow_s) > seen.n:
            return None
        up = next((step for step in RAMP if step > share), 1.0)
        why = "zone_ramp" if up < 1.0 else "zone_back"
        return Turn(zone, up, why, words, basis_us, decay.times, decay.usual_s)


def turned(table: Table, turn: Turn, now_us: int) -> Table | None:
    """The table with a zone's next share; None where it is no longer the one that this was concluded from.

    Zones that have been back for long are forgotten with it.
    """
    known = table.zones.get(turn.zone)
    if (0 if known is None else known.since_us) != turn.basis_us:
        return None
    zones = {zone: decay for zone, decay in table.zones.items() if not _forgiven(decay, now_us)}
    zones[turn.zone] = Decay(turn.share, now_us, turn.why, turn.times, turn.usual_s)
    return replace(table, zones=zones)


def hold_of(times: int) -> int:
    """For how many seconds a zone that was turned down so often in a row stays so, at least."""
    return min(MOST_HOLD_S, HOLD_S << min(10, max(0, times - 1)))


def _forgiven(decay: Decay, now_us: int) -> bool:
    return decay.share >= 1.0 and now_us - decay.since_us > FORGIVEN_S * 1_000_000


def _settled_s(decay: Decay | None) -> int:
    """From which second on answers speak of the share as it is."""
    return 0 if decay is None else decay.since_us // 1_000_000 + SETTLE_S


def _others(zone: str, all_seen: Mapping[str, _Seen], decays: Mapping[str, Decay]) -> _Seen:
    """The zones beside this one that nothing is taken from, together."""
    others = _Seen()
    for name, seen in all_seen.items():
        decay = decays.get(name)
        if name != zone and (decay is None or decay.share >= 1.0):
            others.add(seen.sketch, seen.timed, seen.left)
    return others


def _bearable(zone: str, ready: Mapping[str, int], decays: Mapping[str, Decay]) -> bool:
    """Whether the rest can do without the zone."""
    total = rest = 0
    for name, count in ready.items():
        decay = decays.get(name)
        total += count
        if name != zone and (decay is None or decay.share >= 1.0):
            rest += count
    return rest > 0 and rest >= LEAST_REST * total


def _words(seen: _Seen, slow_s: float, usual_s: float | None, others_s: float) -> str:
    if not seen.n:
        return "no first token was seen"
    usual = "not known" if usual_s is None else f"{usual_s:.2f} s"
    ratio = 100 * seen.above(slow_s) / seen.n if slow_s < inf else 0.0
    return (
        f"first tokens took {seen.median_s:.2f} s at the median of {seen.n} in {seen.span_s} s, {ratio:.0f} % of them "
        f"more than {slow_s:.2f} s; usual {usual}, other zones {others_s:.2f} s"
    )
