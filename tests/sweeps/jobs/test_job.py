"""What the process of a job does: claim, train, write the end. Without a controller, see `job_program`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import Terminated, UserError
from hydraloop.processes.failure import RankError, Requeue
from hydraloop.run_files import lock
from hydraloop.run_files.result import Result
from hydraloop.sweeps import job, states
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED
from tests.e2e.projects import Project, Run

CLAIMS = Path(__file__).with_name("claims_program.py")
PROGRAM = Path(__file__).with_name("job_program.py")
CALLBACK = """
import os
from hydra.experimental.callback import Callback
from hydra.core.hydra_config import HydraConfig

class Mine(Callback):
    def on_job_start(self, config, task_function, **_):
        print("callback: starts", config.hydra.job.num, config.seed, os.path.basename(os.getcwd()))

    def on_job_end(self, config, job_return, **_):
        kind = type(job_return._return_value).__name__
        print("callback: ended", config.hydra.job.num, job_return.status.name, kind, "hydra" in job_return.cfg)
"""
LINES = [
    "experiment=spirals",
    "engine.max_epochs=2",
    "engine.limit_train_batches=3",
    "hooks=[]",
    "++hydra.callbacks.mine._target_=my_project.callback.Mine",
    "hydra.job.chdir=true",
]


def run(
    project: Project, *steps: list[Any], path: str = "sweep", subdir: str = "${hydra.job.num}", **axes: list[str]
) -> list[int]:
    """Run jobs of a sweep, one after the other. Returns their exit codes."""
    plan = {"path": path, "lines": LINES, "axes": axes, "subdir": subdir, "steps": steps}
    done = project.python(str(PROGRAM), json.dumps(plan))
    assert done.code == 0, done.text
    found: list[int] = json.loads(done.out.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def module_project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    project = Project.make(tmp_path_factory.mktemp("jobs") / "project")
    project.write("my_project/callback.py", CALLBACK)
    return project


@pytest.fixture(scope="module")
def sweep(module_project: Project) -> Path:
    """Jobs: 0 finished, 1 failed, 2 killed before its first iteration."""
    codes = run(
        module_project,
        *([0, 0, "records"], [0, 0], [0, 1], [1, 0], [1, 5], [2, 0, "start"]),
        **{"optimizer.lr": ["1e-3", "-1", "1e-2"]},
    )
    assert codes == [0, LEFT, LEFT, 0, LEFT, -9]
    return module_project.path / "sweep"


def state_of(sweep: Path, number: int) -> states.JobState:
    found = states.read(sweep / str(number))
    assert found is not None
    return found


def test_a_finished_job(sweep: Path) -> None:
    state = state_of(sweep, 0)
    result = Run(sweep / "0").result
    assert (state.state, state.attempts, state.directory, state.error) == ("finished", 1, "0", None)
    assert (state.metric, state.rule) == ("accuracy", "greater")
    assert (state.value, state.step, state.total) == (result["val_metrics"]["accuracy"], 6, 6)
    assert state.overrides == (*LINES, "optimizer.lr=1e-3")
    assert state.checkpoint == "checkpoints/epoch_2.pth"
    assert (sweep / "0" / state.checkpoint).is_file()
    assert state.seconds > result["seconds"]
    assert "status      finished" in (sweep / "0" / "job.log").read_text()
    assert lock.holder(sweep / "0") is None


def test_callbacks_of_hydra(sweep: Path) -> None:
    for number, kind in enumerate(("COMPLETED float", "FAILED UserError")):
        log = (sweep / str(number) / "job.log").read_text()
        told = [line for line in log.splitlines() if line.startswith("callback: ")]
        assert told == [f"callback: starts {number} 0 {number}", f"callback: ended {number} {kind} False"]


def test_its_records_are_those_of_hydra(sweep: Path) -> None:
    for name in ("config", "hydra", "overrides"):
        ours = OmegaConf.to_container(OmegaConf.load(sweep / "0" / ".hydra" / f"{name}.yaml"), resolve=False)
        assert ours == OmegaConf.to_container(OmegaConf.load(sweep / "0" / "by_hydra" / f"{name}.yaml"), resolve=False)
    hydra = OmegaConf.load(sweep / "0" / ".hydra" / "hydra.yaml").hydra
    assert (hydra.job.num, str(hydra.mode), hydra.output_subdir) == (0, "MULTIRUN", ".hydra")
    assert hydra.runtime.output_dir == str(sweep / "0")


def test_a_failed_job(sweep: Path) -> None:
    state = state_of(sweep, 1)
    assert (state.state, state.value, state.checkpoint) == ("failed", None, None)
    assert state.error is not None
    assert "-1" in state.error
    assert "error: " in (sweep / "1" / "job.log").read_text()


def test_a_killed_job(sweep: Path) -> None:
    state = state_of(sweep, 2)
    assert (state.state, state.reason, state.attempts) == ("interrupted", "killed by SIGKILL (out of memory?)", 1)
    assert lock.holder(sweep / "2") is None


def test_a_job_is_interrupted_by_the_kill_of_a_rank_and_a_full_disk(tmp_path: Path) -> None:
    Result("failed", error="rank 1 was killed by SIGKILL").write(tmp_path)
    running = states.JobState(0, "running", (), attempts=1)
    for error, expected in (
        (RankError("rank 1 was killed", was_killed=True), ("interrupted", None, "rank 1 was killed")),
        (OSError(28, "No space left"), ("interrupted", None, "OSError: [Errno 28] No space left")),
        (RankError("rank 1: OSError: [Errno 28] No"), ("interrupted", None, "rank 1: OSError: [Errno 28] No")),
        (UserError(lost := "last.pth could not be written: the end of training is lost"), ("interrupted", None, lost)),
        (RankError("rank 1 crashed"), ("failed", "rank 1 crashed", None)),
    ):
        state = job._ended(running, tmp_path, error)
        assert (state.state, state.error, state.reason) == expected


@pytest.mark.slow
def test_under_kills_each_job_ends_once(module_project: Project) -> None:
    done = module_project.python(str(CLAIMS), "claims", "1")
    assert done.code == 0, done.text
    found = json.loads(done.out.splitlines()[-1])
    assert found["states"] == ["finished"] * 60
    assert found["ends"] == ["x"] * 60
    assert found["attempts"] > 60, "some were killed"


@pytest.mark.slow
def test_an_interrupted_job_continues_as_a_single_run(module_project: Project) -> None:
    """Job 0 is not interrupted. 1 is killed after its checkpoint, 2 is terminated, 3 is killed after its result."""
    steps = [
        [0, 0],
        [1, 0, "checkpoint"],
        [1, 1],
        [2, 0, "terminated"],
        [2, 1],
        [3, 0, "result"],
        [3, 1],
        [4, 0, "full"],
    ]
    names = ["a", "b", "c", "d", "e"]
    codes = run(module_project, *steps, path="resumed", experiment_name=names)
    assert codes == [0, -9, 0, 75, 0, -9, LEFT, NOT_RECORDED]
    sweep = module_project.path / "resumed"
    expected = measured(sweep / "0")
    assert [measured(sweep / str(number)) for number in (1, 2, 3)] == [expected] * 3
    found = [state_of(sweep, number) for number in range(4)]
    assert [(state.state, state.attempts) for state in found] == [("finished", n) for n in (1, 2, 2, 1)]
    assert len({(state.value, state.step) for state in found}) == 1
    for number in (1, 2):
        assert sorted(path.name for path in (sweep / str(number) / ".hydra" / "resume_1").iterdir()) == [
            "config.yaml", "hydra.yaml", "overrides.yaml",
        ]  # fmt: skip
        assert "resumed from" in (sweep / str(number) / "job.log").read_text()
    assert states.read(sweep / "4") is None


def measured(run_dir: Path) -> tuple[Any, ...]:
    """The metrics of a run: of its records, and in its result."""
    records = [
        {name: value for name, value in record.items() if name in ("mode", "epoch", "iter", "loss", "accuracy")}
        for record in Run(run_dir).records
    ]
    result = Run(run_dir).result
    return records, result["val_metrics"], result["test_metrics"], result["progress"]


@pytest.mark.slow
def test_a_job_without_hydras_records_has_its_config(module_project: Project) -> None:
    assert run(module_project, [0, 0], path="unrecorded", **{"hydra.output_subdir": ["null"]}) == [0]
    folder = module_project.path / "unrecorded" / "0"
    assert state_of(folder.parent, 0).state == "finished"
    assert [path.name for path in (folder / ".hydra").glob("*.yaml")] == ["config.yaml"]


def test_directories_with_names(module_project: Project) -> None:
    """A job continues in its own directory, and takes no other job's, nor that of a run or outside the sweep."""
    module_project.write("named/held/result.json", "{}")
    steps = [[0, 0, "start"], [1, 0], [0, 1], [2, 0], [3, 0], [0, 1, "torn"]]
    values = ["mine", "mine", "held", "../out"]
    codes = run(
        module_project, *steps, path="named", subdir="${experiment_name}", experiment_name=values,
    )  # fmt: skip
    assert codes == [-9, 0, 0, 0, 0, 0]
    sweep = module_project.path / "named"
    found = [states.read(sweep / ".jobs" / str(number)) for number in range(4)]
    assert [state and (state.state, state.directory) for state in found] == [
        ("finished", "mine"), ("failed", ".jobs/1"), ("failed", ".jobs/2"), ("failed", ".jobs/3"),
    ]  # fmt: skip
    errors = [str(state and state.error) for state in found]
    assert not (sweep / "mine" / ".hydra" / "resume_1").exists(), "what is finished does not continue"
    assert "mine is another job's already" in errors[1]
    assert "held holds a run already" in errors[2]
    assert "out is outside the sweep's directory" in errors[3]
    assert (sweep / "held" / "result.json").read_text() == "{}"
    assert not (module_project.path / "out").exists()


def test_the_exit_code_names_the_signal() -> None:
    """The script of a job in Slurm repeats it after 75 only: before training has begun, nothing was saved."""
    errors = [Requeue("SIGTERM"), Terminated(signal.SIGTERM), KeyboardInterrupt(), RuntimeError(), None]
    assert [job._exit_code(error) for error in errors] == [75, 143, 130, 0, 0]


def test_a_signal_that_breaks_the_cleanup_of_a_library_interrupts_the_job() -> None:
    def compose() -> None:
        try:
            raise Terminated(15)
        finally:
            raise AttributeError("of the library")

    with pytest.raises(AttributeError) as caught:
        compose()
    assert isinstance(job.first_signal(caught.value), Terminated)
    assert isinstance(job.first_signal(ValueError()), ValueError)
