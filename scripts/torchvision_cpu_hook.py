"""Lets `import torchvision` succeed beside a CPU build of torch when torchvision itself was built
for CUDA.

Such a torchvision cannot load its native library, so the operators `torchvision::nms` and
`torchvision::qnms` have no schema, and its own module of meta registrations fails on them. With
them fails every Qwen-VL model and `AutoProcessor`, which need torchvision for its pure-torch image
transforms only. `scripts/setup.sh` copies this file into site-packages, beside a `.pth` file that
calls `install()` at the start of every Python process of the environment: engine processes start
too early for anything else.

Nothing is imported at start-up but the standard library. Where torchvision finds its native
operators, nothing is declared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

EXTENSION = "torchvision.extension"
"""The submodule that looks for the native library; torchvision imports it before anything that
needs an operator's schema.
"""

SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)

_libraries: list[object] = []
"""Holds the torch library of the declared schemas: they vanish when it is collected."""


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
    """Watches for the import of torchvision in this process. A second call changes nothing."""
    if not any(isinstance(finder, _ExtensionFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ExtensionFinder())
