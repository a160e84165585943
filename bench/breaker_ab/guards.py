"""The rules to beat, each as one small state machine per pod: what opens it, what tries it, what closes it.

They are written after their projects' documentation, with the documented defaults, and take `now` as an argument like
ours. All of them see the same: a request's time to first token when it comes, and its end. What a project does not say
(how to read "recent", how many trials) is said here beside the number.

```
closed --tripped--> open --waited--> half_open --trials good--> closed
                      ^---------------trials bad---'              (Envoy has no half_open: it lets a pod back in)
```
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import nlargest
from random import Random
from statistics import fmean, pstdev

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"

Moved = Callable[[int, str, str, float, str], None]
"""pod, old, new, at, why."""


class Guard:
    """One pod's breaker. A permit is the generation it was given in: what comes of an older one changes nothing."""

    __slots__ = (
        "_at_once",
        "_bad",
        "_done",
        "_handed",
        "_moved",
        "_out",
        "_slow",
        "_trials",
        "generation",
        "pod",
        "state",
        "until",
    )

    def __init__(self, pod: int, moved: Moved, *, trials: int = 1, at_once: int = 1) -> None:
        """`trials` results decide whether it closes, of which `at_once` may be under way."""
        self.pod = pod
        self._trials = trials
        self._at_once = at_once
        self.state = CLOSED
        self.generation = 0
        self.until = 0.0
        self._moved = moved
        self._restart()

    def admits(self, now: float) -> bool:
        if self.state is CLOSED:
            return True
        if self.state is OPEN:
            return now >= self.until
        return self._out < self._at_once and self._handed < self._trials

    def sent(self, now: float) -> int:
        """A request goes to this pod, which admitted it."""
        if self.state is OPEN and now >= self.until:
            self._move(HALF_OPEN, now, "waited")
        if self.state is HALF_OPEN:
            self._handed += 1
            self._out += 1
        return self.generation

    def first(self, permit: int, now: float, ttft_s: float) -> None:
        """The first token came."""
        if permit == self.generation and self.state is CLOSED:
            self.answered(now, ttft_s)

    def ended(self, permit: int, now: float, ok: bool, ttft_s: float | None, took_s: float) -> None:
        """The request ended, `took_s` after it was sent; `ttft_s` None: without a first token."""
        if permit != self.generation:
            return
        if self.state is CLOSED:
            self.judged(now, ok, ttft_s, took_s)
        elif self.state is HALF_OPEN:
            self._out -= 1
            self._done += 1
            self._bad += not ok
            self._slow += ttft_s is not None and self.too_slow(ttft_s)
            if self._done >= self._trials:
                if self.passed(self._done, self._bad, self._slow):
                    self._move(CLOSED, now, f"{self._done - self._bad} of {self._done} trials good")
                else:
                    self.trip(now, f"trials: {self._bad} failed, {self._slow} slow, of {self._done}")

    def trip(self, now: float, why: str) -> None:
        self.until = now + self.wait_s(self.state is HALF_OPEN)
        self._move(OPEN, now, why)

    # What a rule says:

    def answered(self, now: float, ttft_s: float) -> None:
        """A first token, while closed."""

    def judged(self, now: float, ok: bool, ttft_s: float | None, took_s: float) -> None:
        """An end, while closed."""

    def tick(self, now: float) -> None:
        """Once a second."""

    def too_slow(self, ttft_s: float) -> bool:
        return False

    def passed(self, done: int, bad: int, slow: int) -> bool:
        """Whether the trials close it."""
        return bad + slow == 0

    def wait_s(self, again: bool) -> float:
        """How long it opens; `again`: trials failed."""
        return 30.0

    def _move(self, new: str, now: float, why: str) -> None:
        old, self.state = self.state, new
        self.generation += 1
        self._restart()
        self._moved(self.pod, old, new, now, why)

    def _restart(self) -> None:
        self._handed = self._out = self._done = self._bad = self._slow = 0


