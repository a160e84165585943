"""The policies of a soak: one that is in force at the start, and those that replace it under traffic.

Deadlines and waits are short, so that every one of them is met hundreds of times. The services keep their names
through all of them: the metrics of a service that leaves the policy are forgotten, and nothing could be summed up.
"""

from collections.abc import Sequence

import msgspec

SESSION_BOUNDS = {"chat": 300, "small": 100}
"""`max_sessions` of each service."""

BODY_LIMIT = 8 << 20
IDLE_CLIENT_S = 4.0
TOTAL_S = 120.0
"""Chat's: not to be met, and long because a probe's place that was lost is lent again only that much later."""

OPEN_MAX_S = 3.0


class Variant(msgspec.Struct, frozen=True):
    """What differs from the first policy. `endpoints` are numbers of engines, the last of them the canary."""

    split: str = "{v1: 90, v2: 10}"
    endpoints: tuple[int, ...] = (0, 1, 2)
    deadlines: str = "head: 2s, first_token: 1500ms, token_gap: 1s"
    node: str = ""
    retry: str = "{}"
    balance: str = "{}"
    fallback: str = "small"


VARIANTS: dict[str, Variant] = {
    "first": Variant(),
    "canary-half": Variant(split="{v1: 50, v2: 50}"),
    "canary-off": Variant(split="{v1: 100, v2: 0}"),
    "one-less": Variant(endpoints=(1, 2)),
    "tight": Variant(deadlines="head: 1500ms, first_token: 1s, token_gap: 800ms", node=", consecutive: 2"),
    "shadow": Variant(node=", mode: shadow"),
    "no-retry": Variant(retry="{attempts: 1}", fallback='""'),
    "no-affinity": Variant(balance='{affinity: "off"}'),
}

BROKEN = "broken"
NAMES = (*VARIANTS, BROKEN)


def text(name: str, ports: Sequence[int]) -> str:
    """The policy's YAML; `ports` of the engines in their order. `BROKEN` is one that must be refused."""
    variant = VARIANTS.get(name, Variant(split="{v1: -1}"))
    endpoints = "\n".join(
        f'      - {{url: "http://127.0.0.1:{ports[number]}", version: {"v2" if number == 2 else "v1"}}}'
        for number in variant.endpoints
    )
    idle = f"idle_client: {IDLE_CLIENT_S:.0f}s"
    wait = f"open: 500ms, open_max: {OPEN_MAX_S:.0f}s, successes: 1"
    return f"""\
apiVersion: sidecar/v1
kind: Policy
services:
  - name: chat
    models: ["chat-*"]
    endpoints:
{endpoints}
    split: {variant.split}
    fallback: {variant.fallback}
    deadlines: {{{variant.deadlines}, total: {TOTAL_S:.0f}s, {idle}}}
    retry: {variant.retry}
    balance: {variant.balance}
    limits: {{body_bytes: {BODY_LIMIT}}}
    overload: {{retry_after_default: 100ms, retry_after_cap: 200ms}}
    breakers:
      node: {{{wait}{variant.node}}}
      session: {{open: 1s, open_max: {OPEN_MAX_S:.0f}s, max_sessions: {SESSION_BOUNDS["chat"]}, idle: 30s}}
      request: {{{wait}}}
  - name: small
    models: [small]
    endpoints:
      - {{url: "http://127.0.0.1:{ports[3]}"}}
    deadlines: {{head: 2s, first_token: 1500ms, token_gap: 1s, total: 20s, {idle}}}
    limits: {{body_bytes: {BODY_LIMIT}}}
    overload: {{retry_after_default: 100ms, retry_after_cap: 200ms}}
    breakers:
      node: {{{wait}, min_closed_ratio: 0}}
      session: {{open: 1s, open_max: {OPEN_MAX_S:.0f}s, max_sessions: {SESSION_BOUNDS["small"]}, idle: 30s}}
      request: {{{wait}}}
ready_when: always
"""
