"""What quotas took, gave back and refused, as this sidecar counted it: read off the ledger at every scrape.

By quota, which the policy names, and never by tenant: there may be 100,000 of those.
"""

from collections.abc import Callable, Iterator
from typing import Final

from sidecar.core.quotas.quota import Counts, Ledger
from sidecar.telemetry.series import header, label_text

QUOTA_METRICS: Final[tuple[tuple[str, str, Callable[[Counts], int]], ...]] = (
    (
        "sidecar_quota_reserved_tokens_total",
        "Tokens that requests took before they went, by what they might use",
        lambda counts: counts.reserved_tokens,
    ),
    (
        "sidecar_quota_settled_tokens_total",
        "Tokens that requests had used when they ended",
        lambda counts: counts.settled_tokens,
    ),
    (
        "sidecar_quota_credit_tokens_total",
        "Tokens that were reserved before the log had granted any",
        lambda counts: counts.credit_tokens,
    ),
    (
        "sidecar_quota_debt_tokens_total",
        "Tokens that requests used beyond what they had reserved",
        lambda counts: counts.debt_tokens,
    ),
    ("sidecar_quota_draws_total", "Draws that the log answered", lambda counts: counts.draws),
    ("sidecar_quota_draw_failures_total", "Draws that the log did not answer", lambda counts: counts.draw_failures),
)


def pieces(ledger: Ledger) -> Iterator[str]:
    """The text; may be suspended between pieces while requests go on."""
    known = list(ledger.counts.items())
    for name, text, read in QUOTA_METRICS:
        yield header(name, text, "counter")
        for quota, counts in known:
            yield f"{name}{{{label_text(('quota',), (quota,))}}} {read(counts)}\n"
    refused = "sidecar_quota_refused_total"
    yield header(refused, "Requests that were over a quota: refused, or, in shadow mode, let through", "counter")
    for quota, counts in known:
        for mode, by_window in (("enforce", counts.refused), ("shadow", counts.shadow_refused)):
            for window, count in list(by_window.items()):
                # The key of the policy file whose number it is.
                labels = label_text(("quota", "window", "mode"), (quota, window.replace(" ", "_"), mode))
                yield f"{refused}{{{labels}}} {count}\n"
