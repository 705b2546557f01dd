"""The directory of a sweep: `sweep.json`, states of jobs, marks of controllers."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.run import lock
from hydraloop.run.lock import RunLock
from hydraloop.run.processes import started
from hydraloop.run.result import Objective, Result
from hydraloop.sweeps import states
from hydraloop.sweeps.axes import Axes, Axis
from hydraloop.sweeps.description import FILENAME, Description
from hydraloop.sweeps.directory import SweepDirectory
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED
from hydraloop.sweeps.states import JobState

LR = Axis(("optimizer.lr",), (("optimizer.lr=1e-3",), ("optimizer.lr=1e-2",)))
SEED = Axis(("seed",), (("seed=0",), ("seed=1",), ("seed=2",)))
DESCRIPTION = Description(
    uid="0a1b",
    created=1.0,
    command=("python", "train.py"),
    overrides=("optimizer.lr=1e-3,1e-2", "seed=0,1,2"),
    configs={"": {"seed": 0}},
    subdir="${hydra.job.num}",
    axes=Axes((LR, SEED), range(6)),
    average="seed",
    git={},
)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    return SweepDirectory.create(tmp_path / "sweep", DESCRIPTION)


def running(sweep: SweepDirectory, number: int, **changed: object) -> JobState:
    """A job whose process has been killed."""
    state = JobState(number, "running", attempts=1, directory=str(number), began=time.time() - 10)
    state = replace(state, controller=sweep.controller)
    state = replace(state, **changed)  # type: ignore[arg-type]
    sweep.folder(number).mkdir(parents=True)
    states.write(sweep.folder(number), state, flush=False)
    return state


def test_it_is_read_as_it_was_written(sweep: SweepDirectory) -> None:
    assert SweepDirectory.load(sweep.path).description == DESCRIPTION
    order = (0, 1, 2, 5)
    sweep.widen(replace(DESCRIPTION, axes=Axes((LR, SEED), order)))
    found = SweepDirectory.load(sweep.path).description
    assert list(found.axes.order) == list(order)
    assert found.axes.axes == (LR, SEED)


def test_secrets_are_masked(tmp_path: Path) -> None:
    key = Axis(("hooks.mine.api_key",), (("hooks.mine.api_key=tops3cret",), ("hooks.mine.api_key=0ther-one",)))
    secret = replace(DESCRIPTION, axes=Axes((key,), range(2)), overrides=("hooks.mine.api_key=tops3cret,0ther-one",))
    sweep = SweepDirectory.create(tmp_path, secret)
    sweep.widen(replace(secret, axes=Axes((key, SEED), range(6))))
    text = (tmp_path / FILENAME).read_text()
    assert not re.search("tops3cret|0ther-one", text)
    assert sweep.description.axes.axes[0].values == (("hooks.mine.api_key=***",),) * 2


@pytest.mark.parametrize("name", [FILENAME, "result.json", "multirun.yaml"])
def test_a_directory_in_use_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="holds a sweep already" if name == FILENAME else "holds a run already"):
        SweepDirectory.create(tmp_path, DESCRIPTION)
    assert (tmp_path / name).read_text() == "{}"


def test_of_two_that_create_it_one_is_refused(sweep: SweepDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)  # the other one creates it after this check
    with pytest.raises(UserError, match=re.escape(f"sweep.resume={sweep.path}")):
        SweepDirectory.create(sweep.path, replace(DESCRIPTION, uid="other"))
    assert SweepDirectory.load(sweep.path).description == DESCRIPTION


def test_a_directory_without_a_sweep_is_refused(sweep: SweepDirectory) -> None:
    with pytest.raises(UserError, match="is not the directory of a sweep"):
        SweepDirectory.load(sweep.path / "nowhere")
    content = (sweep.path / FILENAME).read_text()
    for damaged in ("", content[: len(content) // 2], "[]", "{}", '{"axes": [1]}'):
        (sweep.path / FILENAME).write_text(damaged)
        with pytest.raises(UserError, match=f"has a damaged {FILENAME}"):
            SweepDirectory.load(sweep.path)


def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        SweepDirectory.create(tmp_path / "file" / "sweep", DESCRIPTION)


def test_a_controller_on_a_full_disk(sweep: SweepDirectory) -> None:
    (sweep.path / lock.CONTROLLERS).touch()
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        sweep.announce()


def test_a_job_without_a_file_is_queued(sweep: SweepDirectory) -> None:
    running(sweep, 1)
    assert [state.state for state in sweep.states()] == ["queued", "running", *["queued"] * 4]
    assert sweep.state(4).overrides == ("optimizer.lr=1e-2", "seed=1")


def test_the_folder_of_a_job(tmp_path: Path) -> None:
    sweep = SweepDirectory.create(tmp_path, DESCRIPTION)
    assert sweep.folder(3) == tmp_path / "3"
    named = SweepDirectory.create(tmp_path / "named", replace(DESCRIPTION, subdir="seed-${seed}"))
    assert named.folder(3) == tmp_path / "named" / ".jobs" / "3"


def test_a_damaged_state_is_recovered_from_the_result(sweep: SweepDirectory) -> None:
    for number in (0, 1):
        running(sweep, number)
        (sweep.folder(number) / states.FILENAME).write_bytes(b"")
    Result("finished", objective=Objective("loss", "less", 0.5, 5)).write(sweep.folder(1))
    assert sweep.state(0).state == "interrupted"
    assert sweep.state(0).reason == "its job.json was damaged"
    assert (sweep.state(1).state, sweep.state(1).value, sweep.state(1).attempts) == ("finished", 0.5, 1)
    assert sweep.state(1).overrides == ("optimizer.lr=1e-3", "seed=1")


@pytest.mark.parametrize(
    ("code", "state", "text"),
    [
        (-signal.SIGKILL, "interrupted", "killed by SIGKILL (out of memory?)"),
        (-signal.SIGTERM, "interrupted", "killed by SIGTERM"),
        (-signal.SIGSEGV, "failed", "its process crashed (SIGSEGV); see job.log"),
        (0, "failed", "its process ended with exit code 0 and no result; see job.log"),
        (1, "failed", "its process ended with exit code 1 and no result; see job.log"),
        (NOT_RECORDED, "interrupted", "its state could not be written"),
        (75, "interrupted", "its state could not be written"),
        (128 + signal.SIGTERM, "interrupted", "killed by SIGTERM"),
        (None, "interrupted", "its process has ended without a result"),
    ],
)
def test_a_job_whose_process_was_killed(code: int | None, state: str, text: str, sweep: SweepDirectory) -> None:
    running(sweep, 0, seconds=5.0)
    settled = sweep.settle(0, code, 1)
    assert settled == states.read(sweep.folder(0))
    assert (settled.state, settled.error or settled.reason, settled.attempts) == (state, text, 1)
    assert 14 < settled.seconds < 60
    assert sweep.settle(0, code, 1) == settled
    assert not (sweep.folder(0) / ".lock").exists()


def test_a_result_before_the_kill_counts(sweep: SweepDirectory) -> None:
    running(sweep, 0)
    Result("finished", objective=Objective("loss", "less", 0.5, 5)).write(sweep.folder(0))
    assert sweep.settle(0, -signal.SIGKILL, 1).state == "finished"
    assert sweep.state(0).value == 0.5


def test_a_process_that_has_ended_before_its_first_state(sweep: SweepDirectory) -> None:
    for code in (LEFT, NOT_RECORDED):
        assert sweep.settle(0, code, 1).state == "queued"
    sweep.folder(0).mkdir()
    (sweep.folder(0) / states.REQUEST).touch()
    for code, attempt, state in (
        (1, 1, "failed"),
        (-signal.SIGKILL, 2, "interrupted"),
        (-signal.SIGKILL, 2, "interrupted"),
        (128 + signal.SIGINT, 3, "interrupted"),
        (0, 4, "failed"),
        (None, 5, "interrupted"),
    ):
        settled = sweep.settle(0, code, attempt)
        assert (settled.state, settled.attempts) == (state, attempt)
    assert not (sweep.folder(0) / states.REQUEST).exists()


def test_the_exit_code_of_another_process_does_not_count(sweep: SweepDirectory) -> None:
    """Another controller has started the job again, and was killed with it."""
    for number, (code, attempt, controller) in enumerate([(0, 1, sweep.controller), (LEFT, 2, "another")]):
        running(sweep, number, attempts=2, controller=controller)
        assert sweep.settle(number, code, attempt).state == "interrupted"
        assert sweep.state(number).reason == "its process has ended without a result"


def test_a_job_that_another_process_runs_is_not_settled(sweep: SweepDirectory) -> None:
    state = running(sweep, 0)
    with RunLock(sweep.folder(0), key="x"):
        assert sweep.settle(0, -signal.SIGKILL, 1) == state
    assert sweep.state(0) == state


def test_controllers_that_are_alive(sweep: SweepDirectory) -> None:
    """The lock of each has the rules of `test_lock`."""
    assert sweep.controllers() == {}
    for _ in range(2):
        sweep.announce()
        other = SweepDirectory.load(sweep.path)
        other.announce()
        assert {name: one.alive for name, one in sweep.controllers().items()} == {
            name: [(os.getpid(), started(os.getpid()))] for name in (sweep.controller, other.controller)
        }
        other.withdraw()
        path = sweep.path / lock.CONTROLLERS / sweep.controller / ".lock"
        path.write_text(json.dumps({**json.loads(path.read_text()), "machine": "node7", "host": "node7"}))
        os.utime(path, (time.time() - 70, time.time() - 70))
        assert sweep.controllers() == {}
        sweep.renew()
        assert [one.host for one in sweep.controllers().values()] == ["node7"]
        sweep.withdraw()
        sweep.withdraw()
        assert sweep.controllers() == {}
