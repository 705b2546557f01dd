"""The small data files that scikit-learn brings along, read without importing scikit-learn (0.8 s)."""

from __future__ import annotations

import gzip
import importlib.util
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from hydraloop.errors import UserError


def find_data_file(name: str, *, root: str | None) -> Path:
    """The path of a data file: in `root`, or where scikit-learn is installed if `root` is None.

    Args:
        name: the file's name, `digits.csv.gz`.
        root: a folder that holds the file, or None.

    Raises:
        UserError: there is no such file, or scikit-learn is not installed.
    """
    if root is not None:
        path = Path(root).expanduser() / name
        if not path.is_file():
            raise UserError(
                f"there is no file {path}",
                key="root",
                remedy=f"Name the folder that holds {name}, or null for the copy that scikit-learn brings along.",
            )
        return path
    # Of a top-level package, find_spec looks for the files and imports nothing.
    spec = importlib.util.find_spec("sklearn")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        path = Path(folder) / "datasets" / "data" / name
        if path.is_file():
            return path
    raise UserError(
        f"{name} comes with scikit-learn, which is {'without it here' if folders else 'not installed'}",
        key="root",
        remedy=f"pip install scikit-learn, or name a folder that holds {name}.",
    )


@lru_cache(maxsize=8)
def read_table(path: Path, separator: str | None = None) -> Tensor:
    """The numbers in a gzipped text file, float64 `[rows, columns]`; read once a process, so do not write into it.

    Args:
        path: the file, one row a line.
        separator: what stands between two numbers; None for white space.
    """
    lines = gzip.decompress(path.read_bytes()).decode("ascii").splitlines()
    rows = [list(map(float, line.split(separator))) for line in lines if line]
    return torch.tensor(rows, dtype=torch.float64)
