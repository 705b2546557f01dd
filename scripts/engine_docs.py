"""Tables of the names on the engine and on its parts, from their source. `scripts/hook_docs.py` writes them to a page.

Does not import torch.
"""

from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from pathlib import Path

import hydraloop

ENGINE = Path(hydraloop.__file__).resolve().parent / "engine"
PARTS = {
    "run": ("run.py", "Run", "The task and what trains it"),
    "batches": ("batches.py", "Batches", "The task and what trains it"),
    "progress": ("progress.py", "Progress", "Progress"),
    "stepper": ("steps/stepper.py", "Stepper", "Progress"),
    "evaluator": ("evaluation/evaluator.py", "Evaluator", "Evaluation"),
    "requests": ("requests.py", "Requests", "Requests and checkpoints"),
    "checkpoints": ("checkpoints.py", "Checkpoints", "Requests and checkpoints"),
    "messages": ("records/messages.py", "Messages", "Records"),
    "records": ("records/records.py", "Records", "Records"),
    "loss_check": ("loss_check.py", "LossCheck", "The end"),
    "outcome": ("outcome.py", "Outcome", "The end"),
    "calls": ("call_table.py", "CallTable", "Hooks"),
}
"""{part of the engine: (file in `hydraloop/engine`, class, group of its names in the table of the engine)}"""
METHODS = {
    "batches": ("on_device",),
    "stepper": ("rewrap",),
    "evaluator": ("during", "is_due", "report_best", "higher_is_better", "without_data_set"),
    "requests": ("preempt",),
    "checkpoints": ("save", "settle"),
    "messages": ("add", "provide", "read", "facts"),
    "records": ("log_object", "log_figure", "log_text", "log_table", "log_histogram"),
    "loss_check": ("end_diverged",),
    "calls": ("build",),
}
"""Methods of parts that hooks call. The others are for the engine."""


def engine_tables() -> str:
    """Return the tables of the engine's public names, by group."""
    source = _class("engine.py", "Engine")
    groups: dict[str, list[str]] = {title: [] for _, _, title in PARTS.values()}
    for name, (part, attribute) in _names_of_parts(source).items():
        arguments, text = _documented(_class(*PARTS[part][:2]))[attribute]
        groups[PARTS[part][2]].append(_name_row(name, arguments, text))
    groups["For scripts, not for hooks"] = [_name_row(name, *found) for name, found in _documented(source).items()]
    tables = [[f"**{title}**", "", "| name | meaning |", "|---|---|", *rows] for title, rows in groups.items() if rows]
    return "\n\n".join("\n".join(table) for table in tables)


def part_table() -> str:
    """Return the table of the engine's parts."""
    rows = ["| part | what it is | file in `hydraloop/engine/` |", "|---|---|---|"]
    for part, (file, cls, _) in PARTS.items():
        text = _first_paragraph(ast.get_docstring(_class(file, cls)) or "")
        rows.append(f"| `engine.{part}` | {_cell(text)} | `{file}` |")
    return "\n".join(rows)


def part_names() -> str:
    """Return the table of the parts' attributes, and of the methods that hooks call, without the engine's own names."""
    rows, on_engine = ["| name | meaning |", "|---|---|"], _names_of_parts(_class("engine.py", "Engine")).values()
    for part, (file, cls, _) in PARTS.items():
        for name, (arguments, text) in _documented(_class(file, cls)).items():
            shown = (part, name) not in on_engine and name not in PARTS
            if shown and (not arguments or name in METHODS.get(part, ())):
                rows.append(_name_row(f"{part}.{name}", arguments, text))
    return "\n".join(rows)


def _name_row(name: str, arguments: str, text: str) -> str:
    return f"| `engine.{name}{arguments}` | {_cell(text)} |"


def _class(file: str, name: str) -> ast.ClassDef:
    """Return the source of a class in a file of `hydraloop/engine`."""
    source = (ENGINE / file).read_text(encoding="utf-8")
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return found


def _names_of_parts(engine: ast.ClassDef) -> dict[str, tuple[str, str]]:
    """Return {name of the engine: (part, name in it)} of the names that are declared with `_of`."""
    found = {}
    for node in engine.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
            part, _, attribute = ast.literal_eval(node.value.args[0]).partition(".")
            found[ast.unparse(node.target)] = (part, attribute)
    return found


def _documented(cls: ast.ClassDef) -> dict[str, tuple[str, str]]:
    """Return {public name: (arguments, text)} of a class: attributes with a docstring, properties and methods."""
    constructors = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    found = {}
    for statements in (cls.body, *(constructor.body for constructor in constructors)):
        for statement, following in pairwise(statements):
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
                )
                name = ast.unparse(targets[0]).removeprefix("self.") if targets[0] is not None else "_"
                found[name] = ("", _first_paragraph(str(following.value.value)))
    for node in cls.body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
            text = _first_paragraph(ast.get_docstring(node) or "")
            found[node.name] = ("" if is_property else f"({_without_types(node.args)})", text)
    return {name: described for name, described in found.items() if not name.startswith("_")}


def _without_types(arguments: ast.arguments) -> str:
    """Return the arguments of a method as they are written in a call, without `self`."""
    for argument in (*arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
    arguments.args = arguments.args[1:]
    return ast.unparse(arguments)


def _first_paragraph(text: str) -> str:
    return " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
