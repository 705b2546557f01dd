"""All checks of a config from which a run is built, in their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hydraloop.config.hook_checks import check_hooks, slots_of
from hydraloop.config.key_checks import check_interpolations, check_keys
from hydraloop.config.target_checks import check_data, check_targets
from hydraloop.config.value_checks import check_values
from hydraloop.engine.call_table import check_order, not_applied
from hydraloop.schemas.selected_hooks import HOOK_GROUPS, has_schedules, is_left_out


def validate(cfg: DictConfig, *, trains: bool = False) -> None:
    """Refuse a config from which no run can be built.

    Args:
        cfg: as composed, with or without the node `hydra`. It is not changed.
        trains: whether the run is to be trained, by the config alone, so that it needs training data.
    """
    check_keys(cfg)
    with hydra_config(cfg) if "hydra" in cfg else nullcontext():
        check_interpolations(cfg)
        check_values(cfg)
        check_data(cfg, trains=trains)
        check_targets(cfg, trains=trains)
        check_hooks(cfg)
        if trains and has_schedules(cfg) and is_left_out(cfg, "param_scheduler"):
            raise not_applied()
        groups = {str(name): group for group in HOOK_GROUPS for name in cfg[group]}
        check_order(slots_of(cfg), key_of=lambda name: f"{groups.get(name, 'default_hooks')}.{name}")


@contextmanager
def hydra_config(cfg: DictConfig) -> Iterator[None]:
    """In the body, interpolations of `${hydra:…}` resolve. `cfg` has the node `hydra`."""
    before = HydraConfig.instance().cfg  # of a surrounding job
    HydraConfig.instance().cfg = cast(Any, cfg)  # `set_config` would copy the node, which takes 3 ms
    try:
        yield
    finally:
        HydraConfig.instance().cfg = before
