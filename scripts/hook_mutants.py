"""Are the hooks' tests able to fail? Replaces methods of a hook by `pass` and runs its tests, which have to notice.

    python scripts/hook_mutants.py                    # every hook of hydraloop.hooks: some minutes
    python scripts/hook_mutants.py ema checkpoint     # these only
    python scripts/hook_mutants.py --whole            # all methods of a hook at once only: faster

For each hook: its tests (`tests/hooks/test_<option>*.py`) as they are, which must pass; all its methods at once; each
method alone. Methods are the mount points it overrides, inherited ones included, and `state_dict` and
`load_state_dict`. It works on copies of the repository, so that tests which start processes see the mutant, too.

Exit status 1 where a mutant survives, 2 where the tests fail without one. The table is Markdown.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("hydraloop", "hydra_plugins", "tests", "conf", "my_project", "scripts", "train.py", "pyproject.toml")
SECONDS = 300
"""Longest run of a hook's tests: a mutant that never ends is one they have noticed, unless the machine is too slow."""
NO_END = "no end within"


@dataclass(frozen=True)
class Target:
    """A hook, where its class is, and what can be taken out of it."""

    option: str
    cls: str
    methods: tuple[str, ...]
    tests: tuple[str, ...]
    """Its test files, relative to the repository."""

    @property
    def file(self) -> str:
        """Its source, relative to the repository."""
        folder = f"hydraloop/hooks/{self.option}"
        return f"{folder}/hook.py" if (ROOT / folder).is_dir() else f"{folder}.py"


@dataclass(frozen=True)
class Outcome:
    """What the tests of a hook said of one mutant (no methods: of the hook as it is)."""

    target: Target
    methods: tuple[str, ...]
    passed: bool
    by: str
    """The test that failed first, or what else happened."""


def targets(names: Sequence[str]) -> list[Target]:
    """The hooks of `hydraloop.hooks`, or those of these names.

    Raises:
        SystemExit: there is no such hook.
    """
    hooks = importlib.import_module("hydraloop.hooks")
    base = importlib.import_module("hydraloop.engine.hook")
    points = (*base.MOUNT_POINTS, *base.GENERAL_POINTS, "state_dict", "load_state_dict")
    found = {}
    for cls in hooks.__all__:
        hook, option = getattr(hooks, cls), hooks._FILES[cls]
        own = tuple(point for point in points if getattr(hook, point) is not getattr(base.Hook, point))
        found[option] = Target(option, cls, own, _tests_of(option))
    unknown = set(names) - found.keys()
    if unknown:
        raise SystemExit(f"there is no hook {', '.join(sorted(unknown))}; there are {', '.join(sorted(found))}")
    return [found[option] for option in sorted(names or found)]


def _tests_of(option: str) -> tuple[str, ...]:
    files = (ROOT / "tests" / "hooks").glob(f"test_{option}*.py")
    return tuple(sorted(str(path.relative_to(ROOT)) for path in files))


def mutated(source: str, cls: str, methods: Sequence[str]) -> str:
    """The module with these methods of the class doing nothing; an inherited one is overridden."""
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
    """Run a hook's tests in a copy of the repository in which these methods do nothing."""
    path = repository / target.file
    original = path.read_text(encoding="utf-8")
    path.write_text(mutated(original, target.cls, methods) if methods else original, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-rfE", "--tb=no", "-p", "no:cacheprovider", *target.tests]
    environment = os.environ | {"PYTHONPATH": str(repository), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    # A session of its own, so that what a hanging test has started ends with it.
    pytest = subprocess.Popen(
        command, cwd=repository, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = pytest.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(pytest.pid, signal.SIGKILL)
        pytest.communicate()
        return Outcome(target, methods, False, f"{NO_END} {SECONDS} s")
    finally:
        path.write_text(original, encoding="utf-8")
    if pytest.returncode not in (0, 1):  # not what a failing test looks like: neither killed nor survived
        raise RuntimeError(f"pytest ended with {pytest.returncode} for {target.option} {methods}:\n{output[-3000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(\S+)", output, re.MULTILINE)
    return Outcome(target, methods, pytest.returncode == 0, failed.group(1) if failed else "")


def mutants(target: Target, *, whole: bool) -> list[tuple[str, ...]]:
    """What to take out: nothing, everything, and each method alone."""
    alone = [] if whole or len(target.methods) == 1 else [(method,) for method in target.methods]
    return [(), target.methods, *alone]


def outcomes(chosen: Sequence[Target], *, whole: bool, jobs: int) -> Iterator[Outcome]:
    """All runs, as many at once as there are copies of the repository."""
    with tempfile.TemporaryDirectory(prefix="hook_mutants_") as folder, ThreadPoolExecutor(jobs) as pool:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            free.put(_copy(Path(folder) / str(number)))

        def one(work: tuple[Target, tuple[str, ...]]) -> Outcome:
            repository = free.get()
            try:
                return run(repository, *work)
            finally:
                free.put(repository)

        yield from pool.map(one, [(target, methods) for target in chosen for methods in mutants(target, whole=whole)])


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
    """An outcome as a row of the table."""
    if not outcome.methods:
        what, verdict = "as it is", "passes" if outcome.passed else f"**fails**: {outcome.by}"
    else:
        everything = outcome.methods == outcome.target.methods
        what = f"all {len(outcome.methods)} methods" if everything and len(outcome.methods) > 1 else outcome.methods[0]
        verdict = "**survives**" if outcome.passed else f"killed by {outcome.by}"
    return f"| {outcome.target.option} | {what} | {verdict} |"


def main() -> int:
    """Print the table and its sum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("options", nargs="*", help="hooks by option name; none: all of them")
    parser.add_argument("--whole", action="store_true", help="only all methods of a hook at once")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="test runs at a time")
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
        print(f"the tests of {broken} hooks fail without a mutant, so they say nothing", file=sys.stderr)
        return 2
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
