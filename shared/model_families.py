"""The model families that a run can train, and what is known of them by name.

Another family: its types, placeholders, end of turn and parts here, and what its model asks of a
forward in learner/model/loading.py. Nothing else names a family.
"""

from __future__ import annotations

from enum import StrEnum

VISION_MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "internvl")
"""`model_type` of checkpoints with a vision tower."""
TEXT_MODEL_TYPES = ("qwen2", "qwen3")
"""`model_type` of those without, trained on trajectories alone: they are asked about no images."""

NOT_TRAINED = {
    "qwen3_5_moe": "nobody has compared packed rows, syncs and files of its experts",
}
"""By `model_type` what is missing for families that somebody may well ask for."""
IN_OTHER_FORMS = {
    "internvl_chat": "comes with code of its own; take the same model in transformers' form, whose"
    " name ends in -HF, such as OpenGVLab/InternVL3_5-4B-HF",
}
"""By `model_type` how families are trained whose checkpoints transformers does not read so."""
HYBRID_MODEL_TYPES = ("qwen3_5",)
"""Those of them with layers of linear attention, which keep a state and no keys and values."""
EXPERT_MODEL_TYPES = ("qwen3_vl_moe",)
"""Those of them whose tokens go through some of many experts."""
TILED_MODEL_TYPES = ("internvl",)
"""Those of them that see pictures as tiles of one size, and whose tokens have one position each."""
TILING_PROCESSORS = ("InternVLProcessor",)
"""The classes of their processors (`shared.tokens.pictures`)."""
TURNED_IN_FILES = {"qwen3_vl_moe": (".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")}
"""By `model_type` the ends of names of parameters whose last two dimensions change places in a
checkpoint's files. transformers 5.19 turns them when it reads and not when it writes."""

PLACEHOLDER_KEYS = (
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""Keys of a vision model's config.json. These tokens stand for features and are never sampled."""
IMAGE_PLACEHOLDERS = ("<IMG_CONTEXT>", "<|image_pad|>")
"""The placeholder of an image, as chat templates write it: the first that a tokenizer has. That of
InternVL, which extends Qwen's, has both."""
TILE_PLACEHOLDERS = ("<IMG_CONTEXT>", "<img>", "</img>", "<video>")
"""What the placeholders of `PLACEHOLDER_KEYS` are to `TILED_MODEL_TYPES`, by name."""
END_OF_TURN = "<|im_end|>"
"""The token that ends a response."""
CONTROL_TOKENS = (
    *(END_OF_TURN, "<|im_start|>", "<|endoftext|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|video_pad|>", *IMAGE_PLACEHOLDERS),
)
"""Tokens of every family that a text of the user must not hold. A run refuses the others of its own
tokenizer too (`shared.tokens.hf_codec.control_tokens`)."""


class ModelPart(StrEnum):
    """The keys of `training.parts`."""

    VISION_TOWER = "vision_tower"
    ALIGNER = "aligner"
    LANGUAGE_MODEL = "language_model"


# The first prefix that fits. Qwen2.5-VL has one merger; Qwen3-VL has more, for the vision layers
# that it feeds into the first text layers. A tied head has no name of its own and follows the
# embedding; so does an untied one by this table. Behind `lm_head.`: what the files of a Qwen2.5-VL
# call what its parameters call `model.visual.` and `model.language_model.`; then InternVL's, by
# their parameters and by their files.
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
)


def find_part(name: str) -> ModelPart | None:
    """Return the part of a parameter, by its name in `named_parameters` or in a checkpoint's file.

    Adapters are included. None where no family has such a name.

    Example: `find_part("model.visual.merger.ln_q.weight")` is `ModelPart.ALIGNER`.
    """
    return next((part for prefix, part in _PREFIXES if name.startswith(prefix)), None)
