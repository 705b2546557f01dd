"""What is written about the hooks in README and docs/hooks.md is what the dataclasses say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "hook_docs.py"


@pytest.fixture(scope="module")
def docs() -> Any:
    """The script as a module."""
    yield load_script("hook_docs")
    del sys.modules["hook_docs"]


def test_both_are_what_the_dataclasses_say(docs: Any) -> None:
    old = [path.name for path, text in docs.wanted() if path.read_text(encoding="utf-8") != text]
    assert old == [], "run python scripts/hook_docs.py"


def test_every_hook_has_its_row_and_every_option_its_line(docs: Any) -> None:
    from hydraloop.hooks import _FILES

    table, reference = docs.table(), docs.reference()
    for cls, option in _FILES.items():
        assert f"[`{option}`](docs/hooks.md#{option})" in table
        assert f"`{cls}`" in table
        assert f"\n## {option}\n" in reference
    for schedule in (
        "yolox",
        "cosine",
        "warmup_cosine",
        "linear",
        "multistep",
        "onecycle",
        "poly",
        "plateau",
        "momentum",
    ):
        assert f"| `{schedule}` | `" in docs.schedules()
    assert "| `max_keep_ckpts` | `null` |" in reference
    assert "`on_trace_ready` | `[tb_trace, log_trace]`" in reference


def test_an_option_that_is_not_in_the_readme_is_noticed(docs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = docs.options()
    monkeypatch.setattr(docs, "options", lambda: one[:-1])
    assert any(path.read_text(encoding="utf-8") != text for path, text in docs.wanted())


def test_a_readme_without_the_marks_is_an_error(docs: Any) -> None:
    with pytest.raises(ValueError, match="has no <!-- hooks"):
        docs.with_tables("# hydraloop\n")


def test_the_check_needs_no_torch() -> None:
    code = (
        f"import runpy, sys; sys.argv = ['hook_docs.py', '--check']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        f"except SystemExit as end: assert end.code == 0, end.code\n"
        f"assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
