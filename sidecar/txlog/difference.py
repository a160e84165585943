"""What a recording and its replay have in common and where they differ, breaker by breaker, in numbers and in words."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Literal

import msgspec

from sidecar.kernel.count import counted

SAME_S: Final = 2.0
"""Openings this near to each other are one: a summary tells of a second, and may come as much later."""
NEAR_MS: Final = 60_000
"""Openings this near are of one fault, though one had closed before the other came."""

Verdict = Literal["same", "sooner", "later", "only_replayed", "only_recorded"]


class Episode(msgspec.Struct, frozen=True):
    """From a breaker's opening to its closing, its failed probes included. Times are the server's clock.

    `closed_ms` None: it was not closed when the recording ended. `kept_away` are the attempts in the record that it
    would have kept away; `spared` of them failed or were late, `refused` had no other endpoint to go to. Of a recorded
    episode they are not known, and 0.
    """

    opened_ms: int
    closed_ms: int | None
    why: str
    evidence: str
    by: str = ""
    probes_failed: int = 0
    kept_away: int = 0
    spared: int = 0
    refused: int = 0


class Difference(msgspec.Struct, frozen=True):
    """One episode of either or both. `shift_s`: how much later the replay opened; negative: sooner."""

    verdict: Verdict
    words: str
    recorded: Episode | None
    replayed: Episode | None
    shift_s: float = 0.0


class KeyReport(msgspec.Struct, frozen=True):
    """One breaker. `first_token_p50_s` and `first_token_p99_s` are those of all that was recorded; null: none was."""

    scope: str
    service: str
    key: str
    attempts: int
    failed: int
    first_token_p50_s: float | None
    first_token_p99_s: float | None
    recorded_not_closed_s: float
    replayed_not_closed_s: float
    held_closed: int
    differences: list[Difference]


class Totals(msgspec.Struct, frozen=True):
    """Of all keys together."""

    recorded_openings: int
    replayed_openings: int
    same: int
    kept_away: int
    spared: int
    refused: int


class Report(msgspec.Struct, frozen=True):
    """What came of a replay. `unsaid` is what cannot be said, and why; `unknown_endpoints` are not in the policy."""

    since: str
    until: str
    seconds: float
    observers: list[str]
    summaries: int
    attempts: int
    totals: Totals
    keys: list[KeyReport]
    unknown_endpoints: list[str]
    unsaid: list[str]


def compare(name: str, recorded: Sequence[Episode], replayed: Sequence[Episode], end_ms: int) -> list[Difference]:
    """Both in order of time; every episode of either is in exactly one difference, in order of time."""
    found: list[Difference] = []
    rest = list(replayed)
    for episode in recorded:
        partner = _partner(episode, rest, end_ms)
        if partner is None:
            found.append(_only_recorded(name, episode, replayed, end_ms))
            continue
        place = rest.index(partner)
        found += [_only_replayed(name, other) for other in rest[:place]]
        del rest[: place + 1]
        found.append(_both(name, episode, partner))
    found += [_only_replayed(name, other) for other in rest]
    return sorted(found, key=_began)


def clock(ms: int) -> str:
    """The time of day, UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%H:%M:%S")


def iso(ms: int) -> str:
    """The time, to the second."""
    return datetime.fromtimestamp(ms // 1000, UTC).isoformat().replace("+00:00", "Z")


def span(seconds: float) -> str:
    """A length of time in the two units that matter."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _partner(episode: Episode, others: Sequence[Episode], end_ms: int) -> Episode | None:
    """Of those that overlap it, or began near it, the one that began nearest."""
    fit = [
        other
        for other in others
        if abs(other.opened_ms - episode.opened_ms) <= NEAR_MS
        or (other.opened_ms <= _end(episode, end_ms) and episode.opened_ms <= _end(other, end_ms))
    ]
    return min(fit, key=lambda other: abs(other.opened_ms - episode.opened_ms), default=None)


def _both(name: str, recorded: Episode, replayed: Episode) -> Difference:
    shift_s = (replayed.opened_ms - recorded.opened_ms) / 1000
    if abs(shift_s) <= SAME_S:
        verdict: Verdict = "same"
        words = f"{name} would have opened at {clock(recorded.opened_ms)}, as it did ({replayed.why})"
    else:
        verdict = "sooner" if shift_s < 0 else "later"
        words = (
            f"with this file {name} would have opened at {clock(replayed.opened_ms)} instead of "
            f"{clock(recorded.opened_ms)}, {span(abs(shift_s))} {verdict} ({replayed.why})"
        )
    words += _closing(recorded, replayed) + _kept(replayed)
    return Difference(verdict, words, recorded, replayed, shift_s)


def _only_replayed(name: str, replayed: Episode) -> Difference:
    until = "until the end" if replayed.closed_ms is None else f"until {clock(replayed.closed_ms)}"
    words = (
        f"with this file {name} would have opened at {clock(replayed.opened_ms)}, which it did not ({replayed.why}), "
        f"{until}{_kept(replayed)}"
    )
    return Difference("only_replayed", words, None, replayed)


def _only_recorded(name: str, recorded: Episode, replayed: Sequence[Episode], end_ms: int) -> Difference:
    at = recorded.opened_ms
    if any(other.opened_ms <= at <= _end(other, end_ms) for other in replayed):
        words = f"{name} opened at {clock(at)}; with this file it would still have been open then"
    else:
        words = (
            f"with this file {name} would not have opened at {clock(at)} ({recorded.why}); what it would have met "
            "from then on is not in the record"
        )
    return Difference("only_recorded", words, recorded, None)


def _closing(recorded: Episode, replayed: Episode) -> str:
    ours, theirs = replayed.closed_ms, recorded.closed_ms
    if ours is not None and theirs is not None and abs(ours - theirs) <= 1000 * SAME_S:
        return f", and closed at {clock(theirs)}, as it did"
    if ours is None:
        return "" if theirs is None else f", and not closed by the end, which it had at {clock(theirs)}"
    return f", and closed at {clock(ours)}" + (f" instead of {clock(theirs)}" if theirs is not None else "")


def _kept(replayed: Episode) -> str:
    if not replayed.kept_away:
        return ""
    words = f"; {counted(replayed.kept_away, 'request')} would have been shed"
    if replayed.spared:
        words += f", {replayed.spared} of which failed or were late"
    if replayed.refused:
        words += f"; {replayed.refused} had nowhere else to go"
    return words


def _end(episode: Episode, end_ms: int) -> int:
    return end_ms if episode.closed_ms is None else episode.closed_ms


def _began(difference: Difference) -> int:
    began = [each.opened_ms for each in (difference.recorded, difference.replayed) if each is not None]
    return min(began)
