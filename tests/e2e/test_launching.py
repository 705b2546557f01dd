"""Several ranks, started by hydraloop and by torchrun: what they write, and how they fail, end and restart."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.e2e.projects import REPOSITORY, Done, Project, Run
from tests.marks import nightly, slow
from tests.processes import running_in, until

HOOKS = '''
from __future__ import annotations

import os
import pathlib
import signal
import time

from hydraloop import Hook, UserError


class Trouble(Hook):
    """Makes one rank fail in an iteration."""

    priority = 10

    def __init__(self, *, what: str, rank: int = 1, at: int = 5, once: str | None = None, busy: float = 0.0) -> None:
        self.what, self.rank, self.at, self.once, self.busy = what, rank, at, once, busy

    def before_run(self, engine) -> None:
        if self.what == "mistake":
            raise UserError("a mistake of all ranks", key="hooks.trouble.what", remedy="Use another.")

    def before_train_iter(self, engine, batch_idx, batch) -> None:
        if engine.progress.iteration + 1 != self.at:
            return
        if engine.distributed.rank != self.rank:
            time.sleep(self.busy)
            return
        if self.once is not None:
            if os.path.exists(self.once):
                return
            pathlib.Path(self.once).touch()
            for path in (engine.run_dir / "checkpoints").glob("*"):  # the file server's clock is a minute behind
                os.utime(path, (time.time() - 60, time.time() - 60))
        if self.what == "raise":
            print("about to fail")
            raise ValueError("raised by this rank")
        if self.what in ("kill", "crash"):
            os.kill(os.getpid(), signal.SIGKILL if self.what == "kill" else signal.SIGSEGV)
'''
TROUBLE = "+hooks.trouble._target_=my_project.trouble.Trouble"
QUICK = ("experiment=spirals", "engine.max_epochs=1", "engine.test=false")
TWO = "distributed.nproc_per_node=2"
SOON = 30
"""Seconds within which all processes of a job end after a rank was killed."""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    """A user's project with the hook above. Fails if a process is left at the end."""
    made = Project.make(tmp_path / "project")
    made.write("my_project/trouble.py", HOOKS)
    yield made
    left = processes(made)
    for process in left:
        process.kill()
    assert not left, "orphans"


def processes(project: Project) -> list[psutil.Process]:
    """Return the processes that run in the project's folder."""
    return running_in(project.path)


def torchrun(project: Project, *arguments: str) -> Done:
    """Run `torchrun … train.py …`."""
    return project.python("-m", "torch.distributed.run", *arguments)


def files(run: Run) -> set[str]:
    """Return the files in a run directory, without checkpoints."""
    found = (path.relative_to(run.path) for path in run.path.rglob("*") if path.is_file())
    return {str(path) for path in found if path.parts[0] != "checkpoints"}


def start(project: Project, *arguments: str) -> subprocess.Popen[str]:
    """Start an endless run on two ranks. Returns after its first checkpoint."""
    process = project.start("experiment=spirals", "engine.max_epochs=1000000", TWO, *arguments)
    wait_for_checkpoint(project, process)
    return process


def wait_for_checkpoint(project: Project, process: subprocess.Popen[str]) -> None:
    """Wait until the run of a process has a checkpoint."""
    last = "outputs/*/*/checkpoints/last_checkpoint"
    until(lambda: list(project.path.glob(last)), "the run has a checkpoint", process=process)


def wait_for_none(project: Project) -> None:
    """Wait until no process of the project is left."""
    until(lambda: not processes(project), "no process is left", seconds=SOON)


