"""Test-only way round a torchvision that does not load beside a CPU build of torch.

Its import fails when its compiled operators cannot be loaded, because it describes some of them all the same. This
declares those, without a body, and then becomes the installed torchvision.
"""

import sys
from importlib.machinery import PathFinder
from pathlib import Path

import torch

_here = Path(__file__).resolve().parents[1]
_installed = PathFinder.find_spec("torchvision", [entry for entry in sys.path if Path(entry).resolve() != _here])
if _installed is None or _installed.origin is None:
    raise ModuleNotFoundError("the tests of the SGLang backend need torchvision", name="torchvision")

try:
    for _library in Path(_installed.origin).parent.glob("_C*.so"):
        torch.ops.load_library(_library)
except OSError:
    _operators = torch.library.Library("torchvision", "FRAGMENT")
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

__file__ = _installed.origin
__path__ = _installed.submodule_search_locations
exec(compile(Path(__file__).read_text(encoding="utf-8"), __file__, "exec"))
