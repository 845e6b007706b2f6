"""`model` and `data`: the checkpoint, and the samples that it learns from."""

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
    """Low-rank adaptation (peft) of linear layers; all other weights are frozen.

    The language model and the parts with `training.parts.*.adapted` are adapted. The embeddings of
    tokens that `rollmatch add-coord-tokens` added to the checkpoint are trained too.
    """

    kind: Literal["lora", "dora"]
    """Kind of the adapter: LoRA, or DoRA, which is LoRA with learned magnitudes. vLLM serves DoRA
    only merged into the base weights."""
    rank: PositiveInt = 16
    """Rank of the two matrices of each adapted layer. Raise it if LoRA learns too little."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    target_modules: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """Names of the linear layers that are adapted in each adapted part."""
    quantize: Literal["nf4"] | None = None
    """nf4: hold the linear layers of the adapted parts in 4 bits to save memory (QLoRA; needs kind:
    lora and the extra `qlora`). Engines and checkpoints get the dequantized weights with the
    adapter merged. null: `model.dtype`."""

    @model_validator(mode="after")
    def _quantizes_lora(self) -> AdapterSection:
        if self.quantize is not None and self.kind != "lora":
            wrong = f"'{self.quantize}' needs kind: lora"
            raise refusal(wrong, "set kind: lora, or remove the key", "quantize")
        return self


class ModelSection(Section):
    path: Annotated[
        str, Field(min_length=1, examples=["outputs/demo/model"]), AfterValidator(expanduser)
    ]
    """Local folder of a checkpoint in Hugging Face format, with tokenizer and processor."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number type of all forward passes. With bfloat16 the optimizer has float32 master weights."""
    head_dtype: Literal["model", "float32"] = "model"
    """Number type of the logits in learner and engines. float32: the logits of a model in bfloat16
    are not rounded, so log-probabilities of both differ slightly less. Engines get vLLM's override
    `head_dtype`; servers are started with the same."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Implementation of the learner's attention. auto: the segments of a packed row are computed
    separately, on GPUs with bfloat16 by one call of a flash kernel, else by one call of sdpa for
    each segment. The flash kernel is torch's own, or FlashAttention 3 if `flash_attn_interface` is
    installed, on GPUs of compute capability 9 (not run on a GPU). sdpa and eager: the
    implementations of transformers, with a mask over the whole row."""
    compile_blocks: Literal[True, False, "auto"] = False
    """Compile the blocks of the learner's language model and vision tower with torch.compile, all
    but their attention. The start waits for the compiler (g++ on CPU, gcc or clang on a GPU), and
    compares a row's loss and gradients with those of blocks that are not compiled. If they differ
    or the compiler fails, true refuses the start, and auto does not compile and reports why; with
    fsdp a compiler that fails ends the start with auto too. auto compiles only on GPUs, for at
    least 100 steps, and not with DoRA, 4-bit weights or linear attention. Not run on a GPU."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: saves memory, takes about a third more time."""
    recompute_every: PositiveInt = 1
    """Recompute only every n-th layer; the others keep their activations. With 2, recomputation
    saves about half as much memory and takes half the additional time. Preflight says which number
    fits."""
    recompute_tower: bool = True
    """Recompute the layers of the vision tower too; false: they keep their activations."""
    activation_offload: bool = False
    """Keep the inputs of recomputed layers in host memory, which saves GPU memory and costs two
    copies. Needs `gradient_checkpointing`; no effect on CPU."""
    adapter: AdapterSection | None = None
    """Train a low-rank adapter instead of the weights; null: train the weights."""

    @model_validator(mode="after")
    def _recomputes(self) -> ModelSection:
        if self.gradient_checkpointing:
            return self
        for key, value, without in (
            ("activation_offload", self.activation_offload, False),
            ("recompute_every", self.recompute_every, 1),
            ("recompute_tower", self.recompute_tower, True),
        ):
            if value != without:
                wrong = f"{value} needs model.gradient_checkpointing: true, which is false".lower()
                remedy = f"set model.gradient_checkpointing: true, or this key to {without}".lower()
                raise refusal(wrong, remedy, key)
        return self

    @model_validator(mode="after")
    def _compiles(self) -> ModelSection:
        if self.compile_blocks is True and (why := self.why_not_compiled) is not None:
            raise refusal(f"true {why}", "set it to false", "compile_blocks")
        return self

    @property
    def why_not_compiled(self) -> str | None:
        """Return why blocks with this adapter cannot be compiled; None if they can."""
        if self.is_quantized:
            return "does not support 4-bit weights (model.adapter.quantize)"
        if self.adapter is not None and self.adapter.kind == "dora":
            return "does not support DoRA (model.adapter.kind), whose layers share no graphs"
        return None

    @property
    def is_quantized(self) -> bool:
        """Return whether an adapter is trained on base weights that are held in 4 bits.

        Until the first sync of full weights, the engines have other weights than the learner: the
        checkpoint's, which are not quantized.
        """
        return self.adapter is not None and self.adapter.quantize is not None


