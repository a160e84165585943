"""A day of each of the two public LLM traces' shapes, with nothing wrong with any engine: no breaker may open.

    python -m bench.breaker_ab.days                                    both shapes, 24 h, 9 pods; exits 1 on a trip
    python -m bench.breaker_ab.days --shape azure --begin 9 --hours 2  two hours of a morning
    sidecar simulate --policy FILE --trace build/breaker_ab/days/azure-101.csv --format azure --pods 9

A day is made, not copied: no public trace is of the size that one's pods can just carry. It is written in the columns
of the original and read back by `sidecar simulate`'s own reader; engines and request path are those of the experiment.
What is known of the originals, and is in the days:

1. `azure` is Azure's conversation and code services together (AzureLLMInferenceTrace_conv and _code, 2023: 5.6 and
   2.6 requests/s). Both are mixtures of few kinds of prompt (templates: their lengths hardly differ), whose shares
   drift within minutes; the kinds, and that code comes in runs of seconds on the tenths of a second, after silences of
   up to two minutes, are from some 850 rows of each file, of its beginning and its middle. Medians and means are those
   published (prompt 1,020 and 1,500, answer 129 and 13 tokens: Splitwise, ISCA 2024). The day's rhythm is that of the
   week of 2024 as its paper gives it (DynamoLLM): busiest to quietest hour 3.3 for conversation, about 35 for code, so
   that prompts of the day differ from prompts of the night.
2. `burstgpt` has BurstGPT_3's columns: whole seconds, 7.3 % of the rows failed (no answer), 4.4 % of a conversation,
   which has a session. Gaps are of a Gamma distribution whose variation changes with the hour, answers have two modes,
   means are 621 prompt and 126 answer tokens (Wang et al. 2024). Its rows were not at hand, only these figures.

Chosen, as nothing was found: how fast rates drift within minutes, the hours of BurstGPT's day, and its programs, which
send prompts of one length for some minutes and at night multiply the load. A peak hour that takes more than `MOST_USED`
of what the engines can do is refused: a fleet that is too small is no healthy one.
"""

import argparse
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from pathlib import Path
from random import Random
from time import process_time
from uuid import UUID

import msgspec

from bench.breaker_ab.arms import ARMS, OURS
from bench.breaker_ab.stats import percent
from sidecar.policy.schema import Service
from sidecar.simulate.clock import VirtualClock
from sidecar.simulate.ledger import CLOSED, OPEN, Measures
from sidecar.simulate.method import Context, Method, keys_of
from sidecar.simulate.product import Product
from sidecar.simulate.profile import CHAT
from sidecar.simulate.run import run
from sidecar.simulate.trace import Row, Trace
from sidecar.simulate.workload import rng_of
from sidecar.simulate.world import World

OUT = Path(__file__).parents[2] / "build" / "breaker_ab" / "days"
DAY_HOURS, HOUR_S = 24, 3600
MOST_USED = 0.7
DRAIN_S = 120.0
"""A thousand tokens of a full engine take a minute."""

CODE_SHARE = 0.31
"""8,819 of the 28,185 rows of Azure's two files."""
CONVERSATION_HOURS = (
    *(0.62, 0.56, 0.52, 0.53, 0.56, 0.62, 0.72, 0.86, 1.05, 1.3, 1.5, 1.62),
    *(1.68, 1.7, 1.66, 1.55, 1.4, 1.25, 1.1, 0.98, 0.9, 0.82, 0.75, 0.68),
)
CODE_HOURS = (
    *(0.12, 0.09, 0.08, 0.08, 0.1, 0.15, 0.3, 0.6, 1.2, 2.0, 2.6, 2.75),
    *(2.4, 2.3, 2.7, 2.6, 2.2, 1.6, 1.0, 0.6, 0.45, 0.35, 0.25, 0.17),
)
BURSTGPT_HOURS = (
    *(0.5, 0.36, 0.26, 0.2, 0.2, 0.24, 0.35, 0.55, 0.9, 1.4, 1.7, 1.75),
    *(1.5, 1.55, 1.85, 1.95, 1.9, 1.7, 1.35, 1.15, 1.1, 1.05, 0.9, 0.7),
)
RUN_S, SILENCE_S = 8.0, 17.0
"""Runs of the code service and what is between them, both exponential."""
TENTH_S, LATE_S, LATEST_S = 0.1, 0.002, 0.05
"""Its requests are on the tenths of a second, and a little after."""
CONVERSATION_LOG, GPT_4, FAILED = 0.044, 0.148, 0.0726
"""Shares of BurstGPT_3's 5,344,021 rows."""
CONTINUED, OPEN_CONVERSATIONS = 0.7, 200
PROGRAMS_PER_HOUR, PROGRAM_S = 1.5, 180.0
BURSTGPT_DAY = 225
"""The first of BurstGPT_3, as it counts."""
AZURE_DAY = datetime(2023, 11, 16, tzinfo=UTC)

