"""TestTimeAugmentationHook: the test uses the mean over the views; everything else is unchanged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.precision import make_precision
from hydraloop.errors import UserError
from hydraloop.hooks.ema import EMAHook
from hydraloop.hooks.tta import TestTimeAugmentationHook, Views, named_views
from hydraloop.tasks import Classification, Regression, Task
from hydraloop.tasks.metrics import Accuracy
from tests.helpers import differences, failing
from tests.hooks.tiny_runs import engine_of
from tests.ranks import on_ranks

SHIFTED = ("identity", "shift")


class Outputs(Hook):
    """Keeps the outputs for each sample of the last validation and of the test."""

    def __init__(self) -> None:
        self.val: list[Tensor] = []
        self.test: list[Tensor] = []

    def before_val_epoch(self, engine: Engine) -> None:
        self.val = []

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self.val.append(outputs["outputs"])

    def after_test_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self.test.append(outputs["outputs"])


class Net(nn.Module):
    """Logits `[N, 3]` of images; its evaluation mode differs from its training mode."""

    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(64, 3)
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


class Drawing(InMemoryDataset):
    """Draws a random number for each sample, and counts."""

    read = 0

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        self.read += len(indices)
        torch.rand(len(indices))
        return super().__getitems__(indices)


def _data(samples: int = 18, *, seed: int = 0) -> Drawing:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(samples, 1, 6, 6, generator=generator)
    return Drawing(images, torch.randint(0, 3, (samples,), generator=generator))


def _engine(
    run_dir: Path,
    tta: Hook | None = None,
    *,
    task: Task | None = None,
    test: Any = None,
    hooks: Mapping[str, Hook] | None = None,
    distributed: Distributed | None = None,
    precision: str = "fp32",
    **settings: Any,
) -> Engine:
    torch.manual_seed(0)
    ranks = distributed or Distributed()
    task = task or Classification(Net(), nn.CrossEntropyLoss(), {"accuracy": Accuracy()})
    ranks.prepare(task.model)
    shares = {"batch_size": 4, "rank": ranks.rank, "world_size": ranks.world_size}
    return engine_of(
        run_dir,
        {**({} if tta is None else {"tta": tta}), "outputs": Outputs(), **(hooks or {})},
        task=task,
        loaders=Loaders(
            build_loader(_data(seed=1), shuffle=True, **shares),
            build_loader(_data(seed=2), shuffle=False, **shares),
            test or build_loader(_data(), shuffle=False, **shares),
        ),
        distributed=distributed,
        precision=make_precision({"name": precision}, torch.device("cpu")),
        **{"max_epochs": 2, **settings},
    )


def _of(engine: Engine) -> Outputs:
    outputs = engine.hooks["outputs"]
    assert isinstance(outputs, Outputs)
    return outputs


@torch.no_grad()
def _by_hand(model: nn.Module, images: Tensor) -> Tensor:
    """The logarithm of the mean probability over the image and its mirror image."""
    model.eval()
    return ((model(images).softmax(1) + model(images.flip(3)).softmax(1)) / 2).log()


# What it is for. -----------------------------------------------------------------------------------------------------


def test_the_test_is_that_of_the_mean_and_training_is_as_without(tmp_path: Path) -> None:
    plain = _engine(tmp_path / "plain")
    plain.train()
    augmented = _engine(tmp_path / "tta", TestTimeAugmentationHook())
    augmented.train()
    assert list(differences(plain.model.state_dict(), augmented.model.state_dict())) == []
    assert plain.metrics == augmented.metrics
    assert list(differences(_of(plain).val, _of(augmented).val)) == []
    assert plain.evaluator.test_metrics["loss"] != augmented.evaluator.test_metrics["loss"]
    data, found = _data(), torch.cat(_of(augmented).test)
    expected = _by_hand(augmented.model, data.inputs)
    torch.testing.assert_close(found, expected)
    assert not found.allclose(torch.cat(_of(plain).test), atol=1e-3)
    loss = nn.functional.nll_loss(expected, data.targets).item()
    assert augmented.evaluator.test_metrics["loss"] == pytest.approx(loss)
    right = (expected.argmax(1) == data.targets).float().mean().item()
    assert augmented.evaluator.test_metrics["accuracy"] == pytest.approx(right)


def test_a_test_without_training_and_again(tmp_path: Path) -> None:
    engine = _engine(tmp_path, TestTimeAugmentationHook())
    model = engine.model
    first = engine.test()
    assert engine.test() == first
    assert engine.validate()["loss"] > 0
    torch.testing.assert_close(torch.cat(_of(engine).test), _by_hand(model, _data().inputs).repeat(2, 1))
    assert engine.model is model


def test_the_model_is_put_back_after_an_error(tmp_path: Path) -> None:
    engine = _engine(tmp_path, TestTimeAugmentationHook(), hooks={"failing": failing("after_test_iter")})
    model = engine.model
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.test()
    assert engine.model is model


def test_during_the_test_hooks_and_task_reach_the_original_model(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looking(Hook):
        def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
            seen.append((type(engine.model), engine.task.num_classes, engine.model.layers, engine.model.training))

    engine = _engine(tmp_path, TestTimeAugmentationHook(), hooks={"looking": Looking()})
    engine.test()
    assert seen[0] == (Views, 3, engine.model.layers, False)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = Views(engine.model, (), lambda outputs: outputs, turns=False, key="").nothing


@pytest.mark.parametrize("priority", [40, 60])
def test_the_views_are_those_of_the_average_in_either_order(priority: int, tmp_path: Path) -> None:
    hook = type("Moved", (TestTimeAugmentationHook,), {"priority": priority})()
    ema = EMAHook(momentum=0.5)
    engine = _engine(tmp_path, hook, hooks={"ema": ema})
    engine.train()
    averaged = Net()
    averaged.load_state_dict({**engine.model.state_dict(), **ema.state_dict()["averaged"]})
    torch.testing.assert_close(torch.cat(_of(engine).test), _by_hand(averaged, _data().inputs))
    assert not torch.cat(_of(engine).test).allclose(_by_hand(engine.model, _data().inputs))


def test_under_autocast_the_merge_is_as_exact_as_without(tmp_path: Path) -> None:
    engine = _engine(tmp_path, TestTimeAugmentationHook(), precision="bf16")
    engine.test()
    found = torch.cat(_of(engine).test)
    assert found.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        images = _data().inputs
        views = torch.stack([engine.model.eval()(images), engine.model(images.flip(3))])
    assert views.dtype == torch.bfloat16
    torch.testing.assert_close(found, views.float().softmax(2).mean(0).log())


def test_a_compiled_model_is_called_compiled(tmp_path: Path) -> None:
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    engine = _engine(tmp_path, TestTimeAugmentationHook())
    engine.model.compile(backend=count)
    engine.test()
    assert graphs
    torch.testing.assert_close(torch.cat(_of(engine).test), _by_hand(engine.model, _data().inputs))


def metrics_of_a_rank(distributed: Distributed, run_dir: str) -> dict[str, float]:
    """The test's metrics on a rank, without training."""
    engine = _engine(Path(run_dir) / str(distributed.rank), TestTimeAugmentationHook(), distributed=distributed)
    return engine.test()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_several_ranks_test_as_one(strategy: str, tmp_path: Path) -> None:
    alone = _engine(tmp_path / "alone", TestTimeAugmentationHook()).test()
    assert alone != _engine(tmp_path / "plain").test()
    for metrics in on_ranks(2, metrics_of_a_rank, str(tmp_path), strategy=strategy):
        assert metrics == pytest.approx(alone, abs=1e-6)


