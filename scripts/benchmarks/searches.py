"""Cost of a search after many earlier trials: the idle time of its slots, its start, its status.

    python scripts/benchmarks/searches.py [--earlier 1000] [--trials 20] [--rounds 3] [--many 10000]

* A slot is idle for at most 20 ms between two trials of 0.5 s, 2 at a time, after 1,000 trials: from `result.json` of a
  job (`ended` in its `job.json`; its process then still ends) until the process of the next one has claimed it
  (`began`). Beside it, the same jobs as a grid; and Optuna's `optimize(n_jobs=2)`, with the same sampler and threads in
  place of processes: from the end of an objective to the next begin.
* With 10,000 trials: `sweep.resume` until a job starts takes at most 10 s, `status` 1 s, the controller 500 MB. On a
  busy machine, compare the processor time.

The earlier trials are copies of one real trial, with other values.
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil
from measure import differences, environment, goal, interleaved, parser, project, row, spread, table
from sweeps import most_memory, sweep, until

SLEEP = """
import time
import hydraloop
class Sleep(hydraloop.Hook):
    def before_train(self, engine):
        time.sleep(0.5)
"""
PEER = """
import json, sys, time, optuna
from optuna.distributions import FloatDistribution
earlier, trials = map(int, sys.argv[1:])
optuna.logging.set_verbosity(optuna.logging.ERROR)
sampler = optuna.samplers.TPESampler(seed=0, multivariate=True, group=True, constant_liar=True)
study, spans = optuna.create_study(sampler=sampler), []
space = {"lr": FloatDistribution(1e-4, 1e-1, log=True)}
made = [10 ** -(1 + 3 * ((n * 0.618) % 1)) for n in range(earlier)]
study.add_trials([optuna.create_trial(params={"lr": lr}, distributions=space, value=lr) for lr in made])
def objective(trial):
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)  # the sampler is asked here
    began = time.time()
    time.sleep(0.5)
    spans.append((began, time.time()))
    return lr
study.optimize(objective, n_trials=trials, n_jobs=2)
print(json.dumps(spans))
"""
LINE = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "engine.max_iters=2", "engine.test=false", "sweep.max_workers=2")
LINE += ("+hooks.sleep={_target_: my_project.sleep.Sleep}",)


def main() -> None:
    """Print both parts. 0 rounds, or none of many trials, leave one out."""
    options = parser(__doc__, earlier=1000, trials=20, rounds=3, many=10_000).parse_args()
    if options.rounds:
        idle(options.earlier, options.trials, options.rounds)
    if options.many:
        many(options.many)


def idle(earlier: int, trials: int, rounds: int) -> None:
    """Compare how long slots wait."""
    sides = {"a search": _ours, "a grid": _grid, "optimize(n_jobs=2)": _peer}
    means: dict[str, list[float]] = {name: [] for name in sides}

    def waited(name: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            spans = sides[name](project(Path(folder)), earlier, trials)
        begins, ends = (sorted(column) for column in zip(*spans, strict=True))
        waits = [1000 * (begin - end) for begin, end in zip(begins[2:], ends, strict=False)]
        means[name].append(statistics.mean(waits))
        return statistics.median(waits)

    found = interleaved({name: lambda name=name: waited(name) for name in means}, rounds, warm_up=0)
    table(f"{rounds} rounds of {trials} trials after {earlier:,}", "ms between two trials, median", "mean")
    for name, values in found.items():
        row(name, spread(values, 1), spread(means[name], 1))
    goal("\nms between two trials of a search", found["a search"], most=20, digits=1)
    print(f"more than in a grid, ms: {spread(differences(found['a search'], found['a grid']), 1)}")


def _ours(folder: Path, earlier: int, trials: int) -> Sequence[Sequence[float]]:
    """Return when jobs have begun and ended."""
    written(folder, earlier)
    sweep(folder, *LINE, f"sweep.trials={earlier + trials}", "sweep.resume=all")
    return _spans(folder, range(earlier, earlier + trials))


def _grid(folder: Path, earlier: int, trials: int) -> Sequence[Sequence[float]]:
    (folder / "my_project" / "sleep.py").write_text(SLEEP)
    sweep(folder, *LINE[1:], f"seed={','.join(map(str, range(trials)))}")
    return _spans(folder, range(trials))


def _spans(folder: Path, jobs: Iterable[int]) -> Sequence[Sequence[float]]:
    states = [json.loads((folder / f"all/{job}/job.json").read_text()) for job in jobs]
    return [(state["began"], state["ended"]) for state in states]


def _peer(folder: Path, earlier: int, trials: int) -> Sequence[Sequence[float]]:
    command = [sys.executable, "-c", PEER, str(earlier), str(trials)]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=True)
    spans: list[list[float]] = json.loads(done.stdout)
    return spans


def written(folder: Path, count: int) -> None:
    """Run a search of a trial, and write others beside it."""
    (folder / "my_project" / "sleep.py").write_text(SLEEP)
    sweep(folder, *LINE, "sweep.trials=1")
    draws = random.Random(0)
    state = json.loads((folder / "all" / "0" / "job.json").read_text())
    for number in range(count):
        lr, value = 10 ** draws.uniform(-4, -1), draws.random()
        lines = [f"optimizer.lr={lr}" if line.startswith("optimizer.lr") else line for line in state["overrides"]]
        told = {"overrides": lines, "params": {"optimizer.lr": lr}, "value": value}
        job = {**state, "number": number, "directory": str(number), **told}
        path = folder / "all" / str(number)
        path.mkdir(exist_ok=True)
        (path / "job.json").write_text(json.dumps(job))
    described = json.loads((folder / "all" / "sweep.json").read_text())
    described["jobs"]["search"]["trials"] = count
    (folder / "all" / "sweep.json").write_text(json.dumps(described))


def many(count: int) -> None:
    """Print the figures of a search with many trials."""
    with tempfile.TemporaryDirectory() as folder:
        written(project(Path(folder)), count)
        line = ["-m", *LINE, f"sweep.trials={count + 100}", "sweep.resume=all", "hydra.sweep.dir=all"]
        began = time.time()
        command = [sys.executable, "train.py", *line]
        process = psutil.Popen(command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL)
        try:
            until(process, Path(folder, "all", str(count), "job.json"))
            first, used = time.time() - began, sum(process.cpu_times()[:2])
            until(process, Path(folder, "all", str(count + 9), "job.json"))
            memory = most_memory(process)
        finally:
            process.terminate()
            process.wait()
        began, before = time.time(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        subprocess.run([sys.executable, "-m", "hydraloop", "status", "all"], cwd=folder, env=environment(), check=True)
        status, after = time.time() - began, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    print(f"\n{count:,} trials")
    goal("sweep.resume until a job starts, s", [first], most=10)
    goal("status, s", [status], most=1)
    print(f"processor time of both, s: {used:.2f}, {after - before:.2f}")
    goal("memory of the controller, MB", [memory / 1e6], most=500)


if __name__ == "__main__":
    main()
