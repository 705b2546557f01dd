"""VisualizationHook: the pictures of real runs, read back from their files."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.hooks import visualization
from hydraloop.hooks.ema import EMAHook
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.visualization import Tile, VisualizationHook, grid
from hydraloop.tasks import Classification, Regression, Task
from tests.helpers import HostSyncs, failing, logged
from tests.hooks.tiny_runs import engine_of
from tests.ranks import on_ranks

GREEN, RED, GREY = visualization._GREEN, visualization._RED, visualization._GREY
WIDTH = 16 * 8 + 18
"""Of an 8x8 image's tile, enlarged 16 times."""


class Left(nn.Module):
    """Predicts 1 if the left half of an image is brighter, so that the prediction is visible in the image."""

    def __init__(self, sign: float = 1.0) -> None:
        super().__init__()
        self.sign = nn.Parameter(torch.tensor(sign))

    def forward(self, images: Tensor) -> Tensor:
        difference = images[..., :4].mean((1, 2, 3)) - images[..., 4:].mean((1, 2, 3))
        return torch.stack([-difference, difference], 1) * self.sign


def _images(count: int, channels: int = 1) -> Tensor:
    """Every second image is bright on the left, beginning with the first."""
    images = torch.zeros(count, channels, 8, 8)
    images[::2, ..., :4] = 1
    images[1::2, ..., 4:] = 1
    return images


def _data(count: int = 6, *, wrong: int = 0, channels: int = 1) -> InMemoryDataset:
    """Images and their labels, wrong ones first."""
    labels = (torch.arange(count) % 2 == 0).long()
    labels[:wrong] = 1 - labels[:wrong]
    return InMemoryDataset(_images(count, channels), labels, classes=["right", "left"])


def _engine(
    run_dir: Path,
    hook: Hook,
    data: Any = None,
    *,
    task: Task | None = None,
    hooks: Mapping[str, Hook] | None = None,
    distributed: Distributed | None = None,
    loader: Any = None,
    **settings: Any,
) -> Engine:
    """Two epochs of two batches; validation and test on `data`, in batches of four."""
    share = {} if distributed is None else {"rank": distributed.rank, "world_size": distributed.world_size}
    loader = loader or build_loader(data or _data(), shuffle=False, batch_size=4, **share)
    task = task or Classification(Left(), nn.CrossEntropyLoss())
    return engine_of(
        run_dir,
        {"visualization": hook, "logger": LoggerHook(interval=None), **(hooks or {})},
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.0),
        loaders=Loaders(loader, loader, loader),
        distributed=distributed,
        **{"max_epochs": 2, "sanity_val_steps": 1, **settings},
    )


def _pictures(run_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(run_dir / "media")) for path in (run_dir / "media").rglob("*.png"))


def _open(run_dir: Path, name: str = "val/predictions_iter_0.png") -> Image.Image:
    with Image.open(run_dir / "media" / name) as image:
        assert image.format == "PNG"
        return image.convert("RGB")


def _frame(image: Image.Image, index: int, columns: int) -> Any:
    """The colour of a tile's frame, of 8x8 images."""
    x, y = index % columns * WIDTH + 9, 29 + index // columns * (16 * 8 + 18 + 2 * 17) + 7
    return image.getpixel((x, y))


def _colours(image: Image.Image) -> set[Any]:
    colours = image.getcolors(1 << 24)
    assert colours is not None
    return {colour for _, colour in colours}


# What it is for. -----------------------------------------------------------------------------------------------------


def test_a_picture_of_each_evaluation_and_its_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hydraloop.hooks.visualization")
    _engine(tmp_path, VisualizationHook()).train()
    assert _pictures(tmp_path) == [
        "test/predictions_iter_4.png",
        "val/predictions_iter_2.png",
        "val/predictions_iter_4.png",
    ]
    records = logged(tmp_path / "metrics.jsonl")
    announced = [
        {"mode": mode, "epoch": epoch, "iteration": iteration, "objects": [
            {"kind": "image", "name": "predictions", "path": f"media/{mode}/predictions_iter_{iteration}.png"}
        ]}
        for mode, epoch, iteration in (("val", 1, 2), ("val", 2, 4), ("test", 2, 4))
    ]  # fmt: skip
    assert [record for record in records if "objects" in record] == announced
    assert ["objects" in record for record in records] == [False, True] * 3, "after the record of the metrics"
    assert [message.split()[:2] for message in caplog.messages] == [["val", "picture:"]] * 2 + [["test", "picture:"]]
    assert len({(tmp_path / "media" / name).read_bytes() for name in _pictures(tmp_path)}) == 3, "by their titles"


def test_right_and_wrong_are_seen_and_the_pixels_are_the_images(tmp_path: Path) -> None:
    _engine(tmp_path, VisualizationHook(), _data(6, wrong=2)).validate()
    image = _open(tmp_path)
    columns = 4  # of six
    assert image.size == (columns * WIDTH, 29 + 2 * (16 * 8 + 18 + 2 * 17))
    assert [_frame(image, index, columns) for index in range(6)] == [RED] * 2 + [GREEN] * 4
    left, top = 9, 29 + 9  # of the first image
    inside = image.crop((left, top, left + 128, top + 128))
    assert _colours(inside.crop((0, 0, 64, 128))) == {(255, 255, 255)}, "enlarged without smoothing"
    assert _colours(inside.crop((64, 0, 128, 128))) == {(0, 0, 0)}


