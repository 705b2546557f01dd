"""The record log of a run, and the followers that hand it to tracking services. Without torch.

`metrics.jsonl` is the truth and the queue at once: the `logger` hook appends to it, and each tracker hook has a process
of its own that reads it behind a cursor. Whatever happens there, training does not notice.
"""
