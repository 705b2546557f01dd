"""Import large libraries without the garbage collector. Does not import torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Switch the garbage collector off for the imports in the body, and hide all objects from it if they import.

    It would go through the objects of torch many times while torch is imported, and again during training. That
    takes a fifth of the CPU time of a short run. Call it only in processes of hydraloop's own.
    """
    imported, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > imported:
            gc.freeze()
        if collects:
            gc.enable()
