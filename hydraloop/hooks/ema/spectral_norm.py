"""Spectral norm in an averaged model: its vectors are found for the averaged weights, not averaged or copied."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm  # torch has no public name for what spectral_norm registers
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

_ITERATIONS = 15
"""Power iterations for new weights; torch does as many when it normalises a weight for the first time."""


def vectors(model: nn.Module) -> Iterator[Tensor]:
    """Yield the vectors of spectral norm in a model, which are buffers: two for each normalised weight."""
    for module in model.modules():
        if isinstance(module, _SpectralNorm):
            yield from module.buffers()
        for hook in _hooks(module):
            yield from (getattr(module, f"{hook.name}_u"), getattr(module, f"{hook.name}_v"))


@torch.no_grad()
def find_vectors(model: nn.Module) -> None:
    """Replace the vectors by those of the current weights, in place. A training step only moves them towards these."""
    for module in model.modules():
        if isinstance(module, ParametrizationList) and any(isinstance(one, _SpectralNorm) for one in module):
            mode = module.training
            module.train()
            for _ in range(_ITERATIONS):
                module()
            module.train(mode)
        for hook in _hooks(module):
            for _ in range(_ITERATIONS):
                hook.compute_weight(module, do_power_iteration=True)


def _hooks(module: nn.Module) -> list[SpectralNorm]:
    """Return the hooks of torch's older spectral_norm, for which torch has no public accessor."""
    return [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, SpectralNorm)]
