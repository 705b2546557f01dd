"""The texts of `--help` and `--dry-run`, from the schemas, the project's config folder and the composed config."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.arguments import no_json
from hydraloop.cli.compose import Composer
from hydraloop.cli.console import end_with_reader
from hydraloop.cli.help_topics import Topics
from hydraloop.engine.call_table import by_mount_point, format_order
from hydraloop.errors import printable
from hydraloop.hooks.shared.selected_hooks import notices
from hydraloop.plan import Draft
from hydraloop.run_files import environment
from hydraloop.run_files.config_yaml import masked_yaml
from hydraloop.run_files.output import print_json
from hydraloop.schemas.docs import field_docs, summary
from hydraloop.schemas.root import Config, InitConf
from hydraloop.schemas.sections import DistributedConf, EngineConf, SweepConf
from hydraloop.validate.hooks import slots_of

_OTHER_GROUPS = {
    "experiment": "Whole runs",
    "model": "The model, task.model",
    "search": "Spaces of searches, for -m",
}
_FLAGS = """\
Flags
  --dry-run        print the config and the order of hooks; train nothing
  -m               a sweep: one job for each combination of key=a,b,c
  --cfg job        print the composed config
  --pdb            open the debugger after an error
  --help NAME      a group, option or key: hooks, hooks.ema, optimizer.lr
"""
_EXAMPLES = """\
Examples
  {command} hooks=ema,profiler optimizer.lr=3e-3
  {command} -m optimizer.lr=1e-3,1e-2 seed=0,1,2
"""


def show(text: str) -> None:
    """Print a text, of which the reader may leave the rest (`| head`)."""
    end_with_reader()
    print(printable(text))


def show_plan(draft: Draft, *, as_json: bool) -> None:
    """Print what `--dry-run` prints."""
    if not as_json:
        show(format_plan(draft.cfg))
        return
    cfg, resolve = _shown(draft.cfg)
    slots = slots_of(draft.cfg)
    print_json(
        {
            "overrides": draft.overrides,
            "config": OmegaConf.to_container(cfg, resolve=resolve, enum_to_str=True),
            "hooks": {slot.name: slot.priority for slot in slots},
            "mount_points": {point: [slot.name for slot in found] for point, found in by_mount_point(slots).items()},
            "notices": notices(draft.cfg),
        },
    )


def _shown(cfg: DictConfig) -> tuple[DictConfig, bool]:
    """Return the config without the node `hydra`, and whether its interpolations resolve before the job."""
    shown = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return shown, "${hydra:" not in str(OmegaConf.to_container(shown))  # ${hydra:job.num} has no value yet


def format_plan(cfg: DictConfig) -> str:
    """Return what `--dry-run` prints: the composed config, and the hooks by mount point. No hook is imported."""
    shown, resolve = _shown(cfg)
    return "\n".join(
        [
            "# The composed config",
            masked_yaml(shown, resolve=resolve).rstrip(),
            "",
            "# Hooks by mount point, in the order they are called (priority)",
            format_order(slots_of(cfg)),
            *notices(cfg),
            "",
            "Nothing was trained or written. Leave --dry-run out to start.",
        ]
    )


def show_help(args: argparse.Namespace, composer: Composer, listing: str) -> None:
    """Print what `--help` prints.

    Args:
        args: the overrides are the names to explain, and those with which the config is composed.
        listing: the names of the commands for runs and sweeps.

    Raises:
        UserError: there is no such name, or --json.
    """
    if args.json:
        raise no_json()
    names = [word for word in args.overrides if "=" not in word and not word.startswith("~")]
    topics = Topics(composer, [word for word in args.overrides if word not in names])
    show(format_help(names, topics, " ".join(environment.command()), listing))


def format_help(names: Sequence[str], topics: Topics, command: str, commands: str) -> str:
    """Return the help text.

    Args:
        names: what to explain: groups, options and keys. Empty: one page about everything.
        command: as it is shown in the examples, `python train.py`.
        commands: the names of the commands for runs and sweeps.

    Raises:
        UserError: there is no such name.
    """
    pages = [topics.page(name) for name in names]
    return "\n\n".join([*(page.rstrip() for page in pages or [_overview(topics, command)]), commands])


def _overview(topics: Topics, command: str) -> str:
    """Return a page that fits on one screen."""
    lines = [f"usage: {command} [group=option …] [key=value …] [flags]", "", "Groups (--help hooks lists the options)"]
    docs = field_docs(Config) | _OTHER_GROUPS
    for group in topics.composer.groups():
        options = ", ".join(topics.composer.options(group))
        text = ": ".join(filter(None, [docs.get(group, "").partition("; a group")[0], options]))
        lines.append(f"  {group:<14} {textwrap.shorten(text, 62, placeholder=' …')}")
    sections = {"engine": EngineConf, "distributed": DistributedConf, "sweep": SweepConf, "init": InitConf}
    lines += ["", "Sections of keys (--help engine lists them)"]
    lines += [f"  {name:<14} {summary(schema)}" for name, schema in sections.items()]
    return "\n".join([*lines, "", _FLAGS, _EXAMPLES.format(command=command)])
