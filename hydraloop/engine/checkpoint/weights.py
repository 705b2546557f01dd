"""Loads the weights of a checkpoint into the model of an engine, for good or for one evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.checkpoint.format import evaluation_weights
from hydraloop.engine.checkpoint.format import load as load_file
from hydraloop.engine.device.model_preparation import class_name
from hydraloop.engine.distributed.fsdp import shard_state
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def load_weights(engine: Engine, state: dict[str, Any], key: str) -> None:
    """Load weights; a missing or unknown tensor, or one of another shape, is an error that names it."""
    if engine.distributed.sharded:
        state = shard_state(state, engine.model.state_dict())
    try:
        engine.model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"the weights do not fit the model {class_name(engine.model)}: {error}",
            key=key,
            remedy="Use the model of that file, or start a new run with the entries that fit: init.checkpoint=… "
            "init.mismatched=skip.",
        ) from error


@contextmanager
def weights_of(engine: Engine, path: Path | None) -> Iterator[None]:
    """Give the model the evaluation weights of a checkpoint file, and restore its weights at the end."""
    if path is None:
        yield
        return
    engine.distributed.barrier()  # rank 0 may still be writing it
    checkpoint = load_file(path, key="test")
    own = {name: value.clone() for name, value in engine.model.state_dict().items()}
    try:
        load_weights(engine, evaluation_weights(checkpoint, engine.settings.weights), "test")
        engine.evaluating_checkpoint = path
        yield
    finally:
        engine.evaluating_checkpoint = None
        with torch.no_grad():
            engine.model.load_state_dict(own)
