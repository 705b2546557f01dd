from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.projects import Project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """A user's project, fresh for each test."""
    return Project.make(tmp_path / "project")
