"""Converts records to TensorBoard's summaries: scalars, pictures, histograms."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydraloop.run.record_log import LoggedObject, Record
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
        self._run_dir, self._pictures = run_dir, pictures
        self._warned = False

    def of(self, record: Record) -> Any:
        """Return the summary of a record. Files that cannot be read are skipped, with one warning."""
        from tensorboard.compat.proto import summary_pb2

        summary = summary_pb2.Summary()
        for tag, value in record.metrics.items():
            summary.value.add(tag=valid_utf8(tag), simple_value=value)
        for one in record.objects:
            if one.kind == "image" and self._pictures:
                summary.value.extend(self._read(one, _picture))
            elif one.kind == "histogram":
                summary.value.extend(self._read(one, _histograms))
        return summary

    def _read(self, one: LoggedObject, made: Any) -> list[Any]:
        try:
            return list(made((self._run_dir / one.path).read_bytes(), one.name))
        except Exception as error:  # a damaged file can raise any error
            level = logging.INFO if self._warned else logging.WARNING
            log.log(level, "%s is skipped, as others like it will be: %s", one.path, error)
            self._warned = True
            return []


def _picture(content: bytes, name: str) -> Iterator[Any]:
    from tensorboard.compat.proto import summary_pb2

    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError("it is not a PNG file")
    width, height = _SIZE.unpack_from(content, 16)
    image = summary_pb2.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    yield summary_pb2.Summary.Value(tag=valid_utf8(name), image=image)


def _histograms(content: bytes, name: str) -> Iterator[Any]:
    from tensorboard.compat.proto import histogram_pb2, summary_pb2

    found: Mapping[str, Mapping[str, Any]] = json.loads(content)
    for name, counted in ((valid_utf8(name), counted) for name, counted in found.items()):
        if counted["bucket"]:
            fields = {field: counted[field] for field in ("min", "max", "num", "sum", "sum_squares")}
            buckets = {field: counted[field] for field in ("bucket_limit", "bucket")}
            yield summary_pb2.Summary.Value(tag=name, histo=histogram_pb2.HistogramProto(**fields, **buckets))
        if counted["nonfinite"]:
            yield summary_pb2.Summary.Value(tag=f"nonfinite/{name}", simple_value=counted["nonfinite"])
