"""What a hook or a task logs with the engine: the file, and the record that names it."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.records import BINS, heatmap, histograms, to_pixels
from hydraloop.errors import UserError
from hydraloop.files import secrets
from tests.helpers import at, batches, make_engine
from tests.ranks import on_ranks


class Records(Hook):
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        self.seen.append(dict(record))


def logged(tmp_path: Path, act: Callable[[Engine], object]) -> list[dict[str, Any]]:
    """The records of an action outside a run."""
    records = Records()
    act(make_engine(tmp_path, {"records": records}))
    return records.seen


def written(path: Path | None) -> Any:
    assert path is not None
    return json.loads(path.read_text(encoding="utf-8"))


# Where and under which name. -----------------------------------------------------------------------------------------


def test_a_picture_is_a_file_and_a_record(tmp_path: Path) -> None:
    records = Records()
    log = at("after_train_iter", lambda engine: engine.log_image("noise", torch.rand(4, 5)), nth=2)
    make_engine(tmp_path, {"log": log, "records": records}, train=batches(3)).train()
    path = "media/train/noise_iter_2.png"
    assert records.seen == [
        {"mode": "train", "epoch": 1, "iteration": 2, "objects": [{"kind": "image", "name": "noise", "path": path}]}
    ]
    with Image.open(tmp_path / path) as image:
        assert (image.format, image.size) == ("PNG", (5, 4))


def test_the_mode_is_that_of_the_evaluation_or_of_the_name(tmp_path: Path) -> None:
    records = Records()

    def log(name: str) -> Callable[[Engine], object]:
        return lambda engine: engine.records.log_text(name, "x")

    hooks = {
        "before": at("before_val", log("a")),
        "inside": at("after_val_iter", log("b")),
        "metrics": at("after_val_epoch", log("c/d")),
        "test": at("after_test_epoch", log("e")),
        "named": at("after_train_epoch", log("val/f")),
        "after": at("after_run", log("g")),
        "records": records,
    }
    make_engine(tmp_path, hooks, val=batches(2), test=batches(1)).train()
    (found,) = {tuple((record["mode"], record["objects"][0]["name"]) for record in records.seen)}
    assert found == (("val", "f"), ("val", "a"), ("val", "b"), ("val", "c/d"), ("test", "e"), ("train", "g"))
    assert (tmp_path / "media" / "val" / "c" / "d_iter_2.md").read_text() == "x"


def test_a_failed_evaluation_leaves_the_mode(tmp_path: Path) -> None:
    fails = at("before_val_epoch", lambda engine: 1 / 0)
    engine = make_engine(tmp_path, {"fails": fails}, val=batches(1))
    with pytest.raises(ZeroDivisionError):
        engine.validate()
    assert engine.progress.mode == "train"


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "val/../../x", "a//b", "a/", "a\\b", "a\0", "val/."])
def test_a_name_that_would_leave_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be logged as") as caught:
        make_engine(tmp_path).records.log_text(name, "x")
    assert caught.value.remedy == "Use a name such as predictions or val/predictions."
    assert not (tmp_path / "media").exists()


def test_long_names_have_files_of_their_own(tmp_path: Path) -> None:
    """A file system allows 255 bytes for a part of a path."""
    engine = make_engine(tmp_path)
    (tmp_path / "source").write_text("x")
    names = [f"{'ü' * 200}{end}" for end in ("1", "2", "/a", "/b")]
    found = {engine.records.log_text(name, "x") for name in names}
    found |= {engine.log_artifact(tmp_path / "source", name=f"{name}.{'s' * 300}") for name in names}
    assert len(found) == 8
    assert all(path is not None and path.read_text() == "x" for path in found)


def log_on_a_rank(distributed: Distributed, run_dir: str) -> None:
    """Log a text, with something that cannot be written on the other ranks."""
    engine = make_engine(
        Path(run_dir, str(distributed.rank)),
        loaders=make_engine(Path(run_dir)).loaders,
        optimizer=None,
        distributed=distributed,
    )
    path = engine.records.log_text("x", f"of rank {distributed.rank}")
    assert (path is None) == (distributed.rank > 0)


def test_only_rank_0_writes(tmp_path: Path) -> None:
    on_ranks(2, log_on_a_rank, str(tmp_path))
    assert [path.read_text() for path in tmp_path.rglob("*.md")] == ["of rank 0"]


# Each kind. ----------------------------------------------------------------------------------------------------------


def pixels(path: Path | None) -> list[Any]:
    assert path is not None
    with Image.open(path) as image:
        return np.asarray(image).tolist()


def red() -> np.ndarray[Any, Any]:
    """Two rows, three columns; the left one is red."""
    image = np.zeros((2, 3, 3), dtype=np.uint8)
    image[:, 0, 0] = 255
    return image


@pytest.mark.parametrize(
    "form",
    [
        red(),
        red().astype(np.float32) / 255,
        red().astype(np.float64),
        red()[..., ::-1][..., ::-1],
        torch.from_numpy(red()).permute(2, 0, 1),
        (torch.from_numpy(red()).permute(2, 0, 1) / 255).to(torch.bfloat16).requires_grad_(),
        Image.fromarray(red()),
        Image.fromarray(red()).convert("CMYK"),
    ],
    ids=["uint8", "0..1", "0..255", "negative strides", "channels first", "bfloat16", "Pillow", "CMYK"],
)
def test_forms_of_a_picture(tmp_path: Path, form: Any) -> None:
    assert pixels(make_engine(tmp_path).log_image("it", form)) == red().tolist()


def test_grey_and_transparent_pictures_and_files(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    assert pixels(engine.log_image("a", np.array([[0.0, 1.0]]))) == [[0, 255]]
    assert pixels(engine.log_image("b", torch.tensor([[[True, False]]]))) == [[255, 0]]
    assert pixels(engine.log_image("c", np.full((1, 2, 4), 9, np.uint8))) == [[[9] * 4] * 2]
    assert pixels(engine.log_image("d", np.array([[math.nan, 1.0, math.inf]]))) == [[0, 255, 255]]
    Image.fromarray(red()).save(tmp_path / "it.bmp")
    assert pixels(engine.log_image("e", tmp_path / "it.bmp")) == pixels(engine.log_image("f", str(tmp_path / "it.bmp")))
    square = torch.zeros(3, 4, 3, dtype=torch.uint8)
    square[0] = 255
    assert pixels(engine.log_image("g", square)) == [[[255, 0, 0]] * 3] * 4, "channels of a tensor are in front"
    assert pixels(engine.log_image("h", square.numpy())) == square.tolist(), "channels of an array are last"


@pytest.mark.parametrize("shape", [(3,), (2, 5, 5), (1, 3, 4, 4), (0, 4, 3)])
def test_other_shapes_are_no_picture(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"an image is \[H, W\], \[H, W, 3\] or \[3, H, W\], not"):
        make_engine(tmp_path).log_image("it", np.zeros(shape))


def test_a_figure_is_a_picture(tmp_path: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure(figsize=(2, 1), dpi=50)
    figure.subplots().plot([1, 2])
    (record,) = logged(tmp_path, lambda engine: engine.records.log_figure("loss", figure))
    assert record["objects"] == [{"kind": "image", "name": "loss", "path": "media/train/loss_iter_0.png"}]
    with Image.open(tmp_path / "media/train/loss_iter_0.png") as image:
        assert image.size == (100, 50)
    buffer = io.BytesIO()
    figure.savefig(buffer)  # it is still usable
    assert buffer.getvalue()


def test_a_table_has_plain_cells(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    rows = [
        [1, np.float32(0.5), torch.tensor(3), "cat"],
        [np.bool_(True), math.nan, None, torch.tensor(2.0, requires_grad=True)],
    ]
    assert written(engine.records.log_table("it", ["a", "b", "c", 4], rows)) == {
        "columns": ["a", "b", "c", "4"],
        "rows": [[1, 0.5, 3, "cat"], [True, "nan", None, 2.0]],
    }
    matrix = torch.tensor([[1, 2], [3, 4]])
    for numbers in (matrix, matrix.numpy()):
        assert written(engine.records.log_table("it", np.array(["x", "y"]), numbers))["rows"] == [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="a row has 1 cells, and the table has 2 columns"):
        engine.records.log_table("it", ["a", "b"], [[1]])


def test_a_histogram_counts_what_is_not_finite(tmp_path: Path) -> None:
    values = [1.0, 2.0, math.nan, math.inf]
    for form in (values, np.array(values), torch.tensor(values, requires_grad=True)):
        found = written(make_engine(tmp_path).records.log_histogram("val/logits", form))
        assert list(found) == ["val/logits"]
        counts = found["val/logits"]
        assert (counts["num"], counts["nonfinite"], counts["min"], counts["max"]) == (2, 2, 1.0, 2.0)


def test_an_artifact_is_copied(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("a")
    (first, second) = logged(
        tmp_path,
        lambda engine: [
            engine.log_artifact(tmp_path / "words.txt"),
            engine.log_artifact(str(tmp_path / "words.txt"), "lists/no.suffix/words"),
        ],
    )
    assert first["objects"] == [{"kind": "artifact", "name": "words.txt", "path": "media/train/words_iter_0.txt"}]
    assert second["objects"][0]["name"] == "lists/no.suffix/words"
    assert [path.read_text() for path in sorted((tmp_path / "media").rglob("words*"))] == ["a", "a"]
    with pytest.raises(FileNotFoundError):
        make_engine(tmp_path).log_artifact(tmp_path / "gone")


def test_secrets_are_masked_in_texts_and_tables(tmp_path: Path) -> None:
    secrets.remember({"api_key": "hunter2-hunter2"})
    engine = make_engine(tmp_path)
    text = engine.records.log_text("note", "with hunter2-hunter2 and \udce9")
    assert text is not None
    assert text.read_text() == "with *** and ?"
    assert written(engine.records.log_table("it", ["hunter2-hunter2"], [["my hunter2-hunter2"]])) == {
        "columns": ["***"],
        "rows": [["my ***"]],
    }


# Records. ------------------------------------------------------------------------------------------------------------


def test_scalars_in_a_record_become_plain_numbers(tmp_path: Path) -> None:
    given = {
        "mode": "val", "a": np.float32(0.5), "b": np.int64(3), "c": torch.tensor(2), "d": torch.tensor(0.5).bfloat16(),
        "e": np.array(7.0), "f": 1.5, "g": None, "h": "text",
    }  # fmt: skip
    (record,) = logged(tmp_path, lambda engine: engine.log_record(given))
    assert record == {"mode": "val", "a": 0.5, "b": 3, "c": 2, "d": 0.5, "e": 7.0, "f": 1.5, "g": None, "h": "text"}
    assert {type(value) for value in record.values()} == {str, float, int, type(None)}


def test_the_colour_shows_the_value() -> None:
    image = heatmap(torch.tensor([[100.0, 0.0], [50.0, math.nan]]))
    width, height = image.size
    cells = [image.getpixel((10 + x * width // 2, 10 + y * height // 2)) for y, x in
             ((0, 0), (0, 1), (1, 0), (1, 1))]  # fmt: skip
    assert cells == [(30, 90, 255), (255, 255, 255), (142, 172, 255), (200, 200, 200)]


@pytest.mark.parametrize(
    ("shape", "size"), [((2, 2), (480, 480)), ((3, 6), (480, 240)), ((21, 21), (462, 462)), ((500, 1000), (1000, 500))]
)
def test_small_matrices_are_enlarged(shape: tuple[int, int], size: tuple[int, int]) -> None:
    assert heatmap(torch.rand(shape)).size == size


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -3.0])
def test_any_value_can_be_drawn(value: float) -> None:
    assert heatmap(torch.full((2, 2), value)).size == (480, 480)


def test_ranges_of_pixels() -> None:
    def seen(*values: float, dtype: torch.dtype = torch.float32, **normalised: Any) -> list[int]:
        (image,) = to_pixels([torch.tensor(values, dtype=dtype).view(1, 1, -1)], **normalised)
        assert image.dtype == torch.uint8
        return image.flatten().tolist()

    assert seen(3, 200, dtype=torch.uint8) == [3, 200]
    assert seen(0.2, 0.6) == [51, 153]
    assert seen(0.0, 10.0, 200.0) == [0, 10, 200]
    assert seen(-1.0, 0.0, 1.0) == [0, 128, 255]
    assert seen(-1.0, 1.0, mean=8.0, std=8.0) == [0, 255], "0 .. 16, as the digits"
    assert seen(0.2, 0.6, dtype=torch.bfloat16) == [51, 153]
    assert seen(0.2, 0.6, float("nan"), float("inf"), -float("inf")) == [51, 153, 0, 255, 0]
    assert seen(-1.0, 0.0, 1.0, float("inf"), -float("inf"), float("nan")) == [0, 128, 255, 255, 0, 0]
    assert seen(float("nan"), float("inf"), -float("inf")) == [0, 255, 0]
    assert seen(-3.0, -3.0) == [0, 0]
    assert seen(0.2, 0.6, mean=[1, 2], std=[1, 2]) == [51, 153], "two numbers do not fit one channel"
    first, second = to_pixels([torch.zeros(1, 2, 2), torch.full((1, 3, 3), 4.0)])
    assert (first.unique().tolist(), second.unique().tolist()) == ([0], [255]), "one scale for all"


def counted(tensor: Tensor) -> dict[str, Any]:
    return histograms({"it": tensor})["it"]


def test_the_entries_are_counted_in_bins_of_equal_width() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = counted(values.reshape(10, 100))
    assert (found["num"], found["nonfinite"]) == (1000, 0)
    assert (found["min"], found["max"]) == (values.min().item(), values.max().item())
    assert found["sum"] == pytest.approx(values.sum().item(), rel=1e-4)
    assert found["sum_squares"] == pytest.approx(values.square().sum().item(), rel=1e-4)
    expected = torch.histogram(values, BINS)
    assert found["bucket"] == expected.hist.int().tolist()
    assert found["bucket_limit"] == pytest.approx(expected.bin_edges[1:].tolist(), abs=1e-5)
    assert found["bucket_limit"][-1] == found["max"]
    json.dumps(found, allow_nan=False)


def test_what_is_not_finite_is_counted_apart() -> None:
    found = counted(torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf, 3.0]))
    assert (found["num"], found["nonfinite"], found["min"], found["max"]) == (3, 3, 1.0, 3.0)
    assert (found["sum"], found["sum_squares"]) == (7.0, 19.0)
    assert (found["bucket"][0], found["bucket"][-1], sum(found["bucket"])) == (1, 2, 3)
    none = counted(torch.full((4,), math.nan))
    assert (none["num"], none["nonfinite"], none["bucket"], none["min"], none["max"]) == (0, 4, [], 0.0, 0.0)
    json.dumps(none, allow_nan=False)


@pytest.mark.parametrize("values", [[0.0, 0.0, 0.0], [2.5, 2.5]])
def test_entries_that_are_all_the_same_are_in_one_bin(values: list[float]) -> None:
    found = counted(torch.tensor(values))
    assert sorted(found["bucket"]) == [*[0] * (BINS - 1), len(values)]
    assert found["min"] == found["max"] == values[0]


def test_a_range_beyond_float32_is_counted() -> None:
    found = counted(torch.tensor([-3e38, 3e38]))
    assert (found["bucket"][0], found["bucket"][-1], found["num"]) == (1, 1, 2)


def test_other_types_and_empty_ones() -> None:
    found = histograms({
        "half": torch.tensor([1, 2], dtype=torch.bfloat16), "whole": torch.tensor([1, 4]), "none": torch.empty(0)
    })  # fmt: skip
    assert {name: (facts["min"], facts["max"]) for name, facts in found.items()} == {"half": (1, 2), "whole": (1, 4)}
    assert histograms({}) == {}
