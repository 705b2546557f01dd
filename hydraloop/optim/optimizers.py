"""What an optimizer's options mean on the machine at hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hydraloop.engine.distributed.fsdp import is_sharded
from hydraloop.errors import UserError

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