Hours = Sequence[float]


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of request: its share, medians in tokens with the sigma of their logarithm, the most there is."""

    share: float
    prompt: float
    prompt_sigma: float
    output: float
    output_sigma: float
    most: int = 4200

    def draw(self, rng: Random) -> tuple[int, int]:
        """Prompt and output tokens, at least 1."""
        prompt = self.prompt * exp(self.prompt_sigma * rng.gauss(0.0, 1.0))
        output = self.output * exp(self.output_sigma * rng.gauss(0.0, 1.0))
        return max(1, min(self.most, int(prompt))), max(1, min(1000, int(output)))


CONVERSATION = (
    Kind(0.31, 405, 0.045, 100, 0.25),
    Kind(0.27, 1055, 0.07, 402, 0.09),
    Kind(0.06, 4082, 0.003, 50, 0.45),
    Kind(0.05, 1314, 0.004, 160, 0.2),
    Kind(0.11, 198, 0.07, 175, 0.25),
    Kind(0.03, 40, 0.9, 160, 0.25),
    Kind(0.03, 160, 0.6, 15, 0.15),
    Kind(0.13, 1900, 0.35, 80, 0.4),
    Kind(0.01, 5500, 0.3, 300, 0.5, 14_050),
)
BURSTGPT_API = (
    Kind(0.65, 330, 1.1, 18, 0.6, 16_000),
    Kind(0.35, 370, 1.1, 270, 0.5, 16_000),
)
BURSTGPT_CONVERSATION = (Kind(1.0, 300, 1.0, 180, 0.8, 16_000),)

CODE_PROMPT = ((0.0, 14), (0.1, 75), (0.22, 190), (0.42, 950), (0.6, 1800), (0.75, 2500), (0.92, 5200), (1.0, 7437))
CODE_OUTPUT = ((0.0, 6), (0.15, 7), (0.35, 10), (0.5, 13), (0.7, 20), (0.85, 35), (0.93, 70), (0.98, 150), (1.0, 700))
"""Quantiles of what was read; one in 20 is cut at the model's 7,436 tokens."""
CODE_CUT, CODE_CUT_SHARE = 7436, 0.05


class Drift:
    """A factor that wanders about 1: the exponential of an Ornstein-Uhlenbeck process, stepped once a second."""

    __slots__ = ("_keep", "_level", "_rng", "_sigma", "_step")

    def __init__(self, rng: Random, sigma: float, memory_s: float) -> None:
        self._rng = rng
        self._sigma = sigma
        self._keep = exp(-1.0 / memory_s)
        self._step = sigma * sqrt(1.0 - self._keep * self._keep)
        self._level = rng.gauss(0.0, sigma)

    def next(self) -> float:
        self._level = self._level * self._keep + self._rng.gauss(0.0, self._step)
        return exp(self._level - self._sigma * self._sigma / 2.0)


