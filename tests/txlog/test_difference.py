"""What is one episode in both, what is in one alone, and the words for it."""

from typing import Any

import pytest

from sidecar.txlog.difference import Episode, Verdict, clock, compare, iso, span

END_MS = 10_000_000


def episode(opened_s: float, closed_s: float | None, why: str = "fast", **counts: Any) -> Episode:
    return Episode(round(1000 * opened_s), None if closed_s is None else round(1000 * closed_s), why, "", **counts)


@pytest.mark.parametrize(
    ("recorded", "replayed", "verdicts"),
    [
        pytest.param([], [], [], id="neither"),
        pytest.param([(100, 200)], [(100.5, 200)], ["same"], id="within a moment"),
        pytest.param([(100, 200)], [(98, 200)], ["same"], id="two seconds are one"),
        pytest.param([(100, 200)], [(97.9, 200)], ["sooner"], id="sooner"),
        pytest.param([(100, 200)], [(190, None)], ["later"], id="later, while it was open there"),
        pytest.param([(100, 200)], [(50, 60)], ["sooner"], id="closed before, and near"),
        pytest.param([(500, 600)], [(300, 310)], ["only_replayed", "only_recorded"], id="far apart"),
        pytest.param([(100, None)], [], ["only_recorded"], id="recorded alone"),
        pytest.param([], [(100, None)], ["only_replayed"], id="replayed alone"),
        pytest.param([(100, 200)], [(70, 80), (99, 200)], ["only_replayed", "same"], id="the nearest of two"),
        pytest.param([(100, 110), (300, 310)], [(99, 400)], ["same", "only_recorded"], id="once for twice"),
        pytest.param(
            [(100, 110), (300, 310)],
            [(100, 110), (200, 210), (300, 310)],
            ["same", "only_replayed", "same"],
            id="between",
        ),
    ],
)
def test_episodes_are_paired(
    recorded: list[tuple[float, float | None]], replayed: list[tuple[float, float | None]], verdicts: list[Verdict]
) -> None:
    ours, theirs = [episode(*each) for each in replayed], [episode(*each) for each in recorded]
    found = compare("gpu-3", theirs, ours, END_MS)
    assert [each.verdict for each in found] == verdicts
    assert [each.recorded for each in found if each.recorded is not None] == theirs
    assert [each.replayed for each in found if each.replayed is not None] == ours


@pytest.mark.parametrize(
    ("recorded", "replayed", "words"),
    [
        pytest.param(
            episode(8380, 8500),
            episode(8047, 8500, kept_away=312, spared=280),
            "with this file gpu-3 would have opened at 02:14:07 instead of 02:19:40, 5 min 33 s sooner (fast), and "
            "closed at 02:21:40, as it did; 312 requests would have been shed, 280 of which failed or were late",
            id="sooner",
        ),
        pytest.param(
            episode(100, 200),
            episode(130.5, 260),
            "with this file gpu-3 would have opened at 00:02:10 instead of 00:01:40, 30 s later (fast), and closed at "
            "00:04:20 instead of 00:03:20",
            id="later",
        ),
        pytest.param(
            episode(100, None),
            episode(100, 160, kept_away=1, refused=1),
            "gpu-3 would have opened at 00:01:40, as it did (fast), and closed at 00:02:40; 1 request "
            "would have been shed; 1 had nowhere else to go",
            id="closed here alone",
        ),
        pytest.param(
            episode(100, 160),
            episode(100, None),
            "gpu-3 would have opened at 00:01:40, as it did (fast), and not closed by the end, "
            "which it had at 00:02:40",
            id="closed there alone",
        ),
        pytest.param(
            episode(100, None), episode(101, None), "gpu-3 would have opened at 00:01:40, as it did (fast)", id="both"
        ),
        pytest.param(
            None,
            episode(100, 160, kept_away=3),
            "with this file gpu-3 would have opened at 00:01:40, which it did not (fast), until 00:02:40; 3 requests "
            "would have been shed",
            id="here alone",
        ),
        pytest.param(
            None,
            episode(100, None),
            "with this file gpu-3 would have opened at 00:01:40, which it did not (fast), until the end",
            id="here alone, to the end",
        ),
        pytest.param(
            episode(100, 160, "gray"),
            None,
            "with this file gpu-3 would not have opened at 00:01:40 (gray); what it would have met from then on is not "
            "in the record",
            id="there alone",
        ),
    ],
)
def test_a_difference_is_told_in_words(recorded: Episode | None, replayed: Episode | None, words: str) -> None:
    (found,) = compare("gpu-3", [] if recorded is None else [recorded], [] if replayed is None else [replayed], END_MS)
    assert found.words == words


def test_what_opened_while_it_was_open_here_would_still_have_been() -> None:
    found = compare("gpu-3", [episode(100, 110), episode(300, 310)], [episode(99, 400)], END_MS)
    assert found[1].words == "gpu-3 opened at 00:05:00; with this file it would still have been open then"


def test_times() -> None:
    assert clock(1_764_470_000_999) == "02:33:20"
    assert iso(1_764_470_000_999) == "2025-11-30T02:33:20Z"
    assert [span(seconds) for seconds in (0.34, 9.9, 12.4, 59.4, 60, 3599, 3600, 7500)] == [
        "0.3 s",
        "9.9 s",
        "12 s",
        "59 s",
        "1 min 0 s",
        "59 min 59 s",
        "1 h 0 min",
        "2 h 5 min",
    ]
