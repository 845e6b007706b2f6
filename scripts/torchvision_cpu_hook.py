"""Makes `import torchvision` work with a CPU build of torch if torchvision itself was built for
CUDA.

Such a torchvision cannot load its native library. So the operators `torchvision::nms` and
`torchvision::qnms` have no schema, and torchvision's module of meta registrations fails. Then every
Qwen-VL model and `AutoProcessor` fail too, although they need only its pure-torch image transforms.
`scripts/setup.sh` copies this file into site-packages, together with a `.pth` file that calls
`install()` at the start of every Python process of the environment. Engine processes start too
early for any other way.

At start-up only the standard library is imported. If torchvision finds its native operators, no
schemas are declared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

EXTENSION = "torchvision.extension"
"""The submodule that searches for the native library. torchvision imports it before any module that
needs an operator's schema.
"""

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_libraries: list[object] = []
"""Keeps the torch library of the declared schemas, which would otherwise be garbage-collected."""


class _ExtensionLoader(Loader):
    """Runs torchvision's own module, then declares the schemas if it found no native operators."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        if not module._has_ops() and not _libraries:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in SCHEMAS:
                library.define(schema)
            _libraries.append(library)


class _ExtensionFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != EXTENSION:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ExtensionLoader(spec.loader)
        return spec


def install() -> None:
    """Add an import hook for torchvision to this process. A second call has no effect."""
    if not any(isinstance(finder, _ExtensionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ExtensionFinder())
