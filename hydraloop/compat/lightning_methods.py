"""The methods of Lightning's callbacks that are supported, and the callbacks that are not."""

from __future__ import annotations

BASES = ("lightning.pytorch.callbacks.callback", "pytorch_lightning.callbacks.callback")
POINTS: dict[str, str | None] = {
    **dict.fromkeys(("setup", "teardown", "on_fit_start", "on_train_start"), None),
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_end", "on_validation_end"), None),
    **dict.fromkeys(("on_test_start", "on_test_epoch_end", "on_sanity_check_start", "on_sanity_check_end"), None),
    "on_fit_end": "after_train",
    "on_train_end": "after_train",
    "on_train_epoch_start": "before_train_epoch",
    "on_train_epoch_end": "after_train_epoch",
    "on_train_batch_start": "before_train_iter",
    "on_train_batch_end": "after_train_iter",
    "on_after_backward": "after_backward",
    "on_before_optimizer_step": "before_optimizer_step",
    "on_validation_epoch_start": "before_val_epoch",
    "on_validation_batch_start": "before_val_iter",
    "on_validation_batch_end": "after_val_iter",
    "on_test_epoch_start": "before_test_epoch",
    "on_test_batch_start": "before_test_iter",
    "on_test_batch_end": "after_test_iter",
    "on_test_end": "after_test",
    "on_save_checkpoint": "before_save_checkpoint",
    "on_load_checkpoint": "after_load_checkpoint",
    "on_exception": "on_exception",
}
"""Supported methods and the mount point of each; None: one of `ALWAYS`, or never called."""
ALWAYS = ("before_train", "before_val", "after_val_epoch", "after_val", "before_test", "after_test_epoch", "after_run")
"""Mount points that every adapter uses, to know which part of a run it is in. They are not in an iteration."""
INSTEAD = {
    "BatchSizeFinder": "Sweep over data.loader.batch_size: python train.py -m data.loader.batch_size=32,64,128.",
    "DeviceStatsMonitor": "Use hooks=memory_profiler.",
    "GradientAccumulationScheduler": "Use engine.accumulate.",
    "LearningRateFinder": "Sweep over optimizer.lr: python train.py -m optimizer.lr=1e-4,1e-3,1e-2.",
    "LearningRateMonitor": "The records of default_hooks.logger have lr and momentum.",
    "ModelCheckpoint": "Use default_hooks.checkpoint, with save_best for its monitor.",
    "ModelPruning": "Prune in a custom hook, with torch.nn.utils.prune.",
    "ModelSummary": "The number of parameters is printed at the start.",
    "OnExceptionCheckpoint": "Use default_hooks.checkpoint, with by_epoch=false and a short interval.",
    "ProgressBar": "Use default_hooks.progress.",
    "StochasticWeightAveraging": "Use hooks=ema hooks.ema.ema_type=stochastic.",
    "ThroughputMonitor": "The records of default_hooks.logger have time and mfu.",
    "WeightAveraging": "Use hooks=ema.",
}
"""Lightning's own callbacks that are not supported, and what to use instead."""
UNFREEZES = "BaseFinetuning"
"""Lightning's class whose callbacks may add parameter groups to the optimizer during a run."""
STAGES = {"fit": "train", "train": "train", "validation": "validate", "test": "test"}
"""The stage of a method, by the second word of its name."""
