"""`python train.py check`: tests the data, the model and the task of a project with short runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from hydraloop.commands.check import data, ranks, resuming, training
from hydraloop.commands.check.findings import Finding, judge
from hydraloop.commands.check.short_runs import Project, Watch
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.engine.engine import Engine


def check(project: Project) -> int:
    """Print a line for each check. Return the exit code: 1 if there is a problem."""
    logging.disable(logging.CRITICAL)  # what short runs tell
    with TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        findings = list(_check_all(project, Path(name)))
    problems = sum(found.state == "problem" for found in findings)
    print(f"{problems} problem{'' if problems == 1 else 's'}")
    return int(problems > 0)


def _check_all(project: Project, folder: Path) -> Iterator[Finding]:
    """Do the checks one after another, until one leaves nothing for the others."""
    built: list[Engine] = []
    sets: dict[str, data.Read] = {}
    trained: list[tuple[Engine, Watch]] = []

    def build() -> Finding:
        built.append(project.engine(folder / "base"))
        return Finding("ok", f"{type(built[0].task).__name__} with {type(built[0].task.model).__name__}")

    def splits() -> Finding:
        loaders = base.loaders.by_key().items()
        sets.update({key: data.read(loader) for key, loader in loaders if isinstance(loader, GlobalBatchLoader)})
        return data.splits(sets)

    def loss() -> Finding:
        trained.append(training.on_one_batch(project, base, folder / "batch"))
        return training.loss(base, *trained[0])

    yield judge("build", build)
    if not built:
        return
    base = built[0]
    yield judge("splits", splits)
    yield (of_labels := judge("labels", lambda: data.labels(base, sets)))
    if of_labels.state == "problem":  # a loss would fail, and on a GPU break everything after it
        yield _others("labels")
        return
    yield judge("loss", loss)
    if not trained:
        yield _others("loss")
        return
    yield (found := judge("parameters", lambda: training.parameters(project, base, *trained[0], folder / "other")))
    if found.state == "problem":  # DDP refuses parameters without a gradient
        yield judge("ranks", lambda: Finding("not judged", "solve the problem of parameters first"))
    else:
        yield judge("ranks", lambda: ranks.ranks(project, base, folder))
    yield judge("resume", lambda: resuming.resume(project, folder))


def _others(first: str) -> Finding:
    return judge("others", lambda: Finding("not judged", f"solve the problem of {first} first"))