# Training. -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_hydraloop_and_torchrun_start_two_ranks_with_the_same_result(project: Project) -> None:
    ours = project.train(*QUICK, TWO, "hydra.run.dir=runs/ours")
    assert ours.code == 0, ours.text
    assert ours.err == ""
    theirs = torchrun(project, "--nproc-per-node=2", "train.py", *QUICK, "hydra.run.dir=runs/theirs")
    assert theirs.code == 0, theirs.text
    one, two = Run(project.path / "runs" / "ours"), Run(project.path / "runs" / "theirs")
    assert one.result["status"] == two.result["status"] == "finished"
    assert one.result["val_metrics"] == two.result["val_metrics"]
    records = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml"}
    assert files(one) == {*records, "train.log", "rank1.log", "metrics.jsonl", "result.json", ".lock"}
    assert files(two) == files(one)
    assert one.checkpoints == two.checkpoints == ["epoch_1.pth"]
    for done, run in ((ours, one), (theirs, two)):
        assert done.out.count("status ") == 1, "rank 0 reports for all ranks"
        assert run.log.count("status ") == 1
        assert "rank 1, process" in (run.path / "rank1.log").read_text()
        assert "rank 1, process" not in done.text
    assert not list(project.path.glob("outputs/*"))


@pytest.mark.slow
def test_two_agents_share_a_directory(project: Project) -> None:
    line = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *line, "train.py", *QUICK]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(command, cwd=project.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for _ in range(2)
    ]
    outputs = [agent.communicate(timeout=120)[0].decode() for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], outputs
    assert sorted(output.count("status ") for output in outputs) == [0, 1]
    assert project.run.result["status"] == "finished"
    assert (project.run.path / "rank1.log").exists()


def free_port() -> int:
    """Return a port on which nothing listens."""
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


# Sweeps, and ranks that fail. ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_continues_after_each_kind_of_failure(project: Project) -> None:
    done = project.train("-m", *QUICK, TWO, TROUBLE, "+hooks.trouble.what=raise,kill,mistake,none")
    assert done.code == 1
    raised, killed, mistake, fine = project.jobs
    assert raised.result["error"] == "rank 1: ValueError: raised by this rank"
    assert killed.result["error"] == "rank 1 was killed by SIGKILL (out of memory?)"
    assert mistake.result["error"].startswith("hooks.trouble.what: a mistake of all ranks")
    assert [job.result["status"] for job in project.jobs] == ["failed", "interrupted", "failed", "finished"]
    assert fine.checkpoints == ["epoch_1.pth"]
    # Each error is shown once. The traceback of the rank that raised it is in the job's log.
    assert done.err.count("error: ") == 3, done.err
    assert done.out.count("job 1 (+hooks.trouble.what=kill) interrupted: rank 1 was killed by SIGKILL") == 1, done.out
    assert "Traceback" not in done.text
    log = (raised.path / "job.log").read_text()
    assert log.count("Traceback") == 1
    assert log.count("in before_train_iter\n    raise ValueError") == 1
    mistaken = "job 2 (+hooks.trouble.what=mistake): hooks.trouble.what: a mistake of all ranks\n  Use another.\n"
    assert f"error: {mistaken}" in done.err
    trouble = "+hooks.trouble.what="
    failed = f"job 0 ({trouble}raise), job 1 ({trouble}kill), job 2 ({trouble}mistake)"
    assert f"error: 2 of 4 jobs failed, 1 interrupted: {failed}\n" in done.err
    for job in (raised, killed, mistake):
        assert job.log.count(job.result["error"].splitlines()[0]) == 1
    assert "about to fail" not in done.out
    assert "about to fail" in (raised.path / "rank1.log").read_text()
    assert "raised by this rank" in (raised.path / "rank1.log").read_text()


@pytest.mark.slow
def test_under_torchrun_rank_0_reports_the_error_of_another_rank(project: Project) -> None:
    done = torchrun(project, "--nproc-per-node=2", "train.py", *QUICK, TROUBLE, "+hooks.trouble.what=raise")
    assert done.code == 1
    assert done.err.count("error: rank 1: ValueError: raised by this rank") == 1
    assert project.run.result["status"] == "failed"
    assert project.run.result["error"] == "rank 1: ValueError: raised by this rank"


@pytest.mark.parametrize("busy", [nightly(0, id="rank 0 waits"), nightly(60, id="rank 0 is busy")])
def test_under_torchrun_a_rank_is_killed(busy: int, project: Project) -> None:
    """Rank 0 loses its connection to the other rank, or gets torchrun's SIGTERM first. Torchrun names the rank."""
    line = [*QUICK, TROUBLE, "+hooks.trouble.what=kill", f"+hooks.trouble.busy={busy}"]
    done = torchrun(project, "--nproc-per-node=2", "train.py", *line)
    assert done.code == 1
    said = "interrupted by SIGTERM" if busy else "rank 0 lost another rank, which left no error"
    assert project.run.result["error"].startswith(said)
    assert "Signal 9 (SIGKILL)" in done.err


