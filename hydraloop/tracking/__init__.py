"""Sends a run's records to tracking services. Does not import torch.

The `logger` hook appends records to `metrics.jsonl`, which is the source of truth. Each tracker hook starts a follower:
a separate process that reads new lines and sends them. A service that is slow or unreachable does not slow training.
"""
