"""Records of a run and its objects: pictures, texts, tables, histograms, files. Pillow is imported for a picture."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor

from hydraloop.engine.hook import Mode
from hydraloop.engine.messages import PLAIN, as_tensor, plain, position
from hydraloop.engine.run_parts import Run
from hydraloop.errors import UserError
from hydraloop.files.atomic import file_name
from hydraloop.files.metrics_log import OBJECTS, ObjectKind, read_rows
from hydraloop.files.secrets import mask_text

if TYPE_CHECKING:
    from PIL.Image import Image

_CHANNELS = (1, 3, 4)
_WRITABLE = ("L", "RGB", "RGBA")


def picture(image: Any) -> Image:
    """Return an image as a picture of Pillow.

    Args:
        image: a tensor or array `[H, W]`, `[H, W, C]` or `[C, H, W]` with 1, 3 or 4 channels, on the scale of
            `to_pixels`; a picture of Pillow; or the path of a picture.

    Raises:
        ValueError: the shape is another one.
        OSError: the file is not a picture.
    """
    from PIL import Image

    if isinstance(image, str | os.PathLike):
        with Image.open(image) as opened:
            opened.load()
        image = opened
    if isinstance(image, Image.Image):
        return image if image.mode in _WRITABLE else image.convert("RGB")
    (pixels,) = to_pixels([_channels_first(image)])
    return Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).contiguous().numpy())


def _channels_first(image: Any) -> Tensor:
    """Return a copy `[C, H, W]` on the host. If both ends could be channels, those of a tensor are in front."""
    in_front = isinstance(image, Tensor)
    values = as_tensor(image).cpu()
    if values.ndim == 2:
        return values[None]
    if values.ndim == 3 and values.numel():
        first, last = (values.shape[end] in _CHANNELS for end in (0, -1))
        if first or last:
            return values if first and (in_front or not last) else values.permute(2, 0, 1)
    raise ValueError(f"an image is [H, W], [H, W, 3] or [3, H, W], not {list(values.shape)}")


def to_pixels(images: Sequence[Tensor], mean: Any = None, std: Any = None) -> list[Tensor]:
    """Convert images `[C, H, W]` of any number type to uint8, on a scale guessed from their values.

    With `mean` and `std` (a number, or one per channel), images are denormalised first. uint8, 0..1 and 0..255 keep
    their scale; other values are stretched from the smallest to the largest finite value of all images. Infinities are
    drawn as the largest and smallest value, NaN as the smallest.
    """
    if all(image.dtype == torch.uint8 for image in images):
        return list(images)
    floats = [_denormalised(image.float(), mean, std) for image in images]
    finite = torch.cat([image[image.isfinite()] for image in floats])
    low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0)
    slack = 1e-3 * max(1.0, abs(high))  # for rounding
    if low >= -slack and high <= 1 + slack:
        low, high = 0.0, 1.0
    elif low >= -slack and 127 < high <= 255 + slack:
        low, high = 0.0, 255.0
    scale = 255 / (high - low) if high > low else 0.0
    drawable = (image.nan_to_num(nan=low, posinf=high, neginf=low) for image in floats)
    return [((image - low) * scale).round().clamp(0, 255).to(torch.uint8) for image in drawable]


def _denormalised(image: Tensor, mean: Any, std: Any) -> Tensor:
    if mean is None or std is None:
        return image
    by_channel = [torch.as_tensor(value, dtype=torch.float32).cpu().flatten() for value in (mean, std)]
    if any(len(values) not in (1, len(image)) for values in by_channel):
        return image  # for other channels
    means, stds = (values.view(-1, 1, 1) for values in by_channel)
    return image * stds + means


_SIDE = 480
"""Pixels of the longer side of a matrix."""


def heatmap(matrix: Tensor) -> Image:
    """Return a picture of a matrix `[R, C]`: white is 0, blue the value with the largest magnitude, NaN is grey.

    Host sync.
    """
    from PIL import Image

    values = matrix.detach().double().cpu()
    rows, columns = values.shape
    cell = max(_SIDE // max(rows, columns), 1)
    magnitudes = values.abs()
    largest = magnitudes.nan_to_num(nan=0, posinf=0).max()
    shades = (magnitudes / largest.clamp(min=1e-300)).clamp(max=1)
    colours = 255 - shades[..., None] * torch.tensor([225.0, 165.0, 0.0])
    colours[values.isnan()] = 200
    pixels = Image.fromarray(colours.to(torch.uint8).numpy())
    return pixels.resize((columns * cell, rows * cell), Image.Resampling.NEAREST)


FOLDER = "media"
"""Folder of the objects' files in the run directory."""


