"""The dry run: what would be trained, and the hooks by mount point, from schemas alone."""

from __future__ import annotations

from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.arguments import HOOK_GROUPS
from hydraloop.engine.hook import Priority
from hydraloop.engine.hook_order import Slot, check_order, in_order
from hydraloop.engine.report.hook_table import format_order


def slots_of(cfg: DictConfig) -> list[Slot]:
    """The hooks' places in the order, from the config and the schemas' ClassVars; no hook is imported."""
    schemas = _schemas_by_target()
    slots = []
    for group in HOOK_GROUPS:
        for name, node in cfg[group].items():
            if node is None:
                continue
            schema = schemas.get(str(node.get("_target_")))
            own = node.get("priority")
            default = getattr(schema, "default_priority", Priority.NORMAL)
            slots.append(
                Slot(
                    name=str(name),
                    priority=Priority.of(default if own is None else own, key=f"{group}.{name}.priority"),
                    is_default=group == "default_hooks",
                    runs_after=tuple(getattr(schema, "runs_after", ())),
                    mount_points=getattr(schema, "mount_points", None),
                )
            )
    return in_order(slots)


def check_plan(cfg: DictConfig) -> None:
    """Refuse an order that breaks a `runs_after`, unless `engine.check_order=false`.

    Raises:
        UserError: names both hooks.
    """
    if cfg.engine.check_order:
        groups = {str(name): group for group in HOOK_GROUPS for name in cfg[group]}
        check_order(slots_of(cfg), key_of=lambda name: f"{groups[name]}.{name}")


def format_plan(cfg: DictConfig) -> str:
    """What `--dry-run` prints."""
    shown = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    return "\n".join(
        [
            "# The composed config",
            _yaml(shown),
            "",
            "# Hooks by mount point, in the order they are called (priority)",
            format_order(slots_of(cfg)),
            "",
            "Nothing was trained and nothing written. Leave --dry-run out to start.",
        ]
    )


def _yaml(cfg: DictConfig) -> str:
    """The config, interpolations resolved; as they are where one waits for the job (`${hydra:job.num}`)."""
    text = OmegaConf.to_yaml(cfg)
    return (text if "${hydra:" in text else OmegaConf.to_yaml(cfg, resolve=True)).rstrip()


def _schemas_by_target() -> dict[str, Any]:
    """From `_target_` to the dataclass stored for it, over both hook groups."""
    found: dict[str, Any] = {}
    for group in HOOK_GROUPS:
        for entry in ConfigStore.instance().repo.get(group, {}).values():
            schema = OmegaConf.get_type(entry.node)
            if schema is not None and schema is not dict and "_target_" in entry.node:
                found[str(entry.node._target_)] = schema
    return found
