"""Load over time as tables: what share of a scenario's users is there until which part of its run.

Tables of parts and not of seconds, so that a shape keeps its form whether a run takes ten seconds or an hour. Nothing
here knows locust: `drive.py` asks `users_at` once a second.
"""

import msgspec


class Row(msgspec.Struct, frozen=True):
    """Until this part of the run (0-1) there is this share of the users (0-1)."""

    until: float
    share: float


class Shape(msgspec.Struct, frozen=True):
    """Rows in order; the last one ends at 1. The share is constant within a row: a surge is a step, not a slope."""

    name: str
    rows: tuple[Row, ...]

    def users_at(self, elapsed_s: float, seconds: float, users: int) -> int | None:
        """How many of `users` there are now; at least one while the run lasts, None once it is over."""
        for row in self.rows:
            if elapsed_s < row.until * seconds:
                return max(1, round(users * row.share))
        return None


STEADY = Shape("steady", (Row(1.0, 1.0),))

SURGE = Shape("surge", (Row(0.25, 0.25), Row(0.6, 1.0), Row(1.0, 0.25)))
"""Four times the load within a second, for a third of the run, and back."""

DIURNAL = Shape(
    "diurnal",
    tuple(
        Row((hour + 1) / 12, share)
        for hour, share in enumerate((0.35, 0.25, 0.2, 0.25, 0.45, 0.7, 0.9, 1.0, 0.95, 0.9, 0.75, 0.5))
    ),
)
"""A day in rows of two hours from midnight: the usual curve of traffic by people at work."""

SPIKE = Shape(
    "spike",
    (Row(0.2, 0.2), Row(0.25, 1.0), Row(0.5, 0.2), Row(0.55, 1.0), Row(0.8, 0.2), Row(0.85, 1.0), Row(1.0, 0.2)),
)
"""Three peaks too short for anything to adapt to them."""

SHAPES = {shape.name: shape for shape in (STEADY, SURGE, DIURNAL, SPIKE)}
