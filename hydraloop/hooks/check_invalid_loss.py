"""CheckInvalidLossHook: ends a run whose loss is NaN or infinite, and reports where that began."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.interval import Every
from hydraloop.errors import PeerError, UserError
from hydraloop.hooks.shared.kept_losses import KeptLoss, loss_in_backward, samples_of
from hydraloop.option_checks import check_at_least

_SHOWN_SAMPLES, _SHOWN_PARAMETERS = 32, 5
_REMEDY = (
    "Find the operation that makes it with hooks=anomaly_detection. Or train with a lower optimizer.lr, or with "
    "default_hooks.grad_clip.max_norm=1."
)


class InvalidLossError(UserError, FloatingPointError):
    """The loss is NaN or infinite; the message contains all that the attributes do."""

    iteration: int
    """The first iteration with such a loss, counted from 1."""
    batch_idx: int
    """Its batch in the epoch, from 0."""
    samples: list[int] | None
    """The batch's indices in the data set; None if the loader does not know them."""
    norms: dict[str, float]
    """By parameter, when the loss was checked."""


class CheckInvalidLossHook(Hook):
    """Ends the run with an `InvalidLossError` when a loss is NaN or infinite: training does not recover from it.

    The hook checks all losses since the previous check every `interval` iterations, at the end of training, and before
    a checkpoint is written, which would otherwise save a run that is lost. The error names the first iteration whose
    loss was not finite, the samples of its batch (only the number of the batch if the loader is not hydraloop's), and
    the current norms of the parameters: of those that are not finite, else the largest norms. With `interval=1`, it is
    raised before the optimizer step that would make the weights NaN. With fp16, the loss is checked, not the gradients,
    which may overflow by design. With several ranks, all end with the error of the rank where it began.

    Priority NORMAL, MMDetection's. Cost: one host sync per check, and with several ranks one exchange between the
    hosts; no host sync in between. No state. Options: `CheckInvalidLossHookConf`. From MMDetection's
    CheckInvalidLossHook, which checks one loss in each `interval`.
    """

    collective = True
    checks_loss = True

    def __init__(self, *, interval: int = 50) -> None:
        check_at_least(1, interval=interval)
        self._due = Every(interval).due
        self._kept: list[KeptLoss] = []

    def at_position(self, engine: Engine) -> None:
        """Forget the losses of an earlier training of this engine."""
        self._kept = []

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Keep the loss; check all kept losses every `interval` iterations.

        Raises:
            InvalidLossError: one is not finite.
            PeerError: one is not finite on another rank.
        """
        loss = loss_in_backward(engine, batch_idx, outputs)
        self._kept.append(loss)
        if self._due(loss.iteration, last=loss.iteration == engine.max_iters):
            self._check(engine)

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Check the kept losses before the checkpoint is written.

        Raises:
            InvalidLossError: one is not finite; nothing is written.
            PeerError: one is not finite on another rank.
        """
        if self._kept:
            self._check(engine)

    def after_train(self, engine: Engine) -> None:
        """Check the kept losses of a run that has stopped.

        Raises:
            InvalidLossError: one is not finite.
            PeerError: one is not finite on another rank.
        """
        if self._kept and engine.error is None:
            self._check(engine)

    def _check(self, engine: Engine) -> None:
        kept = self._kept
        losses: list[float] = torch.stack([one.loss.reshape(()) for one in kept]).tolist()
        at = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), None)
        ranks = engine.distributed
        iterations = [0] * ranks.world_size  # the first that was not finite, of each rank
        iterations[ranks.rank] = 0 if at is None else kept[at].iteration
        if ranks.world_size > 1:
            iterations = ranks.sum(torch.tensor(iterations)).tolist()
        if not any(iterations):
            self._kept = []
            return
        engine.loss_check.end_diverged()
        norms = _norms(engine)
        # A NaN reaches the other ranks with the gradients, so the origin is the rank that had it first.
        culprit = min((iteration, rank) for rank, iteration in enumerate(iterations) if iteration)[1]
        mine = "" if at is None else _message(engine, kept[at], losses[at], norms, noticed=kept[-1].iteration)
        problem = ranks.gather(mine)[culprit]
        if culprit != ranks.rank:
            raise PeerError(f"rank {culprit}: {problem}")
        assert at is not None, "this rank has a loss that is not finite"
        raise invalid_loss(engine, kept[at], problem, norms, self.key)


def invalid_loss(engine: Engine, bad: KeptLoss, problem: str, norms: dict[str, float], key: str) -> InvalidLossError:
    """Return the error of a run that the loss `bad` ends.

    Args:
        problem: the message.
        norms: of the parameters, by name.
        key: of the hook.
    """
    error = InvalidLossError(problem, key=key, remedy=_REMEDY)
    error.iteration, error.batch_idx = bad.iteration, bad.batch_idx
    error.samples, error.norms = samples_of(engine, bad.epoch, bad.batch_idx), norms
    return error


def _message(engine: Engine, bad: KeptLoss, loss: float, norms: dict[str, float], *, noticed: int) -> str:
    of_step = f" of the step {bad.step}" if bad.step else ""
    later = "" if noticed == bad.iteration else f", noticed at iteration {noticed}"
    samples = _format_samples(samples_of(engine, bad.epoch, bad.batch_idx))
    return (
        f"the loss{of_step} is {loss} at iteration {bad.iteration}{later}\n"
        f"  batch {bad.batch_idx} (from 0) of epoch {bad.epoch + 1}; {samples}\n"
        f"  {_format_norms(norms)}"
    )


def _format_samples(samples: list[int] | None) -> str:
    if samples is None:
        return "this loader does not know its samples"
    shown = ", ".join(map(str, samples[:_SHOWN_SAMPLES]))
    more = f", … ({len(samples)} in all)" if len(samples) > _SHOWN_SAMPLES else ""
    return f"its samples in data.train: {shown}{more}"


def _norms(engine: Engine) -> dict[str, float]:
    """Return the Euclidean norm of each parameter, on every rank. One host sync; one collective if the model is
    sharded."""
    names, squares = [], []
    for name, parameter in engine.model.named_parameters():
        part = torch.view_as_real(local(parameter)) if parameter.is_complex() else local(parameter)
        if not part.is_floating_point():
            continue
        wide = torch.float32 if part.device.type == "mps" else torch.float64
        names.append(name)
        squares.append(torch.linalg.vector_norm(part, dtype=wide) ** 2)
    if not squares:
        return {}
    sums = torch.stack(squares)
    if engine.distributed.sharded:
        sums = engine.distributed.sum(sums)
    return dict(zip(names, sums.sqrt().tolist(), strict=True))


def _format_norms(norms: Mapping[str, float]) -> str:
    broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
    if broken:
        more = f" and {len(broken) - _SHOWN_PARAMETERS} more" if len(broken) > _SHOWN_PARAMETERS else ""
        return f"parameters that are not finite ({len(broken)} of {len(norms)}): {_listed(broken)}{more}"
    largest = sorted(norms, key=lambda name: norms[name], reverse=True)[:_SHOWN_PARAMETERS]
    return "all parameters are finite; the largest norms: " + _listed(f"{name} {norms[name]:.4g}" for name in largest)


def _listed(names: Any) -> str:
    return ", ".join(list(names)[:_SHOWN_PARAMETERS])
