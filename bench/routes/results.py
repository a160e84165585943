"""What was measured, as it is kept; the budgets, and whether they are met; the tables."""

from dataclasses import dataclass, field

from bench.routes.growth import Growth, Updates
from bench.routes.kill import Away, Kills
from bench.routes.propagation import Propagation
from bench.routes.t15 import Live
from bench.txlog.results import Budget, judged, shown, table

FOLLOW_MS = 150.0
FOLLOWS_MS = 1000.0
SAME_RATIO = 1.5
"""An update of one service among 1,000 over one alone, at most, in CPU: twice the same differs by as much here."""


@dataclass
class Results:
    """One run."""

    machine: dict[str, str]
    command: str
    tree: str
    t15: list[Live] = field(default_factory=list)
    propagation: list[Propagation] = field(default_factory=list)
    kills: list[Kills] = field(default_factory=list)
    away: list[Away] = field(default_factory=list)
    growth: Growth | None = None


def budgets(results: Results) -> list[Budget]:
    """All of them."""
    live, ways = results.t15, results.propagation
    return [
        _all("T15: streams that were whole", [(each.whole, each.streams) for each in live]),
        _all("T15: requests that were answered", [(each.requests - each.failed, each.requests) for each in live]),
        _most("T15: requests follow the last ack, at most", FOLLOWS_MS, [each.followed_ms[3] for each in live]),
        *(
            _most(
                f"a push at all {who}, p99 from the {since}",
                FOLLOW_MS,
                [way.from_ms[2] for each in ways if (way := each.way(who, since)) is not None],
            )
            for who in ("sidecars", "Envoys")
            for since in ("ack", "sending")
        ),
        _all("places that followed before the next push", [_followed(each) for each in ways]),
        _all("requests meanwhile that were answered", [(each.requests - each.failed, each.requests) for each in ways]),
        Budget(
            "writers killed: old or new everywhere, one update",
            "all",
            f"{sum(each.rounds for each in results.kills)} of as many" if results.kills else "not measured",
            bool(results.kills) or None,
        ),
        *(_same(results.growth) if results.growth else []),
    ]


def _followed(ways: Propagation) -> tuple[int, int]:
    places = ways.pushes * (ways.sidecars + ways.envoys)
    return places - ways.never, places


def _most(what: str, limit: float, values: list[float]) -> Budget:
    if not values:
        return Budget(what, f"<= {limit:g} ms", "not measured", None)
    return Budget(what, f"<= {limit:g} ms", ", ".join(f"{each:.1f}" for each in values) + " ms", max(values) <= limit)


def _all(what: str, pairs: list[tuple[int, int]]) -> Budget:
    if not pairs:
        return Budget(what, "all", "not measured", None)
    return Budget(
        what, "all", ", ".join(f"{some:,} of {most:,}" for some, most in pairs), all(a == b for a, b in pairs)
    )


def _same(growth: Growth) -> list[Budget]:
    found = []
    for what in dict.fromkeys(each.what for each in growth.updates):
        one, many = (each for each in growth.updates if each.what == what)
        for name, pick in (("CPU of who takes it", _writer), ("CPU of a follower", _follower)):
            ratio = pick(many) / pick(one)
            words = f"an update of {what} at {many.services:,} services over one at 1, {name}"
            found.append(Budget(words, f"<= {SAME_RATIO:g}", f"{ratio:.2f}", ratio <= SAME_RATIO))
    return found


def _writer(each: Updates) -> float:
    return each.writer_cpu_ms


def _follower(each: Updates) -> float:
    return each.follower_cpu_ms


def text(results: Results) -> str:
    """The budgets, then the figures that they were judged on and those that have none."""
    parts = [
        *judged(results.machine, results.tree, budgets(results), "found"),
        *([_of_t15(results.t15)] if results.t15 else []),
        *([_of_ways(results.propagation)] if results.propagation else []),
        *([_of_kills(results.kills)] if results.kills else []),
        *([_of_away(results.away)] if results.away else []),
        *(_of_growth(results.growth) if results.growth else []),
    ]
    return "\n".join(parts)


def _of_t15(live: list[Live]) -> str:
    head = ["sidecars", "streams whole", "v1", "v2", "tokens each", "requests beside", "follow ms, p50, p99, max"]
    rows = [
        [
            f"{each.sidecars}",
            f"{each.whole} of {each.streams}",
            f"{each.by_version.get('v1', 0)}",
            f"{each.by_version.get('v2', 0)}",
            f"{each.tokens}",
            f"{each.requests:,}, {each.failed} failed",
            f"{each.followed_ms[0]:.1f}, {each.followed_ms[2]:.1f}, {each.followed_ms[3]:.1f}",
        ]
        for each in live
    ]
    refused = [[name, message] for name, message in live[-1].refused.items()]
    return table(head, rows) + "\n" + table(["bad update", "its NACK"], refused)


