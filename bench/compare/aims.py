"""The aims, and whether they are met: each on the median over rounds, with everything on in the sidecar."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.compare.results import Memory, Results, Spread


@dataclass(frozen=True)
class Verdict:
    """One aim. `met` is None where the run did not measure it."""

    what: str
    aim: str
    found: str
    met: bool | None


@dataclass(frozen=True)
class _Aim:
    what: str
    aim: str
    figure: Callable[[Results], Spread | None]
    limit: float
    show: Callable[[Spread], str]


def shown(spread: Spread, digits: int, unit: str = "", sign: str = "") -> str:
    """Median and range."""
    form = f"{sign}.{digits}f"
    span = f" ({spread.least:{form}} to {spread.most:{form}})" if spread.rounds > 1 else ""
    return f"{spread.median:{form}}{unit}{span}"


def _ratio(arm: str, base: str, kind: str, limit: float, what: str, aim: str = "") -> _Aim:
    """CPU of ours over theirs."""
    digits = 2 if limit > 0.1 else 4
    return _Aim(what, aim or f"<= {limit:.2f}", lambda r: r.ratio(arm, base, kind), limit, lambda s: shown(s, digits))


def _sooner(kind: str, time: str, share: str, what: str) -> _Aim:
    """Added time of ours less Envoy's in the same round. The direct line is in both, so it cancels out."""
    return _Aim(
        what,
        "<= Envoy's",
        lambda r: r.added_us("sidecar", kind, time, share, base="envoy"),
        0.0,
        lambda s: f"Envoy's {shown(s, 0, ' us', sign='+')}",
    )


def _memory(figure: Callable[[Memory], float]) -> Callable[[Results], Spread | None]:
    def found(results: Results) -> Spread | None:
        for memory in results.memory:
            if memory.arm == "sidecar":
                return Spread(figure(memory), figure(memory), figure(memory), 1)
        return None

    return found


AIMS = (
    _ratio("sidecar", "envoy", "requests", 0.70, "CPU per request / Envoy's, saturated"),
    _ratio("sidecar", "envoy", "paced", 0.85, "CPU per request / Envoy's, at 500 requests/s"),
    _ratio("sidecar-log", "envoy-log", "requests", 0.80, "the same with access logs, saturated"),
    _ratio("sidecar-log", "envoy-log", "paced", 0.95, "the same with access logs, at 500 requests/s"),
    _ratio("sidecar", "envoy", "streams", 0.75, "CPU per chunk / Envoy's"),
    _ratio("sidecar", "nginx", "streams", 1.25, "CPU per chunk / nginx's"),
    _ratio("sidecar-shared", "sidecar", "requests", 1.05, "CPU per request, the log on a server / in the process"),
    _ratio("sidecar-shared", "sidecar", "streams", 1.05, "CPU per chunk, the log on a server / in the process"),
    _sooner("first", "first_us", "p99", "added time to first token, p99, at 500 requests/s"),
    _sooner("streams", "delta_us", "p50", "added time per chunk, p50, 200 streams"),
    _sooner("streams", "delta_us", "p99", "added time per chunk, p99, 200 streams"),
    _Aim(
        "added time per chunk, p99, 200 streams",
        "<= 2 ms",
        lambda r: r.added_us("sidecar", "streams", "delta_us", "p99"),
        2000.0,
        lambda s: shown(s, 0, " us"),
    ),
    _Aim("resident memory, idle", "<= 60 MB", _memory(lambda m: m.idle_kib / 1024), 60.0, lambda s: shown(s, 1, " MB")),
    _Aim(
        "resident memory per idle stream",
        "<= 12 KB",
        _memory(lambda m: m.per_stream_kib),
        12.0,
        lambda s: shown(s, 1, " KB"),
    ),
    _ratio("sidecar", "litellm", "requests", 0.01, "CPU per request / LiteLLM's", "<= 1/100"),
    _ratio("sidecar", "aiohttp", "requests", 1 / 3, "CPU per request / aiohttp's, end to end", "<= 1/3"),
)


def verdicts(results: Results) -> list[Verdict]:
    found = []
    for aim in AIMS:
        spread = aim.figure(results)
        if spread is None:
            found.append(Verdict(aim.what, aim.aim, "not measured", None))
        else:
            found.append(Verdict(aim.what, aim.aim, aim.show(spread), spread.median <= aim.limit))
    return found