class Records:
    """Logs records and objects on rank 0, for every tracker of the run. On other ranks, the methods do nothing.

    An object is a file, `<run_dir>/media/val/predictions_iter_400.png`, and a record that names it. Trackers show it as
    `val/predictions`. A name that begins with `train/`, `val/` or `test/` sets the mode; by default, it is the current
    one. An object of the same name and iteration replaces the first one.

    The methods return the path of the file; None on other ranks. They raise a `UserError` if a part of the name is
    empty, `.` or `..`, or cannot be printed, and an `OSError` if the file cannot be written.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._muted = False

    def __call__(self) -> list[dict[str, Any]]:
        """Return what the run has written to `metrics.jsonl`, as rows; see `hydraloop.records`. On any rank."""
        return read_rows(self._run.run_dir)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Log nothing in the body, the sanity step."""
        self._muted = True
        try:
            yield
        finally:
            self._muted = False

    def log_record(self, record: Mapping[str, Any]) -> None:
        """Pass a record to every hook with `on_log`; the `logger` hook writes it to `metrics.jsonl`.

        Args:
            record: numbers and strings by name. It may begin with `mode`, `epoch` and `iteration`; by default, these
                are the current ones. Scalars of numpy and torch become plain numbers: a host sync for each tensor on
                an accelerator.
        """
        if self._muted or not self._run.ranks.is_main:
            return
        if not PLAIN.issuperset(map(type, record.values())):  # a third of the time of a look at each value
            record = {name: plain(value) for name, value in record.items()}
        self._run.calls.on_log(record)

    def log_image(self, name: str, image: Any) -> Path | None:
        """Log a picture, as PNG.

        Args:
            name: `predictions`, or `val/predictions`.
            image: a tensor or array `[H, W]`, `[H, W, C]` or `[C, H, W]` with 1, 3 or 4 channels (a tensor on an
                accelerator is a host sync); a picture of Pillow; or the path of a picture. uint8, floats 0..1 and
                floats 0..255 keep their scale; others are stretched from their smallest to their largest value. NaN is
                drawn as the smallest.

        Raises:
            ValueError: it has another shape.
        """
        return self.log_object("image", name, ".png", lambda path: picture(image).save(path))

    def log_figure(self, name: str, figure: Any) -> Path | None:
        """Log a figure of matplotlib as a picture. The figure stays open: close it with `matplotlib.pyplot.close`."""
        return self.log_object("image", name, ".png", lambda path: figure.savefig(path))

    def log_text(self, name: str, text: str) -> Path | None:
        """Log a text, which trackers show as Markdown if they can. Secrets in it are masked."""
        return self.log_object(
            "text", name, ".md", lambda path: path.write_bytes(mask_text(text).encode(errors="replace"))
        )

    def log_table(self, name: str, columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Path | None:
        """Log a table. Secrets in it are masked.

        Args:
            name: of the table.
            columns: names of the columns.
            rows: a sequence of rows, an array or a tensor. Cells are numbers, scalars of numpy or torch, and None;
                others, NaN and infinity become text.

        Raises:
            ValueError: a row has more or fewer cells than there are columns.
        """
        return self.log_object("table", name, ".json", lambda path: write_json(path, _table(columns, rows)))

    def log_histogram(self, name: str, values: Any) -> Path | None:
        """Log a histogram with 64 bins. Values that are not finite are counted as `nonfinite`. One host sync.

        Args:
            name: of the histogram.
            values: a tensor or array of real numbers, of any shape, or a list of numbers.
        """
        tag = "/".join(self._place(name))
        return self.log_object(
            "histogram", name, ".json", lambda path: write_json(path, histograms({tag: as_tensor(values)}))
        )

    def log_artifact(self, path: str | os.PathLike[str], name: str | None = None) -> Path | None:
        """Log a copy of a file.

        Args:
            path: the file.
            name: by default, the file's name.
        """
        name = Path(path).name if name is None else name
        return self.log_object("artifact", name, PurePosixPath(name).suffix, lambda copy: shutil.copyfile(path, copy))

    def log_object(self, kind: ObjectKind, name: str, suffix: str, write: Callable[[Path], object]) -> Path | None:
        """Log an object of any kind: let `write` write its file, then log the record that names it.

        Args:
            kind: what trackers show it as.
            name: of the object.
            suffix: of its file.
            write: gets the path.
        """
        mode, name = self._place(name)
        if self._muted or not self._run.ranks.is_main:
            return None
        entries = position(self._run.progress, mode)
        parts = name.removesuffix(suffix).split("/")
        stem, suffix = "/".join([FOLDER, mode, *map(file_name, parts)]), file_name(suffix, longest=50)
        file = f"{stem}_iter_{entries['iteration']}{suffix}"
        path = self._run.run_dir / file
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
        self.log_record({**entries, OBJECTS: [{"kind": kind, "name": name, "path": file}]})
        return path

    def _place(self, name: str) -> tuple[Mode, str]:
        """Return the mode and the rest of an object's name."""
        mode, _, rest = name.partition("/")
        if mode not in get_args(Mode):
            mode, rest = self._run.progress.mode, name
        if "\\" in rest or not rest.isprintable() or any(part in ("", ".", "..") for part in rest.split("/")):
            raise UserError(
                f"an object cannot be logged as {name!r}, because it is a file in {FOLDER}/",
                remedy="Use a name such as predictions or val/predictions.",
            )
        return cast(Mode, mode), rest


def write_json(path: Path, content: Any) -> None:
    """Write a file of JSON."""
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8", errors="replace")


def _table(columns: Iterable[Any], rows: Any) -> dict[str, list[Any]]:
    names = [mask_text(str(column)) for column in columns]
    cells = rows.tolist() if isinstance(rows, Tensor) else rows  # one host sync
    table = [[_cell(plain(cell)) for cell in row] for row in cells]
    wrong = next((row for row in table if len(row) != len(names)), None)
    if wrong is not None:
        raise ValueError(f"a row has {len(wrong)} cells, and the table has {len(names)} columns")
    return {"columns": names, "rows": table}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return mask_text(str(value))


BINS = 64
"""Number of bins of equal width; TensorBoard draws 30."""


def histograms(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Count the entries of each tensor in bins between its smallest and its largest finite one.

    The entries are copied to the host and counted there in float64; one host sync for each tensor.

    Args:
        tensors: by name, real numbers of any shape; empty ones are left out.

    Returns:
        For each name `{"min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket", "nonfinite"}`, plain
            numbers of its finite entries; `nonfinite` counts the others. Without finite entries there are no buckets.
    """
    return {name: _counted(tensor) for name, tensor in tensors.items() if tensor.numel()}


def _counted(tensor: Tensor) -> dict[str, Any]:
    values = tensor.detach().flatten().cpu().double()
    finite = values[values.isfinite()]
    counts, edges = torch.histogram(finite, BINS) if len(finite) else (finite, finite)
    return {
        "min": finite.min().item() if len(finite) else 0.0,
        "max": finite.max().item() if len(finite) else 0.0,
        "num": len(finite),
        "sum": finite.sum().item(),
        "sum_squares": finite.square().sum().item(),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.int().tolist(),
        "nonfinite": len(values) - len(finite),
    }