class Formula(Guard):
    """tau = mu99.9 + kappa * sigma99.9, or a fixed tau: open when P99.9 > tau and recent failures > 3.

    As the idea has it (../shared/design/breaker.md): P99.9 of 60 s, looked at each second; mu and sigma of its last
    300 values, after 30 of them. "Recent" is those 60 s. Half-open when it was open > 30 s, and the success rate that
    closes it (> 0.95) is that of 20 trials, 5 at once: it names no numbers for these.
    `slow_counts`: a first token after tau is a failure as well.
    """

    __slots__ = ("_failures", "_kappa", "_p999s", "_slow_counts", "_tau_s", "_times")

    WINDOW_S, SERIES, ENOUGH, FAILURES = 60.0, 300, 30, 3

    def __init__(
        self, pod: int, moved: Moved, *, fixed_s: float = 0.0, kappa: float = 0.0, slow_counts: bool = False
    ) -> None:
        super().__init__(pod, moved, trials=20, at_once=5)
        self._kappa = kappa
        self._tau_s = fixed_s or float("inf")
        self._slow_counts = slow_counts
        self._times: deque[tuple[float, float]] = deque()
        self._failures: deque[float] = deque()
        self._p999s: deque[float] = deque(maxlen=self.SERIES)

    def answered(self, now: float, ttft_s: float) -> None:
        self._times.append((now, ttft_s))
        if self._slow_counts and self.too_slow(ttft_s):
            self._failures.append(now)

    def judged(self, now: float, ok: bool, ttft_s: float | None, took_s: float) -> None:
        if ttft_s is None:
            self._times.append((now, took_s))
        if not ok:
            self._failures.append(now)

    def tick(self, now: float) -> None:
        if self.state is not CLOSED:
            return
        times, failures, oldest = self._times, self._failures, now - self.WINDOW_S
        while times and times[0][0] < oldest:
            times.popleft()
        while failures and failures[0] < oldest:
            failures.popleft()
        if not times:
            return
        above = len(times) - int(0.999 * len(times))
        p999 = nlargest(above, (time for _, time in times))[-1] if above > 1 else max(time for _, time in times)
        if self._kappa:
            if len(self._p999s) >= self.ENOUGH:
                self._tau_s = fmean(self._p999s) + self._kappa * pstdev(self._p999s)
            self._p999s.append(p999)
        if p999 > self._tau_s and len(failures) > self.FAILURES:
            times.clear()
            count = len(failures)
            failures.clear()
            self.trip(now, f"P99.9 {p999:.3f} s > {self._tau_s:.3f} s and {count} failures")

    def too_slow(self, ttft_s: float) -> bool:
        return ttft_s > self._tau_s

    def passed(self, done: int, bad: int, slow: int) -> bool:
        return done - bad - (slow if self._slow_counts else 0) > 0.95 * done


class Resilience4j(Guard):
    """A count window, a failure rate and a rate of slow calls; then a wait, then trials judged by the same rates.

    Defaults: https://resilience4j.readme.io/docs/circuitbreaker - window 100 calls, at least 100 of them, failures
    50 %, slow calls 100 % at 60 s, wait 60 s, 10 calls permitted half-open. A call's duration is its first token's
    here: to a stream's whole duration no threshold fits.
    """

    __slots__ = ("_calls", "_failed", "_failed_ratio", "_late", "_late_ratio", "_least", "_slow_s", "_wait_s")

    def __init__(
        self,
        pod: int,
        moved: Moved,
        *,
        window: int = 100,
        least: int = 100,
        failed_ratio: float = 0.5,
        slow_s: float = 60.0,
        slow_ratio: float = 1.0,
        wait_s: float = 60.0,
        permitted: int = 10,
    ) -> None:
        super().__init__(pod, moved, trials=permitted, at_once=permitted)
        self._calls: deque[tuple[bool, bool]] = deque(maxlen=window)
        self._least = least
        self._failed_ratio = failed_ratio
        self._late_ratio = slow_ratio
        self._slow_s = slow_s
        self._wait_s = wait_s
        self._failed = self._late = 0

    def judged(self, now: float, ok: bool, ttft_s: float | None, took_s: float) -> None:
        calls = self._calls
        if len(calls) == calls.maxlen:
            failed, late = calls[0]
            self._failed -= failed
            self._late -= late
        call = (not ok, self.too_slow(took_s if ttft_s is None else ttft_s))
        calls.append(call)
        self._failed += call[0]
        self._late += call[1]
        count = len(calls)
        if count >= self._least and (
            self._failed >= self._failed_ratio * count or self._late >= self._late_ratio * count
        ):
            why = f"{self._failed} failed, {self._late} slow, of {count}"
            calls.clear()
            self._failed = self._late = 0
            self.trip(now, why)

    def too_slow(self, ttft_s: float) -> bool:
        return ttft_s > self._slow_s

    def passed(self, done: int, bad: int, slow: int) -> bool:
        return bad < self._failed_ratio * done and slow < self._late_ratio * done

    def wait_s(self, again: bool) -> float:
        return self._wait_s


