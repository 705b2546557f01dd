"""Adapters that run hooks of MMEngine and callbacks of Lightning. They import neither framework."""

from hydraloop.compat.lightning_callback import LightningCallback
from hydraloop.compat.mmengine_hook import MMEngineHook

__all__ = ["LightningCallback", "MMEngineHook"]
