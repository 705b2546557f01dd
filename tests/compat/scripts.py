"""Shared by the scripts that run with another framework: tiny runs, and the results of their functions."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from tests.hooks.tiny_runs import Scripted, engine_of

RISING = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)


def engine_with(
    *hooks: Hook, accuracy: Sequence[float] = RISING, run_dir: Path | None = None, **options: Any
) -> Engine:
    """An engine with a metric `accuracy` of given values, one for each evaluation, and these hooks: h0, h1, …"""
    return engine_of(
        Path(tempfile.mkdtemp()) if run_dir is None else run_dir,
        {f"h{index}": hook for index, hook in enumerate(hooks)},
        metrics={"accuracy": Scripted(accuracy, True)},
        **options,
    )


def refusal(act: Callable[[], object]) -> str:
    """The one message of the mistake that `act` makes."""
    try:
        act()
    except UserError as error:
        return str(error)
    return "nothing was refused"


def run_all(functions: Sequence[Callable[[], Any]]) -> None:
    """Call each function, and write what they return to the file named on the command line."""
    torch.set_num_threads(1)
    outcomes = {function.__name__: function() for function in functions}
    Path(sys.argv[1]).write_text(json.dumps(outcomes), encoding="utf-8")
