"""DistSamplerSeedHook: a new shuffle each epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraloop.engine.hook import Hook, Priority

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class DistSamplerSeedHook(Hook):
    """Tells the train loader's sampler which epoch begins, so that the order is a function of (seed, epoch).

    All ranks then agree on it, and a resumed run goes on in the order it left. The sampler is the loader's `sampler`,
    or that of its `batch_sampler`; one without `set_epoch` (torch's own for a single process) draws from the global
    generator and is left alone.

    Mount points: before_train_epoch. Priority NORMAL, MMEngine's. No host sync, nothing in an iteration. No state: the
    epoch is in the run's progress. No options, as in MMEngine.
    """

    priority = Priority.NORMAL

    def before_train_epoch(self, engine: Engine) -> None:
        """Set the epoch, counted from 0."""
        loader = engine.loaders.train
        # A loader may be a list, a sampler anything: they are not ours, and set_epoch is torch's convention for them.
        samplers = (getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None))
        for sampler in {id(found): found for found in samplers}.values():
            set_epoch = getattr(sampler, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(engine.progress.epoch)
