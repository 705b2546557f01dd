"""CheckInvalidLossHook: ends a run whose loss is NaN or infinite, and says where that began."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.inputs import Ordered
from hydraloop.engine.interval import Every
from hydraloop.errors import PeerError, UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

_SHOWN_SAMPLES, _SHOWN_PARAMETERS = 32, 5


class InvalidLossError(FloatingPointError):
    """The loss is NaN or infinite; the message has all that is known."""

    iteration: int
    """The first such iteration, counted from 1."""
    batch_idx: int
    """Its batch in the epoch, from 0."""
    samples: list[int] | None
    """The batch's indices in the data set of this rank; None where the loader does not know them."""
    norms: dict[str, float]
    """Of each parameter, as it was when this was noticed."""


@dataclass(slots=True)
class _Seen:
    """The loss of an iteration, left on its device; of one value, in whatever shape."""

    iteration: int
    epoch: int
    batch_idx: int
    loss: Tensor


class CheckInvalidLossHook(Hook):
    """Ends the run with an `InvalidLossError` when a loss was NaN or infinite, which training does not recover from.

    Every `interval` iterations, at the last one, and before a checkpoint is written, which would otherwise be one to
    resume a lost run from, it looks at all losses since it looked before. The error names the
    first iteration whose loss was not finite, the samples of its batch (of hydraloop's loader; of any other the number
    of the batch), and the norms of the parameters as they are then: those that are not finite, or the largest. With
    `interval=1` it comes before the optimizer step that would make all of them NaN. In fp16 it is the loss itself
    that counts, not its gradients, which may overflow by design. With several ranks all end with the error of the rank
    on which it began.

    Mount points: before_train, after_backward, before_save_checkpoint. Priority NORMAL, MMDetection's. Cost: one host
    sync an interval or checkpoint, and with several ranks one exchange among the hosts; no host sync in between. No
    state. From MMDetection's CheckInvalidLossHook, which looks at one loss in `interval`.

    Args:
        interval: iterations between two looks, 1 or more.

    Raises:
        UserError: an interval below 1.
    """

    priority = Priority.NORMAL
    collective = True

    def __init__(self, *, interval: int = 50) -> None:
        if interval < 1:
            raise UserError(f"{interval} is below 1", key="interval", remedy="Use 1 to look at every iteration.")
        self._due = Every(interval).due
        self._seen: list[_Seen] = []

    def before_train(self, engine: Engine) -> None:
        """Forget the losses of an earlier use of the engine, which may have ended with one of them."""
        self._seen = []

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Keep the loss, and look at those kept where that is due.

        Raises:
            InvalidLossError: one was not finite.
            PeerError: one was not finite on another rank.
        """
        iteration = engine.progress.iteration + 1  # the counters move after the step
        self._seen.append(_Seen(iteration, engine.progress.epoch, batch_idx, outputs["loss"]))
        if self._due(iteration, last=iteration == engine.max_iters):
            self._check(engine)

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Look at those kept, before they are part of what can be resumed.

        Raises:
            InvalidLossError: one was not finite; nothing is written.
            PeerError: one was not finite on another rank.
        """
        if self._seen:
            self._check(engine)

    def _check(self, engine: Engine) -> None:
        seen = self._seen
        losses: list[float] = torch.stack([one.loss.reshape(()) for one in seen]).tolist()
        at = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), None)
        ranks = engine.distributed
        iterations = [0] * ranks.world_size  # of each rank the first that was not finite
        iterations[ranks.rank] = 0 if at is None else seen[at].iteration
        if ranks.world_size > 1:
            iterations = ranks.sum(torch.tensor(iterations)).tolist()
        if not any(iterations):
            self._seen = []
            return
        norms = _norms(engine)
        # A NaN goes from one rank to all others with the gradients: where it was first is where it comes from.
        culprit = min((iteration, rank) for rank, iteration in enumerate(iterations) if iteration)[1]
        error = None
        if culprit == ranks.rank:
            assert at is not None
            error = _error(engine, seen[at], losses[at], norms, noticed=seen[-1].iteration)
        told = ranks.gather(None if error is None else str(error))[culprit]
        if error is None:
            raise PeerError(f"rank {culprit}: {told}")
        raise error


def _error(engine: Engine, seen: _Seen, loss: float, norms: dict[str, float], *, noticed: int) -> InvalidLossError:
    samples = _samples(engine, seen)
    later = "" if noticed == seen.iteration else f", noticed at iteration {noticed}"
    if samples is None:
        which = "which samples are in it, this loader does not say"
    else:
        shown = ", ".join(map(str, samples[:_SHOWN_SAMPLES]))
        more = f", … ({len(samples)} in all)" if len(samples) > _SHOWN_SAMPLES else ""
        which = f"its samples in data.train: {shown}{more}"
    error = InvalidLossError(
        f"the loss is {loss} at iteration {seen.iteration}{later}\n"
        f"  batch {seen.batch_idx} (from 0) of epoch {seen.epoch + 1}; {which}\n"
        f"  {_format_norms(norms)}"
    )
    error.iteration, error.batch_idx, error.samples, error.norms = seen.iteration, seen.batch_idx, samples, norms
    return error


def _samples(engine: Engine, seen: _Seen) -> list[int] | None:
    loader: object = engine.loaders.train
    if not isinstance(loader, Ordered):
        return None
    # A loader whose order nobody changes (`default_hooks.sampler_seed=null`) stays where it is.
    follows = loader.epoch == engine.progress.epoch
    return loader.indices_at(seen.batch_idx, seen.epoch if follows else loader.epoch)


def _norms(engine: Engine) -> dict[str, float]:
    """Euclid's norm of each parameter, on every rank. One host sync; with a model in shards one collective."""
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
