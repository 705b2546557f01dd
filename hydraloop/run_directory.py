"""Run directories: where a new run goes, which one a resumed run goes on in. Without torch: it comes before all."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from hydraloop.engine.checkpoint_files import RUN_DIR_FILE, newest_complete
from hydraloop.engine.result import FILENAME as RESULT_FILE
from hydraloop.errors import UserError

OUTPUTS = Path("outputs")
"""Runs of one job, as `outputs/<date>/<time>-<id>`."""
CHECKPOINTS = "checkpoints"


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
    return any((directory / name).exists() for name in (".hydra", RESULT_FILE, CHECKPOINTS))


def checkpoints_of(run_dir: Path) -> Path:
    """Where a run's checkpoints are: its own folder, or the checkpoint hook's `out_dir`."""
    out_dir = OmegaConf.select(_config_of(run_dir), "default_hooks.checkpoint.out_dir")
    return run_dir / CHECKPOINTS if out_dir is None else Path(out_dir)


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a resumed run goes on."""

    run_dir: Path | None
    """Its directory; None where `resume=auto` found an empty one and the run is new."""
    checkpoint: Path | None


def find(cfg: DictConfig, explicit: Path | None) -> Resumed:
    """What `resume=` means for this config.

    Args:
        cfg: as composed, with `resume` set.
        explicit: the run directory named by the user, if one was.

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
        found = Resumed(_run_of(path), path)
    else:
        raise UserError(
            f"{wanted} is neither a run directory nor a checkpoint file",
            key="resume",
            remedy="Use auto for the newest run, or a path under outputs/.",
        )
    if explicit is not None and found.run_dir is not None and explicit.resolve() != found.run_dir.resolve():
        raise UserError(
            f"a resumed run goes on in its own directory, {found.run_dir}",
            key="hydra.run.dir",
            remedy=f"Leave hydra.run.dir out; or start a new run there with load_from={found.checkpoint}.",
        )
    return found


def settle(cfg: DictConfig, run_dir: Path | None) -> Resumed:
    """The directory and the checkpoint of a run that is built now.

    Args:
        run_dir: given by whoever starts the run (settled before, for `resume`); None: found or made here.
    """
    if cfg.resume is None:
        return Resumed(run_dir or new(), None)
    found = find(cfg, run_dir if str(cfg.resume) == "auto" else None)
    return Resumed(run_dir or found.run_dir or new(), found.checkpoint)


def _auto(cfg: DictConfig, explicit: Path | None) -> Resumed:
    if explicit is not None:
        checkpoint = newest_complete(checkpoints_of(explicit)) if explicit.is_dir() else None
        return Resumed(explicit if checkpoint else None, checkpoint)
    wanted = _identity(cfg)
    for run_dir in _newest_first():
        if _identity(_config_of(run_dir)) == wanted:
            checkpoint = newest_complete(checkpoints_of(run_dir))
            if checkpoint is not None:
                return Resumed(run_dir, checkpoint)
    raise UserError(
        f"no run under {OUTPUTS}/ with the same experiment, model and data has a checkpoint",
        key="resume",
        remedy="Leave resume out to start a new run, or name its directory: resume=outputs/….",
    )


def _newest_first() -> Iterator[Path]:
    """Run directories by their names, which begin with date and time; the id decides nothing."""
    runs = [path.parent for path in OUTPUTS.glob("*/*/.hydra")]
    return iter(sorted(runs, key=lambda path: (path.parent.name, path.name[:8], path.stat().st_mtime_ns), reverse=True))


def _identity(cfg: Any) -> Any:
    """What makes two runs the same: experiment, model and data (not how they are batched)."""
    data = OmegaConf.select(cfg, "data")
    splits = {} if data is None else {name: data.get(name) for name in ("train", "val", "test")}
    return (
        OmegaConf.select(cfg, "experiment_name"),
        _plain(OmegaConf.select(cfg, "task.model")),
        {name: _plain(split) for name, split in splits.items()},
    )


def _plain(node: Any) -> Any:
    """Resolved; as it is written where that takes a running job (`${hydra:runtime.cwd}/data`)."""
    if not OmegaConf.is_config(node):
        return node
    written = OmegaConf.to_container(node, resolve=False)
    return written if "${hydra:" in str(written) else OmegaConf.to_container(node, resolve=True)


def _config_of(run_dir: Path) -> DictConfig:
    """The config a run was started with; empty where there is none or it cannot be read."""
    try:
        loaded = OmegaConf.load(run_dir / ".hydra" / "config.yaml")
    except (OSError, OmegaConfBaseException, YAMLError, ValueError):
        return OmegaConf.create()
    return loaded if isinstance(loaded, DictConfig) else OmegaConf.create()


def _newest(run_dir: Path) -> Path:
    directory = checkpoints_of(run_dir)
    checkpoint = newest_complete(directory)
    if checkpoint is None:
        raise UserError(
            f"{directory} has no complete checkpoint",
            key="resume",
            remedy="Name another run, or start a new one without resume.",
        )
    return checkpoint


def _run_of(checkpoint: Path) -> Path | None:
    """The run a checkpoint file belongs to: above its folder, or named beside it where `out_dir` was elsewhere."""
    pointer = checkpoint.parent / RUN_DIR_FILE
    if pointer.is_file():
        return Path(pointer.read_text(encoding="utf-8").strip())
    above = checkpoint.resolve().parent.parent
    return above if (above / ".hydra").exists() else None
