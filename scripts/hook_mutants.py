"""Test the hooks' tests: replace methods of a hook by `pass` and run its tests, which must then fail.

    python scripts/hook_mutants.py                    # all hooks of hydraloop.hooks; takes some minutes
    python scripts/hook_mutants.py ema checkpoint     # only these hooks
    python scripts/hook_mutants.py --whole            # only all methods of a hook at once; faster

For each hook, its tests (`tests/hooks/test_<option>*.py`) run without a change, when they must pass, then with all
methods replaced, then with each method replaced. The methods are the mount points that the hook overrides, including
inherited ones, and `state_dict` and `load_state_dict`. The tests run in copies of the repository, so that processes
which they start use the replaced methods, too.

The exit code is 1 if a mutant survives, and 2 if tests fail without one. The output is a Markdown table.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
COPIED = (
    "hydraloop", "tests", "conf", "my_project", "scripts", "docs", "examples", "train.py",
    "pyproject.toml", "README.md",
)  # fmt: skip
SECONDS = 300
"""Time limit for a hook's tests. A mutant that does not end counts as killed."""
NO_END = "no end within"
Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """A hook and the methods that can be replaced."""

    option: str
    module: str
    cls: str
    methods: tuple[str, ...]
    tests: tuple[str, ...]
    """Paths of its tests, relative to the repository."""

    @property
    def file(self) -> str:
        """Path of its source, relative to the repository."""
        return f"{self.module.replace('.', '/')}.py"


@dataclass(frozen=True)
class Outcome:
    """Result of a hook's tests for one mutant. Without methods, the hook was not changed."""

    target: Target
    methods: tuple[str, ...]
    passed: bool
    by: str
    """The first test that failed, or another reason."""


def targets(names: Sequence[str]) -> list[Target]:
    """Return all hooks of `hydraloop.hooks`, or those with the given names.

    Raises:
        SystemExit: a hook does not exist.
    """
    hooks = importlib.import_module("hydraloop.hooks")
    base = importlib.import_module("hydraloop.engine.hook")
    points = (*base.MOUNT_POINTS, *base.GENERAL_POINTS, "state_dict", "load_state_dict")
    found = {}
    for cls in hooks.__all__:
        hook, module = getattr(hooks, cls), hooks.CLASSES[cls]["module"]
        option = module.split(".")[2]
        own = tuple(point for point in points if getattr(hook, point) is not getattr(base.Hook, point))
        found[option] = Target(option, module, cls, own, _tests_of(option))
    unknown = set(names) - found.keys()
    if unknown:
        raise SystemExit(f"no such hook: {', '.join(sorted(unknown))}; known hooks: {', '.join(sorted(found))}")
    return [found[option] for option in sorted(names or found)]


def _tests_of(option: str) -> tuple[str, ...]:
    files = (ROOT / "tests" / "hooks").glob(f"test_{option}*.py")
    return tuple(sorted(str(path.relative_to(ROOT)) for path in files))


def mutated(source: str, cls: str, methods: Sequence[str]) -> str:
    """Return the source with these methods of a class replaced by `pass`. Inherited methods are overridden."""
    tree = ast.parse(source)
    (node,) = [item for item in tree.body if isinstance(item, ast.ClassDef) and item.name == cls]
    left = set(methods)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name in left:
            item.body, item.decorator_list = [ast.Pass()], []
            left.remove(item.name)
    node.body.extend(ast.parse(f"def {name}(self, *args, **kwargs): pass").body[0] for name in sorted(left))
    return ast.unparse(ast.fix_missing_locations(tree))


def run(repository: Path, target: Target, methods: tuple[str, ...]) -> Outcome:
    """Run a hook's tests in a copy of the repository with these methods replaced."""
    original = (repository / target.file).read_text(encoding="utf-8")
    changed = mutated(original, target.cls, methods) if methods else original
    return Outcome(target, methods, *judged(repository, target.file, changed, target.tests))


