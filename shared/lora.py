"""LoRA adapters as both ends know them: what vLLM can serve of them, which the configuration knows too, and how one is written down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What an engine can be started for: an adapter of any other rank takes the next one's room, and none is larger than the last."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter by itself, under the names by which peft and vLLM load it."""

    tensors: bytes
    """`adapter_model.safetensors`."""
    config: str
    """`adapter_config.json`."""

    def save(self, folder: Path) -> None:
        """As `peft.PeftModel.from_pretrained(base model, folder)` takes it. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(self.tensors)
        (folder / "adapter_config.json").write_text(self.config)
