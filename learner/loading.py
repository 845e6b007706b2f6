"""The checkpoint in the learner's process: model, processor, token codec."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor
from transformers.utils import is_flash_attn_2_available

from learner.adapters import apply_adapter
from learner.checkpoint_folder import checkpoint_problems
from learner.parts import freeze_parts
from shared.config import RunConfig
from shared.config.derive import is_sharded
from shared.errors import ConfigError
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.vocabulary import NUM_BINS

MODEL_TYPES = ("qwen2_5_vl", "qwen3_vl")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedTokens:
    """A checkpoint without its weights: enough to ask a model and to read its answers."""

    processor: Any
    codec: HFTokenCodec
    banned_token_ids: tuple[int, ...]
    """Vision placeholders: sampled, they would stand for features that are not there (FACTS 4)."""


@dataclass(frozen=True, slots=True)
class LoadedModel(LoadedTokens):
    model: Any
    """transformers' image-text-to-text model, in training mode (these checkpoints have no dropout)."""
    device: torch.device
    coord_ids_C: torch.Tensor
    """int64 [1000]: the token id of each bin."""


def model_type_problem(folder: Path, model_config: Any, *, key: str = "model.path") -> str | None:
    """Why the checkpoint in `folder`, which `key` names, is of no kind that is trained; None where it is."""
    kind = model_config.model_type
    return None if kind in MODEL_TYPES else f"{key}: {folder} is a {kind} model; this version trains {', '.join(MODEL_TYPES)}"


def load_tokens(config: RunConfig) -> LoadedTokens:
    """What surrounds the weights of `model.path`. ConfigError when the folder is no checkpoint of a known kind or its tokenizer lacks coord tokens."""
    path = Path(config.model.path)
    if problems := checkpoint_problems(path):
        raise ConfigError(problems)
    try:
        model_config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise _cannot_load(path, error) from error
    if problem := model_type_problem(path, model_config):
        raise ConfigError(problem)
    try:
        processor = AutoProcessor.from_pretrained(path)
        codec = HFTokenCodec(processor.tokenizer)
    except (ValueError, OSError) as error:
        raise _cannot_load(path, error) from error
    placeholders = (model_config.image_token_id, model_config.video_token_id, model_config.vision_start_token_id, model_config.vision_end_token_id)
    return LoadedTokens(processor, codec, tuple(sorted(placeholders)))


def load_model(config: RunConfig, device: torch.device) -> LoadedModel:
    """Load `model.path` for training: what is frozen has no gradient. Sets torch's seed and thread count for this process.

    Raises ConfigError as `load_tokens` does, for weights that cannot be read, for a model with dropout, and where nothing is left to train.
    """
    tokens, path = load_tokens(config), Path(config.model.path)
    if config.model.attn_implementation == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError("model.attn_implementation: flash_attention_2 is not installed here, or sees no GPU; install flash-attn, or set sdpa")
    torch.manual_seed(config.training.seed)
    # The results of a reduction depend on the number of threads: it is part of the configuration of a repeatable run, never left to Ray's default of one.
    torch.set_num_threads(config.learner.cpu_threads or len(os.sched_getaffinity(0)))
    try:
        model = AutoModelForImageTextToText.from_pretrained(path, dtype=_dtype(config), attn_implementation=config.model.attn_implementation).to(device)
    except (ValueError, OSError, SafetensorError) as error:
        raise _cannot_load(path, error) from error
    if config.model.adapter is not None:
        apply_adapter(model, config.model.adapter, base_path=str(path), seed=config.training.seed)
    freeze_parts(model, config.training.parts)
    model.train()
    if config.model.gradient_checkpointing:
        # Not the reentrant kind: it gives no gradient to a layer whose input needs none, which the first one's does not where parts are frozen.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)) or model.config.text_config.attention_dropout:
        raise ConfigError(f"model.path: {path} has dropout, with which the learner does not compute what the engines do; set it to 0 in config.json")
    return LoadedModel(
        model=model,
        processor=tokens.processor,
        codec=tokens.codec,
        device=device,
        coord_ids_C=torch.tensor([tokens.codec.coord_id(bin_) for bin_ in range(NUM_BINS)], device=device),
        banned_token_ids=tokens.banned_token_ids,
    )


def _dtype(config: RunConfig) -> torch.dtype:
    """Of the parameters. FSDP2 keeps them in float32 and casts them itself, for the forward."""
    return torch.float32 if is_sharded(config) else DTYPES[config.model.dtype]


def _cannot_load(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"model.path: {path} cannot be loaded ({error}); give a folder that save_pretrained wrote, of a model with coord tokens")
