"""Selects the checkpoint files of a run that a tracker stores."""

from __future__ import annotations

from pathlib import Path

from hydraloop.errors import UserError, suggestion
from hydraloop.run.checkpoint_files import SUFFIX, newest_complete
from hydraloop.tracking.tracker import Run

CHOICES = ("best", "last", "all")
"""Values of the option `checkpoints`."""


def check_choice(checkpoints: str | None) -> None:
    """Check the option `checkpoints` of a tracker hook.

    Raises:
        UserError: it is not `best`, `last`, `all` or None.
    """
    if checkpoints is not None and checkpoints not in CHOICES:
        remedy = suggestion(checkpoints, CHOICES)
        raise UserError(f"{checkpoints!r} is not one of {', '.join(CHOICES)}", key="checkpoints", remedy=remedy)


def checkpoints(run: Run, which: str | None, best: str | None, *, ended: bool) -> list[Path]:
    """Return the checkpoint files that are to be stored now.

    Args:
        which: the option `checkpoints`: None, `best`, `last` or `all`.
        best: path of the best checkpoint in `result.json`.
        ended: whether the run has ended. Until then, only `all` selects files.
    """
    chosen = run.attempt.params.get("default_hooks.checkpoint.out_dir")
    folder = run.run_dir / "checkpoints" if chosen is None else Path(str(chosen)).expanduser()
    if which == "all":
        return sorted(folder.glob(f"*{SUFFIX}"))
    if which == "last" and ended:
        newest = newest_complete(folder)
        return [] if newest is None else [newest]
    if which == "best" and ended and best is not None:
        path = Path(best)
        return [path if path.is_file() else folder / path.name]  # the run may have been moved since
    return []
