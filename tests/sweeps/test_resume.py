"""Which sweep a command line continues, and what it may change. The jobs are not run."""

from __future__ import annotations

import copy
import functools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.config import arguments
from hydraloop.config.compose import Composer, opened
from hydraloop.errors import UserError
from hydraloop.files import lock
from hydraloop.sweeps import check_sweep, resume_sweep
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import FILENAME, Description, SweepDirectory
from tests.e2e.projects import REPOSITORY

LINES = ["hooks=[]", "optimizer.lr=1e-3,1e-2", "seed=0,1"]


@pytest.fixture
def composer() -> Iterator[Composer]:
    with opened(REPOSITORY / "conf", "config") as found:
        yield found


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@functools.cache
def planned(*lines: str) -> check_sweep.SweepDraft:
    """Planning takes half a second. A composer has to be open, any one: all are of equal files until `edit`."""
    return check_sweep.check(arguments.read(lines), Composer("config"))


def start(
    composer: Composer, *lines: str, path: str = "new", created: float = 1.0, named: bool = False
) -> tuple[SweepDirectory, dict[int, tuple[str, ...]]]:
    """The sweep, and the jobs that the command line names."""
    plan = planned(*lines)
    cfg = copy.deepcopy(plan.cfg)
    cfg.hydra.sweep.dir = path
    plan = replace(plan, cfg=cfg, typed=[*plan.typed, *(["hydra.sweep.dir"] if named else [])])
    uid = f"{path} {created}"
    description = Description(uid, created, ("python",), lines, plan.configs(plan.jobs), plan.subdir, plan.jobs, "", {})
    directory, named = resume_sweep.open_sweep(description, plan)
    directory.controller_lock.release()
    return directory, dict(named)


def test_a_second_controller_is_refused(composer: Composer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock.RunLock.__init__, "__kwdefaults__", {"patience": 0.0})
    begun, _ = start(composer, *LINES)
    text = (begun.path / FILENAME).read_text()
    with (
        begun.controller_lock,
        pytest.raises(UserError, match=r"sweep\.resume: process \d+ on .* is training in .*new"),
    ):
        start(composer, *LINES, "sweep.resume=new")
    assert (begun.path / FILENAME).read_text() == text
    start(composer, *LINES, "sweep.resume=new")


def test_unfinished_files_of_a_killed_controller_go(composer: Composer, tmp_path: Path) -> None:
    begun, _ = start(composer, *LINES)
    for folder in (begun.path, begun.path / "3"):
        folder.mkdir(exist_ok=True)
        (folder / ".job.json.7.part").touch()
        (folder / ".sweep.json.7.part").touch()
    start(composer, *LINES, "sweep.resume=new")
    assert [str(path.relative_to(begun.path)) for path in begun.path.rglob("*.part")] == ["3/.sweep.json.7.part"]


def test_the_same_sweep_continues(composer: Composer, tmp_path: Path) -> None:
    begun, _ = start(composer, *LINES)
    text = (tmp_path / "new" / FILENAME).read_text()
    directory, jobs = start(composer, *LINES, "sweep.resume=new", "sweep.max_workers=2", path="other")
    assert directory.path == tmp_path / "new"
    assert directory.description == begun.description
    assert len(jobs) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [lock.FILENAME, FILENAME]
    assert (tmp_path / "new" / FILENAME).read_text() == text


def test_wider_axes_add_jobs_and_keep_numbers(composer: Composer, tmp_path: Path) -> None:
    _, before = start(composer, *LINES)
    wide = ["hooks=[]", "optimizer.lr=1e-4,1e-3,1e-2", "seed=0,1,2", "sweep.resume=new"]
    directory, jobs = start(composer, *wide)
    assert len(jobs) == 9
    assert {number: jobs[number] for number in range(4)} == before
    assert SweepDirectory.load(tmp_path / "new").description.jobs.listed == tuple(jobs[number] for number in range(9))
    again, jobs = start(composer, *wide)
    assert len(jobs) == directory.count == again.count == 9
    fewer, jobs = start(composer, "hooks=[]", "optimizer.lr=1e-4", "seed=0,1,3", "sweep.resume=new")
    assert (fewer.count, len(jobs), max(jobs)) == (10, 3, 9), "the others stay"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["hooks=[]", "optimizer.lr=1", "seed=0,1"], "optimizer.lr"),
        ([*LINES, "engine.accumulate=2"], "engine.accumulate"),
        ([*LINES, "hydra.sweep.subdir=s-${seed}"], "hydra.sweep.subdir: ${hydra.job.num} -> s-${seed}"),
    ],
)
def test_another_sweep_is_refused(changed: list[str], message: str, composer: Composer, tmp_path: Path) -> None:
    start(composer, *LINES)
    text = (tmp_path / "new" / FILENAME).read_text()
    with pytest.raises(UserError) as caught:
        start(composer, *changed, "sweep.resume=new")
    assert message in str(caught.value)
    assert (tmp_path / "new" / FILENAME).read_text() == text


