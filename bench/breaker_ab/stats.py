"""What is made of many runs: sums, ratios with their interval, medians."""

from collections.abc import Iterable, Sequence
from math import sqrt
from statistics import median

Z95 = 1.959964
"""Two-sided 95 % of the normal distribution."""


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The Wilson score interval of hits / count, 95 %; (0, 1) of nothing.

    Wilson 1927. Of few trips, and of none that is false, it still says something: 0 of 96 is 0 to 3.8 %.
    """
    if count <= 0:
        return 0.0, 1.0
    share, square = hits / count, Z95 * Z95
    middle = share + square / (2 * count)
    width = Z95 * sqrt(share * (1 - share) / count + square / (4 * count * count))
    whole = 1 + square / count
    return max(0.0, (middle - width) / whole), min(1.0, (middle + width) / whole)


def ratio(part: float, whole: float) -> float | None:
    """part / whole, None of nothing."""
    return part / whole if whole else None


def middle(values: Iterable[float]) -> float | None:
    """The median, None of nothing."""
    found = [*values]
    return median(found) if found else None


def percent(value: float | None, digits: int = 1) -> str:
    """As the tables write it; "-" for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}"


def seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 10 else f"{value:.0f}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"