class Linkerd(Guard):
    """Consecutive failures, then a back-off with jitter, then one trial.

    Defaults: https://linkerd.io/2/reference/circuit-breaking/ - 7 failures, 1 s to 60 s, jitter 0.5. Linkerd knows
    no slowness; `slow_s` gives it what a route's timeout would.
    """

    __slots__ = ("_back_off_s", "_chance", "_failures", "_row", "_slow_s")

    LEAST_S, MOST_S, JITTER = 1.0, 60.0, 0.5

    def __init__(
        self, pod: int, moved: Moved, chance: Random, *, failures: int = 7, slow_s: float = float("inf")
    ) -> None:
        super().__init__(pod, moved)
        self._chance = chance
        self._failures = failures
        self._slow_s = slow_s
        self._row = 0
        self._back_off_s = self.LEAST_S

    def judged(self, now: float, ok: bool, ttft_s: float | None, took_s: float) -> None:
        if ok and (ttft_s is None or not self.too_slow(ttft_s)):
            self._row = 0
            return
        self._row += 1
        if self._row >= self._failures:
            self._row = 0
            self.trip(now, f"{self._failures} failures in a row")

    def too_slow(self, ttft_s: float) -> bool:
        return ttft_s > self._slow_s

    def wait_s(self, again: bool) -> float:
        self._back_off_s = min(self.MOST_S, 2 * self._back_off_s) if again else self.LEAST_S
        return self._back_off_s * (1 + self.JITTER * self._chance.random())


class Alarms(Guard):
    """A detector of extremes says which first token is one; `needed` of them or failures in `SPAN` requests open it.

    The papers end at the alarm. Open for 10 s, then 3 good trials in a row, is ours, as is counting: opening at the
    first alarm, each of which is false with probability q, opens a pod every few minutes.
    """

    __slots__ = ("_alarms", "_detector", "_needed")

    SPAN, OPEN_S = 20, 10.0

    def __init__(self, pod: int, moved: Moved, detector: "Detector", *, needed: int) -> None:
        super().__init__(pod, moved, trials=3)
        self._detector = detector
        self._needed = needed
        self._alarms: deque[bool] = deque(maxlen=self.SPAN)

    def answered(self, now: float, ttft_s: float) -> None:
        if self._detector.extreme(ttft_s):
            self._alarm(now, f"first token after {ttft_s:.3f} s, extreme is {self._detector.limit:.3f} s")
        else:
            self._alarms.append(False)

    def judged(self, now: float, ok: bool, ttft_s: float | None, took_s: float) -> None:
        if not ok:
            self._alarm(now, "failed")

    def too_slow(self, ttft_s: float) -> bool:
        return ttft_s > self._detector.limit

    def wait_s(self, again: bool) -> float:
        return self.OPEN_S

    def _alarm(self, now: float, why: str) -> None:
        alarms = self._alarms
        alarms.append(True)
        if sum(alarms) >= self._needed:
            alarms.clear()
            self.trip(now, f"{self._needed} alarms in {self.SPAN} requests, the last: {why}")


