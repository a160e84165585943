"""Draws what bench.breaker_ab.pictures describes: JSON on stdin, a PNG at the path that is given.

Runs in an environment of its own (matplotlib is no business of the sidecar's), so it imports nothing of ours.
"""

import json
import sys
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

OURS, THEIRS = "#c2410c", "#475569"
STATES = {"open": "#dc2626", "half_open": "#f59e0b"}
FAULT = "#cbd5e1"


def dots(axes: Axes, panel: dict[str, Any]) -> None:
    """One dot per arm, with its name beside it; names that would overlap are moved apart."""
    taken: list[tuple[float, float]] = []
    log = panel.get("log", False)
    if log:
        axes.set_xscale("symlog", linthresh=panel["linear"])
    for dot in sorted(panel["dots"], key=lambda dot: -dot["y"]):
        colour = OURS if dot["ours"] else THEIRS
        axes.plot(dot["x"], dot["y"], "o", color=colour, markersize=9 if dot["ours"] else 6)
        place = axes.transData.transform((dot["x"], dot["y"]))
        shift = 0.0
        while any(abs(place[0] - x) < 110 and abs(place[1] + shift - y) < 11 for x, y in taken):
            shift -= 11
        taken.append((place[0], place[1] + shift))
        axes.annotate(
            dot["arm"],
            (dot["x"], dot["y"]),
            xytext=(7, shift * 72 / axes.figure.dpi - 3),
            textcoords="offset points",
            fontsize=7.5,
            color=colour,
            fontweight="bold" if dot["ours"] else "normal",
        )
    axes.set_xlabel(panel["x"], fontsize=9)
    axes.set_ylabel(panel["y"], fontsize=9)
    plain(axes, panel["title"])


def timeline(axes: Axes, panel: dict[str, Any]) -> None:
    """A row per pod: its faults behind, its breaker's states, and a stroke for each request that went wrong there."""
    for fault in panel["faults"]:
        for pod in fault["pods"]:
            axes.barh(pod, fault["end"] - fault["begin"], 0.9, fault["begin"], color=FAULT)
    for span in panel["spans"]:
        axes.barh(span["pod"], span["end"] - span["begin"], 0.36, span["begin"], color=STATES[span["state"]])
    for pod in range(panel["pods"]):
        at = [bad["at"] for bad in panel["bad"] if bad["pod"] == pod]
        axes.plot(at, [pod - 0.33] * len(at), "|", color="black", markersize=4, markeredgewidth=0.6)
    axes.set_ylim(panel["pods"] - 0.4, -0.6)
    axes.set_yticks(range(panel["pods"]))
    axes.set_xlim(panel["begin"], panel["end"])
    plain(axes, panel["title"])


def plain(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", fontweight="bold")
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main() -> None:
    spec = json.load(sys.stdin)
    panels, columns = spec["panels"], min(spec["columns"], len(spec["panels"]))
    rows = -(-len(panels) // columns)
    size = (spec["width"] * columns, 0.6 + spec["height"] * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, dpi=110)
    for number, axes in enumerate(grid.flat):
        if number >= len(panels):
            axes.set_visible(False)
            continue
        panel = panels[number]
        if panel["kind"] == "dots":
            axes.set_xlim(*panel["span_x"])
            axes.set_ylim(*panel["span_y"])
            dots(axes, panel)
        else:
            timeline(axes, panel)
    figure.text(0.01, 0.006, spec["subtitle"], fontsize=8.5, color="#334155")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(sys.argv[1], dpi=110)


if __name__ == "__main__":
    main()
