"""`python -m tests.txlog.invariants`: the log's invariants for minutes. `make invariants` runs it.

Runs the state machine of `machine` again and again, each time from the next seed, and says how far it is. What breaks
is shrunk and printed with its seed; the exit code is 1 then. 130: ended early, all well so far.
"""

import argparse
import random
import sys
import time
from collections.abc import Sequence

from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.txlog.machine import Fleet

EXAMPLES = 100
"""Of one seed: a second or two, so that a failure's seed finds it soon."""
STEPS = 60
SAY_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(prog="python -m tests.txlog.invariants", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default 10)")
    parser.add_argument("--seed", type=int, help="where to begin; a failure says which finds it (default: any)")
    arguments = parser.parse_args(argv)
    if not 0.01 <= arguments.minutes <= 24 * 60:
        parser.error("--minutes: between 0.01 and 1440")
    first = arguments.seed if arguments.seed is not None else random.SystemRandom().randrange(1_000_000)
    say(f"seed {first}: {arguments.minutes:g} minutes; again with --seed {first}")
    try:
        return run(first, arguments.minutes * 60)
    except KeyboardInterrupt:
        say(f"ended early: {Fleet.steps} steps, all well so far")
        return 130


def run(first: int, seconds: float) -> int:
    """One seed after another until the time is over; the exit code."""
    began = said = time.monotonic()
    number = first
    while (now := time.monotonic()) < began + seconds:
        if now >= said + SAY_S:
            said = now
            say(f"{now - began:4.0f} s: {Fleet.steps} steps, seed {number}, all well")
        try:
            once(number)
        except (AssertionError, ExceptionGroup) as exc:
            say(f"seed {number} breaks it after {Fleet.steps} steps; again with --seed {number}\n{told(exc)}")
            return 1
        number += 1
    say(f"all well: {Fleet.steps} steps of {(number - first) * EXAMPLES} histories, seeds {first} to {number - 1}")
    return 0


def once(number: int) -> None:
    """The histories of one seed."""
    machine = seed(number)(type("Seeded", (Fleet,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            print_blob=True,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def told(exc: BaseException) -> str:
    """What broke, and the steps to it."""
    return "\n".join([f"{type(exc).__name__}: {exc}", *getattr(exc, "__notes__", ())])


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
