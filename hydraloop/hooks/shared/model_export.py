"""Exports the model of a run as a graph (torch.export), which can be loaded without its code."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import logging
import platform
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from hydraloop.engine.checkpoint.format import EVALUATED, evaluation_weights
from hydraloop.engine.checkpoint.format import load as load_file
from hydraloop.engine.device.batch_transfer import leaves_of
from hydraloop.engine.engine import Engine
from hydraloop.run_files import atomic

log = logging.getLogger(__name__)

FOLDER, MODEL, DESCRIPTION = "export", "model.pt2", "model.json"
_SAMPLES = 2
"""Samples of the example: the fewest with which torch.export leaves the size of a batch open."""


class ModelExport:
    """Writes `export/model.pt2` and `export/model.json` in the run directory at the end of a run.

    The weights are those of the best checkpoint, else of the last one, averaged if there are averaged weights. The
    size of a batch stays open, all other sizes are those of the example.
    """

    def __init__(self) -> None:
        self._batch: Any = None

    def see(self, batch: Any) -> None:
        """Keep the first batch of training as the example."""
        if self._batch is None:
            self._batch = batch

    def write(self, engine: Engine, key: str) -> None:
        """Write the files, on rank 0. If that is not possible, warn with the reason; the run continues.

        Args:
            key: of the option, for the warning.
        """
        checkpoint = engine.checkpoints.last_checkpoint if engine.best is None else Path(engine.best.checkpoint)
        folder = engine.run_dir / FOLDER
        try:
            if self._batch is None or checkpoint is None:
                raise ValueError("there is no checkpoint (default_hooks.checkpoint) or no iteration was trained")
            folder.mkdir(exist_ok=True)
            for name in (DESCRIPTION, MODEL):  # of an earlier attempt
                (folder / name).unlink(missing_ok=True)
            program, description = _exported(engine, self._batch, checkpoint)
            torch.export.save(program, folder / MODEL)
            atomic.write_text(folder / DESCRIPTION, json.dumps(description) + "\n")  # last: it says that both exist
        except Exception as error:  # torch.export raises many kinds of errors
            reason = next(iter(str(error).strip().splitlines()), "")
            log.warning("%s: the model is not exported: %s: %s", key, type(error).__name__, reason)


class _Silent:
    """The engine for the copy of the task: `log_image` and the others log nothing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return (lambda *_, **__: None) if name.startswith("log_") else getattr(self._engine, name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch.export from printing the whole graph before it raises."""
    noisy = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        noisy.setLevel(level)


def _exported(engine: Engine, batch: Any, checkpoint: Path) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """Export a copy of the model on the CPU. Returns the graph and its description for trackers."""
    task = copy.deepcopy(engine.task, {id(engine): _Silent(engine)}).cpu().eval()
    task.model.load_state_dict(
        evaluation_weights(load_file(checkpoint, key="log_model", only=EVALUATED), engine.settings.weights)
    )
    program, arguments = graph_of(task.model, task.evaluate, batch)
    args, kwargs = program.example_inputs
    inputs = list(arguments.values())
    return program, {
        "inputs": _specs(inputs[0] if len(inputs) == 1 else arguments),
        "outputs": _specs(program.module()(*args, **kwargs)),
        "example": inputs[0].tolist() if len(inputs) == 1 and isinstance(inputs[0], Tensor) else None,
        "checkpoint": checkpoint.name,
        "iteration": engine.progress.iteration if engine.best is None else engine.best.iteration,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


@torch.no_grad()
def graph_of(
    model: nn.Module, call: Callable[[Any], Any], batch: Any
) -> tuple[torch.export.ExportedProgram, dict[str, Any]]:
    """Export a model as a graph. The size of a batch stays open, all other sizes are those of the example.

    Args:
        model: on the CPU, in eval mode.
        call: calls the model for a batch (`task.evaluate`).
        batch: the example.

    Returns:
        The graph, and the arguments of the model by name.

    Raises:
        Exception: any error of torch.export.
    """
    batch = tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, batch)
    args, kwargs = _example(model, call, batch)
    arguments = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    with _quiet():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=tree_map(_open_size, arguments))
    return program, arguments


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


def _specs(value: Any) -> list[dict[str, Any]] | None:
    """Return name, dtype and shape of each tensor; -1 is the number of samples. None: it is not known how to say it."""
    if isinstance(value, Tensor):
        sizes = list(value.shape)
        if sizes and sizes[0] == _SAMPLES:
            sizes[0] = -1
        return [{"dtype": str(value.dtype).removeprefix("torch."), "shape": sizes}]
    if isinstance(value, Mapping) and value and all(isinstance(one, Tensor) for one in value.values()):
        return [{"name": str(name), **spec} for name, one in value.items() for spec in _specs(one) or ()]
    return None
