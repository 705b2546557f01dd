"""WandbTracker: a run at Weights & Biases, online, or in files that `wandb sync` uploads."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from hydraloop.run_files.environment import git_remote
from hydraloop.run_files.record_log import Record
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking.tracker import Finish, GoneError, LostError, Run, Tracker, UnusableError
from hydraloop.tracking.wandb_run import FOLDER, LiveRun, Mode, kill_core

_OF_ONE_RUN = ("RUN_ID", "RESUME", "RESUME_FROM", "FORK_FROM", "SWEEP_ID", "SWEEP_PARAM_PATH", "SERVICE", "LAUNCH")
"""Variables, after `WANDB_`, that would merge several runs into one."""
_NAMES = ("PROJECT", "ENTITY", "RUN_GROUP", "JOB_TYPE", "TAGS", "NOTES", "NAME")
"""Variables, after `WANDB_`, that W&B shows."""
_SYNC_TIMEOUT = 60.0
"""Seconds to wait for the service to open a run in `sync`."""
_TIME_TO_UPLOAD = 0.8
"""Part of `flush_timeout` for uploading; the rest is for reporting what was not uploaded."""
_WRITES = 5.0
"""Seconds in which `wandb-core` writes the end of a run."""
_FLUSH_INTERVAL = 2.0
"""Seconds after which W&B writes to its file. Its default is 15."""


class _Core:
    """The `wandb-core` of this process, which the jobs of a sweep share. An error of one run ends it for all."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.number = 0
        """How many of them have been ended after an error."""
        self.users: set[int] = set()
        """Ids of the trackers that have a live run."""

    def end(self, *, kill: bool) -> None:
        """End it if it runs."""
        if kill:
            kill_core()
        wandb = sys.modules.get("wandb")
        if wandb is not None:
            with suppress(Exception, SystemExit):  # teardown exits with wandb-core's exit code
                wandb.teardown()


_CORE = _Core()


