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
from hydraloop.schemas.optimizer import _Optimizer

_FUSED_ON_SHARDS = frozenset({"Adam", "AdamW"})
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})


def resolve_fused(
    fused: Any, params: Iterable[Tensor], key: str = "optimizer.fused", *, optimizer: str = ""
) -> bool | None:
    """Return the `fused` argument of the optimizer: whether one kernel updates all parameters.

    Args:
        fused: True, False or None (torch chooses), which are returned; or "auto".
        params: the parameters to train.
        key: the option's key in the config, for the error.
        optimizer: name of its class. For sharded parameters (FSDP2), torch has fused kernels only for some classes.

    Returns:
        For "auto", True if the fused kernel works, on CPUs too, because it is the fastest; otherwise None.

    Raises:
        UserError: another value.
    """
    if fused is None or isinstance(fused, bool):
        return fused
    if fused != "auto":
        raise UserError(f"cannot be {fused!r}", key=key, remedy="Use auto, true, false or null.")
    params = list(params)
    if optimizer not in _FUSED_ON_SHARDS and any(is_sharded(param) for param in params):
        return None
    works = all(param.is_floating_point() and param.device.type in _FUSED_DEVICES for param in params)
    return True if works else None


def build_optimizer(cfg: DictConfig, model: nn.Module, task: nn.Module) -> optim.Optimizer:
    """Return the optimizer of the config, for all parameters of the task that require gradients.

    Args:
        cfg: the whole config.
        model: the part of the task that checkpoints save. It must contain all trained parameters.
        task: the task, which contains the model.

    Raises:
        UserError: there is nothing to train, a trained parameter is not saved, or an option is wrong.
    """
    parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
    if not parameters:
        raise UserError("the model has no parameter to train", key="task.model", remedy="Unfreeze a part of it.")
    saved = {id(parameter) for parameter in model.parameters()}
    outside = [
        name for name, parameter in task.named_parameters() if parameter.requires_grad and id(parameter) not in saved
    ]
    if outside:
        raise UserError(
            f"{', '.join(outside)} would be trained but not saved, because checkpoints contain only task.model",
            key="task",
            remedy="Move it into the model, or set requires_grad=False.",
        )
    node = OmegaConf.create(cast(dict[Any, Any], OmegaConf.to_container(cfg.optimizer, resolve=True)))
    if "fused" in node:
        node.fused = resolve_fused(node.fused, parameters, optimizer=str(node._target_).rpartition(".")[2])
    for option in _Optimizer.OWN:
        node.pop(option, None)
    factory = instantiate(node, "optimizer")
    if not isinstance(factory, functools.partial):
        raise UserError("needs the model's parameters", key="optimizer", remedy="Set optimizer._partial_=true.")
    try:
        optimizer = factory(parameters)
    except (ValueError, TypeError, IndexError) as error:
        if not str(node._target_).startswith("torch."):
            raise
        raise UserError(f"{factory.func.__name__} refuses its options: {error}", key="optimizer") from error
    if not isinstance(optimizer, optim.Optimizer):
        raise UserError(
            f"{type(optimizer).__name__} is not an optimizer",
            key="optimizer._target_",
            remedy="Use a subclass of torch.optim.Optimizer.",
        )
    return optimizer


def nodes(node: DictConfig) -> dict[str, DictConfig]:
    """Return the optimizers of `cfg.optimizer` by name; the name of a single one is empty."""
    return {"": node} if "_target_" in node else {str(name): one for name, one in node.items()}


def optimizer_overrides(cfg: DictConfig) -> frozenset[str]:
    """Return the hyperparameters (`lr`) that were typed, which in a resumed run replace those of the checkpoint."""
    names = {key.split(".")[1] for key in typed.keys(cfg) if key.startswith("optimizer.")}
    return frozenset(name for name in names if not name.startswith("_"))
