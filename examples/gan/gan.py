"""A generative adversarial network (Goodfellow and others, 2014)."""

import torch
from torch.nn.functional import binary_cross_entropy_with_logits as distance

from hydraloop import Task


class GAN(Task):
    steps = ("discriminator", "generator")

    def forward(self, batch, step=None):
        real = batch[0].flatten(1)
        fake = self.model["generator"](torch.randn(len(real), 16, device=real.device))
        judge, zero, one = self.model["discriminator"], real.new_zeros(len(real), 1), real.new_ones(len(real), 1)
        if not self.training:
            self.engine.log_image("fakes", torch.hstack([*fake[:10].view(-1, 8, 8)]))
        if step == "generator":
            return {"loss": distance(judge(fake), one)}
        return {"loss": distance(judge(real), one) + distance(judge(fake), zero)}
