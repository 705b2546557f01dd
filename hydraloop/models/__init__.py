"""Small models for the built-in data sets. Any other `nn.Module` works too."""

from __future__ import annotations

from functools import partial

from hydraloop.models.mlp import MLP
from hydraloop.models.small_cnn import SmallCNN
from hydraloop.moved_names import find_moved

__all__ = ["MLP", "SmallCNN"]

__getattr__ = partial(find_moved, __name__)
