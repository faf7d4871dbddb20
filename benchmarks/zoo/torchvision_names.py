"""Lets torchvision be imported where its operators do not load: the wheel of the registry is built for CUDA.

timm uses of it what is written in Python. Its import registers two operators' shapes, and wants their names.
"""

from __future__ import annotations

import importlib.util
import sys

import torch

_NAMES = ("nms", "qnms")
_library: list[torch.library.Library] = []  # it names them as long as it lives


def declare() -> None:
    """Names the operators that `import torchvision` asks for, unless it brings them."""
    if _library or importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in _NAMES:
            _library[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