@pytest.mark.nightly
def test_the_log_of_a_rank_that_crashed_says_where(project: Project) -> None:
    done = project.train(*QUICK, TROUBLE, "+hooks.trouble.what=crash", TWO)
    log = project.run.path / "rank1.log"
    said = f"rank 1 crashed (SIGSEGV), see {log.relative_to(project.path)}"
    assert (project.run.result["status"], project.run.result["error"]) == ("failed", said)
    assert done.err.count(f"error: {said}") == 1, done.text
    assert "in before_train_iter" in log.read_text()


@pytest.mark.parametrize("number", [slow(signal.SIGTERM), nightly(signal.SIGKILL)])
def test_a_signal_to_torchrun(number: signal.Signals, project: Project) -> None:
    endless = ["experiment=spirals", "engine.max_epochs=1000000"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py", *endless]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=project.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_checkpoint(project, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert output.count("interrupted: preempted by SIGTERM") == 1, output
    assert project.run.result["status"] == "interrupted"
    wait_for_none(project)


@pytest.mark.parametrize(
    ("arguments", "key", "remedy"),
    [
        slow(["-m", "seed=1,2"], "--multirun", "python train.py -m … distributed.nproc_per_node=2"),
        nightly(["hooks=emaa"], "hooks", "Did you mean ema?"),
    ],
)
def test_mistakes_under_torchrun(arguments: Sequence[str], key: str, remedy: str, project: Project) -> None:
    done = torchrun(project, "--nproc-per-node=2", "train.py", *arguments)
    assert done.code == 1
    assert done.err.count(f"error: {key}: ") == 1
    assert done.err.count(remedy) == 1
    assert done.out == ""
    assert not (project.path / "outputs").exists()
    assert not (project.path / "multirun").exists()


SCRIPT = """
import os
import hydraloop

class Mine(hydraloop.Hook):
    def before_run(self, engine):
        print("of the script:", type(self).__module__)

if __name__ == "__main__":
    hydraloop.main()
"""


@pytest.mark.slow
def test_a_rank_has_the_script_the_time_and_its_own_values(project: Project) -> None:
    project.write("train.py", SCRIPT)
    line = [*QUICK, TWO, "+hooks.mine._target_=__main__.Mine", "+my.tag=${now:%S-%f}", "hydra.run.dir=run"]
    done = project.train(*line)
    assert done.code == 0, done.text
    assert "of the script: __main__" in (project.path / "run" / "rank1.log").read_text()
    done = project.train(*line[:-1], "+my.rank=${oc.env:RANK,none}", "hydra.run.dir=other")
    assert done.code == 2, done.text
    assert done.err == (
        "error: my.rank: rank 1 has another value than rank 0\n"
        "  Let config files, environment variables and resolvers give the same value on all machines.\n"
    )
    restarted = project.train(*line, "distributed.max_restarts=2")
    assert restarted.err.count("error: ") == 1, restarted.err
    assert "run holds a run already" in restarted.err


# Signals. ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        nightly(signal.SIGINT, 130, "status      interrupted by Ctrl-C\n"),
        slow(signal.SIGTERM, 75, "interrupted: preempted by SIGTERM"),
        nightly(signal.SIGHUP, 129, "interrupted by SIGHUP"),
    ],
)
def test_an_interrupt(number: int, code: int, said: str, project: Project) -> None:
    process = start(project)
    process.send_signal(number)
    output, _ = process.communicate(timeout=SOON)
    assert not processes(project), "the ranks end before the launching process"
    assert process.returncode == code
    assert output.count(said) == 1
    assert "Traceback" not in output
    assert project.run.result["status"] == "interrupted"


@pytest.mark.slow
def test_ranks_end_after_the_launching_process_was_killed(project: Project) -> None:
    process = start(project)
    assert len(processes(project)) == 3
    process.kill()
    process.communicate()
    wait_for_none(project)
    assert project.run.result["status"] == "interrupted"


