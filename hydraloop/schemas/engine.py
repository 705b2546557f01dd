"""Options of the engine."""

from dataclasses import dataclass, field
from typing import Any, List, Optional, Union


@dataclass
class EngineConf:
    """How long to train, when to validate, on which device."""

    max_epochs: int = 20
    """Epochs to train. 20 trains the default task to the end in seconds. Ignored if `max_iters` is set."""
    max_iters: Optional[int] = None
    """Iterations (batches) to train instead of epochs; the mount points of epochs still fire. Null: use
    `max_epochs`."""
    accumulate: int = 1
    """Iterations per optimizer step. 1: no accumulation. A short last window of an epoch is weighted by its samples."""
    val_interval: Optional[int] = 1
    """Epochs (or iterations) between validations. 1: every epoch. Null: never. Otherwise also at the end."""
    val_begin: int = 0
    """First epoch (or iteration) that may be validated. 0: from the start."""
    val_by_epoch: bool = True
    """Whether `val_interval` and `val_begin` count epochs. False: iterations, for epochs that take hours."""
    test: bool = True
    """Whether to test once after training, on the best checkpoint if one was saved, else on the last weights."""
    sanity_val_steps: int = 1
    """Validation batches that are evaluated before the run begins, so that a mistake in the data, the task or a metric
    shows at once, and the names of all metrics are known. They are collated in this process from the first samples; no
    hook is called, and random numbers stay the same. 1 finds most mistakes. 0: none; then `monitor` and `save_best` can
    only name metrics that the task declares."""
    limit_train_batches: Optional[Union[int, float]] = None
    """Batches of an epoch: a number (100), or a share of the train loader (0.1; at least one batch). Null: all.
    Schedules and intervals follow the shorter epoch. With shuffling, each epoch gets other samples."""
    limit_val_batches: Optional[Union[int, float]] = None
    """First batches of the validation data that are evaluated: a number or a share, as above. Null: all, because the
    first ones alone may not represent the data."""
    limit_test_batches: Optional[Union[int, float]] = None
    """First batches of the test data that are evaluated: a number or a share, as above. Null: all."""
    overfit_batches: Optional[Union[int, float]] = None
    """Train on the first batches of the train data only (a number or a share, as above), and validate on the same
    samples, without a test. A model that cannot learn them by heart has a mistake. Samplers have no effect. Null: train
    on all data."""
    max_time: Any = None
    """Time after which training stops in order, with a checkpoint, the test and exit code 0: `0:30:00`, `30min`, or
    seconds. It adds no validation, so that a resumed run equals one that was not stopped.
    Counted from the start of training in each process, so leave time for these last steps. Null: no limit."""
    pause_after: Optional[int] = None
    """Number of validations after which the run saves and ends with exit code 75, to be continued with a higher number
    or null. Counted from the beginning of the run, by `val_interval` and `val_begin`, also over resumes. No effect at
    the end of training. Null: never."""
    deterministic: bool = False
    """Whether to reject nondeterministic kernels (`torch.use_deterministic_algorithms`). False: they are often faster.
    True also sets CUBLAS_WORKSPACE_CONFIG=:4096:8 for CUDA, unless it is set."""
    allow_nan: bool = False
    """Whether training continues when its loss or a weight is NaN or infinite. False: the run fails, because training
    does not recover from it. The losses are checked at each record, before a checkpoint is written and at the end;
    the weights before a checkpoint is written and at the end, so no checkpoint has such weights. With the hook
    `check_invalid_loss`, the loss ends the run in any case, with a longer error. The losses of steps that fp16 or
    `grad_clip.skip_nonfinite` has skipped do not count. A validation whose loss is NaN does not end the run, but its
    other metrics count as NaN where validations are compared: it is never the best."""
    device: str = "auto"
    """`auto` (the accelerator if there is one), or a torch device: `cpu`, `cuda:1`, …"""
    threads: Optional[int] = None
    """CPU threads of torch. Null: torch's default, all cores. For small models 1 is as fast, and many times faster on a
    busy machine (parallel jobs of a sweep), because waiting threads keep their cores busy."""
    compile: Any = False
    """Whether to compile the model with torch.compile: false, true, or its options ({mode: max-autotune}). False:
    compiling takes seconds to minutes, too long for a short run. Of the backend's `options`, numbers and
    true/false work; options that name a program or file are rejected."""
    activation_checkpointing: List[str] = field(default_factory=list)
    """Class names of the modules ([Block]) whose activations are recomputed in the backward pass instead of stored:
    about a third more time, much less memory. Empty: none."""
    channels_last: Any = "auto"
    """Whether to use the channels-last memory format, for which GPUs have faster convolutions: true, false, or `auto`:
    if the model's class sets `channels_last = True`."""
    prefetch: bool = True
    """Whether to copy the next batch to the accelerator during the current iteration, which hides the copy. No effect
    on a CPU or with `data.loader.num_workers=0`."""
