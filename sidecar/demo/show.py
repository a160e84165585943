"""What `sidecar demo` runs and says: three engines, a policy with waits short enough to watch, and two acts.

The acts are the whole point of the project in half a minute each. A fault: streams flow, one engine goes bad while its
port and its /health stay well, its breaker opens on evidence, the others carry on, it recovers, a probe finds out. A
canary: the third engine has a new version and no traffic; it is led to half of it step by step, or, if it has a fault,
taken back.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from sidecar.core.desk import Desk, TableView
from sidecar.core.revise import Refused, Update
from sidecar.core.table import PARTS, Plan, Step
from sidecar.demo.engine import Engine
from sidecar.demo.script import EngineName, Fault, Kind, Script

COUNT = 3
MODEL = "demo"
STABLE, CANARY = "v1", "v2"
WORKERS = 3
CANARY_WORKERS = 12
"""A canary is judged by its answers, and nobody wants to wait for them."""
ACT_S = 45.0
"""Longest wait for a breaker to open or to close; a shown fault takes a few seconds each."""
WARM_S = 1.0
"""Traffic before the fault and after the recovery, so that there is something to compare."""

ENGINES: tuple[EngineName, ...] = ("vllm", "triton", "deepspeed")
"""Whose words each engine speaks; one after the other, and again."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
"""Triton takes no chats: what makes prompts of them for it."""

CONCURRENCY = 8
"""Requests at each engine: more than the acts' users need, few enough for a person's own loop to fill."""
TRIAL, TRIAL_REQUESTS, TRIAL_TOKENS = "trial", 2, 2000
"""A tenant whose quota is spent at the third request of a minute."""

