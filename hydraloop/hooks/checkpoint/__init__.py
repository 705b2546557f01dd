"""The checkpoint hook is in `hook.py`; the other files are its parts."""

from hydraloop.hooks.checkpoint.hook import CheckpointHook as CheckpointHook
