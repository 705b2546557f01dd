"""From the config to the optimizer of a run."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn, optim

from hydraloop.engine.distributed.fsdp import is_sharded
from hydraloop.errors import UserError
from hydraloop.safety import typed_options as typed
from hydraloop.safety.instantiate import instantiate

_FUSED_ON_SHARDS = frozenset({"Adam", "AdamW"})
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def resolve_fused(
    fused: Any, params: Iterable[Tensor], key: str = "optimizer.fused", *, optimizer: str = ""
) -> bool | None:
    """Whether the optimizer runs as one fused kernel.

    Args:
        fused: True, False, None (torch's own choice) or "auto": wherever it works, since it is the fastest: one call
            for all parameters, on the CPU as well.
        params: what it will train.
        key: the option's place in the config, for the error.
        optimizer: its class's name: on tensors in shards (FSDP2) torch has fused kernels for some only.

    Returns:
        The optimizer's own `fused`: True, or None, with which torch chooses between its other implementations.

    Raises:
        UserError: none of these values.
    """
    if fused is None or isinstance(fused, bool):
        return fused
    if fused != "auto":
        raise UserError(f"{fused!r} is unknown", key=key, remedy="Use auto, true, false or null.")
    params = list(params)
    if optimizer not in _FUSED_ON_SHARDS and any(is_sharded(param) for param in params):
        return None
    works = all(param.is_floating_point() and param.device.type in _FUSED_DEVICES for param in params)
    return True if works else None


def build_optimizer(cfg: DictConfig, model: nn.Module, task: nn.Module) -> optim.Optimizer:
    """Return the optimizer of the config, over all parameters of the task that require gradients.

    Args:
        cfg: the whole config.
        model: the part of the task that checkpoints save. All trained parameters must be in it.
        task: with the model.

    Raises:
        UserError: there is nothing to train, or an option of the optimizer; names the key.
    """
    parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("the model has no parameter to train", key="task.model", remedy="Unfreeze some, or check it.")
    saved = {id(parameter) for parameter in model.parameters()}
    outside = [
        name for name, parameter in task.named_parameters() if parameter.requires_grad and id(parameter) not in saved
    ]
    if outside:
        raise UserError(
            f"{', '.join(outside)} would be trained but not saved: checkpoints have task.model only",
            key="task",
            remedy="Move it into the model (a module around both), or set requires_grad=False.",
        )
    node = OmegaConf.create(cast(dict[Any, Any], OmegaConf.to_container(cfg.optimizer, resolve=True)))
    if "fused" in node:
        node.fused = resolve_fused(node.fused, parameters, optimizer=str(node._target_).rpartition(".")[2])
    factory = instantiate(node, "optimizer")
    if not isinstance(factory, functools.partial):
        raise UserError("must be built with the model's parameters", key="optimizer", remedy="Set _partial_: true.")
    try:
        optimizer = factory(parameters)
    except (ValueError, TypeError, IndexError) as error:
        if not str(node._target_).startswith("torch."):
            raise
        raise UserError(f"{factory.func.__name__} refuses its options: {error}", key="optimizer") from error
    if not isinstance(optimizer, optim.Optimizer):
        raise UserError(f"{type(optimizer).__name__} is not a torch optimizer", key="optimizer._target_")
    return optimizer


def optimizer_overrides(cfg: DictConfig) -> frozenset[str]:
    """Return the hyperparameters (`lr`) that were typed; they replace those of the checkpoint in a resumed run."""
    names = {key.split(".")[1] for key in typed.keys(cfg) if key.startswith("optimizer.")}
    return frozenset(name for name in names if not name.startswith("_"))
