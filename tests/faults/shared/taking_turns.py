"""A script: takes a lock many times, and says whether another process has had it meanwhile."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from hydraloop.run_files.lock import RunLock


def main(folder: Path, inside: Path, times: int) -> int:
    """Return how often two processes had the lock of `folder`. The file `inside` exists while one has it."""
    lock, shared, taken = RunLock(folder, key="folder"), 0, 0
    while taken < times:
        if lock.try_acquire() is not None:
            time.sleep(0.002)
            continue
        try:
            os.close(os.open(inside, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            shared += 1
        time.sleep(0.001)
        inside.unlink(missing_ok=True)
        lock.release()
        taken += 1
        time.sleep(0.003)
    return shared


if __name__ == "__main__":
    sys.exit(min(100, main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))))
