"""A data set for examples and first steps: it needs no download, and trains in seconds."""

from __future__ import annotations

from hydraloop.examples.digits import Digits

__all__ = ["Digits"]
