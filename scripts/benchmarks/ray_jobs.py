"""Cost of a job on Ray, beside a bare actor and Ray Tune.

    python scripts/benchmarks/ray_jobs.py [--jobs 50] [--seconds 2] [--slots 2] [--rounds 3] [--tune venv/bin/python]

Each job sleeps, in a run of one iteration, in a method of an actor, or in a trial of Ray Tune. All sides use one Ray on
this machine, which is started before, and the same number of slots. Goals:

* from the end of a job (`job.json`) to the start of the next one in its slot: at most 50 ms;
* `--jobs 1000 --seconds 1`: the time of all jobs, compared with the ideal.

The overhead of a job is the time from the start of the first sleep to the end of the last one, without the sleeps, for
each job of a slot. For a sweep, it has the whole run: config, building, a training iteration, files. Ray Tune needs a
virtual environment of its own, because it needs packages that hydraloop does not: pip install 'ray[tune]'.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure import environment, goal, interleaved, parser, project, ratios, row, spread, table

SLEEP = """
import os, time
def sleep(seconds, file):
    began = time.time()
    time.sleep(seconds)
    with open(file, "a") as stamps:
        stamps.write(f"{began} {time.time()}\\n")
"""
HOOK = """
import hydraloop
class Sleep(hydraloop.Hook):
    priority = hydraloop.Priority.VERY_LOW
    def __init__(self, seconds: float, file: str) -> None:
        self.seconds, self.file = seconds, file
    def before_train(self, engine) -> None:
        sleep(self.seconds, self.file)
"""
ACTOR = """
import sys, ray
jobs, slots, seconds, file = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
ray.init(log_to_driver=False)
class Slot:
    def run(self, seconds, file):
        sleep(seconds, file)
actors = [ray.remote(Slot).options(num_cpus=1).remote() for _ in range(slots)]
ray.get([actor.run.remote(0, "/dev/null") for actor in actors])
busy = {actor.run.remote(seconds, file): actor for actor in actors}
left = jobs - slots
while busy:
    (done,), _ = ray.wait([*busy])
    actor = busy.pop(done)
    if left:
        left -= 1
        busy[actor.run.remote(seconds, file)] = actor
"""
TUNE = """
import sys, ray
from ray import tune
jobs, slots, seconds, file = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
ray.init(log_to_driver=False)
def trial(config):
    sleep(seconds, file)
    tune.report({"value": config["seed"]})
tuner = tune.Tuner(
    tune.with_resources(trial, {"cpu": 1}),
    param_space={"seed": tune.grid_search(list(range(jobs)))},
    tune_config=tune.TuneConfig(max_concurrent_trials=slots),
    run_config=tune.RunConfig(storage_path=file + "-tune", verbose=0),
)
tuner.fit()
"""


def main() -> None:
    """Measure, and print a table."""
    arguments = parser(__doc__, jobs=50, seconds=2.0, slots=2, rounds=3)
    arguments.add_argument("--tune", help="the interpreter of a virtual environment with Ray Tune")
    options = arguments.parse_args()
    gaps: dict[str, list[float]] = {"ray": [], "pool": []}
    with tempfile.TemporaryDirectory() as folder, _ray(Path(folder), options.slots) as address:

        def side(code: str, python: str = sys.executable) -> float:
            """Return the seconds from the first start to the last end."""
            with tempfile.TemporaryDirectory() as place:
                stamps = Path(place, "stamps")
                if code in gaps:
                    on_ray = ["sweep.executor=ray", f"sweep.ray.address='{address}'"]
                    gaps[code].extend(_sweep(Path(place), options, stamps, on_ray if code == "ray" else []))
                else:
                    figures = [options.jobs, options.slots, options.seconds, stamps]
                    _run([python, "-c", SLEEP + code, *map(str, figures)], place, RAY_ADDRESS=address)
                times = [[float(word) for word in line.split()] for line in stamps.read_text().splitlines()]
                assert len(times) == options.jobs
                return max(end for _, end in times) - min(begin for begin, _ in times)

        sides = {"a job of a sweep on Ray": lambda: side("ray"), "a job of a sweep on the pool": lambda: side("pool")}
        sides["a bare actor"] = lambda: side(ACTOR)
        if options.tune:
            sides["Ray Tune"] = lambda: side(TUNE, options.tune)
        found = interleaved(sides, options.rounds, warm_up=0)
    each = -(-options.jobs // options.slots)
    table(f"{options.jobs} jobs of {options.seconds:g} s, {options.slots} slots", "all jobs, s", "above each job, ms")
    for name, spans in found.items():
        row(name, spread(spans, 1), spread([1000 * (span / each - options.seconds) for span in spans], 1))
    row("ideal", f"{each * options.seconds:.1f}", "0")
    for name, spans in found.items():
        print(f"{name}, ratio to the ideal: {spread(ratios(spans, [each * options.seconds] * len(spans)), 3)}")
    print("\nfrom the end of a job to the next start in its slot, ms:")
    for name, found_gaps in gaps.items():
        goal(name, [1000 * gap for gap in found_gaps], most=50, digits=1)


@contextmanager
def _ray(folder: Path, slots: int) -> Iterator[str]:
    """Run Ray on this machine in the body, and return its address."""
    port = "6399"
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", f"--port={port}"]
    command += [f"--num-cpus={slots}", "--include-dashboard=false", f"--temp-dir={folder}"]
    off = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    os.environ |= off
    with subprocess.Popen(command, env=environment(**off), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any("Ray runtime started" in line for line in process.stdout or ()), "Ray has not started"
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


def _sweep(folder: Path, options: argparse.Namespace, stamps: Path, executor: list[str]) -> list[float]:
    """Run a sweep. Return the seconds from the end of each job to the next start in its slot."""
    project(folder)
    (folder / "my_project" / "sleeping.py").write_text(SLEEP + HOOK)
    hook = f"+hooks.sleep={{_target_: my_project.sleeping.Sleep, seconds: {options.seconds}, file: '{stamps}'}}"
    line = [f"seed=range({options.jobs})", "engine.max_iters=1", "engine.test=false", "engine.val_interval=null", hook]
    line += [f"sweep.max_workers={options.slots}", *executor]
    _run([sys.executable, "train.py", "-m", "hydra.sweep.dir=all", *line], str(folder))
    states = [json.loads(file.read_text()) for file in folder.glob("all/*/job.json")]
    events = sorted([(state["began"], 1) for state in states] + [(state["ended"], 0) for state in states])
    ends: list[float] = []
    gaps = []
    for moment, is_start in events:
        if not is_start:
            ends.append(moment)
        elif ends:
            gaps.append(moment - ends.pop(0))
    return gaps


def _run(command: list[str], folder: str, **added: str) -> None:
    done = subprocess.run(command, cwd=folder, env=environment(**added), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s")
