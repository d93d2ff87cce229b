# SPDX-License-Identifier: Apache-2.0
"""The benchmark's graph: bandwidth by block size. Needs matplotlib, which is no dependency."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_COLOURS = {"ours": "#1b6ca8", "bundled": "#8a8a8a", "pre-release": "#d9822b"}
_NAMES = {"ours": "lmcache-rbln", "bundled": "LMCache, bundled", "pre-release": "LMCache 0.5.7rc3"}


def available() -> bool:
    """Whether a graph can be drawn."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(path: Path, results: Sequence[dict[str, Any]], link: dict[str, float], title: str) -> None:
    """Draw one panel a layout and direction.

    Args:
        path: PNG file to write.
        results: One a row, as the measuring process gives them, each with its ``row``.
        link: GB/s of the link, by direction.
        title: Of the whole.
    """
    # By name: type checkers need not know an optional package.
    agg = importlib.import_module("matplotlib.backends.backend_agg")
    figures = importlib.import_module("matplotlib.figure")
    layouts = list(dict.fromkeys(result["row"]["layout"] for result in results))
    figure = figures.Figure(figsize=(9, 3.2 * len(layouts) + 0.6), dpi=80, layout="constrained")
    agg.FigureCanvasAgg(figure)
    panels = figure.subplots(len(layouts), 2, squeeze=False, sharex=True, sharey=True)
    for layout, line in zip(layouts, panels, strict=True):
        rows = sorted(
            (result for result in results if result["row"]["layout"] == layout),
            key=lambda result: result["row"]["block_size"],
        )
        sizes = [result["row"]["block_size"] for result in rows]
        for direction, panel in zip(("store", "retrieve"), line, strict=True):
            panel.axhline(link[direction], color="black", linestyle="--", linewidth=1, label="link")
            for name, colour in _COLOURS.items():
                if all(name in result["ways"] for result in rows):
                    speeds = [
                        result["nbytes"] / result["ways"][name][direction]["seconds"] / 1e9
                        for result in rows
                    ]
                    panel.plot(sizes, speeds, marker="o", color=colour, label=_NAMES[name])
            panel.set_title(f"{layout.replace('_', '-')}, {direction}", fontsize=10)
            panel.set_xscale("log", base=2)
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.set_ylim(0, link[direction] * 1.1)
            panel.grid(alpha=0.3)
        line[0].set_ylabel("GB/s")
    for panel in panels[-1]:
        panel.set_xlabel("block size, tokens")
    # The panel that has most to name: not every implementation knows every layout.
    fullest = max((line[0] for line in panels), key=lambda panel: len(panel.get_lines()))
    fullest.legend(fontsize=8, loc="lower right")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)
