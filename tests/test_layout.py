"""The layout: a folder has few files, and the files that a new reader begins with are short."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = 20
"""Files in a folder. More need sub-folders; `hooks/` has one file for each hook."""
READING_ORDER = ("train.py", "app.py", "builder.py", "engine/engine.py", "engine/call_table.py", "hooks/empty_cache.py")
"""From the command line to a hook, as docs/explanation/architecture.md lists them."""


def test_no_folder_but_hooks_has_more_than_twenty_files() -> None:
    files = [path for name in ("hydraloop", "tests", "scripts") for path in (ROOT / name).rglob("*.py")]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in files if path.parent.name != "hooks")
    assert len(counts) > 20, "the code is somewhere else"
    assert {folder: count for folder, count in counts.items() if count > MOST} == {}


def test_a_reader_follows_a_run_from_the_command_line_to_a_hook_in_800_lines() -> None:
    files = [ROOT / name if name == "train.py" else ROOT / "hydraloop" / name for name in READING_ORDER]
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    assert [str(file.relative_to(ROOT)) for file in files[1:] if str(file.relative_to(ROOT)) not in page] == []
    assert sum(len(file.read_text().splitlines()) for file in files) <= 800


def test_calls_of_import_module_point_downwards_as_imports_do() -> None:
    """`lint-imports` does not see them. A name that is not constant is not followed."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    floors = {name.strip(): floor for floor, names in enumerate(contract["layers"]) for name in names.split("|")}

    def floor_of(module: str) -> int:
        return next((floors[name] for name in sorted(floors, reverse=True) if f"{module}.".startswith(f"{name}.")), 0)

    upwards = []
    for path in (ROOT / "hydraloop").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
                name = node.args[0]
                target = name.value if isinstance(name, ast.Constant) else None
                if isinstance(target, str) and target.startswith("hydraloop.") and floor_of(target) < floor_of(module):
                    upwards.append(f"{module} -> {target}")
    assert upwards == []