class Gaps:
    """Arrivals whose gaps are of a Gamma distribution, `variation` their deviation over their mean (1: Poisson)."""

    __slots__ = ("_left", "_rng", "variation")

    def __init__(self, rng: Random, variation: float = 1.0) -> None:
        self._rng = rng
        self.variation = variation
        self._left = rng.random()

    def within(self, second: int, rate: float) -> Iterator[float]:
        """The moments of one second that has `rate` arrivals in the mean; the gap goes on into the next."""
        left, used = self._left, 0.0
        while used + left < rate:
            used += left
            yield second + used / rate
            shape = 1.0 / (self.variation * self.variation)
            left = self._rng.gammavariate(shape, 1.0 / shape)
        self._left = left - (rate - used)


class Mixture:
    """Kinds whose shares drift."""

    __slots__ = ("_drifts", "_kinds", "_rng", "_sums")

    def __init__(self, rng: Random, kinds: Sequence[Kind], sigma: float, memory_s: float) -> None:
        self._rng = rng
        self._kinds = kinds
        self._drifts = [Drift(rng, sigma, memory_s) for _ in kinds]
        self._sums: list[float] = []
        self.step()

    def step(self) -> None:
        """A second went by."""
        pairs = zip(self._kinds, self._drifts, strict=True)
        self._sums = [*accumulate(kind.share * drift.next() for kind, drift in pairs)]

    def draw(self) -> tuple[int, int]:
        at = bisect_right(self._sums, self._rng.random() * self._sums[-1])
        return self._kinds[min(at, len(self._kinds) - 1)].draw(self._rng)


