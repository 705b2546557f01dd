"""What the process of a job does: train, and write the end. Without a controller, see `job_program`."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import Terminated
from hydraloop.processes.failure import Requeue
from hydraloop.run_files import lock
from hydraloop.run_files.result import Result
from hydraloop.sweeps import job
from hydraloop.sweeps.executors.executor import UNUSABLE
from tests.e2e.projects import Project, Run

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


def run(project: Project, *steps: list[Any], path: str = "sweep", **axes: list[str]) -> list[int]:
    """Run jobs of a sweep, one after the other. Returns their exit codes."""
    plan = {"path": path, "lines": LINES, "axes": axes, "steps": steps}
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
    steps: list[list[Any]] = [[0, "records"], [1], [2, "start"]]
    assert run(module_project, *steps, **{"optimizer.lr": ["1e-3", "-1", "1e-2"]}) == [0, 1, -9]
    return module_project.path / "sweep"


def result_of(run_dir: Path) -> Result:
    found = Result.read(run_dir)
    assert found is not None
    return found


def test_a_finished_job(sweep: Path) -> None:
    assert result_of(sweep / "0").status == "finished"
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
    found = result_of(sweep / "1")
    assert found.status == "failed"
    assert "-1" in str(found.error)
    assert "error: " in (sweep / "1" / "job.log").read_text()


def test_a_killed_job(sweep: Path) -> None:
    assert Result.read(sweep / "2") is None
    assert lock.holder(sweep / "2") is None


def test_a_job_leaves_a_directory_that_another_process_trains_in(sweep: Path, module_project: Project) -> None:
    with lock.RunLock(sweep / "0", key=""):
        before = (sweep / "0" / "result.json").read_bytes()
        assert run(module_project, [0], **{"optimizer.lr": ["1e-3", "-1", "1e-2"]}) == [UNUSABLE]
    assert (sweep / "0" / "result.json").read_bytes() == before
    assert "is training in" in (sweep / "0" / "job.log").read_text()


@pytest.mark.slow
def test_an_interrupted_job_continues_as_a_single_run(module_project: Project) -> None:
    """Job 0 is not interrupted. 1 is killed after its checkpoint, 2 is terminated, 3 is killed after its result."""
    steps = [[0], [1, "checkpoint"], [1], [2, "terminated"], [2], [3, "result"], [4, "full"]]
    names = ["a", "b", "c", "d", "e"]
    codes = run(module_project, *steps, path="resumed", experiment_name=names)
    assert codes == [0, -9, 0, 75, 0, -9, UNUSABLE]
    sweep = module_project.path / "resumed"
    expected = measured(sweep / "0")
    assert [measured(sweep / str(number)) for number in (1, 2, 3)] == [expected] * 3
    assert [result_of(sweep / str(number)).status for number in range(4)] == ["finished"] * 4
    for number in (1, 2):
        assert sorted(path.name for path in (sweep / str(number) / ".hydra" / "resume_1").iterdir()) == [
            "config.yaml", "hydra.yaml", "overrides.yaml",
        ]  # fmt: skip
        assert "resumed from" in (sweep / str(number) / "job.log").read_text()


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
    assert run(module_project, [0], path="unrecorded", **{"hydra.output_subdir": ["null"]}) == [0]
    folder = module_project.path / "unrecorded" / "0"
    assert result_of(folder).status == "finished"
    assert [path.name for path in (folder / ".hydra").glob("*.yaml")] == ["config.yaml"]


def test_the_exit_code_names_the_signal() -> None:
    """The script of a job in Slurm repeats it after 75 only: before training has begun, nothing was saved."""
    errors = [Requeue("SIGTERM"), Terminated(signal.SIGTERM), KeyboardInterrupt(), RuntimeError()]
    assert [job._exit_code(error) for error in errors] == [75, 143, 130, 1]


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
