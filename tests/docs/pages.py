"""README and docs as data: pages, fenced blocks, commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.projects import REPOSITORY

ARCHITECTURE = REPOSITORY / "docs" / "explanation" / "architecture.md"
AGENTS = REPOSITORY / "docs" / "agents.md"
"""For coding agents. tests/test_wheel.py executes its commands."""
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LANGUAGES = {"bash", "python", "yaml", "text", "{toctree}", "{eval-rst}"}
"""Of fenced blocks. `text` is output or a picture; the others are commands, code, files, contents and docstrings."""
_BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"# ([\w/.-]+\.(?:py|yaml|txt))$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str

    @property
    def file(self) -> str | None:
        """The path in one of its first two lines (`# my_project/hooks.py`) if the block is the contents of a file.

        Hydra reads `# @package` in the first line only.
        """
        found = next(filter(None, map(_FILE.match, self.text.splitlines()[:2])), None)
        return found[1] if found else None

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block, without comments; continued lines are joined."""
        if self.language != "bash":
            return []
        lines = re.sub(r"\\\n\s*", "", self.text).splitlines()
        return [command for line in lines if (command := re.sub(r"(^|\s+)# .*$", "", line).strip())]


def name(page: Path) -> str:
    """Relative to the repository."""
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(language, text) for language, text in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def unquoted(command: str) -> str:
    """The parts of a command that a shell expands: everything outside single quotes."""
    assert shlex.split(command)
    return re.sub(r"'[^']*'", "", command)
