"""The lr that decays by layer: the factor of each parameter's lr, from its depth in the model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from hydraloop.errors import UserError


def lr_scales(
    model: nn.Module, decay: float, layers_of: Callable[[nn.Module], Any] | None, key: str
) -> dict[Any, float]:
    """Return the factor of each parameter's lr: 1 after the last layer, times `decay` for each layer before it.

    Parameters before the first layer (embeddings) are a layer, and those after the last one (the head), too.

    Args:
        model: with layers.
        decay: above 0, up to 1.
        layers_of: returns the model's layers from input to output; None: those of a model of timm or transformers.
        key: of the optimizer in the config, for errors.

    Raises:
        UserError: the model does not list its layers.

    Source: K. Clark et al., ELECTRA, 2020; the depths of timm's models are those of `timm.optim`.
    """
    depths = _depths(model, layers_of, key)
    deepest = max(depths.values(), default=0)
    return {parameter: decay ** (deepest - depth) for parameter, depth in depths.items()}


def _depths(model: nn.Module, layers_of: Callable[[nn.Module], Any] | None, key: str) -> dict[nn.Parameter, int]:
    if layers_of is None and hasattr(type(model), "group_matcher"):
        return _of_timm(model)
    layers = list(_of_transformers(model, key) if layers_of is None else layers_of(model))
    inside: dict[nn.Parameter, int] = {}
    for depth, layer in enumerate(layers, start=1):
        for parameter in layer.parameters():
            inside.setdefault(parameter, depth)
    depths: dict[nn.Parameter, int] = {}
    depth = 0
    for parameter in model.parameters():  # a tied parameter comes at its first name
        if parameter in inside:
            depth = len(layers) + 1  # of those after this, outside of layers
        depths[parameter] = inside.get(parameter, depth)
    return depths


def _of_timm(model: Any) -> dict[nn.Parameter, int]:
    """Return the depths that timm's own layer decay uses."""
    names: dict[str, int] = sys.modules["timm.models"].group_parameters(  # the model has imported timm
        model, model.group_matcher(coarse=False), reverse=True
    )
    return {parameter: names[name] for name, parameter in model.named_parameters()}


def _of_transformers(model: Any, key: str) -> nn.ModuleList:
    """Return the only list of `config.num_hidden_layers` modules of a model of transformers."""
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == count]
    if len(found) != 1:
        raise UserError(
            f"{type(model).__name__} does not list its layers" + (f", but {len(found)} lists" if found else ""),
            key=f"{key}.layer_decay",
            remedy=f"Set {key}.layers_of._target_ to a function of the model that returns its layers, from input to "
            "output: return list(model.blocks)",
        )
    return found[0]
