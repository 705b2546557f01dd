"""Curves of runs by the name of the number, and the figures of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hydraloop.run_files.record_log import Record

MOST = 60
"""Charts of a page. More of them are named."""
_LEFT_OUT = frozenset({"perf/eta", "perf/skipped", "train/momentum", "perf/data_time", "perf/time"})
_FIRST = ("loss", "accuracy")
_LAST = ("lr", "grad_norm", "samples_per_second", "memory")
_TITLES = {
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "samples_per_second": "Throughput [samples/s]",
    "memory": "Peak memory [MiB]",
}
ACCENT, QUIET = "#e8590c", "#868e96"
"""Colors of the best curve and of the others, on light and on dark pages."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A number of a run over the completed iterations."""

    iterations: np.ndarray
    values: np.ndarray


def curves(records: Iterable[Record], names: Sequence[str] | None = None) -> dict[str, Curve]:
    """Return the curves of a run by name, such as `train/loss`; None: all."""
    found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for record in records:
        for name, value in record.metrics.items():
            if names is None or name in names:
                found[name].append((record.iteration, value))
    columns = {name: np.array(points, dtype=np.float64).T for name, points in found.items()}
    return {name: Curve(x, y) for name, (x, y) in columns.items()}


def charts(runs: Mapping[str, Mapping[str, Curve]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the title and the traces of each chart: the loss first, then metrics, then lr, speed and memory.

    Args:
        runs: the curves of each run, by its name in the legend. The name of a single run is not shown.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, (label, named) in enumerate(runs.items()):
        for name, curve in named.items():
            if name in _LEFT_OUT:
                continue
            mode, _, rest = name.partition("/")
            chart = "lr" if rest.startswith("lr/") else rest.rpartition("/")[2]
            series = f"{mode} {rest.rpartition('/')[0]}".strip() if rest != chart and chart != "lr" else mode
            series = rest.removeprefix("lr").lstrip("/") if chart == "lr" else series.removeprefix("perf")
            text = f"{label} {series}".strip() if len(runs) > 1 else series or chart
            color = number if len(runs) > 1 else len(groups.get(chart, ()))
            one = trace(curve, text, color=color, is_thin=mode == "train")
            groups.setdefault(chart, []).append(one | ({"showlegend": True} if len(runs) > 1 else {}))
    for name in sorted(groups, key=lambda name: (_place(name), name)):
        yield _TITLES.get(name, name), groups[name]


def trace(curve: Curve, name: str, *, color: int | str, is_thin: bool = False) -> dict[str, Any]:
    """Return a line. A curve of one point is a marker.

    Args:
        color: of CSS, or the number of a color of the page.
    """
    return {
        "x": curve.iterations,
        "y": curve.values,
        "name": name,
        "mode": "lines" if len(curve.values) > 1 else "markers",
        "marker": {"size": 9, "symbol": "star"},
        "line": {"width": 1.4 if is_thin else 2.4, "color": color},
    }


def layout_of(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the layout of a chart over the iterations. For a constant, plotly's own range is from -1 to 1."""
    values = np.concatenate([trace["y"] for trace in traces])
    found = values[np.isfinite(values)]
    layout: dict[str, Any] = {"xaxis": {"title": {"text": "iteration"}}, "hovermode": "closest"}
    if len(found) and found.min() == found.max() != 0:
        layout["yaxis"] = {"range": sorted([0.0, 2 * float(found[0])])}
    return layout


def _place(name: str) -> int:
    order = [*_FIRST, None, *_LAST]
    return order.index(name) if name in order else order.index(None)