def test_a_resumed_sweep_may_pause_elsewhere(composer: Composer) -> None:
    """Paused jobs would start again and pause at once, so the printed command lets them continue to the end."""
    directory, _ = start(composer, *LINES, "engine.pause_after=1")
    paused, over = JobState(0, "paused"), JobState(1, "finished")
    assert "engine.pause_after=1" in directory.resume_command([paused, over, JobState(2, "queued")])
    command = directory.resume_command([paused, over])
    assert command.endswith(" seed=0,1 sweep.resume=new")
    for line in (["engine.pause_after=2"], []):
        directory, _ = start(composer, *LINES, *line, "sweep.resume=new")
        assert directory.description.overrides[len(LINES) : -1] == tuple(line)


def test_an_edited_config_file_is_noticed(tmp_path: Path) -> None:
    """Also one that only some of the jobs use, and one of jobs that were added."""
    conf = Path(shutil.copytree(REPOSITORY / "conf", tmp_path / "conf"))
    lines = ["hooks=[],[weight_norm]", "seed=0", "sweep.resume=new"]
    with opened(conf, "config") as composer:
        start(composer, "hooks=[]", "seed=0")
        assert len(start(composer, *lines)[1]) == 2
    edit(conf / "hooks" / "weight_norm.yaml", "digits: 2", "digits: 7")
    changed = "hooks=[weight_norm]: hooks.weight_norm.digits: 2 -> 7"
    with opened(conf, "config") as composer:
        assert refused(composer, *lines) == f"the config of the sweep has changed: {changed}"
    edit(conf / "config.yaml", "threads: 1", "threads: 2")
    in_all = "engine.threads: 1 -> 2; hydra.job.env_set.OMP_NUM_THREADS: (absent) -> 2"
    with opened(conf, "config") as composer:
        assert (
            refused(composer, *lines, "+hydra.job.env_set.OMP_NUM_THREADS=2")
            == f"the config of the sweep has changed: {in_all}; {changed}"
        )


def edit(file: Path, old: str, new: str) -> None:
    planned.cache_clear()
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


def refused(composer: Composer, *lines: str) -> str:
    with pytest.raises(UserError) as caught:
        start(composer, *lines)
    return caught.value.problem


def test_a_directory_without_a_sweep_is_refused(composer: Composer, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        with pytest.raises(UserError, match=f"sweep.resume: {name} is not the directory of a sweep"):
            start(composer, *LINES, f"sweep.resume={name}")
    assert not list((tmp_path / "empty").iterdir())
    assert not (tmp_path / "nowhere").exists()


def test_auto_finds_the_newest_with_this_config(composer: Composer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no sweep in multirun/ has this config"):
        start(composer, *LINES, "sweep.resume=auto")
    start(composer, *LINES, path="multirun/2026-01-01/a", created=2.0)
    start(composer, *LINES, path="multirun/2026-01-01/b", created=3.0)
    start(composer, *LINES, "engine.accumulate=2", path="multirun/2026-01-01/c", created=4.0)
    (tmp_path / "multirun/2026-01-01/d").mkdir()
    (tmp_path / "multirun/2026-01-01/d" / FILENAME).write_text("{")
    start(composer, "hooks=[]", "optimizer.lr=1e-3", "seed=0,7", path="multirun/2026-01-01/e", created=5.0)
    directory, jobs = start(composer, "hooks=[]", "optimizer.lr=1e-3,1e-2", "seed=0,1,2", "sweep.resume=auto")
    assert (directory.path.name, len(jobs)) == ("b", 6), "e has another job"


@pytest.mark.parametrize("newest", ["2026-01-01/a", "grid", "digits/lr/grid", "grid_2/inside"])
def test_auto_finds_a_sweep_by_any_name_in_any_folder(newest: str, composer: Composer, tmp_path: Path) -> None:
    for name in ("2026-01-01/a", "grid", "digits/lr/grid", "grid_2/inside"):
        start(composer, *LINES, path=f"multirun/{name}", created=3.0 if name == newest else 2.0)
    job = tmp_path / "multirun" / "grid" / "0"
    job.mkdir(exist_ok=True)
    start(composer, *LINES, path="multirun/grid/0/of_a_job", created=4.0)
    directory, _ = start(composer, *LINES, "sweep.resume=auto")
    assert directory.path == tmp_path / "multirun" / newest


def test_auto_in_a_named_directory(composer: Composer, capsys: pytest.CaptureFixture[str]) -> None:
    begun, _ = start(composer, *LINES, "sweep.resume=auto", path="mine", named=True)
    assert "mine had no sweep: a new one starts there" in capsys.readouterr().err
    in_a_config_file = "hydra.sweep.dir=mine"
    again, _ = start(composer, *LINES, "sweep.resume=auto", in_a_config_file, path="mine")
    assert again.path.name == "mine"
    assert again.description.uid == begun.description.uid
    assert capsys.readouterr().err == ""


def test_no_link_leads_a_resumed_sweep_to_other_files(composer: Composer, tmp_path: Path) -> None:
    start(composer, *LINES)
    (tmp_path / "new" / "0").mkdir()
    (tmp_path / "new" / "0" / "job.log").symlink_to(tmp_path / "profile")
    with pytest.raises(UserError, match=r"^sweep.resume: .*new/0/job.log is a link to .*profile, outside of "):
        start(composer, *LINES, "sweep.resume=new")