# Restarts. -----------------------------------------------------------------------------------------------------------


EPOCH = 8
"""Iterations in an epoch of the run below, on two ranks."""


def restarting(project: Project, *, at: int) -> list[str]:
    """Return the command line of a run whose rank 1 is killed once, before an iteration."""
    once = project.path / "once"
    return ["experiment=spirals", "engine.max_epochs=2", "engine.test=false", "data.loader.batch_size=64", TROUBLE,
            "default_hooks.checkpoint.asynchronous=false",  # so the epoch's checkpoint is complete before the kill
            "+hooks.trouble.what=kill", f"+hooks.trouble.once={once}", f"+hooks.trouble.at={at}"]  # fmt: skip


def restarted(project: Project, launcher: str, *line: str) -> Done:
    """Train on two ranks, which are restarted once."""
    if launcher == "ours":
        return project.train(*line, TWO, "distributed.max_restarts=1")
    return torchrun(project, "--nproc-per-node=2", "--max-restarts=1", "train.py", *line)


@pytest.mark.parametrize("launcher", [slow("ours"), nightly("torchrun's")])
def test_restarts_of_a_resumed_run_ignore_checkpoints_from_before(launcher: str, project: Project) -> None:
    line = [*restarting(project, at=2 * EPOCH + 1), "engine.max_epochs=3"]
    done = project.train(*[one for one in line if "trouble" not in one], TWO)
    assert done.code == 0, done.text
    run = project.run
    for path in run.path.glob("checkpoints/*.pth"):
        os.utime(path, (1, 1))  # long ago
    done = restarted(project, launcher, *line, f"resume={run.path}/checkpoints/epoch_1.pth")
    assert done.code == 0, done.text
    resumed = re.findall(r"resumed from .*checkpoints/(epoch_\d)\.pth, iteration (\d+)", run.log)
    assert resumed == [("epoch_1", str(EPOCH)), ("epoch_2", str(2 * EPOCH))]
    assert run.result["progress"]["iteration"] == 3 * EPOCH


@pytest.mark.nightly
def test_torchrun_restarts_a_single_process_from_its_newest_checkpoint(project: Project) -> None:
    line = restarting(project, at=2 * EPOCH + 1)
    done = torchrun(project, "--nproc-per-node=1", "--max-restarts=1", "train.py", *line, "+hooks.trouble.rank=0")
    assert done.code == 0, done.text
    run = project.run
    assert run.result["status"] == "finished"
    assert "checkpoints/epoch_1.pth, iteration" in run.log


LIBRARY = """
import atexit, ctypes, os, pathlib
from hydraloop.tasks import Classification as Task

def noted():
    pathlib.Path("noted").touch()

if os.environ.get("RANK") in RANKS:
    libc = ctypes.CDLL(None)
    getattr(libc, "__cxa_atexit")(libc.abort, None, None)  # as a thread does that outlives torch
    atexit.register(noted)
"""


@pytest.mark.parametrize("launcher", [nightly("ours"), nightly("torchrun's")])
def test_a_rank_that_has_finished_is_not_failed_by_a_library_that_is_unloaded(launcher: str, project: Project) -> None:
    """Python's own exit handlers are called. Rank 0 of torchrun belongs to the user's script."""
    project.write("my_project/library.py", LIBRARY.replace("RANKS", "('0', '1')" if launcher == "ours" else "('1',)"))
    done = restarted(project, launcher, *QUICK, "task._target_=my_project.library.Task", "hydra.run.dir=run")
    assert done.code == 0, done.text
    (project.path / "noted").unlink()
    if launcher == "ours":
        done = project.train("evaluate", "run", "split=val")
        assert done.code == 0, done.text
        (project.path / "noted").unlink()


@pytest.mark.nightly
def test_sixty_jobs_of_two_ranks(tmp_path: Path) -> None:
    for turn in range(20):
        project = Project.make(tmp_path / str(turn))
        done = project.train("-m", *QUICK, TWO, "seed=1,2,3")
        assert done.code == 0, done.text
        assert [job.result["status"] for job in project.jobs] == ["finished"] * 3
        assert not processes(project)
