"""A hook: a class whose methods the training loop calls. `conf/hooks/` has a file for each hook."""

import torch

from hydraloop import Hook


class WeightNorm(Hook):
    """Adds the norm of all weights to the records.

    Args:
        interval: iterations from one value to the next.
    """

    def __init__(self, *, interval: int = 10) -> None:
        self.interval = interval

    def after_train_iter(self, engine, batch_idx, batch, outputs):
        if self.every_n_train_iters(engine, self.interval):
            norm = torch.nn.utils.get_total_norm(engine.model.parameters())
            engine.messages.add("weight_norm", norm.detach())
