"""What the pictures show, decided here and drawn by bench/breaker_ab/draw.py in an environment that has matplotlib.

1. `breaker-arms.png`: false trips against interception, and goodput against interception; a dot per arm.
2. `breaker-incidents.png`: one run of each scenario as ours sees it: a row per pod with its faults, the states of its
   breaker, and a stroke for every request that went wrong there.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.breaker_ab.arms import ARMS
from bench.breaker_ab.report import settings, summed
from bench.breaker_ab.rows import Row
from bench.breaker_ab.scenarios import BEGIN_S, SCENARIOS, THIRTEEN
from bench.setup import ROOT
from sidecar.simulate.fault import Fault
from sidecar.simulate.ledger import Ledger
from sidecar.simulate.method import Context, Factory, Method
from sidecar.simulate.profile import PROFILES, slo_s
from sidecar.simulate.run import simulate
from sidecar.simulate.workload import Arrival, rng_of
from sidecar.simulate.world import Flight

DRAW = Path(__file__).parent / "draw.py"
LIMIT_S = 120
SHOWN = "ours"
LEFT_OUT = frozenset(("none",))


def draw(rows: Sequence[Row], folder: Path, adaptive: Mapping[str, Any]) -> None:
    """Of the first setting in `rows`. RuntimeError if it cannot be drawn, with the reason."""
    python = ROOT / "picture" / "bin" / "python"
    if not python.exists():
        raise RuntimeError("matplotlib is not there; python -m bench.setup picture")
    setting = settings(rows)[0]
    ours = [row for row in rows if row.task.setting == setting]
    seeds = sorted({row.task.seed for row in ours})
    subtitle = f"{setting}; {len(seeds)} seeds, {len({row.task.scenario for row in ours})} scenarios"
    _draw(python, folder / "breaker-arms.png", arms(ours), subtitle, columns=2, width=7.2, height=6.2)
    if any(row.task.arm == SHOWN for row in ours):
        names = [name for name in SCENARIOS if any(row.task.scenario == name for row in ours)]
        panels = [incident(name, seeds[0], setting, adaptive) for name in names]
        words = (
            f"{setting}; seed {seeds[0]}. Rows are pods: grey a fault, red open, amber half-open, strokes requests "
            "that failed or missed the SLO there."
        )
        _draw(python, folder / "breaker-incidents.png", panels, words, columns=3, width=6.0, height=2.5)


def arms(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Two panels of dots. An arm that never trips has no share of false trips, and no dot in the first."""
    false, good = [], []
    for arm in [name for name in ARMS if any(row.task.arm == name for row in rows)]:
        m = summed(row for row in rows if row.task.arm == arm and row.task.scenario in THIRTEEN)
        i1, d2, goodput = m.all_kinds.i1, m.d2, m.goodput
        if i1 is None or goodput is None:
            continue
        dot = {"arm": arm, "ours": ARMS[arm].ours, "y": 100 * i1}
        if d2 is not None:
            false.append({**dot, "x": 100 * d2})
        if arm not in LEFT_OUT:
            good.append({**dot, "x": 100 * (1 - goodput)})
    panel = {"kind": "dots", "y": "affected requests that never touched the fault (I1), %", "log": True}
    return [
        {
            **panel,
            "title": "False trips against interception",
            "x": "false trips of all trips (D2), %",
            "dots": false,
            "linear": 1.0,
            "span_x": [-0.15, 200],
            "span_y": [-3, 103],
        },
        {
            **panel,
            "title": "What it costs and gains all requests",
            "x": "requests not served within the SLO, %",
            "dots": good,
            "linear": 0.1,
            "span_x": [0.1, 200],
            "span_y": [-3, 103],
        },
    ]


