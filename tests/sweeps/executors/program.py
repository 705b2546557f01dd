"""A program of which the tests of executors start processes: it runs a job that its overrides describe."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from hydraloop.sweeps.executors.spawned import read_request


def save(number: int, frame: object) -> None:
    Path(request.folder, "saved").touch()
    sys.exit(75)


if __name__ == "__main__":
    sweep, _, request = read_request()
    Path(request.folder, "request.json").unlink()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    names = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HYDRALOOP_SWEEP_JOB")
    variables = {name: os.environ[name] for name in names if name in os.environ}
    about = {"sweep": str(sweep), "variables": variables, "argv": sys.argv[1:], "pid": os.getpid()}
    Path(request.folder, "about.json").write_text(json.dumps(about))
    print("lines:", *request.lines, flush=True)
    for line in request.lines:
        name, _, value = line.partition("=")
        if name == "saves":
            signal.signal(signal.SIGTERM, save)
        if name == "exit":
            sys.exit(int(value))
        if name == "kill":
            os.kill(os.getpid(), int(value))
        if name == "sleep":
            time.sleep(float(value))
