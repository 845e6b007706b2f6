"""The model families that a run can train, and what is known of them by name.

Another family: its types, placeholders, end of turn and parts here, and what its model asks of a
forward in learner/model/loading.py. Nothing else names a family.
"""

from __future__ import annotations

from enum import StrEnum

VISION_MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
"""`model_type` of checkpoints with a vision tower."""
TEXT_MODEL_TYPES = ("qwen2", "qwen3")
"""`model_type` of those without, trained on trajectories alone: they are asked about no images."""

PLACEHOLDER_KEYS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Keys of a vision model's config.json. These tokens stand for features and are never sampled."""
IMAGE_PLACEHOLDER = "<|image_pad|>"
"""The placeholder of an image, as chat templates write it."""
END_OF_TURN = "<|im_end|>"
"""The token that ends a response."""


class ModelPart(StrEnum):
    """The keys of `training.parts`."""

    VISION_TOWER = "vision_tower"
    ALIGNER = "aligner"
    LANGUAGE_MODEL = "language_model"


# The first prefix that fits. Qwen2.5-VL has one merger; Qwen3-VL has more, for the vision layers
# that it feeds into the first text layers. A tied head has no name of its own and follows the
# embedding; so does an untied one by this table. Behind `lm_head.`: what the files of a Qwen2.5-VL
# call what its parameters call `model.visual.` and `model.language_model.`.
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
)


def find_part(name: str) -> ModelPart | None:
    """Return the part of a parameter, by its name in `named_parameters` or in a checkpoint's file.

    Adapters are included. None where no family has such a name.

    Example: `find_part("model.visual.merger.ln_q.weight")` is `ModelPart.ALIGNER`.
    """
    return next((part for prefix, part in _PREFIXES if name.startswith(prefix)), None)
