"""SweepData: the results of a sweep or a search, and the curves of its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hydraloop.report.curves import Curve, curves
from hydraloop.run_files.record_log import FILENAME, read_some
from hydraloop.sweeps.report import results
from hydraloop.sweeps.report.results import Results
from hydraloop.sweeps.sweep_directory import SweepDirectory

JOBS = 500
"""Jobs whose curves are drawn, the best ones: a browser draws them in seconds."""
_POINTS = 300
"""Of a curve, at most."""
_METRICS = 4
"""Charts with the curves of all jobs, at most."""


@dataclass(frozen=True)
class SweepData:
    """A sweep."""

    directory: SweepDirectory

    @cached_property
    def results(self) -> Results:
        """The jobs, the best first; averages, and the best."""
        return results.collect(self.directory)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The numbers whose curves are drawn, such as `val/accuracy`."""
        search = self.results.search
        names = (*(search.objectives if search else ()), self.results.metric, "loss")
        found = dict.fromkeys([*(f"val/{name}" for name in names if name), "train/loss"])
        return tuple(found)[:_METRICS]

    @cached_property
    def curves(self) -> dict[int, dict[str, Curve]]:
        """The curves of jobs by their numbers, the best jobs first."""
        found = {}
        for row in self.results.rows[:JOBS]:
            state = self.directory.state(row.job)
            log = self.directory.run_dir(state) / FILENAME
            if state.state != "queued" and (drawn := curves(read_some(log, _POINTS), self.metrics)):
                found[row.job] = drawn
        return found


def mean_and_band(found: list[Curve]) -> tuple[Curve, np.ndarray]:
    """Return the mean of curves, at the iterations that all of them have reached, and their standard deviation."""
    end = min(curve.iterations[-1] for curve in found)
    longest = max(found, key=lambda curve: len(curve.iterations))
    at = longest.iterations[longest.iterations <= end]
    values = np.stack([np.interp(at, curve.iterations, curve.values) for curve in found])
    deviation = values.std(axis=0, ddof=1) if len(found) > 1 else np.zeros(len(at))
    return Curve(at, values.mean(axis=0)), deviation
