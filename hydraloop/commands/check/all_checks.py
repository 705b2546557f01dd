"""`hydraloop check`: tests the data, the model and the task of a project with short runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from hydraloop.commands.check import data, ranks, resuming, training
from hydraloop.commands.check.findings import Finding, judge
from hydraloop.commands.check.short_runs import Project, Watch
from hydraloop.data.map_style_loader import MapStyleLoader
from hydraloop.engine.engine import Engine


def check(project: Project) -> int:
    """Print a line for each check. Return the exit code: 1 if there is a problem."""
    logging.disable(logging.CRITICAL)  # what short runs tell
    with TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        findings = _check_all(project, Path(name))
    problems = sum(found.state == "problem" for found in findings)
    print(f"{problems} problem{'' if problems == 1 else 's'}")
    return int(problems > 0)


def _check_all(project: Project, folder: Path) -> list[Finding]:
    built: list[Engine] = []

    def build() -> Finding:
        built.append(project.engine(folder / "base"))
        return Finding("ok", f"{type(built[0].task).__name__} with {type(built[0].task.model).__name__}")

    findings = [judge("build", build)]
    if not built:
        return findings
    base = built[0]
    sets: dict[str, data.Read] = {}

    def splits() -> Finding:
        loaders = base.loaders.by_key().items()
        sets.update({key: data.read(loader) for key, loader in loaders if isinstance(loader, MapStyleLoader)})
        return data.splits(sets)

    findings += [judge("splits", splits), judge("labels", lambda: data.labels(base, sets))]
    if findings[-1].state == "problem":  # a loss would fail, and on a GPU break everything after it
        return [*findings, *(judge(name, _not_judged("labels")) for name in ("loss", "parameters", "ranks", "resume"))]
    trained: list[tuple[Engine, Watch]] = []

    def loss() -> Finding:
        trained.append(training.on_one_batch(project, base, folder / "batch"))
        return training.loss(base, *trained[0])

    findings.append(judge("loss", loss))
    if not trained:
        return [*findings, *(judge(name, _not_judged("loss")) for name in ("parameters", "ranks", "resume"))]
    of_parameters = judge("parameters", lambda: training.parameters(project, base, *trained[0], folder / "other"))
    # DDP refuses parameters without a gradient.
    of_ranks = (
        _not_judged("parameters") if of_parameters.state == "problem" else partial(ranks.ranks, project, base, folder)
    )
    findings += [of_parameters, judge("ranks", of_ranks)]
    findings.append(judge("resume", lambda: resuming.resume(project, folder)))
    return findings


def _not_judged(first: str) -> Callable[[], Finding]:
    return lambda: Finding("not judged", f"solve the problem of {first} first")
