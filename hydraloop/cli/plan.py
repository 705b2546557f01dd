"""The dry run: the composed config, and the hooks by mount point. Only schemas are read, no hook is imported."""

from __future__ import annotations

from omegaconf import DictConfig, OmegaConf

from hydraloop.engine.report.hook_table import format_order
from hydraloop.validate import slots_of


def format_plan(cfg: DictConfig) -> str:
    """Return what `--dry-run` prints."""
    shown = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
    waits_for_job = "${hydra:" in str(OmegaConf.to_container(shown))  # ${hydra:job.num} has no value yet
    return "\n".join(
        [
            "# The composed config",
            OmegaConf.to_yaml(shown, resolve=not waits_for_job).rstrip(),
            "",
            "# Hooks by mount point, in the order they are called (priority)",
            format_order(slots_of(cfg)),
            "",
            "Nothing was trained or written. Leave --dry-run out to start.",
        ]
    )
