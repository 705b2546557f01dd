"""Checks of a training on one batch: the loss falls, and every parameter has a gradient."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.commands.check.data import cross_entropy_of
from hydraloop.commands.check.findings import Finding
from hydraloop.commands.check.short_runs import Project, Watch
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.engine.device.batch_transfer import leaves_of
from hydraloop.engine.device.seeding import seed_everything
from hydraloop.engine.engine import Engine

_ITERATIONS = 60
_SECONDS = 30.0
_FALL = 0.05
"""The part of the first loss by which the loss falls at least."""
_SHOWN = 4
"""Names of parameters in a message."""


def on_one_batch(project: Project, engine: Engine, folder: Path) -> tuple[Engine, Watch]:
    """Train on the first samples again and again; of a stream, on its first batch.

    Args:
        engine: with the data of the project.
    """
    watch, batch = Watch(seconds=_SECONDS), None
    changes: dict[str, Any] = {
        "scheduler": {},
        "engine.max_iters": _ITERATIONS,
        "engine.val_by_epoch": False,
        "engine.val_interval": _ITERATIONS,
    }
    if isinstance(engine.loaders.train, GlobalBatchLoader):
        changes["engine.overfit_batches"] = 1
    else:
        batch = next(iter(engine.loaders.train or ()))
    trained = project.engine(folder, watch, changes, batch=batch)
    trained.train()
    return trained, watch


def loss(base: Engine, engine: Engine, watch: Watch) -> Finding:
    """Judge whether the loss of one batch falls.

    Args:
        base: an engine of the project that has not trained.
        engine: the one that has trained on the batch, with what `watch` has seen.
    """
    if engine.task.steps:
        return Finding("not judged", f"{type(engine.task).__name__} has several losses, which work against each other")
    if _draws(base):
        text = "the loss of the same batch and weights is another one each time, as in reinforcement learning"
        return Finding("not judged", text)
    first = watch.losses[0]
    count = min(5, len(watch.losses))
    means = [sum(watch.losses[at : at + count]) / count for at in range(len(watch.losses) - count + 1)]
    text = f"{first:.4g} → {min(means):.4g} in {len(watch.losses)} iterations on one batch"
    falls = min(means) <= first - _FALL * abs(first) and not _ignores_inputs(base, watch.losses)
    if falls or abs(first) < 1e-3:
        return Finding("ok", text)
    lr = max(group["lr"] for group in engine.optimizer.param_groups)
    key, remedy = "task", f"Is optimizer.lr={lr:g} right? Do targets belong to inputs?"
    if lr < 1e-4:
        key, remedy = "optimizer.lr", "Use a higher optimizer.lr."
    return Finding("problem", f"the loss does not fall: {text}", key, remedy)


def _ignores_inputs(base: Engine, losses: list[float]) -> bool:
    """Return whether a cross-entropy stays at that of a constant output, as with labels that belong to other inputs."""
    found, third = cross_entropy_of(base), len(losses) // 3
    if found is None or found[1].ndim != 1 or not third:
        return False
    constant = float(torch.special.entr(found[1].bincount() / len(found[1])).sum())  # the entropy of the labels
    middle, late = sum(losses[third : 2 * third]) / third, sum(losses[-third:]) / third
    return constant > 0.3 and late > 0.9 * constant and late > 0.97 * middle


def _draws(engine: Engine) -> bool:
    """Return whether the task draws random numbers for its loss, apart from dropout."""
    (batch,) = engine.batches.on_device(engine.loaders.train, count=1)
    engine.task.train()
    engine.task.model.eval()
    losses = set()
    for seed in range(3):
        seed_everything(seed)
        try:
            with torch.no_grad():
                found = engine.task(batch)["loss"]
        except Exception:  # a model that has no loss in eval mode
            return False
        losses.add(round(float(found if isinstance(found, Tensor) else found[0]), 6))
    return len(losses) > 1


def parameters(project: Project, base: Engine, trained: Engine, watch: Watch, folder: Path) -> Finding:
    """Look for parameters that are not trained: not registered, frozen with random values, or without a gradient.

    Args:
        base: an engine of the project that has not trained.
        trained: one that has, with what `watch` has seen.
        folder: for another engine.
    """
    hidden = list(unregistered(base.task))
    if hidden:
        remedy = "Use nn.ModuleList, nn.ModuleDict or nn.Parameter, so that the optimizer and checkpoints get them."
        return Finding("problem", f"parameters are not registered: {_listed(hidden)}", "task", remedy)
    frozen = {name: value for name, value in base.task.model.named_parameters() if not value.requires_grad}
    if frozen:
        other = dict(project.engine(folder, changes={"seed": base.run.seed + 1}).task.model.named_parameters())
        random = [name for name, value in frozen.items() if not torch.equal(value, other[name])]
        if random:
            remedy = "Load weights, remove requires_grad_(False), or make them buffers if that is on purpose."
            text = f"parameters are frozen with random values: {_listed(random)}"
            return Finding("problem", text, "task.model", remedy)
    trainable = [name for name, value in trained.task.model.named_parameters() if value.requires_grad]
    still = [name for name in trainable if name not in watch.gradients]
    if still:
        remedy = "Use them in forward without detach(), or remove them."
        return Finding("problem", f"parameters never get a gradient: {_listed(still)}", "task.model", remedy)
    note = f", {len(frozen)} are frozen" if frozen else ""
    return Finding("ok", f"{len(watch.gradients)} get gradients{note}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


def unregistered(task: nn.Module) -> Iterator[str]:
    """Yield the attributes of modules that hold trainable parameters which the task does not know."""
    known = set(map(id, task.parameters()))
    for place, module in task.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or name == "engine":
                continue
            held = list(leaves_of(value))
            own = [one for one in held if isinstance(one, Tensor)]
            own += [each for one in held if isinstance(one, nn.Module) for each in one.parameters()]
            if any(one.requires_grad and id(one) not in known for one in own):
                yield f"{place}.{name}".lstrip(".")
