r"""Adds the 1,000 coordinate tokens to a stock Qwen-VL or InternVL checkpoint.

    rollmatch add-coord-tokens model=models/Qwen3-VL-4B-Instruct \
        out=models/Qwen3-VL-4B-Instruct-coord max_pixels=1048576

The result is a standard checkpoint. The same arguments give the same bytes.

Suffixes of tensor names are their shape: C the 1,000 bins, D hidden size, F frequencies, V rows of
an embedding, W waves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from safetensors import SafetensorError

from launch.checks.weights import weight_warnings
from launch.cli import explained, read_arguments
from launch.run_folder.console import escaped, make_console
from launch.tools.demo.once import make_once
from learner.model.checkpoint_folder import BaseFiles, checkpoint_problems, no_chat_template
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError, StorageError
from shared.model_families import END_OF_TURN
from shared.tokens.fresh import FreshTokens
from shared.tokens.hf_codec import HFTokenCodec, add_coord_tokens
from shared.tokens.pictures import Pictures, TiledPictures, pictures_of
from shared.tokens.vocabulary import COORD_TOKENS, NUM_BINS

if TYPE_CHECKING:
    import torch
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

ROW_MULTIPLE = 128
"""Enlarged embeddings get a multiple of this many rows, for tensor-parallel engines."""
NUM_FREQUENCIES = 32
NUM_WAVES = 2 * NUM_FREQUENCIES

CoordInit = Literal["spread", "mean"]


class AddOptions(Section):
    model: Annotated[ConfigPath, Field(examples=["/models/Qwen3-VL-4B-Instruct"])]
    """Folder of the stock checkpoint. It is only read."""
    out: Annotated[ConfigPath, Field(examples=["/models/Qwen3-VL-4B-Instruct-coord"])]
    """Folder to create. It must not exist."""
    init: CoordInit = "spread"
    """Initial embeddings of the new tokens: `spread` (mean of the digits' embeddings, plus waves
    that make neighbouring bins similar) or `mean` (mean of all tokens).
    """
    seed: NonNegativeInt = 17
    """Seed of init=spread."""
    min_pixels: PositiveInt | None = None
    """Images with fewer pixels (width times height) are enlarged to this number; null: the
    checkpoint's value. InternVL uses whole tiles."""
    max_pixels: PositiveInt | None = None
    """Images with more pixels are reduced to this number; null: the checkpoint's value, often too
    large for a packed row."""


def mixed_waves(mixture_DW: torch.Tensor) -> torch.Tensor:
    """Return a row for each coordinate bin, [C, D], so that neighbouring bins have similar rows.

    Each column is a mixture, by `mixture_DW`, of cosines and sines over the bins, in which low
    frequencies dominate. With 1,000 independent rows, a model would first have to learn for each
    bin that 499 is next to 500.
    """
    import torch

    position_C = torch.arange(NUM_BINS) / (NUM_BINS - 1)
    frequency_F = torch.arange(1, NUM_FREQUENCIES + 1)
    angle_FC = torch.pi * frequency_F[:, None] * position_C
    waves_WC = torch.cat([torch.cos(angle_FC), torch.sin(angle_FC)])
    waves_WC = waves_WC / frequency_F.sqrt().repeat(2)[:, None]
    return (mixture_DW @ waves_WC).T


def coord_rows(
    rows_VD: torch.Tensor, digit_ids: list[int], init: CoordInit, generator: torch.Generator
) -> torch.Tensor:
    """Return the initial embedding rows of the coordinate tokens, float32 [C, D].

    `rows_VD` are the embedding rows of all other tokens, `digit_ids` the token ids of the digits.

    `init` spread: the mean of the digits' rows, plus waves (`mixed_waves`). The waves are as large
    as the digits' mean distance from that mean (root mean square). So the row of each bin is like a
    digit's row, and similar to the rows of neighbouring bins. `init` mean: the mean of all rows,
    for every bin.
    """
    import torch

    if init == "mean":
        return rows_VD.float().mean(dim=0).expand(NUM_BINS, -1)
    digits = rows_VD[digit_ids].float()
    centre_D = digits.mean(dim=0)
    waves_CD = mixed_waves(torch.randn(rows_VD.shape[1], NUM_WAVES, generator=generator))
    scale = ((digits - centre_D).square().mean() / waves_CD.square().mean()).sqrt()
    return centre_D + waves_CD * scale


def make_coord_model(options: AddOptions) -> list[str]:
    """Write the checkpoint with coordinate tokens, and return lines to print.

    Raises:
        ConfigError: all problems that are found before the weights are loaded, or a tokenizer that
            splits the new tokens or gives them other ids.
        StorageError: the checkpoint cannot be written.
    """
    config, processor, warnings = _read_stock(options)
    lines = [f"warning   {warning}" for warning in warnings]
    settings = options.model_dump(mode="json", exclude={"out"}, exclude_none=True)

    def make(folder: Path) -> None:
        lines.extend(_make(config, processor, options, folder))

    try:
        make_once(options.out, settings, make)
    except (OSError, SafetensorError) as error:
        remedy = "free space or permit writing there, or choose another folder with out=FOLDER"
        raise StorageError(str(options.out), str(error), remedy=remedy) from error
    return [*lines, f"saved     {options.out}"]


