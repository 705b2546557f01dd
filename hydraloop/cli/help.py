"""The texts of `--help` and `--dry-run`, from the schemas, the project's config folder and the composed config."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.compose import Composer
from hydraloop.cli.console import end_with_reader
from hydraloop.engine.report.hook_table import format_order
from hydraloop.hooks.shared.selected_hooks import notices
from hydraloop.schemas import stored
from hydraloop.schemas.data import LoaderConf
from hydraloop.schemas.distributed import DistributedConf, FSDPConf
from hydraloop.schemas.docs import field_docs, summary
from hydraloop.schemas.engine import EngineConf
from hydraloop.schemas.optimizer import _Optimizer
from hydraloop.schemas.root import Config, InitConf
from hydraloop.schemas.scheduler import _Schedule
from hydraloop.validate import slots_of

_WIDTH = 110
_SELECTION = re.compile(r"`\S+=\S+`(?:: |, (?=the default))")
"""Begins the summary of an option: `data=digits`. The help lists it under its group."""

_HEAD = """\
hydraloop trains a PyTorch model from a config.

usage: {command} [group=option …] [key=value …] [flags]
"""

_FLAGS = """\
Flags
  --dry-run             print the composed config and the order of hooks; trains nothing, imports no torch
  --pdb                 after an error of a run, open Python's debugger where it was raised (single process)
  --trusted-links       resume a run or a sweep whose directory has links that lead out of it
  -m, --multirun        a sweep: one job for each combination of the values in key=a,b,c
  --cfg job             print the composed config (--resolve: with interpolations resolved)
  -cn, -cp, -cd NAME    another primary config, another config folder, an additional one
  --hydra-help          Hydra's own flags (completion, --info, …)
  HYDRA_FULL_ERROR=1    in the environment: errors are shown with their traceback
"""

_EXAMPLES = """\
Examples
  {command}                                                  the default: a CNN on handwritten digits
  {command} hooks=ema,profiler                               both hooks, one run
  {command} 'hooks=[ema]' hooks.ema.priority=HIGH            a priority by name; a number from 0 to 100 works too
  {command} default_hooks.checkpoint.interval=5 '~default_hooks.logger'
  {command} +hooks.mine._target_=my_project.hooks.MyHook +hooks.mine.priority=30
  {command} experiment=diabetes optimizer.lr=3e-3
  {command} experiment=char_lm precision=bf16 engine.accumulate=2
  {command} distributed.nproc_per_node=2                     two processes; torchrun works too
  {command} -m optimizer.lr=1e-3,1e-2 'hooks=[],[ema]'       a sweep: 4 jobs
  {command} resume outputs/<run> engine.max_epochs=30        continue a run with its options
"""


def show(text: str) -> None:
    """Print a text, of which the reader may leave the rest (`| head`)."""
    end_with_reader()
    print(text)


def format_plan(cfg: DictConfig) -> str:
    """Return what `--dry-run` prints: the composed config, and the hooks by mount point. No hook is imported."""
    shown = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    waits_for_job = "${hydra:" in str(OmegaConf.to_container(shown))  # ${hydra:job.num} has no value yet
    return "\n".join(
        [
            "# The composed config",
            OmegaConf.to_yaml(shown, resolve=not waits_for_job).rstrip(),
            "",
            "# Hooks by mount point, in the order they are called (priority)",
            format_order(slots_of(cfg)),
            *notices(cfg),
            "",
            "Nothing was trained or written. Leave --dry-run out to start.",
        ]
    )


def format_help(composer: Composer, command: str, commands: str) -> str:
    """Return the help text.

    Args:
        command: as it is shown in the examples, `python train.py`.
        commands: the list of commands for runs and sweeps.
    """
    parts = [
        _HEAD.format(command=command),
        _FLAGS,
        _groups(composer),
        _options("Options", Config, skip=("task", "data", "optimizer", "scheduler", "precision")),
        _options("Options of the engine (engine.max_epochs=…)", EngineConf),
        _options("Options of the loaders (data.loader.batch_size=128; data.val_loader for one of them)", LoaderConf),
        _options("Options of every optimizer (optimizer.layer_decay=0.75)", _Optimizer, skip=("_partial_",)),
        _options("Options of every schedule (scheduler.cosine.begin=100)", _Schedule),
        _options("Options of several processes (distributed.nproc_per_node=2)", DistributedConf),
        _options("Options of FSDP2 (distributed.fsdp.wrap=[Block])", FSDPConf),
        _options("Weights to start a part of the model from (init.checkpoint=…)", InitConf),
        _EXAMPLES.format(command=command),
        commands,
    ]
    return "\n".join(parts).rstrip()


def _groups(composer: Composer) -> str:
    lines = ["Groups (group=option; hooks, default_hooks and scheduler take a list)"]
    for group in sorted(composer.groups()):
        described = {option: _SELECTION.sub("", summary(schema)) for option, schema in stored(group)}
        lines.append(f"  {group}")
        lines.extend(
            _row(option, described.get(option, "from the config folder"), indent=4, column=20)
            for option in composer.options(group)
        )
    return "\n".join(lines) + "\n"


def _options(title: str, schema: type, skip: Sequence[str] = ()) -> str:
    docs = field_docs(schema)
    lines = [title]
    lines.extend(
        _row(f"{entry.name}={_default(entry)}", docs[entry.name], indent=2, column=30)
        for entry in dataclasses.fields(schema)
        if entry.name in docs and entry.name not in skip
    )
    return "\n".join(lines) + "\n"


def _default(entry: dataclasses.Field[Any]) -> str:
    if entry.default is dataclasses.MISSING:
        return "…"
    return {"None": "null", "True": "true", "False": "false"}.get(str(entry.default), str(entry.default))


def _row(name: str, text: str, *, indent: int, column: int) -> str:
    head = f"{'':{indent}}{name:<{column}} "
    return textwrap.fill(text, _WIDTH, initial_indent=head, subsequent_indent=" " * (indent + column + 1))
