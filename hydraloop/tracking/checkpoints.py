"""Which checkpoint files of a run a tracker stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hydraloop.run.checkpoint_files import SUFFIX, newest_complete
from hydraloop.tracking.tracker import Run

CHOICES = ("best", "last", "all")
"""Of the option."""
_FOLDER = "checkpoints"
"""By default in the run directory."""


def checkpoints(run: Run, which: str | None, best: str | None, *, ended: bool) -> list[Path]:
    """The checkpoint files to be stored now.

    Args:
        which: the option: None, `best`, `last` or `all`.
        best: the best one, as `result.json` names it.
        ended: whether the run has; before it only those of `all` are.
    """
    folder = _folder(run)
    if which == "all":
        return sorted(folder.glob(f"*{SUFFIX}"))
    if not ended or which is None:
        return []
    if which == "last":
        newest = newest_complete(folder)
        return [] if newest is None else [newest]
    return list(_best(folder, best))


def _best(folder: Path, named: str | None) -> Iterator[Path]:
    """As it is named; beside the others, where the run was moved since."""
    if named is not None:
        path = Path(named)
        yield path if path.is_file() else folder / path.name


def _folder(run: Run) -> Path:
    chosen = run.attempt.params.get("default_hooks.checkpoint.out_dir")
    return run.run_dir / _FOLDER if chosen is None else Path(str(chosen)).expanduser()
