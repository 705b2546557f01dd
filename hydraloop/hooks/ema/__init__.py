"""The ema hook is in `hook.py`, the averages in `averaging.py`."""

from hydraloop.hooks.ema.hook import EMAHook as EMAHook
