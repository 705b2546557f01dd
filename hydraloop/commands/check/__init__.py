"""`python train.py check`: tests the data, the model and the task of the project with short runs. Imports torch.

Each check returns what it has found, or raises a `UserError` with what to do.
"""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hydraloop.commands.check import checks
from hydraloop.commands.check.short_runs import NotJudgedError, short_run
from hydraloop.config.checks import Draft, hydra_config
from hydraloop.errors import UserError, printable
from hydraloop.files.result import describe
from hydraloop.files.secrets import mask_text
from hydraloop.launch.other_ranks import Peers
from hydraloop.sweeps.check_sweep import SweepDraft


def run(draft: Draft, argv: Sequence[str], peers: Peers) -> int:
    """Print a line for each check. Return the exit code: 1 if there is a problem.

    Args:
        argv: all arguments of this process.

    Raises:
        UserError: the config is that of a sweep.
    """
    if isinstance(draft, SweepDraft):
        raise UserError("a sweep has several configs", remedy="Leave -m out, and give one value to each option.")
    logging.disable(logging.CRITICAL)  # the lines of short runs
    with hydra_config(draft.cfg), TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as folder:
        if checks.OF_RANKS in os.environ:
            peers.skip_plan()
            checks.step(draft)
            return 0
        problems = _run_all(draft, Path(folder), argv)
    print(f"{problems} problem{'' if problems == 1 else 's'}")
    return int(problems > 0)


def _run_all(draft: Draft, folder: Path, argv: Sequence[str]) -> int:
    """Print a line for each check. Return the number of problems."""
    known: dict[str, Any] = {}

    def build() -> str:
        base = known["base"] = short_run(draft, folder / "base")
        return f"{type(base.task).__name__} with {type(base.task.model).__name__}"

    def splits() -> str:
        known["sets"] = checks.sets_of(known["base"])
        return checks.splits(known["sets"])

    def loss() -> str:
        known["trained"] = checks.on_one_batch(draft, known["base"], folder / "batch")
        return checks.loss(known["base"], *known["trained"])

    failed: list[str] = []
    by_name: dict[str, Callable[[], str]] = {
        "build": build,
        "splits": splits,
        "labels": lambda: checks.labels(known["base"], known["sets"]),
        "loss": loss,
        "parameters": lambda: checks.parameters(draft, folder / "other", known["base"], *known["trained"]),
        "ranks": lambda: checks.ranks(draft, known["base"], folder, argv),
        "resume": lambda: checks.resume(draft, folder),
    }
    for name, check in by_name.items():
        if name == "ranks" and "parameters" in failed:  # DDP refuses parameters without a gradient
            continue
        state, text = _judged(check)
        print(printable(mask_text(f"{name:<12}{state:<12}{text}")), flush=True)
        failed += [name] if state == "problem" else []
        if failed[-1:] == [name] and (name in ("build", "labels") or (name == "loss" and "trained" not in known)):
            break  # wrong labels break a GPU
    return len(failed)


def _judged(check: Callable[[], str]) -> tuple[str, str]:
    """Return the state of a check and the text about it. An error in the check is a problem."""
    try:
        return "ok", check()
    except NotJudgedError as why:
        return "not judged", str(why)
    except UserError as error:
        return "problem", str(error).replace("\n  ", "\n" + 24 * " ")
    except Exception as error:
        traceback.print_exc()
        return "problem", describe(error)
