"""Test the tests of the package outside of hooks: change one place of a function and run the tests of its file.

    python scripts/mutants.py [--number 200] [--seed 0] [--jobs 2]
    python scripts/mutants.py --number 200 --list        # only list the changes

A mutant has an empty body of a function, an inverted condition, another comparison or another constant: as many of each
kind. The tests of a file are those that import it, and those named after it. If all of them pass, the tests of its
folder run, then those of the command line. Slow tests are left out. A test that kills a mutant must pass without it.

Which places are changed depends on the seed, on the text of each function and on its name, not on its file. So two
versions of the package have the same mutants in all functions that have not changed.

The output is a Markdown table. The exit code is 2 if a test fails without a mutant.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hook_mutants import ROOT, in_copies, judged

KINDS = ("body", "condition", "comparison", "constant")
OTHER = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
"""The comparison that takes the place of another one."""


@dataclass(frozen=True, order=True)
class Mutant:
    """A place that is changed."""

    rank: str
    """The mutants with the lowest ranks are taken."""
    file: str
    function: str
    """Its name, with that of its class."""
    node: int
    """Number of the changed node in the function."""
    kind: str

    def source(self, text: str) -> tuple[str, str]:
        """Return the changed source of the file, and the change."""
        tree = ast.parse(text)
        node = [*ast.walk(dict(functions(tree))[self.function])][self.node]
        before = ast.unparse(node).splitlines()[0]
        change(node)
        shown = "its body -> `pass`" if self.kind == "body" else f"`{before}` -> `{ast.unparse(node).splitlines()[0]}`"
        return ast.unparse(ast.fix_missing_locations(tree)), shown


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a file, and the methods of its classes."""
    for item in tree.body:
        if isinstance(item, ast.FunctionDef):
            yield item.name, item
        elif isinstance(item, ast.ClassDef):
            yield from ((f"{item.name}.{one.name}", one) for one in item.body if isinstance(one, ast.FunctionDef))


def change(node: ast.AST) -> str | None:
    """Change a node. Returns the kind of the change; None if the node cannot be changed."""
    if isinstance(node, ast.FunctionDef):
        if all(isinstance(one, ast.Expr | ast.Pass | ast.Raise) for one in node.body):
            return None  # it does nothing, or a subclass defines it
        node.body, node.decorator_list = [ast.Pass()], []
        return "body"
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        node.test = ast.UnaryOp(ast.Not(), node.test)
        return "condition"
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        node.ops = [OTHER[type(node.ops[0])]()]
        return "comparison"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
        return "constant"
    return None


def mutants(seed: int, number: int) -> list[Mutant]:
    """Return the mutants of a seed: as many of each kind."""
    found: dict[str, list[Mutant]] = {kind: [] for kind in KINDS}
    for path in sorted((ROOT / "hydraloop").rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith("hydraloop/hooks/"):
            for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
                text = f"{seed} {name} {ast.unparse(function)}"
                for index, node in enumerate([*ast.walk(function)]):
                    if (kind := change(node)) is not None:
                        rank = hashlib.sha256(f"{text} {index}".encode()).hexdigest()
                        found[kind].append(Mutant(rank, file, name, index, kind))
    return [one for kind in KINDS for one in sorted(found[kind])[: number // len(KINDS)]]


def tests_of(file: str) -> Iterator[list[str]]:
    """Yield groups of test files, nearest first."""
    module, folder = file.removesuffix(".py").replace("/", "."), Path(file).parent.name
    parent, _, name = module.removesuffix(".__init__").rpartition(".")
    imports = re.compile(rf"{re.escape(module)}\b|from {re.escape(parent)} import .*\b{name}\b")
    tests = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "e2e" not in path.parts]
    near = [path for path in tests if path.stem == f"test_{name}" or imports.search(path.read_text(encoding="utf-8"))]
    beside = [path for path in tests if folder in path.parts and path not in near]
    for group in (near, beside, [ROOT / "tests/e2e/test_command_line.py", ROOT / "tests/e2e/test_mistakes.py"]):
        if group:
            yield [str(path.relative_to(ROOT)) for path in group]


def row(repository: Path, mutant: Mutant) -> str:
    """Run the tests of a mutant. Returns a row of the table."""
    text = (repository / mutant.file).read_text(encoding="utf-8")
    source, changed = mutant.source(text)
    verdict = "**survives**"
    for tests in tests_of(mutant.file):
        passed, by = outcome(repository, mutant.file, source, tests)
        if not passed:
            test = by.rpartition("::")[2].partition("[")[0]
            alone = [*tests, "-k", test] if test.startswith("test_") else tests
            sound, _ = outcome(repository, mutant.file, text, alone)
            verdict = f"killed by {by or 'an error'}" if sound else f"**fails without a mutant**: {by}"
            break
    cells = (mutant.file, mutant.function, changed.replace("|", "\\|"), verdict)
    return f"| {' | '.join(cells)} |"


def outcome(repository: Path, file: str, source: str, tests: list[str]) -> tuple[bool, str]:
    """Run tests with another source of a file. Returns whether they passed, and what failed."""
    try:
        return judged(repository, file, source, tests, marks="not slow and not nightly")
    except RuntimeError as error:  # pytest ends with 5 if no test is left, and with 2 or 4 if it cannot import them
        return str(error).startswith("pytest ended with 5"), "the import of the tests"


def main() -> int:
    """Print the table and a summary. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of test runs at a time")
    parser.add_argument("--list", action="store_true", help="run no tests")
    options = parser.parse_args()
    chosen = mutants(options.seed, options.number)
    if options.list:
        print(*(f"{one.kind:<11} {one.file} {one.function}" for one in chosen), sep="\n")
        return 0
    print("| file | function | change | its tests |\n|---|---|---|---|")
    rows = []
    for line in in_copies(row, chosen, jobs=options.jobs):
        print(line, flush=True)
        rows.append(line)
    killed, broken = (sum(word in line for line in rows) for word in ("| killed by", "**fails without"))
    print(f"\n{len(rows)} mutants: {killed} killed, {len(rows) - killed - broken} survived")
    return 2 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