def _of_ways(ways: list[Propagation]) -> str:
    head = ["who", "from", "pushes x places", "p50 ms", "p90", "p99", "max"]
    rows = []
    for each in ways:
        lines: list[tuple[str, str, int, list[float]]] = [
            ("the tool: ack", "sending", 1, each.ack_ms),
            ("a tool at each sidecar: told", "ack", each.sidecars, each.told_ms),
        ]
        for way in each.ways:
            places = each.sidecars if way.who == "sidecars" else each.envoys
            lines.append((f"{way.who}: the last request that did not follow", way.since, places, way.not_yet_ms))
            lines.append((f"{way.who}: the first from which all did", way.since, places, way.from_ms))
        rows += [[who, since, f"{each.pushes} x {n}", *(f"{ms:.1f}" for ms in found)] for who, since, n, found in lines]
    asked = ", ".join(
        f"{each.requests:,} requests, one each {each.every_ms:g} ms and place, {each.failed} failed; they took"
        f" {each.request_ms[0]:.1f}, {each.request_ms[2]:.1f}, {each.request_ms[3]:.1f} ms (p50, p99, most)"
        for each in ways
    )
    return table(head, rows) + f"\n{asked}\n"


def _of_kills(kills: list[Kills]) -> str:
    head = ["writers killed", "within ms", "acked and done", "done, nobody told", "not done"]
    rows = [
        [f"{each.rounds}", f"{each.within_ms:g}", f"{each.acked}", f"{each.done_unacked}", f"{each.not_done}"]
        for each in kills
    ]
    return table(head, rows)


def _of_away(away: list[Away]) -> str:
    head = ["the server", "NACK after s", "taken s after its return", "had been done", "the NACK's words"]
    rows = [
        [each.how, f"{each.nack_s:.2f}", f"{each.back_s:.2f}", "yes" if each.repeated else "no", each.message]
        for each in away
    ]
    return table(head, rows)


def _of_growth(growth: Growth) -> list[str]:
    core = growth.core
    size = f"{growth.versions} versions x {growth.endpoints} endpoints"
    parts = [
        ["record, deflated", f"{core.record_bytes / 1000:.1f} kB"],
        ["encode, decode", f"{core.encode_ms:.2f} ms, {core.decode_ms:.2f} ms"],
        ["policy and table together", f"{core.effective_ms:.2f} ms"],
        ["the same taken again, a new one made", f"{core.use_ms:.2f} ms, {core.new_ms:.1f} ms"],
        ["a service's state once it is made", f"{core.state_bytes / 1e6:.2f} MB"],
    ]
    updates = [
        [
            f"{each.services:,}",
            each.what,
            shown(each.ack_ms, 1),
            f"{each.writer_cpu_ms:.2f}",
            f"{each.follower_cpu_ms:.2f}",
        ]
        for each in growth.updates
    ]
    empty = next(each for each in growth.starts if not each.services)
    starts = [
        [
            f"{each.services:,}",
            shown(each.serves_s, 2),
            shown(each.told_s, 2),
            f"{each.idle_bytes / 1e6:.1f}",
            f"{(each.told_bytes - empty.idle_bytes) / 1e6:+.1f}",
            f"{(each.asked_bytes - empty.idle_bytes) / 1e6:+.1f} ({each.asked} in {each.asked_s:.2f} s)",
            f"{growth.server_bytes[str(each.services)] / 1e6:.1f}",
        ]
        for each in growth.starts
    ]
    return [
        table([f"one table, {size}", "CPU"], parts),
        table(["services", "an update of", "ms to the ack", "CPU ms, writer", "a follower"], updates),
        table(
            [
                "services",
                "s until it serves",
                "until a tool was told all",
                "MB idle",
                "told all",
                "some asked once",
                "server MB",
            ],
            starts,
        ),
        table(
            [f"meanwhile, of {growth.starts[-1].services:,} services", "took ms", "longest that a request waited, ms"],
            [[each.what, f"{each.took_ms:.0f}", f"{each.longest_ms:.1f}"] for each in growth.waits],
        ),
        table(
            ["services", "an Envoy has all after s", "MB, server, Envoy", "CPU ms, weights", "endpoints"],
            [
                [
                    f"{each.services:,}",
                    f"{each.has_all_s:.1f}",
                    f"{each.server_bytes / 1e6:.0f}, {each.envoy_bytes / 1e6:.0f}",
                    "{:.1f}, {:.1f}".format(*each.weights_ms),
                    "{:.1f}, {:.1f}".format(*each.endpoints_ms),
                ]
                for each in growth.xds
            ],
        ),
    ]
