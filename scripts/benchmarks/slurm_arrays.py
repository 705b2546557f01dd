"""Cost of a sweep on Slurm: an array of hydraloop, a bare array of sbatch, and Hydra's submitit launcher.

    python scripts/benchmarks/slurm_arrays.py [--jobs 50] [--slots 2] [--seconds 2] [--rounds 3] [--launcher PYTHON]

Each job takes some seconds. `--launcher` names a Python that has hydra-submitit-launcher. The figures of a side:

* overhead of a job: the time from the command to the end of the last job, for each job of a slot, without its seconds.
* from the end of a job to the start of the next one in its slot, at most 1 s: the median of all.

The commands of Slurm must be in PATH. Without them, the Slurm of the tests is started, whose nodes are on this machine.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from measure import ROOT, differences, environment, goal, interleaved, parser, project, ratios, row, spread, table

sys.path.insert(0, str(ROOT))

APP = """
import sys, time, hydra
@hydra.main(version_base=None, config_path=None)
def main(cfg):
    began = time.time()
    time.sleep(float(cfg.seconds))
    with open(f"{cfg.folder}/{cfg.x}.times", "w") as file:
        file.write(f"{began} {time.time()}")
main()
"""
BARE = 'began=$(date +%s.%N); sleep {seconds}; echo "$began $(date +%s.%N)" > {folder}/$SLURM_ARRAY_TASK_ID.times'
HOOK = """
import time, hydraloop
class Sleep(hydraloop.Hook):
    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
    def before_train(self, engine: hydraloop.Engine) -> None:
        time.sleep(self.seconds)
"""
SHORT = ("experiment=spirals", "engine.max_iters=1", "engine.test=false", "default_hooks.checkpoint=null")


@dataclass(frozen=True)
class Question:
    """What each side runs."""

    jobs: int
    slots: int
    seconds: float
    limit: int = 30
    """Minutes."""


def main() -> None:
    """Compare the sides."""
    arguments = parser(__doc__, jobs=50, slots=2, seconds=2.0, rounds=3)
    arguments.add_argument("--launcher", help="a Python with hydra-submitit-launcher")
    options = arguments.parse_args()
    question = Question(options.jobs, options.slots, options.seconds)
    with ExitStack() as stack:
        if shutil.which("sbatch") is None:
            from tests.slurm import running

            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            os.environ |= stack.enter_context(running(folder)).environment
        _compare(question, options.rounds, options.launcher)


def _compare(question: Question, rounds: int, launcher: str | None) -> None:
    sides: dict[str, Callable[[Question, Path], list[tuple[float, float]]]] = {"sbatch": _bare, "hydraloop": _ours}
    if launcher is not None:
        sides["hydra-submitit-launcher"] = partial(_launcher, launcher)
    gaps: dict[str, list[float]] = {name: [] for name in sides}

    def overhead(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            began = time.time()
            times = sides[name](question, Path(folder))
        assert len(times) == question.jobs, f"{name}: {len(times)} jobs"
        gaps[name].append(statistics.median(_gaps(times, question.slots)))
        took = max(end for _, end in times) - began
        return took * question.slots / question.jobs - statistics.mean(end - start for start, end in times)

    calls = {name: partial(overhead, name) for name in sides}
    found = interleaved(calls, rounds, warm_up=0)
    head = f"{rounds} rounds, {question.jobs} jobs of {question.seconds:g} s, {question.slots} at a time"
    table(head, "overhead of a job, s", "from an end to the next start, s", "ratio of the overhead to sbatch")
    for name, values in found.items():
        row(name, spread(values), spread(gaps[name]), spread(ratios(values, found["sbatch"])))
    row("hydraloop above sbatch", spread(differences(found["hydraloop"], found["sbatch"])), "", "")
    goal("\nfrom an end to the next start, s", gaps["hydraloop"], most=1)


def _gaps(times: Sequence[tuple[float, float]], slots: int) -> list[float]:
    """Return the seconds from each end to the next start: the n-th start follows the end before the last slots."""
    starts, ends = sorted(start for start, _ in times), sorted(end for _, end in times)
    return [start - end for start, end in zip(starts[slots:], ends, strict=False)]


def _bare(question: Question, folder: Path) -> list[tuple[float, float]]:
    """Run an array that only sleeps."""
    script = BARE.format(seconds=question.seconds, folder=folder)
    array = f"--array=0-{question.jobs - 1}%{question.slots}"
    subprocess.run(["sbatch", "--wait", array, "--output=/dev/null", f"--wrap={script}"], check=True, stdout=2)
    return _written(folder)


def _written(folder: Path) -> list[tuple[float, float]]:
    texts = [path.read_text(encoding="ascii").split() for path in folder.glob("*.times")]
    return [(float(start), float(end)) for start, end in texts]


def _ours(question: Question, folder: Path) -> list[tuple[float, float]]:
    """Run a sweep with `detach=true`, and wait for its jobs."""
    (project(folder) / "my_project" / "sleep.py").write_text(HOOK, encoding="utf-8")
    words = [*SHORT, f"seed={','.join(map(str, range(question.jobs)))}", "hydra.sweep.dir=all", "detach=true"]
    words += ["sweep.executor=submitit", f"sweep.submitit.timeout_min={question.limit}"]
    words += [f"sweep.max_workers={question.slots}", f"+hooks.sleep.seconds={question.seconds}"]
    line = [sys.executable, "train.py", "-m", *words, "+hooks.sleep._target_=my_project.sleep.Sleep"]
    subprocess.run(line, cwd=folder, env=environment(), check=True, stdout=2)
    states: list[dict[str, float]] = []
    while sum(state.get("state") == "finished" for state in states) < question.jobs:
        time.sleep(0.5)
        states = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("all/*/job.json")]
        assert all(state["state"] in ("running", "finished") for state in states)
    _wait_for_queue()
    return [(state["began"], state["ended"]) for state in states]


def _wait_for_queue() -> None:
    while subprocess.run(["squeue", "--noheader", "--me"], capture_output=True, check=True).stdout.strip():
        time.sleep(0.5)


def _launcher(python: str, question: Question, folder: Path) -> list[tuple[float, float]]:
    """Run a sweep of Hydra's launcher for submitit."""
    (folder / "app.py").write_text(APP, encoding="utf-8")
    launcher = ["hydra/launcher=submitit_slurm", f"hydra.launcher.timeout_min={question.limit}"]
    words = [f"+x={','.join(map(str, range(question.jobs)))}", f"+seconds={question.seconds}", f"+folder={folder}"]
    line = [python, "app.py", "-m", *launcher, f"hydra.launcher.array_parallelism={question.slots}", *words]
    subprocess.run(line, cwd=folder, check=True, stdout=2, stderr=subprocess.DEVNULL)
    return _written(folder)


if __name__ == "__main__":
    main()
