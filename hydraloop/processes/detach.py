"""`detach=true`: the command returns, and the run or the sweep continues without the terminal."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydraloop import json_answers
from hydraloop.errors import UserError
from hydraloop.platforms import signals
from hydraloop.processes import torchrun
from hydraloop.run_files.environment import shown
from hydraloop.run_files.output import print_to

CONTROLLER_LOG = "controller.log"
"""What a detached controller has printed, in the directory of the sweep."""
RUN_LOG = "output.log"
"""What a detached run has printed, in its directory."""
_SIGNALS = signals("SIGINT", "SIGTERM", "SIGHUP")


@dataclass
class Detached:
    """The process in the background. It prints to the terminal until `log_to`, and the command waits until `ready`."""

    pipe: int
    """To the command."""

    def log_to(self, log: Path) -> None:
        """Send the output of this process, and of those that it starts, to a file. Called before a process is forked.

        If this process ends before it is ready, the command prints what is added to the file.
        """
        self._tell(log=str(log), offset=print_to(log))
        json_answers.leave()

    def take_over(self, run_dir: Path) -> None:
        """Continue a single run, whose directory is locked."""
        self.log_to(run_dir / RUN_LOG)
        self.ready(run_dir)

    def ready(self, directory: Path) -> None:
        """Let the command return, since the directory tells all that it could."""
        self._tell(ready=str(directory))
        os.close(self.pipe)

    def _tell(self, **message: Any) -> None:
        with suppress(BrokenPipeError):  # the command was killed, which ends nothing
            os.write(self.pipe, json.dumps(message).encode() + b"\n")


def detached() -> Detached:
    """Continue in the background: return in a new process only, which has its own session and no terminal as input.

    This process waits until the new one is ready, prints how to look at it, and exits. If the new one ends before,
    this one exits with the same code. Ctrl-C and SIGTERM end both until then. Nothing may be locked yet.

    Raises:
        UserError: the new process would be ended soon.
    """
    if "SLURM_JOB_ID" in os.environ:
        raise UserError(
            "the processes of an allocation end with its script, so a run cannot continue without it",
            key="detach",
            remedy="Submit the command without detach=true to sbatch; or type it outside of the allocation.",
        )
    if torchrun.is_several():
        raise UserError(
            "torchrun waits for its processes, and ends with them",
            key="detach",
            remedy="Let the command start the ranks: python train.py detach=true distributed.nproc_per_node=2",
        )
    reads, writes = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until both processes handle them
    with warnings.catch_warnings(action="ignore"):  # threads of numpy, which survive a fork
        pid = os.fork()
    if pid:
        os.close(writes)
        _wait(pid, reads, mask)
    os.close(reads)
    os.setsid()
    for number, handler in handlers.items():  # `termination` resets its own in every fork
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return Detached(writes)


def _wait(pid: int, reads: int, mask: Iterable[int]) -> NoReturn:
    """Wait until the process in the background is ready or has ended, and exit."""
    written: dict[str, Any] = {}
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with os.fdopen(reads, encoding="utf-8") as pipe:
            for line in pipe:  # a process that the new one has forked keeps the pipe open: do not wait for its end
                written |= json.loads(line)
                if "ready" in written:
                    how = f"continues in the background, as process {pid}"
                    print_commands(Path(written["ready"]), how, "status", "attach", "logs -f", "stop")
                    if json_answers.asked():
                        json_answers.write("detach", {"directory": written["ready"], "process": pid})
                    sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    if "log" in written:
        with open(written["log"], encoding="utf-8", errors="replace") as log:
            log.seek(written["offset"])
            shutil.copyfileobj(log, sys.stderr)
        json_answers.write_error(RuntimeError("the process in the background has ended"))
    else:
        json_answers.hand_over()
    sys.exit(code if code >= 0 else 128 - code)


def print_commands(path: Path, how: str, *commands: str) -> None:
    """Print how a run or a sweep in a directory continues, and the commands for it."""
    directory = shlex.quote(shown(path))
    print(f"{directory} {how}")
    for command in commands:
        print(f"  python -m hydraloop {command} {directory}")
