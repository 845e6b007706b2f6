"""`model` and `data`: the checkpoint, and the samples it learns from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from shared.config.base import ConfigPath, Section
from shared.prompts import DEFAULT_USER_PROMPT


class AdapterSection(Section):
    """Low-rank adaptation (peft) of the language model's linear layers; everything else is frozen.

    Where `launch.add_coord_tokens` has made the checkpoint, the embeddings of its tokens are
    trained too.
    """

    kind: Literal["lora", "dora"]
    """LoRA, or LoRA with learned magnitudes (DoRA), which vLLM cannot serve unmerged."""
    rank: PositiveInt = 16
    """Of every pair of matrices."""
    alpha: PositiveFloat = 32.0
    """The product of a pair is scaled by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that are adapted."""


class ModelSection(Section):
    path: Annotated[str, Field(min_length=1, examples=["outputs/demo/model"])]
    """Local directory of an ordinary checkpoint with tokenizer and processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of all forwards. Under bfloat16 the optimizer keeps float32 master weights."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention of the learner's forward. auto: segment by segment, by one flash kernel where the
    GPU computes in bfloat16; sdpa, eager: transformers' own, with a mask over the row."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory for about a third more time."""
    adapter: AdapterSection | None = None
    """Train low-rank adapters in place of the weights; null: the weights."""


class DataSection(Section):
    """The JSONL files, and how their rows become samples (decision 31)."""

    train: ConfigPath | None = None
    """JSONL file of training samples, image paths relative to it; required, but under
    `trajectory_pg`, which has none.
    """
    val: ConfigPath | None = None
    """JSONL file of held-out samples; null: no validation."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A bad row stops the start (`error`), or is counted and logged (`skip`)."""
    sort_objects: bool = True
    """Put objects into reading order (min y, min x); false: a row out of order is a bad row."""
    check_images: bool = True
    """Decode every image before the start; false: a bad image is found when its sample is used.
    What took more than a second is kept in `~/.cache/rollmatch` for files that stay the same."""
    answer_format: Literal["coord_tokens", "qwen3_vl", "qwen2_5_vl", "rex_omni"] = "coord_tokens"
    """Text of an answer. coord_tokens: `{"object_1": {"desc": ..., "bbox_2d": ["<|coord_5|>",
    ...]}}`; qwen3_vl: `[{"bbox_2d": [5, ...], "label": ...}]`, thousandths of the picture in
    digits, as a stock Qwen3-VL writes them; qwen2_5_vl: the same in pixels of the resized picture;
    rex_omni: Rex-Omni's phrases with boxes of its tokens `<0>` to `<999>`. Records are the same for
    all."""
    shuffle: bool = True
    """Visit the samples of every epoch in a seeded random order; false: in the file's order."""
    system_prompt: str | None = None
    """Text of the system message; null: no system message. A row's own `system` comes before it."""
    user_prompt: Annotated[str, Field(min_length=1)] = DEFAULT_USER_PROMPT
    """Text of the user message, after its images. A row's own `prompt` comes before it; `{phrase}`
    and `{classes}` are what the row has under these names. The default asks for one JSON object,
    under `answer_format: qwen3_vl` and `qwen2_5_vl` for a JSON list, and under `rex_omni` for boxes
    in Rex-Omni's words."""
    prompts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Several in place of `user_prompt`: `training.seed` and its id draw that of a sample."""
    max_val_samples: PositiveInt | None = None
    """Evaluate on the first this many rows of `val`; null: on all."""
