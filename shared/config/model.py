"""`model`: the checkpoint that is trained and served."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from shared.config.base import Section


class ModelSection(Section):
    path: Annotated[str, Field(min_length=1, examples=["outputs/demo/model"])]
    """Local directory of an ordinary checkpoint (configuration, tokenizer, processor, safetensors)."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of the weights, in the learner and in every engine. bfloat16 is not in this version."""

    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention of the learner's forward. flash_attention_2 needs bfloat16, so it is not in this version."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory for about a third more time."""
