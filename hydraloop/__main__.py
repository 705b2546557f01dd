"""`python -m hydraloop …`: train with conf/ of the working directory, or a command for runs.

`sync …` sends trackers what they do not have; `evaluate …`, `predict …` and `export …` use a finished run.
"""

import sys
from pathlib import Path

if sys.argv[1:2] == ["sync"]:
    from hydraloop.tracking.sync import main as sync

    sys.exit(sync(sys.argv[2:]))

if sys.argv[1:2] and sys.argv[1] in ("evaluate", "predict", "export"):
    from hydraloop.after_training import main as after_training

    sys.exit(after_training(sys.argv[1:]))

from hydraloop.app import main

main(folder=Path.cwd())
