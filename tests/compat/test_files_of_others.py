"""The stored values of schedules are those of mmengine 0.10.7."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.packages import REPOSITORY, environment

pytestmark = pytest.mark.nightly
STORED_SCHEDULES = REPOSITORY / "tests" / "optim" / "mmengine_values.json"


def test_the_stored_values_of_schedules_are_mmengines(tmp_path: Path) -> None:
    """tests/optim/test_mmengine_values.py compares them with the values here."""
    values = tmp_path / "values.json"
    command = [sys.executable, "-m", "tests.compat.mmengine_schedules", str(values)]
    subprocess.run(command, env=environment("mmengine"), cwd=tmp_path, check=True)
    found, stored = (json.loads(path.read_text(encoding="utf-8")) for path in (values, STORED_SCHEDULES))
    assert [entry["case"] for entry in found] == [entry["case"] for entry in stored]
    for new, old in zip(found, stored, strict=True):
        for here, there in zip(new["values"], old["values"], strict=True):
            assert here == pytest.approx(there, rel=1e-12, abs=1e-12)
