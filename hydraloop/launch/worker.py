"""A script: one rank of a job that `elastic.launch` has started. Its argument is the job's folder.

It is started as a file, not as a module. Until it has set `sys.path` to the launching process's, it finds only the
standard library, so no other module can shadow one that the launching process would import.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from multiprocessing import spawn
from pathlib import Path


def main(folder: Path) -> int:
    """Train as the rank that the environment names. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback until there is something to close
    text = (folder / "job.json").read_text(encoding="utf-8")
    sys.path[:] = json.loads(text)["sys_path"]

    from hydraloop.launch import rank_log
    from hydraloop.launch.failure import Failure, Terminated, cause
    from hydraloop.launch.job import Job
    from hydraloop.launch.termination import TerminationHandler, leave
    from hydraloop.launch.training import train
    from hydraloop.run import lock
    from hydraloop.run.environment import set_command

    job, rank, attempt = Job.from_json(text), int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])  # attempt_<n>/<rank>/error.json
    earlier = error_file.parents[2].glob(f"attempt_{attempt - 1}/*/{error_file.name}")
    failures = [Failure.from_json(path.read_bytes()) for path in earlier]
    for failure in failures:
        if failure.kind == "mistake":  # a restart would only repeat it
            failure.write(error_file)
            return 1
    rank_log.configure(job, rank)
    if rank == 0:
        lock.join(Path(job.run_dir))
    if attempt > 0:
        job = job.restarted()
        found = cause(failures)
        reason = found.message if found is not None and found.kind == "error" else "a rank was killed"
        start = job.checkpoint or "the beginning"
        logging.getLogger("hydraloop.launch").warning("restart %d from %s, after a failure: %s", attempt, start, reason)

    def last(number: int) -> None:
        if not error_file.exists():
            Failure.of(Terminated(number), rank).write(error_file)

    def orphaned() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    handler = TerminationHandler(last, orphaned).start()
    if job.main:
        spawn.prepare(dict(job.main))
    set_command(job.command)
    failed = train(job, rank, handler)
    if failed is not None:
        failed.write(error_file)
        leave(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
