"""A script: one rank of a job that `elastic.launch` has started, with its folder and the ID of that process.

It is started as a file, not as a module. Until it has set `sys.path` to the launching process's, it finds only the
standard library, so no other module can shadow one that the launching process would import.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path


def main(folder: Path, launcher: int) -> None:
    """Train as the rank that the environment names, then end this process."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback until there is something to close
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    threads = max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"]))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # otherwise each rank would use all cores
    private = json.loads(os.environ.pop("HYDRALOOP_PRIVATE"))
    sys.path[:] = private["sys_path"]

    from hydraloop.processes.unloading import leave_before_unloading

    finished = leave_before_unloading()

    from hydraloop.errors import Terminated
    from hydraloop.plan import RunPlan
    from hydraloop.processes import rank_log, torchrun
    from hydraloop.processes.failure import DONE, Failure
    from hydraloop.processes.private import Private
    from hydraloop.processes.rank_training import train
    from hydraloop.processes.termination_signals import TerminationHandler, leave
    from hydraloop.run_files import lock
    from hydraloop.run_files.environment import set_command
    from hydraloop.run_files.output import replace_unencodable

    torchrun.keep_quiet()
    replace_unencodable()
    rank = int(os.environ["RANK"])
    plan = Private(**private).added_to(RunPlan.from_json((folder / "plan.json").read_text(encoding="utf-8")))
    error_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
    rank_log.configure(plan, rank)
    if rank == 0:
        lock.join(plan.run_dir)

    def last(number: int) -> None:
        if not error_file.exists():
            Failure.of(Terminated(number), rank).write(error_file)

    def orphaned() -> None:
        shutil.rmtree(folder, ignore_errors=True)

    handler = TerminationHandler(last, orphaned, parent=launcher).start()
    set_command(private["command"])
    failed = train(plan, rank, handler)
    if failed is not None:
        failed.write(error_file)
        leave(1)
    with contextlib.suppress(FileNotFoundError):  # the launching process has ended
        error_file.with_name(DONE).touch()
    finished(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