class SourceSection(Section):
    """One entry of `data.val` if it lists several files of held-out samples."""

    path: Annotated[ConfigPath, Field(examples=["coco_val.jsonl"])]
    """A JSONL file; paths of images are relative to it."""
    name: str | None = None
    """Name of the file's samples in metrics and reports, and prefix of their sample ids; null: the
    name of the file, without its ending."""

    @property
    def called(self) -> str:
        return self.path.stem if self.name is None else self.name


class WeightedSourceSection(SourceSection):
    """One entry of `data.train` if it lists several files of training samples."""

    weight: Annotated[int, Field(ge=1, le=1_000_000, examples=[3])]
    """Share of this file: exactly this many of any sum(weights) successive samples are from it.
    Each file has its own order and epochs."""


class DataSource(NamedTuple):
    """One data file that `data.train` or `data.val` names, with its name and weight.

    Example: the second of `data.train: [{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]` is
    `DataSource("data.train[1].path", Path("b.jsonl"), "b", 1)`.
    """

    key: str
    path: Path
    name: str | None = None
    """Name of the data file in metrics, and before its sample ids; None for the only file."""
    weight: int = 1


NAME_PATTERN = r"[\w.-]+"
_SourceT = TypeVar("_SourceT", bound=SourceSection)


def _called_apart(sources: tuple[_SourceT, ...]) -> tuple[_SourceT, ...]:
    if not sources:
        raise refusal("has no file", "write [{path: a.jsonl, ...}], or only the path")
    names = [source.called for source in sources]
    for name in names:
        if not re.fullmatch(NAME_PATTERN, name):
            wrong = f"'{name}' has characters that are not allowed in names of metrics"
            raise refusal(wrong, "give the file a `name` of letters, digits, `_`, `.` and `-`")
        if names.count(name) > 1:
            raise refusal(f"several files are called '{name}'", "give each its own `name`")
    return sources


def _kind(value: object) -> str:
    return PATH_TAG if value is None or isinstance(value, str | Path | int | float) else LIST_TAG


_Listed = Annotated[tuple[_SourceT, ...], Field(strict=False), AfterValidator(_called_apart)]


ScaleFactor = Annotated[PositiveFloat, Field(le=4.0)]


