"""What is left when everybody has gone: nothing may be held, and all the accounts must agree.

Each check waits for what takes its time (idle engine connections, four seconds; the log's last lines) and no longer.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from soak import policies
from soak.ledger import Ledger, Series
from soak.observed import Told
from soak.stage import Sample, SidecarProcess

LET_GO_S = 12.0
"""Idle engine connections live four seconds; the rest is for a busy machine."""

LINES_S = 5.0
THREADS_MORE = 6
"""The loop's own pool of threads for files, which grows as it is used: Python makes at most CPUs + 4 of them."""

LIFETIME = ("sidecar.downstream.", "sidecar.proxy.", "sidecar.upstream.connection.", "sidecar.wire.")
"""Modules whose objects live as long as a request or a connection: none may outlive both."""

REMEMBERED = {"sidecar.wire.headers.Line": 2 * 1024, "sidecar.downstream.parser._Start": 256}
"""Objects of those modules that live on in a bounded memory, and its bound: header lines, by each of two readers."""

GAUGES = (
    "sidecar_requests_in_flight",
    "sidecar_endpoint_in_flight",
    "sidecar_downstream_connections",
    "sidecar_upstream_connections",
)


class Baseline(msgspec.Struct, frozen=True):
    """The sidecar before any traffic."""

    descriptors: int
    threads: int
    told: Told
    rss_bytes: int


class Figures(msgspec.Struct, frozen=True):
    """What was counted at the end; `objects` are the sidecar's own that still live, tables and all."""

    descriptors: int
    threads: int
    tasks: int
    sessions: dict[str, int]
    session_breakers: int
    lines_dropped: int
    log_lines: int
    metric_requests: int
    exit_code: int | None
    objects: dict[str, int]


async def audit(
    proxy: SidecarProcess, ledger: Ledger, baseline: Baseline, take_lines: Callable[[], None]
) -> Figures | None:
    """Checks everything, enters what is wrong as breaches, and stops the sidecar; None where it is gone already."""
    if not proxy.alive:
        take_lines()
        ledger.close()
        return None
    metrics = await _let_go(proxy, ledger, baseline)
    loop = asyncio.get_running_loop()
    due = loop.time() + LINES_S
    take_lines()
    while (ledger.lines_due or ledger.totals.lines != _requests(metrics)) and loop.time() < due:
        await asyncio.sleep(0.1)
        take_lines()
    told = await proxy.tell()
    _check_told(ledger, baseline.told, told)
    sessions = {
        dict(labels)["service"]: int(value) for (name, labels), value in metrics.items() if name == "sidecar_sessions"
    }
    breakers = msgspec.json.decode(await proxy.page(b"/breakers"), type=list[dict[str, object]])
    session_breakers = sum(line["scope"] == "session" for line in breakers)
    if session_breakers > sum(policies.SESSION_BOUNDS.values()):
        ledger.breach("sessions keep their bound", f"{session_breakers} breakers of sessions")
    dropped = int(_sum(metrics, "sidecar_log_lines_dropped_total"))
    if dropped:
        ledger.breach("every request has its line", f"the sidecar dropped {dropped} lines of its log")
    descriptors, threads = len(proxy.descriptors()), proxy.threads
    if threads > baseline.threads + THREADS_MORE:
        ledger.breach("no thread is left", f"{threads} threads, {baseline.threads} at the start")
    exit_code = await _stop(proxy, ledger)
    take_lines()
    ledger.close()
    check_metrics(ledger, metrics)
    return Figures(
        descriptors=descriptors,
        threads=threads,
        tasks=told.tasks,
        sessions=sessions,
        session_breakers=session_breakers,
        lines_dropped=dropped,
        log_lines=ledger.totals.lines,
        metric_requests=_requests(metrics),
        exit_code=exit_code,
        objects=told.objects,
    )


