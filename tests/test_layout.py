"""The layout: no folder has more files than a reader can take in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST = 20
"""Files in a folder. More need sub-folders; `hooks/` has one file for each hook."""


def test_no_folder_but_hooks_has_more_than_twenty_files() -> None:
    files = [path for name in ("hydraloop", "tests", "scripts") for path in (ROOT / name).rglob("*.py")]
    counts = Counter(str(path.parent.relative_to(ROOT)) for path in files if path.parent.name != "hooks")
    assert len(counts) > 20, "the code is somewhere else"
    assert {folder: count for folder, count in counts.items() if count > MOST} == {}
