"""The directory of a run: its name, what it contains, and the folders of its attempts. Imports no torch."""

from __future__ import annotations

import os
import secrets
import shlex
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

from hydraloop.errors import UserError, missing_path
from hydraloop.files import atomic
from hydraloop.files.atomic import read_bytes
from hydraloop.files.checkpoint_files import candidates
from hydraloop.files.config_yaml import masked_yaml, parsed_yaml
from hydraloop.files.result import FILENAME as RESULT_FILE
from hydraloop.files.secrets import mask_overrides

RECORDS = ".hydra"
"""Folder of a run directory with the config, written by Hydra."""
_PREFIX = "resume_"


def attempts(run_dir: Path) -> list[Path]:
    """Return the folders of all attempts to resume a run, the newest last."""
    return sorted(filter(_number, (run_dir / RECORDS).glob(f"{_PREFIX}*")), key=_number)


def newest_attempt(run_dir: Path) -> Path | None:
    """Return the folder of the newest attempt to resume a run; None if it was not resumed."""
    return next(reversed(attempts(run_dir)), None)


def next_attempt(run_dir: Path) -> Path:
    """Return the folder for the next attempt to resume a run. It is not created."""
    last = newest_attempt(run_dir)
    return run_dir / RECORDS / f"{_PREFIX}{1 if last is None else _number(last) + 1}"


def typed_overrides(run_dir: Path) -> list[str]:
    """Return the overrides of all attempts as typed, secrets masked; empty for a run started from Python.

    If several attempts set a key, the newest one counts.
    """
    return list({line.partition("=")[0]: line for typed in typed_by_attempt(run_dir) for line in typed}.values())


