"""Jobs that submitit runs: with its local executor, and with a stand-in for Slurm."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from hydraloop.errors import UserError
from hydraloop.run_files import environment
from hydraloop.sweeps.executors import submitit_executor
from hydraloop.sweeps.executors.executor import Ended, Request
from hydraloop.sweeps.executors.submitit_executor import SubmititExecutor
from tests.sweeps.executors import program
from tests.sweeps.executors.test_spawned import about, spawn
from tests.tracking.training import until

_SLURM = {
    "sbatch": """
n=$(( $(cat $D/last 2>/dev/null || echo 1000) + 1 )); echo $n > $D/last
for script; do :; done
cp "$script" $D/$n.sh
out=$(sed -n 's/^#SBATCH --output=//p' "$script" | sed "s/%j/$n/g;s/%t/0/g")
export SLURM_JOB_ID=$n SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NUM_NODES=1
setsid sh -c "trap '' TERM; sh $D/$n.sh >'$out' 2>&1; echo \\$? > $D/$n.code" </dev/null >/dev/null 2>&1 &
echo $! > $D/$n.pid
echo "Submitted batch job $n"
""",
    "srun": """
while [ "${1#-}" != "$1" ]; do case $1 in --output|--error) shift 2;; *) shift;; esac; done
exec "$@"
""",
    "scancel": "kill -TERM -- -$(cat $D/$1.pid)",
    "scontrol": "head -1 $D/$4.states; sed -i 1d $D/$4.states",
    "sacct": """
echo "JobID|State|NodeList"
for f in $D/*.pid; do
    n=$(basename $f .pid); state=RUNNING
    [ -f $D/$n.code ] && case $(cat $D/$n.code) in 0) state=COMPLETED;; *) state=FAILED;; esac
    echo "$n|$state|localhost"
done
""",
}
"""Stand-ins for Slurm's commands: sbatch starts a script in a session of its own."""


@pytest.fixture(autouse=True)
def _command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_command", ["python", str(program.__file__)])
    monkeypatch.setenv("PYTHONPATH", os.getcwd())


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the stand-in's scripts."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name, script in _SLURM.items():
        (folder / name).write_text(f"#!/bin/bash\nD={folder}\n{script}")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def run(executor: SubmititExecutor, sweep: Path, *lines: str) -> dict[int, int | None]:
    """Run jobs, of which one that sleeps is cancelled. Return their exit codes."""
    for number, line in enumerate(lines):
        executor.submit(Request(number, (line,), str(sweep / str(number))))
    codes: dict[int, int | None] = {}
    sleeping = [number for number, line in enumerate(lines) if line.startswith("sleep")]
    deadline = time.monotonic() + 60
    while len(codes) < len(lines):
        assert time.monotonic() < deadline
        codes |= {ended.number: ended.code for ended in executor.poll(0.5)}
        for number in [number for number in sleeping if (sweep / str(number) / "about.json").exists()]:
            executor.cancel(number, signal.SIGINT)
            sleeping.remove(number)
    executor.close()
    return codes


@pytest.mark.slow
def test_local_jobs_end_with_their_exit_codes(tmp_path: Path) -> None:
    executor = SubmititExecutor(spawn(tmp_path, {"OF_THE_JOB": "yes"}), {"cluster": "local", "timeout_min": 5})
    codes = run(executor, tmp_path, "exit=0", "exit=75", f"kill={signal.SIGKILL}", "sleep=60")
    assert codes == {0: 0, 1: 75, 2: -signal.SIGKILL, 3: 143}
    assert about(tmp_path / "0")["variables"]["OF_THE_JOB"] == "yes"
    assert (tmp_path / "0" / "job.log").read_text() == "lines: exit=0\n"


@pytest.mark.slow
def test_a_local_job_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    executor = SubmititExecutor(spawn(tmp_path), {"cluster": "local", "timeout_min": 5})
    executor.submit(Request(0, ("sleep=60",), str(tmp_path / "0")))
    until(lambda: (tmp_path / "0" / "about.json").exists())
    executor.cancel(0, signal.SIGKILL)
    until(lambda: [ended.code for ended in executor.poll(0.1)] == [-signal.SIGKILL])


@pytest.mark.nightly
def test_slurm_runs_jobs_and_cancels_one(tmp_path: Path, slurm: Path) -> None:
    options = {"timeout_min": 5, "slurm_partition": "gpu", "slurm_additional_parameters": {"nice": 3}}
    codes = run(SubmititExecutor(spawn(tmp_path), options), tmp_path, "exit=0", "exit=1", "sleep=60")
    assert codes == {0: 0, 1: 1, 2: 143}
    script = (slurm / "1001.sh").read_text()
    for line in ("--partition=gpu", "--signal=TERM@90", "--nice=3", "--time=5", "--job-name=hydraloop"):
        assert f"#SBATCH {line}\n" in script


@pytest.mark.slow
def test_a_job_that_a_user_has_cancelled_was_not_ended_by_slurm(tmp_path: Path, slurm: Path) -> None:
    """Slurm forgets a job after a while, as it has job 2."""
    for number, found in enumerate((["RUNNING"], ["COMPLETING", "CANCELLED"], [])):
        lines = [f"JobId={1001 + number} JobName=hydraloop JobState={state} Reason=None" for state in found]
        (slurm / f"{1001 + number}.states").write_text("\n".join(lines))
    executor = SubmititExecutor(spawn(tmp_path), {"timeout_min": 5})
    for number, line in enumerate(("exit=75", "exit=75", "exit=75", "exit=143")):
        executor.submit(Request(number, (line,), str(tmp_path / str(number))))
    ended: list[Ended] = []
    until(lambda: ended.extend(executor.poll(0.5)) or len(ended) == 4, 60.0)
    ended.sort(key=lambda end: end.number)
    assert ended == [Ended(0, 75, by_scheduler=True), Ended(1, 75), Ended(2, 75, by_scheduler=True), Ended(3, 143)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "local"}, "sweep.submitit.timeout_min: submitit would end each job after a few minutes"),
        ({"cluster": "debug", "timeout_min": 5}, "sweep.submitit.cluster: 'debug' is unknown"),
        ({"timeout_min": 5}, "sweep.executor: this machine has no Slurm"),
        ({"cluster": "local", "timeout_min": 5, "partition": "gpu"}, "sweep.submitit: Setting 'partition' is"),
    ],
)
def test_wrong_options_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError) as caught:
        SubmititExecutor(spawn(tmp_path), options)
    assert str(caught.value).startswith(message)


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submitit_executor, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"sweep.executor: .*\n  pip install submitit"):
        SubmititExecutor(spawn(tmp_path), {"timeout_min": 5})


def test_a_job_that_cannot_be_submitted_is_an_error(tmp_path: Path, slurm: Path) -> None:
    (slurm / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1\n")
    executor = SubmititExecutor(spawn(tmp_path), {"timeout_min": 5})
    with pytest.raises(UserError, match=r"job 0 could not be submitted: .*QOSMaxSubmit"):
        executor.submit(Request(0, (), str(tmp_path / "0")))
