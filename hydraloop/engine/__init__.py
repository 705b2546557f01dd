"""The training engine: the loop, the mount points of hooks, and their parts.

Nothing is imported here: the dry run uses `hook.py`, `hook_order.py` and `interval.py`,
which need no torch.
"""
