"""Run directories: the directory of a new run, and where a resumed run continues. Imports no torch.

`.hydra/config.yaml` is the config with which a run was started, and never changes. Each attempt to resume the run has a
folder `.hydra/resume_<n>` with its own config. Secrets in both are masked.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
from hydraloop.run.config_yaml import masked_yaml, plain
from hydraloop.run.result import FILENAME as RESULT_FILE
from hydraloop.safety.secrets import masked

OUTPUTS = Path("outputs")
"""Runs of one job, as `outputs/<date>/<time>-<id>`."""
CHECKPOINTS = "checkpoints"
_CONFIG = "config.yaml"
_FOLDERS = "checkpoint_folders"
"""Text file in RECORDS with the folders of the run's checkpoints, one per line. Folders in the run directory are
relative to it, so that it can be moved; others are absolute."""


def run_id() -> str:
    """Return six random characters: runs started in the same second get different directories."""
    return secrets.token_hex(3)


def new() -> Path:
    """Create and return a directory for a run that was started from Python."""
    path = OUTPUTS / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}-{run_id()}"
    path.mkdir(parents=True)
    return path


def holds_run(directory: Path) -> bool:
    """Return whether a run was started in the directory."""
    return (directory / RECORDS).exists() or has_trained(directory)


def has_trained(directory: Path) -> bool:
    """Return whether a run in the directory has ended or has written checkpoints."""
    return any((directory / name).exists() for name in (RESULT_FILE, CHECKPOINTS))


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Return the folders with a run's checkpoints: the default one, and those recorded from the hook's `out_dir`."""
    folders = [run_dir / CHECKPOINTS]
    with suppress(OSError):  # none recorded
        recorded = (run_dir / RECORDS / _FOLDERS).read_text(encoding="utf-8")
        folders += [run_dir / line for line in recorded.splitlines()]
    return [folder for folder in dict.fromkeys(folders) if _is_of(folder, run_dir)]


def record(cfg: DictConfig, run_dir: Path, out_dirs: Sequence[Path], *, resumed: bool, recorded: bool = False) -> None:
    """Write the config, unless it is written already, and the checkpoint folders, for a later `resume=`.

    Args:
        out_dirs: of the run's checkpoint hooks, if they are set.
        resumed: the run continues what an earlier process started.
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
    if run_dir is not None and found.run_dir is None and cfg.resume != "auto" and not _is_hydras(run_dir):
        refuse_held(run_dir, key="run_dir", remedy=f"Name another directory, or continue the run: resume={run_dir}")
    return Resumed(run_dir or found.run_dir or new(), found.checkpoint)


def refuse_held(directory: Path, *, key: str, remedy: str) -> None:
    """Refuse a directory in which a new run would overwrite another.

    Raises:
        UserError: the directory holds a run; names `key`.
    """
    if holds_run(directory):
        raise UserError(f"{directory} holds a run already", key=key, remedy=remedy)


def _is_hydras(run_dir: Path) -> bool:
    """Return whether Hydra has created the directory for the running job, and written the config into it."""
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
    """Return run directories by date and time in their names, the newest first. The id is ignored."""
    runs = [path.parent for path in OUTPUTS.glob(f"*/*/{RECORDS}")]
    return iter(sorted(runs, key=lambda path: (path.parent.name, path.name[:8], path.stat().st_mtime_ns), reverse=True))


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
        loaded = OmegaConf.load(records / _CONFIG)
    except (OSError, OmegaConfBaseException, YAMLError, ValueError):
        return OmegaConf.create()
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create()


def newest_checkpoint(run_dir: Path, *, since: float) -> Path | None:
    """Return the complete checkpoint that a run has written last; None if it has written none since `since`.

    Args:
        since: seconds since 1970.
    """
    found = _newest_of(run_dir)
    return None if found is None or found.stat().st_mtime < since else found


def _newest_of(run_dir: Path) -> Path | None:
    """Return the checkpoint that was written last, from all of the run's folders."""
    return newest_complete(*checkpoint_folders(run_dir))


def _newest(run_dir: Path) -> Path:
    checkpoint = _newest_of(run_dir)
    if checkpoint is None:
        raise UserError(
            f"{run_dir} has no complete checkpoint in {', '.join(map(str, checkpoint_folders(run_dir)))}",
            key="resume",
            remedy="Name another run or a checkpoint file, or start a new one without resume.",
        )
    return checkpoint


def _is_of(folder: Path, run_dir: Path) -> bool:
    """Return whether a folder has the run's checkpoints: an attempt to resume may have named another run's folder."""
    if folder.resolve().is_relative_to(run_dir.resolve()):
        return True
    found = owner(folder)
    return found is None or found.resolve() == run_dir.resolve() or not found.exists()  # a run may have been moved


def owner(folder: Path) -> Path | None:
    """Return the run to which a folder of checkpoints belongs: the one named in it, or the one that contains it."""
    pointer = folder / RUN_DIR_FILE
    if pointer.is_file():
        return Path(pointer.read_text(encoding="utf-8").strip())
    above = folder.resolve().parent
    return above if (above / RECORDS).exists() else None


def run_of(path: Path) -> Path | None:
    """Return the run directory of `resume=<path>`; None for a checkpoint that does not belong to a run.

    The run of a checkpoint contains its folder, or is named in it (`out_dir`). It may have been deleted.
    """
    if path.is_dir():
        return path
    above = path.resolve().parent.parent
    return above if (above / RECORDS).exists() else owner(path.parent)
