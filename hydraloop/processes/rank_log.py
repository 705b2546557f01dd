"""Where the output of a rank goes: rank 0's to the terminal and train.log, that of every other rank to its own file."""

from __future__ import annotations

import faulthandler
import re
from pathlib import Path

from omegaconf import OmegaConf

from hydraloop.cli.console import prepare_handlers
from hydraloop.plan import RunPlan
from hydraloop.run_files.output import print_to
from hydraloop.safety import hydra_versions


def path(run_dir: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return run_dir / ("train.log" if rank == 0 else f"rank{rank}.log")


def configure(plan: RunPlan, rank: int) -> None:
    """Set up logging. For a rank other than 0, redirect all output to its file, also that of native code.

    A crash in native code writes its stack to the same place.
    """
    faulthandler.enable(file=2)
    if rank > 0:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        print_to(path(plan.run_dir, rank))  # torch's own redirects would empty the file
    config = OmegaConf.create(plan.logging) if rank == 0 and plan.logging is not None else None
    hydra_versions.configure_log(config, plan.verbose)  # None: to the standard output
    prepare_handlers()


def crash(file: Path, start: int) -> str | None:
    """Return what a rank's log, of `start` bytes when the rank started, says of its crash; None: killed by SIGKILL."""
    with file.open("rb") as opened:
        opened.seek(start)
        found = re.search(rb"^Fatal Python error: (.+)", opened.read(), re.MULTILINE)
    return None if found is None else found[1].decode(errors="replace")
