"""Python runs this file at its start. It makes torchvision importable with a CPU build of torch.

PyPI's torchvision is built for CUDA. With a CPU build of torch its library cannot be loaded, and its import then fails,
because it describes operators that do not exist. Declared operators are enough: no test calls them.
"""

import torch

if torch.version.cuda is None:
    _LIBRARY = torch.library.Library("torchvision", "DEF")  # while this object lives, its operators exist
    for _name in ("nms", "qnms"):
        _LIBRARY.define(f"{_name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
