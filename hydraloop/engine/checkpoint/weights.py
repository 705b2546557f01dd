"""Loads the weights of a checkpoint, and the own state of a task, for good or for one evaluation.

Also loads states by name. A missing or unknown one is an error, or a warning with `resume_strict=false`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.engine.checkpoint.format import EVALUATED, Checkpoint, evaluation_weights
from hydraloop.engine.checkpoint.format import load as load_file
from hydraloop.engine.distributed.fsdp import shard_state
from hydraloop.engine.model_preparation import class_name
from hydraloop.engine.run_parts import Run
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


def load_weights(run: Run, state: dict[str, Any], key: str) -> None:
    """Load weights; a missing or unknown tensor, or one of another shape, is an error that names it."""
    if run.ranks.sharded:
        state = shard_state(state, run.model.state_dict())
    try:
        run.model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"the weights do not fit the model {class_name(run.model)}: {error}",
            key=key,
            remedy="Use the model of that file, or a file of this model. A new run can take the entries that fit: "
            "init.checkpoint=… init.mismatched=skip, with init.prefix=model. for names that begin with model.",
        ) from error


def own_state(task: nn.Module) -> dict[str, Any]:
    """Return the state of a task without that of its model: a queue, a teacher, the class weights of the loss."""
    model: dict[str, Any] = task.model.state_dict(keep_vars=True)  # type: ignore[union-attr]  # as Run.model
    of_model = {id(value) for value in model.values()}  # the task may also hold a part of the model
    return {
        name: value.detach() if isinstance(value, Tensor) else value
        for name, value in task.state_dict(keep_vars=True).items()
        if not name.startswith("model.") and id(value) not in of_model
    }


def load_own_state(run: Run, checkpoint: Checkpoint) -> None:
    """Load the own state of the task. If the file has none, as a published one, the task keeps what it has.

    Raises:
        UserError: an entry is missing or unknown (with `resume_strict`).
        RuntimeError: of torch, an entry has another shape.
    """
    task: nn.Module = run.task
    own, state = own_state(task), checkpoint.get("task")
    if state is None:
        if own:
            log.warning("task: the checkpoint has no state of %s; it stays as it was built", ", ".join(list(own)[:3]))
        return
    check_names("task", own, state, run.settings.resume_strict)
    task.load_state_dict({name: value for name, value in state.items() if name in own}, strict=False)


def load_for_evaluation(run: Run, checkpoint: Checkpoint, key: str) -> None:
    """Give a run what an evaluation needs of a checkpoint: the weights, averaged or raw, and the task's own state.

    Args:
        key: the option that named the file, for the error.

    Raises:
        UserError: the file does not fit the model or the task.
    """
    load_weights(run, evaluation_weights(checkpoint, run.settings.weights), key)
    if "state_dict" in checkpoint:  # otherwise it is a state dict
        load_own_state(run, checkpoint)


@contextmanager
def weights_of(run: Run, path: Path | None) -> Iterator[None]:
    """Load a checkpoint file for an evaluation in the body, and restore the state of the task at the end."""
    if path is None:
        yield
        return
    run.ranks.barrier()  # rank 0 may still be writing it
    checkpoint = load_file(path, key="test", mmap=True, ranks=run.ranks, only=EVALUATED)
    model, own = (_copied(state) for state in (run.model.state_dict(), own_state(run.task)))
    try:
        load_for_evaluation(run, checkpoint, "test")
        yield
    finally:
        with torch.no_grad():
            run.model.load_state_dict(model)
            run.task.load_state_dict(own, strict=False)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, Tensor) else deepcopy(value) for name, value in state.items()}


def load_named(entry: str, targets: dict[str, Any], states: dict[str, Any], strict: bool) -> None:
    """Load each state into the target of its name; with `strict` the names must be the same."""
    check_names(entry, targets, states, strict)
    for name, target in targets.items():
        if name in states:
            target.load_state_dict(states[name])


def check_names(entry: str, targets: dict[str, Any], states: dict[str, Any], strict: bool) -> None:
    """Refuse names that only one of both has, or warn of them."""
    for name in targets.keys() - states.keys():
        differs(strict, f"{entry}.{name}", "the checkpoint has no state of it", "Leave it out, or set")
    for name in states.keys() - targets.keys():
        problem = "the checkpoint has its state, but this run does not use it"
        differs(strict, f"{entry}.{name}", problem, "Repeat the options of the resumed run, or set")


def differs(strict: bool, key: str, problem: str, remedy: str) -> None:
    """Raise the problem, or warn of it.

    Raises:
        UserError: with `strict`.
    """
    if strict:
        raise UserError(problem, key=key, remedy=f"{remedy} resume_strict=false to continue without that state.")
    log.warning("%s: %s; continuing without that state (resume_strict=false)", key, problem)
