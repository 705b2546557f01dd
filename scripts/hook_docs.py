"""Write the generated parts of `docs/reference/`: hooks, options, schedules, and what a hook finds on the engine.

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
import sys
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf

import hydraloop  # stores the options
from hydraloop.engine.hook import Priority
from hydraloop.engine.hook_order import mount_points_of
from hydraloop.schemas import stored
from hydraloop.schemas.docs import field_docs, summary, typed
from hydraloop.schemas.hooks import HookConf
from hydraloop.schemas.root import DEFAULT_HOOKS, Config

ROOT = Path(hydraloop.__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
_HEAD = ("| option | default | meaning |", "|---|---|---|")
BEGIN = "<!-- {}: written by scripts/hook_docs.py -->"
END = "<!-- /{} -->"
GROUPS = ("task", "model", "data", "optimizer", "precision")
"""Config groups on the page of options; hooks and schedules have their own pages."""
COMMON = ("priority", "on_error")
"""Options of all hooks. The page describes them once."""
ENGINE_NAMES = (
    "progress.epoch",
    "progress.iteration",
    "progress.optimizer_step",
    "max_epochs",
    "max_iters",
    "model",
    "task",
    "optimizer",
    "loaders",
    "hooks",
    "device",
    "distributed",
    "run_dir",
    "metrics",
    "messages.add",
    "log_record",
    "log_image",
    "request_stop",
    "request_checkpoint",
    "skip_step",
    "evaluator.during",
)
"""What the author of a hook needs: counters, objects, numbers, requests."""


@dataclass(frozen=True)
class Option:
    """An option of the config group `hooks` or `default_hooks`."""

    name: str
    group: str
    schema: Any

    @property
    def cls(self) -> str:
        """Name of the hook's class."""
        return str(self.defaults["_target_"]).rpartition(".")[2]

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the source of the class declares."""
        return _declared(self.cls)

    @property
    def priority(self) -> str:
        """Default priority, with its name if it has one: `NORMAL 50`."""
        number = self.facts["priority"]
        names = [name for name, value in Priority.__members__.items() if value == number]
        return f"{names[0]} {number}" if names else str(number)

    @cached_property
    def described_by(self) -> str:
        """The option that describes the hook: `profiler` for `npu_profiler`, otherwise this one."""
        alike = [name for name, schema in stored("hooks") if schema._target_ == self.defaults["_target_"]]
        return next((name for name in alike if self.facts["module"].endswith(f".{name}")), self.name)

    @property
    def description(self) -> str:
        """What the hook does, and the paragraph on its priority, cost and origin, of the docstring of its class."""
        if self.described_by != self.name:
            return f"{summary(self.schema)}. This is [`{self.described_by}`](#{self.described_by}) with other defaults."
        _, own = next(_with_bases("hydraloop.hooks", self.cls))
        first, *others = inspect.cleandoc(ast.get_docstring(own) or "").split("\n\n")
        text = "\n\n".join([first, *(part for part in others if part.startswith("Priority"))])
        return re.sub(r"\s+Options:\s+`\w+`\.", "", text)  # the table has them

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The dataclass as `{field: default}`."""
        plain = OmegaConf.to_container(OmegaConf.structured(self.schema))
        assert isinstance(plain, dict)
        return {str(name): value for name, value in plain.items()}


@cache
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


@cache
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
    like, same = _like(option, rows)
    own = [row for row in rows if row not in same]
    lines += [*own, ""] if len(own) > len(_HEAD) else []
    if same:
        lines += [f"{', '.join(row.split()[1] for row in same)}: as in [`{like}`](#{like}).", ""]
    return "\n".join(lines)


def _like(option: Option, rows: list[str]) -> tuple[str, list[str]]:
    """Return the hook whose section has rows of this one, and these rows: that of its class, or an earlier one."""
    found = options()
    names = [other.name for other in found]
    candidates = names[: names.index(option.name)] if option.described_by == option.name else [option.described_by]
    for other in found:
        described = _rows_of(other)
        same = [row for row in rows[len(_HEAD) :] if row in described]
        if same and other.name in candidates and other.described_by == other.name:
            return other.name, same
    return "", []


@cache
def _rows_of(option: Option) -> list[str]:
    return _table(option.schema)


def hook_docstrings() -> str:
    """Return what makes Sphinx show the docstrings of the classes of hooks."""
    classes = dict.fromkeys(option.cls for option in options())
    return "\n".join(["```{eval-rst}", *(f".. autoclass:: hydraloop.hooks.{cls}" for cls in classes), "```"])


def engine_table() -> str:
    """Return the table of what a hook finds on the engine, with the docstrings of the engine's parts."""
    (_, engine), *_ = _with_bases("hydraloop.engine.engine", "Engine")
    on_parts = dict(re.findall(r"(\w+): .* = _forward_to\('([\w.]+)'\)", ast.unparse(engine)))
    rows = ["| name | meaning |", "|---|---|"]
    for name in ENGINE_NAMES:
        part, _, attribute = on_parts.get(name, name).partition(".")
        (_, source), *_ = _with_bases("hydraloop.engine.engine", part.capitalize())
        arguments, text = _documented(source, attribute)
        rows.append(f"| `engine.{name}{arguments}` | {_cell(text)} |")
    return "\n".join(rows)


