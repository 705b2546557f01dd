"""Import large libraries without the garbage collector. Does not import torch."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydraloop.early_interrupts import deferred


@contextmanager
def uncollected() -> Iterator[None]:
    """Import in the body: without the garbage collector, from which all objects are hidden then, and without signals.

    It would go through the objects of torch many times while torch is imported, and again during training. That
    takes a fifth of the CPU time of a short run. Call it only in processes of hydraloop's own.
    """
    imported, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        with deferred():
            yield
    finally:
        if len(sys.modules) > imported:
            gc.freeze()
        if collects:
            gc.enable()
