"""What a scenario is: a claim, the load it is tested under, the fault, and the marks that decide.

Declarations only. `stage.py` builds the processes, `drive.py` makes the load; a scenario's own file says everything
that a reader needs to judge whether its claim was tested.
"""

from collections.abc import Callable

import msgspec

from loadtest.marks import Evidence, Mark
from loadtest.shapes import Shape
from loadtest.stage import Setting, Stage


class Crowd(msgspec.Struct, frozen=True):
    """Users who are alike: `parts` of all, whose streams are recorded as of this `kind` and carry these headers."""

    kind: str
    parts: int
    headers: tuple[tuple[str, str], ...] = ()
    tokens: tuple[int, int] = (16, 64)
    think_s: tuple[float, float] = (0.05, 0.25)


class Plan(msgspec.Struct, frozen=True):
    """What each user does: streams of `tokens`, `think_s` between them, a new session after `session_requests`.

    Pairs are the ends of a uniform choice. With `crowds`, what a user asks for and how long he thinks is his crowd's.
    """

    tokens: tuple[int, int] = (16, 64)
    think_s: tuple[float, float] = (0.05, 0.25)
    session_requests: tuple[int, int] = (4, 12)
    patience_s: float = 20.0
    slow_tokens: int = 100_000
    crowds: tuple[Crowd, ...] = ()


class Scenario(msgspec.Struct, frozen=True):
    """One claim. `broken` says what `broken_setting` takes away, so that the claim must fail.

    `ttft_s`: a first token later than this is no good service.
    """

    name: str
    claim: str
    shape: Shape
    users: int
    seconds: float
    plan: Plan
    setting: Setting
    fault: Callable[[Stage], None]
    marks: Callable[[Evidence], list[Mark]]
    broken: str
    broken_setting: Setting
    slow_readers: int = 0
    ttft_s: float = 1.0
