"""`sidecar run` that tells on SIGUSR1 what it holds: `python -m soak.observed run ...`.

Metrics count what is counted; a task, an object or a probe's place that was lost is in no metric. So this is the
program itself with one more signal: the answer goes, as JSON, to the file that `SOAK_TELL` names, whole or not at all.
It costs nothing between signals.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

import sidecar.main
from sidecar.cli import main
from sidecar.main import Running
from sidecar.policy.schema import Snapshot
from sidecar.settings import Settings
from tests.under_test import held

TELL = "SOAK_TELL"


class Told(msgspec.Struct, frozen=True):
    """What the process holds. `objects`: live instances of the sidecar's own classes; `garbage`: those that were dead
    and waited for the collector, which may take its time and keep megabytes until then."""

    serial: int
    pid: int
    tasks: int
    held: list[str]
    objects: dict[str, int]
    garbage: dict[str, int]


def tell(running: Running, into: Path, serial: int) -> None:
    """Write what is held now. Blocks the loop for a collection; nobody asks under measured load."""
    before = _objects()
    gc.collect()
    objects = _objects()
    told = Told(serial, os.getpid(), len(asyncio.all_tasks()), held(running), dict(objects), dict(before - objects))
    part = into.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(told))
    part.replace(into)


def _objects() -> Counter[str]:
    """Objects of the sidecar's own classes, by class; those that the collector does not track are not among them."""
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in map(type, gc.get_objects())
        if kind.__module__.startswith("sidecar.")
    )


def observe(into: Path) -> None:
    """Put the signal around what `sidecar run` runs."""
    serving = sidecar.main.serving

    @contextlib.asynccontextmanager
    async def observed(
        settings: Settings, snapshot: Snapshot | None = None, *, log_fd: int = 1
    ) -> AsyncIterator[Running]:
        async with serving(settings, snapshot, log_fd=log_fd) as running:
            serial = 0

            def on_signal() -> None:
                nonlocal serial
                serial += 1
                tell(running, into, serial)

            asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, on_signal)
            yield running

    sidecar.main.serving = observed


if __name__ == "__main__":
    observe(Path(os.environ[TELL]))
    sys.exit(main())
