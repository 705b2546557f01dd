"""`python -m hydraloop replay`: rebuilds a run at an iteration, and writes nothing into its directory."""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
from bdb import BdbQuit
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf

from hydraloop.builder import assemble
from hydraloop.cli.arguments import typed_keys
from hydraloop.cli.run_config import config_of
from hydraloop.commands.diff import described, records
from hydraloop.commands.on_ranks import RankCommand
from hydraloop.engine.checkpoint.format import load, peek
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import MOUNT_POINTS, Hook, Priority
from hydraloop.engine.loaders import share_of
from hydraloop.errors import Remedy, UserError, printable
from hydraloop.hooks.check_invalid_loss import samples_of
from hydraloop.hooks.checkpoint.hook import CheckpointHook
from hydraloop.hooks.grad_clip import GradClipHook, total_norm
from hydraloop.parts import Parts
from hydraloop.processes.checks import check_debugger
from hydraloop.run_files import attempts, changes
from hydraloop.run_files.checkpoint_files import candidates, first_intact
from hydraloop.run_files.config_yaml import loaded, plain
from hydraloop.run_files.environment import versions
from hydraloop.run_files.record_log import FILENAME, read_all
from hydraloop.run_files.run_directory import check_holds_run, checkpoint_folders
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.validate.config import validate
from hydraloop.validate.values import check_strategy

log = logging.getLogger(__name__)

_NEEDED = {"meta", "progress", "rng", "optimizer", "schedulers", "hooks"}
"""Entries of a checkpoint from which a run continues to the last bit."""


class _Saved(NamedTuple):
    """A checkpoint of a run."""

    iteration: int
    path: Path
    meta: Mapping[str, Any]


def _saved_in(folders: Sequence[Path]) -> list[_Saved]:
    """Return the run's checkpoints, the newest first, without those of a part that the run has given up.

    Their tensors are not verified.
    """
    found = list(_read(candidates(*folders)))
    newest = found[0].iteration if found else 0
    kept: list[_Saved] = []
    for one in sorted(found, key=lambda one: (one.meta["time"], one.iteration), reverse=True):
        if one.iteration <= newest:  # written before a `resume=` from an earlier file, if it is above
            kept.append(one)
            newest = one.iteration
    return kept


def _read(paths: Sequence[Path]) -> Iterator[_Saved]:
    for path in paths:
        try:
            saved = load(path, mmap=True, only=())
            if saved.keys() >= _NEEDED:
                yield _Saved(saved["progress"]["iteration"], path, saved["meta"])
        except UserError as error:
            log.warning("%s", error.problem)


