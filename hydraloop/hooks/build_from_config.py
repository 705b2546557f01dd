"""Build the hooks of a run from the config, with their order and error policies."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from hydraloop.engine.hook import Hook, OnError, check_hook
from hydraloop.engine.hook_order import Slot, slot_of
from hydraloop.errors import UserError
from hydraloop.safety.instantiate import as_callable, instantiate


def build_hooks(
    cfg: DictConfig, *, several: bool, given: Mapping[str, Hook] = MappingProxyType({})
) -> tuple[dict[str, Hook | None], list[Slot], dict[str, OnError]]:
    """Return the hooks by name, default hooks first, with their places in the order and their error policies.

    A hook that is null in the config is None, so that the engine does not add it.

    Args:
        cfg: the whole config, validated.
        several: whether the run has several ranks.
        given: finished hooks, in addition to those of the config.

    Raises:
        UserError: a hook, its options or its place in the order is wrong; names the key.
    """
    hooks: dict[str, Hook | None] = {}
    slots: list[Slot] = []
    on_errors: dict[str, OnError] = {}
    for group in ("default_hooks", "hooks"):
        for name, node in cfg[group].items():
            if node is None:
                hooks.setdefault(str(name), None)  # a hook of the other group may have its name
                continue
            hook, priority, on_error = _build_hook(node, f"{group}.{name}")
            hooks[str(name)], on_errors[str(name)] = hook, on_error
            slots.append(slot_of(str(name), hook, priority, is_default=group == "default_hooks"))
    for name, hook in given.items():
        key = f"hooks.{name}"
        if hooks.get(name) is not None:
            raise UserError(f"the config has a hook {name!r}, too", key=key, remedy="Give it another name.")
        if hook.key:
            problem = f"this {type(hook).__name__} has been given to an engine before, and has its state"
            raise UserError(problem, key=key, remedy="Make a new one for each engine.")
        hook.key, hooks[name], on_errors[name] = key, hook, hook.on_error
        slots.append(slot_of(name, hook, None, is_default=False))
    built = {name: hook for name, hook in hooks.items() if hook is not None}
    if several:
        _check_policies(built, on_errors)
    return hooks, slots, on_errors


def _build_hook(node: DictConfig, key: str) -> tuple[Hook, int | str | None, OnError]:
    """Return a hook, its priority (None: the default of its class) and its error policy."""
    options = cast(dict[Any, Any], OmegaConf.to_container(node, resolve=True))
    plain = OmegaConf.create({**options, "_convert_": "all"})  # here, so that `instantiate` makes no copy for it
    for option in getattr(OmegaConf.get_type(node), "functions", ()):
        if plain.get(option) is not None:
            plain[option] = as_callable(plain[option], f"{key}.{option}")
    priority, on_error = plain.pop("priority", None), plain.pop("on_error", None)
    hook: Hook = instantiate(plain, key)
    check_hook(hook, f"{key}._target_")
    hook.key = key
    return hook, priority, hook.on_error if on_error is None else on_error


def _check_policies(hooks: Mapping[str, Hook], on_errors: Mapping[str, OnError]) -> None:
    for name, hook in hooks.items():
        if hook.collective and on_errors[name] != "raise":
            raise UserError(
                "this hook communicates with the other ranks: if it failed on one rank, they would wait for it forever",
                key=f"{hook.key}.on_error",
                remedy="Use raise.",
            )