def _read_stock(options: AddOptions) -> tuple[PretrainedConfig, ProcessorMixin, list[str]]:
    """Return configuration and processor of the stock checkpoint, and warnings about its weights.

    Raises ConfigError with all problems of the options and of the checkpoint's files.
    """
    from transformers import AutoConfig, AutoProcessor

    from learner.model.loading import model_type_problem

    remedy = "give the folder of a downloaded Qwen-VL or InternVL checkpoint"
    problems = list(checkpoint_problems(options.model, key="model", remedy=remedy))
    config = None
    processor = None
    if not problems:
        try:
            config = AutoConfig.from_pretrained(options.model)
            if problem := model_type_problem(options.model, config, key="model"):
                problems.append(problem)
            else:
                processor = AutoProcessor.from_pretrained(options.model)
        except (ValueError, OSError) as error:
            problems.append(
                f"model: {options.model} cannot be loaded ({error}); give the folder of a complete"
                " checkpoint"
            )
    if options.out.exists():
        problems.append(f"out: {options.out} exists; remove it, or choose another folder")
    warnings: list[str] = []
    if processor is not None:
        try:
            warnings = weight_warnings(options.model, key="model")
        except ConfigError as error:
            problems += error.problems
        if processor.chat_template is None:
            problems.append(no_chat_template(options.model, key="model"))
        problems += _token_problems(processor.tokenizer, options.model)
        pictures = pictures_of(processor)
        low, high = _pixel_limits(pictures, options)
        least = pictures.resize.side**2
        if high < least:
            what = "tile" if isinstance(pictures, TiledPictures) else "image token"
            problems.append(
                f"max_pixels: {high} is less than one {what} ({least} pixels); raise it"
            )
        if low > high:
            problems.append(
                f"min_pixels: {low} is more than max_pixels, {high}; lower it, or raise max_pixels"
            )
    if problems:
        raise ConfigError(problems)
    return config, processor, warnings


