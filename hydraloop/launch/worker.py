"""A script: one rank of a job that `elastic.launch` has started. Its argument is the job's folder.

Started as a file, not as a module: then only what the launching process could import is found, in its order, once
`sys.path` is its own (until then, the standard library is).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from multiprocessing import spawn
from pathlib import Path


def main(folder: Path) -> int:
    """Train as the rank that the environment names. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a traceback, until there is something to close
    text = (folder / "job.json").read_text(encoding="utf-8")
    given = json.loads(text)
    sys.path[:] = given["sys_path"]

    from hydraloop.launch import rank_files as files
    from hydraloop.launch import rank_log
    from hydraloop.launch.job import Job
    from hydraloop.launch.outcome import Outcome, Terminated
    from hydraloop.launch.termination import Ending, leave
    from hydraloop.launch.training import train
    from hydraloop.run import lock

    job, rank, attempt = Job.from_json(text), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if any(outcome.kind == "mistake" for outcome in files.outcomes(folder)):  # each attempt would find it again
        return 1
    rank_log.configure(job, rank)
    if rank == 0:
        lock.join(Path(job.run_dir))
    if attempt > 0:
        job = files.restarted(job, files.outcomes(folder, attempt - 1), attempt)

    def last(number: int) -> None:
        if not files.path_of(folder, attempt, rank).exists():
            files.put(folder, attempt, Outcome.of(Terminated(number), rank))

    def orphaned() -> None:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)

    ending = Ending(last=last, orphaned=orphaned).start()
    if job.main:
        spawn.prepare(dict(job.main))
    elif job.script is not None:
        sys.modules["__main__"].__file__ = job.script
    outcome = train(job, rank, ending)
    with contextlib.suppress(FileNotFoundError):  # the launching process has gone
        files.put(folder, attempt, outcome)
    if outcome.kind == "done":
        return 0
    leave(1)
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
