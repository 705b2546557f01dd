"""Options of the sections `engine` and `distributed`, and of the group `precision`."""

from dataclasses import dataclass, field
from typing import Any, List, Optional, Union

from hydra.core.config_store import ConfigStore


@dataclass
class EngineConf:
    """How long to train, when to validate, on which device."""

    max_epochs: int = 20
    """Epochs to train. 20 is enough for a small model and a thousand samples. Ignored if `max_iters` is set."""
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
    shows at once. No hook is called, and random numbers stay the same. 1 finds most mistakes. 0: none; then `monitor`
    and `save_best` can only name metrics that the task declares."""
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
    samples, without a test. A model that cannot learn them by heart has a mistake. Null: train on all data."""
    max_time: Any = None
    """Time after which training stops with a checkpoint, the test and exit code 0: `0:30:00`, `30min`, or seconds. It
    adds no validation. Counted from the start of training in each process, so leave time for these last steps. Null: no
    limit."""
    pause_after: Optional[int] = None
    """Number of validations after which the run saves and ends with exit code 75, to be continued with a higher number
    or null. Counted from the beginning of the run, also over resumes. No effect at the end of training. Null: never."""
    deterministic: bool = False
    """Whether to reject nondeterministic kernels (`torch.use_deterministic_algorithms`). False: they are often faster.
    True also sets CUBLAS_WORKSPACE_CONFIG=:4096:8 for CUDA, unless it is set."""
    allow_nan: bool = False
    """Whether training continues when its loss or a weight is NaN or infinite. False: the run fails, because training
    does not recover from it, and no checkpoint has such weights. The losses are checked at each record, losses and
    weights before a checkpoint is written and at the end. Losses of skipped steps do not count. A validation whose loss
    is NaN does not end the run, but is never the best."""
    device: str = "auto"
    """`auto` (the accelerator if there is one), or a torch device: `cpu`, `cuda:1`, …"""
    threads: Optional[int] = None
    """CPU threads of torch. Null: torch's default, all cores. For small models 1 is as fast, and many times faster on a
    busy machine (parallel jobs of a sweep), because waiting threads keep their cores busy."""
    compile: Any = False
    """Whether to compile the model with torch.compile: false, true, or its options ({mode: max-autotune}). False:
    compiling takes seconds to minutes. The backend's `options` are rejected: they may name a program or a file."""
    activation_checkpointing: List[str] = field(default_factory=list)
    """Class names of the modules ([Block]) whose activations are recomputed in the backward pass instead of stored:
    about a third more time, much less memory. Empty: none."""
    channels_last: Any = "auto"
    """Whether to use the channels-last memory format, for which GPUs have faster convolutions: true, false, or `auto`:
    if the model's class sets `channels_last = True`."""
    prefetch: bool = True
    """Whether to copy the next batch to the accelerator during the current iteration, which hides the copy. No effect
    on a CPU or with `data.loader.num_workers=0`."""


@dataclass
class FP32Conf:
    """`precision=fp32`, the default: single precision, without changes to torch; the reference for the others."""

    name: str = "fp32"
    """The name of the precision."""


@dataclass
class TF32Conf:
    """`precision=tf32`: fp32 tensors, but matrix products and convolutions compute with a 10-bit mantissa.

    Several times faster on NVIDIA GPUs since Ampere; elsewhere mostly the same as fp32. torch's setting applies to the
    whole process and is restored after the run."""

    name: str = "tf32"
    """The name of the precision."""


@dataclass
class BF16Conf:
    """`precision=bf16`: forward and evaluation under autocast to bfloat16.

    bfloat16 has the range of fp32 and a 7-bit mantissa. The first choice if the hardware supports it: nothing to tune,
    and no skipped steps."""

    name: str = "bf16"
    """The name of the precision."""