class WandbTracker(Tracker):
    """Sends a run to one W&B run, which stays online or offline as it began.

    A record is one row of the history, with its line number as W&B's step and `iteration` as the axis. W&B has its own
    process, `wandb-core`, which writes the file and uploads. If it dies, the records that it had not yet written or
    uploaded are sent again (`LostError`): online, the service says which step it has; offline, W&B cannot continue a
    file, so it is written again from the record log, also for a resumed run.

    Online, a record counts as sent when `wandb-core` has it. `finish` waits until the service has all records, and
    raises if this takes longer than `flush_timeout`. `sync` then continues from the service's last step.
    """

    _live: LiveRun | None = None
    _core = 0
    """The number of the `wandb-core` that has the live run."""

    @classmethod
    def preload(cls) -> None:
        prepare()
        import wandb  # noqa: F401  # it reads the environment when it is imported

    def open(self) -> None:
        """Create the W&B run or continue it."""
        memory = self.memory
        if "id" not in memory:
            new = f"{self.run.uid}-{token_hex(2)}"  # must not add to the earlier run
            memory["id"] = new if "again" in memory else self.run.uid
        prepare()
        memory["mode"] = mode_of(self.options["mode"], memory.get("mode"))
        if memory.get("closed") != self.run.attempt.number:
            self._running()

    def send(self, records: Sequence[Record]) -> None:
        """Log each record that W&B does not have yet as a row."""
        live = self._running()
        with self._or_let_go():
            live.log([record for record in records if record.index >= self.memory["next"]])
        self.memory["next"] = max(self.memory["next"], records[-1].index + 1)

    def rewound(self, index: int) -> int:
        """Remember from which record on rows are to be taken back; `open` does it."""
        self.memory["next"] = min(self.memory.get("next", 0), index)
        return index

    def send_file(self) -> bool:
        """Send checkpoints if `checkpoints=all`. Other files are sent with their record, or by `finish`."""
        if self._live is not None:
            with self._or_let_go():
                self._live.log_checkpoints(self.memory["checkpoints"], ended=False)
        return False

    def finish(self, finish: Finish) -> None:
        """Write the summary, `result.json` and the checkpoints, and close the run with its exit code.

        Raises:
            TimeoutError: not everything was uploaded in time.
            OSError: W&B could not write its file.
        """
        live = self._running()
        size = live.file.stat().st_size
        with self._or_let_go():
            live.finish(finish, self.memory["checkpoints"])
        self._live = None
        self.close()
        if self.memory["mode"] == "offline" and not _grows(live.file, size):  # `wandb-core` raises no error
            raise OSError(f"W&B could not write {live.file.name}, which is written again: was the disk full?")
        self.memory["closed"] = self.run.attempt.number

    def close(self) -> None:
        """End `wandb-core` if it runs, without waiting for an upload."""
        live, self._live = self._live, None
        with _CORE.lock:
            _CORE.users.discard(id(self))
            if not _CORE.users:
                _CORE.end(kill=live is not None and self.memory["mode"] == "online")

    @property
    def where(self) -> str | None:
        """The address of the run's page; offline, the command that uploads the run."""
        folder, url = self.memory.get("folder"), self.memory.get("url")
        if folder is None or url is not None:
            return url
        return f"wandb sync {shlex.quote(str(self.run.run_dir / FOLDER / folder))}"

    def _running(self) -> LiveRun:
        """Return the live run, which is started if necessary.

        Raises:
            GoneError: W&B cannot continue the run.
            LostError: W&B has fewer records than were handed to it.
        """
        if self._live is None or self._core != _CORE.number:
            self._live = None
            memory, handed = self.memory, self.memory.get("next", 0)
            with self._or_let_go():
                live = self._online(handed) if memory["mode"] == "online" else self._offline()
            self._live = live
            if live.starts_at == 0:
                memory["checkpoints"] = []
            attempt = self.run.attempt.number
            memory.update(next=live.starts_at, folder=live.file.parent.name, url=live.url, attempt=attempt, closed=None)
            if live.starts_at < handed:
                raise LostError(live.starts_at)
        return self._live

    def _offline(self) -> LiveRun:
        """Write the file from its beginning. Earlier files of the run are removed, if they were not uploaded."""
        run_id, folder = self.memory["id"], self.run.run_dir / FOLDER
        for file in folder.glob(f"offline-run-*/run-{run_id.partition('-')[0]}*.wandb"):
            if not Path(f"{file}.synced").exists():
                shutil.rmtree(file.parent)
            elif file.stem == f"run-{run_id}":
                raise GoneError("the run was uploaded by `wandb sync`, and W&B cannot continue its file")
        return self._start("offline")

    def _online(self, handed: int) -> LiveRun:
        """Open the run, or continue it after the service's last step.

        If a resume has cut the log, the service must take back rows. Not every service can do this.
        """
        run_id, memory = self.memory["id"], self.memory
        if "attempt" not in memory:
            return self._start("online")
        live = self._start("online", resume="allow")
        if live.starts_at <= handed or memory["attempt"] == self.run.attempt.number:
            return live
        self._live = live
        self.close()
        try:
            live = self._start("online", resume_from=f"{run_id}?_step={handed - 1}")
        except Exception as error:
            raise GoneError(f"W&B does not take back the records from {handed} on, which a resume replaces") from error
        return live

    def _start(self, mode: Mode, **how: Any) -> LiveRun:
        with _CORE.lock:
            prepare()
            self._core = _CORE.number
            _CORE.users.add(id(self))
            settings = _settings(self.options, self.run, mode)
            return LiveRun(self.options, self.run, self.memory["id"], mode, settings, **how)

    @contextmanager
    def _or_let_go(self) -> Iterator[None]:
        """After any error of W&B, close the run, so that the next call starts it again."""
        try:
            yield
        except BaseException:
            with _CORE.lock:
                if self._core == _CORE.number:  # else, another run has ended it already
                    _CORE.end(kill=True)  # it may hang, and `close` would wait for it
                    _CORE.number += 1
            self.close()
            raise


