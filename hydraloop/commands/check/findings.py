"""What a check has found: one line, with what to do below it if there is a problem."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hydraloop.errors import UserError, printable
from hydraloop.run_files.result import describe
from hydraloop.safety.secrets import mask_text

_INDENT = " " * 24


@dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    state: Literal["ok", "not judged", "problem"]
    text: str
    """What was found, or why it is not judged."""
    key: str | None = None
    """The option that the problem is about."""
    remedy: str | None = None
    name: str = ""
    """The name of the check."""

    @property
    def line(self) -> str:
        """The text for a terminal, without secrets."""
        where = f"{self.key}: " if self.key else ""
        remedy = f"\n{_INDENT}{self.remedy}" if self.remedy else ""
        return printable(mask_text(f"{self.name:<12}{self.state:<12}{where}{self.text}{remedy}"))


def judge(name: str, check: Callable[[], Finding]) -> Finding:
    """Do a check, print its line, and return the outcome. An error in the check is a problem."""
    try:
        found = check()
    except UserError as error:
        found = Finding("problem", error.problem, error.key, error.remedy)
    except Exception as error:
        found = Finding("problem", f"{describe(error)}{_place(error)}")
    found = replace(found, name=name)
    print(found.line, flush=True)
    return found


def _place(error: Exception) -> str:
    """Return the last line of the project's own code that the error has passed."""
    here, inside = Path.cwd(), (Path(sys.prefix), Path(__file__).parents[2])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(here) and not any(file.is_relative_to(folder) for folder in inside):
            return f" ({file.relative_to(here)}, line {frame.lineno})"
    return ""