# Its options. --------------------------------------------------------------------------------------------------------


def test_the_views_by_name() -> None:
    image = torch.arange(6.0).view(1, 1, 2, 3)  # 0 1 2 / 3 4 5

    def seen(name: str, shift: int = 1) -> list[Any]:
        return [view(image)[0, 0].tolist() for view in named_views(shift)[name]]

    assert seen("identity") == [[[0, 1, 2], [3, 4, 5]]]
    assert seen("hflip") == [[[2, 1, 0], [5, 4, 3]]]
    assert seen("vflip") == [[[3, 4, 5], [0, 1, 2]]]
    assert seen("rot90") == [[[2, 5], [1, 4], [0, 3]]]
    assert seen("rot180") == [[[5, 4, 3], [2, 1, 0]]]
    assert seen("rot270") == [[[3, 0], [4, 1], [5, 2]]]
    assert seen("shift") == [
        [[3, 4, 5], [3, 4, 5]], [[0, 1, 2], [0, 1, 2]], [[1, 2, 2], [4, 5, 5]], [[0, 0, 1], [3, 3, 4]],
    ]  # fmt: skip
    assert seen("shift", 2)[2] == [[2, 2, 2], [5, 5, 5]]


def test_transforms_and_shift(tmp_path: Path) -> None:
    engine = _engine(tmp_path, TestTimeAugmentationHook(transforms=SHIFTED, shift=2))
    engine.test()
    images = _data().inputs
    views = [images, *(view(images) for view in named_views(2)["shift"])]
    with torch.no_grad():
        expected = torch.stack([engine.model.eval()(view).softmax(1) for view in views]).mean(0).log()
    torch.testing.assert_close(torch.cat(_of(engine).test), expected)


