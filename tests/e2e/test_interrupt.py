"""Ctrl-C, SIGTERM and SIGHUP: before a run, in the middle of it, at its end, and in a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.projects import Project, Run
from tests.e2e.warm import Script
from tests.marks import nightly, slow
from tests.processes import PATIENCE, until

HOOKS = '''
from __future__ import annotations

import pathlib
import time

from hydraloop import Hook


class Witness(Hook):
    """Writes to a file which mount points are called."""

    priority = 10
    seconds = 0.0
    """The duration of an iteration."""

    def __init__(self, *, path: str, seconds: float = 0.0) -> None:
        self.path, self.seconds = pathlib.Path(path), seconds

    def note(self, text: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{text}\\n")

    def before_train_iter(self, engine, batch_idx, batch) -> None:
        if engine.progress.iteration == engine.progress.began_at + 3:
            self.note("training")
        time.sleep(self.seconds)

    def on_exception(self, engine, error) -> None:
        self.note(f"on_exception {type(error).__name__}")

    def after_train(self, engine) -> None:
        self.note("after_train")

    def after_run(self, engine) -> None:
        self.note("after_run")


class Waiting(Witness):
    """Waits at the end of the run. A signal ends the waiting, as in trackers."""

    def after_run(self, engine) -> None:
        try:
            self.note("waiting")
            time.sleep(60)
        except KeyboardInterrupt:
            self.note("after_run")
'''
ENDLESS = ("experiment=spirals", "engine.max_epochs=1000000")
CLOSED = ["after_train", "after_run"]
Process = subprocess.Popen[str] | Script
Start = Callable[..., Process]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A user's project with the hooks above."""
    made = Project.make(tmp_path / "project")
    made.write("my_project/witness.py", HOOKS)
    return made


@pytest.fixture
def start(project: Project) -> Iterator[Start]:
    """Return `project.start`. Kills processes that outlive the test."""
    yield from _killing(project.start)


@pytest.fixture
def begin(project: Project) -> Iterator[Start]:
    """Return `project.begin`, which needs no new interpreter. Kills processes that outlive the test."""
    yield from _killing(project.begin)


def _killing(starts: Start) -> Iterator[Start]:
    started = []

    def go(*arguments: str, **options: Any) -> Process:
        started.append(starts(*arguments, **options))
        return started[-1]

    yield go
    for process in started:
        process.kill()
        process.communicate()


def hooked(project: Project, kind: str = "Witness") -> list[str]:
    """Return the overrides that add one of the hooks."""
    return [f"+hooks.witness._target_=my_project.witness.{kind}", f"+hooks.witness.path={project.path}/witness"]


def noted(project: Project) -> list[str]:
    """Return the lines that the hook has written."""
    path = project.path / "witness"
    return path.read_text().splitlines() if path.exists() else []


def saves_its_end(run: Run) -> bool:
    """Return whether the last checkpoint is that of the iteration at which the run has ended."""
    at = run.result["progress"]
    name = f"iter_{at['iteration']}.pth" if at["batch_in_epoch"] else f"epoch_{at['epoch']}.pth"
    return (run.path / "checkpoints/last_checkpoint").read_text().strip() == name


def wait_for(process: Process, reached: Callable[[], object]) -> None:
    """Wait until a condition holds. Fails if the process ends before."""
    until(reached, "it was not reached", process=process)


def ended(process: Process) -> str:
    """Wait for the end of a process. Returns its output."""
    return process.communicate(timeout=PATIENCE)[0]


def test_an_interrupted_run_can_be_resumed(project: Project) -> None:
    process = project.begin(
        "engine.max_epochs=100000", "data.loader.batch_size=512", "default_hooks.checkpoint.interval=5"
    )
    try:
        wait_for(process, lambda: list(project.path.glob("outputs/*/*/checkpoints/last_checkpoint")))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert "Traceback" not in output
    assert "status      interrupted by Ctrl-C\n" in output
    assert "error:" not in output
    result = project.run.result
    assert (result["status"], result["error"]) == ("interrupted", None)
    assert not list(project.run.path.rglob("*.part")), "a file was left unfinished"

    reached = result["progress"]["epoch"]
    resumed = project.train("resume=auto", f"engine.max_epochs={reached + 1}", "data.loader.batch_size=512")
    assert resumed.code == 0, resumed.text
    assert project.run.result["status"] == "finished"
    assert project.run.result["progress"]["epoch"] == reached + 1


@pytest.mark.parametrize(
    ("number", "sweep"),
    [
        (signal.SIGTERM, ()),
        slow(signal.SIGHUP, ()),
        slow(signal.SIGTERM, ("-m", "seed=1,2")),
        nightly(signal.SIGHUP, ("-m", "seed=1,2")),
    ],
)
def test_a_signal_ends_a_run(number: signal.Signals, sweep: Sequence[str], project: Project, begin: Start) -> None:
    """SIGTERM preempts the run, which saves. SIGHUP (the terminal is closed) ends it at once; jobs of a sweep save."""
    process = begin(*sweep, *ENDLESS, *hooked(project))
    wait_for(process, lambda: noted(project) == ["training"])
    process.send_signal(number)
    output = ended(process)
    preempted = bool(sweep) or number == signal.SIGTERM
    assert process.returncode == (75 if preempted else 128 + number), output
    assert "Traceback" not in output
    (run,) = project.jobs if sweep else project.runs
    reached = run.result["progress"]["iteration"]
    assert reached >= 3
    if preempted:
        assert output.count("interrupted: preempted by SIGTERM") == 1
        assert noted(project) == ["training", *CLOSED]
        said: tuple[str | None, str | None] = (None, "preempted by SIGTERM")
        assert saves_its_end(run)
    else:
        assert output.count(f"interrupted by {number.name}") == 1
        assert noted(project) == ["training", "on_exception Terminated", *CLOSED]
        said = (f"interrupted by {number.name}", None)
    assert (run.result["status"], run.result["error"], run.result["reason"]) == ("interrupted", *said)
    if sweep:
        said_last = (
            "\nthe sweep was interrupted. Jobs that are not over: 2 of 2. Continue:\n  python train.py -m seed=1,2 "
        )
        assert output.count(said_last) == 1
        assert "failed" not in output
    assert not list(run.path.rglob("*.part")), "a file was left unfinished"


