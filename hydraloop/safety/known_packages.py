"""How to install packages that models and data sets often need."""

from __future__ import annotations

_SAME_NAME = (
    *("accelerate", "albumentations", "datasets", "einops", "lightning", "mmengine", "monai", "pandas", "peft", "timm"),
    *("torchaudio", "torchvision", "transformers"),
)
_PACKAGES = {"cv2": "opencv-python", "PIL": "pillow", "skimage": "scikit-image", "sklearn": "scikit-learn"}
"""The package of each module. Only well-known ones, because the package of a misspelled name could be a stranger's."""


def to_install(module: str | None) -> str | None:
    """Return a sentence with the command that installs a module; None if its package is not known."""
    name = (module or "").partition(".")[0]
    package = name if name in _SAME_NAME else _PACKAGES.get(name)
    return package and f"Install it: pip install {package}"
