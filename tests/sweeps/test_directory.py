"""The directory of a sweep: `sweep.json`, states of jobs, marks of controllers."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.files.result import Objective, Result
from hydraloop.sweeps import job_states
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import FILENAME, Description, Jobs, SweepDirectory

GRID = Jobs(
    tuple((f"optimizer.lr={lr}", f"seed={seed}") for lr in ("1e-3", "1e-2") for seed in range(3)),
    ("optimizer.lr", "seed"),
)
DESCRIPTION = Description(
    uid="0a1b",
    created=1.0,
    command=("python", "train.py"),
    overrides=("optimizer.lr=1e-3,1e-2", "seed=0,1,2"),
    configs={"": {"seed": 0}},
    subdir="${hydra.job.num}",
    jobs=GRID,
    average="seed",
    git={},
)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDirectory:
    return SweepDirectory.create(tmp_path / "sweep", DESCRIPTION)


def running(sweep: SweepDirectory, number: int, **changed: object) -> JobState:
    """A job whose process has been killed."""
    state = JobState(number, "running", attempts=1, directory=str(number), began=time.time() - 10)
    state = replace(state, **changed)  # type: ignore[arg-type]
    sweep.folder(number).mkdir(parents=True)
    job_states.write(sweep.folder(number), state, flush=False)
    return state


def test_it_is_read_as_it_was_written(sweep: SweepDirectory) -> None:
    assert SweepDirectory.load(sweep.path).description == DESCRIPTION
    sweep.widen(replace(DESCRIPTION, jobs=replace(GRID, listed=GRID.listed[:4])))
    assert SweepDirectory.load(sweep.path).description.jobs.listed == GRID.listed[:4]


def test_secrets_are_masked(tmp_path: Path) -> None:
    key = "hooks.mine.api_key"
    secret = replace(
        DESCRIPTION,
        jobs=Jobs(((f"{key}=tops3cret",), (f"{key}=0ther-one",)), (key,)),
        overrides=(f"{key}=tops3cret,0ther-one",),
    )
    sweep = SweepDirectory.create(tmp_path, secret)
    sweep.widen(secret)
    text = (tmp_path / FILENAME).read_text()
    assert not re.search("tops3cret|0ther-one", text)
    assert sweep.description.jobs.listed == ((f"{key}=***",),) * 2


@pytest.mark.parametrize("name", [FILENAME, "result.json"])
def test_a_directory_in_use_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(UserError, match="holds a sweep already" if name == FILENAME else "holds a run already"):
        SweepDirectory.create(tmp_path, DESCRIPTION)
    assert (tmp_path / name).read_text() == "{}"


def test_of_several_that_create_it_at_once_all_but_one_are_refused(tmp_path: Path) -> None:
    def create(uid: str) -> bool:
        try:
            SweepDirectory.create(tmp_path / "new", replace(DESCRIPTION, uid=uid))
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(create, "abcd"))
    assert sum(made) == 1
    assert SweepDirectory.load(tmp_path / "new").description.uid == "abcd"[made.index(True)]


def test_a_directory_without_a_sweep_is_refused(sweep: SweepDirectory) -> None:
    with pytest.raises(UserError, match="is not the directory of a sweep"):
        SweepDirectory.load(sweep.path / "nowhere")
    content = (sweep.path / FILENAME).read_text()
    for damaged in ("", content[: len(content) // 2], "[]", "{}", '{"jobs": [1]}'):
        (sweep.path / FILENAME).write_text(damaged)
        with pytest.raises(UserError, match=f"has a damaged {FILENAME}"):
            SweepDirectory.load(sweep.path)


def test_an_unwritable_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be locked: Not a directory"):
        SweepDirectory.create(tmp_path / "file" / "sweep", DESCRIPTION)


def test_the_folder_of_a_job(tmp_path: Path) -> None:
    sweep = SweepDirectory.create(tmp_path, DESCRIPTION)
    assert sweep.folder(3) == tmp_path / "3"
    named = SweepDirectory.create(tmp_path / "named", replace(DESCRIPTION, subdir="seed-${seed}"))
    assert named.folder(3) == tmp_path / "named" / ".jobs" / "3"


def test_a_damaged_state_is_recovered_from_the_result(sweep: SweepDirectory) -> None:
    for number in (0, 1):
        running(sweep, number)
        (sweep.folder(number) / job_states.FILENAME).write_bytes(b"")
    Result("finished", objective=Objective("loss", "less", 0.5, 5)).write(sweep.folder(1))
    assert sweep.state(0).state == "interrupted"
    assert sweep.state(0).reason == "its job.json was damaged"
    assert (sweep.state(4).state, sweep.state(4).overrides) == ("queued", ("optimizer.lr=1e-2", "seed=1"))
    assert (sweep.state(1).state, sweep.state(1).value, sweep.state(1).attempts) == ("finished", 0.5, 1)
    assert sweep.state(1).overrides == ("optimizer.lr=1e-3", "seed=1")