class Watched(Ledger):
    """Also keeps when and where requests went wrong."""

    def __init__(self, ledger: Ledger, bad: list[tuple[float, int]]) -> None:
        self.ledger = ledger
        self.bad = bad
        self.last: dict[int, int] = {}

    def touched(self, arrival: Arrival, flight: Flight) -> None:
        self.last[arrival.id] = flight.pod.index
        self.ledger.touched(arrival, flight)

    def served(self, arrival: Arrival, ttft_s: float) -> None:
        pod = self.last.pop(arrival.id, arrival.user_pod)
        if ttft_s > slo_s(arrival.prompt_tokens):
            self.bad.append((arrival.at, pod))
        self.ledger.served(arrival, ttft_s)

    def failed(self, arrival: Arrival, why: str) -> None:
        self.bad.append((arrival.at, self.last.pop(arrival.id, arrival.user_pod)))
        self.ledger.failed(arrival, why)

    def rejected(self, arrival: Arrival, why: str) -> None:
        self.bad.append((arrival.at, arrival.user_pod))
        self.ledger.rejected(arrival, why)

    def moved(
        self, pod: int, old: str, new: str, at: float, why: str = "", evidence: str = "", sidecar: int = 0
    ) -> None:
        self.ledger.moved(pod, old, new, at, why, evidence, sidecar)

    def tripped(self, scope: str) -> None:
        self.ledger.tripped(scope)


def watching(factory: Factory, bad: list[tuple[float, int]], faults: list[Fault]) -> Factory:
    """The same method, whose reports are looked at on their way to the ledger."""

    def make(context: Context) -> Method:
        faults[:] = context.world.faults
        watched = Watched(context.ledger, bad)
        return factory(
            Context(context.clock, context.world, watched, context.pods, context.seed, context.number, context.peers)
        )

    return make


def incident(name: str, seed: int, setting: Any, adaptive: Mapping[str, Any]) -> dict[str, Any]:
    """One run of ours as a panel."""
    bad: list[tuple[float, int]] = []
    faults: list[Fault] = []
    scenario = SCENARIOS[name]
    measures = simulate(
        watching(ARMS[SHOWN].factory(adaptive, pooled=setting.pooled), bad, faults),
        scenario,
        seed,
        pods=setting.pods,
        sidecars=setting.sidecars,
        rate=setting.rate,
        profile=PROFILES[setting.profile],
    )
    bent = scenario.modifiers(_chance(seed, name, setting.pods)) if scenario.modifiers is not None else []
    spans, since = [], dict[int, tuple[str, float]]()
    for move in measures.moves:
        if move.sidecar:
            continue
        state, begin = since.pop(move.pod, ("closed", 0.0))
        if state != "closed":
            spans.append({"pod": move.pod, "state": state, "begin": begin, "end": move.at})
        since[move.pod] = (move.new, move.at)
    spans += [
        {"pod": pod, "state": state, "begin": begin, "end": scenario.seconds}
        for pod, (state, begin) in since.items()
        if state != "closed"
    ]
    words = "".join(
        f", {f'{each.strength:.0%}' if each.kind == 'tenant' else f'x{each.strength:.1f}'}"
        f" at {each.begin - BEGIN_S:.0f}-{each.end - BEGIN_S:.0f} s"
        for each in bent
    )
    i1 = measures.all_kinds.i1
    words += f"; I1 {100 * i1:.1f} %" if i1 is not None else ""
    return {
        "kind": "timeline",
        "title": f"{name}{words}, {measures.false_trips} false",
        "pods": setting.pods,
        "begin": 0.0,
        "end": scenario.seconds,
        "faults": [
            {"pods": fault.pods, "begin": fault.begin - BEGIN_S, "end": fault.until - BEGIN_S} for fault in faults
        ],
        "spans": spans,
        "bad": [{"at": at - BEGIN_S, "pod": pod} for at, pod in bad if at >= BEGIN_S],
    }


def _chance(seed: int, name: str, pods: int) -> Any:
    """Where the run's chance stands when it draws the modifiers: after the faults."""
    chance, faults = rng_of(seed, name), SCENARIOS[name].faults
    if faults is not None:
        faults(chance, pods)
    return chance


def _draw(
    python: Path,
    picture: Path,
    panels: list[dict[str, Any]],
    subtitle: str,
    *,
    columns: int,
    width: float,
    height: float,
) -> None:
    spec = {"panels": panels, "subtitle": subtitle, "columns": columns, "width": width, "height": height}
    done = subprocess.run(
        [str(python), str(DRAW), str(picture)],
        input=json.dumps(spec),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{picture.name}: {done.stderr.strip()[-500:]}")
