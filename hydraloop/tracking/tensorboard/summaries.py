"""Converts records, their objects and texts to TensorBoard's summaries."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import histogram_pb2, tensor_pb2, types_pb2
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.text.metadata import create_summary_metadata

from hydraloop.run.record_log import ObjectKind, Record
from hydraloop.tracking.tracker import valid_utf8

log = logging.getLogger(__name__)

_PNG = b"\x89PNG\r\n\x1a\n"
_SIZE = struct.Struct(">II")
"""Width and height of a PNG, which follow its signature and the length and name of the first chunk."""


class Summaries:
    """Converts records to summaries.

    Args:
        run_dir: the directory that file names in records refer to.
        pictures: whether to include pictures.
    """

    def __init__(self, run_dir: Path, *, pictures: bool) -> None:
        self._run_dir = run_dir
        self._left_out = set() if pictures else {"image"}
        self._warned: set[str] = set()

    def of(self, record: Record) -> Summary:
        """Return the summary of a record. The first object of a kind that cannot be shown is a warning."""
        summary = Summary()
        for tag, value in record.metrics.items():
            name = f"train_{tag}" if tag.startswith("perf/") else tag  # only the first two groups are open: test, train
            summary.value.add(tag=valid_utf8(name), simple_value=value)
        for one in record.objects:
            if one.kind in self._left_out:
                continue
            try:
                if one.kind not in _SHOWN:
                    raise ValueError("TensorBoard does not show files")
                summary.value.extend(_SHOWN[one.kind]((self._run_dir / one.path).read_bytes(), valid_utf8(one.name)))
            except Exception as error:  # a damaged file can raise any error
                level = logging.INFO if one.kind in self._warned else logging.WARNING
                log.log(level, "%s is skipped, as others like it will be: %s", one.path, error)
                self._warned.add(one.kind)
        return summary


def text(tag: str, content: str) -> Summary.Value:
    """Return Markdown for the TEXT tab."""
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content.encode(errors="replace")])
    return Summary.Value(tag=tag, metadata=create_summary_metadata("", ""), tensor=tensor)


def _image(content: bytes, tag: str) -> Iterator[Summary.Value]:
    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError("it is not a PNG file")
    width, height = _SIZE.unpack_from(content, 16)
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    yield Summary.Value(tag=tag, image=image)


def _text(content: bytes, tag: str) -> Iterator[Summary.Value]:
    yield text(tag, content.decode(errors="replace"))


def _table(content: bytes, tag: str) -> Iterator[Summary.Value]:
    table = json.loads(content)
    names, rows = table["columns"], table["rows"]
    yield text(tag, "\n".join(_line(cells) for cells in (names, ["---"] * len(names), *rows)))


def _line(cells: Iterable[Any]) -> str:
    shown = ("" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(shown)} |"


def _histograms(content: bytes, tag: str) -> Iterator[Summary.Value]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(content)
    for name, counted in ((valid_utf8(name), counted) for name, counted in found.items()):
        if counted["bucket"]:
            fields = ("min", "max", "num", "sum", "sum_squares", "bucket_limit", "bucket")
            histogram = histogram_pb2.HistogramProto(**{field: counted[field] for field in fields})
            yield Summary.Value(tag=name, histo=histogram)
        if counted["nonfinite"]:
            yield Summary.Value(tag=f"nonfinite/{name}", simple_value=counted["nonfinite"])


_SHOWN: dict[ObjectKind, Any] = {"image": _image, "text": _text, "table": _table, "histogram": _histograms}
