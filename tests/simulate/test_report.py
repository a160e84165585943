import json

import msgspec
import pytest

from sidecar.simulate.ledger import STEP, Measures, Move, Tally
from sidecar.simulate.report import QUANTILES, EndpointLine, Harm, Report, Trip, report_of, summary
from sidecar.simulate.trace import Extent

ENDPOINTS = (("10.0.0.1:8000", "a"), ("10.0.0.2:8000", "b"), ("10.0.0.3:8000", ""))
EXTENT = Extent(1000, 7, 50.0, 250.0)

MEASURES = Measures(
    requests=1000,
    good=950,
    good_rejected=2,
    owed=1000,
    within_slo=960,
    served=980,
    attempts=1020,
    retried=18,
    trips=2,
    false_trips=1,
    kinds={
        "errors": Tally(affected=40, untouched=30, saved=36, episodes=1, tripped=1, detect_s=(1.5,)),
        "step": Tally(),
    },
    failed={"http500": 12, "reset": 3},
    rejected={"breaker_open": 5},
    others_tripped={"session": 2},
    ttft_bins={-100: 490, -50: 392, 0: 97, 20: 1},
    per_pod=(600, 300, 120),
    moves=(
        Move(0, 1, 20.0, "closed", "open", "fast", "9 of 20 answers bad", False),
        Move(0, 1, 23.0, "open", "half_open", "waited", "open for 3 s", False),
        Move(0, 1, 24.0, "half_open", "open", "probe_failed", "late", False),
        Move(0, 1, 30.0, "open", "half_open", "waited", "open for 6 s", False),
        Move(0, 1, 30.5, "half_open", "closed", "proved", "5 probes succeeded", False),
        Move(0, 0, 90.0, "closed", "open", "location", "twice as slow", True),
    ),
)


def report(measures: Measures = MEASURES, extent: Extent = EXTENT, *, scale: float = 2.0) -> Report:
    return report_of(measures, extent, service="chat", endpoints=ENDPOINTS, seed=3, scale=scale)


def rows(of: Report) -> dict[str, str]:
    told = summary(of)
    assert len({name for name, _ in told}) == len(told), "each row has a name of its own"
    return dict(told)


def test_seconds_are_simulated_ones() -> None:
    assert report().seconds == 100.0
    assert report(scale=1.0).seconds == 200.0


def test_each_endpoint_has_its_share_its_trips_and_how_long_it_was_not_closed() -> None:
    assert report().endpoints == (
        EndpointLine("10.0.0.1:8000", "a", 600, 0.588235, 1, 10.0),  # open until the end
        EndpointLine("10.0.0.2:8000", "b", 300, 0.294118, 1, 10.5),  # a failed probe is no trip, and not closed
        EndpointLine("10.0.0.3:8000", "", 120, 0.117647, 0, 0.0),
    )


def test_trips_are_told_with_their_evidence_and_whether_something_was_wrong() -> None:
    assert report().trips == (
        Trip(20.0, "10.0.0.2:8000", "fast", "9 of 20 answers bad", True),
        Trip(90.0, "10.0.0.1:8000", "location", "twice as slow", False),
    )


def test_faults_are_told_by_kind_and_one_that_met_nobody_has_no_shares() -> None:
    assert report().faults == (
        Harm("errors", 40, 0.75, 0.9, 1, 1, (1.5,)),
        Harm("step", 0, None, None, 0, 0, ()),
    )


def test_quantiles_are_of_the_bins() -> None:
    ttft_s = report().ttft_s
    assert list(ttft_s) == list(QUANTILES)
    wanted = {"p50": -100, "p90": -50, "p99": 0, "p99.9": 20}
    assert ttft_s == {name: pytest.approx(STEP ** (bin_ + 0.5), abs=1e-4) for name, bin_ in wanted.items()}


def test_the_summary_is_in_words() -> None:
    assert rows(report()) == {
        "requests": "1000 in 100 s",
        "answered in time": "96.00 % (first token within 1 s + 3x reading the prompt, no error)",
        "answered": "980",
        "first token": "p50 139 ms, p90 375 ms, p99 1010 ms, p99.9 1501 ms",
        "failed": "15: http500 12, reset 3",
        "refused": "5: breaker_open 5",
        "tried again": "18",
        "endpoint breakers opened": "2",
        "other breakers opened": "2: session 2",
        "fault errors": "40 requests would have met it: 75.00 % kept away, 90.00 % kept away or answered in time",
        "fault step": "0 requests would have met it: - kept away, - kept away or answered in time",
    }


def test_of_nothing_there_is_a_report_too() -> None:
    empty = report(Measures(), Extent(0, 0, 0.0, 0.0))
    assert empty.endpoints == tuple(EndpointLine(key, zone, 0, 0.0, 0, 0.0) for key, zone in ENDPOINTS)
    assert (empty.trips, empty.faults, empty.goodput, empty.seconds) == ((), (), None, 0.0)
    assert set(empty.ttft_s.values()) == {None}
    told = rows(empty)
    assert told["requests"] == "0 in 0 s"
    assert told["answered in time"].startswith("- (")
    assert told["first token"] == "p50 -, p90 -, p99 -, p99.9 -"
    assert {told[name] for name in ("failed", "refused", "endpoint breakers opened", "other breakers opened")} == {"0"}


def test_an_endpoint_that_is_still_open_after_the_end_is_not_open_for_less_than_nothing() -> None:
    late = Measures(per_pod=(1, 0, 0), attempts=1, moves=(Move(0, 0, 130.0, "closed", "open", "fast", "", False),))
    assert report(late).endpoints[0].not_closed_s == 0.0


@pytest.mark.parametrize("measures", [MEASURES, Measures()], ids=["full", "empty"])
def test_as_json_it_is_read_back_and_has_plain_names(measures: Measures) -> None:
    made = report(measures)
    text = msgspec.json.encode(made)
    assert msgspec.json.decode(text, type=Report) == made
    plain = json.loads(text)
    assert list(plain) == list(Report.__struct_fields__)
    assert plain["service"] == "chat" and plain["left_out"] in (0, 7)
    assert [sorted(line) for line in plain["endpoints"]] == [sorted(EndpointLine.__struct_fields__)] * 3
