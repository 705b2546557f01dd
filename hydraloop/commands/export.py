"""`python train.py export`: the model of a run for use without hydraloop.

A file has its weights (safetensors), or its graph (pt2, onnx).
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Sequence
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
    program = _graph_of(task.model, task.predict, batch)
    if name == "pt2":
        with atomic.replacing(path) as unfinished, unfinished.open("wb") as file:
            torch.export.save(program, file)
        return
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of each package that it could support
    with warnings.catch_warnings(action="ignore"):  # about torch's own code
        exported: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
    exported.save(path)  # weights above 2 GB are in a file next to it


@torch.no_grad()
def _graph_of(model: nn.Module, call: Callable[[Any], Any], batch: Any) -> torch.export.ExportedProgram:
    """Export a model as a graph. The size of a batch stays open, all other sizes are those of the example.

    Args:
        model: on the CPU, in eval mode.
        call: calls the model for a batch (`task.evaluate`).
        batch: the example.

    Returns:
        The graph.

    Raises:
        Exception: any error of torch.export.
    """
    args, kwargs = _example(model, call, to_cpu(batch))
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    logging.getLogger("torch.fx.experimental.symbolic_shapes").setLevel(logging.ERROR)
    with redirect_stderr(io.StringIO()):  # torch.export prints the whole graph before it raises
        return torch.export.export(model, args, kwargs, dynamic_shapes=tree_map(_open_size, arguments))


def _example(model: nn.Module, call: Callable[[Any], Any], batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with which the task calls its model, for the first samples of a batch."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    call(batch)
    handle.remove()
    if not calls:
        raise ValueError(f"the task's {call.__name__} does not call its model")
    samples = next(leaf.size(0) for leaf in leaves_of(calls[0]) if isinstance(leaf, Tensor) and leaf.ndim)
    args, kwargs = tree_map(
        lambda leaf: (
            leaf[:_SAMPLES].clone() if isinstance(leaf, Tensor) and leaf.ndim and leaf.size(0) == samples else leaf
        ),
        calls[0],
    )
    return args, kwargs


def _open_size(leaf: Any) -> dict[int, Any] | None:
    """Return which size of an argument torch.export leaves open: the number of samples, if there are two or more."""
    return {0: torch.export.Dim.AUTO} if isinstance(leaf, Tensor) and leaf.ndim and leaf.size(0) == _SAMPLES else None
