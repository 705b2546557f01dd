"""Runs batches of jobs of any Hydra program in the pool; what the Hydra plugins call.

Hydra waits for a whole batch, and its jobs have no states. So a sweep of another program cannot be resumed or detached.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.errors import HydraException
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from hydraloop.cli.compose import Composer
from hydraloop.errors import UserError
from hydraloop.run.result import describe
from hydraloop.sweeps.executors import gpus
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.executors.pool import PoolExecutor
from hydraloop.sweeps.grid import GridComposer

log = logging.getLogger(__name__)


class HydraJobError(HydraException):
    """Raised when the return value of a failed job is read. The job has printed its traceback."""


def composer(config: DictConfig) -> Callable[..., DictConfig]:
    """Return `GridComposer.compose` for the program that Hydra runs.

    Args:
        config: what Hydra has composed for the sweep.
    """
    return GridComposer(Composer(""), config).compose


class Batch:
    """Runs a batch of jobs of a Hydra program. As a `Worker`, it is what their processes run.

    Args:
        config: what Hydra has composed for the sweep.
        options: `max_workers`, `gpus` and `gpus_per_job`, as in `sweep.*`.
    """

    def __init__(
        self, context: HydraContext, task: TaskFunction, config: DictConfig, options: Mapping[str, Any]
    ) -> None:
        self._context, self._task, self._config = context, task, config
        self._compose = composer(config)
        self._shares = _shares(options)

    def launch(self, jobs: Sequence[Sequence[str]], first: int) -> list[JobReturn]:
        """Run the jobs, and wait for all.

        Args:
            jobs: the overrides of each.
            first: the number of the first job.
        """
        setup_globals()
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        log.info("Launching %d jobs, %d at a time", len(jobs), self._shares.workers)
        with tempfile.TemporaryDirectory() as folder:
            requests = [Request(number, tuple(lines), folder) for number, lines in enumerate(jobs, first)]
            codes = self._run_all(requests)
            return [self._returned(request, codes[request.number]) for request in requests]

    def prepare(self) -> None:
        """Do nothing: this process has imported the program already."""

    def run(self, request: Request) -> int:
        """Run a job as Hydra does, and write what it returns. Called in the job's process."""
        outcome: dict[str, Any] = {}
        try:
            done = run_job(
                hydra_context=self._context,
                task_function=self._task,
                config=self._compose(request.lines, number=request.number),
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
            )
            assert done.hydra_cfg is not None
            outcome["output_dir"] = done.hydra_cfg.hydra.runtime.output_dir
            outcome["working_dir"], outcome["task_name"] = done.working_dir, done.task_name
            outcome["value"] = _as_json(done.return_value)
        except BaseException as error:
            if not isinstance(error, UserError):
                sys.excepthook(*sys.exc_info())
            outcome["error"] = describe(error)
        _outcome(request).write_text(json.dumps(outcome), encoding="utf-8")
        return 0

    def _run_all(self, requests: Sequence[Request]) -> dict[int, int | None]:
        """Run the jobs. Returns the exit code of each."""
        waiting, codes = [*reversed(requests)], dict[int, int | None]()
        pool, shares = PoolExecutor(self), self._shares
        try:
            while len(codes) < len(requests):
                while waiting and len(requests) - len(waiting) - len(codes) < shares.workers:
                    request = waiting.pop()
                    given = None if shares.slots is None else shares.slots.take(request.number)
                    pool.submit(replace(request, gpus=given, threads=shares.threads))
                for ended in pool.poll(1.0):
                    codes[ended.number] = ended.code
                    if shares.slots is not None:
                        shares.slots.give(ended.number)
        except BaseException as error:
            _end(pool, getattr(error, "number", signal.SIGINT))
            raise
        finally:
            pool.close()
        return codes

    def _returned(self, request: Request, code: int | None) -> JobReturn:
        """Return what Hydra's own launcher returns for a job."""
        cfg = self._compose(request.lines, number=request.number)
        outcome: dict[str, Any] = {"error": f"its process ended with exit code {code}"}
        with suppress(OSError, ValueError):
            outcome = json.loads(_outcome(request).read_text(encoding="utf-8"))
        hydra_cfg = OmegaConf.masked_copy(cfg, "hydra")
        with open_dict(hydra_cfg), open_dict(cfg):
            del cfg["hydra"]
            if "output_dir" in outcome:
                hydra_cfg.hydra.runtime.output_dir = outcome["output_dir"]
        returned = JobReturn(
            overrides=list(hydra_cfg.hydra.overrides.task),
            cfg=cfg,
            hydra_cfg=hydra_cfg,
            working_dir=outcome.get("working_dir"),
            task_name=outcome.get("task_name"),
            status=JobStatus.FAILED if "error" in outcome else JobStatus.COMPLETED,
        )
        failure = HydraJobError(f"job {request.number} has failed: {outcome.get('error')}")
        returned.return_value = failure if "error" in outcome else outcome["value"]
        return returned


def _shares(options: Mapping[str, Any]) -> gpus.Shares:
    """Divide the machine among the jobs."""
    try:
        return gpus.shares(SimpleNamespace(executor="pool", **options))
    except UserError as error:
        raise HydraException(str(error).replace("sweep.", "hydra.launcher.")) from None


def _outcome(request: Request) -> Path:
    return Path(request.folder, f"{request.number}.json")


def _as_json(value: Any) -> Any:
    try:
        json.dumps(value)
    except TypeError:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise UserError(
            f"the job returned an object of {kind}",
            remedy="With the launcher pool, return None, a number, a text, or lists and mappings of these.",
        ) from None
    return value


def _end(pool: PoolExecutor, sign: signal.Signals) -> None:
    """End the jobs that are running. A second Ctrl-C kills them."""
    pool.close()  # an exception may have interrupted the exchange of messages
    try:
        for number in pool.running:
            pool.cancel(number, sign)
        while pool.running:
            pool.poll(1.0)
    except BaseException:
        for number in pool.running:
            pool.cancel(number, signal.SIGKILL)
        raise
