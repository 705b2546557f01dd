"""The training engine: a loop on one screen, the mount points of hooks, and what both stand on.

Nothing is imported here: `hook.py`, `stages.py` and `schedule.py` need no torch, and the dry run relies on that.
"""
