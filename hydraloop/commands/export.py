"""`python train.py export`: the model of a run for use without hydraloop.

A file has its weights (safetensors), or its graph (pt2, onnx).
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import logging
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hydraloop.commands.evaluate import FinishedRun, new_file, run_on_ranks
from hydraloop.commands.parser import OnRun
from hydraloop.engine.batch_transfer import leaves_of, to_cpu
from hydraloop.engine.checkpoint.format import load
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import sets_of
from hydraloop.errors import UserError, use_one_of
from hydraloop.files import atomic
from hydraloop.hooks.checkpoint_copies import write_safetensors
from hydraloop.launch.other_ranks import Peers
from hydraloop.schemas.data import SPLITS
from hydraloop.tasks.task import Task

_FORMATS = ("safetensors", "pt2", "onnx")
_SAMPLES = 2
"""Samples of the example, which is in the file: the fewest with which torch.export leaves the size of a batch open."""


def run(typed: OnRun, argv: Sequence[str], peers: Peers) -> None:
    """Write the model to a file, in one process, and print the path of the file.

    Raises:
        UserError: an unknown format, a file that exists, or a model that the format cannot have.
        BaseException: as of `run_on_ranks`.
    """
    name = typed.own.get("format", "")
    if name not in _FORMATS:
        problem = f"{name!r} is not a format" if name else "it needs a format"
        raise UserError(problem, key="format", remedy=use_one_of([f"format={known}" for known in _FORMATS]))
    if name == "onnx" and importlib.util.find_spec("onnxscript") is None:
        remedy = "Install them: pip install onnx onnxscript"
        raise UserError("onnx needs onnx and onnxscript", key="format", remedy=remedy)
    output = new_file(typed, f"model.{name}")
    run_on_ranks(typed, partial(export, name, output), argv, peers, processes=1)


def export(name: str, output: Path, finished: FinishedRun, ranks: Distributed) -> str:
    """Write the file in a format. Returns its path."""
    finished.cfg.engine.compile = False
    if name == "safetensors":
        _write_weights(finished.engine(ranks), finished.found.file, output)
        return str(output)
    splits = [split for split in ("val", "test", "train") if finished.cfg.data.get(split) is not None]
    engine = finished.engine(ranks, *splits[:1])
    try:
        _write_graph(engine, name, output)
    except (UserError, OSError):
        raise
    except Exception as error:  # torch's exporters raise many kinds of errors
        reason = next(iter(str(error).strip().splitlines()), "")
        problem = f"{type(engine.model).__name__} cannot be exported: {type(error).__name__}: {reason}"
        remedy = "Change the model so that torch.export takes it, or write its weights: format=safetensors."
        raise UserError(problem, key="format", remedy=remedy) from error
    return str(output)


def _write_weights(engine: Engine, checkpoint: Path, path: Path) -> None:
    meta = load(checkpoint, key="checkpoint", mmap=True, only=()).get("meta", {})
    # The weights are the averaged ones, if there are any.
    facts = {fact: value for fact, value in meta.items() if fact != "averaged_weights"}
    facts["published_from"] = checkpoint.name
    obstacle = write_safetensors(path, engine.model.state_dict(), facts, like=checkpoint)
    if obstacle is not None:
        raise UserError(f"safetensors cannot have these weights: {obstacle}", key="format", remedy="Use format=pt2.")


def _write_graph(engine: Engine, name: str, path: Path) -> None:
    """Write the graph of the model. Its example is the first batch of the engine's data."""
    loaders = (loader for split in SPLITS for loader in sets_of(getattr(engine.loaders, split)).values())
    batch = next((batch for loader in loaders for batch in islice(loader, 1)), None)
    if batch is None:
        remedy = "Give data.test a data set, or use format=safetensors."
        raise UserError(f"{name} needs a batch as an example, and the run has no data", key="data", remedy=remedy)
    task = engine.task.cpu().eval()
    program = _graph_of(task, batch)
    if name == "pt2":
        with atomic.replacing(path) as unfinished, unfinished.open("wb") as file:
            torch.export.save(program, file)
        return
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of each package that it could support
    with warnings.catch_warnings(action="ignore"):  # about torch's own code
        exported: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
    exported.save(path)  # weights above 2 GB are in a file next to it


@torch.no_grad()
def _graph_of(task: Task, batch: Any) -> torch.export.ExportedProgram:
    """Export the task's model as a graph. The number of samples stays open, all other sizes are those of the example.

    A list with an entry for each target, such as images of different sizes, keeps its length and all its sizes.

    Args:
        task: on the CPU, in eval mode.
        batch: the example.

    Returns:
        The graph.

    Raises:
        Exception: any error of torch.export.
    """
    passed_args, passed_kwargs = _arguments(task, to_cpu(batch))
    targets: Any = batch[1] if isinstance(batch, tuple | list) and len(batch) > 1 else None
    has_length = isinstance(targets, tuple | list) or (isinstance(targets, Tensor) and targets.ndim > 0)
    tensors = (one for one in leaves_of((passed_args, passed_kwargs)) if isinstance(one, Tensor) and one.ndim)
    samples, cut = next(tensors).size(0), set[int]()

    def first_samples(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.size(0) != samples:
            return leaf
        leaf = leaf[:_SAMPLES].clone()
        cut.add(id(leaf))
        return leaf

    def shortened(argument: Any) -> Any:
        is_of_samples = has_length and isinstance(argument, tuple | list) and len(argument) == len(targets)
        return argument if is_of_samples else tree_map(first_samples, argument)

    def open_size(leaf: Any) -> dict[int, Any] | None:
        return {0: torch.export.Dim.AUTO} if id(leaf) in cut and leaf.size(0) == _SAMPLES else None

    args = tuple(map(shortened, passed_args))
    kwargs = {name: shortened(argument) for name, argument in passed_kwargs.items()}
    arguments = inspect.signature(task.model.forward).bind(*args, **kwargs).arguments
    logging.getLogger("torch.fx.experimental.symbolic_shapes").setLevel(logging.ERROR)
    with redirect_stderr(io.StringIO()):  # torch.export prints the whole graph before it raises
        return torch.export.export(task.model, args, kwargs, dynamic_shapes=tree_map(open_size, arguments))


def _arguments(task: Task, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the task calls its model for a batch."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs))

    handle = task.model.register_forward_pre_hook(note, with_kwargs=True)
    task.predict(batch)
    handle.remove()
    if not calls:
        raise ValueError("the task's predict does not call its model")
    return calls[0]
