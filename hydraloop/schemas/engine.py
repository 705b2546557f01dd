"""Options of the engine."""

from dataclasses import dataclass
from typing import Any, Optional


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
    they are often faster."""
    check_order: bool = True
    """Whether to refuse hook priorities that break a hook's `runs_after`."""
    device: str = "auto"
    """`auto` takes the accelerator where there is one; or `cpu`, `cuda:1`, … as torch spells it."""
    threads: Optional[int] = None
    """CPU threads torch computes with; null: torch's own choice, all cores. 1 is as fast for small models, and many
    times faster where the machine has other work (the jobs of a sweep side by side), since threads wait by spinning."""
    compile: Any = False
    """Not available yet; false."""