def at_hour(hours: Hours, second: float) -> float:
    """The rate at a second of the day, 1 in the day's mean; hours are their middles, between them it is a line."""
    place = second / HOUR_S - 0.5
    index = int(place // 1)
    part = place - index
    mean = sum(hours) / len(hours)
    return (hours[index % DAY_HOURS] * (1.0 - part) + hours[(index + 1) % DAY_HOURS] * part) / mean


def of_quantiles(table: Sequence[tuple[float, float]], share: float) -> int:
    """The value at a share (0-1) of a table of quantiles; between two it is a line in the logarithm."""
    for (low, least), (high, most) in pairwise(table):
        if share < high:
            return round(exp(log(least) + (log(most) - log(least)) * (share - low) / (high - low)))
    return int(table[-1][1])


def code_tokens(rng: Random) -> tuple[int, int]:
    """Prompt and output tokens of a request for code."""
    prompt = CODE_CUT if rng.random() < CODE_CUT_SHARE else of_quantiles(CODE_PROMPT, rng.random())
    return prompt, of_quantiles(CODE_OUTPUT, rng.random())


def azure(seed: int, rate: float, begin: int, end: int) -> Iterator[Row]:
    """Conversation and code from one second of the day to another, `rate` a second in the day's mean."""
    rng = rng_of(seed, "azure")
    talk, talk_drift, mixture = Gaps(rng), Drift(rng, 0.12, 300.0), Mixture(rng, CONVERSATION, 0.4, 600.0)
    code, running, until = Gaps(rng), False, begin + rng.expovariate(1.0 / SILENCE_S)
    in_runs = (RUN_S + SILENCE_S) / RUN_S
    for second in range(begin, end):
        mixture.step()
        rows = []
        talk_rate = rate * (1.0 - CODE_SHARE) * at_hour(CONVERSATION_HOURS, second) * talk_drift.next()
        for at in talk.within(second, talk_rate):
            prompt, output = mixture.draw()
            rows.append(Row(at, prompt, output))
        if second >= until:
            running = not running
            until = second + rng.expovariate(1.0 / (RUN_S if running else SILENCE_S))
        if running:
            for at in code.within(second, rate * CODE_SHARE * at_hour(CODE_HOURS, second) * in_runs):
                tenth = int(at / TENTH_S) * TENTH_S
                rows.append(Row(tenth + min(LATEST_S, rng.expovariate(1.0 / LATE_S)), *code_tokens(rng)))
        rows.sort(key=_at)
        yield from rows


def burstgpt(seed: int, rate: float, begin: int, end: int) -> Iterator[Row]:
    """BurstGPT's rows from one second of the day to another, the failed ones with no output, `rate` in the mean."""
    rng = rng_of(seed, "burstgpt")
    gaps, drift = Gaps(rng), Drift(rng, 0.3, 120.0)
    mixture, talk = Mixture(rng, BURSTGPT_API, 0.5, 300.0), Mixture(rng, BURSTGPT_CONVERSATION, 0.1, 300.0)
    program, program_until, program_more = BURSTGPT_API[0], 0.0, 0.0
    conversations: list[tuple[str, int]] = []
    for second in range(begin, end):
        if second % HOUR_S == 0 or second == begin:
            gaps.variation = min(4.0, 1.0 + rng.expovariate(1.0))
        mixture.step()
        now_rate = rate * at_hour(BURSTGPT_HOURS, second) * drift.next()
        if rng.random() < PROGRAMS_PER_HOUR / HOUR_S and second >= program_until:
            program = Kind(1.0, rng.uniform(60.0, 3000.0), 0.05, rng.uniform(5.0, 200.0), 0.3, 16_000)
            program_until, program_more = second + rng.expovariate(1.0 / PROGRAM_S), rate * rng.uniform(0.3, 1.5)
        more = program_more if second < program_until else 0.0
        for at in gaps.within(second, now_rate + more):
            session = ""
            if rng.random() * (now_rate + more) < more:
                prompt, output = program.draw(rng)
            elif rng.random() < CONVERSATION_LOG:
                prompt, output = talk.draw()
                session, prompt = _conversation(rng, conversations, prompt, output)
            else:
                prompt, output = mixture.draw()
            yield Row(float(int(at)), prompt, 0 if rng.random() < FAILED else output, session)


def _conversation(rng: Random, conversations: list[tuple[str, int]], prompt: int, output: int) -> tuple[str, int]:
    """One round of one: its session, and the prompt with what was said before."""
    if conversations and rng.random() < CONTINUED:
        place = rng.randrange(len(conversations))
        session, before = conversations[place]
    else:
        session, before, place = str(UUID(int=rng.getrandbits(128), version=4)), 0, len(conversations)
        if place >= OPEN_CONVERSATIONS:
            place = rng.randrange(place)
    prompt = min(16_000, before + prompt)
    conversations[place : place + 1] = [(session, min(8_000, prompt + output))]
    return session, prompt


def _at(row: Row) -> float:
    return row.at


def _azure_line(row: Row, rng: Random) -> str:
    moment = AZURE_DAY + timedelta(seconds=row.at)
    return f"{moment:%Y-%m-%d %H:%M:%S.%f}0,{row.prompt_tokens},{row.output_tokens}\n"


def _burstgpt_line(row: Row, rng: Random) -> str:
    at = BURSTGPT_DAY * DAY_HOURS * HOUR_S + row.at
    model = "GPT-4" if rng.random() < GPT_4 else "ChatGPT"
    log_type = "Conversation log" if row.session else "API log"
    prompt, output = row.prompt_tokens, row.output_tokens
    elapsed = 1 + output // 25 if output else 0
    return f"{at:.1f},{row.session},{elapsed},{model},{prompt},{output},{prompt + output},{log_type}\n"


@dataclass(frozen=True, slots=True)
class Shape:
    """A public trace: its form as the reader calls it, its columns, what comes when, and how a row is written."""

    form: str
    head: str
    rows: Callable[[int, float, int, int], Iterator[Row]]
    line: Callable[[Row, Random], str]


SHAPES = {
    "azure": Shape("azure", "TIMESTAMP,ContextTokens,GeneratedTokens", azure, _azure_line),
    "burstgpt": Shape(
        "burstgpt",
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        burstgpt,
        _burstgpt_line,
    ),
}


@dataclass(slots=True)
class Demand:
    """What a trace asks of the engines: seconds of a slot per hour, as it takes them when all slots are full."""

    pods: int
    begin_s: int
    end_s: int
    slot_s: list[float] = field(default_factory=lambda: [0.0] * DAY_HOURS)

    def add(self, row: Row) -> None:
        """A row that failed asks for nothing."""
        if row.output_tokens:
            full = CHAT.slots
            prefill_ms = row.prompt_tokens / CHAT.prefill_tokens_per_ms * (1.0 + full / CHAT.prefill_batch)
            self.slot_s[int(row.at) // HOUR_S] += CHAT.step_s(full) * row.output_tokens + prefill_ms / 1000.0

    @property
    def busiest(self) -> float:
        """The share of all that the pods can do that the busiest hour asks for; hours in which nothing came are 0."""
        shares = []
        for hour, slot_s in enumerate(self.slot_s):
            seconds = min(self.end_s, (hour + 1) * HOUR_S) - max(self.begin_s, hour * HOUR_S)
            shares.append(slot_s / (seconds * CHAT.slots * self.pods) if seconds > 0 else 0.0)
        return max(shares)


def write(path: Path, shape: Shape, seed: int, rate: float, pods: int, begin_s: int, end_s: int) -> Demand:
    """Writes a day, or a part of one, for `pods` with `rate` each; the same seed, the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    demand, rng = Demand(pods, begin_s, end_s), rng_of(seed, "columns")
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(shape.head + "\n")
        for row in shape.rows(seed, rate * pods, begin_s, end_s):
            demand.add(row)
            file.write(shape.line(row, rng))
    return demand


class Watch:
    """For how many seconds the detector held its latency evidence back, and why."""

    __slots__ = ("overload_s", "panic_s")

    def __init__(self) -> None:
        self.overload_s = 0
        self.panic_s = 0


class Watched(Product):
    """The product, looked at once a second."""

    __slots__ = ("_watch",)

    def __init__(self, context: Context, service: Service, watch: Watch) -> None:
        super().__init__(context, service, settled=False)
        self._watch = watch

    def tick(self, now: float) -> None:
        super().tick(now)
        detection = self._service.detection
        if detection is not None:
            self._watch.overload_s += detection.normal.overload
            self._watch.panic_s += detection.normal.panic


class Trip(msgspec.Struct, frozen=True):
    """A breaker of an endpoint opened, `at` seconds after the first request; nothing was wrong with it."""

    at: float
    pod: int
    why: str
    evidence: str


class Day(msgspec.Struct, frozen=True):
    """What came of it. `busiest` is the peak hour's share of what the engines can do, `overload_s` of the detector."""

    shape: str
    seed: int
    hours: float
    pods: int
    rate: float
    requests: int
    left_out: int
    busiest: float
    goodput: float | None
    good_rejected: int
    failed: dict[str, int]
    rejected: dict[str, int]
    ttft_p50_s: float | None
    ttft_p999_s: float | None
    overload_s: int
    panic_s: int
    trips: tuple[Trip, ...]
    others_tripped: dict[str, int]
    cpu_s: float

    @property
    def quiet(self) -> bool:
        """Nothing opened that had no reason to, and nothing has one here."""
        return not self.trips and not self.others_tripped


class TooBusyError(Exception):
    """The day asks more of the pods than a healthy fleet is asked."""


def play(
    name: str,
    seed: int,
    *,
    pods: int = 9,
    rate: float = 2.0,
    begin_hour: float = 0.0,
    hours: float = float(DAY_HOURS),
    arm: str = "ours",
    out: Path = OUT,
    told: Callable[[str], None] = lambda line: None,
) -> Day:
    """Makes a day and sends it through the product. TooBusyError if the pods cannot carry it."""
    begun, shape = process_time(), SHAPES[name]
    begin_s = int(begin_hour * HOUR_S)
    end_s = min(DAY_HOURS * HOUR_S, begin_s + int(hours * HOUR_S))
    path = out / f"{name}-{seed}.csv"
    demand = write(path, shape, seed, rate, pods, begin_s, end_s)
    if demand.busiest > MOST_USED:
        raise TooBusyError(f"{name}: the busiest hour takes {demand.busiest:.0%} of {pods} pods: lower --rate")
    trace = Trace(path, shape.form)
    extent, watch, service = trace.extent, Watch(), ARMS[arm].service({})
    tenths = 0

    def progress(now: float, count: int) -> None:
        nonlocal tenths
        if 10 * count // extent.requests > tenths:
            tenths = 10 * count // extent.requests
            took_s = process_time() - begun
            told(f"{name} {seed}: {10 * tenths} %, {count} requests, {now / HOUR_S:.1f} h, {took_s:.0f} s of CPU")

    def factory(context: Context) -> Method:
        return Watched(context, service, watch)

    measures = run(
        factory,
        trace.arrivals(CHAT, pods, 1.0, seed),
        World(VirtualClock(), CHAT, pods, (), seed),
        seed,
        begin=0.0,
        end=extent.end - extent.begin,
        keys=keys_of(pods),
        drain_s=DRAIN_S,
        progress=progress,
    )
    return Day(
        shape=name,
        seed=seed,
        hours=(end_s - begin_s) / HOUR_S,
        pods=pods,
        rate=rate,
        requests=measures.requests,
        left_out=extent.left_out,
        busiest=round(demand.busiest, 4),
        goodput=measures.goodput,
        good_rejected=measures.good_rejected,
        failed=measures.failed,
        rejected=measures.rejected,
        ttft_p50_s=measures.ttft_s(0.5),
        ttft_p999_s=measures.ttft_s(0.999),
        overload_s=watch.overload_s,
        panic_s=watch.panic_s,
        trips=_trips(measures),
        others_tripped=measures.others_tripped,
        cpu_s=round(process_time() - begun, 1),
    )


def _trips(measures: Measures) -> tuple[Trip, ...]:
    opened = (move for move in measures.moves if move.new == OPEN and move.old == CLOSED)
    return tuple(Trip(move.at, move.pod, move.why, move.evidence) for move in opened)


def said(days: Iterable[Day]) -> Iterator[str]:
    """The days, in lines."""
    for day in days:
        others = "".join(f", {count} of a {scope}" for scope, count in day.others_tripped.items())
        yield (
            f"{day.shape}, seed {day.seed}, {day.hours:g} h, {day.pods} pods: {day.requests} requests, "
            f"busiest hour {day.busiest:.0%}; {len(day.trips)} false trips{others}; "
            f"goodput {percent(day.goodput, 3)} %, {day.good_rejected} good rejected; "
            f"overload {day.overload_s} s, panic {day.panic_s} s; "
            f"failed {sum(day.failed.values())}, rejected {sum(day.rejected.values())}; {day.cpu_s:.0f} s of CPU"
        )
        for trip in day.trips:
            yield f"  {trip.at:.1f} s, pod {trip.pod}, {trip.why}: {trip.evidence}"


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    days = []
    for name in [args.shape] if args.shape else [*SHAPES]:
        try:
            day = play(
                name,
                args.seed,
                pods=args.pods,
                rate=args.rate,
                begin_hour=args.begin,
                hours=args.hours,
                arm=args.arm,
                out=args.out,
                told=lambda line: print(line, file=sys.stderr, flush=True),
            )
        except TooBusyError as exc:
            print(f"days: {exc}", file=sys.stderr)
            return 2
        days.append(day)
        if not args.json:
            print("\n".join(said([day])), flush=True)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(days), indent=1).decode())
    return 0 if all(day.quiet for day in days) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.breaker_ab.days",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=[*SHAPES], help="default: both")
    add("--seed", type=int, default=101)
    add("--hours", type=float, default=float(DAY_HOURS))
    add("--begin", type=float, default=0.0, metavar="HOUR", help="of the day; 0")
    add("--pods", type=int, default=9)
    add("--rate", type=float, default=2.0, help="requests/s and pod in the day's mean; 2")
    add("--arm", choices=[arm.name for arm in OURS], default="ours", help="of the experiment; ours")
    add("--out", type=Path, default=OUT, metavar="DIR", help="where the traces are kept")
    add("--json", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
