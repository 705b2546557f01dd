"""Hooks and schedules as dataclasses and docstrings describe them: README's tables, `docs/hooks.md` with every option.

    python scripts/hook_docs.py            # writes both
    python scripts/hook_docs.py --check    # exit status 1 where one of them is not what would be written

Needs no torch: the dataclasses are in `hydraloop/schemas`, and docstrings are read from the source.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import hydraloop  # fills the store
from hydraloop.engine.hook import Priority
from hydraloop.schemas.docs import field_docs, summary
from hydraloop.schemas.root import DEFAULT_HOOKS

ROOT = Path(hydraloop.__file__).resolve().parents[1]
README = ROOT / "README.md"
REFERENCE = ROOT / "docs" / "hooks.md"
BEGIN = "<!-- {}: written by scripts/hook_docs.py -->"
END = "<!-- /{} -->"


@dataclass(frozen=True)
class Option:
    """A hook as it can be selected."""

    name: str
    group: str
    schema: Any

    @property
    def cls(self) -> str:
        """The name of the class it builds."""
        return self.defaults["_target_"].rpartition(".")[2]

    @property
    def priority(self) -> str:
        """Its default priority, with its name where it has one: `NORMAL 50`."""
        number = self.schema.default_priority
        names = [name for name, value in Priority.__members__.items() if value == number]
        return f"{names[0]} {number}" if names else str(number)

    @property
    def description(self) -> str:
        """The docstring of its class, up to the arguments."""
        hooks = ROOT / "hydraloop" / "hooks"
        one, several = hooks / f"{self.name}.py", hooks / self.name / "hook.py"
        source = (one if one.exists() else several).read_text(encoding="utf-8")
        classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
        (own,) = [node for node in classes if node.name == self.cls]
        return inspect.cleandoc(ast.get_docstring(own) or "").partition("\n\nArgs:")[0]

    @property
    def defaults(self) -> dict[str, Any]:
        """{field: default} of the dataclass."""
        plain = OmegaConf.to_container(OmegaConf.structured(self.schema))
        assert isinstance(plain, dict)
        return {str(name): value for name, value in plain.items()}


def options() -> list[Option]:
    """Default hooks by priority, as they are called; then the custom ones by name."""
    store = ConfigStore.instance().repo
    found = []
    for group in ("default_hooks", "hooks"):
        for file, entry in store[group].items():
            schema = OmegaConf.get_type(entry.node)
            if dataclasses.is_dataclass(schema):
                found.append(Option(file.removesuffix(".yaml"), group, schema))
    order = {name: index for index, name in enumerate(DEFAULT_HOOKS)}
    default = sorted(
        (option for option in found if option.group == "default_hooks"),
        key=lambda option: (option.schema.default_priority, order[option.name]),
    )
    return default + sorted((option for option in found if option.group == "hooks"), key=lambda option: option.name)


def table() -> str:
    """The README's table of hooks: a row a hook."""
    rows = ["| option | class | priority | what it does |", "|---|---|---|---|"]
    for option in options():
        mark = " (default)" if option.group == "default_hooks" else ""
        name = f"[`{option.name}`](docs/hooks.md#{option.name}){mark}"
        rows.append(f"| {name} | `{option.cls}` | {option.priority} | {_cell(_begun_small(summary(option.schema)))} |")
    return "\n".join(rows)


def reference() -> str:
    """`docs/hooks.md`: each hook with all its options."""
    return (
        "# Hooks and their options\n\n"
        "Written by `scripts/hook_docs.py` from the dataclasses in `hydraloop/schemas` and the hooks' docstrings.\n"
        "On the command line an option of a default hook is `default_hooks.<name>.<option>=…`, of another one\n"
        "`hooks=[<name>] hooks.<name>.<option>=…`.\n\n" + "\n".join(_section(option) for option in options())
    )


def _section(option: Option) -> str:
    schema, docs, defaults = option.schema, field_docs(option.schema), option.defaults
    lines = [f"## {option.name}", "", f"`{option.group}.{option.name}`, `{defaults['_target_']}`", ""]
    lines += [option.description, ""]
    if schema.runs_after:
        lines += [f"Comes after {', '.join(f'`{name}`' for name in schema.runs_after)}.", ""]
    lines += ["| option | default | |", "|---|---|---|"]
    for field in dataclasses.fields(schema):
        if field.name not in ("_target_", "_partial_"):
            lines.append(f"| `{field.name}` | `{_shown(defaults[field.name])}` | {_cell(docs.get(field.name, ''))} |")
    return "\n".join([*lines, ""])


def _shown(value: Any) -> str:
    """A default as it is typed on a command line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _begun_small(text: str) -> str:
    """A sentence as it stands in a table: without a capital at its start, where that is no name."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def schedules() -> str:
    """The README's other table: a row for each option of `scheduler`."""
    rows = ["| option | class | what it does |", "|---|---|---|"]
    for file, entry in sorted(ConfigStore.instance().repo["scheduler"].items()):
        cls = str(entry.node["_target_"]).rpartition(".")[2]
        what = summary(OmegaConf.get_type(entry.node)).partition(": ")[2]
        rows.append(f"| `{file.removesuffix('.yaml')}` | `{cls}` | {_cell(what)} |")
    return "\n".join(rows)


def with_tables(readme: str) -> str:
    """The README with the present tables between their marks.

    Raises:
        ValueError: the marks are not there.
    """
    for name, rows in (("hooks", table()), ("schedules", schedules())):
        begin, end = BEGIN.format(name), END.format(name)
        before, found, rest = readme.partition(begin)
        _, ended, after = rest.partition(end)
        if not found or not ended:
            raise ValueError(f"{README} has no {begin} … {end}")
        readme = f"{before}{begin}\n{rows}\n{end}{after}"
    return readme


def wanted() -> Iterator[tuple[Path, str]]:
    """(file, what it should be)."""
    yield README, with_tables(README.read_text(encoding="utf-8"))
    yield REFERENCE, reference()


def main() -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where something is old")
    arguments = parser.parse_args()
    old = [(path, text) for path, text in wanted() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in old:
        print(f"{path.relative_to(ROOT)} {'is not what the dataclasses say' if arguments.check else 'written'}")
        if not arguments.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if arguments.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
