"""Where the output of a rank goes: rank 0's to the terminal and train.log, that of every other rank to its own file."""

from __future__ import annotations

import faulthandler
from pathlib import Path
from typing import Any

from hydraloop.files import console
from hydraloop.files.output import print_to


def path(run_dir: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return run_dir / ("train.log" if rank == 0 else f"rank{rank}.log")


def configure(run_dir: Path, rank: int, verbose: Any) -> None:
    """Redirect all output of a rank other than 0 to its file, also that of native code, and set up logging.

    A crash in native code writes its stack to the same place.

    Args:
        verbose: Hydra's option.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    print_to(path(run_dir, rank))  # torch's own redirects would empty the file
    faulthandler.enable(file=2)
    console.set_up(verbose, terminal=False)