CALM = Script(tokens=40, first_token_s=0.12, token_gap_s=0.03, models=(MODEL,))
PLAN = Plan(STABLE, (Step(PARTS // 4, 5.0, 40), Step(PARTS // 2, 5.0, 80)))

_POLL_S = 0.05
_AFTER = 3
_SHARE = 0.25
"""Of a canary's answers that have the fault: were it all of them, its breaker would be faster than its judge."""
_HARMLESS = frozenset({Kind.MALFORMED_EVENT, Kind.EXTRA_BYTES, Kind.STALE})


@contextlib.asynccontextmanager
async def engines(count: int = COUNT, script: Script = CALM) -> AsyncIterator[list[Engine]]:
    """That many engines of all kinds on free ports of this machine, alive while the context lasts."""
    scripts = [msgspec.structs.replace(script, engine=ENGINES[at % len(ENGINES)]) for at in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Engine(each)) for each in scripts]


def policy_text(upstreams: Sequence[Engine]) -> str:
    """A policy file for these engines, its waits cut to what a watcher has patience for.

    The last of several is a version of its own, without traffic.
    """
    versions = versions_of(upstreams)
    endpoints = "\n".join(
        f'      - {{url: "{engine.url}", node: engine-{at}, version: {version}{_kind(engine)}}}'
        for at, (engine, version) in enumerate(zip(upstreams, versions, strict=True), 1)
    )
    split = f"\n    split: {{{STABLE}: 100, {CANARY}: 0}}" if CANARY in versions else ""
    return f"""\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: {MODEL}
    endpoints:
{endpoints}{split}
    deadlines: {{head: 2s, first_token: 2s, token_gap: 1s}}
    breakers:
      node: {{consecutive: 3, open: 3s, open_max: 12s, successes: 2}}
    admission: {{limit: fixed, concurrency: {CONCURRENCY}, queue: 100}}
identity:
  session: [{{header: x-session-id}}]
  tenant: [{{header: x-tenant-id, loopback: true}}]
  class: [{{header: x-class, loopback: true}}]
qos_policies:
  - {{name: voice, latency_sla_ms: 500, priority: 9, match: [{{modality: voice}}]}}
  - {{name: default, latency_sla_ms: 5000, priority: 5}}
  - name: code-batch
    latency_sla_ms: 60000
    max_wait: 1m
    priority: 1
    preemptible: true
    evict: streams
    match: [{{modality: code}}]
quotas:
  - {{name: {TRIAL}, tenant: {TRIAL}, requests_per_minute: {TRIAL_REQUESTS}, tokens_per_minute: {TRIAL_TOKENS}}}
"""


def _kind(engine: Engine) -> str:
    kind = engine.script.engine
    return f", engine: {kind}" + (f', chat_template: "{TEMPLATE}"' if kind == "triton" else "")


def versions_of(upstreams: Sequence[Engine]) -> list[str]:
    """The version of each engine."""
    return [CANARY if 0 < at == len(upstreams) - 1 else STABLE for at in range(len(upstreams))]


def banner(proxy: str, admin: str | None, upstreams: Sequence[Engine], control: str | None = None) -> str:
    """What to try, as text to paste. The addresses are `host:port`; `admin` and `control` None where they are off."""
    first = upstreams[0]
    ask = '{"model": "demo", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
    short = '{"model": "demo", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}'
    lines = [
        f"The sidecar listens on {proxy}; {len(upstreams)} simulated engines stand behind it:",
        *(
            f"  engine-{at}  {engine.url}  {engine.script.engine:<9}  {version}"
            f"{', no traffic yet' if version == CANARY else ''}"
            for at, (engine, version) in enumerate(zip(upstreams, versions_of(upstreams), strict=True), 1)
        ),
        "",
        "Stream some tokens (the headers say which engine gave them):",
        f"  curl -Ni http://{proxy}/v1/chat/completions -d '{ask}'",
        "Make the first engine stall after three tokens, ask a few times, see its breaker open:",
        f"""  curl {first.url}/_fault -d '{{"kind": "stall", "after": 3}}'""",
    ]
    if admin is not None:
        lines += [f"  curl http://{admin}/breakers", f"  curl http://{admin}/metrics"]
    lines += [
        "Heal it; a probe finds out by itself:",
        f"  curl -X DELETE {first.url}/_fault",
        f"Other faults: {', '.join(kind.value for kind in Kind)}",
    ]
    if admin is not None and CANARY in versions_of(upstreams):
        lines += [
            f"Let a tenth of new sessions go to {CANARY}, see who gets what, and take it back:",
            f"  sidecar routes set {MODEL} {CANARY} --weight 0.1 --admin {admin}",
            f"  sidecar routes list --admin {admin}",
            f"  sidecar routes set {MODEL} {CANARY} --weight 0 --admin {admin}",
        ]
    lines += [
        f"Be the tenant `{TRIAL}`, who has {TRIAL_REQUESTS} requests a minute (x-ratelimit-*); the third is refused:",
        f"  curl -i http://{proxy}/v1/chat/completions -H 'x-tenant-id: {TRIAL}' -d '{short}'",
    ]
    if admin is not None:
        lines += [
            "Fill the engines with batch work, let voice pass it (a batch stream makes room), and see who waits:",
            f"  for i in $(seq 60); do curl -sN http://{proxy}/v1/chat/completions -H 'x-class: code-batch' "
            f"-d '{ask}' >/dev/null & done",
            f"  curl -sN -o /dev/null -w '%{{time_starttransfer}} s\\n' http://{proxy}/v1/chat/completions "
            f"-H 'x-class: voice' -d '{ask}'",
            f"  sidecar admission --admin {admin}",
        ]
    if control is not None:
        lines.append(f"Release tools say the same by gRPC: grpcurl -plaintext {control} list")
    lines += [
        "Or watch it happen: sidecar demo --fault stall, or --canary, or --canary --fault slow. Ctrl-C ends.",
    ]
    return "\n".join(lines)


async def act(
    fault: str,
    upstreams: Sequence[Engine],
    proxy_port: int,
    states: Callable[[], Mapping[str, str]],
    say: Callable[[str], None],
) -> bool:
    """Let the first engine have `fault` until its breaker opens, heal it, wait until it closes; True if both came.

    `states` gives the node breakers' states by `host:port`; one never tripped may be absent. `fault` is a `Kind`
    (ValueError otherwise). Takes about ten seconds, at most twice `ACT_S`; may be cancelled at any point and leaves
    the engine healed.
    """
    kind = Kind(fault)
    victim = upstreams[0]
    key = f"{victim.host}:{victim.port}"
    watch = _Watch(states, say)
    results: Counter[str] = Counter()
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(_ask_for_ever(proxy_port, results)) for _ in range(WORKERS)]
        try:
            await asyncio.sleep(WARM_S)
            say(
                f"{results.total()} streams so far, all engines well; engine-1 ({key}) now has the fault `{kind.value}`"
            )
            victim.fail(Fault(kind, after=_AFTER, torn=kind in (Kind.CUT_RST, Kind.CUT_FIN)))
            opened = await watch.until(key, "open")
            if not opened:
                say(f"no breaker opened within {ACT_S:.0f} s" + _why_not(kind))
            victim.heal()
            say("engine-1 is healed; its breaker lets a probe through when its wait is over")
            closed = opened and await watch.until(key, "closed")
            await asyncio.sleep(WARM_S)
        finally:
            victim.heal()
            for worker in workers:
                worker.cancel()
    say("what the clients saw: " + ", ".join(f"{count} {what}" for what, count in results.most_common()))
    return closed


async def canary(
    fault: str | None, upstreams: Sequence[Engine], proxy_port: int, desk: Desk, say: Callable[[str], None]
) -> str:
    """Lead the last engine's version to half of the traffic, with `fault` on some of its answers or without; its end.

    The end is the rollout's phase, or "" where none came within `ACT_S`. May be cancelled at any point and leaves the
    engine healed.
    """
    victim = upstreams[-1]
    results: Counter[str] = Counter()
    feed = desk.subscribe()
    async with asyncio.TaskGroup() as group:
        workers = [group.create_task(_ask_for_ever(proxy_port, results)) for _ in range(CANARY_WORKERS)]
        try:
            await asyncio.sleep(WARM_S)
            if fault is not None:
                victim.fail(Fault(Kind(fault), after=_AFTER, share=_SHARE))
            has = f"{_SHARE:g} of its answers have the fault `{fault}`" if fault is not None else "it is well"
            say(f"{results.total()} streams so far, all by {STABLE}; {CANARY} is to get {_shares()} of them, and {has}")
            asked = Update(service=MODEL, version=CANARY, plan=PLAN, by="demo")
            told = await desk.submit(asked)
            if isinstance(told, Refused):
                say(f"refused: {told.message}")
                return ""
            phase = ""
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ACT_S):
                    while phase in ("", "running"):
                        for event in await feed.next():
                            if isinstance(event, TableView):
                                phase = _tell(event, say) or phase
            await asyncio.sleep(WARM_S)
        finally:
            feed.close()
            victim.heal()
            for worker in workers:
                worker.cancel()
    say("what the clients saw: " + ", ".join(f"{count} {what}" for what, count in results.most_common()))
    return phase


