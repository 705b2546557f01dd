"""Distillation: a small model learns the outputs of a large one."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from hydraloop.tasks import Classification


class Distillation(Classification):
    """Classification with a second loss: the distance to the teacher's probabilities (Hinton and others, 2015).

    The teacher is a part of the task. Checkpoints contain it, in the entry `task`, but only the model is trained.

    Args:
        teacher: a trained model with the same classes.
        weights: a checkpoint with the weights of the teacher; None: a checkpoint of this task will be loaded.
        temperature: by which logits are divided; above 1, the probabilities of wrong classes count more.
        options: of `Classification`.
    """

    def __init__(self, teacher: nn.Module, weights: str | None, temperature: float = 2.0, **options: Any) -> None:
        super().__init__(**options)
        self.teacher = teacher.requires_grad_(False).eval()
        self.temperature = temperature
        if weights is not None:
            teacher.load_state_dict(torch.load(weights, weights_only=True)["state_dict"])

    def forward(self, batch: Any) -> dict[str, Tensor]:
        images, classes = batch
        logits = self.call_model(images, classes)
        loss = self.loss(logits, classes)
        if self.training:
            ours, theirs = (x.div(self.temperature).log_softmax(1) for x in (logits, self.teacher(images)))
            loss = loss + self.temperature**2 * kl_div(ours, theirs, reduction="batchmean", log_target=True)
        return {"loss": loss, "outputs": logits, "targets": classes}
