"""Draws the panels that bench.compare.panels describes: JSON on stdin, a PNG at the path that is given.

Runs in an environment of its own (matplotlib is no business of the sidecar's), so it imports nothing of ours.
"""

import json
import sys
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OURS, THEIRS, FLOOR, BEHIND = "#c2410c", "#475569", "#94a3b8", 0.35


def colour(arm: str) -> str:
    if arm.startswith("sidecar"):
        return OURS
    return FLOOR if arm == "passthrough" else THEIRS


def draw(axes: Axes, panel: dict[str, Any]) -> None:
    bars, behind, cap = panel["bars"], {bar["arm"]: bar for bar in panel["behind"]}, panel["cap"]
    limit = cap * 1.22 or 1.0
    for place, bar in enumerate(bars):
        arm, height = bar["arm"], 0.62
        far = behind.get(arm)
        if far is not None:
            axes.barh(place, min(far["median"], cap), height, color=colour(arm), alpha=BEHIND)
        axes.barh(place, min(bar["median"], cap), height, color=colour(arm))
        if far is None and bar["least"] < bar["most"] <= cap:
            span = [[bar["median"] - bar["least"]], [bar["most"] - bar["median"]]]
            axes.errorbar(bar["median"], place, xerr=span, color="black", linewidth=0.9, capsize=2.5)
        values = [bar["median"]] + ([far["median"]] if far is not None else [])
        cut = max(values) > cap
        end = cap if cut else max(*values, bar["most"] if far is None and bar["most"] <= cap else 0)
        words = " / ".join(f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values)
        axes.text(end + limit * 0.012, place, words + (" →" if cut else ""), va="center", fontsize=8.5)
    axes.set_yticks(range(len(bars)), [bar["arm"] for bar in bars], fontsize=9)
    for label in axes.get_yticklabels():
        if label.get_text().startswith("sidecar"):
            label.set_fontweight("bold")
    axes.invert_yaxis()
    axes.set_xlim(0, limit)
    axes.set_title(panel["title"], fontsize=11, loc="left", fontweight="bold")
    axes.set_xlabel(panel["unit"], fontsize=8.5)
    axes.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    spec = json.load(sys.stdin)
    columns = min(3, len(spec["panels"]))
    rows = -(-len(spec["panels"]) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(5.4 * columns, 0.8 + 3.3 * rows), squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number < len(spec["panels"]):
            draw(axes, spec["panels"][number])
        else:
            axes.set_visible(False)
    figure.text(0.01, 0.008, spec["subtitle"], fontsize=8.5, color="#334155")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