def _documented(cls: ast.ClassDef, name: str) -> tuple[str, str]:
    """Return the arguments (empty for an attribute) and the first paragraph on a name of a class."""
    for node in ast.walk(cls):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        if isinstance(node, ast.FunctionDef) and node.name == name:
            text = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")[0]
            is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
            return "" if is_property else f"({_without_types(node.args)})", " ".join(text.split())
        for statement, following in pairwise(node.body):
            if re.match(rf"(self\.)?{name}\b", ast.unparse(statement)) and isinstance(following, ast.Expr):
                return "", " ".join(str(ast.literal_eval(following.value)).split())
    raise ValueError(f"{cls.name} has no {name} with a docstring")


def _without_types(arguments: ast.arguments) -> str:
    """Return the arguments of a method as they are written in a call, without `self`."""
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.args = arguments.args[1:]
    return ast.unparse(arguments)


def schedule_table() -> str:
    """Return the table of schedules, with one row for each option of `scheduler`."""
    rows = ["| option | what it does |", "|---|---|"]
    for name, schema, _ in _group("scheduler"):
        rows.append(f"| [`{name}`](#{name}) | {_cell(_said(schema))} |")
    return "\n".join(rows)


def schedule_sections() -> str:
    """Return the options that schedules share, then a section for each schedule, with its own options."""
    shared = _shared("scheduler")
    sections = _shared_section("schedules", shared)
    for name, schema, target in _group("scheduler"):
        sections += [f"### {name}", "", f"`{target}`", "", *_own(_table(schema), shared), ""]
    return "\n".join(sections)


def option_sections() -> str:
    """Return all keys of the config: the root and the sections that every run has, then the groups."""
    described: dict[type, str] = {}
    lines = ["## Top level", "", *_described(Config, "", described)]
    for group in GROUPS:
        shared = _shared(group)
        lines += [f"## {group}", "", *_shared_section(f"{group} options", shared)]
        for name, schema, _ in _group(group):
            lines += [f"### {group}={name}", "", inspect.getdoc(schema) or "", ""]
            lines += _described(schema, "task.model" if group == "model" else group, described, shared)
    return "\n".join(lines)


def _shared(group: str) -> list[str]:
    """Return the rows that half of the options of a config group have."""
    schemas = [schema for _, schema, _ in _group(group)]
    counts = Counter(row for schema in schemas for row in _table(schema, skip=_sections(schema))[2:])
    return [row for row, count in counts.items() if count > 1 and 2 * count >= len(schemas)]


def _shared_section(of: str, shared: list[str]) -> list[str]:
    """Return the section of the rows that half of the options of a group have."""
    return [f"### Common to {of}", "", *_HEAD, *shared, ""] if shared else []


def _own(rows: list[str], shared: Collection[str]) -> list[str]:
    """Return the rows that are not shared, then the names of shared options that this one does not have."""
    own, names = [row for row in rows if row not in shared], [row.split()[1] for row in rows[2:]]
    missing = ", ".join(name for name in (row.split()[1] for row in shared) if name not in names)
    return [*(own if len(own) > len(_HEAD) else []), *(["", f"It does not have {missing}."] if missing else [])]


def _sections(schema: Any) -> list[str]:
    """Return the names of the fields that are dataclasses."""
    values = schema()
    return [field.name for field in dataclasses.fields(schema) if dataclasses.is_dataclass(getattr(values, field.name))]


def _described(schema: Any, key: str, described: dict[type, str], shared: Collection[str] = ()) -> list[str]:
    """Return the table of a dataclass at `key`, then the tables of nested dataclasses that are not in `described`."""
    values, shown, below = schema(), {}, []
    for name in _sections(schema):
        value = getattr(values, name)
        where = f"{key}.{name}" if key else name
        if type(value) not in described:
            described[type(value)] = where
            level = "####" if where.split(".")[0] in GROUPS else "##" + "#" * where.count(".")
            title = [f"{level} {where}", "", inspect.getdoc(type(value)) or "", ""]
            below += [*title, *_described(type(value), where, described)]
        shown[name] = f"see `{described[type(value)]}`"
    rows = _own(_table(schema, shown), shared)
    return [*rows, "", *below] if rows else below


def _table(schema: Any, shown: dict[str, str] | None = None, skip: Collection[str] = ()) -> list[str]:
    """Return the table of a dataclass's options, with defaults and texts.

    Args:
        schema: the dataclass.
        shown: text to show instead of the default, by option.
        skip: options that are not in the table.
    """
    plain = OmegaConf.to_container(OmegaConf.structured(schema))
    assert isinstance(plain, dict)
    texts, lines = field_docs(schema), list(_HEAD)
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


PAGES = {
    "hooks.md": {
        "engine": engine_table,
        "table": hook_table,
        "hooks": hook_sections,
    },
    "options.md": {"options": option_sections},
    "python.md": {"hooks": hook_docstrings},
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
