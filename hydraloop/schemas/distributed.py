"""Options of training on several processes."""

from dataclasses import dataclass, field
from typing import List, Optional


@dataclass
class FSDPConf:
    """FSDP2 (`torch.distributed.fsdp.fully_shard`): parameters, gradients and optimizer state in shards."""

    wrap: List[str] = field(default_factory=list)
    """Class names of the modules that are gathered one at a time ([Block]); empty: the model as a whole, which saves
    the optimizer's memory but gathers all parameters at once."""
    reshard_after_forward: bool = True
    """Whether parameters are given back after forward and gathered again for backward: less memory, which is what
    shards are for; false: faster."""
    param_dtype: Optional[str] = None
    """In which parameters are gathered and used. Null: their own, and precision=bf16 converts them where it computes
    in bf16; bfloat16 halves what is sent, for models without batch normalisation, which needs float32."""
    reduce_dtype: Optional[str] = "float32"
    """In which gradients are averaged; float32, since sums over many ranks lose bits in anything shorter. Null: as they
    are."""
    offload: bool = False
    """Whether shards wait in host memory: for models that do not fit otherwise, much slower."""


@dataclass
class DistributedConf:
    """How many processes train together, and how they share the work."""

    strategy: str = "auto"
    """`ddp` (each rank has the model) or `fsdp2` (each rank has a shard of it); `auto`: ddp where there are several
    processes, nothing in a single one."""
    nproc_per_node: int = 1
    """Processes to start on this machine; 1 starts none. Under torchrun its own number counts."""
    backend: str = "auto"
    """Of torch.distributed: `auto` is nccl for GPUs, gloo for CPUs."""
    max_restarts: int = 0
    """How often all processes are started again from the newest checkpoint when one has failed; 0: an error that comes
    again each time should be seen at once."""
    timeout: float = 1800.0
    """Seconds that a rank waits for the others; torch's own half hour, for checkpoints of large models. One that
    dies is noticed at once, whatever this says."""
    agree_interval: int = 10
    """Iterations between two moments at which the ranks tell each other what their hooks asked for; 10 is within
    seconds, and the exchange goes on in the background."""
    bucket_cap_mb: Optional[float] = None
    """Of DDP: MiB of gradients that are averaged together; null: torch's default (25, and a smaller first bucket)."""
    find_unused_parameters: bool = False
    """Of DDP: whether to look for parameters that a forward did not use, in each iteration; false, as in torch: it
    costs time and hides mistakes."""
    sync_batchnorm: bool = False
    """Whether batch normalisation uses the statistics of all ranks; false: it costs a collective a layer. Needs
    GPUs."""
    fsdp: FSDPConf = field(default_factory=FSDPConf)
