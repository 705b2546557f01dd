"""Runs jobs of a sweep, each in a fork, without a controller. Prints their exit codes as JSON.

`python job_program.py <plan as JSON>`, in a project. A step of the plan is a job, and what happens to its process, see
`prepare`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hydraloop.config.arguments import typed_keys
from hydraloop.config.checks import Draft
from hydraloop.config.compose import opened
from hydraloop.files import atomic, checkpoint_files
from hydraloop.files.error_reports import Reports
from hydraloop.files.result import Result
from hydraloop.launch.exit import exit_now
from hydraloop.launch.other_ranks import Peers
from hydraloop.launch.start import RunStarter
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.sweeps.axes import Axis
from hydraloop.sweeps.compose_jobs import GridComposer
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.job import SweepJob
from hydraloop.sweeps.sweep_directory import Description, Jobs, SweepDirectory


def kill(*arguments: Any, **options: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    raise AssertionError


def after(original: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    def both(*arguments: Any, **options: Any) -> Any:
        original(*arguments, **options)
        return then()

    return both


def after_checkpoint(then: Callable[[], Any]) -> Callable[..., None]:
    """Return `atomic.write_text`, and do something after the first checkpoint is complete."""
    original = atomic.write_text

    def write(path: Path, text: str, **options: Any) -> None:
        original(path, text, **options)
        if path.name == checkpoint_files.LAST:
            atomic.write_text = original
            then()

    return write


def prepare(when: str) -> None:
    """Prepare the death of this process, or let it do something else."""
    if when == "checkpoint":
        atomic.write_text = after_checkpoint(kill)
    elif when == "result":
        Result.write = after(Result.write, kill)  # type: ignore[method-assign]
    elif when == "start":
        RunStarter.train = kill  # type: ignore[method-assign]  # dies there
    elif when == "terminated":
        atomic.write_text = after_checkpoint(lambda: os.kill(os.getpid(), signal.SIGTERM))
    elif when == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def main(path: Path, lines: Sequence[str], axes: dict[str, list[str]], steps: list[Any]) -> None:
    with opened(Path("conf"), "config") as composer:
        sys.path.insert(0, os.getcwd())
        ALLOWLIST.trust_folder(Path.cwd())
        grid = GridComposer(composer, composer.compose_sweep(lines))
        constants = [Axis((line.partition("=")[0],), ((line,),)) for line in lines]
        swept = [Axis((key,), tuple((f"{key}={value}",) for value in values)) for key, values in axes.items()]
        listed = Jobs.of_axes([*constants, *swept])
        if (path / "sweep.json").exists():
            directory = SweepDirectory.load(path)
        else:
            description = Description("uid", 0.0, ("python",), (), {}, "${hydra.job.num}", listed, "seed", {})
            directory = SweepDirectory.create(path, description)
        draft = Draft(overrides=lines, cfg=grid.compose(listed.listed[0]), typed=typed_keys(lines))
        jobs = RunStarter(Reports(with_traceback=False), Peers())
        worker = SweepJob(path, draft, jobs, grid)
        codes, attempts = [], dict[int, int]()
        for number, *death in steps:
            folder = directory.folder(number)
            folder.mkdir(parents=True, exist_ok=True)
            attempt = attempts[number] = attempts.get(number, 0) + 1
            pid = os.fork()
            if pid == 0:
                for when in death:
                    prepare(when)
                request = Request(number, listed.listed[number], str(folder), str(path / str(number)), attempt)
                exit_now(worker.run(request))
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        print(json.dumps(codes))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    main(Path(given["path"]).absolute(), given["lines"], given["axes"], given["steps"])
