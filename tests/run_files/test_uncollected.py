"""`uncollected`: imports without the garbage collector."""

from __future__ import annotations

import gc
import sys
from importlib import import_module

import pytest

from hydraloop.run_files.uncollected import uncollected


def test_the_collector_is_off_in_the_body_and_on_again_after_an_error() -> None:
    was: list[bool] = []
    with pytest.raises(ModuleNotFoundError), uncollected():
        import_module(was.append(gc.isenabled()) or "there_is_no_such_module")
    assert was == [False]
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_objects_are_hidden_only_if_something_was_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append(None))
    with uncollected():
        pass
    assert calls == []
    with uncollected():
        monkeypatch.setitem(sys.modules, "imported_here", sys)
    assert calls == [None]
