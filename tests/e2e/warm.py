"""Scripts in fresh processes without the two seconds that importing torch takes each time.

A server imports hydraloop and torch once and forks a process for each script: in its folder, with its arguments and
environment, as `__main__`. What is about imports themselves, flags of Python or its exit needs a real start.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

SECONDS = 300
"""After which a script is killed."""
RUNS = 1000
"""In place of the exit code of a script that runs."""


class Server:
    """Starts scripts. Started by the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """`python arguments…` in a folder. Returns the exit code (-9: killed), and what was printed: output, errors.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time; it is killed.
        """
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            script = self._start(arguments, folder, environment, out.name, err.name)
            code = script.wait(SECONDS)
            printed = [Path(file.name).read_text(encoding="utf-8") for file in (out, err)]
        return code, printed[0], printed[1]

    def start(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Script:
        """`python arguments…` in a folder, without waiting for it."""
        number, path = tempfile.mkstemp()
        os.close(number)
        return self._start(arguments, folder, environment, path, path)

    def _start(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], out: str, err: str
    ) -> Script:
        request = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)}
        self.send({**request, "out": out, "err": err})
        return Script(self, self.answer(), Path(out))

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request, which is answered by a number."""
        print(json.dumps(request), file=self._started().stdin, flush=True)

    def answer(self) -> int:
        """Wait for the answer."""
        return int(self._answers().readline())

    def has_answered(self, seconds: float) -> bool:
        """Wait for the answer, at most so long. Returns whether it is there."""
        return bool(select.select([self._answers()], [], [], seconds)[0])

    def _answers(self) -> IO[str]:
        stdout = self._started().stdout
        assert stdout is not None
        return stdout

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env=environment_of_python(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            atexit.register(self.close)
        return self._process

    def close(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.communicate()  # it ends when its input does


SERVER = Server()


class Script:
    """A script that the server has started, with the methods of `Popen`."""

    def __init__(self, server: Server, pid: int, output: Path) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server, self._output, self._printed = server, output, ""

    @property
    def printed(self) -> str:
        """All that it has printed."""
        return self._output.read_text(encoding="utf-8") if self._output.exists() else self._printed

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None:
            self._server.send({"ended": self.pid, "wait": False})
            code = self._server.answer()
            self.returncode = None if code == RUNS else code
        return self.returncode

    def wait(self, timeout: float = SECONDS) -> int:
        """Wait for its end. Returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time; it is killed.
        """
        if self.returncode is None:
            self._server.send({"ended": self.pid, "wait": True})
            in_time = self._server.has_answered(timeout)
            if not in_time:
                self.kill()
            self.returncode = self._server.answer()
            if not in_time:
                raise subprocess.TimeoutExpired(str(self.pid), timeout, self._output.read_text(encoding="utf-8"))
        return self.returncode

    def communicate(self, timeout: float = SECONDS) -> tuple[str, None]:
        """Wait for its end. Returns all that it has printed."""
        self.wait(timeout)
        self._printed = self.printed
        self._output.unlink(missing_ok=True)
        return self._printed, None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless its end is known."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, unless its end is known."""
        self.send_signal(signal.SIGKILL)


def environment_of_python() -> dict[str, str]:
    """The environment, with what Python and torch read when they start as the tests want it."""
    root = str(Path(__file__).resolve().parents[2])
    changed = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | changed


# The server's process. -----------------------------------------------------------------------------------------------


def serve() -> dict[str, Any] | None:
    """Fork for each script. Returns the request in the process that runs it; None when there are no more."""
    while line := sys.stdin.readline():
        request: dict[str, Any] = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], 0 if request["wait"] else os.WNOHANG)
            print(os.waitstatus_to_exitcode(status) if pid else RUNS, flush=True)
            continue
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of a fork of a process with threads
            pid = os.fork()
        if pid == 0:
            return request
        print(pid, flush=True)
    return None


def import_everything() -> None:
    """Import what runs import, except for the trackers, which are imported in other processes."""
    gc.disable()
    import numpy.random
    import psutil
    from hydra import compose, initialize_config_dir

    import hydraloop

    assert numpy.random
    assert psutil  # both are imported by every run

    for module in pkgutil.walk_packages(hydraloop.__path__, "hydraloop."):
        if not module.name.startswith(("hydraloop.tracking.", "hydraloop.__main__")):
            importlib.import_module(module.name)
    with initialize_config_dir(str(Path(hydraloop.__file__).parents[1] / "conf"), version_base=None):
        compose("config", ["hooks=[ema]"])  # Hydra's plugins and parsers are ready then
    gc.freeze()  # the collector of a forked process need not look at them
    gc.enable()


def become(request: dict[str, Any]) -> types.CodeType:
    """Make this process what Python would be at the start of a script. Returns the script's code."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # read from TMPDIR again
    files: list[IO[bytes]] = [open(os.devnull, "rb"), open(request["out"], "ab"), open(request["err"], "ab")]  # noqa: SIM115
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    script = Path(request["arguments"][0]).resolve()
    sys.argv = request["arguments"]
    sys.path[0] = str(script.parent)
    if sys.argv[0] == "-m":
        _, package, *arguments = sys.argv
        script = Path(sys.modules[package].__path__[0], "__main__.py")
        sys.argv = [str(script), *arguments]
        sys.path[0] = request["folder"]
    main = types.ModuleType("__main__")
    main.__file__ = str(script)
    sys.modules["__main__"] = main
    return compile(script.read_bytes(), str(script), "exec")


def run(code: types.CodeType) -> NoReturn:
    """Run the script and exit as Python does, but without freeing all objects, which takes a third of a second."""
    status: int | str | None = 0
    try:
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as error:
        status = error.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if isinstance(status, str) else status or 0)


if __name__ == "__main__":
    import_everything()
    if given := serve():
        run(become(given))
