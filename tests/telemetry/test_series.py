"""Families on plain numbers: what goes in comes out of Prometheus' own reader."""

import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sidecar.telemetry.series import Cell, Counters, Family, Histograms, Summaries, header, label_text

Values = dict[tuple[str, frozenset[tuple[str, str]]], float]

BOUNDS = (0.1, 1.0, 10.0)


def read(text: str) -> Values:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_histogram_has_no_text_before_its_first_value() -> None:
    family = Histograms("sidecar_waits_seconds", "Waits", ("kind",), BOUNDS)
    family.child(("silent",))
    assert read("".join(family.pieces())) == {}


def test_counter_keeps_what_was_added() -> None:
    family = Counters("sidecar_things_total", "Things", ("kind",))
    family.child(("a",)).n += 2
    family.child(("a",)).n += 3
    family.child(("b",))
    assert read("".join(family.pieces())) == {
        of("sidecar_things_total", kind="a"): 5,
        of("sidecar_things_total", kind="b"): 0,
    }


def test_summary_tells_count_and_sum_and_nothing_before_its_first_value() -> None:
    family = Summaries("sidecar_waits_seconds", "Waits", ("kind",))
    family.child(("silent",))
    for waited_s in (0.5, 1.5):
        family.child(("a",)).observe(waited_s)
    assert read("".join(family.pieces())) == {
        of("sidecar_waits_seconds_count", kind="a"): 2,
        of("sidecar_waits_seconds_sum", kind="a"): 2.0,
    }


@pytest.mark.parametrize(
    ("value", "le"),
    [
        pytest.param(0.0, "0.1", id="zero"),
        pytest.param(0.1, "0.1", id="on a bound"),
        pytest.param(math.nextafter(0.1, 1), "1.0", id="just above a bound"),
        pytest.param(10.0, "10.0", id="on the last bound"),
        pytest.param(10.5, "+Inf", id="above all"),
    ],
)
def test_value_is_counted_from_its_bucket_up(value: float, le: str) -> None:
    family = Histograms("sidecar_waits_seconds", "Waits", ("kind",), BOUNDS)
    family.child(("a",)).observe(value)
    samples = read("".join(family.pieces()))
    bounds = [*(str(bound) for bound in BOUNDS), "+Inf"]
    for index, bound in enumerate(bounds):
        counted = index >= bounds.index(le)
        assert samples[of("sidecar_waits_seconds_bucket", kind="a", le=bound)] == counted
    assert samples[of("sidecar_waits_seconds_count", kind="a")] == 1
    assert samples[of("sidecar_waits_seconds_sum", kind="a")] == value


@given(st.lists(st.floats(0, 100), min_size=1))
def test_histogram_is_cumulative_and_loses_nothing(values: list[float]) -> None:
    family = Histograms("h", "H", (), BOUNDS)
    for each in values:
        family.child(()).observe(each)
    samples = read("".join(family.pieces()))
    for bound in BOUNDS:
        assert samples[of("h_bucket", le=str(bound))] == sum(each <= bound for each in values)
    assert samples[of("h_bucket", le="+Inf")] == samples[of("h_count")] == len(values)
    assert samples[of("h_sum")] == pytest.approx(sum(values))
    assert family.child(()).counts[bisect_left(BOUNDS, values[0])] > 0


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=3))
def test_any_label_value_survives(values: list[str]) -> None:
    names = [f"l{number}" for number in range(len(values))]
    text = header("m", "M", "gauge") + f"m{{{label_text(names, values)}}} 1\n"
    assert read(text) == {("m", frozenset(zip(names, values, strict=True))): 1}


@pytest.mark.parametrize(
    "family",
    [
        Counters("c_total", "C", ("kind",)),
        Summaries("s", "S", ("kind",)),
        Histograms("h", "H", ("kind",), BOUNDS),
    ],
    ids=["counters", "summaries", "histograms"],
)
def test_refused_children_are_forgotten_and_start_anew(family: Counters | Summaries | Histograms) -> None:
    kept, dropped = family.child(("kept",)), family.child(("dropped",))
    family.retain(lambda labels: labels != ("dropped",))
    assert family.child(("kept",)) is kept
    assert family.child(("dropped",)) is not dropped


def test_children_may_come_and_go_while_text_is_given() -> None:
    family = Counters("c_total", "C", ("kind",))
    for number in range(3):
        family.child((str(number),))
    pieces = family.pieces()
    text = [next(pieces), next(pieces)]
    family.child(("late",))
    family.retain(lambda labels: labels == ("late",))
    text += pieces
    assert set(read("".join(text))) == {of("c_total", kind=str(number)) for number in range(3)}


def test_family_needs_its_own_sample() -> None:
    with pytest.raises(NotImplementedError):
        Family("c_total", "C", ("kind",), Cell).sample('kind="a"', Cell())