class Replay(RankCommand):
    """A run that is to be rebuilt at an iteration, from the newest undamaged checkpoint before it.

    Args:
        args: of the command line: the directory `run`, and `pdb`, whether the debugger is opened before the iteration.
        given: `iteration`, its number from 1, as typed.
        overrides: changes of the run's config.

    Raises:
        UserError: a wrong argument, or a run that cannot be rebuilt from its directory.
    """

    def __init__(self, args: argparse.Namespace, given: Mapping[str, str], overrides: Sequence[str]) -> None:
        run_dir: Path = args.run
        iteration = given.get("iteration", "")
        if not iteration.isdecimal() or int(iteration) < 1:
            problem = f"{iteration!r} is not the number of an iteration"
            raise UserError(
                problem, key="iteration", remedy=Remedy("Write iteration=1 for the first one.", add=["iteration=1"])
            )
        ALLOWLIST.distrust(run_dir)
        check_holds_run(run_dir)
        self._run_dir, self._iteration, self._debug = run_dir, int(iteration), args.pdb
        saved = _saved_in(checkpoint_folders(run_dir))
        earlier = [one for one in saved if one.iteration < self._iteration]
        later = [one for one in saved if one.iteration >= self._iteration][-1:]
        intact = first_intact(one.path for one in earlier)
        self._start = next((one for one in earlier if one.path == intact), None)
        known = later or earlier[:1]
        # Of the process that trained the iteration, or of the one before.
        self._meta = meta = known[0].meta if known else {}
        if meta.get("given"):
            raise UserError(
                f"the run got {', '.join(meta['given'])} as objects from Python, which its config does not describe",
                key="run",
                remedy="Replay a run that was started from a config.",
            )
        # A later attempt may have changed the config.
        text = meta.get("config") if later and attempts.folders(run_dir) else None
        super().__init__(config_of(run_dir, overrides, lambda: meta, text), meta, overrides)
        self._set_options(overrides)
        if self._debug:
            check_debugger(self.cfg, is_sweep=False)
        log_of_run = read_all(run_dir / FILENAME)
        recorded = [one.iteration for one in log_of_run if one.mode == "train" and one.iteration >= self._iteration]
        self._end = min(recorded, default=self._iteration)
        begin = (0, "the beginning") if self._start is None else (self._start.iteration, self._start.path)
        self.source = f"from {begin[1]} (iteration {begin[0]}): {self._end - begin[0]} iterations to step"

    def _set_options(self, overrides: Sequence[str]) -> None:
        """Set the options that a replay determines."""
        cfg, typed = self.cfg, list(typed_keys(overrides))
        cfg.resume = cfg.engine.max_time = cfg.engine.pause_after = None
        cfg.engine.test = False
        cfg.engine.allow_nan = True  # the iteration may be the one at which the run has failed
        if self._start is not None:
            cfg.load_from = cfg.init.checkpoint = None
            before = changes.config_of(self._start.meta)
            typed += [change.key for change in changes.differences(before, plain(cfg))]  # when the run was resumed
        self._typed = typed

    def run(self, ranks: Distributed) -> str:
        """Step to the iteration, and on to the next record of the run; called on each rank. Returns JSON on rank 0.

        Raises:
            UserError: the run ends before the iteration.
        """
        cfg, start, iteration = self.cfg, self._start, self._iteration
        cfg.distributed.nproc_per_node = 1  # no processes are started
        if ranks.world_size == 1:
            cfg.distributed.strategy = "auto"
        validate(cfg)
        check_strategy(cfg.distributed.strategy, several=ranks.world_size > 1)
        end = ranks.from_main(self._end)  # the run may be writing records
        watch = (_Debugging if self._debug else _Watch)(iteration, end)
        with TemporaryDirectory(prefix="hydraloop-") as name:
            folder, parts = Path(ranks.from_main(name)), Parts(hooks={"replay": watch})
            _redirect(cfg.hooks, self._run_dir, folder)
            position = None if start is None else peek(start.path, key="run")
            checkpoint = None if start is None else start.path
            engine = assemble(cfg, ranks, folder, parts, self._typed, checkpoint=checkpoint, position=position)
            if iteration > engine.max_iters:
                problem = f"the run has only {engine.max_iters} iterations"
                raise UserError(problem, key="iteration", remedy=_at_most(engine.max_iters))
            self._leave_hooks_out(engine)
            try:
                engine.train()
            except BdbQuit:
                raise KeyboardInterrupt from None
            if not watch.found:
                why = f": {engine.requests.stop_reason}" if engine.requests.stop_reason else ""
                problem = f"the run ends at iteration {engine.progress.iteration}{why}"
                raise UserError(problem, key="iteration", remedy=_at_most(engine.progress.iteration))
            text = self._compared(engine, watch, folder) if ranks.is_main else ""
            self.differs = ranks.from_main(self.differs)
            return text

    def _leave_hooks_out(self, engine: Engine) -> None:
        """Do not call hooks that only observe or save; their states are still loaded."""
        for hook in engine.hooks.values():
            if isinstance(hook, CheckpointHook):
                hook.out_dir = None  # in the temporary directory, where nothing is saved
                hook.idle_points = frozenset(MOUNT_POINTS) - {"before_run"}
            elif type(hook).on_error != "raise":
                hook.idle_points = MOUNT_POINTS
        engine.calls.build()

    def _compared(self, engine: Engine, watch: _Watch, folder: Path) -> str:
        """Compare the records with those of the run. Returns JSON; prints the first difference."""
        recorded: dict[tuple[int, str], list[Mapping[str, Any]]] = defaultdict(list)
        for (iteration, mode, _), values in records(self._run_dir):
            recorded[iteration, mode].append(values)
        lines: list[str] = []
        compared, record = 0, None
        for (iteration, mode, _), values in records(folder):
            found = [list(changes.differences(old, values)) for old in recorded[iteration, mode]]
            if not found:  # made by a hook that is left out here
                continue
            closest = min(found, key=len)
            compared += 1
            if closest and not lines:
                first = ", ".join(map(described, closest[:3]))
                lines = [f"the records differ, first at iteration {iteration}, mode {mode}: {first}"]
            if (iteration, mode) == (watch.end, "train"):
                record = {"iteration": iteration, **values}
        if not lines and record is None and recorded[watch.end, "train"]:
            lines = [f"the run has a record of iteration {watch.end}, and the replay has none"]
        self.differs = bool(lines)
        if self.differs:
            lines += changes.code(self._meta.get("git") or {}, engine.checkpoints.git)
            lines += changes.packages(self._meta, {"versions": versions()})
        elif compared:
            lines = [f"{compared} records are equal to those of the run"]
        else:
            lines = ["the run has no record of these iterations"]
        print(printable("\n".join(lines)), file=sys.stderr)
        return json.dumps(plain({**watch.found, "record": record}))