def _shares() -> str:
    return " and then ".join(f"{step.weight / PARTS:g}" for step in PLAN.steps)


def _tell(view: TableView, say: Callable[[str], None]) -> str:
    """Say where a canary is; its phase, "" where there is none."""
    rollout = view.table.rollout
    if rollout is None:
        return ""
    weight = view.table.weights.get(rollout.version, 0) / PARTS
    where = f"step {rollout.step + 1}" if rollout.live else rollout.phase
    say(f"canary {rollout.version}: {where}, has {weight:g}" + (f"; {rollout.evidence}" if rollout.evidence else ""))
    return rollout.phase


def _why_not(kind: Kind) -> str:
    return ": this fault harms no stream, so it counts little or nothing" if kind in _HARMLESS else ""


class _Watch:
    """Says each change of a breaker once."""

    def __init__(self, states: Callable[[], Mapping[str, str]], say: Callable[[str], None]) -> None:
        self._states = states
        self._say = say
        self._known: dict[str, str] = {}

    async def until(self, key: str, state: str) -> bool:
        """True once the breaker of `key` is in `state`; False after ACT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ACT_S):
                while True:
                    for name, now in self._states().items():
                        if self._known.get(name, "closed") != now:
                            self._say(f"breaker of {name}: {self._known.get(name, 'closed')} -> {now}")
                        self._known[name] = now
                    if self._known.get(key, "closed") == state:
                        return True
                    await asyncio.sleep(_POLL_S)
        return False


async def _ask_for_ever(port: int, results: Counter[str]) -> None:
    while True:
        results[await _ask(port)] += 1


async def _ask(port: int) -> str:
    """One stream, read to its end; what became of it, in words."""
    body = b'{"model": "demo", "stream": true, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: demo\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(head % len(body) + body)
            answer = await reader.read(-1)
        finally:
            writer.close()
    except OSError as exc:
        await asyncio.sleep(_POLL_S)
        return type(exc).__name__
    status = answer[9:12].decode("latin-1")
    if status != "200":
        await asyncio.sleep(_POLL_S)
        return f"refused with {status or 'nothing'}"
    if b'"error"' in answer:
        return "cut, and told so in band"
    return "whole" if b"data: [DONE]" in answer else "cut in silence"
