"""Lightning's methods and callbacks: where each is called here, and what does not carry over."""

from __future__ import annotations

BASES = ("lightning.pytorch.callbacks.callback", "pytorch_lightning.callbacks.callback")
POINTS: dict[str, tuple[str, ...]] = {
    "setup": (),
    "teardown": (),
    "on_fit_start": (),
    "on_fit_end": ("after_train",),
    "on_train_start": (),
    "on_train_end": ("after_train",),
    "on_train_epoch_start": ("before_train_epoch",),
    "on_train_epoch_end": ("after_train_epoch",),
    "on_train_batch_start": ("before_train_iter",),
    "on_train_batch_end": ("after_train_iter",),
    "on_after_backward": ("after_backward",),
    "on_before_optimizer_step": ("before_optimizer_step",),
    "on_validation_start": (),
    "on_validation_end": (),
    "on_validation_epoch_start": ("before_val_epoch",),
    "on_validation_epoch_end": (),
    "on_validation_batch_start": ("before_val_iter",),
    "on_validation_batch_end": ("after_val_iter",),
    "on_test_start": (),
    "on_test_end": ("after_test",),
    "on_test_epoch_start": ("before_test_epoch",),
    "on_test_epoch_end": (),
    "on_test_batch_start": ("before_test_iter",),
    "on_test_batch_end": ("after_test_iter",),
    "on_save_checkpoint": ("before_save_checkpoint",),
    "on_load_checkpoint": ("after_load_checkpoint",),
    "on_exception": ("on_exception",),
    "on_sanity_check_start": (),
    "on_sanity_check_end": (),
}
"""Lightning's methods that carry over, and the mount points at which they are called, beside these:"""
ALWAYS = (
    "before_train",
    "before_val",
    "after_val_epoch",
    "after_val",
    "before_test",
    "after_test_epoch",
    "after_run",
)
"""What every adapter is called at, to follow what is going on: nothing of this is in an iteration."""
INSTEAD = {
    "BatchSizeFinder": "Sweep over data.loader.batch_size: python train.py -m data.loader.batch_size=32,64,128.",
    "DeviceStatsMonitor": "Use hooks=memory_profiler.",
    "GradientAccumulationScheduler": "Use engine.accumulate.",
    "LearningRateFinder": "Sweep over optimizer.lr: python train.py -m optimizer.lr=1e-4,1e-3,1e-2.",
    "LearningRateMonitor": "The records of default_hooks.logger have lr and momentum.",
    "ModelCheckpoint": "Use default_hooks.checkpoint, with save_best for its monitor.",
    "ModelPruning": "Prune in a hook of your own, with torch.nn.utils.prune; a checkpoint has the weights' own names.",
    "ModelSummary": "The number of parameters is printed at the start.",
    "OnExceptionCheckpoint": "Use default_hooks.checkpoint, with by_epoch=false and a short interval.",
    "ProgressBar": "Use default_hooks.progress.",
    "StochasticWeightAveraging": "Use hooks=ema hooks.ema.ema_type=stochastic.",
    "ThroughputMonitor": "The records of default_hooks.logger have time and mfu.",
    "WeightAveraging": "Use hooks=ema.",
}
"""Lightning's own callbacks that do not carry over, and what is here for them."""
UNFREEZES = "BaseFinetuning"
"""Lightning's class whose callbacks may give the optimizer more groups in the middle of a run."""
ATTACHED = {
    "log": "Call pl_module.log(name, value).",
    "log_dict": "Call pl_module.log_dict(numbers).",
}
"""Methods that Lightning's trainer attaches to its callbacks, and what to use instead. They are not attached here."""
STAGES = {"fit": "train", "train": "train", "validation": "validate", "test": "test"}
"""By the second word of a method's name, the stage it belongs to."""
