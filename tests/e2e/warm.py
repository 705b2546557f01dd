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


class Server:
    """Runs scripts, one at a time. Started by the first."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str, str]:
        """`python arguments…` in a folder. Returns the exit code (-9: killed), and what was printed: output, errors.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time; it is killed.
        """
        process = self._started()
        with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile() as err:
            request = {"arguments": list(arguments), "folder": str(folder), "environment": dict(environment)}
            print(json.dumps({**request, "out": out.name, "err": err.name}), file=process.stdin, flush=True)
            assert process.stdout is not None
            pid = int(process.stdout.readline())
            ended, _, _ = select.select([process.stdout], [], [], SECONDS)
            if not ended:
                os.kill(pid, signal.SIGKILL)
            code = int(process.stdout.readline())
            printed = [Path(file.name).read_text(encoding="utf-8") for file in (out, err)]
        if not ended:
            raise subprocess.TimeoutExpired(list(arguments), SECONDS, *printed)
        return code, printed[0], printed[1]

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


def environment_of_python() -> dict[str, str]:
    """The environment, with what Python and torch read when they start as the tests want it."""
    root = str(Path(__file__).resolve().parents[2])
    changed = {"PYTHONPATH": root, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"} | changed


# The server's process. -----------------------------------------------------------------------------------------------


def serve() -> dict[str, Any] | None:
    """Fork for each request. Returns it in the process that runs it; None when there are no more."""
    while line := sys.stdin.readline():
        request: dict[str, Any] = json.loads(line)
        with warnings.catch_warnings(action="ignore"):  # Python 3.12 warns of a fork of a process with threads
            pid = os.fork()
        if pid == 0:
            return request
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def import_everything() -> None:
    """Import what runs import, except for the trackers, which are imported in other processes."""
    from hydra import compose, initialize_config_dir

    import hydraloop

    for module in pkgutil.walk_packages(hydraloop.__path__, "hydraloop."):
        if not module.name.startswith(("hydraloop.tracking.", "hydraloop.compat.", "hydraloop.__main__")):
            importlib.import_module(module.name)
    with initialize_config_dir(str(Path(hydraloop.__file__).parents[1] / "conf"), version_base=None):
        compose("config", ["hooks=[ema]"])  # Hydra's plugins and parsers are ready then
    gc.collect()
    gc.freeze()  # the collector of a forked process need not look at them


def become(request: dict[str, Any]) -> types.CodeType:
    """Make this process what Python would be at the start of a script. Returns the script's code."""
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    files: list[IO[bytes]] = [open(os.devnull, "rb"), open(request["out"], "ab"), open(request["err"], "ab")]  # noqa: SIM115
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
        file.close()
    script = Path(request["arguments"][0]).resolve()
    sys.argv = request["arguments"]
    sys.path[0] = str(script.parent)
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
