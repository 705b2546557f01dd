"""Average precision, which needs no other package. `torchmetrics.detection.MeanAveragePrecision` is that of COCO."""

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class AveragePrecision(Metric):
    """The area under precision over recall, 0..1, of all classes in one ranking.

    A box is right if it has the class of a target and overlaps with it by more than half of what both cover (IoU).
    """

    higher_is_better = True
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("found", [], dist_reduce_fx="cat")
        self.add_state("targets", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: list[dict[str, Tensor]], target: list[dict[str, Tensor]]) -> None:
        """Add a batch: `boxes` `[K, 4]`, `labels` `[K]` and, of predictions, `scores` `[K]` of each image."""
        for found, wanted in zip(preds, target, strict=True):
            scores, order = found["scores"].sort(descending=True)
            fits = _ious(found["boxes"][order], wanted["boxes"]) > 0.5
            fits &= found["labels"][order, None] == wanted["labels"]
            first = fits & (fits.cumsum(0) == 1)  # the others have found it again
            self.found.append(torch.stack([scores, first.any(1)], 1))
            self.targets += len(wanted["boxes"])

    def compute(self) -> Tensor:
        """Return the average precision over all images."""
        scores, right = dim_zero_cat(self.found).unbind(1)
        right = right[scores.argsort(descending=True, stable=True)]
        precision = right.cumsum(0) / torch.arange(1, len(right) + 1, device=right.device)
        best = precision.flip(0).cummax(0).values.flip(0)  # at this recall or a higher one
        return (best * right).sum() / self.targets


def _ious(a: Tensor, b: Tensor) -> Tensor:
    """Return the IoU `[N, M]` of boxes `[N, 4]` and `[M, 4]`."""
    sides = torch.minimum(a[:, None, 2:], b[:, 2:]) - torch.maximum(a[:, None, :2], b[:, :2])
    both = sides.clamp(min=0).prod(2)
    area_a, area_b = ((boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (a, b))
    return both / (area_a[:, None] + area_b - both)
