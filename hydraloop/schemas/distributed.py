"""Options of training with several processes."""

from dataclasses import dataclass, field
from typing import List, Optional


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
    type; precision=bf16 then converts them where it computes in bf16."""
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
    """Seconds that a device waits for the others after the first iteration, whose compiling and warm-up take longer.
    600, NCCL's default in torch: a hang ends sooner, and a slow loader or a new compilation does not end the run.
    Checkpoints wait for `timeout`. Null: always `timeout`."""
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
