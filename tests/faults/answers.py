"""Asks hydraloop for an answer in JSON: in this process, which is faster, or in one of its own as a user does."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import hydraloop
from hydraloop.run_files import environment
from tests.e2e.projects import Project
from tests.faults.command_lines import code_of, standing_in

Answer = dict[str, Any]


def asker(project: Project, every: int) -> Callable[[Sequence[str]], Answer]:
    """Return a function that runs a whole command, `python train.py … --json`, and returns its answer.

    Args:
        every: which dry run of `train.py` has a process of its own; 1: each. Other commands always have one.
    """
    numbers = count(1)

    def ask(command: Sequence[str]) -> Answer:
        python, script, *words = command
        assert python == "python", f"this is not a command of hydraloop: {command}"
        assert script in ("train.py", "-m"), command
        is_harmless = script == "train.py" and any(word[:4] in ("--dr", "--he") for word in words)
        if is_harmless and next(numbers) % every:
            out = _here(project.path, [script, *words])
        else:
            out = _in_a_process(project.path, [script, *words])
        answer: Answer = json.loads(out)
        return answer

    return ask


def _here(folder: Path, argv: list[str]) -> str:
    out = io.StringIO()
    printed = contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO())
    with standing_in(folder, argv), printed[0], printed[1], _as_train():
        code_of(lambda: hydraloop.main(folder=folder))
    return out.getvalue()


@contextlib.contextmanager
def _as_train() -> Iterator[None]:
    """In the body, corrected commands begin with `python train.py`, and not with the script of this process."""
    before, environment.script = environment.script, lambda: ["python", "train.py"]
    try:
        yield
    finally:
        environment.script = before


def _in_a_process(folder: Path, argv: list[str]) -> str:
    command = [sys.executable, *argv]
    return subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
    ).stdout
