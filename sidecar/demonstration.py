"""`sidecar demo`: three simulated engines and a sidecar in front of them, in one process, ready to be called."""

import asyncio
import sys
from collections.abc import Callable, Sequence

import msgspec
import uvloop

from sidecar.demo import show
from sidecar.demo.engine import Engine
from sidecar.main import Running, Signals, serving
from sidecar.policy.load import load
from sidecar.settings import Settings

_GRACE_S = 2.0  # nobody's traffic: the demo ends when its watcher says so


def demo(settings: Settings, fault: str | None, canary: bool = False) -> int:
    """`sidecar demo`: three simulated engines and a sidecar in front of them, ready to be called; the exit code."""
    try:
        uvloop.run(_demonstrate(settings, fault, canary))
    except OSError as exc:
        print(f"sidecar demo: {exc}", file=sys.stderr)
        return 1
    return 0


async def _demonstrate(settings: Settings, fault: str | None, canary: bool) -> None:
    # The demo is an act for a person: request lines would drown it, and nobody waits for it to settle.
    if fault is not None or canary:
        settings = msgspec.structs.replace(settings, access_log="off")
    signals = Signals()
    async with show.engines() as engines:
        policy = load([("demo.yaml", show.policy_text(engines).encode())], 1)
        async with serving(settings, policy) as running, asyncio.TaskGroup() as tasks:
            listen = msgspec.structs.replace(settings.listen, port=running.proxy_port)
            admin = None
            if settings.admin is not None and not settings.admin.path:
                admin = str(msgspec.structs.replace(settings.admin, port=running.admin_port or 0))
            control = running.control.address if running.control is not None else None
            print(show.banner(str(listen), admin, engines, control), flush=True)

            def states() -> dict[str, str]:
                return {view.key: view.state.value for view in running.fleet.views(running.now())}

            def say(words: str) -> None:
                print(f"--- {words}", flush=True)

            act = tasks.create_task(_play(fault, canary, engines, running, states, say))
            await signals.until_stopped(running)
            act.cancel()
            await running.listener.drain(0.0, min(settings.drain_s, _GRACE_S))


async def _play(
    fault: str | None,
    canary: bool,
    engines: Sequence[Engine],
    running: Running,
    states: Callable[[], dict[str, str]],
    say: Callable[[str], None],
) -> None:
    if canary:
        await show.canary(fault, engines, running.proxy_port, running.routes, say)
    elif fault is not None:
        await show.act(fault, engines, running.proxy_port, states, say)
    if canary or fault is not None:
        say("still serving; Ctrl-C ends")
