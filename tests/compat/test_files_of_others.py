"""Files of mmengine 0.10.7 and Lightning 2.6.6 are converted; the stored values of schedules are those of mmengine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.packages import REPOSITORY, environment, outcome_of

pytestmark = pytest.mark.nightly
STORED_SCHEDULES = REPOSITORY / "tests" / "optim" / "mmengine_values.json"


@pytest.mark.parametrize("framework", ["mmengine", "lightning"])
def test_a_file_of_another_framework_is_loaded(framework: str, tmp_path: Path) -> None:
    found = outcome_of(f"with_{framework}", framework, tmp_path)
    assert found["same"]
    assert found["objects"] > 0, "it contains more than tensors"


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
