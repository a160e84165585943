"""The log's figures: budgets over made-up results, what is kept, and one small run of the real thing."""

import random
import time
from pathlib import Path

import msgspec
import pytest

from bench.txlog import probes, seen, stream
from bench.txlog.bulk import Bulk
from bench.txlog.instructions import Counted
from bench.txlog.path import Idle
from bench.txlog.path import Path as Load
from bench.txlog.probes import Round
from bench.txlog.results import Results, budgets, text
from bench.txlog.seen import Seen
from bench.txlog.stage import ROOT, Tree, seconds_of, share, spread
from bench.txlog.stream import Stream
from tests.servers import valkey

PLAIN = Tree(ROOT)


def a_round(reached: int = 5, at_once: int = 1) -> Round:
    return Round(reached, at_once, 2, 7.5, 1.0, 0.2, 1)


def a_window(tail_share: float = 0.1, tails: int = 100) -> Stream:
    return Stream(tails, 2e3, 4.0, 2e3, 9.0, tail_share, 45.0, 2e3, 200.0, 0.4, [2.5, 6.0, 9.0], 0, 0.6, 0.5, 2e5)


def counted(request: int) -> list[Counted]:
    return [Counted("local", 20_000, 5_000, 1000), Counted("server", 25_000, 5_000, request)]


def made(**more: object) -> Results:
    bulk = Bulk(100, 10, 0.1, 10, 20, 30, [1.0, 1.2], [0.01, 0.02], 5, [1.5, 1.6], [1.7, 1.8], [0.5, 0.6], 90, 60)
    results = Results(
        {"CPU": "one", "cores": "2"},
        "make bench-log",
        "compiled",
        [a_round(), a_round()],
        [
            Seen("sidecars", 60, 19, 1140, 0, 3.0, 5.0, 9.0, 14.0, 0.6),
            Seen("tails", 60, 20, 1200, 0, 2.0, 4.0, 6.0, 9.0, 0.0),
        ],
        [a_window(0.5, 1), a_window()],
        bulk,
        [
            Load("requests", "request", "local", "", [40.0], []),
            Load("requests", "request", "server", "local", [41.0], [1.03]),
        ],
        [Idle("server", 5.0, [4.0, 4.1], 0)],
        counted(1020),
    )
    for name, value in more.items():
        setattr(results, name, value)
    return results


def missed(results: Results) -> list[str]:
    return [budget.what for budget in budgets(results) if budget.met is False]


def test_all_budgets_may_be_met() -> None:
    assert [budget.met for budget in budgets(made())] == [True] * 10


def test_nothing_that_was_not_measured_is_met() -> None:
    found = budgets(Results({}, "make bench-log", "compiled"))
    assert {budget.met for budget in found} == {None}


@pytest.mark.parametrize(
    ("results", "what"),
    [
        (made(counted=counted(1060)), "instructions at 500 requests/s, over --redis local"),
        (made(probes=[a_round(), a_round(6)]), "requests that reached a half-open endpoint"),
        (made(probes=[a_round(), a_round(4)]), "requests that reached a half-open endpoint"),
        (made(probes=[a_round(), a_round(at_once=2)]), "of them at once at most"),
        (made(stream=[a_window(0.1, 1), a_window(0.21)]), "a tail at 2,000/s, 100 tails"),
        (made(seen=[Seen("sidecars", 60, 19, 1139, 1, 3.0, 5.0, 9.0, 14.0, 0.6)]), "opens that a sidecar never saw"),
        (made(seen=[Seen("sidecars", 60, 19, 1140, 0, 3.0, 5.0, 51.0, 90.0, 0.6)]), "an open in another sidecar, p99"),
        (
            made(path=[Load("streams", "chunk", "server", "local", [30.0], [1.0, 1.06, 1.07])]),
            "CPU per chunk, streams, over --redis local",
        ),
    ],
)
def test_one_that_is_missed_is_named(results: Results, what: str) -> None:
    """One round of ten with a probe too many is one too many; of CPU the median counts."""
    assert missed(results) == [what]


def test_what_is_kept_can_be_read_and_shown() -> None:
    results = made()
    again = msgspec.json.decode(msgspec.json.encode(results), type=Results)
    assert text(again) == text(results)
    assert "| a tail at 2,000/s, 100 tails" in text(results)


def test_shares_and_spreads() -> None:
    values = [float(each) for each in range(1, 101)]
    random.Random(1).shuffle(values)
    assert (share(values, 0.5), share(values, 0.99), share(values, 1.0)) == (51.0, 100.0, 100.0)
    found = spread([3.0, 1.0, 2.0])
    assert (found.median, found.least, found.most, found.count) == (2.0, 1.0, 3.0, 3)


def test_a_stamp_of_the_log_is_a_time() -> None:
    assert seconds_of("1970-01-01T00:01:00.250Z") == pytest.approx(60.2505)


async def test_probes_of_two_real_sidecars_are_counted(tmp_path: Path) -> None:
    async with valkey(tmp_path / "v") as server:
        [found] = await probes.measure(PLAIN, server.url, tmp_path, replicas=2, callers=3, rounds=1)
    assert (found.probes, found.at_once) == (probes.SUCCESSES, probes.PROBES)


async def test_every_open_is_seen_by_the_other_sidecar_and_by_every_tail(tmp_path: Path) -> None:
    async with valkey(tmp_path / "v") as server:
        both = await seen.full(PLAIN, server.url, tmp_path, replicas=2, opens=5)
        bare = await seen.tails(PLAIN, server.url, count=2, opens=5)
    assert (both.seen, both.missed) == (5, 0)
    assert (bare.seen, bare.missed) == (10, 0)


async def test_readers_and_the_tail_read_what_is_written(tmp_path: Path) -> None:
    async with valkey(tmp_path / "v") as server:
        began = time.monotonic()
        [found] = await stream.measure(PLAIN, server, tails=3, rate=200.0, seconds=1.0, rounds=1)
        assert time.monotonic() - began < 30.0
    assert found.tail_records_per_s == pytest.approx(found.written_per_s, rel=0.3)
    assert found.readers_read_per_s == pytest.approx(2 * found.written_per_s, rel=0.3)
