"""Options of the engine."""

from dataclasses import dataclass, field
from typing import Any, List, Optional


@dataclass
class EngineConf:
    """How long to train, when to validate, on what device."""

    max_epochs: int = 20
    """Epochs to train; 20 trains the default task to the end in seconds. Ignored where `max_iters` is set."""
    max_iters: Optional[int] = None
    """Iterations (batches) to train instead of epochs; epochs still pass and fire. Null: `max_epochs` counts."""
    accumulate: int = 1
    """Iterations in one optimizer step; 1 is no accumulation. An epoch's last window is shorter and weighted so."""
    val_interval: Optional[int] = 1
    """Epochs (or iterations) between validations; 1 sees every epoch. Null: never. The end always validates too."""
    val_begin: int = 0
    """The first epoch (or iteration) that may be validated; 0: from the start."""
    val_by_epoch: bool = True
    """Whether the two above count epochs; false: iterations, for epochs that take hours."""
    test: bool = True
    """Whether to run the test set once after training, on the best checkpoint if one was saved, else the last."""
    deterministic: bool = False
    """Whether to refuse kernels that give other bits on each run (`torch.use_deterministic_algorithms`);
    they are often faster. Also sets CUBLAS_WORKSPACE_CONFIG=:4096:8 for CUDA, unless it is set."""
    check_order: bool = True
    """Whether to refuse hook priorities that break a hook's `runs_after`."""
    device: str = "auto"
    """`auto` takes the accelerator where there is one; or `cpu`, `cuda:1`, … as torch spells it."""
    threads: Optional[int] = None
    """CPU threads torch computes with; null: torch's own choice, all cores. 1 is as fast for small models, and many
    times faster where the machine has other work (the jobs of a sweep side by side), since threads wait by spinning."""
    compile: Any = False
    """Whether the model is compiled by torch.compile: false, true, or its options ({mode: max-autotune}). Not by
    default: compiling takes from seconds to minutes, which a short run does not get back. Among
    the backend's `options`, those with numbers or true and false work; one that names a program or file is refused."""
    activation_checkpointing: List[str] = field(default_factory=list)
    """Class names of the modules ([Block]) whose activations are computed again in backward instead of kept: about a
    third more time for much less memory. Empty: none."""
    channels_last: Any = "auto"
    """Whether images lie in memory channel by channel last, for which GPUs have faster convolutions: true, false, or
    `auto`, where the model's class says `channels_last = True`."""
    prefetch: bool = True
    """Whether the next batch is copied to an accelerator while the current one is computed on, which hides the copy.
    Without meaning on a CPU, and where the training process loads the data itself."""
    peak_tflops: Optional[float] = None
    """What the device can do at most, in 10^12 floating-point operations a second, for the record's `mfu`; null: from a
    table of GPUs, and no `mfu` where it is not in there."""
