"""Where a resumed run continues: the run directory and the checkpoint that `resume=` selects. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.errors import UserError
from hydraloop.moved_names import with_present_names
from hydraloop.run.attempts import RECORDS
from hydraloop.run.checkpoint_files import candidates, newest_intact
from hydraloop.run.config_yaml import plain
from hydraloop.run.directory import (
    CONFIG,
    OUTPUTS,
    check_links,
    checkpoint_folders,
    created_by_hydra,
    new,
    refuse_held,
    run_of,
)
from hydraloop.run.lock import RunLock
from hydraloop.safety.secrets import masked


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed run continues."""

    run_dir: Path | None
    """None if `resume=auto` found an empty directory, so that the run is new."""
    checkpoint: Path | None


def find(cfg: DictConfig, explicit: Path | None, *, key: str = "hydra.run.dir") -> Resumed:
    """Return the run directory and checkpoint that a config's `resume` names.

    Args:
        cfg: as composed, with `resume` set.
        explicit: the run directory that the user has named, if any.
        key: the option that named it, for errors.

    Raises:
        UserError: there is nothing to resume, or two different directories are named.
    """
    wanted = str(cfg.resume)
    if wanted == "auto":
        return _auto(cfg, explicit)
    path = Path(wanted)
    if path.is_dir():
        found = Resumed(path, _newest(path))
    elif path.is_file():
        found = Resumed(run_of(path), path)
    else:
        raise UserError(
            f"{wanted} is neither a run directory nor a checkpoint file",
            key="resume",
            remedy="Use auto for the newest run, or a path in outputs/.",
        )
    if explicit is not None and found.run_dir is not None and explicit.resolve() != found.run_dir.resolve():
        raise UserError(
            f"a resumed run continues in its own directory, {found.run_dir}",
            key=key,
            remedy=f"Leave {key} out, or start a new run there with load_from={found.checkpoint}.",
        )
    return found


def settle(cfg: DictConfig, run_dir: Path | None) -> Resumed:
    """Return the directory and the checkpoint of a run that is being built.

    Args:
        run_dir: None: find or create one.

    Raises:
        UserError: the directory holds another run, or there is nothing to resume.
    """
    found = Resumed(None, None) if cfg.resume is None else find(cfg, run_dir, key="run_dir")
    if run_dir is not None and found.run_dir is None and cfg.resume != "auto" and not created_by_hydra(run_dir):
        refuse_held(run_dir, key="run_dir")
    return Resumed(run_dir or found.run_dir or new(), found.checkpoint)


def settle_on_main(
    cfg: DictConfig, run_dir: Path | None, *, is_main: bool, from_main: Callable[[list[str | None]], list[str | None]]
) -> Resumed:
    """Return on each rank what `settle` returns on rank 0. A directory in which another process trains is refused.

    Args:
        is_main: whether this is rank 0.
        from_main: returns on each rank the argument that rank 0 passes.
    """
    found: list[str | None] = [None, None]
    if is_main:
        settled = settle(cfg, run_dir)
        if settled.run_dir is not None:
            check_links(settled.run_dir, key="run_dir" if cfg.resume is None else "resume")
            with lock_of(cfg, settled.run_dir):  # refused before anything is written; training takes it again
                settled = settle(cfg, settled.run_dir if run_dir is None else run_dir)
        found = [None if path is None else str(path) for path in (settled.run_dir, settled.checkpoint)]
    return Resumed(*(None if path is None else Path(path) for path in from_main(found)))


def lock_of(cfg: DictConfig, run_dir: Path) -> RunLock:
    """Return the lock of a run directory, not yet acquired."""
    return RunLock(run_dir, key="run_dir" if cfg.resume is None else "resume", wait=cfg.resume == "auto")


