"""`sidecar inject`: manifests from files in, with the sidecar in their pods out.

Everything is read before anything is written, and a file is replaced in one step, so `-o` may be the file that is read.
Warnings and problems go to standard error; where there is a problem nothing is written, and the exit code is 1. To have
read no object at all is one, as it is to kubectl: what came before in the pipe has failed.
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from sidecar import installed
from sidecar.inject.documents import Told, injected, uninjected
from sidecar.inject.names import NAME
from sidecar.inject.pod import MAX_DRAIN_S, Defaults
from sidecar.inject.tree import chunks, compose
from sidecar.policy.duration import parse_seconds
from sidecar.settings import UsageError

OK: Final = 0
FAILED: Final = 1

MAX_BYTES: Final = 64 << 20
STDIN: Final = "-"


def inject(arguments: argparse.Namespace) -> int:
    """Run the verb; the exit code. UsageError for flags that mean nothing, and files that cannot be read."""
    if arguments.files.count(STDIN) > 1:
        raise UsageError("-f: standard input is there twice")
    defaults = defaults_from(arguments)
    files = [("stdin" if name == STDIN else name, _read(name)) for name in arguments.files]
    outcome = uninjected(files) if arguments.uninject else injected(files, defaults)
    for warning in outcome.warnings:
        _say("warning: ", warning)
    for problem in outcome.problems:
        _say("", problem)
    if outcome.problems:
        return FAILED
    if not outcome.pods and all(map(_is_empty, outcome.texts)):
        print(f"sidecar inject: no object in {', '.join(name for name, _ in files)}", file=sys.stderr)
        return FAILED
    _write(arguments.output, joined(outcome.texts))
    return OK


def defaults_from(arguments: argparse.Namespace) -> Defaults:
    """What flags say of every pod. UsageError."""
    usual = Defaults()
    version = installed.number()
    drain_s = usual.drain_s
    if arguments.drain is not None:
        try:
            seconds = parse_seconds(arguments.drain)
        except ValueError as exc:
            raise UsageError(f"--drain: {exc}") from exc
        if not (1 <= seconds <= MAX_DRAIN_S and seconds == int(seconds)):
            raise UsageError(f"--drain: {arguments.drain} is not a number of whole seconds up to {MAX_DRAIN_S}")
        drain_s = int(seconds)
    return Defaults(
        version=version,
        image=arguments.image or (f"{NAME}:{version}" if version[:1].isdigit() else usual.image),
        pull_policy=arguments.image_pull_policy or usual.pull_policy,
        policy=arguments.policy or usual.policy,
        drain_s=drain_s,
    )


def joined(texts: tuple[str, ...]) -> str:
    """Files as one stream of documents."""
    whole = ""
    for text in texts:
        if whole and text:
            whole += "" if whole.endswith("\n") else "\n"
            whole += "" if text.startswith("---") else "---\n"
        whole += text
    return whole


def _read(name: str) -> str:
    try:
        if name == STDIN:
            data = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            with Path(name).open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
    except OSError as exc:
        raise UsageError(f"-f: {name}: {exc.strerror or exc}") from exc
    if len(data) > MAX_BYTES:
        raise UsageError(f"-f: {name} is longer than {MAX_BYTES} bytes")
    try:
        return data.decode()
    except UnicodeDecodeError as exc:
        raise UsageError(f"-f: {name} is not UTF-8: byte 0x{data[exc.start]:02x} at {exc.start}") from exc


def _is_empty(text: str) -> bool:
    """Whether there is nothing in a file but comments, empty documents and words, as of an error page."""
    roots = [compose(part) for part in chunks(text)]
    return not any(isinstance(root.value, dict | list) and root.value for root in roots if root is not None)


def _write(name: str, text: str) -> None:
    data = text.encode()
    if name == STDIN:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    path = Path(name)
    if path.exists() and not path.is_file():
        path.write_bytes(data)  # a pipe, or /dev/stdout
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        if path.exists():
            draft.chmod(path.stat().st_mode)
        draft.replace(path.resolve())
    except OSError as exc:
        raise UsageError(f"-o: {name}: {exc.strerror or exc}") from exc
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def _say(kind: str, told: Told) -> None:
    print(f"sidecar inject: {kind}{told}", file=sys.stderr)
