"""`model` and `data`: the checkpoint, and the samples it learns from."""

from __future__ import annotations

import re
from os.path import expanduser
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    model_validator,
)

from shared.config.base import LIST_TAG, PATH_TAG, ConfigPath, Fraction01, Section, refusal
from shared.prompts import DEFAULT_USER_PROMPT


class AdapterSection(Section):
    """Low-rank adaptation (peft) of linear layers; everything else is frozen.

    They are those of the language model, and of parts with `training.parts.*.adapted`. If
    `rollmatch add-coord-tokens` made the checkpoint, the embeddings of its tokens are trained too.
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
    """Names of the linear layers that are adapted, in each adapted part."""
    quantize: Literal["nf4"] | None = None
    """nf4: hold the linear layers of the adapted parts in 4 bits under a LoRA (QLoRA); engines are
    sent, and checkpoints hold, what these unpack to, merged with it. Needs the extra `qlora`. null:
    in `model.dtype`."""

    @model_validator(mode="after")
    def _quantizes_lora(self) -> AdapterSection:
        if self.quantize is not None and self.kind != "lora":
            wrong = f"'{self.quantize}' needs kind: lora"
            raise refusal(wrong, "set it, or remove the key", "quantize")
        return self


class ModelSection(Section):
    path: Annotated[
        str, Field(min_length=1, examples=["outputs/demo/model"]), AfterValidator(expanduser)
    ]
    """Local directory of an ordinary checkpoint with tokenizer and processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of all forwards. Under bfloat16 the optimizer keeps float32 master weights."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention of the learner's forward. auto: segment by segment, by one flash kernel where the
    GPU computes in bfloat16; sdpa, eager: transformers' own, with a mask over the row."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward: less memory for about a third more time."""
    activation_offload: bool = False
    """What a recomputed layer starts from waits in host memory: less of the GPU's for a copy there
    and back. With `gradient_checkpointing` alone; no effect on CPU."""
    adapter: AdapterSection | None = None
    """Train low-rank adapters in place of the weights; null: the weights."""

    @model_validator(mode="after")
    def _offloads_what_is_recomputed(self) -> ModelSection:
        if self.activation_offload and not self.gradient_checkpointing:
            wrong = "true, and only what a recomputed layer starts from can wait in host memory"
            remedy = "set model.gradient_checkpointing: true, or this to false"
            raise refusal(wrong, remedy, "activation_offload")
        return self

    @property
    def is_quantized(self) -> bool:
        """Tell whether the adapter is trained on weights in 4 bits.

        Engines hold other weights, those of the checkpoint, until they are sent full ones.
        """
        return self.adapter is not None and self.adapter.quantize is not None


class SourceSection(Section):
    """One of several files of samples."""

    path: Annotated[ConfigPath, Field(examples=["coco_val.jsonl"])]
    """JSONL file, image paths relative to it."""
    name: str | None = None
    """Its name in metrics and reports, and in front of its samples' ids; null: that of its file."""

    @property
    def called(self) -> str:
        return self.path.stem if self.name is None else self.name


class WeightedSourceSection(SourceSection):
    """One of several files of training samples."""

    weight: Annotated[int, Field(ge=1, le=1_000_000, examples=[3])]
    """Of as many samples in a row as all weights together, so many are of this file, exactly; its
    rows come in an order and in epochs of their own."""


class DataSource(NamedTuple):
    """A file of samples as it is loaded.

    Example: the second of `data.train: [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]` is
    `DataSource("data.train[1].path", Path("b.jsonl"), "b", 1)`.
    """

    key: str
    path: Path
    name: str | None = None
    """None: it is the only one, and nothing is called after it."""
    weight: int = 1


NAME_PATTERN = r"[\w.-]+"
_SourceT = TypeVar("_SourceT", bound=SourceSection)