def judged(
    repository: Path, file: str, source: str, tests: Sequence[str], *, marks: str = "not nightly"
) -> tuple[bool, str]:
    """Run tests in a copy of the repository with another source of a file.

    Returns:
        Whether they passed, and the first test that failed, or another reason.
    """
    path = repository / file
    original = path.read_text(encoding="utf-8")
    path.write_text(source, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-m", marks]
    command += tests
    environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    # In its own session, so that processes that a hanging test has started can be killed.
    pytest = subprocess.Popen(
        command, cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = pytest.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)
        pytest.communicate()
        return False, f"{NO_END} {SECONDS} s"
    finally:
        path.write_text(original, encoding="utf-8")
    if pytest.returncode not in (0, 1):  # neither passed nor failed: an error of pytest itself
        raise RuntimeError(f"pytest ended with {pytest.returncode} for {file}:\n{output[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\S+)", output, re.MULTILINE)
    return pytest.returncode == 0, failed.group(1) if failed else ""


def mutants(target: Target, *, whole: bool) -> list[tuple[str, ...]]:
    """Return the sets of methods to replace: none, all, and each method alone."""
    alone = [] if whole or len(target.methods) == 1 else [(method,) for method in target.methods]
    return [(), target.methods, *alone]


def outcomes(chosen: Sequence[Target], *, whole: bool, jobs: int) -> Iterator[Outcome]:
    """Yield the result of each run."""
    works = [(target, methods) for target in chosen for methods in mutants(target, whole=whole)]
    return in_copies(lambda repository, work: run(repository, *work), works, jobs=jobs)


def in_copies(act: Callable[[Path, Work], Result], works: Sequence[Work], *, jobs: int) -> Iterator[Result]:
    """Yield the result of each work. There are as many at a time as copies of the repository."""
    with tempfile.TemporaryDirectory(prefix="hook_mutants_") as folder, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            free.put(_copy(Path(folder) / str(number)))

        def one(work: Work) -> Result:
            repository = free.get()
            try:
                return act(repository, work)
            finally:
                free.put(repository)

        yield from pool.map(one, works)


def _copy(to: Path) -> Path:
    to.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, to)
    return to


def row(outcome: Outcome) -> str:
    """Return a result as a row of the table."""
    if not outcome.methods:
        what, verdict = "as it is", "passes" if outcome.passed else f"**fails**: {outcome.by}"
    else:
        everything = outcome.methods == outcome.target.methods
        what = f"all {len(outcome.methods)} methods" if everything and len(outcome.methods) > 1 else outcome.methods[0]
        verdict = "**survives**" if outcome.passed else f"killed by {outcome.by}"
    return f"| {outcome.target.option} | {what} | {verdict} |"


def main() -> int:
    """Print the table and a summary. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="names of hooks; default: all hooks")
    parser.add_argument("--whole", action="store_true", help="replace only all methods of a hook at once")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of test runs at a time")
    arguments = parser.parse_args()
    chosen = targets(arguments.options)
    untested = [target.option for target in chosen if not target.tests]
    if untested:
        print(f"no tests: {', '.join(untested)}", file=sys.stderr)
        return 2
    print("| hook | replaced by pass | its tests |\n|---|---|---|")
    broken = survived = killed = endless = 0
    for outcome in outcomes(chosen, whole=arguments.whole, jobs=max(1, arguments.jobs)):
        print(row(outcome), flush=True)
        broken += not outcome.methods and not outcome.passed
        survived += bool(outcome.methods) and outcome.passed
        killed += bool(outcome.methods) and not outcome.passed
        endless += bool(outcome.methods) and outcome.by.startswith(NO_END)
    slow = f" ({endless} of them by not ending)" if endless else ""
    print(f"\n{len(chosen)} hooks, {killed + survived} mutants: {killed} killed{slow}, {survived} survived")
    if broken:
        print(f"error: the tests of {broken} hooks fail without a mutant", file=sys.stderr)
        return 2
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
