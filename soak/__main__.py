"""`python -m soak`: the soak's command line.

Exit codes: 0 all well, 1 a breach, 2 usage, 130 ended early and all well so far.
"""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence

import msgspec
import uvloop

from soak.plan import MIX
from soak.report import text
from soak.run import Options, Soak, say

EXAMPLES = """\
examples:
  python -m soak                          ten minutes, seed 1, the sidecar at half of a core
  python -m soak --minutes 1 --seed 7     one minute of another plan
  python -m soak --json > report.json     the report as JSON; progress stays on stderr
  make soak SOAK="--minutes 30 --seed 3"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, soak, report."""
    parser = argparse.ArgumentParser(
        prog="python -m soak",
        description="Mixed traffic, random faults, aborts and policy reloads; then a look at what was left behind.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long traffic runs (default 10)")
    parser.add_argument("--seed", type=int, default=1, help="what traffic and faults are drawn from (default 1)")
    parser.add_argument("--cpu", type=float, default=0.5, help="share of a core the sidecar shall take (default 0.5)")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument(
        "--program",
        default="soak.observed",
        metavar="MODULE",
        help="what is run as the sidecar: soak.observed, or a module that wraps it",
    )
    arguments = parser.parse_args(argv)
    if not 0.05 <= arguments.minutes <= 24 * 60:
        parser.error("--minutes: between 0.05 and 1440")
    if not 0.01 <= arguments.cpu <= 0.9:
        parser.error("--cpu: between 0.01 and 0.9; at a full core there is nothing left to see faults with")
    options = Options(arguments.minutes, arguments.seed, arguments.cpu, arguments.program)
    try:
        return uvloop.run(_soak(options, arguments.json))
    except KeyboardInterrupt:
        say("ended at once: nothing was checked")
        return 130


async def _soak(options: Options, as_json: bool) -> int:
    soak = Soak(options, say)
    _tell_plan(soak, options)
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        say("stopping: traffic ends now, the checks follow; once more ends at once")
        loop.remove_signal_handler(signal.SIGINT)
        soak.stop()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    report = await soak.run()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(text(report))
    if not report.ok:
        return 1
    return 130 if report.interrupted else 0


def _tell_plan(soak: Soak, options: Options) -> None:
    say(f"seed {options.seed}, {options.minutes:g} minutes, the sidecar at {options.cpu_ratio:g} of a core")
    total = sum(weight for _, weight in MIX)
    say("asked, in percent: " + ", ".join(f"{kind.value} {100 * weight / total:.1f}" for kind, weight in MIX))
    planned = [(each.at_s, str(each)) for each in soak.troubles] + [(each.at_s, str(each)) for each in soak.reloads]
    for _, words in sorted(planned):
        say(f"  {words}")


if __name__ == "__main__":
    sys.exit(main())
