"""Where a resumed run continues: the run directory and the checkpoint that `resume=` selects. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import UserError, leave_out, missing_path
from hydraloop.files.checkpoint_files import candidates, newest_intact
from hydraloop.files.config_yaml import loaded, plain
from hydraloop.files.run_directory import CONFIG, OUTPUTS, RECORDS, SWEEP_FILE, checkpoint_folders, config_file, run_of
from hydraloop.files.secrets import masked


class ResumePoint(NamedTuple):
    """Where a run continues."""

    run_dir: Path | None = None
    """None: the run is new, or the checkpoint does not belong to a run."""
    checkpoint: Path | None = None


FindResumePoint = Callable[[Path | None], ResumePoint]
"""Returns where a run continues. The argument is the run directory that the user has named, if any."""


def find(cfg: DictConfig, explicit: Path | None, *, key: str = "hydra.run.dir") -> ResumePoint:
    """Return the run directory and checkpoint that a config's `resume` names, if it is set.

    Args:
        cfg: as composed.
        explicit: the run directory that the user has named, if any.
        key: the option that named it, for errors.

    Raises:
        UserError: there is nothing to resume, or two different directories are named.
    """
    if cfg.resume is None:
        return ResumePoint()
    if cfg.resume == "auto":
        return _auto(cfg, explicit)
    path = Path(str(cfg.resume))
    run_dir = run_of(path) if path.exists() else None
    if path.is_dir():
        checkpoint = _newest_of(path)
        if checkpoint is None:
            raise UserError(
                f"{path} has no checkpoint in {', '.join(map(str, checkpoint_folders(path)))}",
                key="resume",
                remedy="Name another run or a checkpoint file, or start a new one without resume.",
            )
    elif path.is_file():
        checkpoint = path
    else:
        raise UserError(
            f"{path} is neither a run directory nor a checkpoint file",
            key="resume",
            remedy=missing_path(path, "Use auto for the newest run, or a path in outputs/.", "resume"),
        )
    if explicit is not None and run_dir is not None and explicit.resolve() != run_dir.resolve():
        raise UserError(
            f"a resumed run continues in its own directory, {run_dir}",
            key=key,
            remedy=f"Leave {key} out, or start a new run there with load_from={checkpoint}.",
        )
    return ResumePoint(run_dir, checkpoint)


def newest_checkpoint(run_dir: Path, *, known: Collection[str] = ()) -> Path | None:
    """Return the undamaged checkpoint that a run has written last; None without one, or if it is known.

    Args:
        known: the `known_checkpoints` at an earlier time.

    Raises:
        UserError: all checkpoints are damaged.
    """
    newest = _newest_of(run_dir)
    return None if newest is None or _mark(newest) in known else newest


def known_checkpoints(run_dir: Path) -> list[str]:
    """Return a mark of each checkpoint of a run, which changes when the file is written again.

    A time would not tell which files are newer: the clock of a file server may differ from this machine's.
    """
    return [_mark(path) for path in candidates(*checkpoint_folders(run_dir)) if path.exists()]


def _mark(checkpoint: Path) -> str:
    return f"{checkpoint.resolve()} {checkpoint.stat().st_mtime_ns}"


def _auto(cfg: DictConfig, explicit: Path | None) -> ResumePoint:
    if explicit is not None:
        checkpoint = _newest_of(explicit)
        return ResumePoint(explicit if checkpoint else None, checkpoint)
    wanted = _identity(cfg)
    for run_dir in _newest_first():
        if _identity(_config_in(run_dir / RECORDS)) == wanted:
            checkpoint = _newest_of(run_dir)
            if checkpoint is not None:
                return ResumePoint(run_dir, checkpoint)
    raise UserError(
        f"no run under {OUTPUTS}/ with the same experiment, model and data has a checkpoint",
        key="resume",
        remedy=leave_out("resume") + " That starts a new run. Or name a directory: resume=outputs/….",
    )


def _newest_first() -> list[Path]:
    """Return the runs below OUTPUTS, those first that were started or resumed last. Jobs of sweeps are left out."""
    found: list[tuple[int, Path]] = []
    for folder, below, files in os.walk(OUTPUTS):
        if SWEEP_FILE in files:
            below.clear()
        elif RECORDS in below:
            below.remove(RECORDS)
            config = config_file(Path(folder))
            if config is not None:
                found.append((config.stat().st_mtime_ns, Path(folder)))
    return [path for _, path in sorted(found, reverse=True)]


def _identity(cfg: Any) -> Any:
    """Return what two runs must have in common for `resume=auto`: experiment, model and data, without secrets."""
    data = OmegaConf.select(cfg, "data")
    splits = {} if data is None else {name: data.get(name) for name in ("train", "val", "test")}
    found = {name: _comparable(split) for name, split in splits.items()}
    return masked([OmegaConf.select(cfg, "experiment_name"), _comparable(OmegaConf.select(cfg, "task.model")), found])


def _comparable(node: Any) -> Any:
    """Return the node resolved, or as written if it resolves only in the job (`${hydra:runtime.cwd}/data`)."""
    written = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    return written if "${hydra:" in str(written) else plain(node)


def _config_in(records: Path) -> DictConfig:
    """Return the config in a folder of records; an empty one if it does not exist or cannot be read."""
    try:
        return loaded(records / CONFIG, CONFIG)
    except UserError:
        return OmegaConf.create()


def _newest_of(run_dir: Path) -> Path | None:
    """Return the checkpoint that was written last, from all of the run's folders. None: the run has written none.

    Raises:
        UserError: all checkpoints are damaged or missing. The run must not silently start again.
    """
    folders = checkpoint_folders(run_dir)
    newest = newest_intact(*folders)
    files = candidates(*folders)
    if newest is None and files:
        raise UserError(
            f"no checkpoint of {run_dir} is intact, {files[0].name} neither",
            key="resume",
            remedy=f"Copy them again, or move {files[0].parent} away to start from the beginning.",
        )
    return newest