def _called_apart(sources: tuple[_SourceT, ...]) -> tuple[_SourceT, ...]:
    if not sources:
        raise refusal("has no file", "write [{path: a.jsonl, ...}], or the path alone")
    names = [source.called for source in sources]
    for name in names:
        if not re.fullmatch(NAME_PATTERN, name):
            wrong = f"'{name}' has characters that a name in metrics must not have"
            raise refusal(wrong, "give the file a `name` of letters, digits, `_`, `.` and `-`")
        if names.count(name) > 1:
            raise refusal(f"several files are called '{name}'", "give each a `name` of its own")
    return sources


def _kind(value: object) -> str:
    return PATH_TAG if value is None or isinstance(value, str | Path | int | float) else LIST_TAG


_Listed = Annotated[tuple[_SourceT, ...], Field(strict=False), AfterValidator(_called_apart)]


ScaleFactor = Annotated[PositiveFloat, Field(le=4.0)]


class AugmentSection(Section):
    """Changes to a training sample each time that it is drawn, by seed, epoch and its row.

    What would not fit `global_max_length`, or leaves none of the objects, is drawn again. Held-out
    samples stay as they are.
    """

    flip: Fraction01 = 0.0
    """Probability of swapping left and right. A row whose own words (names, phrase, classes,
    prompt) have "left" or "right" in them is never mirrored; not for prompts of the run that tell
    them apart, or for other words that do."""
    crop: Annotated[PositiveFloat, Field(le=1.0)] = 1.0
    """Least share of either side that is kept; each side's share lies between it and 1, and the
    place anywhere. Boxes and polygons are cut at the new border."""
    scale: Annotated[tuple[ScaleFactor, ScaleFactor], Field(strict=False)] = (1.0, 1.0)
    """Least and greatest factor of the picture's sides in pixels, at most 4, drawn evenly by its
    logarithm."""
    colour: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Brightness, contrast and saturation are multiplied by factors from 1 - it to 1 + it, and the
    hue turns by at most a tenth of it (1 is the whole circle)."""
    min_visible: Fraction01 = 0.25
    """An object of which a crop leaves a smaller share of its area is not taught."""

    @model_validator(mode="after")
    def _changes_something(self) -> AugmentSection:
        least, most = self.scale
        if least > most:
            wrong = f"the least factor, {least:g}, is above the greatest, {most:g}"
            raise refusal(wrong, "write the smaller one first", "scale")
        if (self.flip, self.crop, self.scale, self.colour) == (0.0, 1.0, (1.0, 1.0), 0.0):
            raise refusal("changes nothing", "set flip, crop, scale or colour, or remove it")
        return self


class DataSection(Section):
    """The JSONL files, and how their rows become samples (decision 31)."""

    train: Annotated[
        Annotated[ConfigPath | None, Tag(PATH_TAG)]
        | Annotated[_Listed[WeightedSourceSection], Tag(LIST_TAG)],
        Discriminator(_kind),
    ] = None
    """JSONL file of training samples, image paths relative to it, or several, `[{path: a.jsonl,
    weight: 3}, {path: b.jsonl, weight: 1}]`; required, but under `trajectory_pg`, which has none.
    """
    val: Annotated[
        Annotated[ConfigPath | None, Tag(PATH_TAG)]
        | Annotated[_Listed[SourceSection], Tag(LIST_TAG)],
        Discriminator(_kind),
    ] = None
    """JSONL file of held-out samples, or several, `[{path: a.jsonl}, {path: b.jsonl}]`; null: no
    validation."""
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
    augment: AugmentSection | None = None
    """Changes to training pictures and their objects; null: none."""
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
    """Evaluate on the first this many rows of `val`, of each file of several; null: on all."""

    def sources(self, key: Literal["train", "val"]) -> tuple[DataSource, ...]:
        """Return the files of `train` or `val`, one where it is a path, none where it is null."""
        value = self.train if key == "train" else self.val
        if value is None:
            return ()
        if isinstance(value, Path):
            return (DataSource(f"data.{key}", value),)
        return tuple(
            DataSource(
                f"data.{key}[{index}].path",
                one.path,
                one.called,
                one.weight if isinstance(one, WeightedSourceSection) else 1,
            )
            for index, one in enumerate(value)
        )
