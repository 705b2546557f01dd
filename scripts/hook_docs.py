"""Write the generated parts of `docs/reference/`: tables of hooks, options and schedules, and of the engine's names.

Also writes `hydraloop/schemas/hook_classes.json`, the facts about the classes of hooks that a dry run shows.

    python scripts/hook_docs.py            # write the tables and the file
    python scripts/hook_docs.py --check    # write nothing; exit code 1 if a page is out of date

The texts come from the dataclasses in `hydraloop/schemas` and the docstrings of the hooks and the engine. Does not
import torch.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import json
import re
import runpy
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

import hydraloop  # stores the options
from hydraloop.engine.call_table import mount_points_of
from hydraloop.engine.hook import Priority
from hydraloop.schemas import stored
from hydraloop.schemas.docs import field_docs, summary, typed
from hydraloop.schemas.hooks import HookConf
from hydraloop.schemas.root import DEFAULT_HOOKS, Config

ROOT = Path(hydraloop.__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
BEGIN = "<!-- {}: written by scripts/hook_docs.py -->"
END = "<!-- /{} -->"
GROUPS = ("task", "model", "data", "optimizer", "precision")
"""Config groups on the page of options; hooks and schedules have their own pages."""
COMMON = ("priority", "on_error")
"""Options of all hooks. The page describes them once."""


@dataclass(frozen=True)
class Option:
    """An option of the config group `hooks` or `default_hooks`."""

    name: str
    group: str
    schema: Any

    @property
    def cls(self) -> str:
        """Name of the hook's class."""
        return self.defaults["_target_"].rpartition(".")[2]

    @property
    def facts(self) -> dict[str, Any]:
        """What the source of the class declares."""
        return _declared(self.cls)

    @property
    def priority(self) -> str:
        """Default priority, with its name if it has one: `NORMAL 50`."""
        number = self.facts["priority"]
        names = [name for name, value in Priority.__members__.items() if value == number]
        return f"{names[0]} {number}" if names else str(number)

    @property
    def description(self) -> str:
        """Docstring of the hook's class, without arguments and errors."""
        module, own = next(_with_bases("hydraloop.hooks", self.cls))
        if self.name not in module.split("."):
            described = module.rpartition(".")[2]
            return f"{summary(self.schema)}. This is [`{described}`](#{described}) with other defaults."
        text = re.split(r"\n\n(?:Args|Raises):", inspect.cleandoc(ast.get_docstring(own) or ""))[0]
        return re.sub(r"\s+Options:\s+`\w+`\.", "", text)  # the table has them

    @property
    def defaults(self) -> dict[str, Any]:
        """The dataclass as `{field: default}`."""
        plain = OmegaConf.to_container(OmegaConf.structured(self.schema))
        assert isinstance(plain, dict)
        return {str(name): value for name, value in plain.items()}


def options() -> list[Option]:
    """Return the default hooks in the order of their calls, then the other hooks by name."""
    found = [Option(name, group, schema) for group in ("default_hooks", "hooks") for name, schema in stored(group)]
    order = {name: index for index, name in enumerate(DEFAULT_HOOKS)}
    default = sorted(
        (option for option in found if option.group == "default_hooks"),
        key=lambda option: (option.facts["priority"], order[option.name]),
    )
    return default + sorted((option for option in found if option.group == "hooks"), key=lambda option: option.name)


