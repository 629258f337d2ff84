"""Write docs/benchmarks.md and its figure from a raw file that run.py (and plan.py) wrote."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from summary import Raw, packing, rows, targets, troubles, workloads
from sweepack.files import write_atomic
from venvs import HERE, ROOT

DOCS = ROOT / "docs"
OURS, PEERS, BOUND = "#0b6e4f", "#5b7db1", "#333333"


def page(raw: Raw, source: str) -> str:
    """The page in Markdown; ``source`` is the raw file's place in the repository."""
    loader = jinja2.FileSystemLoader(HERE)
    template = jinja2.Environment(loader=loader, keep_trailing_newline=True).get_template("page.md.jinja")
    tables = [((kind, cells), rows(raw, kind, cells)) for kind, cells in workloads(raw)]
    return template.render(
        raw=raw,
        source=source,
        tables=tables,
        packing=shown_packing(raw),
        leases=", ".join(
            f"{entry['median']:.2f} ms beside {entry['holders']} others" for entry in raw.get("leases", [])
        ),
        targets=targets(raw),
        troubles=list(troubles(raw)),
    )


def figure(raw: Raw, path: Path) -> None:
    """Wall over the bound, a panel a workload, as an SVG."""
    matplotlib.rcParams.update({"svg.hashsalt": "sweepack", "svg.fonttype": "none", "font.size": 10})
    shown = [(kind, cells, rows(raw, kind, cells)[::-1]) for kind, cells in workloads(raw)]
    heights = [len(found) + 1.5 for _, _, found in shown]
    plot, axes = plt.subplots(
        len(shown),
        1,
        figsize=(8, 0.3 * sum(heights) + 1),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    ratios = [row.ratio for _, _, found in shown for row in found]
    for axis, (kind, cells, found) in zip(axes[:, 0], shown, strict=True):
        for place, row in enumerate(found):
            about = raw["runners"][row.runner]
            colour = BOUND if row.runner == "bound" else OURS if about["ours"] else PEERS
            axis.hlines(place, 1, row.ratio, color=colour, linewidth=2)
            axis.plot(row.ratio, place, "o", color=colour, markerfacecolor="white" if about["fresh"] else colour)
            text = f"{row.ratio:.2f} ×, {row.wall:.1f} s"
            axis.annotate(text, (row.ratio, place), (8, 0), textcoords="offset points", va="center", fontsize=9)
        axis.set_yticks(range(len(found)), [raw["runners"][row.runner]["title"] for row in found])
        axis.set_ylim(-0.7, len(found) - 0.3)
        axis.set_xscale("log")
        axis.axvline(1, color=BOUND, linewidth=0.8)
        axis.set_title(f"{cells} {kind} cells", loc="left", fontweight="bold", fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    last = axes[-1, 0]
    # Room for the words beside the last point.
    last.set_xlim(0.95 * min(ratios, default=1), 1.6 * max(ratios, default=1))
    low, high = last.get_xlim()
    ticks = [tick for tick in (0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20, 50, 100) if low <= tick <= high]
    last.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    last.minorticks_off()
    last.set_xlabel("wall time over the bound (log scale)")
    kinds = [("sweepack", OURS, OURS), ("peers", PEERS, PEERS), ("a new Python for every cell", "black", "white")]
    points = [Line2D([], [], marker="o", ls="", c=edge, mfc=face, label=label) for label, edge, face in kinds]
    plot.legend(handles=points, loc="outside upper right", ncols=3, frameon=False, fontsize=9)
    plot.savefig(path, metadata={"Date": None})
    plt.close(plot)


def shown_packing(raw: Raw) -> dict[str, Any]:
    """The table of the makespans, as text."""
    found = packing(raw)
    rows = [(mix, [f"{mean:.2f} / {worst:.2f}" for mean, worst in cells]) for mix, cells in found.get("rows", [])]
    return {"policies": found.get("policies", []), "rows": rows}


def newest() -> Path:
    """The latest raw file in the repository; raises SystemExit when there is none."""
    files = sorted((HERE / "raw").glob("*.json"))
    if not files:
        sys.exit("no raw file in benchmarks/raw: run benchmarks/run.py first")
    return files[-1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", type=Path, nargs="?", help="the raw file (default: the latest in benchmarks/raw)")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder to write to (default: docs)")
    options = parser.parse_args(argv)
    source = (options.raw or newest()).resolve()
    raw = json.loads(source.read_text())
    shown = source.relative_to(ROOT) if source.is_relative_to(ROOT) else source
    options.docs.mkdir(exist_ok=True)
    if raw["runs"]:
        figure(raw, options.docs / "benchmarks.svg")
    write_atomic(options.docs / "benchmarks.md", page(raw, str(shown)))
    print(options.docs / "benchmarks.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
