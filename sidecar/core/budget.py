"""The retry budget of one service: re-sending may add a share to the load and no more.

A share of recent requests and not a count per request: with three attempts each, an outage would treble the load on
whatever still works, just when it can least bear it. The floor lets a quiet service retry at all.
"""

from sidecar.core.window import Window


class RetryBudget:
    """Grants retries up to `ratio` of the requests of the last `window_s` seconds, and `minimum` in any case.

    `ratio` 0-1, 0: only the minimum; `minimum` >= 0, 0: only the share; both 0: never.
    """

    __slots__ = ("_window", "minimum", "ratio")

    def __init__(self, ratio: float, minimum: int, window_s: float, now: float = 0.0) -> None:
        self.ratio = ratio
        self.minimum = minimum
        self._window = Window(window_s, now)

    def request(self, now: float) -> None:
        """Counts a request (its first attempt)."""
        self._window.count(now, False)

    def has(self, now: float) -> bool:
        """Whether one more retry might go out."""
        window = self._window
        window.advance(now)
        return window.marked < max(self.minimum, self.ratio * (window.total - window.marked))

    def take(self, now: float) -> bool:
        """Whether one more retry may go out; True spends it."""
        if not self.has(now):
            return False
        self._window.count(now, True)
        return True

    def use(self, ratio: float, minimum: int, window_s: float, now: float) -> None:
        """Takes new limits; what was counted stays, unless the window itself has another length."""
        self.ratio = ratio
        self.minimum = minimum
        if window_s != self._window.span_s:
            self._window = Window(window_s, now)
