"""The folders of the attempts to resume a run: `<run_dir>/.hydra/resume_<n>`. Imports no torch."""

from __future__ import annotations

from pathlib import Path

RECORDS = ".hydra"
_ATTEMPT = "resume_"


def newest(run_dir: Path) -> Path | None:
    """Return the folder of the newest attempt to resume a run; None if it was not resumed."""
    folders = [path for path in (run_dir / RECORDS).glob(f"{_ATTEMPT}*") if _number(path).isdigit()]
    return max(folders, key=lambda path: int(_number(path)), default=None)


def _number(folder: Path) -> str:
    return folder.name.removeprefix(_ATTEMPT)
