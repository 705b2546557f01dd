"""The ema hook is in `hook.py`; `formulas.py` has a function for each `ema_type`."""

from hydraloop.hooks.ema.hook import EMAHook as EMAHook