def hook_classes() -> str:
    """Return the text of `hook_classes.json`: what the source of each class of `hydraloop.hooks` declares."""
    lines = [f"  {json.dumps(name)}: {json.dumps(_declared(name))}" for name in _exported()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _exported() -> list[str]:
    source = (ROOT / "hydraloop" / "hooks" / "__init__.py").read_text(encoding="utf-8")
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return [node.names[0].name for node in imports if str(node.module).startswith("hydraloop.hooks.")]


def _declared(name: str) -> dict[str, Any]:
    """Return the facts about a class of `hydraloop.hooks`, inherited ones included, from the syntax trees."""
    modules, classes = zip(*_with_bases("hydraloop.hooks", name), strict=True)
    statements = [node for cls in classes for node in cls.body]
    methods = {node.name for node in statements if isinstance(node, ast.FunctionDef)}
    # The class itself comes last, because its values replace those of its bases.
    values = {
        ast.unparse(node.targets[0]): ast.unparse(node.value)
        for node in reversed(statements)
        if isinstance(node, ast.Assign)
    }
    return {
        "module": modules[0],
        "priority": Priority.of(values.get("priority", "NORMAL").removeprefix("Priority.")),
        "runs_after": ast.literal_eval(values.get("runs_after", "()")),
        "mount_points": mount_points_of(methods.__contains__),
    }


def _with_bases(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield (module, source) of the class that a module calls `name`, and of its bases up to `Hook`."""
    path = ROOT / module.replace(".", "/")
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and name in [imported.asname or imported.name for imported in node.names]:
            yield from _with_bases(str(node.module), name)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield module, node
            for base in node.bases:
                if ast.unparse(base) != "Hook":
                    yield from _with_bases(module, ast.unparse(base))


def hook_table() -> str:
    """Return the table of hooks, with one row for each hook."""
    rows = ["| option | priority | what it does |", "|---|---|---|"]
    for option in options():
        mark = " (default)" if option.group == "default_hooks" else ""
        name = f"[`{option.name}`](#{option.name}){mark}"
        rows.append(f"| {name} | {option.priority} | {_cell(_begun_small(summary(option.schema)))} |")
    return "\n".join(rows)


def hook_sections() -> str:
    """Return a section for each hook, with its options."""
    return "\n".join(_hook_section(option) for option in options())


def _hook_section(option: Option) -> str:
    lines = [f"## {option.name}", "", f"`{option.group}.{option.name}`, `{option.defaults['_target_']}`", ""]
    lines += [
        option.description,
        "",
        f"Mount points: {', '.join(f'`{point}`' for point in option.facts['mount_points'])}.",
        "",
    ]
    if option.facts["runs_after"]:
        lines += [f"Runs after {', '.join(f'`{name}`' for name in option.facts['runs_after'])}.", ""]
    if option.schema.on_error != HookConf.on_error:
        lines += [f"`on_error` is `{option.schema.on_error}` by default.", ""]
    rows = _table(option.schema, skip=COMMON)
    return "\n".join([*lines, *rows, ""] if len(rows) > 2 else lines)


def schedule_table() -> str:
    """Return the table of schedules, with one row for each option of `scheduler`."""
    rows = ["| option | what it does |", "|---|---|"]
    for name, schema, _ in _group("scheduler"):
        rows.append(f"| [`{name}`](#{name}) | {_cell(_said(schema))} |")
    return "\n".join(rows)


def schedule_sections() -> str:
    """Return a section for each schedule, with its options."""
    sections = []
    for name, schema, target in _group("scheduler"):
        sections += [f"### {name}", "", f"`scheduler=[{name}]`, `{target}`: {_said(schema)}.", "", *_table(schema), ""]
    return "\n".join(sections)


def option_sections() -> str:
    """Return all keys of the config: the root and the sections that every run has, then the groups."""
    described: dict[type, str] = {}
    lines = ["## Top level", "", *_described(Config, "", described)]
    for group in GROUPS:
        lines += [f"## {group}", ""]
        for name, schema, _ in _group(group):
            lines += [f"### {group}={name}", "", inspect.getdoc(schema) or "", ""]
            lines += _described(schema, "task.model" if group == "model" else group, described)
    return "\n".join(lines)


def _described(schema: Any, key: str, described: dict[type, str]) -> list[str]:
    """Return the table of a dataclass at `key`, then the tables of nested dataclasses that are not in `described`."""
    values, shown, below = schema(), {}, []
    for field in dataclasses.fields(schema):
        value = getattr(values, field.name)
        if not dataclasses.is_dataclass(value):
            continue
        where = f"{key}.{field.name}" if key else field.name
        if type(value) not in described:
            described[type(value)] = where
            level = "####" if where.split(".")[0] in GROUPS else "##" + "#" * where.count(".")
            title = [f"{level} {where}", "", inspect.getdoc(type(value)) or "", ""]
            below += [*title, *_described(type(value), where, described)]
        shown[field.name] = f"see `{described[type(value)]}`"
    rows = _table(schema, shown)
    return [*rows, "", *below] if len(rows) > 2 else below


def _table(schema: Any, shown: dict[str, str] | None = None, skip: Collection[str] = ()) -> list[str]:
    """Return the table of a dataclass's options, with defaults and texts.

    Args:
        schema: the dataclass.
        shown: text to show instead of the default, by option.
        skip: options that are not in the table.
    """
    plain = OmegaConf.to_container(OmegaConf.structured(schema))
    assert isinstance(plain, dict)
    texts, lines = field_docs(schema), ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(schema):
        if field.name not in ("_target_", "_partial_", *skip):
            default = "required" if plain[field.name] == MISSING else f"`{typed(plain[field.name])}`"
            default = (shown or {}).get(field.name, default)
            lines.append(f"| `{field.name}` | {default} | {_cell(texts.get(field.name) or _section_text(field))} |")
    return lines


def _section_text(field: dataclasses.Field[Any]) -> str:
    """Return the docstring of a field's own dataclass, or nothing if it is not a dataclass."""
    kind = field.type if isinstance(field.type, type) else field.default_factory
    return inspect.getdoc(kind) or "" if dataclasses.is_dataclass(kind) else ""


def _group(group: str) -> Iterator[tuple[str, Any, str]]:
    """Yield (name, dataclass, `_target_`) for each option of a config group."""
    for name, schema in sorted(stored(group)):
        yield name, schema, getattr(schema, "_target_", "")


def _said(schema: Any) -> str:
    """Return the summary of an option without the command line at its beginning."""
    return summary(schema).partition(": ")[2]


def _begun_small(text: str) -> str:
    """Return a sentence for a table cell, with a small first letter unless the first word is a name."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


_ENGINE = runpy.run_path(str(ROOT / "scripts" / "engine_docs.py"))
PAGES = {
    "hooks.md": {
        "engine": _ENGINE["engine_tables"],
        "parts": _ENGINE["part_table"],
        "names of parts": _ENGINE["part_names"],
        "table": hook_table,
        "hooks": hook_sections,
    },
    "options.md": {"options": option_sections},
    "schedules.md": {"table": schedule_table, "schedules": schedule_sections},
}
"""{page: {mark: function that returns the text between the marks}}"""


def wanted() -> Iterator[tuple[Path, str]]:
    """Yield (path, text that is up to date) of `hook_classes.json` and each page.

    Raises:
        ValueError: a page has no marks.
    """
    yield ROOT / "hydraloop" / "schemas" / "hook_classes.json", hook_classes()
    for name, parts in PAGES.items():
        text = (REFERENCE / name).read_text(encoding="utf-8")
        for mark, written in parts.items():
            begin, end = BEGIN.format(mark), END.format(mark)
            before, found, rest = text.partition(begin)
            _, ended, after = rest.partition(end)
            if not found or not ended:
                raise ValueError(f"{name} has no {begin} … {end}")
            text = f"{before}{begin}\n{written()}\n{end}{after}"
        yield REFERENCE / name, text


def main() -> int:
    """Write the pages, or compare them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is out of date")
    arguments = parser.parse_args()
    old = [(path, text) for path, text in wanted() if path.read_text(encoding="utf-8") != text]
    for path, text in old:
        print(f"{path.relative_to(ROOT)} {'is out of date' if arguments.check else 'written'}")
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
    return 1 if arguments.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
