"""Describes a run for trackers, in `tracking/run.json`, and in `attempt_<n>.json` for each attempt.

The training process creates and writes the description; senders and `sync.py` read it. Secrets are masked before
anything is written.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from hydraloop.errors import UserError
from hydraloop.files import atomic, code_patch, run_directory
from hydraloop.files.atomic import read_json
from hydraloop.files.checkpoint_files import SUFFIX, newest_intact
from hydraloop.files.config_yaml import flattened, loaded, plain
from hydraloop.files.environment import command, git_commit, versions
from hydraloop.files.integrity import shards_of
from hydraloop.files.result import Result, Status, digest
from hydraloop.files.run_directory import SWEEP_FILE
from hydraloop.files.secrets import mask_command, mask_text, masked
from hydraloop.tracking.tracker import FOLDER, Attempt, Finish, Run, Sweep, valid_utf8

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_RUN, _ATTEMPT = "run.json", "attempt_{}.json"


def write(run: Run) -> None:
    """Write a run and its attempts. `run.json` is written last, so that a reader who finds it finds all attempts."""
    folder = run.run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    for attempt in run.attempts:
        _put(folder / _ATTEMPT.format(attempt.number), asdict(attempt))
    sweep = None
    if run.sweep is not None:
        sweep = {**asdict(run.sweep), "folder": os.path.relpath(run.sweep.folder, run.run_dir)}
    _put(folder / _RUN, {"uid": run.uid, "experiment": run.experiment, "name": run.name, "sweep": sweep})


def read(run_dir: Path) -> Run | None:
    """Return the run in a directory, or None if it has no description."""
    run_dir = run_dir.absolute()
    folder = run_dir / FOLDER
    try:
        found = read_json(folder / _RUN)
    except FileNotFoundError:
        return None
    attempts = tuple(_attempts(folder))
    if not attempts:
        return None
    sweep = found["sweep"]
    if sweep is not None:
        folder = Path(os.path.normpath(run_dir / sweep["folder"]))
        sweep = Sweep(**{**sweep, "folder": folder, "axes": tuple(sweep["axes"])})
    return Run(run_dir, found["uid"], found["experiment"], found["name"], attempts, sweep)


def is_described(run_dir: Path, number: int) -> bool:
    """Return whether the attempt of a number is described."""
    return (run_dir / FOLDER / _ATTEMPT.format(number)).exists()


def trackers_of(run_dir: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the number of the last attempt and `Run.trackers`.

    Returns:
        -1 and no trackers if the run is not described, or if its description is damaged.
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        if (run := read(run_dir)) is not None:
            return run.attempt.number, run.trackers
    return -1, {}


def sweep_of(run_dir: Path) -> Sweep | None:
    """Return the sweep that a run directory belongs to, or None if it does not belong to one.

    It is the nearest parent directory with a `sweep.json`. A single run may also lie in a sweep's directory.
    """
    for folder in run_dir.parents:
        try:
            found = read_json(folder / SWEEP_FILE)
            uid, axes, began = found["uid"], tuple(found["jobs"]["swept"]), found["created"]
        except (OSError, ValueError, KeyError, TypeError):  # also a file of this name that belongs to someone else
            continue
        dated = folder.parent.name[:4].isdigit()
        name = f"{folder.parent.name}/{folder.name}" if dated else folder.name
        job = _job_number(run_dir)
        return None if job is None else Sweep(folder, uid, name, job, axes, began)
    return None


def override_values(run_dir: Path) -> dict[str, str]:
    """Return the values of the overrides of a run, by key, as typed; secrets masked."""
    lines = (line.partition("=") for line in run_directory.typed_overrides(run_dir))
    return {key.lstrip("+~"): value for key, _, value in lines}


def short_keys(keys: Iterable[str]) -> dict[str, str]:
    """Return each key's shortest end that no other key has: `optimizer.lr` becomes `lr`."""
    parts = {key: key.split(".") for key in keys}
    found = {}
    for key, own in parts.items():
        length = 1
        while sum(other[-length:] == own[-length:] for other in parts.values()) > 1:
            length += 1
        found[key] = ".".join(own[-length:])
    return found


def ending(run_dir: Path, attempt: Attempt) -> Finish:
    """Return how an attempt ended whose process has exited: the status in `result.json`, else `killed`."""
    result = Result.read(run_dir, earlier=attempt.earlier_result)
    if result is None:
        return Finish("killed")
    return finish_of(result.status, result.error, result.records)


def result_of(run_dir: Path, attempt: Attempt) -> dict[str, Any]:
    """Return the contents of `result.json` if it belongs to an attempt, else an empty dict.

    It does if it is not the file that existed when the attempt began.
    """
    result = Result.read(run_dir, earlier=attempt.earlier_result)
    return {} if result is None else cast(dict[str, Any], plain(asdict(result)))


def finish_of(status: Status, error: str | None, records: int = 0) -> Finish:
    """Convert a status of `result.json` to a `Finish`, with secrets in the error masked."""
    return Finish(status, None if error is None else mask_text(error), records)