def _grows(file: Path, size: int) -> bool:
    """Return whether a file becomes larger than a size: `wandb-core` writes a little later if other jobs use it."""
    until = time.monotonic() + _WRITES
    while file.stat().st_size <= size and time.monotonic() < until:
        time.sleep(0.05)
    return file.stat().st_size > size


def prepare() -> None:
    """Remove from this process's environment what belongs to a single W&B run, and turn off W&B's error reports.

    Must be called before wandb is imported for the first time, because it reads the environment then.
    """
    for name in _OF_ONE_RUN:
        os.environ.pop(f"WANDB_{name}", None)
    for name in _NAMES:
        if (text := os.environ.get(f"WANDB_{name}")) is not None:
            os.environ[f"WANDB_{name}"] = mask_text(text)
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def chosen_mode(option: str) -> str:
    """Return the mode that the option or `WANDB_MODE` selects: `online`, `offline`, `disabled`, or `auto`."""
    name = os.environ.get("WANDB_MODE") or option if option == "auto" else option
    return {"run": "online", "dryrun": "offline"}.get(name, name)


def mode_of(option: str, began: Mode | None) -> Mode:
    """Return the mode of a run: the one in which it `began`, else by the option. Never asks for a key.

    `auto` is `WANDB_MODE`, else online if a key is configured.

    Raises:
        UnusableError: W&B is disabled, or a run that must be online cannot be.
    """
    name = chosen_mode(option)
    if name == "disabled":
        raise UnusableError("W&B is disabled, by hooks.wandb.mode or WANDB_MODE")
    if began == "offline" or (began is None and name == "offline"):
        return "offline"
    if began == "online" and name == "offline":
        raise UnusableError("this run is online at W&B and cannot continue offline: `python -m hydraloop sync` can")
    if _has_key():
        return "online"
    if began == "online" or name == "online":
        raise UnusableError("W&B cannot be online without an API key: run `wandb login` or set WANDB_API_KEY")
    return "offline"


def _has_key() -> bool:
    """Return whether W&B finds an API key in its variables, in netrc or in its settings.

    `wandb.login`, its public function for this, asks for a key or raises.
    """
    import wandb
    from wandb.sdk.lib.wbauth import authenticate_session

    host = wandb.setup().settings.base_url
    return authenticate_session(host=host, source="hydraloop", prompt=False, update_session=False) is not None


def _settings(options: Mapping[str, Any], run: Run, mode: Mode) -> Any:
    """Return W&B's settings: command, program, host and commit of the run instead of this process's.

    W&B asks nothing, and does not collect terminal output, code or git state by itself.
    """
    import wandb

    sync = bool(options.get("_sync"))
    seconds = _SYNC_TIMEOUT if sync else max(1.0, options["flush_timeout"])
    tags = run.attempt.tags
    words = shlex.split(tags.get("command", ""))[1:]  # `python train.py a=1` or `python -m package a=1`
    length = 2 if words[:1] == ["-m"] else 1
    program, sys.argv[1:] = " ".join(words[:length]) or None, words[length:]  # W&B has no setting for the arguments
    return wandb.Settings(
        program=program,
        program_relpath=program,
        host=tags.get("host"),
        git_commit=tags.get("git_commit"),
        git_remote_url=None if sync else git_remote(Path.cwd()),
        console="off",
        silent=True,
        disable_git=True,
        save_code=False,
        sagemaker_disable=True,
        init_timeout=seconds,
        finish_timeout=0.0 if sync else _TIME_TO_UPLOAD * seconds,
        finish_timeout_raises=True,
        # Offline, W&B's process does not write its own times into the summary. Online, this would turn on a server
        # feature.
        x_server_side_derived_summary=mode == "offline",
        x_transaction_log_flush_interval=_FLUSH_INTERVAL,
        x_disable_stats=not options.get("_measures", True) or not options["system_metrics"],
        x_stats_pid=run.attempt.pid,
        stop_fn=lambda: None,  # the stop button of W&B's page must not stop the sender
    )
