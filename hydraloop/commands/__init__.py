"""The commands of `python train.py` and `hydraloop`, one file each. `parser` lists them."""
