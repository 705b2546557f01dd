"""Cases of a parametrized test that are not among the usual ones."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def slow(*values: Any, **options: Any) -> ParameterSet:
    """A case that CI runs with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow, **options)


def nightly(*values: Any, **options: Any) -> ParameterSet:
    """A case that scripts/nightly.sh runs: another one of the same test is in CI."""
    return pytest.param(*values, marks=pytest.mark.nightly, **options)