class Coarse(Dataset[Any]):
    """Wraps a data set, with different labels and another scale."""

    classes = ("animal", "vehicle")
    mean, std = 100.0, 200.0

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.dataset[index][0] - 0.5, 1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """The tiles of all pictures."""
    tiles: list[Tile] = []
    monkeypatch.setattr(
        "hydraloop.hooks.visualization.grid", lambda new, *rest, **more: _kept(tiles, new, *rest, **more)
    )
    return tiles


def test_names_and_scale_are_those_of_the_data_set_that_made_the_batch(drawn: list[Tile], tmp_path: Path) -> None:
    inner = _data(4)
    inner.classes, inner.mean, inner.std = ["cat", "dog"], 0.5, 1.0  # type: ignore[attr-defined]
    for name, data in (("coarse", Coarse(inner)), ("subset", Subset(Coarse(inner), [0, 1]))):
        _engine(tmp_path / name, VisualizationHook(), data).validate()
        assert (drawn[-1].label, drawn[-1].prediction) == ("vehicle", "animal")
        assert drawn[-1].pixels.unique().tolist() == [0, 200], "of 0 .. 255"


def test_data_sets_side_by_side_have_names_too(drawn: list[Tile], tmp_path: Path) -> None:
    _engine(tmp_path, VisualizationHook(), ConcatDataset([Subset(_data(4), [0]), _data(4)])).validate()
    assert [tile.label for tile in drawn] == ["left", "left", "right", "left", "right"]


def _kept(drawn: list[Tile], tiles: list[Tile], *rest: Any, **more: Any) -> Image.Image:
    drawn += tiles
    return grid(tiles, *rest, **more)


def test_texts_change_the_picture() -> None:
    pixels = torch.zeros(1, 8, 8, dtype=torch.uint8)

    def drawn(label: str | None, prediction: str | None, right: bool | None, title: str = "t") -> bytes:
        return grid([Tile(pixels, label, prediction, right)], title, size=128).tobytes()

    one = drawn("3", "5", False)
    assert one == drawn("3", "5", False)
    assert len({one, drawn("4", "5", False), drawn("3", "6", False), drawn("3", "5", False, "u")}) == 4


def test_with_ema_the_predictions_are_the_averages(tmp_path: Path) -> None:
    model = Left()

    class Turn(Hook):
        priority = 90

        def after_train_iter(self, engine: Engine, *arguments: Any) -> None:
            with torch.no_grad():
                model.sign.fill_(-1.0)  # from now on the raw model predicts the opposite

    task = Classification(model, nn.CrossEntropyLoss())
    _engine(
        tmp_path, VisualizationHook(), task=task, hooks={"turn": Turn(), "ema": EMAHook(momentum=0.01, warmup=False)}
    ).train()
    assert RED not in _colours(_open(tmp_path, "val/predictions_iter_4.png"))


# Its options. --------------------------------------------------------------------------------------------------------


def _drawn(run_dir: Path, count: int, **options: Any) -> int:
    """How many of `count` images, in batches of four, are in the picture."""
    _engine(run_dir, VisualizationHook(**options), _data(count)).validate()
    image = _open(run_dir)
    columns = image.width // WIDTH
    rows = (image.height - 29) // (16 * 8 + 18 + 2 * 17)
    return sum(_frame(image, index, columns) == GREEN for index in range(columns * rows))


@pytest.mark.parametrize(
    ("options", "drawn"),
    [
        ({}, 32),
        ({"num_images": 3}, 3),
        ({"interval": 5}, 8),
    ],
)
def test_which_images(options: dict[str, int], drawn: int, tmp_path: Path) -> None:
    assert _drawn(tmp_path, 40, **options) == drawn


def test_the_size_of_an_image(tmp_path: Path) -> None:
    _engine(tmp_path, VisualizationHook(size=256)).validate()
    assert _open(tmp_path).width == 4 * (256 + 18)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_datas_mean_and_deviation_are_undone(channels: int, tmp_path: Path) -> None:
    data = _data(4, channels=channels)
    mean, std = torch.tensor([0.2, 0.4, 0.6])[:channels], torch.tensor([0.5, 0.25, 2.0])[:channels]
    data.inputs = (data.inputs * 0.8 - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
    data.mean, data.std = mean.tolist(), std.tolist()  # type: ignore[attr-defined]
    _engine(tmp_path, VisualizationHook(), data).validate()
    inside = _open(tmp_path).crop((9, 38, 9 + 128, 38 + 128))
    assert _colours(inside) == {(204, 204, 204), (0, 0, 0)}


# Other tasks, other data. --------------------------------------------------------------------------------------------


def test_numbers_are_captions(drawn: list[Tile], tmp_path: Path) -> None:
    targets = torch.tensor([[152.0], [0.5]])
    data = InMemoryDataset(_images(2), targets)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    nn.init.zeros_(model[1].weight)  # type: ignore[arg-type]
    nn.init.constant_(model[1].bias, 0.25)  # type: ignore[arg-type]
    _engine(tmp_path, VisualizationHook(), data, task=Regression(model, nn.MSELoss())).validate()
    assert [(tile.label, tile.prediction, tile.right) for tile in drawn] == [
        ("152.0", "0.2500", None), ("0.5000", "0.2500", None)
    ]  # fmt: skip
    assert GREY in _colours(_open(tmp_path))
    drawn.clear()
    data = InMemoryDataset(_images(2), torch.ones(2, 5))
    _engine(tmp_path, VisualizationHook(), data, task=Task(_five(), nn.MSELoss())).validate()
    assert (drawn[0].label, drawn[0].prediction) == ("1.000, 1.000, 1.000, …", "0.0, 0.0, 0.0, …")


def _five() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 5))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


