"""Run directories: where a new run goes, which one a resumed run goes on in. Without torch: it comes before all.

`.hydra/config.yaml` is the config a run was begun with, and stays: it says which run this is. Each attempt to resume
has a folder `.hydra/resume_<n>` with its own config. Secrets in both are masked.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.errors import UserError
from hydraloop.run import atomic, attempts
from hydraloop.run.attempts import RECORDS
from hydraloop.run.checkpoint_files import RUN_DIR_FILE, newest_complete
from hydraloop.run.config_yaml import masked_yaml
from hydraloop.run.result import FILENAME as RESULT_FILE
from hydraloop.safety.secrets import masked

OUTPUTS = Path("outputs")
"""Runs of one job, as `outputs/<date>/<time>-<id>`."""
CHECKPOINTS = "checkpoints"
_CONFIG = "config.yaml"
_FOLDERS = "checkpoint_folders"
"""In RECORDS: a text file, a line for each folder the run has written checkpoints to: its `out_dir`, resolved. Inside
the run relative to it, so that it can be moved, elsewhere absolute."""


def run_id() -> str:
    """Six random characters: two runs started in the same second do not share a directory."""
    return secrets.token_hex(3)


def new() -> Path:
    """A directory for a run started from Python, made."""
    path = OUTPUTS / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}-{run_id()}"
    path.mkdir(parents=True)
    return path


def holds_run(directory: Path) -> bool:
    """Whether a run was started in the directory."""
    return (directory / RECORDS).exists() or has_trained(directory)


def has_trained(directory: Path) -> bool:
    """Whether a run in the directory has ended or has written checkpoints; its records alone do not count."""
    return any((directory / name).exists() for name in (RESULT_FILE, CHECKPOINTS))


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Where a run's checkpoints are: in its own folder, or in each that the checkpoint hook's `out_dir` has named."""
    try:
        recorded = (run_dir / RECORDS / _FOLDERS).read_text(encoding="utf-8").splitlines()
    except OSError:
        recorded = []
    folders = [run_dir / line for line in recorded]
    for records in (run_dir / RECORDS, *attempts.folders(run_dir)):
        try:
            out_dir = OmegaConf.select(_config_in(records), "default_hooks.checkpoint.out_dir")
        except OmegaConfBaseException:  # ${hydra:…} takes a running job, which has recorded what it was
            continue
        folders.append(run_dir / CHECKPOINTS if out_dir is None else Path(os.path.expanduser(out_dir)))
    return [folder for folder in dict.fromkeys(folders) if _is_of(folder, run_dir)]


def record(cfg: DictConfig, run_dir: Path, out_dirs: Sequence[Path], *, resumed: bool, recorded: bool = False) -> None:
    """Write what a later `resume=` looks for: the config, where nobody has done so, and the checkpoint folders.

    Args:
        out_dirs: of the run's checkpoint hooks, where they are not the run's own folder.
        resumed: the run goes on with what an earlier process began.
        recorded: the process that launched this one has written the config.
    """
    records = run_dir / RECORDS
    begun = (records / _CONFIG).exists()
    if not begun or not (recorded or _is_hydras(run_dir)):
        folder = attempts.following(run_dir) if begun and resumed else records
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write_text(folder / _CONFIG, masked_yaml(cfg, resolve=False))
    within = run_dir.resolve()
    for path in map(Path.resolve, out_dirs):
        with (records / _FOLDERS).open("a", encoding="utf-8") as file:
            file.write(f"{path.relative_to(within) if path.is_relative_to(within) else path}\n")


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed run goes on."""

    run_dir: Path | None
    """Its directory; None where `resume=auto` found an empty one and the run is new."""
    checkpoint: Path | None


def find(cfg: DictConfig, explicit: Path | None, *, key: str = "hydra.run.dir") -> Resumed:
    """What `resume=` means for this config.

    Args:
        cfg: as composed, with `resume` set.
        explicit: the run directory named by the user, if one was.
        key: what named it, for errors.

    Raises:
        UserError: there is nothing to resume, or two directories are named.
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
            remedy="Use auto for the newest run, or a path under outputs/.",
        )
    if explicit is not None and found.run_dir is not None and explicit.resolve() != found.run_dir.resolve():
        raise UserError(
            f"a resumed run goes on in its own directory, {found.run_dir}",
            key=key,
            remedy=f"Leave {key} out; or start a new run there with load_from={found.checkpoint}.",
        )
    return found