class Detector:
    """What `Alarms` asks."""

    limit = float("inf")

    def extreme(self, value: float) -> bool:
        """Whether `value` is one; learns from it if not."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ejection:
    """Envoy's numbers, named as there; ratios for its percentages.

    Defaults: envoyproxy.io/docs/envoy/latest/api-v3/config/cluster/v3/outlier_detection.proto. Panic: when fewer than
    half are healthy, all are used (healthy_panic_threshold). `slow_s` is ours: Envoy knows no slowness.
    """

    consecutive_5xx: int = 5
    interval_s: float = 10.0
    base_ejection_s: float = 30.0
    max_ejection_s: float = 300.0
    max_ejection_ratio: float = 0.10
    success_rate_minimum_hosts: int = 5
    success_rate_request_volume: int = 100
    success_rate_stdev_factor: float = 1.9
    failure_ratio: float = 1.01
    failure_minimum_hosts: int = 5
    failure_request_volume: int = 50
    panic_ratio: float = 0.5
    slow_s: float = float("inf")


class Host(Guard):
    """A pod under Envoy's outlier detection: closed or ejected; the sweep lets it back in."""

    __slots__ = ("ejections", "failed", "row", "rules", "sweep", "total")

    def __init__(self, pod: int, moved: Moved, sweep: "Sweep", rules: Ejection) -> None:
        super().__init__(pod, moved)
        self.sweep = sweep
        self.rules = rules
        self.row = self.total = self.failed = self.ejections = 0

    def admits(self, now: float) -> bool:
        return self.state is CLOSED or self.sweep.panics

    def sent(self, now: float) -> int:
        return self.generation

    def judged(self, now: float, ok: bool, ttft_s: float | None, took_s: float) -> None:
        good = ok and (ttft_s is None or ttft_s <= self.rules.slow_s)
        self.total += 1
        self.failed += not good
        self.row = 0 if good else self.row + 1
        if self.row and self.row % self.rules.consecutive_5xx == 0:
            self.sweep.eject(self, now, f"{self.row} consecutive 5xx")

    def wait_s(self, again: bool) -> float:
        return min(self.rules.max_ejection_s, self.rules.base_ejection_s * self.ejections)

    def back(self, now: float) -> None:
        self.row = 0
        self._move(CLOSED, now, "ejection time over")


class Group:
    """The breakers of all pods, as one sidecar has them."""

    def __init__(self, guards: list[Guard]) -> None:
        self.guards = guards

    def tick(self, now: float) -> None:
        """Once a second."""
        for guard in self.guards:
            guard.tick(now)


class Sweep(Group):
    """Envoy's outlier detection of one cluster."""

    def __init__(self, pods: int, moved: Moved, rules: Ejection) -> None:
        self.rules = rules
        self.hosts = [Host(pod, moved, self, rules) for pod in range(pods)]
        super().__init__([*self.hosts])
        self.panics = False
        self._next: float | None = None

    def eject(self, host: Host, now: float, why: str) -> None:
        """Ejects unless too many are: one always may be, whatever the ratio."""
        ejected = sum(each.state is OPEN for each in self.hosts)
        if host.state is OPEN or (ejected and ejected >= self.rules.max_ejection_ratio * len(self.hosts)):
            return
        host.ejections += 1
        host.trip(now, why)
        self._count()

    def tick(self, now: float) -> None:
        if self._next is None:
            self._next = now + self.rules.interval_s
        if now < self._next:
            return
        self._next += self.rules.interval_s
        for host in self.hosts:
            if host.state is OPEN:
                if now >= host.until:
                    host.back(now)
            elif host.ejections:
                host.ejections -= 1
        self._rates(now)
        for host in self.hosts:
            host.total = host.failed = 0
        self._count()

    def _rates(self, now: float) -> None:
        rules = self.rules
        enough = [h for h in self.hosts if h.state is CLOSED and h.total >= rules.success_rate_request_volume]
        if len(enough) >= rules.success_rate_minimum_hosts:
            rates = [1 - host.failed / host.total for host in enough]
            limit = fmean(rates) - rules.success_rate_stdev_factor * pstdev(rates)
            for host, rate in zip(enough, rates, strict=True):
                if rate < limit:
                    self.eject(host, now, f"success rate {rate:.3f} < {limit:.3f}")
        enough = [h for h in self.hosts if h.state is CLOSED and h.total >= rules.failure_request_volume]
        if len(enough) >= rules.failure_minimum_hosts:
            for host in enough:
                if host.failed >= rules.failure_ratio * host.total:
                    self.eject(host, now, f"{host.failed} of {host.total} failed")

    def _count(self) -> None:
        closed = sum(host.state is CLOSED for host in self.hosts)
        self.panics = closed < self.rules.panic_ratio * len(self.hosts)
