"""A user's project in a separate folder, a training started from its command line, and what its trackers have."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psutil
import tracking_contents as contents
from wandb_service import KEY, Service, serving

from hydraloop.run.record_log import FILENAME, STAMP, count
from hydraloop.tracking import cursor
from hydraloop.tracking.cursor import wait_for_followers
from hydraloop.tracking.mlflow.address import connected
from hydraloop.tracking.mlflow.calls import prepare

ROOT = Path(__file__).resolve().parents[2]
_LONGEST = 300.0
"""Most seconds for any command."""
_LEFT_OUT = ("MLFLOW_", "WANDB_", "HYDRA_FULL_ERROR", "PYTHONWARNINGS")


class TooLateError(Exception):
    """Training ended before the fault could be injected."""


@dataclass(frozen=True, slots=True)
class Had:
    """What one tracker has of a run."""

    there: int
    """Records that the service has completely."""
    made: int
    """Records that the training has made."""
    twice: int
    """Iterations that it has more than once."""
    claimed: int
    """Records that it has according to hydraloop."""


class Place:
    """A project folder with an existing MLflow database.

    Args:
        folder: path of the folder, which is created.
        template: the database to copy.
    """

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "tmp").mkdir()  # processes that are killed leave temporary files
        shutil.copy(ROOT / "train.py", folder)
        for name in ("conf", "my_project"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.database = folder / "mlflow.db"
        """The database that has the run's records in the end. A fault may move it."""
        shutil.copy(template, self.database)
        self.hooks: tuple[str, ...] = ("mlflow",)
        self.overrides: list[str] = []
        self.environment: dict[str, str] = {}
        self.cleanup = ExitStack()
        self.wandb: Service | None = None
        """The W&B service; None without W&B."""
        self.training: Training | None = None

    def move_database(self, folder: Path) -> None:
        """Move the database to another folder."""
        self.database = Path(shutil.move(self.database, folder / self.database.name))

    def train(self, *overrides: str) -> Training:
        """Start `python train.py hooks=[…] …` without waiting for it."""
        hooks = f"hooks=[{','.join(self.hooks)}]"
        arguments = ["train.py", hooks, *overrides, *self.overrides]
        self.training = Training(self.start(arguments), self.folder)
        self.cleanup.callback(self.training.kill)
        return self.training

    def sync(self) -> str:
        """Run `python -m hydraloop sync outputs`. Returns what it printed."""
        return self._run(["-m", "hydraloop", "sync", "outputs"])

    def has(self, *, uploaded: bool = False) -> dict[str, Had]:
        """Return what each tracker has of the run.

        Args:
            uploaded: whether to upload W&B's offline files with `wandb sync` and count what the service has then.
        """
        assert self.training is not None, "it has been trained"
        run_dir = self.training.run_dir
        wanted = contents.wanted(run_dir / FILENAME)
        found = {}
        for name in self.hooks:
            if name == "mlflow":
                points = contents.mlflow_points(self.database)
            elif name == "tensorboard":
                points = contents.tensorboard_points(run_dir)
            else:
                points = self._at_wandb(run_dir, uploaded)
            state = cursor.Cursor.load(run_dir, name)
            claimed = 0 if state is None else state.sent
            found[name] = Had(contents.there(points, wanted), len(wanted), contents.twice(points), claimed)
        return found

    def _at_wandb(self, run_dir: Path, uploaded: bool) -> contents.Points:
        if not uploaded:
            return contents.wandb_points(run_dir) if self.wandb is None else contents.service_points(self.wandb)
        copy = self.folder / "uploaded"
        with ExitStack() as stack:
            service = self.wandb or stack.enter_context(serving())
            self.environment = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}
            for folder in (run_dir / "wandb").glob("offline-run-*"):
                shutil.copytree(folder, copy / folder.name)
                self._run(["-m", "wandb", "sync", str(copy / folder.name)])
            return contents.service_points(service)

    def _run(self, arguments: Sequence[str]) -> str:
        with self.start(arguments) as process:
            out, _ = process.communicate(timeout=_LONGEST)
        return str(out)

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start `python …` in the folder without waiting for it."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        own |= {"HOME": str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        return subprocess.Popen(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=kept | own | self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def template(folder: Path) -> Path:
    """Create the database that project folders get a copy of, because MLflow takes seconds to create one."""
    path = folder / "mlflow.db"
    prepare()
    connected(f"sqlite:///{path}")
    return path


class Training:
    """A running `train.py`."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process, self._folder = process, folder
        self.printed = ""
        self.ended = 0.0
        """Time at which the process ended, in seconds since 1970."""
        self.struck: int | None = None
        """Number of records when the first fault was injected."""

    @property
    def run_dir(self) -> Path:
        """The run directory, which exists once training has begun."""
        (found,) = (path.parent for path in self._folder.glob("outputs/*/*/.hydra"))
        return found

    @property
    def log(self) -> Path:
        """Path of its records."""
        return self.run_dir / FILENAME

    def until(self, record: int, *, sent: Sequence[str] = ()) -> None:
        """Wait until there are a number of records, and the trackers in `sent` have begun to send.

        Raises:
            TooLateError: training ended before.
        """
        while True:
            logged = self._logged()
            over = self._process.poll() is not None or logged >= TOTAL
            if logged >= record and all(self._has_begun(name) for name in sent):
                self.struck = self.struck or logged
                return
            if over:
                raise TooLateError(f"training was over before record {record} and before {', '.join(sent)} had begun")
            time.sleep(0.02)

    def _logged(self) -> int:
        return count(self.log) if any(self._folder.glob("outputs/*/*/.hydra")) else 0

    def _has_begun(self, name: str) -> bool:
        state = cursor.Cursor.load(self.run_dir, name)
        return state is not None and state.index > 0

    def processes(self, what: str) -> list[psutil.Process]:
        """Return its child processes with a word in their command line."""
        below = psutil.Process(self._process.pid).children(recursive=True)
        return [process for process in below if any(what in part for part in process.cmdline())]

    def kill(self) -> None:
        """Kill it with `kill -9` if it runs."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        """Wait until it and its followers have ended. Returns the exit code as a shell reports it.

        Raises:
            RuntimeError: there are no records.
        """
        self.printed, _ = self._process.communicate(timeout=_LONGEST)
        if not self._logged():
            raise RuntimeError(f"it did not train:\n{self.printed[-4000:]}")
        self.ended = time.time()
        wait_for_followers(self.run_dir)
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    @property
    def iteration_time(self) -> float:
        """Seconds per iteration, including everything in the loop, from the first record to the last."""
        first, *_, last = map(json.loads, self.log.read_text(encoding="utf-8").splitlines())
        return float(last[STAMP] - first[STAMP]) / float(last["iteration"] - first["iteration"])

    @property
    def ending_time(self) -> float:
        """Seconds from the last record to the end of the process."""
        last = json.loads(self.log.read_text(encoding="utf-8").splitlines()[-1])
        return self.ended - float(last[STAMP])


TOTAL = 200
"""Number of records of a training."""
