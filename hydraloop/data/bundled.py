"""Read the small data files in this package."""

from __future__ import annotations

import gzip
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hydraloop.errors import UserError

_DATA = Path(__file__).parent / "files"


def find_data_file(name: str, *, root: str | None) -> Path:
    """Return the path of a data file: in `root`; if `root` is None, in this package.

    Args:
        name: of the file, `digits.csv.gz`.
        root: a folder with the file, or None.

    Raises:
        UserError: there is no such file.
    """
    path = (_DATA if root is None else Path(root).expanduser()) / name
    if not path.is_file():
        raise UserError(
            f"there is no file {path}",
            key="root",
            remedy=f"Name the folder with {name}. Null is for the bundled copy.",
        )
    return path


@lru_cache(maxsize=8)
def read_table(path: Path, separator: str | None = None) -> Tensor:
    """Return the numbers in a gzipped text file, float64 `[rows, columns]`. Cached: do not write into the tensor.

    Args:
        path: of the file, with one row in each line.
        separator: between two numbers; None: white space.
    """
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()  # NumPy would also import bz2 and lzma
    return torch.from_numpy(np.loadtxt(lines, delimiter=separator, ndmin=2))
