"""A user's project in a temporary folder, and the commands typed in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from tests.e2e.warm import SERVER, Script, environment_of_python

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Done:
    """The outcome of a command."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything printed."""
        return self.out + self.err


@dataclass(frozen=True)
class Run:
    """A run directory."""

    path: Path

    @property
    def result(self) -> dict[str, Any]:
        """The contents of result.json."""
        found: dict[str, Any] = json.loads((self.path / "result.json").read_text(encoding="utf-8"))
        return found

    @property
    def config(self) -> DictConfig:
        """The composed config of the job."""
        found = OmegaConf.load(self.path / ".hydra" / "config.yaml")
        assert isinstance(found, DictConfig)
        return found

    @property
    def records(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    @property
    def log(self) -> str:
        """The contents of train.log."""
        return (self.path / "train.log").read_text(encoding="utf-8")

    @property
    def checkpoints(self) -> list[str]:
        """Names of its checkpoint files."""
        return sorted(path.name for path in (self.path / "checkpoints").glob("*.pth"))


@dataclass(frozen=True)
class Project:
    """A copy of the repository's train.py, conf/ and my_project/."""

    path: Path

    @classmethod
    def make(cls, path: Path) -> Project:
        """Copy one to `path`."""
        path.mkdir(parents=True)
        shutil.copy(REPOSITORY / "train.py", path)
        for folder in ("conf", "my_project", "examples/char_lm", "examples/contrastive", "examples/diabetes"):
            shutil.copytree(REPOSITORY / folder, path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        return cls(path)

    def train(self, *arguments: str, **environment: str) -> Done:
        """`python train.py …`."""
        return self.python("train.py", *arguments, **environment)

    def python(self, *arguments: str, stdin: str | None = None, **environment: str) -> Done:
        """`python …` in the project's folder. A script and hydraloop itself start with torch imported."""
        is_ours = arguments[0].endswith(".py") or arguments[:2] == ("-m", "hydraloop")
        if is_ours and stdin is None and "PYTHONPATH" not in environment:
            return Done(*SERVER.run(arguments, self.path, _environment() | environment))
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.path,
            env=_environment() | environment,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def many(self, commands: Sequence[Sequence[str]], **environment: str) -> list[Done]:
        """Several command lines, one after the other."""
        return [self.train(*line, **environment) for line in commands]

    def commit(self) -> None:
        """Put all files under git, in a first commit."""
        who = ("-c", "user.name=me", "-c", "user.email=me@localhost")
        for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-q", "-m", "all")):
            subprocess.run(["git", *arguments], cwd=self.path, check=True)

    def begin(self, *arguments: str, script: str = "train.py", **environment: str) -> Script:
        """Start `python train.py …` with torch imported, without waiting for it."""
        return SERVER.start([script, *arguments], self.path, {**_environment(), **environment})

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        module: str | None = None,
        **options: Any,
    ) -> subprocess.Popen[str]:
        """Start `python train.py …` in a new interpreter, without waiting for it.

        Args:
            environment: variables to add.
            before: begins the command line.
            module: started instead of the script.
            options: of `Popen`.
        """
        return subprocess.Popen(
            [*before, sys.executable, *(["train.py"] if module is None else ["-m", module]), *arguments],
            cwd=self.path,
            env=_environment() | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )

    @property
    def runs(self) -> list[Run]:
        """Runs under outputs/, oldest first."""
        found = [path.parent for path in self.path.glob("outputs/*/*/.hydra")]
        return [Run(path) for path in sorted(found, key=lambda path: (path / ".hydra").stat().st_mtime_ns)]

    @property
    def run(self) -> Run:
        """The only run under outputs/."""
        (found,) = self.runs
        return found

    @property
    def jobs(self) -> list[Run]:
        """Jobs of the only sweep under multirun/, by number."""
        (sweep,) = self.path.glob("multirun/*/*")
        jobs = [path for path in sweep.iterdir() if path.name.isdigit()]
        return [Run(path) for path in sorted(jobs, key=lambda path: int(path.name))]

    @property
    def files(self) -> set[str]:
        """All files in the folder except for byte code."""
        return {str(path.relative_to(self.path)) for path in self.path.rglob("*") if "__pycache__" not in path.parts}

    def write(self, name: str, text: str) -> None:
        """Add or replace a file."""
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _environment() -> dict[str, str]:
    """Without the settings and the trackers' accounts of the person who runs the tests."""
    left_out = ("HYDRA_FULL_ERROR", "MLFLOW_", "WANDB_")
    kept = {name: value for name, value in environment_of_python().items() if not name.startswith(left_out)}
    return kept | {"COLUMNS": "200", "WANDB_MODE": "offline"}
