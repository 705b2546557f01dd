"""Send what the trackers of a run do not have yet: `python scripts/sync.py <run or sweep directory>`.

The same as `python -m hydraloop.tracking.sync`, for projects without this file.
"""

from __future__ import annotations

import sys

from hydraloop.tracking.sync import main

if __name__ == "__main__":
    sys.exit(main())
