"""The command `sidecar`: who answers which verb, and its exit codes (0 ok, 1 refused or failed, 2 usage).

What may be typed is in `sidecar.verbs`. What a verb needs is imported when the verb runs: `sidecar breakers list` must
not wait for the relay's imports.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import assert_never

from sidecar.settings import EMBEDDED_PACKAGE, Here, Settings, UsageError, from_arguments
from sidecar.verbs.declare import Does
from sidecar.verbs.tree import tree

OK, FAILED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb in `argv` (default: the process's arguments); the exit code. Never raises for what a user typed."""
    parser = tree()
    try:
        arguments = parser.parse_args(argv)
    except SystemExit as exc:  # argparse leaves by itself: 0 after --help, 2 after a usage error
        return exc.code if isinstance(exc.code, int) else USAGE
    does: Does | None = arguments.verb
    if does is None:
        parser.print_help(sys.stderr)
        return USAGE
    try:
        code = _answer(does, arguments)
        sys.stdout.flush()
        return code
    except UsageError as exc:
        print(f"sidecar: {exc}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # `| head` closed our output; the interpreter's own flush at exit must not complain about it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _answer(does: Does, arguments: argparse.Namespace) -> int:
    match does:
        case "run":
            return _run(arguments)
        case "demo":
            return _demo(arguments)
        case "xds":
            return _xds(arguments)
        case "validate":
            return _validate(arguments)
        case "simulate":
            from sidecar import simulation

            return simulation.simulate(arguments)
        case "inject":
            from sidecar import injection

            return injection.inject(arguments)
        case "webhook":
            from sidecar import webhook

            return webhook.serve(arguments)
        case "ask":
            from sidecar import operate

            return operate.ask(arguments)
        case "quota":
            from sidecar import quota

            return quota.ask(arguments)
        case "release":
            from sidecar import release

            return release.ask(arguments)
        case "models":
            from sidecar import models

            return models.ask(arguments)
        case "log":
            from sidecar import chronicle

            return chronicle.read(arguments)
        case "replay":
            from sidecar import replay

            return replay.replay(arguments)
        case "version":
            return _version(arguments)
        case _:
            assert_never(does)


def _settings(arguments: argparse.Namespace, *, relay: bool = True) -> Settings:
    here = Here(os.uname().nodename, os.getpid(), find_spec(EMBEDDED_PACKAGE) is not None)
    return from_arguments(arguments, os.environ, here, relay=relay)


def _run(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    from sidecar import main as composition

    return composition.run(settings)


def _xds(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments, relay=False)
    from sidecar.xds import run

    return run(settings)


def _demo(arguments: argparse.Namespace) -> int:
    settings = _settings(arguments)
    import tempfile

    import msgspec

    from sidecar import demonstration
    from sidecar.demo.script import Kind

    if settings.policy is not None or settings.upstreams:
        raise UsageError("the demo has engines and a policy of its own: leave out --policy and --upstream")
    if arguments.fault is not None and arguments.fault not in set(Kind):
        raise UsageError(f'--fault: "{arguments.fault}" is not one of {", ".join(Kind)}')
    if arguments.data is not None or os.environ.get("SIDECAR_DATA"):
        return demonstration.demo(settings, arguments.fault, arguments.canary)
    # Every demo begins with all breakers closed, and leaves nothing.
    with tempfile.TemporaryDirectory(prefix="llm-sidecar-demo-", ignore_cleanup_errors=True) as data:
        return demonstration.demo(msgspec.structs.replace(settings, data=Path(data)), arguments.fault, arguments.canary)


def _validate(arguments: argparse.Namespace) -> int:
    from sidecar.kernel.count import counted
    from sidecar.policy.errors import PolicyErrors
    from sidecar.templates import Templates
    from sidecar.watch import read_policy

    errors: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    summary = ""
    try:
        # As `run` does: a template that is missing here may be there, so it is a warning.
        snapshot = Templates(lambda: 0.0, lambda level, event, **fields: None).read(read_policy(Path(arguments.path)))
    except PolicyErrors as exc:
        errors = tuple(str(error) for error in exc.errors)
    else:
        warnings = snapshot.warnings
        endpoints = sum(len(service.endpoints) for service in snapshot.services)
        summary = f"services: {len(snapshot.services)}, endpoints: {endpoints}"
    if arguments.json:
        _print_json({"ok": not errors, "errors": errors, "warnings": warnings})
        return FAILED if errors else OK
    for error in errors:
        print(error)
    for warning in warnings:
        print(f"{arguments.path}: warning: {warning}")
    print(f"{arguments.path}: {counted(len(errors), 'error') if errors else f'ok ({summary})'}")
    return FAILED if errors else OK


def _version(arguments: argparse.Namespace) -> int:
    from sidecar import installed

    if arguments.json:
        _print_json({"name": "llm-sidecar", "version": installed.number(), "compiled": installed.compiled()})
    else:
        print(f"sidecar {installed.number()} ({'compiled' if installed.compiled() else 'interpreted'})")
    return OK


def _print_json(value: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
