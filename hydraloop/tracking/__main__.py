"""`python -m hydraloop.tracking <run directory> <hook name>`: the process of a follower, started by `spawning.py`."""

from __future__ import annotations

import sys
from pathlib import Path

from hydraloop.tracking.follower.process import main
from hydraloop.tracking.follower.spawning import nice

if __name__ == "__main__":
    nice()
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