def check_metrics(ledger: Ledger, metrics: dict[Sample, float]) -> None:
    """Whether the metrics' totals are those of the log, and the refused heads those of the clients."""
    totals = ledger.totals
    counted: Counter[Series] = Counter()
    for (name, labels), value in metrics.items():
        if name == "sidecar_requests_total":
            named = dict(labels)
            key = (named["service"], named["version"], named["outcome"], named["status"], named["reason"])
            counted[key] += int(value)
    for key in sorted(counted.keys() | totals.series.keys()):
        if counted[key] != totals.series[key]:
            what = f"{', '.join(key)}: {counted[key]} in the metrics, {totals.series[key]} in the log"
            ledger.breach("metrics and log agree", what)
    for what, name, label, wanted in (
        ("bytes in", "sidecar_downstream_bytes_total", "in", totals.bytes_in),
        ("bytes out", "sidecar_downstream_bytes_total", "out", totals.bytes_out),
        ("retries", "sidecar_retries_total", "", totals.retries),
        ("tokens", "sidecar_stream_tokens_total", "", totals.tokens),
        ("refused heads", "sidecar_refused_heads_total", "", ledger.refused_heads),
    ):
        found = int(_sum(metrics, name, label))
        if found != wanted:
            source = "by clients" if what == "refused heads" else "in the log"
            ledger.breach("metrics and log agree", f"{what}: {found} in the metrics, {wanted} {source}")
    lines, least = totals.lines, ledger.expected_lines
    if not least <= lines <= least + ledger.possible_lines:
        what = f"{lines} lines for {least} requests, and {ledger.possible_lines} whose clients left early"
        ledger.breach("metrics and log agree", what)


async def _let_go(proxy: SidecarProcess, ledger: Ledger, baseline: Baseline) -> dict[Sample, float]:
    """Waits until nothing is held; the metrics as they were then."""
    loop = asyncio.get_running_loop()
    due = loop.time() + LET_GO_S
    while True:
        metrics = await proxy.metrics()
        held = {name: value for name in GAUGES if (value := _sum(metrics, name))}
        sockets = proxy.established()
        descriptors = proxy.descriptors()
        # The scrape's own socket takes a moment to go.
        if not held and not sockets and len(descriptors) <= baseline.descriptors:
            return metrics
        if loop.time() >= due:
            break
        await asyncio.sleep(0.5)
    for name, value in held.items():
        ledger.breach("nothing is held", f"{name} is {value:g}")
    if sockets:
        ledger.breach("no connection is left", f"{len(sockets)} sockets are connected", *sockets[:20])
    if len(descriptors) > baseline.descriptors:
        words = f"{len(descriptors)} descriptors, {baseline.descriptors} at the start"
        ledger.breach("no connection is left", words, *sorted(descriptors.values())[:40])
    return metrics


def _check_told(ledger: Ledger, before: Told, told: Told) -> None:
    for words in told.held:
        ledger.breach("nothing is held", words)
    if told.tasks > before.tasks:
        ledger.breach("no task is left", f"{told.tasks} tasks, {before.tasks} at the start")
    for name, count in sorted(told.objects.items()):
        allowed = max(before.objects.get(name, 0), REMEMBERED.get(name, 0))
        if name.startswith(LIFETIME) and count > allowed:
            ledger.breach("no object of a request is left", f"{count} {name}, and at most {allowed} may be")
    for name, count in sorted(told.garbage.items()):
        if name.startswith(LIFETIME):
            ledger.breach("no object of a request waits for the collector", f"{count} {name}")
    sessions = told.objects.get("sidecar.core.fleet.Session", 0)
    if sessions > sum(policies.SESSION_BOUNDS.values()):
        ledger.breach("sessions keep their bound", f"{sessions} sessions are alive")


async def _stop(proxy: SidecarProcess, ledger: Ledger) -> int | None:
    try:
        code = await proxy.stop()
    except TimeoutError:
        ledger.breach("SIGTERM ends it", "the sidecar did not end")
        return None
    if code:
        ledger.breach("SIGTERM ends it", f"the sidecar ended with {code}")
    return code


def _requests(metrics: dict[Sample, float]) -> int:
    return int(_sum(metrics, "sidecar_requests_total"))


def _sum(metrics: dict[Sample, float], name: str, direction: str = "") -> float:
    return sum(
        value
        for (each, labels), value in metrics.items()
        if each == name and (not direction or ("direction", direction) in labels)
    )