@pytest.mark.slow
def test_a_signal_to_the_group_ends_a_run_with_workers(project: Project, start: Start) -> None:
    """Slurm and a terminal that is closed send the signal to the loader's workers too."""
    workers = ["data.loader.num_workers=2", "+hooks.witness.seconds=0.05"]
    process = start(*ENDLESS, *hooked(project), *workers, start_new_session=True)
    wait_for(process, lambda: noted(project) == ["training"])
    os.killpg(process.pid, signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 75, output
    assert "Traceback" not in output
    assert saves_its_end(project.run)
    assert noted(project) == ["training", *CLOSED]
    assert project.run.result["status"] == "interrupted"


@pytest.mark.parametrize("ranks", [slow(1), nightly(2)])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(ranks: int, project: Project, start: Start) -> None:
    """nohup ignores SIGHUP. A shell without job control starts background processes with SIGINT ignored."""
    ignoring = partial(_ignore, [signal.SIGHUP, signal.SIGINT])
    line = [*ENDLESS, *hooked(project), f"distributed.nproc_per_node={ranks}", "default_hooks.checkpoint.interval=1"]
    process = start(*line, preexec_fn=ignoring)
    wait_for(process, lambda: "training" in noted(project))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    records = project.run.path / "metrics.jsonl"
    reached = records.stat().st_size if records.exists() else 0
    wait_for(process, lambda: records.exists() and records.stat().st_size > reached + 1000)
    assert "on_exception Terminated" not in noted(project)
    process.send_signal(signal.SIGTERM)
    ended(process)
    assert process.returncode == 75
    assert project.run.result["status"] == "interrupted"


def _ignore(numbers: Sequence[int]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def test_a_signal_before_the_first_iteration(project: Project, begin: Start) -> None:
    """The signal comes while a module that the config names is imported."""
    project.write(
        "my_project/slow.py", f"import time, pathlib\npathlib.Path('witness').touch()\ntime.sleep({PATIENCE})\n"
    )
    process = begin(*ENDLESS, "+hooks.slow._target_=my_project.slow.Slow")
    wait_for(process, (project.path / "witness").exists)
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert output.count("interrupted by SIGTERM") == 1
    assert project.run.result["status"] == "interrupted"


def test_a_signal_before_there_is_a_run(project: Project, start: Start) -> None:
    """The signal comes while the config is composed: a resolver of the project is slow."""
    script = (project.path / "train.py").read_text()
    slow = "import time\nfrom omegaconf import OmegaConf\nOmegaConf.register_new_resolver('slow', slow)\n"
    slow = f"def slow():\n    print('composing', flush=True)\n    time.sleep({PATIENCE})\n\n{slow}"
    project.write("train.py", script.replace("import hydraloop\n", f"import hydraloop\n{slow}"))
    process = start(*ENDLESS, "experiment_name=${slow:}")
    assert isinstance(process, subprocess.Popen)
    assert process.stdout is not None
    assert process.stdout.readline() == "composing\n"
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 143, output
    assert output == "interrupted by SIGTERM\n"
    assert not (project.path / "outputs").exists()


@pytest.mark.slow
def test_no_job_starts_after_a_signal_that_a_hook_has_caught(project: Project, begin: Start) -> None:
    line = ["-m", "seed=1,2", "experiment=spirals", "engine.max_epochs=1", "engine.test=false"]
    process = begin(*line, *hooked(project, "Waiting"))
    wait_for(process, lambda: "waiting" in noted(project))
    process.send_signal(signal.SIGTERM)
    output = ended(process)
    assert process.returncode == 143, output
    assert "Traceback" not in output
    assert "\nthe sweep was interrupted. Jobs that are not over: 1 of 2. Continue:\n" in output
    (run,) = project.jobs
    assert run.result["status"] == "finished", "its result was written before the signal"


@pytest.mark.slow
def test_a_sweep_names_the_jobs_that_failed_before_it_was_interrupted(project: Project, begin: Start) -> None:
    broken = "optimizer.lr=-1,0.1"  # torch refuses a negative one
    process = begin("-m", broken, *ENDLESS, *hooked(project))
    wait_for(process, lambda: "training" in noted(project))
    process.send_signal(signal.SIGINT)
    output = ended(process)
    assert process.returncode == 130, output
    assert "\nthe sweep was interrupted. Jobs that are not over: 1 of 2. Continue:\n" in output
    assert output.endswith("error: 1 of 2 jobs failed: job 0 (optimizer.lr=-1)\n")