def newest_checkpoint(run_dir: Path, *, known: Collection[str] = ()) -> Path | None:
    """Return the undamaged checkpoint that a run has written last; None without one, or if it is known.

    Args:
        known: the `known_checkpoints` at an earlier time.

    Raises:
        UserError: all checkpoints are damaged.
    """
    found = _newest_of(run_dir)
    return None if found is None or _mark(found) in known else found


def known_checkpoints(run_dir: Path) -> list[str]:
    """Return a mark of each checkpoint of a run, which changes when the file is written again.

    A time would not tell which files are newer: the clock of a file server may differ from this machine's.
    """
    return [_mark(path) for path in candidates(*checkpoint_folders(run_dir)) if path.exists()]


def _mark(checkpoint: Path) -> str:
    return f"{checkpoint.resolve()} {checkpoint.stat().st_mtime_ns}"


def _auto(cfg: DictConfig, explicit: Path | None) -> Resumed:
    if explicit is not None:
        checkpoint = _newest_of(explicit)
        return Resumed(explicit if checkpoint else None, checkpoint)
    wanted = _identity(cfg)
    for run_dir in _newest_first():
        if _identity(_config_in(run_dir / RECORDS)) == wanted:
            checkpoint = _newest_of(run_dir)
            if checkpoint is not None:
                return Resumed(run_dir, checkpoint)
    raise UserError(
        f"no run under {OUTPUTS}/ with the same experiment, model and data has a checkpoint",
        key="resume",
        remedy="Leave resume out to start a new run, or name its directory: resume=outputs/….",
    )


def _newest_first() -> list[Path]:
    """Return run directories by date and time in their names, the newest first. The id is ignored."""
    runs = [path.parent for path in OUTPUTS.glob(f"*/*/{RECORDS}")]
    return sorted(runs, key=lambda path: (path.parent.name, path.name[:8], path.stat().st_mtime_ns), reverse=True)


def _identity(cfg: Any) -> Any:
    """Return what two runs must have in common for `resume=auto`: experiment, model and data, without secrets."""
    data = OmegaConf.select(cfg, "data")
    splits = {} if data is None else {name: data.get(name) for name in ("train", "val", "test")}
    found = {name: _comparable(split) for name, split in splits.items()}
    return masked([OmegaConf.select(cfg, "experiment_name"), _comparable(OmegaConf.select(cfg, "task.model")), found])


def _comparable(node: Any) -> Any:
    """Return the node resolved, or as written if it resolves only in the job (`${hydra:runtime.cwd}/data`)."""
    written = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    return with_present_names(written if "${hydra:" in str(written) else plain(node))


def _config_in(records: Path) -> DictConfig:
    """Return the config in a folder of records; an empty one if it does not exist or cannot be read."""
    try:
        loaded = OmegaConf.load(records / CONFIG)
    except (OSError, OmegaConfBaseException, YAMLError, ValueError):
        return OmegaConf.create()
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create()


def _newest_of(run_dir: Path) -> Path | None:
    """Return the checkpoint that was written last, from all of the run's folders. None: the run has written none.

    Raises:
        UserError: all checkpoints are damaged or missing. The run must not silently start again.
    """
    folders = checkpoint_folders(run_dir)
    found, files = newest_intact(*folders), candidates(*folders)
    if found is None and files:
        raise UserError(
            f"the only checkpoint of {run_dir}, {files[0].name}, is {'damaged' if files[0].exists() else 'missing'}"
            if len(files) == 1
            else f"all {len(files)} checkpoints of {run_dir} are damaged",
            key="resume",
            remedy=f"Copy them again, or move {files[0].parent} away to start from the beginning.",
        )
    return found


def _newest(run_dir: Path) -> Path:
    checkpoint = _newest_of(run_dir)
    if checkpoint is None:
        raise UserError(
            f"{run_dir} has no checkpoint in {', '.join(map(str, checkpoint_folders(run_dir)))}",
            key="resume",
            remedy="Name another run or a checkpoint file, or start a new one without resume.",
        )
    return checkpoint
