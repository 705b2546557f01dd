"""Send the records that trackers do not have yet: `python scripts/sync.py <run or sweep directory>`.

In a project without this file, `python -m hydraloop.tracking.sync` does the same.
"""

from __future__ import annotations

import sys

from hydraloop.tracking.sync import main

if __name__ == "__main__":
    sys.exit(main())
