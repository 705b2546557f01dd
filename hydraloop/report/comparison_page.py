"""The page that compares runs: their curves over each other, their results and their configs."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import commonpath
from pathlib import Path
from typing import Any

from hydraloop.errors import UserError
from hydraloop.report.markup import Html, element, note, section, table
from hydraloop.report.page import Page
from hydraloop.report.run_data import RunData
from hydraloop.report.run_page import badge, figures, summary
from hydraloop.run_files.changes import ABSENT, differences

MOST = 20
"""Runs that can be compared on a page."""
_START_ONLY = "resume"
"""The option that is about a start, not about the training."""


def write(runs: Sequence[RunData], output: Path) -> None:
    """Write the page.

    Raises:
        UserError: there are too many runs; otherwise as `Page.write`.
        OSError: as `Page.write`.
    """
    if len(runs) > MOST:
        raise UserError(f"{len(runs)} runs are more than {MOST}", key="directory", remedy="Compare fewer of them.")
    names, page = _short([run.path for run in runs]), Page(f"{len(runs)} runs - hydraloop")
    page.write(
        output,
        element("header", element("h1", f"{len(runs)} runs")),
        section("Results", _results(names, runs)),
        section("Differences of the configs", _configs(names, runs)),
        section("Curves", *figures(page, dict(zip(names, (run.curves for run in runs), strict=True)))),
    )


def _short(paths: Sequence[Path]) -> list[str]:
    """Return the parts of the paths that differ, or their names. A number is added to equal names."""
    shared = commonpath(paths) if len(set(paths)) > 1 else paths[0].parent
    names = [str(path.relative_to(shared)) if path != Path(shared) else path.name for path in paths]
    return [name if names.count(name) == 1 else f"{name} ({index + 1})" for index, name in enumerate(names)]


def _results(names: Sequence[str], runs: Sequence[RunData]) -> Html:
    found = [summary(run) for run in runs]
    columns = list(dict.fromkeys(name for facts in found for name in facts))
    rows = [
        (name, badge(run.status), element("code", " ".join(run.typed)), *(facts.get(column) for column in columns))
        for name, run, facts in zip(names, runs, found, strict=True)
    ]
    return table(("run", "status", "typed", *columns), rows)


def _configs(names: Sequence[str], runs: Sequence[RunData]) -> Html:
    """Return a table of the keys whose values differ, with a column for each run."""
    configs = [run.config or {} for run in runs]
    keys = {one.key: None for config in configs[1:] for one in differences(configs[0], config)}
    rows = [(key, *(_value(config, key) for config in configs)) for key in keys if key.split(".")[0] != _START_ONLY]
    if not rows:
        return note("The configs are equal.")
    return table(("key", *names), [(element("code", key), *values) for key, *values in rows])


def _value(config: Any, key: str) -> str:
    for name in key.split("."):
        if not isinstance(config, dict) or name not in config:
            return ABSENT
        config = config[name]
    if isinstance(config, dict):
        return str(config.get("_target_", "{…}"))
    return "null" if config is None else str(config)
