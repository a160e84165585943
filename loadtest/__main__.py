"""`python -m loadtest SCENARIO`: one run, its marks, and an exit code: 0 passed, 1 failed, 2 usage."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence

# Before all that opens sockets (the rest of `loadtest`, ssl above all): importing locust makes them gevent's.
try:
    import locust  # noqa: F401
except ModuleNotFoundError:
    sys.exit("loadtest: locust is not installed here; `make load` sets it up, or: pip install -e '.[load]'")

import msgspec

from loadtest import drive, scenarios
from loadtest.shapes import SHAPES
from loadtest.sse_client import Target
from loadtest.stage import StageError

MAX_S = 3600.0
MAX_USERS = 5000
"""More would measure this process: its CPU ends at some thousand streams."""

EXAMPLES = """\
examples:
  python -m loadtest list
  python -m loadtest stall
  python -m loadtest stall --seconds 90 --users 120 --json
  python -m loadtest stall --seconds 120 --patience 60 --service '{}'   under the default policy
  python -m loadtest kill --broken                              must fail: breakers are off
  python -m loadtest surge --url http://10.0.0.7:9400 --admin http://10.0.0.7:9401 --model llama --users 40
"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring for its exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.url and (args.broken or args.service is not None):
        parser.error("--broken and --service are for the sidecar that is started here, not with --url")
    if args.admin and not args.url:
        parser.error("--admin goes with --url")
    if args.scenario == "list":
        _list(as_json=args.json)
        return 0
    options = drive.Options(
        seconds=args.seconds,
        users=args.users,
        shape=SHAPES[args.shape] if args.shape else None,
        url=args.url or "",
        admin=args.admin or "",
        model=args.model,
        headers=tuple(args.header),
        ttft_s=args.ttft,
        patience_s=args.patience,
        service=args.service,
        broken=args.broken,
    )
    # As Ctrl-C: the processes that were started are ended, a frozen one too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        outcome = drive.run(scenarios.scenario(args.scenario), options)
    except (StageError, ValueError) as exc:
        print(f"loadtest: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("loadtest: interrupted; nothing was judged", file=sys.stderr)
        return 1
    print(msgspec.json.format(msgspec.json.encode(_told(outcome))).decode() if args.json else _table(outcome))
    return 0 if outcome.ok else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest",
        description="A claim under load: three simulated engines and a sidecar, users, a fault, pass marks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("scenario", choices=["list", *scenarios.names()], help="which claim; `list` shows all")
    parser.add_argument("--seconds", type=_number(1.0, MAX_S), default=0.0, help="of load; default as in the scenario")
    parser.add_argument("--users", type=_count, default=0, help="at the peak of the shape; default as in the scenario")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="", help="load over time, in place of the scenario's"
    )
    parser.add_argument(
        "--ttft", type=_number(0.001, 600.0), default=0.0, help="seconds; a later first token is no good"
    )
    parser.add_argument(
        "--patience", type=_number(0.1, 3600.0), default=0.0, help="seconds a user waits for a byte before leaving"
    )
    parser.add_argument(
        "--service",
        type=_service,
        default=None,
        help="JSON of the policy's service (no name, no endpoints) in place of the scenario's; '{}': all defaults",
    )
    parser.add_argument("--json", action="store_true", help="the outcome as JSON on stdout")
    parser.add_argument("--broken", action="store_true", help="take away what the claim rests on: the run must fail")
    real = parser.add_argument_group("against something real (no fault is injected)")
    real.add_argument("--url", type=_url, default=None, help="where the users send, such as http://127.0.0.1:9400")
    real.add_argument(
        "--admin", type=_url, default=None, help="a sidecar's admin pages, for the marks on breakers and memory"
    )
    real.add_argument("--model", default="demo", help="the model that users ask for (default: demo)")
    real.add_argument("--header", type=_header, action="append", default=[], help="such as 'authorization: Bearer KEY'")
    return parser


def _number(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low:g} to {high:g}")
        return value

    return number


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_USERS:
        raise argparse.ArgumentTypeError(f"{text} is not from 1 to {MAX_USERS}")
    return value


def _service(text: str) -> dict[str, object]:
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError as exc:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object: {exc}") from exc


def _url(text: str) -> str:
    try:
        Target.of(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from exc
    return text


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not value.strip() or "\n" in text or "\r" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not `name: value`")
    return name.strip().lower(), value.strip()


def _list(*, as_json: bool) -> None:
    every = [scenarios.scenario(name) for name in scenarios.names()]
    if as_json:
        print(
            msgspec.json.encode(
                [{"name": each.name, "claim": each.claim, "seconds": each.seconds} for each in every]
            ).decode()
        )
        return
    for each in every:
        print(f"{each.name:9} {each.seconds:3.0f} s  {each.claim}")
        print(f"{'':17}--broken: {each.broken}")


def _told(outcome: drive.Outcome) -> dict[str, object]:
    return {
        "scenario": outcome.scenario,
        "claim": outcome.claim,
        "passed": outcome.ok,
        "marks": [{**msgspec.to_builtins(mark), "ok": mark.ok} for mark in outcome.marks],
        "figures": outcome.figures,
        "endings": outcome.endings,
        "breakers": [{"at_s": round(at, 2), "breaker": key, "state": state} for at, key, state in outcome.changes],
        "broken_streams": outcome.examples,
    }


def _table(outcome: drive.Outcome) -> str:
    words = {True: "ok", False: "FAIL", None: "-"}
    lines = [f"{'':6}{'mark':44}{'measured':>12}   limit"]
    for mark in outcome.marks:
        measured = "not measured" if mark.measured is None else f"{mark.measured:.4g}"
        lines.append(
            f"{words[mark.ok]:6}{mark.name:44}{measured:>12}   {mark.sign} {mark.limit:.4g} {mark.unit}".rstrip()
        )
    lines.append("")
    lines += [f"      {name:44}{value:>12.4g}" for name, value in outcome.figures.items()]
    lines.append("      " + ", ".join(f"{number} {ending}" for ending, number in outcome.endings.items()))
    lines += [f"      {at:5.1f} s  {key} -> {state}" for at, key, state in outcome.changes[:20]]
    lines += [f"      {example}" for example in outcome.examples]
    lines += ["", f"{outcome.scenario}: {'passed' if outcome.ok else 'FAILED'}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
