"""The ema hook: `hook.py`; `averaging.py` has the averages."""

from hydraloop.hooks.ema.hook import EMAHook as EMAHook
