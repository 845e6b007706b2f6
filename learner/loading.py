"""The checkpoint in the learner's process: model, processor, token codec."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from shared.config import RunConfig
from shared.errors import ConfigError
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.vocabulary import NUM_BINS

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any
    """transformers' image-text-to-text model, in training mode (these checkpoints have no dropout)."""
    processor: Any
    codec: HFTokenCodec
    device: torch.device
    coord_ids_C: torch.Tensor
    """int64 [1000]: the token id of each bin."""
    banned_token_ids: tuple[int, ...]
    """Vision placeholders: sampled, they would stand for features that are not there (FACTS 4)."""


def load_model(config: RunConfig, device: torch.device) -> LoadedModel:
    """Load `model.path` for training. Sets torch's seed and thread count for this process.

    Raises ConfigError when the folder is not a checkpoint or its tokenizer lacks coord tokens.
    """
    path = Path(config.model.path)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path: {path} holds no checkpoint (no config.json); run `make demo-data`, or set model.path to a folder that save_pretrained wrote"
        )
    torch.manual_seed(config.training.seed)
    # The results of a reduction depend on the number of threads: it is part of the configuration of a repeatable run, never left to Ray's default of one.
    torch.set_num_threads(config.learner.cpu_threads or os.cpu_count() or 1)
    processor = AutoProcessor.from_pretrained(path)
    try:
        codec = HFTokenCodec(processor.tokenizer)
    except ValueError as error:
        raise ConfigError(f"model.path: {path}: {error}") from error
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=DTYPES[config.model.dtype], attn_implementation=config.model.attn_implementation).to(device)
    model.train()
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    model_config = model.config
    placeholders = (model_config.image_token_id, model_config.video_token_id, model_config.vision_start_token_id, model_config.vision_end_token_id)
    return LoadedModel(
        model=model,
        processor=processor,
        codec=codec,
        device=device,
        coord_ids_C=torch.tensor([codec.coord_id(bin_) for bin_ in range(NUM_BINS)], device=device),
        banned_token_ids=tuple(sorted(placeholders)),
    )
