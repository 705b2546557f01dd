"""Jobs of Slurm, whose scripts submitit makes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.launch import slurm as slurm_jobs
from hydraloop.launch.exit import REQUEUE
from hydraloop.sweeps.executors import submitit_executor
from hydraloop.sweeps.executors.executor import Cause, Ended, Request
from hydraloop.sweeps.executors.submitit_executor import SubmititExecutor, create_executor
from tests.processes import until
from tests.slurm import Slurm
from tests.sweeps.executors import program
from tests.sweeps.executors.test_spawned import spawn

UID = "0123456789abcdef"


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_command", ["python", str(program.__file__)])
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


def run(executor: SubmititExecutor, sweep: Path, *lines: str) -> list[str]:
    """Submit jobs. Return their ids in Slurm."""
    for number, line in enumerate(lines):
        executor.submit(Request(number, tuple(line.split()), str(sweep / str(number)), ""))
    return list(executor._jobs.values())


def ends(executor: SubmititExecutor, count: int) -> list[Ended]:
    """Return how jobs have ended, by number."""
    found: list[Ended] = []
    until(lambda: found.extend(executor.poll(0.5)) or len(found) == count, "the jobs do not end")
    return sorted(found, key=lambda end: end.number)


@pytest.mark.slow
def test_jobs_end_with_their_exit_codes(tmp_path: Path, slurm: Slurm) -> None:
    """A job that was cancelled, by the executor or by an administrator, is not retried.

    SIGKILL is a stand-in for a job that is out of memory. Slurm starts here with `task/cgroup` and `ConstrainRAMSpace`,
    but a job with `--mem=100` could use 500 MB: its processes stay in the memory group of the tests.
    """
    options = {"timeout_min": 5, "slurm_partition": "main", "slurm_additional_parameters": {"nice": 3}}
    executor = SubmititExecutor(spawn(tmp_path), UID, options)
    killed = f"kill={signal.SIGKILL}"
    jobs = run(executor, tmp_path, "exit=0", "exit=1", killed, "sleep=60", "saves sleep=60")
    until(lambda: all((tmp_path / str(number) / "about.json").exists() for number in range(5)), "not all have begun")
    executor.cancel(3, signal.SIGINT)
    slurm.run("scancel", jobs[4])
    assert ends(executor, 5) == [
        Ended(0, 0),
        Ended(1, 1),
        Ended(2, -signal.SIGKILL),
        Ended(3, 143, Cause.CANCELLED),
        Ended(4, REQUEUE, Cause.CANCELLED),
    ]
    assert (tmp_path / "0" / "job.log").read_text() == "lines: exit=0\n"
    (script,) = (tmp_path / ".submitit").glob(f"{jobs[0]}_submission.sh")
    for line in (
        "--partition=main",
        "--signal=TERM@90",
        "--nice=3",
        "--time=5",
        f"--job-name=hydraloop-{UID}-0.1",
        "--requeue",
    ):
        assert f"#SBATCH {line}\n" in script.read_text()


@pytest.mark.slow
def test_a_job_that_ends_while_slurm_is_asked_has_its_exit_code(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = slurm_jobs.queue

    def late() -> dict[str, slurm_jobs.Job] | None:
        until(lambda: (asked() or {})[job].state == "COMPLETED", "the job does not end")
        return asked()

    executor = SubmititExecutor(spawn(tmp_path), UID, {"timeout_min": 5})
    (job,) = run(executor, tmp_path, "exit=0")
    monkeypatch.setattr(slurm_jobs, "queue", late)
    executor._asked_at = float("-inf")
    assert ends(executor, 1) == [Ended(0, 0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_min": 5}, "sweep.executor: this machine has no Slurm"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError) as caught:
        create_executor(tmp_path, options)
    assert str(caught.value).startswith(message)


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitit_executor, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sweep.executor: .*\n  pip install submitit"):
        SubmititExecutor(spawn(tmp_path), UID, {"timeout_min": 5})


@pytest.mark.slow
def test_the_first_job_that_slurm_refuses_is_an_error(tmp_path: Path, slurm: Slurm) -> None:
    executor = SubmititExecutor(spawn(tmp_path), UID, {"timeout_min": 5, "slurm_partition": "gpu"})
    with pytest.raises(UserError, match=r"job 0 could not be submitted: .*invalid partition specified: gpu"):
        executor.submit(Request(0, (), str(tmp_path / "0"), ""))


@pytest.mark.slow
def test_a_later_job_that_slurm_refuses_is_submitted_again_and_runs_once(
    tmp_path: Path, slurm: Slurm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second `sbatch` fails, the third one after Slurm has taken the job; and `squeue` does not answer at first."""
    (tmp_path / "sweep.json").write_text(f'{{"uid": "{UID}"}}')
    executor = SubmititExecutor(spawn(tmp_path), UID, {"timeout_min": 5})
    run(executor, tmp_path, "sleep=60")
    real, folder = shutil.which("sbatch"), tmp_path / "bin"
    folder.mkdir()
    counted = f"""#!/bin/sh
        echo >>{folder}/calls; n=$(wc -l <{folder}/calls)
        [ $n = 1 ] && {{ echo "error: busy" >&2; exit 1; }}
        {real} "$@" || exit
        [ $n = 2 ] && exit 1
        exit 0
    """
    failing = f"""#!/bin/sh
        [ -e {folder}/asked ] || {{ touch {folder}/asked; exit 1; }}
        exec {shutil.which("squeue")} "$@"
    """
    for name, text in (("sbatch", counted), ("squeue", failing)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        (tmp_path / "1").mkdir()
        executor.submit(Request(1, ("sleep=10", "exit=0"), str(tmp_path / "1"), ""))
        assert ends(executor, 1) == [Ended(1, 0)]
        assert (folder / "calls").read_text().count("\n") == 2
        assert [record.getMessage().count("job 1 could not be submitted") for record in caplog.records] == [1]
        again = SubmititExecutor(spawn(tmp_path), UID, {"timeout_min": 5})
        (folder / "asked").unlink()
        assert again.adopt() == [0], "the controller waits until squeue answers"
        again.cancel(0, signal.SIGTERM)
        assert ends(again, 1) == [Ended(0, 143, Cause.CANCELLED)]
