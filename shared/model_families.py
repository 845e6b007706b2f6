"""The vision families that a run can train (such as Qwen3-VL), and how they differ.

To add a family, add its types, placeholders, end of turn and parts here, and the inputs of its
forward pass in learner/model/loading.py. No other module decides by a family's name. Text models
need no entry: the learner checks each at its start (learner/model/packed_rows.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

VISION_MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "internvl")
"""`model_type` of checkpoints with a vision tower."""

NOT_TRAINED = {
    "qwen3_5_moe": "packed rows, syncs and files of its experts have not been tested",
}
"""Families that users may expect but a run cannot train, by `model_type`, and why."""
IN_OTHER_FORMS = {
    "internvl_chat": "needs its own code; use the same model in transformers' format, whose name"
    " ends in -HF, such as OpenGVLab/InternVL3_5-4B-HF",
}
"""Families whose checkpoints transformers reads only in another format, by `model_type`.

Each with what the user should do.
"""
HYBRID_MODEL_TYPES = ("qwen3_5",)
"""Families with layers of linear attention, which cache a state instead of keys and values."""
EXPERT_MODEL_TYPES = ("qwen3_vl_moe",)
"""Mixture-of-experts families."""
TILED_MODEL_TYPES = ("internvl",)
"""Families that split images into tiles of one size. Each token has a single position index."""
TILING_PROCESSORS = ("InternVLProcessor",)
"""The classes of the processors of `TILED_MODEL_TYPES` (`shared.tokens.pictures`)."""
TURNED_IN_FILES = {"qwen3_vl_moe": (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")}
"""Endings of parameter names, by `model_type`, whose last two dimensions are swapped in checkpoint
files. transformers 5.19 swaps them when it reads, but not when it writes."""

PLACEHOLDER_KEYS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Keys in a vision model's config.json that hold the ids of placeholder tokens.

Placeholder tokens stand for images or videos, and are never sampled.
"""
IMAGE_PLACEHOLDERS = ("<IMG_CONTEXT>", "<|image_pad|>")
"""The placeholder of an image in chat templates: the first of these that the tokenizer has.

InternVL's tokenizer, which extends Qwen's, has both.
"""
TILE_PLACEHOLDERS = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
"""The placeholder tokens of `TILED_MODEL_TYPES`, by name instead of by key in config.json."""
END_OF_TURN = "<|im_end|>"
"""The token that ends an answer of a vision family."""
CONTROL_TOKENS = (
    *(END_OF_TURN, "<|im_start|>", "<|endoftext|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", *IMAGE_PLACEHOLDERS),
)
"""Control tokens of all families, which texts in the user's data must not contain.

A run also rejects its tokenizer's other control tokens (`shared.tokens.hf_codec.control_tokens`).
"""


def reads_only_text(config: Mapping[str, Any]) -> bool:
    """Return whether the content of a config.json is of a model that reads text only."""
    is_vision = config.get("model_type") in VISION_MODEL_TYPES
    return not is_vision and not any(
        f"{sense}_config" in config for sense in ("vision", "audio", "speech", "video")
    )


class ModelPart(StrEnum):
    """A part of a vision-language model; the values are the keys of `training.parts`."""

    VISION_TOWER = "vision_tower"
    ALIGNER = "aligner"
    LANGUAGE_MODEL = "language_model"


# The first matching prefix decides. Qwen2.5-VL has one merger; Qwen3-VL has more, for vision layers
# that feed the first text layers. A tied head has no own name and belongs to the embedding's part;
# here an untied one does too. After `lm_head.` come the names in files of Qwen2.5-VL for
# `model.visual.` and `model.language_model.`, then InternVL's, in memory and in files.
_PREFIXES = (
    ("model.visual.merger.", ModelPart.ALIGNER),
    ("model.visual.deepstack_merger_list.", ModelPart.ALIGNER),
    ("model.visual.", ModelPart.VISION_TOWER),
    ("model.language_model.", ModelPart.LANGUAGE_MODEL),
    ("lm_head.", ModelPart.LANGUAGE_MODEL),
    ("visual.merger.", ModelPart.ALIGNER),
    ("visual.", ModelPart.VISION_TOWER),
    ("model.embed_tokens.", ModelPart.LANGUAGE_MODEL),
    ("model.layers.", ModelPart.LANGUAGE_MODEL),
    ("model.norm.", ModelPart.LANGUAGE_MODEL),
    ("model.multi_modal_projector.", ModelPart.ALIGNER),
    ("model.vision_tower.", ModelPart.VISION_TOWER),
    ("multi_modal_projector.", ModelPart.ALIGNER),
    ("vision_tower.", ModelPart.VISION_TOWER),
    ("language_model.", ModelPart.LANGUAGE_MODEL),
    # Text models: other names of Llama's relatives, then GPT-2's and GPT-NeoX's.
    ("model.", ModelPart.LANGUAGE_MODEL),
    ("transformer.", ModelPart.LANGUAGE_MODEL),
    ("gpt_neox.", ModelPart.LANGUAGE_MODEL),
    ("embed_out.", ModelPart.LANGUAGE_MODEL),
)


def find_part(name: str) -> ModelPart | None:
    """Return the part of the model that a parameter belongs to; None if no family has such a name.

    The name is as in `named_parameters` or in a checkpoint file. Names of adapters work too.

    Example: `find_part("model.visual.merger.ln_q.weight")` is `ModelPart.ALIGNER`.
    """
    return next((part for prefix, part in _PREFIXES if name.startswith(prefix)), None)
