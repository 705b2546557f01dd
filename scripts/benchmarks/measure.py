"""What the benchmarks share: options, sides that take turns, medians with their spread, goals, and a user's project."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def interleaved(sides: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1) -> dict[str, list[float]]:
    """Call every side once in each round, in rotating order, so that other load on the machine affects all sides.

    Args:
        sides: functions that return a figure, by name.
        rounds: number of rounds that count.
        warm_up: number of rounds before them.

    Returns:
        The figures of each side, by round.
    """
    names = [*sides]
    found: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            figure = sides[name]()
            if number >= 0:
                found[name].append(figure)
    return found


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratio of each round. A change in the machine's speed has little effect on it."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the difference of each round."""
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return the median, the smallest and the largest value."""
    middle, low, high = (f"{value:,.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} ({low} to {high})"


def table(head: str, *columns: str) -> None:
    """Print the head of a Markdown table. `row` prints its rows."""
    row(head, *columns)
    print(f"|{'---|' * (1 + len(columns))}")


def row(*cells: object) -> None:
    """Print a row of a Markdown table."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def goal(what: str, values: Sequence[float], *, most: float = 0.0, least: float = 0.0, digits: int = 2) -> None:
    """Print the spread of a figure, its goal, and whether its median meets the goal."""
    middle = statistics.median(values)
    met = "met" if (middle >= least if least else middle <= most) else "NOT met"
    print(f"{what}: {spread(values, digits)}; goal: {f'at least {least:g}' if least else f'at most {most:g}'}, {met}")


def parser(doc: str, **numbers: float) -> argparse.ArgumentParser:
    """Return a parser with the options of a benchmark that are numbers, and their defaults.

    Args:
        doc: of the script.
        numbers: by option. An option whose default is whole takes a whole number.
    """
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, default in numbers.items():
        made.add_argument(f"--{name}", type=type(default), default=default)
    return made


def machine() -> str:
    """Return the processor and the number of cores."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def project(folder: Path) -> Path:
    """Copy what a user's project has into a folder."""
    for name in ("conf", "my_project", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "train.py", folder)
    return folder


def environment(**added: str) -> dict[str, str]:
    """Return the environment of processes that a benchmark starts. They store bytecode, as a user's processes do."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | added
