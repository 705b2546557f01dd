"""Describes an engine's run for trackers, with secrets masked."""

from __future__ import annotations

import getpass
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from hydraloop.run import attempts, code_patch
from hydraloop.run.environment import command, git_commit, versions
from hydraloop.run.processes import started
from hydraloop.safety.secrets import mask_command, mask_text, masked
from hydraloop.tracking import description
from hydraloop.tracking.tracker import Attempt, Run

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def run_of(engine: Engine) -> Run:
    """Describe the run that an engine is about to train. In a resumed run, this adds an attempt to the description."""
    run_dir = engine.run_dir.absolute()
    sweep = description.sweep_of(run_dir)
    new = Run(
        run_dir=run_dir,
        uid=secrets.token_hex(8),
        experiment=experiment_name(engine),
        name=mask_text(_job_name(run_dir, sweep.axes) if sweep is not None else run_dir.name),
        attempts=(_attempt(engine, run_dir),),
        sweep=sweep,
    )
    run = description.read(run_dir)
    if run is None:
        return new
    return replace(run, attempts=(*run.attempts, replace(new.attempt, number=run.attempt.number + 1)))


def experiment_name(engine: Engine) -> str:
    """Return the experiment of a run whose tracker has no option `experiment`. It is the same on all ranks."""
    return mask_text(str(engine.settings.metadata.get("experiment_name", "hydraloop")))


def _attempt(engine: Engine, run_dir: Path) -> Attempt:
    patch = code_patch.find(run_dir)
    config = masked(yaml.safe_load(engine.settings.metadata.get("config") or "{}"))
    return Attempt(
        number=0,
        iteration=engine.progress.iteration,
        params=description.flattened(config) if config else {},
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        tags=_tags(engine, run_dir),
        began=time.time(),
        pid=getpid(),
        started=started(getpid()),
        earlier_result=description.result_digest(run_dir),
        patch=None if patch is None else str(patch.relative_to(run_dir)),
        samples=dict(_samples(engine)),
    )


def _samples(engine: Engine) -> Iterator[tuple[str, int]]:
    for split in ("train", "val", "test"):
        with suppress(AttributeError, TypeError, NotImplementedError):  # a stream has no size
            yield split, len(getattr(engine.loaders, split).dataset)


def _tags(engine: Engine, run_dir: Path) -> dict[str, str]:
    tags = {
        "command": mask_command([*command(), *attempts.typed_overrides(run_dir)]),
        "host": socket.gethostname(),
        "world_size": str(engine.distributed.world_size),
        "device": str(engine.device),
        "precision": engine.precision.name,
        "run_dir": str(run_dir),
        **{f"version.{package}": version for package, version in versions().items()},
    }
    commit, user = git_commit(Path.cwd()), _user()
    if commit:
        tags["git_commit"] = commit
    if user:
        tags["user"] = user
    return tags


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return None


def _job_name(run_dir: Path, axes: Sequence[str]) -> str:
    """Return a job's swept overrides, as `lr=0.01,hooks=[ema]`; all overrides if the axes are unknown."""
    values = description.override_values(run_dir)
    swept = {key: value for key, value in values.items() if key in axes} or values
    names = description.short_keys({*axes, *swept})
    return ",".join(f"{names[key]}={value}" for key, value in swept.items()) or run_dir.name
