"""Folders of attempts to resume a run: `<run_dir>/.hydra/resume_<n>`. Imports no torch."""

from __future__ import annotations

from pathlib import Path

import yaml

from hydraloop.files.config_yaml import parsed_yaml
from hydraloop.files.regular import read_bytes
from hydraloop.files.secrets import mask_overrides

RECORDS = ".hydra"
"""Folder of a run directory with the config, written by Hydra."""
_PREFIX = "resume_"


def folders(run_dir: Path) -> list[Path]:
    """Return the folders of all attempts to resume a run, the newest last."""
    return sorted(filter(is_attempt, (run_dir / RECORDS).glob(f"{_PREFIX}*")), key=_number)


def newest(run_dir: Path) -> Path | None:
    """Return the folder of the newest attempt to resume a run; None if it was not resumed."""
    return next(reversed(folders(run_dir)), None)


def following(run_dir: Path) -> Path:
    """Return the folder for the next attempt to resume a run. It is not created."""
    last = newest(run_dir)
    return run_dir / RECORDS / f"{_PREFIX}{1 if last is None else _number(last) + 1}"


def typed_overrides(run_dir: Path) -> list[str]:
    """Return the overrides of the newest attempt as typed, secrets masked; empty for a run started from Python."""
    records = newest(run_dir) or run_dir / RECORDS
    try:
        found = parsed_yaml(read_bytes(records / "overrides.yaml").decode())
    except (OSError, ValueError, yaml.YAMLError):
        return []
    return mask_overrides([line for line in found if isinstance(line, str)] if isinstance(found, list) else [])


def is_attempt(records: Path) -> bool:
    """Return whether a folder is one of an attempt."""
    return records.parent.name == RECORDS and records.name.removeprefix(_PREFIX).isdigit()


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix(_PREFIX))
