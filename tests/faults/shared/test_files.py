"""What one machine writes, another one reads at once, although its caches show something else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.run_files import lock, uncached
from hydraloop.run_files.record_log import read_all
from hydraloop.run_files.result import FILENAME as RESULT
from hydraloop.run_files.result import Result
from hydraloop.sweeps import states
from hydraloop.sweeps.search.log import SearchLog
from hydraloop.sweeps.states import JobState
from tests.faults.shared.machines import machines

pytestmark = pytest.mark.nightly


def test_a_file_that_has_grown_was_replaced_or_is_new_is_read_from_the_server(tmp_path: Path) -> None:
    with machines(tmp_path, shares_flock=False) as (first, second):
        here, there = first.view, second.view
        grown, new = "metrics.jsonl", "media.txt"
        (here / grown).write_text('{"mode": "train", "iteration": 1, "loss": 1.0}\n')
        states.write(here, JobState(3, "running"), flush=False)
        Result("failed").write(here)
        assert not (there / new).exists()
        for name in (grown, states.FILENAME, RESULT):
            assert (there / name).stat().st_size == (here / name).stat().st_size

        with (here / grown).open("a") as file:
            file.write('{"mode": "train", "iteration": 2, "loss": 1.0}\n')
        (here / new).write_text("new")
        long = replace(JobState(3, "finished"), value=0.25, overrides=("seed=0",) * 9)
        states.write(here, long, flush=False)
        Result("failed", error="a long text").write(here)
        assert (there / grown).stat().st_size == (here / grown).stat().st_size // 2, "the caches are stale"
        assert states.read(there) == long
        assert Result.read(there) == Result("failed", error="a long text")
        assert len([*read_all(there / grown)]) == 2
        uncached.refresh_all(there)
        assert (there / new).read_text() == "new"
        with pytest.raises(FileNotFoundError):
            uncached.read(there / "missing")


def test_a_search_does_not_overwrite_a_decision_of_another_machine(tmp_path: Path) -> None:
    with machines(tmp_path, shares_flock=False) as (first, second):
        logs = [SearchLog(one.view, 1) for one in (first, second)]
        ask = {"event": "ask", "params": {}, "attributes": {}, "given": None}
        for number in range(4):
            with logs[number % 2].deciding() as decides:
                assert decides
                assert len(logs[number % 2].history.trials) == number
                logs[number % 2].append({**ask, "trial": number})
            for log in logs:
                log.refresh()
        assert (tmp_path / "real" / "search.jsonl").read_text().count("\n") == 4


def test_a_lock_that_is_renewed_on_another_machine_is_held(tmp_path: Path) -> None:
    with machines(tmp_path, shares_flock=False) as (first, second):
        held = lock.RunLock(first.view, key="")
        held.try_acquire(renew=False)
        path = first.view / lock.FILENAME
        path.write_text(path.read_text().replace(lock.machine(), "another machine"))
        os.utime(path, (0, 0))
        assert lock.holder(second.view) is None
        held.renew()
        assert lock.holder(second.view) is not None