def settle(cfg: DictConfig, run_dir: Path | None) -> Resumed:
    """The directory and the checkpoint of a run that is built now.

    Args:
        run_dir: given by whoever starts the run; None: found or made here.

    Raises:
        UserError: the directory holds another run, or there is nothing to resume.
    """
    found = Resumed(None, None) if cfg.resume is None else find(cfg, run_dir, key="run_dir")
    if run_dir is not None and found.run_dir is None and cfg.resume != "auto" and not _is_hydras(run_dir):
        refuse_held(run_dir, key="run_dir", remedy=f"Name another directory, or go on with it: resume={run_dir}")
    return Resumed(run_dir or found.run_dir or new(), found.checkpoint)


def refuse_held(directory: Path, *, key: str, remedy: str) -> None:
    """A new run would overwrite the one that is there.

    Raises:
        UserError: the directory holds a run; names `key`.
    """
    if holds_run(directory):
        raise UserError(f"{directory} holds a run already", key=key, remedy=remedy)


def _is_hydras(run_dir: Path) -> bool:
    """Whether Hydra has made the directory, and written its records, for the job that is running."""
    if not HydraConfig.initialized() or OmegaConf.is_missing(HydraConfig.get().runtime, "output_dir"):
        return False
    return Path(HydraConfig.get().runtime.output_dir).resolve() == run_dir.resolve()


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


def _newest_first() -> Iterator[Path]:
    """Run directories by their names, which begin with date and time; the id decides nothing."""
    runs = [path.parent for path in OUTPUTS.glob(f"*/*/{RECORDS}")]
    return iter(sorted(runs, key=lambda path: (path.parent.name, path.name[:8], path.stat().st_mtime_ns), reverse=True))


def _identity(cfg: Any) -> Any:
    """What makes two runs the same: experiment, model and data (not how they are batched); secrets do not."""
    data = OmegaConf.select(cfg, "data")
    splits = {} if data is None else {name: data.get(name) for name in ("train", "val", "test")}
    found = {name: _plain(split) for name, split in splits.items()}
    return masked([OmegaConf.select(cfg, "experiment_name"), _plain(OmegaConf.select(cfg, "task.model")), found])


def _plain(node: Any) -> Any:
    """Resolved; as it is written where that takes a running job (`${hydra:runtime.cwd}/data`)."""
    if not OmegaConf.is_config(node):
        return node
    written = OmegaConf.to_container(node, resolve=False)
    return written if "${hydra:" in str(written) else OmegaConf.to_container(node, resolve=True)


def _config_in(records: Path) -> DictConfig:
    """The config in a folder of records; empty where there is none or it cannot be read."""
    try:
        loaded = OmegaConf.load(records / _CONFIG)
    except (OSError, OmegaConfBaseException, YAMLError, ValueError):
        return OmegaConf.create()
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create()


def newest_checkpoint(run_dir: Path, *, since: float) -> Path | None:
    """The complete checkpoint a run has written last; None where it has written none since then.

    Args:
        since: seconds since 1970.
    """
    found = _newest_of(run_dir)
    return None if found is None or found.stat().st_mtime < since else found


def _newest_of(run_dir: Path) -> Path | None:
    """The checkpoint written last in any of the run's folders."""
    return newest_complete(*checkpoint_folders(run_dir))


def _newest(run_dir: Path) -> Path:
    checkpoint = _newest_of(run_dir)
    if checkpoint is None:
        folders = checkpoint_folders(run_dir) or [run_dir / CHECKPOINTS]
        raise UserError(
            f"{run_dir} has no complete checkpoint in {', '.join(map(str, folders))}",
            key="resume",
            remedy="Name another run or a checkpoint file, or start a new one without resume.",
        )
    return checkpoint


def _is_of(folder: Path, run_dir: Path) -> bool:
    """Whether a folder's checkpoints are the run's: an attempt to resume may have named another run's folder."""
    if folder.resolve().is_relative_to(run_dir.resolve()):
        return True
    found = owner(folder)
    return found is None or found.resolve() == run_dir.resolve() or not found.exists()  # a run may have been moved


def owner(folder: Path) -> Path | None:
    """Return the run that a folder of checkpoints belongs to: the one it names, else the one above it, else None."""
    pointer = folder / RUN_DIR_FILE
    if pointer.is_file():
        return Path(pointer.read_text(encoding="utf-8").strip())
    above = folder.resolve().parent
    return above if (above / RECORDS).exists() else None


def run_of(path: Path) -> Path | None:
    """Return the run directory that is meant by `resume=<path>`; None for a checkpoint that belongs to no run.

    A checkpoint's run is above its folder, or named beside it if `out_dir` was elsewhere. It may have been deleted.
    """
    if path.is_dir():
        return path
    above = path.resolve().parent.parent
    if (above / RECORDS).exists():
        return above
    pointer = path.parent / RUN_DIR_FILE
    return Path(pointer.read_text(encoding="utf-8").strip()) if pointer.is_file() else None
