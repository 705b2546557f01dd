"""What the process of a job does: train, and write the end. Without a controller, see `job_program`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import Terminated
from hydraloop.files import lock
from hydraloop.files.result import Result
from hydraloop.sweeps import job
from hydraloop.sweeps.job_states import UNUSABLE
from tests.e2e.projects import Project, Run

PROGRAM = Path(__file__).with_name("job_program.py")
LINES = [
    "experiment=spirals",
    "engine.max_epochs=2",
    "engine.limit_train_batches=3",
    "hooks=[]",
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
    return Project.make(tmp_path_factory.mktemp("jobs") / "project")


@pytest.fixture(scope="module")
def sweep(module_project: Project) -> Path:
    """Jobs: 0 finished, 1 failed, 2 killed before its first iteration."""
    steps: list[list[Any]] = [[0], [1], [2, "start"]]
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


def test_its_records_are_those_of_hydra(sweep: Path) -> None:
    folder = sweep / "0" / ".hydra"
    assert OmegaConf.load(folder / "config.yaml").optimizer.lr == 1e-3
    assert OmegaConf.load(folder / "overrides.yaml") == [*LINES, "optimizer.lr=1e-3"]
    hydra = OmegaConf.load(folder / "hydra.yaml").hydra
    assert (hydra.job.num, str(hydra.mode), hydra.overrides.task) == (0, "MULTIRUN", [*LINES, "optimizer.lr=1e-3"])
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
