"""`python train.py export`: the model of a run for use without hydraloop.

A file has its weights (safetensors), or its graph (pt2, onnx).
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hydraloop.commands.evaluate import FinishedRunCommand, check_output
from hydraloop.commands.parser import OnRun
from hydraloop.engine.batch_transfer import leaves_of
from hydraloop.engine.checkpoint.format import load
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import sets_of
from hydraloop.errors import UserError, any_of
from hydraloop.files import atomic
from hydraloop.hooks.checkpoint_copies import write_safetensors
from hydraloop.schemas.data import SPLITS

_KEY = "format"
_FORMATS = ("safetensors", "pt2", "onnx")
_ONNX = ("onnx", "onnxscript")
"""Packages that torch.onnx needs."""
_SAMPLES = 2
"""Samples of the example: the fewest with which torch.export leaves the size of a batch open."""


class Export(FinishedRunCommand):
    """Writes the model to a file, in one process."""

    def __init__(self, typed: OnRun) -> None:
        self._format = typed.own.get("format", "")
        if self._format not in _FORMATS:
            problem = f"{self._format!r} is not a format" if self._format else "it needs a format"
            raise UserError(problem, key=_KEY, remedy=f"Use {any_of([f'format={name}' for name in _FORMATS])}.")
        missing = [name for name in _ONNX if self._format == "onnx" and importlib.util.find_spec(name) is None]
        if missing:
            remedy = f"Install it: {' '.join(['pip', 'install', *missing])}"
            raise UserError(f"onnx needs {' and '.join(missing)}", key=_KEY, remedy=remedy)
        self._output = Path(typed.own.get("output", f"model.{self._format}"))
        check_output(self._output)
        super().__init__(typed)
        self.cfg.distributed.nproc_per_node = 1
        self.cfg.engine.compile = False

    def run(self, ranks: Distributed) -> str:
        """Write the file. Returns its path."""
        found = [split for split in ("val", "test", "train") if self.cfg.data.get(split) is not None]
        engine = self.engine(ranks, *(found[:1] if self._format != "safetensors" else ()))
        write(engine, self.found.file, self._format, self._output)
        return str(self._output)


def write(engine: Engine, checkpoint: Path, name: str, path: Path) -> None:
    """Write the model of an engine.

    Args:
        engine: with the weights loaded. For a graph, with the loader of one split, whose first batch is the example.
        checkpoint: the file that the weights are from.
        name: of the format.
        path: the file.

    Raises:
        UserError: the model cannot be exported in this format, or the file cannot be written.
    """
    if name == "safetensors":
        with _writing(path):
            _write_weights(engine, checkpoint, path)
        return
    program = _graph(engine, name)
    with _refusing(f"{name} cannot have this model"), _writing(path):
        if name == "onnx":
            _write_onnx(program, path)
        else:
            with atomic.replacing(path) as unfinished, unfinished.open("wb") as file:
                torch.export.save(program, file)


def _write_onnx(program: torch.export.ExportedProgram, path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns of each package that it could support
    with warnings.catch_warnings(action="ignore"):  # about torch's own code
        exported: Any = torch.onnx.export(program, (), dynamo=True, verbose=False)
    exported.save(path)  # weights above 2 GB are in a file next to it


def _write_weights(engine: Engine, checkpoint: Path, path: Path) -> None:
    meta = load(checkpoint, key="checkpoint", mmap=True, only=()).get("meta", {})
    # The weights are the averaged ones, if there are any.
    facts = {fact: value for fact, value in meta.items() if fact != "averaged_weights"}
    facts["published_from"] = checkpoint.name
    obstacle = write_safetensors(path, engine.model.state_dict(), facts, like=checkpoint)
    if obstacle is not None:
        raise UserError(f"safetensors cannot have these weights: {obstacle}", key=_KEY, remedy="Use format=pt2.")


def _graph(engine: Engine, name: str) -> torch.export.ExportedProgram:
    loaders = (loader for split in SPLITS for loader in sets_of(getattr(engine.loaders, split)).values())
    batch = next((batch for loader in loaders for batch in islice(loader, 1)), None)
    if batch is None:
        raise UserError(
            f"{name} needs a batch as an example, and the data of the run has none",
            key="data",
            remedy="Give data.test a data set, or use format=safetensors.",
        )
    task = engine.task.cpu().eval()
    with _refusing(f"{type(task.model).__name__} cannot be exported as a graph"):
        return _graph_of(task.model, task.predict, batch)


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
    batch = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch)
    args, kwargs = _example(model, call, batch)
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    with _quiet():
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


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch.export from printing the whole graph before it raises."""
    noisy = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        noisy.setLevel(level)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror}" if error.strerror else str(error)
        raise UserError(problem, key="output", remedy="Name another file: output=…") from error


@contextmanager
def _refusing(problem: str) -> Iterator[None]:
    """Raise each error of torch's exporters, of which there are many kinds, as one message."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        raise UserError(
            f"{problem}: {type(error).__name__}: {reason}",
            key=_KEY,
            remedy="Change the model so that torch.export takes it, or write its weights: format=safetensors.",
        ) from error