@dataclass
class FP16Conf:
    """`precision=fp16`: autocast to float16, for GPUs without bfloat16. The loss is scaled to keep gradients in range.

    Steps whose gradients overflow are skipped, counted and logged. Costs one host sync per optimizer step, because
    schedules, averages and counters advance only if the step was taken. CPUs support it too, but most are far slower
    than with fp32."""

    name: str = "fp16"
    """The name of the precision."""
    init_scale: float = 65536.0
    """Initial factor of the loss, `min_scale` .. 1e38. torch's default, which is rather large: a few skipped steps
    reduce it, while a small one would lose gradients unnoticed for thousands of steps."""
    growth_factor: float = 2.0
    """Factor of the scale after `growth_interval` steps without an overflow, above 1. torch's default; a power of two
    changes no bit of a mantissa."""
    backoff_factor: float = 0.5
    """Factor of the scale after an overflow, above 0, at most 0.99. torch's default; it reverses one growth."""
    growth_interval: int = 2000
    """Optimizer steps without an overflow before the scale grows, at least 1. torch's default: at most one step in 2000
    is skipped to find the limit."""
    min_scale: float = 1e-4
    """Scale below which the run ends with an error, 1e-30 .. `init_scale`. From 65536 this takes 30 overflows in a row:
    then the loss itself is not finite, and all further steps would be skipped silently."""
    loss_scale: Optional[float] = None
    """A fixed factor of the loss, 1e-30 .. 1e38; the other options are then not used. An overflow skips the step, and
    30 in a row end the run. Null, torch's default: the factor is adapted, so that there is nothing to tune."""


@dataclass
class FSDPConf:
    """FSDP2 (`torch.distributed.fsdp.fully_shard`): shards parameters, gradients and optimizer state."""

    wrap: List[str] = field(default_factory=list)
    """Class names of the modules that are gathered one at a time ([Block]). Empty: the whole model at once, which only
    saves the memory of the optimizer state."""
    reshard_after_forward: bool = True
    """Whether to free gathered parameters after the forward pass and gather them again for the backward pass. True:
    less memory, the purpose of sharding. False: faster."""
    param_dtype: Optional[str] = "auto"
    """Type in which parameters are gathered and used. `auto`: bfloat16 with precision=bf16, which halves the
    communication, except in models with batch normalisation, which needs float32; otherwise as null. Null: their own
    type."""
    reduce_dtype: Optional[str] = "float32"
    """Type in which gradients are averaged. float32, because sums over many ranks lose bits in shorter types. Null: the
    gradients' own type."""
    offload: bool = False
    """Whether to keep shards in host memory. For models that do not fit otherwise; much slower."""


@dataclass
class DistributedConf:
    """Number of processes, and how they share the work."""

    strategy: str = "auto"
    """`ddp` (each rank has the model), `fsdp2` (each rank has a shard of it), or `auto`: ddp with several processes,
    nothing with one."""
    nproc_per_node: int = 1
    """Processes to start on this machine. 1 trains in this process. Under torchrun, its number of processes is used."""
    nnodes: int = 1
    """Nodes of a cluster on which Slurm's `srun` has started this command, one process on each. Each process starts
    `nproc_per_node` ranks on its node. 1: this machine alone, or what torchrun has started."""
    backend: str = "auto"
    """Backend of torch.distributed. `auto`: nccl for GPUs, gloo for CPUs."""
    max_restarts: int = 0
    """How often all processes are restarted from the newest checkpoint after one has failed. No effect with one
    process. 0: an error that would repeat is reported at once."""
    timeout: float = 1800.0
    """Seconds that a rank waits for the others. 1800, torch's default, for checkpoints of large models. A rank that
    dies is noticed at once."""
    train_timeout: Optional[float] = 600.0
    """Seconds that a device waits for the others after the first iteration. 600, NCCL's default in torch: a hang ends
    sooner, and a slow loader does not end the run. Checkpoints wait for `timeout`. Null: always `timeout`."""
    agree_interval: int = 10
    """Iterations, or batches of an evaluation, between two exchanges of requests (stop, checkpoint, preemption) between
    ranks. Fewer if these take longer than 5 s. The exchange runs in the background."""
    bucket_cap_mb: Optional[float] = None
    """DDP: MiB of gradients that are averaged together. Null: torch's default (25, and a smaller first bucket)."""
    find_unused_parameters: bool = False
    """DDP and steps of a task: whether to search for parameters that the forward pass did not use, in each iteration.
    False, as in torch: it costs time and hides mistakes."""
    sync_batchnorm: bool = False
    """Whether batch normalisation uses the statistics of all ranks. False: it costs one collective per layer. Needs
    GPUs."""
    fsdp: FSDPConf = field(default_factory=FSDPConf)


def register(store: ConfigStore) -> None:
    """Store the options of the group `precision`."""
    for schema in (FP32Conf, TF32Conf, BF16Conf, FP16Conf):
        store.store(group="precision", name=schema.name, package="precision", node=schema)