class AugmentSection(Section):
    """Random changes of a training sample, drawn from seed, epoch and row each time it is used.

    A change is drawn again if the sample would exceed `global_max_length` or lose all its objects.
    If no draw fits, the sample stays unchanged. Held-out samples are never changed.
    """

    flip: Fraction01 = 0.0
    """Probability of mirroring the image, left to right. Rows with "left" or "right" in their texts
    (names, phrase, classes, prompt) are never mirrored. Leave it 0 if the run's prompts or other
    words of the data depend on left and right."""
    crop: Annotated[PositiveFloat, Field(le=1.0)] = 1.0
    """Least fraction of width and height that a crop keeps. Both fractions are drawn between this
    value and 1; the place is random. Boxes and polygons are cut at the new border. 1: no crop."""
    scale: Annotated[tuple[ScaleFactor, ScaleFactor], Field(strict=False)] = (1.0, 1.0)
    """Least and greatest factor of the image size in pixels, at most 4, drawn log-uniformly."""
    colour: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Strength c of colour changes: brightness, contrast and saturation are multiplied by factors
    between 1 - c and 1 + c, and the hue turns by at most c / 10 of the full circle."""
    min_visible: Fraction01 = 0.25
    """Least fraction of its area that an object must keep in a random crop to be taught."""

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
    """The data files, and how their rows become samples (decision 31)."""

    train: Annotated[
        Annotated[ConfigPath | None, Tag(PATH_TAG)]
        | Annotated[_Listed[WeightedSourceSection], Tag(LIST_TAG)],
        Discriminator(_kind),
    ] = None
    """JSONL file of training samples, with paths of images relative to it, or several with weights:
    `[{path: a.jsonl, weight: 3}, {path: b.jsonl, weight: 1}]`. Required, except under
    `trajectory_pg`, which does not allow it."""
    val: Annotated[
        Annotated[ConfigPath | None, Tag(PATH_TAG)]
        | Annotated[_Listed[SourceSection], Tag(LIST_TAG)],
        Discriminator(_kind),
    ] = None
    """JSONL file of held-out samples, or several: `[{path: a.jsonl}, {path: b.jsonl}]`; null: none.
    """
    on_bad_row: Literal["error", "skip"] = "error"
    """A bad row stops the start (`error`), or is skipped, counted and logged (`skip`)."""
    sort_objects: bool = True
    """Sort each row's objects by reading order (min y, min x); false: unsorted rows are bad rows.
    """
    check_images: bool = True
    """Decode every image before training; false: a broken image is found when its sample is used.
    Checks that take over a second are cached in `~/.cache/rollmatch` while the files stay the same.
    """
    answer_format: Literal["coord_tokens", "qwen3_vl", "qwen2_5_vl", "rex_omni"] = "coord_tokens"
    """Text format of an answer. coord_tokens: `{"object_1": {"desc": ..., "bbox_2d":
    ["<|coord_5|>", ...]}}`; qwen3_vl: `[{"bbox_2d": [5, ...], "label": ...}]` with thousandths of
    the image in digits, as a stock Qwen3-VL writes; qwen2_5_vl: the same in pixels of the resized
    image; rex_omni: Rex-Omni's phrases with boxes of its tokens `<0>` to `<999>`. The data files
    are the same for all."""
    max_pixels: PositiveInt | None = None
    """Largest number of pixels (width times height) of an image for the model. Larger images are
    reduced, in learner and engines and also those of environments. null: the limit of the
    checkpoint's processor. InternVL uses whole tiles, and adds a reduced image of the whole.
    Rollout servers are started with the same limit."""
    shuffle: bool = True
    """Shuffle the samples of every epoch, by `training.seed`; false: use the order of the file."""
    augment: AugmentSection | None = None
    """Random changes of training images and their objects; null: none."""
    system_prompt: str | None = None
    """System message of every prompt; null: none. A row's own `system` replaces it."""
    user_prompt: Annotated[str, Field(min_length=1)] = DEFAULT_USER_PROMPT
    """Text of the user message, after the images. A row's own `prompt` replaces it. `{phrase}` and
    `{classes}` insert these fields of the row. The default asks for one JSON object; with
    `answer_format: qwen3_vl` or `qwen2_5_vl` for a JSON list, and with `rex_omni` for boxes in
    Rex-Omni's words."""
    prompts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Several prompts instead of `user_prompt`; each sample gets one, by seed and sample id."""
    max_val_samples: PositiveInt | None = None
    """Number of rows of each file of `val` that are evaluated, from its start; null: all rows."""

    def sources(self, key: Literal["train", "val"]) -> tuple[DataSource, ...]:
        """Return the data files that `train` or `val` names; an empty tuple if the key is null."""
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