def typed_by_attempt(run_dir: Path) -> list[list[str]]:
    """Return the overrides of each attempt as typed, secrets masked; the first attempt started the run."""
    found = []
    for records in _trained(run_dir):
        lines: Any = None
        with suppress(OSError, ValueError, yaml.YAMLError):
            lines = parsed_yaml(read_bytes(records / "overrides.yaml").decode())
        typed = [line for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
        found.append(mask_overrides(typed))
    return found


def _trained(run_dir: Path) -> list[Path]:
    """Return the folders of the attempts, without those that failed at their start and have a result of their own."""
    return [one for one in (run_dir / RECORDS, *attempts(run_dir)) if not (one / RESULT_FILE).exists()]


def _number(folder: Path) -> int:
    """Return the number of an attempt; 0 for another folder."""
    digits = folder.name.removeprefix(_PREFIX)
    return int(digits) if digits.isdecimal() else 0


OUTPUTS = Path("outputs")
"""Runs of one job, by default as `outputs/<date>/<time>-<id>`."""
SWEEP_FILE = "sweep.json"
"""In the folder of a sweep."""
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
"""In RECORDS."""
_FOLDERS = "checkpoint_folders"
"""Text file in RECORDS with the folders of the run's checkpoints, one per line. Folders in the run directory are
relative to it, so that it can be moved; others are absolute."""


def run_id() -> str:
    """Return six random characters: runs started in the same second get different directories."""
    return secrets.token_hex(3)


def new_run_dir() -> Path:
    """Create and return a directory for a run that was started from Python."""
    path = OUTPUTS / time.strftime("%Y-%m-%d") / f"{time.strftime('%H-%M-%S')}-{run_id()}"
    path.mkdir(parents=True)
    return path


def holds_run(directory: Path) -> bool:
    """Return whether a run was started in the directory."""
    return (directory / RECORDS).exists() or has_trained(directory)


def check_holds_run(directory: Path) -> None:
    """Refuse a directory in which no run was started."""
    if not holds_run(directory):
        otherwise = "Name one, outputs/<date>/<run>, or a job of a sweep. checkpoint=FILE selects a checkpoint."
        remedy = missing_path(directory, otherwise)
        raise UserError(f"{directory} is not a run directory", key="run", remedy=remedy)


def has_trained(directory: Path) -> bool:
    """Return whether a run in the directory has ended or has written checkpoints."""
    return any((directory / name).exists() for name in (RESULT_FILE, CHECKPOINTS))


def checkpoint_folders(run_dir: Path) -> list[Path]:
    """Return the folders with a run's checkpoints: the default one, and those recorded from the hook's `out_dir`."""
    folders = [run_dir / CHECKPOINTS]
    with suppress(OSError):  # none recorded
        recorded = read_bytes(run_dir / RECORDS / _FOLDERS).decode()
        folders += [run_dir / line for line in recorded.splitlines()]
    return list(dict.fromkeys(folders))


def config_file(run_dir: Path) -> Path | None:
    """Return the config of a run, or of its newest resumption that has trained; None if the run has none."""
    written = [folder for folder in _trained(run_dir) if (folder / CONFIG).is_file()]
    return written[-1] / CONFIG if written else None


def is_recorded(run_dir: Path) -> bool:
    """Return whether the directory has the config of a run."""
    return (run_dir / RECORDS / CONFIG).exists()


def record_config(cfg: DictConfig, folder: Path) -> None:
    """Write the config, for a later `resume=`."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.write_text(folder / CONFIG, masked_yaml(cfg, resolve=False))


def record_checkpoint_folder(run_dir: Path, folder: Path) -> None:
    """Record a folder with checkpoints of the run, for a later `resume=`, if the run has records at all."""
    path, within = folder.resolve(), run_dir.resolve()
    if (run_dir / RECORDS).is_dir() and path not in map(Path.resolve, checkpoint_folders(run_dir)):
        with (run_dir / RECORDS / _FOLDERS).open("a", encoding="utf-8") as file:
            file.write(f"{path.relative_to(within) if path.is_relative_to(within) else path}\n")


def check_links(directory: Path, *, key: str) -> None:
    """Refuse links in a directory that lead out of it, and pipes: a resumed run would write there, or wait.

    The run may come from anywhere.

    The directory itself, and those above it, may be links, and so may the files of W&B, which links its own logs.

    Raises:
        UserError: there is such a link; names `key`.
    """
    inside = directory.resolve()
    for link in _links(directory):
        target = Path(os.path.realpath(link))
        if target.is_fifo():
            remedy = "If it is yours, delete it. Otherwise do not resume this run."
            raise UserError(f"{link} is not a regular file", key=key, remedy=remedy)
        if not target.is_relative_to(inside):
            moved = f"rm {shlex.quote(link)} && mv {shlex.quote(str(target))} {shlex.quote(link)}"
            raise UserError(
                f"{link} is a link to {target}, outside of {directory}",
                key=key,
                remedy=f"If it is yours, move what it names into the directory: {moved}\n"
                "  Otherwise do not resume this run.",
            )


def _links(directory: Path | str, *, is_run: bool = True) -> Iterator[str]:
    with suppress(OSError):  # a missing one, or one that cannot be read
        entries = list(os.scandir(directory))
        is_run = is_run or RECORDS in [entry.name for entry in entries]  # a job of a sweep
        for entry in entries:
            if entry.is_symlink() or not (entry.is_file() or entry.is_dir()):
                yield entry.path
            elif entry.is_dir() and not (is_run and entry.name == "wandb"):
                yield from _links(entry.path, is_run=False)


def refuse_held(directory: Path, *, key: str) -> None:
    """Refuse a directory in which a new run would overwrite another.

    Raises:
        UserError: the directory holds a run; names `key`.
    """
    if holds_run(directory):
        remedy = "Name another directory"
        if candidates(*checkpoint_folders(directory)):
            remedy += f", or continue the run: {shlex.quote(f'resume={directory}')}"
        raise UserError(f"{directory} holds a run already", key=key, remedy=remedy)


def run_of(path: Path) -> Path | None:
    """Return the run directory of `resume=<path>`; None for a checkpoint that does not belong to a run."""
    if path.is_dir():
        return path
    run_dir = path.resolve().parent.parent
    return run_dir if (run_dir / RECORDS).exists() else None
