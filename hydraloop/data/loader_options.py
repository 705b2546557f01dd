"""The options of a loader: from the config, and for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from omegaconf import DictConfig

from hydraloop.engine.device.batch_transfer import has_streams
from hydraloop.engine.worker_signals import QuietWorker
from hydraloop.safety.instantiate import instantiate, instantiate_callable
from hydraloop.schemas.data import loader_options

_FUNCTIONS, _SAMPLERS = ("collate_fn", "worker_init_fn"), ("sampler", "batch_sampler")
_OF_WORKERS = ("prefetch_factor", "timeout", "multiprocessing_context")


def dataloader_options(options: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Return the options of torch's DataLoader; those of workers only if there are some.

    Args:
        options: of a loader.
        device: to which the batches will be copied.
    """
    pin_memory, workers = options["pin_memory"], options["num_workers"]
    if pin_memory == "auto":
        pin_memory = device is not None and has_streams(device)
    found: dict[str, Any] = {"num_workers": workers, "pin_memory": pin_memory}
    if workers:
        found |= {name: options[name] for name in _OF_WORKERS}
        found["worker_init_fn"] = QuietWorker(options["worker_init_fn"])
    return found


def options_from_config(data: DictConfig, split: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of a split's loader, with its functions and objects, and the key that sets each option.

    Raises:
        UserError: an option is unknown or cannot be built; names its key.
    """
    values, keys = loader_options(data, split)
    for name in _FUNCTIONS:
        if values[name] is not None:
            values[name] = instantiate_callable(values[name], keys[name])
    for name in _SAMPLERS:
        if values[name] is not None:
            values[name] = instantiate(values[name], keys[name])
    context = values["multiprocessing_context"]
    if isinstance(context, DictConfig):
        values["multiprocessing_context"] = instantiate(context, keys["multiprocessing_context"])
    return values, keys
