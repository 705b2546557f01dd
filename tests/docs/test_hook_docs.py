"""The generated parts of docs/reference/ are what the dataclasses say."""

from __future__ import annotations

import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import make_engine
from tests.scripts import load_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "hook_docs.py"


@pytest.fixture(scope="module")
def docs() -> Any:
    """The script as a module."""
    yield load_script("hook_docs")
    del sys.modules["hook_docs"]


@pytest.mark.slow
def test_every_hook_has_its_row_and_every_option_its_line(docs: Any) -> None:
    table, sections = docs.hook_table(), docs.hook_sections()
    for option in docs.options():
        assert f"[`{option.name}`](#{option.name})" in table
        assert f"## {option.name}\n\n`{option.group}.{option.name}`, `hydraloop.hooks.{option.cls}`\n" in sections
    assert "| `max_keep_ckpts` | `null` |" in sections
    assert "`on_trace_ready` | `[tb_trace, log_trace]`" in sections
    assert sections.count("Priority ") >= len(docs.options()) - 2, "npu_profiler and sync_norm refer to another hook"


def page(name: str) -> str:
    return (ROOT / "docs" / "reference" / f"{name}.md").read_text(encoding="utf-8")


def test_what_options_have_in_common_stands_once() -> None:
    options, schedules = page("options"), page("schedules")
    assert options.count("| `layer_decay` |") == options.count("| `maximize` |") == 1
    assert schedules.count("| `optimizer` |") == 1
    assert "### optimizer=lbfgs" in options.partition("It does not have `maximize`")[0]
    assert page("hooks").count("| `row_limit` |") == 1


def test_every_schedule_and_every_option_of_a_group_is_there() -> None:
    for schedule in (
        "yolox",
        "cosine",
        "warmup_cosine",
        "linear",
        "multistep",
        "poly",
        "plateau",
        "momentum",
    ):
        assert f"| [`{schedule}`](#{schedule}) | " in page("schedules")
        assert f"### {schedule}\n" in page("schedules")
    options = page("options")
    for title in ("## engine", "### distributed.fsdp", "### task=regression", "### model=mlp", "### data=digits"):
        assert f"{title}\n" in options
    for option in ("max_epochs", "nproc_per_node", "batch_size", "split_seed", "growth_interval", "load_from"):
        assert f"| `{option}` | `" in options


def test_the_names_that_a_hook_finds_on_the_engine_exist(docs: Any, tmp_path: Path) -> None:
    """A hook is written with this page: a name that does not exist fails in a run."""
    table, engine = docs.engine_table(), make_engine(tmp_path)
    names = re.findall(r"^\| `engine\.([\w.]+)(\(.*\))?` \| \w", table, re.M)
    assert [name for name, _ in names] == list(docs.ENGINE_NAMES)
    for name, arguments in names:
        assert callable(attrgetter(name)(engine)) >= bool(arguments), name
    assert names[0] == ("progress.epoch", "")
    assert ("request_stop", "(reason, *, agreed=False)") in names


def test_a_page_that_is_out_of_date_is_noticed(docs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    all_options = docs.options()
    monkeypatch.setattr(docs, "options", lambda: all_options[:-1])
    assert any(path.read_text(encoding="utf-8") != text for path, text in docs.wanted())


def test_a_page_without_the_marks_is_an_error(docs: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hooks.md").write_text("# Hooks\n", encoding="utf-8")
    monkeypatch.setattr(docs, "REFERENCE", tmp_path)
    with pytest.raises(ValueError, match="has no <!-- engine"):
        list(docs.wanted())


def test_the_pages_and_the_facts_about_hook_classes_are_what_the_sources_say() -> None:
    """The check needs no torch."""
    code = (
        f"import runpy, sys; sys.argv = ['hook_docs.py', '--check']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        f"except SystemExit as end: assert end.code == 0, end.code\n"
        f"assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
