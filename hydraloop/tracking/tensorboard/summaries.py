"""From records to TensorBoard's summaries: scalars, pictures, histograms. One event a record."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydraloop.run.record_log import Record
from hydraloop.tracking.texts import in_unicode

log = logging.getLogger(__name__)

PICTURE, HISTOGRAMS = "picture", "histograms"
"""Entries of a record that name a file in the run directory: a PNG, or what the hook has counted."""
_PNG = b"\x89PNG\r\n\x1a\n"
_SIZE = struct.Struct(">II")
"""Width and height, behind the signature and the length and name of the first chunk."""


class Summaries:
    """Makes the summary of a record.

    Args:
        run_dir: where the files are that records name.
        pictures: whether pictures are put into the event file, whole.
    """

    def __init__(self, run_dir: Path, *, pictures: bool) -> None:
        self._run_dir, self._pictures = run_dir, pictures
        self._warned = False

    def of(self, record: Record) -> Any:
        """The summary with all that the record says; a file that cannot be read is left out, with one warning."""
        from tensorboard.compat.proto import summary_pb2

        summary = summary_pb2.Summary()
        for tag, value in record.metrics.items():
            summary.value.add(tag=in_unicode(tag), simple_value=value)
        picture, histograms = record.texts.get(PICTURE), record.texts.get(HISTOGRAMS)
        if picture is not None and self._pictures:
            summary.value.extend(self._read(picture, record, _picture))
        if histograms is not None:
            summary.value.extend(self._read(histograms, record, _histograms))
        return summary

    def _read(self, name: str, record: Record, made: Any) -> list[Any]:
        try:
            return list(made((self._run_dir / name).read_bytes(), record))
        except Exception as error:  # whatever a broken file makes of its reader
            level = logging.INFO if self._warned else logging.WARNING
            log.log(level, "%s is left out, as others like it will be: %s", name, error)
            self._warned = True
            return []


def _picture(content: bytes, record: Record) -> Iterator[Any]:
    from tensorboard.compat.proto import summary_pb2

    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError("it is no PNG file")
    width, height = _SIZE.unpack_from(content, 16)
    image = summary_pb2.Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    yield summary_pb2.Summary.Value(tag=in_unicode(f"{record.mode}/predictions"), image=image)


def _histograms(content: bytes, record: Record) -> Iterator[Any]:
    from tensorboard.compat.proto import histogram_pb2, summary_pb2

    found: Mapping[str, Mapping[str, Any]] = json.loads(content)
    for name, counted in ((in_unicode(name), counted) for name, counted in found.items()):
        if counted["bucket"]:
            fields = {field: counted[field] for field in ("min", "max", "num", "sum", "sum_squares")}
            buckets = {field: counted[field] for field in ("bucket_limit", "bucket")}
            yield summary_pb2.Summary.Value(tag=name, histo=histogram_pb2.HistogramProto(**fields, **buckets))
        if counted["nonfinite"]:
            yield summary_pb2.Summary.Value(tag=f"nonfinite/{name}", simple_value=counted["nonfinite"])
