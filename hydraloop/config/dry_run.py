"""What `--dry-run` and `--cfg job` print: the composed config, and the hooks in the order of their calls."""

from __future__ import annotations

import argparse

from omegaconf import DictConfig, OmegaConf

from hydraloop.config.checks import Draft, hydra_config
from hydraloop.config.hook_checks import slots_of
from hydraloop.engine.hook_order import by_mount_point, format_order
from hydraloop.errors import UserError
from hydraloop.files.config_yaml import masked_yaml
from hydraloop.files.terminal import print_json, show
from hydraloop.schemas.selected_hooks import notices


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


def show_config(draft: Draft, args: argparse.Namespace) -> None:
    """Print what `--cfg job` asks for: the composed config, with secrets masked.

    Raises:
        UserError: the command line is that of a sweep, or an interpolation does not resolve.
    """
    if args.multirun:
        raise UserError("a sweep has several configs", key="--cfg", remedy="Leave one of the flags out.")
    cfg, _ = _shown(draft.cfg)
    with hydra_config(draft.cfg):
        show(masked_yaml(cfg, resolve=args.resolve).rstrip())


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
