"""Results as text."""

from bench.compare.measure import KINDS
from bench.compare.results import Results


def text(results: Results) -> str:
    lines = []
    for kind in KINDS:
        for arm in results.arms:
            us = results.spread(arm, kind, lambda s: s.us)
            if us is None:
                continue
            rate = results.spread(arm, kind, lambda s: s.per_s)
            ratio = results.ratio(arm, "envoy", kind) if "envoy" in results.arms else None
            said = f"{kind:<9}{arm:<15}{us.median:8.1f} ({us.least:.1f}-{us.most:.1f}) us"
            said += f"  {rate.median if rate else 0:8.0f}/s"
            if ratio:
                said += f"  {ratio.median:.2f} ({ratio.least:.2f}-{ratio.most:.2f}) of envoy"
            for time in ("request_us", "first_us", "delta_us"):
                for share in ("p50", "p99"):
                    added = results.added_us(arm, kind, time, share)
                    if added:
                        said += f"  +{time[:-3]} {share} {added.median:.0f}"
            lines.append(said)
    return "\n".join(lines)
