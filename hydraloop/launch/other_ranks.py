"""The other ranks: they agree on the plan before they train, exchange failures, and find where a restart continues.

Each rank composes the config itself. Rank 0 makes the plan, and writes into the store that all ranks share where the
run is, what its `${now:}` and `${run_id:}` are, and a digest of each value of its config. The other ranks compare their
values. Secrets stay out of the store, because others on the network can read it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, read_write

from hydraloop.errors import PeerError, UserError
from hydraloop.files.checkpoint_to_resume import FindResumePoint, ResumePoint, newest_checkpoint
from hydraloop.files.config_yaml import flattened, resolved
from hydraloop.files.secrets import masked
from hydraloop.launch import start_ranks, torchrun
from hydraloop.launch.exit import Preempted, exit_before_unloading, exit_now
from hydraloop.launch.failure import Failure
from hydraloop.launch.plan import RunPlan, set_output_dir

_PLAN = "plan"
"""Key of this start in the store: the plan of rank 0; null if rank 0 has failed before."""
_CAUSE = "cause"
"""Key of this start: the first failure of a rank."""
_MISTAKE = "mistake"
"""Key of the run with its restarts: a user's mistake, which would be repeated."""
_RUN = "run"
"""Key of the run with its restarts: where it has started."""
_RESOLVED_BY_RANK_0 = ("now", "run_id")
"""Resolvers whose values the other ranks take from rank 0."""
_POLL = 0.02


