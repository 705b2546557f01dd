"""CheckInvalidLossHook: ends a run whose loss is NaN or infinite, and reports where that began."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.interval import Every
from hydraloop.engine.loaders import Ordered
from hydraloop.engine.loss_check import BadLoss, of_step
from hydraloop.errors import PeerError, UserError
from hydraloop.schemas.option_checks import check_at_least

_SHOWN_SAMPLES, _SHOWN_PARAMETERS = 32, 5
_REMEDY = (
    "Find the operation that makes it with hooks=anomaly_detection. Or train with a lower optimizer.lr, or with "
    "default_hooks.grad_clip.max_norm=1."
)


class InvalidLossError(UserError, FloatingPointError):
    """The loss is NaN or infinite. The message has the iteration, the samples of its batch, and the parameter norms."""


class CheckInvalidLossHook(Hook):
    """Ends the run with an `InvalidLossError` when a loss is NaN or infinite: training does not recover from it.

    It makes the engine's check of the loss (`engine.loss_check`) every `interval` iterations, and lets it say more. The
    error names the first iteration whose loss was not finite, the samples of its batch (only the number of the batch if
    the loader is not hydraloop's), and the current norms of the parameters: of those that are not finite, else the
    largest norms. With `interval=1`, it is raised before the optimizer step that would make the weights NaN. The loss
    of a step that is skipped (fp16, `skip_step`) does not count. With several ranks, all end with the error of the rank
    where it began.

    Priority NORMAL, MMDetection's. Cost: one host sync per check, and with several ranks one exchange between the
    hosts; no host sync in between. No state. Options: `CheckInvalidLossHookConf`. From MMDetection's
    CheckInvalidLossHook, which checks one loss in each `interval`.
    """

    collective = True

    def __init__(self, *, interval: int = 50) -> None:
        check_at_least(1, interval=interval)
        self._fires_at = Every(interval).fires_at

    def before_train(self, engine: Engine) -> None:
        """Let the engine's check raise the error of this hook."""
        engine.loss_check.fail = partial(self._fail, engine)

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Every `interval` iterations, ask for a check before the optimizer step."""
        now = engine.progress.iteration + 1  # the counters move after the step
        if now == engine.max_iters or self._fires_at(now):
            engine.loss_check.check_at_step()

    def _fail(self, engine: Engine, bad: BadLoss | None, culprit: int) -> None:
        """Raise the error.

        Raises:
            InvalidLossError: a loss of this rank is not finite.
            PeerError: a loss of another rank is not finite.
        """
        engine.loss_check.end_diverged()
        norms = _norms(engine)
        problem = engine.distributed.gather("" if bad is None else _message(engine, bad, norms))[culprit]
        if culprit != engine.distributed.rank:
            raise PeerError(f"rank {culprit}: {problem}")
        raise InvalidLossError(problem, key=self.key, remedy=_REMEDY)


def samples_of(engine: Engine, epoch: int, batch_idx: int) -> list[int] | None:
    """Return the indices of this rank's samples in `data.train`; None if the loader does not know them.

    Args:
        epoch: of the batch, from 0.
        batch_idx: in the epoch, from 0.
    """
    loader: object = engine.loaders.train
    if not isinstance(loader, Ordered):
        return None
    # With `default_hooks.sampler_seed=null`, the loader's epoch is not set.
    follows = loader.epoch == engine.progress.epoch
    return loader.indices_at(batch_idx, epoch if follows else loader.epoch)


def _message(engine: Engine, bad: BadLoss, norms: dict[str, float]) -> str:
    later = "" if bad.noticed == bad.iteration else f", noticed at iteration {bad.noticed}"
    samples = _format_samples(samples_of(engine, bad.epoch, bad.batch_idx))
    return (
        f"the loss{of_step(bad)} is {bad.loss} at iteration {bad.iteration}{later}\n"
        f"  batch {bad.batch_idx} (from 0) of epoch {bad.epoch + 1}; {samples}\n"
        f"  {_format_norms(norms)}"
    )


def _format_samples(samples: list[int] | None) -> str:
    if samples is None:
        return "this loader does not know its samples"
    more = f", … ({len(samples)} in all)" if len(samples) > _SHOWN_SAMPLES else ""
    return f"its samples in data.train: {', '.join(map(str, samples[:_SHOWN_SAMPLES]))}{more}"


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
        more = ", …" if len(broken) > _SHOWN_PARAMETERS else ""
        shown = ", ".join(broken[:_SHOWN_PARAMETERS])
        return f"parameters that are not finite ({len(broken)} of {len(norms)}): {shown}{more}"
    largest = sorted(norms, key=lambda name: norms[name], reverse=True)[:_SHOWN_PARAMETERS]
    shown = ", ".join(f"{name} {norms[name]:.4g}" for name in largest)
    return f"all parameters are finite; the largest norms: {shown}"


log = logging.getLogger(__name__)


class AnomalyDetectionHook(Hook):
    """Switches on torch's autograd anomaly mode, for debugging.

    If a backward function returns NaN, the run ends with an error that names the function (`check_nan`). For an error
    in the backward pass, a warning shows where the forward pass called the operation. The mode applies to the whole
    process. Its previous state is restored at the end of the run, also after an error.

    Priority HIGHEST, iMIX's (AutogradAnomalyDetectHook, which switches the mode on in each iteration). Cost: every
    forward operation stores its Python stack, and with `check_nan` each backward function needs a host sync; a run may
    be several times slower. No state. Options: `AnomalyDetectionHookConf`.
    """

    priority = Priority.HIGHEST

    def __init__(self, *, check_nan: bool = True) -> None:
        self.check_nan = check_nan
        self._before: tuple[bool, bool] | None = None

    def before_run(self, engine: Engine) -> None:
        self._before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.autograd.set_detect_anomaly(True, self.check_nan)
        log.warning("%s: autograd's anomaly mode is on, which makes training slow", self.key)

    def after_run(self, engine: Engine) -> None:
        if self._before is not None:
            (enabled, check_nan), self._before = self._before, None
            torch.autograd.set_detect_anomaly(enabled, check_nan)
