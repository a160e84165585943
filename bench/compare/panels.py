"""What the picture shows: panels of bars, decided here and drawn by bench/draw.py."""

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.compare.results import Results, Spread
from bench.setup import ROOT

LEFT_OUT = frozenset(("direct", "sidecar-log", "envoy-log"))
DRAW = Path(__file__).parents[1] / "draw.py"


@dataclass(frozen=True)
class Bar:
    """One arm's median and range."""

    arm: str
    median: float
    least: float
    most: float


@dataclass(frozen=True)
class Panel:
    """One figure of all arms. Bars over `cap` are cut there and carry their number: one slow arm must not flatten the
    others. A light bar behind a bar is its p99."""

    title: str
    unit: str
    bars: list[Bar]
    behind: list[Bar] = field(default_factory=list)
    cap: float = 0.0


def draw(results: Results, picture: Path) -> None:
    """RuntimeError if it cannot be drawn, with the reason."""
    python = ROOT / "picture" / "bin" / "python"
    spec = json.dumps({"subtitle": _subtitle(results), "panels": [asdict(panel) for panel in panels(results)]})
    done = subprocess.run(
        [str(python), str(DRAW), str(picture)], input=spec, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the picture: {done.stderr.strip()[-500:]}")


def panels(results: Results) -> list[Panel]:
    arms = [arm for arm in results.arms if arm not in LEFT_OUT]

    def bars(figure: Callable[[str], Spread | None]) -> list[Bar]:
        found = {arm: figure(arm) for arm in arms}
        return [Bar(arm, s.median, s.least, s.most) for arm, s in found.items() if s is not None]

    def cpu(title: str, kind: str, unit: str) -> Panel:
        return _capped(title, unit, bars(lambda arm: results.spread(arm, kind, lambda s: s.us)))

    def added(title: str, kind: str, time: str) -> Panel:
        p50 = bars(lambda arm: results.added_us(arm, kind, time, "p50"))
        p99 = bars(lambda arm: results.added_us(arm, kind, time, "p99"))
        return _capped(title, "us over the direct line, p50 and p99", p50, p99)

    memory = [(m.arm, m.per_stream_kib) for m in results.memory if m.arm not in LEFT_OUT]
    made = [
        cpu("CPU per request, saturated", "requests", "us"),
        cpu("CPU per request at 500 requests/s", "paced", "us"),
        cpu("CPU per chunk, 200 streams of 50/s", "streams", "us"),
        added("Added time to first token at 500/s", "first", "first_us"),
        added("Added time per chunk, 200 streams", "streams", "delta_us"),
        _capped("Memory per idle stream", "KB", [Bar(arm, kib, kib, kib) for arm, kib in memory]),
    ]
    return [panel for panel in made if panel.bars]


def _capped(title: str, unit: str, bars: list[Bar], behind: list[Bar] | None = None) -> Panel:
    """Room for Envoy and twice as much, or for all if they need no more."""
    longest = behind or bars
    envoy = [bar.most for bar in longest if bar.arm == "envoy"]
    most = max((bar.most for bar in longest), default=0.0)
    return Panel(title, unit, bars, behind or [], min(most, 2.5 * envoy[0]) if envoy else most)


def _subtitle(results: Results) -> str:
    machine = results.machine
    what = f"{machine.get('CPU', '')}, one core for the proxy, {machine.get('day', '')}"
    return f"{what}; medians of {results.rounds} interleaved rounds with their range; access logs off; less is better"