def checkpoints(run: Run, which: str | None, best: str | None, *, ended: bool, foreign: bool = False) -> list[Path]:
    """Return the checkpoint files that the option `checkpoints` selects; until the run has ended, only `all` does.

    `best` is the path of the best checkpoint in `result.json`. Files whose tensors are in shards are left out: without
    the shards, they cannot be loaded. Links are left out, too.

    Args:
        foreign: whether the run may come from someone else: then only files below the run directory.
    """
    found = [path for path in _selected(run, which, best, ended=ended) if not path.is_symlink()]
    if foreign:
        found = [path for path in found if path.resolve().is_relative_to(run.run_dir.resolve())]
    single = [path for path in found if not path.is_file() or shards_of(path) is None]
    if len(single) < len(found):
        _tell_of_shards(run.run_dir)
    return single


@cache
def _tell_of_shards(run_dir: Path) -> None:
    log.warning(
        "checkpoints in shards (FSDP2) are not sent; "
        "for a single file, run `python train.py export %s format=safetensors`",
        run_dir,
    )


def _selected(run: Run, which: str | None, best: str | None, *, ended: bool) -> list[Path]:
    chosen = run.attempt.params.get("default_hooks.checkpoint.out_dir")
    folder = run.run_dir / "checkpoints" if chosen is None else Path(str(chosen)).expanduser()
    if which == "all":
        return sorted(folder.glob(f"*{SUFFIX}"))
    if which == "last" and ended:
        newest = newest_intact(folder)
        return [] if newest is None else [newest]
    if which == "best" and ended and best is not None:
        return [folder / Path(best).name]  # the run may have been moved since
    return []


def _attempts(folder: Path) -> Iterator[Attempt]:
    number = 0
    while (path := folder / _ATTEMPT.format(number)).exists():
        yield Attempt(**read_json(path))
        number += 1


def _job_number(run_dir: Path) -> int | None:
    """Return the number of a sweep's job, as Hydra has recorded it; None for a single run.

    If Hydra has no record of it (a run started from Python), the number is the directory's name.
    """
    try:
        hydra = loaded(run_dir / ".hydra" / "hydra.yaml", "hydra.yaml")["hydra"]
        return int(hydra["job"]["num"]) if "MULTIRUN" in str(hydra["mode"]) else None
    except (UserError, KeyError, TypeError, ValueError):
        return int(run_dir.name) if run_dir.name.isdigit() else 0


def _put(path: Path, content: Mapping[str, Any]) -> None:
    atomic.remove_unfinished(path)
    atomic.write_text(path, valid_utf8(json.dumps(content, indent=1, ensure_ascii=False)) + "\n")


def run_of(engine: Engine, trackers: Mapping[str, dict[str, Any]]) -> Run:
    """Return the description of the run that an engine is about to train: of a resumed run, with one more attempt.

    Args:
        trackers: `kind` and masked `options` of each tracker, by the name of the hook.
    """
    run_dir = engine.run_dir.absolute()
    sweep = sweep_of(run_dir)
    run = read(run_dir)
    if run is not None:
        return replace(run, attempts=(*run.attempts, _attempt(engine, run_dir, run.attempt.number + 1, trackers)))
    return Run(
        run_dir=run_dir,
        uid=secrets.token_hex(8),
        experiment=experiment_name(engine),
        name=mask_text(_job_name(run_dir, sweep) if sweep is not None else run_dir.name),
        attempts=(_attempt(engine, run_dir, 0, trackers),),
        sweep=sweep,
    )


def experiment_name(engine: Engine) -> str:
    """Return the experiment of a run whose tracker has no option `experiment`. It is the same on all ranks."""
    return mask_text(str(engine.settings.metadata.get("experiment_name", "hydraloop")))


def _attempt(engine: Engine, run_dir: Path, number: int, trackers: Mapping[str, dict[str, Any]]) -> Attempt:
    patch = code_patch.find(run_dir)
    config = masked(yaml.safe_load(engine.settings.metadata.get("config") or "{}"))
    for key in ("sweep", "detach"):  # how jobs are run, which does not change what they compute
        config.pop(key, None)
    return Attempt(
        number=number,
        iteration=engine.progress.iteration,
        params=flattened(config) if config else {},
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        tags=_tags(engine, run_dir),
        began=time.time(),
        pid=os.getpid(),
        trackers=dict(trackers),
        earlier_result=digest(run_dir),
        patch=None if patch is None else str(patch.relative_to(run_dir)),
    )


def _tags(engine: Engine, run_dir: Path) -> dict[str, str]:
    tags = {
        "command": mask_command([*command(), *run_directory.typed_by_attempt(run_dir)[-1]]),
        "host": socket.gethostname(),
        "world_size": str(engine.distributed.world_size),
        "device": str(engine.device),
        "precision": engine.run.precision.name,
        "run_dir": str(run_dir),
        **{f"version.{package}": version for package, version in versions().items()},
    }
    if commit := engine.checkpoints.git.get("commit") or git_commit(Path.cwd()):
        tags["git_commit"] = str(commit)
    with suppress(OSError, KeyError):  # a container's user may have no name
        tags["user"] = getpass.getuser()
    return tags


def _job_name(run_dir: Path, sweep: Sweep) -> str:
    """Return a job's swept overrides, as `lr=0.01,hooks=[ema]`; all overrides if the axes are unknown."""
    values = override_values(run_dir)
    swept = {key: value for key, value in values.items() if key in sweep.axes} or values
    names = short_keys({*sweep.axes, *swept})
    return ",".join(f"{names[key]}={value}" for key, value in swept.items()) or run_dir.name