class Silent(Task):
    """Has no outputs for single samples."""

    def evaluate(self, batch: Any) -> dict[str, Any]:
        return {"loss": super().evaluate(batch)["loss"]}


def test_predictions_are_found_or_left_out(tmp_path: Path) -> None:
    logits = Task(Left(), nn.CrossEntropyLoss())  # has outputs, and no predictions
    _engine(tmp_path / "logits", VisualizationHook(), _data(4, wrong=1), task=logits).validate()
    assert _colours(_open(tmp_path / "logits")) >= {RED, GREEN}
    silent = Silent(Left(), nn.CrossEntropyLoss())
    _engine(tmp_path / "silent", VisualizationHook(), task=silent).validate()
    image = _open(tmp_path / "silent")
    assert _colours(image).isdisjoint({RED, GREEN})
    assert GREY in _colours(image)
    assert image.height == 29 + 2 * (16 * 8 + 18 + 17), "no line for predictions"


@pytest.mark.parametrize("inputs", [torch.ones(4, 3), torch.ones(4, 2, 8, 8)])
def test_other_data_gets_one_warning(inputs: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = InMemoryDataset(inputs, torch.zeros(4, 1))
    model = nn.Sequential(nn.Flatten(), nn.LazyLinear(1))
    model(inputs)
    _engine(tmp_path, VisualizationHook(), data, task=Task(model, nn.MSELoss())).train()
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("hooks.visualization draws nothing: batches must be (images")
    assert not (tmp_path / "media").exists()


# The run around it. --------------------------------------------------------------------------------------------------


class Copies(HostSyncs):
    """Also counts copies to the host."""

    NAMES = HostSyncs.NAMES | {"to"}


def test_a_host_sync_only_where_a_batch_is_drawn(tmp_path: Path) -> None:
    def syncs(hook: Hook) -> int:
        engine = _engine(tmp_path, hook, _data(40))
        batches = list(engine.loaders.val or ())
        with Copies() as counted:
            for batch_idx, batch in enumerate(batches):
                outputs = {"predictions": torch.zeros(4, dtype=torch.int64)}
                hook.after_val_iter(engine, batch_idx, batch, outputs)
                hook.after_test_iter(engine, batch_idx + 1, batch, outputs)
        return counted.count

    one = syncs(VisualizationHook(num_images=4))
    assert 0 < one <= 3
    assert syncs(VisualizationHook(interval=100)) == 0


def test_only_copies_of_the_drawn_images_are_kept(tmp_path: Path) -> None:
    hook = VisualizationHook(num_images=1)
    engine = _engine(tmp_path, hook)
    batch = (_images(64), torch.ones(64, dtype=torch.int64))
    outputs = {"predictions": torch.ones(64, dtype=torch.int64)}
    hook.after_val_iter(engine, 0, batch, outputs)
    for tensor in (*batch, *outputs.values()):
        tensor.zero_()  # a loader may reuse the memory of a batch
    ((image, label, prediction),) = hook._samples[""]
    assert image.equal(_images(1)[0])
    assert (label, prediction) == (1, 1)
    assert image.untyped_storage().nbytes() == 8 * 8 * 4


def test_an_evaluation_that_failed_leaves_nothing_for_the_next(tmp_path: Path) -> None:
    engine = _engine(tmp_path, VisualizationHook(), _data(8), hooks={"failing": failing("after_val_iter", nth=2)})
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.validate()
    engine.validate()
    image = _open(tmp_path)
    assert [_frame(image, index, 4) for index in range(8)] == [GREEN] * 8
    assert image.height == 29 + 2 * (16 * 8 + 18 + 2 * 17)


def run_on_a_rank(distributed: Distributed, run_dir: str) -> None:
    """Train on a rank, into a separate folder."""
    _engine(Path(run_dir) / str(distributed.rank), VisualizationHook(), _data(10), distributed=distributed).train()


def test_rank_0_draws_its_samples(tmp_path: Path) -> None:
    on_ranks(2, run_on_a_rank, str(tmp_path))
    assert len(_pictures(tmp_path / "0")) == 3
    assert not (tmp_path / "1" / "media").exists()
