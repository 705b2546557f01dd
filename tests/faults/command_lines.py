"""Random command lines: each ends in success or in one message, and leaves no half-written directory.

    python -m tests.faults.command_lines [--dry-runs 9000] [--runs 400] [--commands 300] [--seed 0]

Hypothesis draws lines by the grammar of overrides, and changes valid ones. Dry runs are in this process; runs of two
iterations, and commands for a finished run, are in processes of their own. Prints a table; the exit code is 1 if a line
has ended otherwise. A seed draws the same lines each time.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import hydraloop
from tests.e2e.projects import Project, Run
from tests.faults import tables
from tests.faults.command_line_grammar import COMMAND_KINDS, FINISHED, KINDS, RUN_KINDS

ENDS = ("success", "message", "traceback", "no message", "several messages", "exit code", "hung", "files")
GOOD = ENDS[:2]
SECONDS = 600
"""After which a dry run has hung; the machine may be busy."""


def main(dry_runs: int, runs: int, commands: int, number: int) -> int:
    """Return the exit code: 0 if all command lines end well."""
    began, counts = time.monotonic(), {kind: Counter[str]() for kind in (*KINDS, *RUN_KINDS, *COMMAND_KINDS)}
    with tempfile.TemporaryDirectory() as folder:
        project = Project.make(Path(folder) / "project")
        project.train("experiment=spirals", "engine.max_iters=2", f"hydra.run.dir={FINISHED}")
        parts = ((KINDS, dry_run, dry_runs), (RUN_KINDS, run, runs), (COMMAND_KINDS, command, commands))
        for kinds, judge, count in parts:
            for place, (kind, lines) in enumerate(kinds.items()):
                share = count // len(kinds) + (place < count % len(kinds))
                for _, end, _ in _judged(lines, share, number, partial(_told, kind, partial(judge, project))):
                    counts[kind][end] += 1
    tables.head("kind of command line", "lines", *ENDS)
    total = sum(counts.values(), Counter[str]())
    shown = {kind: found for kind, found in counts.items() if found}
    for kind, found in {**shown, "all": total}.items():
        tables.row(kind, found.total(), *(found[end] for end in ENDS))
    print(f"\nSeed {number}. {(time.monotonic() - began) / 60:.0f} minutes.")
    return int(any(total[end] for end in ENDS if end not in GOOD))


def _judged(
    lines: st.SearchStrategy[list[str]], count: int, number: int, judge: Callable[[list[str]], tuple[str, str]]
) -> list[tuple[list[str], str, str]]:
    """Return so many command lines, each with its end and what it has printed."""
    found: list[tuple[list[str], str, str]] = []
    if not count:
        return found

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(lines)
    def collect(words: list[str]) -> None:
        if len(found) < count:
            found.append((words, *judge(words)))

    collect()
    return found


def _told(kind: str, judge: Callable[[list[str]], tuple[str, str]], words: list[str]) -> tuple[str, str]:
    """Judge a command line, and print it at once if its end is not good."""
    end, text = judge(words)
    if end not in GOOD:
        print(f"{kind}: {end}: {shlex.join(words)}", text[-2000:], sep="\n  ", file=sys.stderr, flush=True)
    return end, text


def dry_run(project: Project, words: Sequence[str]) -> tuple[str, str]:
    """Return how a dry run in this process ends, and what it has printed. It leaves no files."""
    before, out, err = project.files, io.StringIO(), io.StringIO()
    printed = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with standing_in(project.path, ["train.py", "--dry-run", *words]), printed[0], printed[1]:
        code = code_of(lambda: hydraloop.main(folder=project.path))
    end = judged(code, out.getvalue() + err.getvalue())
    return "files" if project.files != before else end, err.getvalue()


def run(project: Project, words: Sequence[str]) -> tuple[str, str]:
    """Return how a run of two iterations ends, and what it has printed. Its directory says how it has ended."""
    before = {one.path for one in project.runs}
    try:
        done = project.train(*words, "engine.max_iters=2")
    except subprocess.TimeoutExpired as hung:
        return "hung", str(hung.output)
    made = [one for one in project.runs if one.path not in before]
    end = judged(done.code, done.text)
    whole = all(one.result["status"] in ("finished", "failed") for one in made if (one.path / "result.json").exists())
    whole = whole and all((one.path / name).exists() for one in made for name in ("result.json", "train.log"))
    is_left = bool(made) and done.code == 2
    return "files" if is_left or not whole else end, done.text


def command(project: Project, words: Sequence[str]) -> tuple[str, str]:
    """Return how a command ends, and what it has printed. The run that it may continue stays a run with a result."""
    try:
        done = project.train(*words)
    except subprocess.TimeoutExpired as hung:
        return "hung", str(hung.output)
    is_whole = Run(project.path / FINISHED).result["status"] in ("finished", "failed")
    return judged(done.code, done.text) if is_whole else "files", done.text


def judged(code: int | None, text: str) -> str:
    """Return how a command line has ended.

    Args:
        code: the exit code; None if it has hung.
        text: what it has printed.
    """
    messages = len(re.findall("^error: ", text, re.MULTILINE))
    if code is None or "Traceback (most recent call last)" in text:
        return "hung" if code is None else "traceback"
    if code == 0:
        return "success" if not messages else "exit code"
    if messages != 1:
        return "several messages" if messages else "no message"
    return "message" if code in (1, 2) else "exit code"


@contextlib.contextmanager
def standing_in(folder: Path, argv: list[str]) -> Iterator[None]:
    """In the body, be what a command in a folder would be."""
    before = Path.cwd(), sys.argv, gc.freeze
    os.chdir(folder)
    sys.argv = argv
    gc.freeze = lambda: None  # `main` calls it once in a process; here, memory would grow
    try:
        yield
    finally:
        os.chdir(before[0])
        sys.argv, gc.freeze = before[1:]


def code_of(command: Callable[[], None]) -> int | None:
    """Return the exit code of a command; None if it takes too long."""

    hung = False

    def interrupt(*_: object) -> None:
        nonlocal hung
        hung = True
        raise TimeoutError

    earlier = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(SECONDS)
    try:
        command()
    except SystemExit as end:
        if hung:
            return None
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except TimeoutError:
        return None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, earlier)
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dry-runs", type=int, default=9000)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--commands", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random.seed(args.seed)  # of Hypothesis' own choices that no seed fixes
    sys.exit(main(args.dry_runs, args.runs, args.commands, args.seed))