@pytest.mark.parametrize(
    ("task", "loss", "merge"),
    [
        (Classification, nn.CrossEntropyLoss(label_smoothing=0.1), "probabilities"),
        (Regression, nn.MSELoss(), "outputs"),
    ],
)
def test_auto_goes_by_the_loss(
    task: type[Task], loss: Any, merge: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hydraloop.hooks.tta")
    data = _data()
    targets = data.targets if task is Classification else torch.randn(18, 3)
    loader = build_loader(InMemoryDataset(data.inputs, targets), shuffle=False, batch_size=4)
    _engine(tmp_path, TestTimeAugmentationHook(), task=task(Net(), loss), test=loader).test()
    assert caplog.messages == [f"hooks.tta: the test takes the mean of the {merge} of 2 views (identity, hflip)"]


def brighter(inputs: Tensor) -> Tensor:
    """A custom view."""
    return inputs + 1


def test_views_of_ones_own_take_any_inputs(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    rows, targets = torch.randn(18, 3), torch.randn(18, 1)
    loader = build_loader(InMemoryDataset(rows, targets), shuffle=False, batch_size=4)
    hook = TestTimeAugmentationHook(transforms=["identity", brighter])
    engine = _engine(tmp_path, hook, task=Regression(net, nn.MSELoss()), test=loader)
    engine.test()
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(_of(engine).test), (net(rows) + net(rows + 1)) / 2)


# Bad input. ----------------------------------------------------------------------------------------------------------


def test_inputs_that_are_no_images_are_refused(tmp_path: Path) -> None:
    rows = InMemoryDataset(torch.randn(8, 3), torch.randn(8, 1))
    engine = _engine(tmp_path, TestTimeAugmentationHook(), test=build_loader(rows, shuffle=False, batch_size=4))
    with pytest.raises(UserError, match=r"the input of the test is a tensor \[\d, 3\]") as raised:
        engine.test()
    assert raised.value.key == "hooks.tta.transforms"
    engine.model.compile(backend="eager")
    with pytest.raises(UserError, match="the input of the test is a tensor"):
        engine.test()


def test_outputs_that_are_maps_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 1))
    engine = _engine(tmp_path, TestTimeAugmentationHook(), task=Task(model, nn.MSELoss()))
    with pytest.raises(UserError, match="each view moves the image") as raised:
        engine.test()
    assert raised.value.key == "hooks.tta.transforms"


class InPlace(Net):
    """Normalises its input in place."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.sub_(0.5).mul_(2))


def test_a_model_that_changes_its_input_in_place(tmp_path: Path) -> None:
    task = Classification(InPlace(), nn.CrossEntropyLoss(), {"accuracy": Accuracy()})
    hook = TestTimeAugmentationHook(transforms=["identity", "identity", "hflip"], merge="outputs")
    engine = _engine(tmp_path, hook, task=task)
    engine.test()
    images = _data().inputs
    with torch.no_grad():
        plain, mirrored = engine.model.eval()(images.clone()), engine.model(images.flip(3))
    torch.testing.assert_close(torch.cat(_of(engine).test), (2 * plain + mirrored) / 3)
