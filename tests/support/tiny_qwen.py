"""Checkpoints as Qwen publishes them, shrunk: random weights, the families' special tokens and processors, embeddings padded, no coord tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from launch.demo.data import NAMES
from launch.demo.model import CHAT_TEMPLATE
from shared.prompts import DEFAULT_USER_PROMPT

PAD, END = "<|endoftext|>", "<|im_end|>"
SPECIAL = (PAD, "<|im_start|>", END, "<|object_ref_start|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
HIDDEN = 128
"""Of 4 heads: vLLM's attention on CPU takes none smaller than 32."""


def stock_tokenizer() -> Qwen2Tokenizer:
    """The class of both families, with a vocabulary learned from a few lines."""
    empty = Qwen2Tokenizer(vocab={}, merges=[])
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = empty.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    lines = (f'{{"object_1": {{"desc": "{name}", "bbox_2d": ["' for name in NAMES)
    learned.train_from_iterator([DEFAULT_USER_PROMPT, "user\n assistant\n", *lines], trainer)
    model = json.loads(learned.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    extra = [token for token in SPECIAL if token not in (PAD, END)]
    return Qwen2Tokenizer(vocab=model["vocab"], merges=merges, eos_token=END, pad_token=PAD, extra_special_tokens=extra, model_max_length=4096)


def make_stock_model(folder: Path, family: str, *, tied: bool = True, padding: int = 100, seed: int = 3) -> Path:
    """`family` is a model type of transformers; the embeddings have `padding` rows without a token."""
    tokenizer = stock_tokenizer()
    torch.manual_seed(seed)
    model = _MODELS[family](tokenizer, tied, len(tokenizer) + padding)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(END), pad_token_id=tokenizer.convert_tokens_to_ids(PAD), do_sample=True
    )
    model.save_pretrained(folder)
    _PROCESSORS[family](tokenizer).save_pretrained(folder)
    return folder


def _ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    tokens = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens.items()}


def _text(tokenizer: Qwen2Tokenizer, vocabulary: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": HIDDEN, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id}
    return {"vocab_size": vocabulary, **shape, **ids, "max_position_embeddings": 4096, "initializer_range": 0.1, **more}


def _qwen3(tokenizer: Qwen2Tokenizer, tied: bool, vocabulary: int) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    vision |= {"out_hidden_size": HIDDEN, "num_position_embeddings": 144, "deepstack_visual_indexes": [0, 1], "initializer_range": 0.1}
    text = _text(tokenizer, vocabulary, head_dim=32, rope_parameters=rope, tie_word_embeddings=tied)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, dtype="float32", **_ids(tokenizer)))


def _qwen2_5(tokenizer: Qwen2Tokenizer, tied: bool, vocabulary: int) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    # Windows of two by two merged patches: smaller than the images of the tests.
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    vision |= {"out_hidden_size": HIDDEN, "window_size": 32, "fullatt_block_indexes": [1], "initializer_range": 0.1}
    text = _text(tokenizer, vocabulary, rope_parameters=rope, tie_word_embeddings=tied)
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied, dtype="float32", **_ids(tokenizer))
    )


_PATCHES = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
# Qwen's own limits are for photographs: far above the scenes of the tests.
_STOCK_LIMITS = {"shortest_edge": 64 * 64, "longest_edge": 16384 * 16384}


def _processor3(tokenizer: Qwen2Tokenizer) -> Any:
    images = Qwen2VLImageProcessor(size=_STOCK_LIMITS, **_PATCHES)
    return Qwen3VLProcessor(images, tokenizer, Qwen3VLVideoProcessor(size=_STOCK_LIMITS, **_PATCHES), chat_template=CHAT_TEMPLATE)


def _processor2_5(tokenizer: Qwen2Tokenizer) -> Any:
    images = Qwen2VLImageProcessor(size=_STOCK_LIMITS, **_PATCHES)
    return Qwen2_5_VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(size=_STOCK_LIMITS, **_PATCHES), chat_template=CHAT_TEMPLATE)


_MODELS = {"qwen3_vl": _qwen3, "qwen2_5_vl": _qwen2_5}
_PROCESSORS = {"qwen3_vl": _processor3, "qwen2_5_vl": _processor2_5}
FAMILIES = tuple(_MODELS)