def _token_problems(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Iterator[str]:
    vocabulary = tokenizer.get_vocab()
    num_present = sum(token in vocabulary for token in COORD_TOKENS)
    if num_present == NUM_BINS:
        yield f"model: {folder} already has the coord tokens; use it as model.path"
    elif num_present:
        yield (
            f"model: {folder} has {num_present} of the {NUM_BINS} coord tokens; give the stock"
            " checkpoint"
        )
    if END_OF_TURN not in vocabulary:
        yield (
            f"model: {folder} has no {END_OF_TURN}, which ends a response; give a chat (Instruct)"
            " checkpoint"
        )


def _pixel_limits(pictures: Pictures, options: AddOptions) -> tuple[int, int]:
    """Return the minimum and maximum number of pixels of an image."""
    resize = pictures.resize
    return options.min_pixels or resize.min_pixels, options.max_pixels or resize.max_pixels


def _limit_pixels(processor: ProcessorMixin, options: AddOptions) -> str:
    """Set an image's minimum and maximum pixels in the processor. Returns a line to print."""
    pictures = pictures_of(processor)
    low, high = _pixel_limits(pictures, options)
    side = pictures.resize.side
    # For InternVL this sets `crop_to_patches` too: the processor always crops, but engines read it.
    pictures.limit(low, high)
    if not isinstance(pictures, TiledPictures):
        tokens = high // side**2
        return f"images    {low:,} to {high:,} pixels, so at most {tokens:,} tokens each"
    few = max(1, low // side**2)
    most = high // side**2
    tile = processor.image_seq_length
    if most == 1:
        return f"images    one tile of {side} x {side} pixels, so {tile:,} tokens each"
    return (
        f"images    {few} to {most} tiles of {side} x {side} pixels and one of the whole, so at"
        f" most {(most + 1) * tile:,} tokens each"
    )


def _make(
    config: PretrainedConfig, processor: ProcessorMixin, options: AddOptions, folder: Path
) -> Iterator[str]:
    from transformers import AutoProcessor

    from learner.model.checkpoint import CheckpointWeights, save_as_published
    from learner.model.weights import load_complete

    model, _ = load_complete(options.model, key="model", dtype="auto")
    numbers = sum(parameter.numel() for parameter in model.parameters())
    dtype = str(model.dtype).removeprefix("torch.")
    size = f"{numbers:,} parameters in {dtype}"
    yield f"model     {config.model_type}, {size}, from {options.model}"
    tokenizer = processor.tokenizer
    num_stock_tokens = len(tokenizer)
    digit_ids = sorted(set(tokenizer.encode("0123456789", add_special_tokens=False)))
    add_coord_tokens(tokenizer)
    coord_ids = _checked_ids(tokenizer)
    yield (
        f"tokens    {NUM_BINS:,} coord tokens, ids {coord_ids[0]} to {coord_ids[-1]}; each is one"
        " token, also inside JSON quotes"
    )
    yield _make_room(model, num_stock_tokens, len(tokenizer))
    yield _initialise(model, num_stock_tokens, coord_ids, digit_ids, options)
    yield _limit_pixels(processor, options)
    base = BaseFiles.read(options.model)
    # Tokenizer and processor have changed, so their files are not copied.
    kept = {name: base.files[name] for name in base.files if name == "generation_config.json"}
    save_as_published(
        model,
        folder,
        dict(CheckpointWeights(model).tensors()),
        replace(base, files=kept),
        vocab_size=model.config.get_text_config().vocab_size,
    )
    processor.save_pretrained(folder)
    FreshTokens(coord_ids[0], NUM_BINS).save(folder)
    # Check the written files.
    assert _checked_ids(AutoProcessor.from_pretrained(folder).tokenizer) == coord_ids


def _checked_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the coordinate tokens' ids, in the order of bins.

    Raises ConfigError if the ids are not consecutive, or if the tokenizer splits such a token
    inside JSON quotes.
    """
    codec = HFTokenCodec(tokenizer)
    ids = [codec.coord_id(bin_) for bin_ in range(NUM_BINS)]
    if ids != list(range(ids[0], ids[0] + NUM_BINS)):
        raise ConfigError(
            f"model: its tokenizer gives coord tokens the ids {ids[0]} to {ids[-1]}, which are not"
            f" {NUM_BINS} consecutive ids; give the stock checkpoint"
        )
    quoted = codec.encode("[" + ", ".join(f'"{token}"' for token in COORD_TOKENS) + "]")
    if [token_id for token_id in quoted if codec.coord_bin(token_id) is not None] != ids:
        raise ConfigError(
            "model: its tokenizer splits coord tokens inside JSON quotes; give a checkpoint with"
            " a byte-level BPE tokenizer like Qwen's"
        )
    return ids


def _make_room(model: PreTrainedModel, num_stock_tokens: int, num_tokens: int) -> str:
    """Add rows for new tokens to the embeddings. Returns a line to print."""
    import torch

    # Qwen's embeddings have more rows than the tokenizer has tokens; unused rows are taken first.
    embeddings = model.get_input_embeddings()
    num_rows = embeddings.weight.shape[0]
    is_tied = model.get_output_embeddings().weight is embeddings.weight
    free = f"{num_rows - num_stock_tokens} of {num_rows} embedding rows had no token"
    if num_tokens <= num_rows:
        return f"rows      {free}: enough, no rows were added"
    wanted = -(-num_tokens // ROW_MULTIPLE) * ROW_MULTIPLE
    model.resize_token_embeddings(wanted, mean_resizing=False)
    assert (len(_embeddings(model)) == 1) == is_tied
    assert model.config.get_text_config().vocab_size == wanted
    with torch.no_grad():
        for weight in _embeddings(model):
            # Rows without a token can be sampled too, so they get the mean of all tokens.
            weight[num_rows:] = weight[:num_stock_tokens].float().mean(dim=0).to(weight.dtype)
    return f"rows      {free}, {NUM_BINS} are needed: now {wanted}, a multiple of {ROW_MULTIPLE}"


def _initialise(
    model: PreTrainedModel,
    num_stock_tokens: int,
    coord_ids: list[int],
    digit_ids: list[int],
    options: AddOptions,
) -> str:
    import torch

    generator = torch.Generator().manual_seed(options.seed)
    weights = _embeddings(model)
    with torch.no_grad():
        for weight in weights:
            rows = coord_rows(weight[:num_stock_tokens], digit_ids, options.init, generator)
            weight[coord_ids[0] : coord_ids[-1] + 1] = rows.to(weight.dtype)
    how = "the mean of all tokens"
    if options.init == "spread":
        how = f"the digits' mean plus waves, seed {options.seed}"
    head = "the head tied to it"
    if len(weights) > 1:
        head = "of the head, which has separate weights"
    return f"init      {options.init} ({how}), of the embedding and {head}"


def _embeddings(model: PreTrainedModel) -> list[torch.Tensor]:
    """Return the input embedding, and the head if it is a separate tensor."""
    embeddings = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    return [embeddings] if head is embeddings else [embeddings, head]


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        options = read_arguments(AddOptions, arguments)
        # Imported after `--help`, as in the functions above: it takes seconds.
        from transformers.utils import logging

        logging.disable_progress_bar()
        print(escaped("\n".join(make_coord_model(options))))


if __name__ == "__main__":
    main()
