"""Segmentation: metrics and weights do not depend on how the pixels are divided into batches and ranks."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.nn import functional

import hydraloop
from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.tasks import Accuracy, Segmentation, Task
from hydraloop.tasks.building import build_task
from tests.helpers import HostSyncs, make_engine
from tests.ranks import on_ranks

CLASSES, IGNORED = 3, 7
MODEL = "{_target_: torch.nn.Conv2d, in_channels: 1, out_channels: 3, kernel_size: 3, padding: 1}"


def config(*lines: str) -> DictConfig:
    lines = ("task=segmentation", "task.model=null", f"+task.model={MODEL}", *lines)
    return hydraloop.compose(lines, folder=Path(__file__).parents[2])


def data() -> tuple[Tensor, Tensor]:
    """Eight images and their masks (uint8) with different numbers of ignored pixels; all pixels of one are ignored."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, 1, 4, 5, generator=generator)
    masks = torch.randint(CLASSES, (8, 4, 5), generator=generator).byte()
    for number in range(1, 8):
        masks[number].view(-1)[: 2 * number] = IGNORED
    masks[5] = IGNORED
    return images, masks


def trained(distributed: Distributed, cfg: DictConfig, batch: int, accumulate: int) -> tuple[dict[str, float], Tensor]:
    """Train with a global batch of 4, then validate. Return the metrics and the weights."""
    torch.manual_seed(0)
    task = build_task(cfg)
    part = {"rank": distributed.rank, "world_size": distributed.world_size}
    loader = build_loader(InMemoryDataset(*data()), shuffle=False, batch_size=batch, **part)
    with TemporaryDirectory() as folder:
        engine = make_engine(
            Path(folder),
            train=loader,
            val=loader,
            task=task,
            lr=0.5,
            distributed=distributed,
            max_epochs=2,
            accumulate=accumulate,
        )
        engine.train()
    return engine.metrics, torch.cat([parameter.detach().flatten() for parameter in task.parameters()])


def by_hand(weights: Tensor) -> dict[str, float]:
    """Metrics of a model with these weights on all images at once."""
    model = nn.Conv2d(1, 3, 3, padding=1)
    nn.utils.vector_to_parameters(weights, model.parameters())
    images, masks = data()
    logits = model(images)
    kept = masks != IGNORED
    found, wanted = logits.argmax(1)[kept], masks[kept]
    both = torch.tensor([((found == each) & (wanted == each)).sum() for each in range(CLASSES)])
    sizes = torch.tensor([(found == each).sum() + (wanted == each).sum() for each in range(CLASSES)])
    loss = functional.cross_entropy(logits, masks.long(), ignore_index=IGNORED)
    return {
        "miou": (both / (sizes - both)).mean().item(),
        "dice": (2 * both / sizes).mean().item(),
        "loss": loss.item(),
    }


def test_metrics_and_training_do_not_depend_on_batches_and_ranks() -> None:
    cfg = config("task.num_classes=3", f"task.ignore_index={IGNORED}")
    metrics, weights = trained(Distributed(), cfg, 4, 1)
    assert metrics == pytest.approx(by_hand(weights), rel=1e-5)
    runs = [trained(Distributed(), cfg, 2, 2), trained(Distributed(), cfg, 1, 4), *on_ranks(2, trained, cfg, 2, 1)]
    for others, other_weights in runs:
        assert others == pytest.approx(metrics, rel=1e-5)
        torch.testing.assert_close(other_weights, weights, rtol=1e-5, atol=1e-6)


def task() -> Segmentation:
    torch.manual_seed(0)
    return Segmentation(nn.Conv2d(1, CLASSES, 1), CLASSES, ignore_index=IGNORED)


def test_a_batch_of_ignored_pixels_has_a_loss_of_zero() -> None:
    made = task()
    total, count = made((torch.randn(2, 1, 3, 3), torch.full((2, 3, 3), IGNORED)))["loss"]
    assert (total.item(), count.item()) == (0, 0)
    total.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in made.parameters())


def test_no_host_sync() -> None:
    made, (images, masks) = task(), data()
    with HostSyncs() as syncs:
        made((images, masks))
        made.evaluate((images, masks))
    assert syncs.count == 0


def test_it_predicts_a_class_for_each_pixel() -> None:
    found = task().evaluate(data())
    torch.testing.assert_close(found["predictions"], found["outputs"].argmax(1))


@pytest.mark.parametrize(
    ("model", "masks"),
    [(nn.Conv2d(1, 3, 3), (2, 5, 5)), (nn.Conv2d(1, 4, 1), (2, 5, 5)), (nn.Flatten(2), (2, 5, 5))],
)
def test_outputs_of_another_shape_are_refused(model: nn.Module, masks: tuple[int, ...]) -> None:
    made: Task = Segmentation(model, CLASSES)
    with pytest.raises(UserError, match=r" returned a tensor of shape \[2, .* needs logits \[2, 3, ") as caught:
        made((torch.randn(2, 1, 5, 5), torch.zeros(masks, dtype=torch.int64)))
    assert caught.value.key == "task.model"


def test_a_model_without_the_option_num_classes_is_told_the_key() -> None:
    with pytest.raises(UserError, match=r"does not resolve(.|\n)*task\.num_classes=…") as caught:
        config()
    assert caught.value.key == "task.num_classes"


@pytest.mark.parametrize("ignored", [255, 0])
def test_accuracy_does_not_count_ignored_pixels(ignored: int) -> None:
    masks = torch.full((1, 2, 4), 1)
    masks[:, 1] = ignored
    logits = functional.one_hot(torch.ones_like(masks), CLASSES).movedim(-1, 1).float()
    task = Segmentation(nn.Identity(), CLASSES, metrics={"accuracy": Accuracy()}, ignore_index=ignored).eval()
    task.evaluate((logits, masks))
    assert task.compute_metrics()["accuracy"] == 1.0