class Peers:
    """The other ranks, as one of several ranks sees them. For a single process, most methods do nothing."""

    def __init__(self) -> None:
        self._has_plan = False
        """Whether this rank has sent or received the plan, or needs none."""
        self._has_reported = False
        """Whether this rank has reported its failure."""
        self._exit_at_end = exit_before_unloading() if torchrun.is_several() else None

    # Before the training. --------------------------------------------------------------------------------------------

    def send_plan(self, cfg: DictConfig, plan: RunPlan) -> RunPlan:
        """Send the plan to the other ranks, and wait until each has the same config. Called on rank 0.

        Args:
            cfg: of the plan, with the node `hydra`.

        Raises:
            UserError, RankError: another rank has another config, or an error.
        """
        if torchrun.is_launched():
            self.record_start(plan)
        if not torchrun.is_several():
            return plan
        set_output_dir(cfg, plan)
        digests = _digests(plan.cfg)
        caches = (OmegaConf.get_cache(cfg), OmegaConf.get_cache(plan.cfg))
        resolved_here = {
            name: [entry for cache in caches for entry in cache.get(name, {}).items()] for name in _RESOLVED_BY_RANK_0
        }
        store = torchrun.of_this_start(torchrun.connect())
        sent = {"run_dir": cfg.hydra.run.dir, "paths": plan.paths(), "resolved": resolved_here, "digests": digests}
        store.set(_PLAN, json.dumps(sent))
        self._has_plan = True
        others = [_agreement(rank) for rank in range(1, int(os.environ["WORLD_SIZE"]))]
        while not store.check(others):
            if store.check([_CAUSE]):
                raise Failure.from_json(store.get(_CAUSE)).error()
            time.sleep(_POLL)
        if torchrun.is_ours():
            start_ranks.StartedRun.write(plan)
        return plan

    def receive_plan(self, cfg: DictConfig, complete: Callable[[RunPlan], RunPlan]) -> RunPlan:
        """Wait for the plan of rank 0, and return it with the config of this rank.

        Args:
            cfg: with the node `hydra`.
            complete: adds to the plan what rank 0 does not send.

        Raises:
            PeerError: rank 0 has failed.
            UserError: this rank has another config.
        """
        store = torchrun.of_this_start(torchrun.connect())
        sent = json.loads(store.get(_PLAN))
        self._has_plan = True
        if sent is None:
            raise PeerError("rank 0 has no plan")
        plan = complete(RunPlan.from_paths(cfg, sent["paths"]))
        with read_write(cfg.hydra):
            cfg.hydra.run.dir = sent["run_dir"]  # as rank 0 has it: `paths` are absolute
        set_output_dir(cfg, plan)
        values = sent["resolved"]
        resolved_by_0 = {name: {tuple(key): value for key, value in values[name]} for name in _RESOLVED_BY_RANK_0}
        for config in (cfg, plan.cfg):
            OmegaConf.set_cache(config, {**OmegaConf.get_cache(config), **resolved_by_0})
        own = _digests(plan.cfg)
        of_rank_0 = sent["digests"]
        for key in {**of_rank_0, **own}:
            if own.get(key) != of_rank_0.get(key):
                raise UserError(
                    f"rank {torchrun.rank()} has another value than rank 0",
                    key=key,
                    remedy="Let config files, environment variables and resolvers give the same value on all machines.",
                )
        store.set(_agreement(torchrun.rank()), "")
        return plan

    def skip_plan(self) -> None:
        """Note that this rank needs no plan: its command trains nothing."""
        self._has_plan = True

    # Errors, and the end. --------------------------------------------------------------------------------------------

    def report_error(self, error: BaseException) -> None:
        """Report an error that ends this rank."""
        if torchrun.is_several() and not isinstance(error, Preempted):
            self.report_failure(Failure.of(error, torchrun.rank()))

    def report_failure(self, failure: Failure) -> None:
        """Report the failure of this rank: in torch's error file to the launcher, in the store to the other ranks.

        If rank 0 fails without a plan, it notifies the other ranks, which wait for the plan. If another rank fails
        first, it waits until rank 0 has a plan, because the launcher ends rank 0 as soon as this rank has ended.
        """
        if self._has_reported:
            return
        self._has_reported = True
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            failure.write(Path(file))
        with suppress(RuntimeError, OSError):  # the process that keeps the store has ended
            store = torchrun.connect()
            own = torchrun.of_this_start(store)
            if failure.kind in ("mistake", "error"):
                own.compare_set(_CAUSE, "", failure.to_json())
            if failure.kind == "mistake" and torchrun.keeps_store():
                store.set(_MISTAKE, failure.to_json())
            if self._has_plan:
                return
            if torchrun.rank() == 0:
                own.set(_PLAN, json.dumps(None))
            else:
                own.get(_PLAN)

    def exit(self, code: int) -> None:
        """End this rank. If another launcher has started the ranks, rank 0 returns to the user's script.

        Args:
            code: the exit code. If it is not 0, this process ends at once.
        """
        if code:
            exit_now(code)
        if torchrun.reports():
            return
        assert self._exit_at_end is not None
        self._exit_at_end(0)
        sys.exit(0)

    # Restarts. -------------------------------------------------------------------------------------------------------

    def check_restart(self) -> None:
        """End a restarted rank if an earlier start has ended by a mistake, which would repeat, or by a signal."""
        if torchrun.is_ours() and torchrun.rank() == 0:
            start_ranks.StartedRun.write()
        if not torchrun.attempt():
            return
        if start_ranks.is_stopped():
            exit_now(1)
        if torchrun.keeps_store() and (store := torchrun.connect()).check([_MISTAKE]):
            self._has_plan = True
            self.report_failure(Failure.from_json(store.get(_MISTAKE)))
            exit_now(1)

    def record_start(self, plan: RunPlan) -> None:
        """Write to the launcher's store where a run starts, unless an earlier start has written it."""
        if torchrun.keeps_store():
            content = json.dumps({"paths": plan.paths(), "known_checkpoints": list(plan.known_checkpoints)})
            torchrun.connect().compare_set(_RUN, "", content)

    def restart_point(self, resume: str | None) -> FindResumePoint | None:
        """Return a function that finds where a restarted run continues; None if this is its first start.

        Args:
            resume: of the config. With `auto`, a run that the store does not know continues like any other.

        Raises:
            UserError: the launcher has kept no store over the restart.
        """
        if not torchrun.attempt() or (resume == "auto" and not torchrun.keeps_store()):
            return None
        if not torchrun.keeps_store():
            remedy = "Use --rdzv-backend=c10d, or leave it out and continue the run with resume=auto."
            raise UserError("torchrun keeps no store for restarted ranks", key="--max-restarts", remedy=remedy)
        store = torchrun.connect()
        if not store.check([_RUN]):  # the ranks failed before there was a run, or the node with the store was lost
            return None
        first = json.loads(store.get(_RUN))
        plan = RunPlan.from_paths(OmegaConf.create(), first["paths"])

        def find(named: Path | None) -> ResumePoint:
            newest = newest_checkpoint(plan.run_dir, known=first["known_checkpoints"])
            return ResumePoint(plan.run_dir, newest or plan.checkpoint)

        return find


def _digests(cfg: DictConfig) -> dict[str, str]:
    """Return a digest of each resolved value, by its key. Secrets are masked."""
    values = flattened(masked(resolved(cfg)))
    return {key: hashlib.sha256(repr(value).encode()).hexdigest()[:16] for key, value in values.items()}


def _agreement(rank: int) -> str:
    return f"agreement-{rank}"