def _redirect(hooks: DictConfig, run_dir: Path, folder: Path) -> None:
    """Let custom hooks that were given a path in the run directory write to another folder, also in a moved run."""
    old = [re.escape(json.dumps(str(run_dir.resolve()))[1:-1])]
    with suppress(KeyError, TypeError):  # a run that was started from Python
        file = run_dir / attempts.RECORDS / "hydra.yaml"
        runtime: Any = OmegaConf.select(loaded(file, file), "hydra.runtime") if file.exists() else None
        began_in = runtime["output_dir"], os.path.relpath(runtime["output_dir"], runtime["cwd"])
        absolute, relative = (re.escape(json.dumps(path)[1:-1]) for path in began_in)
        old += [absolute, rf'(?<=")(?:\./)?{relative}']
    inside = re.compile(rf"(?:{'|'.join(old)})(?![\w.-])")
    for name, node in cast(dict[str, Any], OmegaConf.to_container(hooks)).items():
        hooks[name] = json.loads(inside.sub(lambda _: json.dumps(str(folder))[1:-1], json.dumps(node)))


class _Watch(Hook):
    """Notes what happens in an iteration, and stops the run after a later one.

    Args:
        iteration: its number, from 1.
        end: the later one, or the same.
    """

    priority = Priority.HIGHEST
    collective = True

    def __init__(self, iteration: int, end: int) -> None:
        self.iteration, self.end = iteration, end
        self.found: dict[str, Any] = {}
        self._open = False  # whether the iteration has begun, and its optimizer step has not ended
        self._norm_type = 2.0

    def before_train(self, engine: Engine) -> None:
        """Let Ctrl-C end the command at once: nothing is saved."""
        engine.requests.ignore_signals()
        self._norm_type = next(
            (hook.norm_type for hook in engine.hooks.values() if isinstance(hook, GradClipHook)), 2.0
        )

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.progress.iteration + 1 == self.iteration and not self._open:
            self._open, self.found = True, {}

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Note the norm of the gradients, before any hook clips them."""
        if self._open:
            parameters = [parameter for group in engine.stepper.optimizer.param_groups for parameter in group["params"]]
            name = f"{engine.stepper.step}/grad_norm".lstrip("/")
            self.found[name] = float(whole(total_norm(parameters, self._norm_type)))

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        now = engine.progress.iteration
        if now == self.iteration:
            epoch = engine.progress.epoch
            share = share_of(engine.loaders.train)
            samples = samples_of(engine, epoch, batch_idx)
            if samples is not None and share is not None:
                samples = samples[: share(batch_idx)[0]]  # without a filler
            losses = {name: float(value) for name, value in outputs.items() if name.rpartition("/")[2] == "loss"}
            of_ranks = engine.distributed.gather({"samples": samples, **losses})
            place = {"iteration": now, "epoch": epoch + 1, "batch": batch_idx}
            self.found = {**place, "ranks": of_ranks, **self.found}
        self._open = self._open and not engine.stepper.window_closed
        if now == self.end:
            engine.requests.preempt("replay", agreed=True)  # no validation follows
            engine.checkpoints.save_nothing_more()


class _Debugging(_Watch):
    """Opens the debugger before the iteration. Hooks with this mount point may change batches."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        if engine.progress.iteration + 1 == self.iteration:
            breakpoint()


def _at_most(iteration: int) -> Remedy:
    return Remedy(f"Use iteration={iteration} or less.", add=[f"iteration={iteration}"])
