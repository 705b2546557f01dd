"""`python -m hydraloop …`: train with conf/ of the working directory; `sync …`: send trackers what they do not have."""

import sys
from pathlib import Path

if sys.argv[1:2] == ["sync"]:
    from hydraloop.tracking.sync import main as sync

    sys.exit(sync(sys.argv[2:]))

from hydraloop.app import main

main(folder=Path.cwd())
