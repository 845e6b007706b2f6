"""What vLLM can serve of LoRA adapters: known to the configuration, which refuses the rest, and to whoever starts engines."""

from __future__ import annotations

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What an engine can be started for: an adapter of any other rank takes the next one's room, and none is larger than the last."""
