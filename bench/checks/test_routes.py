"""The figures of routing tables: budgets over made-up results, what is kept, and the tables that are filled in."""

import msgspec

from bench.routes.growth import Core, Growth, Start, Updates, Wait, Xds, service_name, table
from bench.routes.kill import Away, Kills
from bench.routes.propagation import Propagation, Way
from bench.routes.results import Results, budgets, text
from bench.routes.stage import addresses, quantiles_ms
from bench.routes.t15 import Live
from bench.txlog.stage import ROOT, Spread
from sidecar.core.table import PARTS, decode, encode
from sidecar.policy.address import endpoint_key

ONE = Spread(3.0, 2.0, 4.0, 20)
LATE = [0.0, 5.0, 60.0, 90.0]


def made(**more: object) -> Results:
    every = [Way(who, since, LATE, LATE) for who in ("sidecars", "Envoys") for since in ("ack", "sending")]
    ways = Propagation(20, 3, 100, 9000, 0, 20.0, 0, LATE, LATE, LATE, every)
    updates = [
        Updates(services, what, 20, ONE, 1.0, 0.5) for services in (1, 1000) for what in ("weights", "endpoints")
    ]
    starts = [Start(services, ONE, ONE, 1 << 26, 1 << 27, 1 << 28, 100, 2.0) for services in (0, 1, 1000)]
    edges = [Xds(services, 2.0, 1 << 26, 1 << 27, (4.0, 1.0), (5.0, 2.0)) for services in (1, 1000)]
    core = Core(1000, 17_000, 0.3, 0.2, 0.6, 0.01, 16.0, 3_500_000)
    results = Results(
        {"CPU": "one", "cores": "2"},
        "make bench-routes",
        "compiled",
        [Live(3, 100, 100, 200, {"v1": 88, "v2": 12}, 900, 0, 3, LATE, {"weight -1.0": "weight: 0 to 1"})],
        [ways],
        [Kills(60, 8.0, 20, 20, 20)],
        [Away("frozen", 2.0, 0.3, True, "the log is away")],
        Growth(10, 100, core, updates, starts, [Wait("GET /metrics", 200.0, 30.0)], {"0": 1, "1": 2, "1000": 3}, edges),
    )
    for name, value in more.items():
        setattr(results, name, value)
    return results


def missed(results: Results) -> list[str]:
    return [budget.what for budget in budgets(results) if budget.met is False]


def test_all_budgets_may_be_met_and_each_may_be_missed() -> None:
    results = made()
    assert missed(results) == []
    live, ways = results.t15[0], results.propagation[0]
    late = [0.0, 5.0, 160.0, 1100.0]
    replace = msgspec.structs.replace
    assert missed(made(t15=[replace(live, whole=99, followed_ms=late, failed=1)])) == [
        "T15: streams that were whole",
        "T15: requests that were answered",
        "T15: requests follow the last ack, at most",
    ]
    slow = replace(ways, ways=[*ways.ways[:2], replace(ways.ways[2], from_ms=late)])
    assert missed(made(propagation=[slow])) == ["a push at all Envoys, p99 from the ack"]
    assert missed(made(propagation=[replace(ways, failed=1)])) == ["requests meanwhile that were answered"]
    growth = results.growth
    assert growth is not None
    dear = [replace(each, follower_cpu_ms=0.5 * each.services**0.5) for each in growth.updates]
    assert len(missed(made(growth=replace(growth, updates=dear)))) == 2


def test_without_envoys_theirs_is_not_measured() -> None:
    results = made()
    ways = results.propagation[0]
    alone = msgspec.structs.replace(ways, envoys=0, ways=ways.ways[:2])
    found = budgets(made(propagation=[alone]))
    assert [each.met for each in found if "Envoys" in each.what] == [None, None]


def test_what_is_kept_is_read_again_and_told() -> None:
    results = made()
    again = msgspec.json.decode(msgspec.json.encode(results), type=Results)
    assert again == results
    said = text(again)
    assert "MISSED" not in said and "weight -1.0" in said and "| 1,000" in said
    assert "not measured" in text(Results({}, "", ""))


def test_a_service_has_its_endpoints_once_and_a_whole_of_weights() -> None:
    one = table(7)
    urls = [target.url for version in one.versions for target in version.endpoints]
    assert len(urls) == len({endpoint_key(url) for url in urls}) == 1000
    assert sum(one.weights.values()) == PARTS and one.service == service_name(7)
    assert decode(encode(one)) == one


def test_quantiles_are_of_what_was_there() -> None:
    assert quantiles_ms([0.1, 0.2, 0.3]) == [200.0, 300.0, 300.0, 300.0]
    assert len(set(addresses(1, 600, 80))) == 600


def test_the_document_has_the_figures_that_are_kept() -> None:
    kept = msgspec.json.decode((ROOT / "docs" / "routing.json").read_bytes(), type=Results)
    said = (ROOT / "docs" / "routes-measured.md").read_text()
    assert all(budget.met is not None for budget in budgets(kept))
    missing = [line for line in text(kept).splitlines() if line and line.strip() not in said]
    assert not missing
