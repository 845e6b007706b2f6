"""Loads a checkpoint into the learner's process: model, processor and token codec."""

from __future__ import annotations

import difflib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
from jinja2 import TemplateSyntaxError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.collate import RopeIndex
from learner.model.adapters import apply_adapter, quantize_layers
from learner.model.attention import attend_by_segments
from learner.model.checkpoint_folder import (
    BaseFiles,
    checkpoint_problems,
    end_token_ids,
    no_chat_template,
)
from learner.model.compiled_blocks import compile_blocks, compiles_blocks
from learner.model.packed_rows import prepare_vision_tower, use_float32_head
from learner.model.parts import freeze_parts, model_part
from learner.model.weights import cannot_load, load_complete, load_rows
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.model import DataSection, ModelSection
from shared.errors import ConfigError
from shared.model_families import (
    END_OF_TURN,
    HYBRID_MODEL_TYPES,
    NOT_TRAINED,
    PLACEHOLDER_KEYS,
    TILE_PLACEHOLDERS,
    TILED_MODEL_TYPES,
    VISION_MODEL_TYPES,
    ModelPart,
    reads_only_text,
)
from shared.tokens.fresh import FILE, REMEDY, FreshTokens
from shared.tokens.hf_codec import (
    EXAMPLE_ANSWER,
    HFTokenCodec,
    MissingTokensError,
    control_tokens,
    example_conversation,
    find_control_token,
)
from shared.tokens.pictures import pictures_of, pixel_limits

_LAYERS_WITHOUT_STATE = {"full_attention", "sliding_attention", "chunked_attention"}
"""Values of `layer_types` in a configuration of transformers whose layers keep no state."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedTokens:
    """A checkpoint without its weights: what is needed to make requests and to parse answers."""

    processor: ProcessorMixin | PreTrainedTokenizerBase
    """The processor; for a text model its tokenizer."""
    tokenizer: PreTrainedTokenizerBase
    codec: HFTokenCodec
    banned_token_ids: tuple[int, ...]
    """Ids that engines must not sample: placeholders of images, which would have no features."""
    stop_token_ids: tuple[int, ...]
    """Ids that end an answer. The first ends a turn and is taught; the others are not taught."""
    base: BaseFiles
    """The original configuration, tokenizer and processor files of the checkpoint's folder."""


@dataclass(frozen=True, slots=True)
class LoadedModel(LoadedTokens):
    """A checkpoint that is loaded for training: the model with its processor and tokenizer."""

    model: PreTrainedModel
    """An image-text-to-text or causal model of transformers, in training mode, without dropout."""
    device: torch.device
    coord_ids_C: torch.Tensor
    """int64 [1000]: the token id of each coordinate bin; int64 [0] without coordinate tokens."""
    fresh_tokens: FreshTokens | None
    """Token ids that an adapter on this run's checkpoints must train; None if there are none."""
    rows: dict[nn.Parameter, torch.Tensor] = field(default_factory=dict)
    """This rank's rows of each parameter that was read by rows, and is therefore empty itself.

    `ShardedModel` takes them out."""

    @property
    def is_text(self) -> bool:
        """True if the model reads text only."""
        # Read for each row, so without copying the configuration.
        return reads_only_text(
            {**vars(self.model.config), "model_type": self.model.config.model_type}
        )

    @property
    def rope_index(self) -> RopeIndex | None:
        """The function that computes M-RoPE positions; None for a model without M-RoPE."""
        if self.is_text or self.model.config.model_type in TILED_MODEL_TYPES:
            return None
        rope_index: RopeIndex = self.model.model.get_rope_index
        return rope_index


def model_type_problem(
    folder: Path,
    model_config: PreTrainedConfig,
    *,
    key: str = "model.path",
    trains_text: bool = False,
) -> str | None:
    """Return a message if a run cannot train the checkpoint's model type; else None.

    Args:
        key: the configuration key that names the checkpoint's `folder`.
        trains_text: whether the run trains text models too, as a run with an environment does.
    """
    kind = model_config.model_type
    if kind in VISION_MODEL_TYPES:
        return None
    vision = ", ".join(VISION_MODEL_TYPES)
    if kind in NOT_TRAINED:
        return f"{key}: {folder} is a {kind} model; {NOT_TRAINED[kind]}; choose one of {vision}"
    if not reads_only_text(model_config.to_dict()):
        near = difflib.get_close_matches(kind, VISION_MODEL_TYPES, 1, 0.5) or ["qwen3_vl"]
        of_text = ", or any text model" if trains_text else ""
        return (
            f"{key}: {folder} is a {kind} model; of models that read images this run trains"
            f" {vision}{of_text}; the nearest is {near[0]}"
        )
    if not trains_text:
        return f"{key}: {folder} is a {kind} model, which reads no images; choose one of {vision}"
    if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"{key}: {folder} is a {kind} model, which generates no text; choose a chat model"
    layers = sorted(set(getattr(model_config, "layer_types", None) or ()) - _LAYERS_WITHOUT_STATE)
    if MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]._is_stateful or layers:
        of_layers = f" ({', '.join(layers)})" if layers else ""
        return (
            f"{key}: {folder} is a {kind} model, whose layers{of_layers} pass a state from token to"
            " token, also across the segments of a packed row; choose a model with attention only,"
            " such as llama or qwen3"
        )
    return None


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the token that ends an answer of a text model.

    It is the first control token that the chat template writes after an answer, such as
    `<|im_end|>` or `<|eot_id|>`; without a chat template the tokenizer's `eos_token`.

    Raises jinja2's TemplateSyntaxError if the chat template is not valid.
    """
    if tokenizer.chat_template is not None:
        after = example_conversation(tokenizer).rpartition(EXAMPLE_ANSWER)[2]
        found = [(after.find(token), token) for token in control_tokens(tokenizer).values()]
        if ends := [one for one in found if one[0] >= 0]:
            return min(ends)[1]
    return tokenizer.eos_token


def load_tokens(config: RunConfig) -> LoadedTokens:
    """Load processor, tokenizer and small files of `model.path`, without the weights.

    Raises ConfigError if the folder is not a checkpoint of a type that the run can train, or if its
    tokenizer lacks coordinate tokens that the run needs.
    """
    path = Path(config.model.path)
    is_grounding = not config.algorithm.uses_environment
    if problems := checkpoint_problems(path):
        raise ConfigError(problems)
    try:
        model_config = AutoConfig.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise cannot_load(path, error) from error
    if problem := model_type_problem(path, model_config, trains_text=not is_grounding):
        raise ConfigError(problem)
    if packed := model_config.to_dict().get("quantization_config"):
        raise ConfigError(
            f"model.path: {path} holds quantized weights (quantization_config:"
            f" {packed.get('quant_method')} in config.json), which cannot be trained; choose the"
            " model in full precision"
        )
    if getattr(model_config.get_text_config(), "attention_dropout", 0.0):
        raise ConfigError(_has_dropout(path))
    if config.training.share_prompts:
        _require_shareable(config.model.attention, path)
    is_text = reads_only_text(model_config.to_dict())
    try:
        if is_text:
            processor = tokenizer = AutoTokenizer.from_pretrained(path)
        else:
            processor = AutoProcessor.from_pretrained(path)
            tokenizer = processor.tokenizer
        codec = HFTokenCodec(
            tokenizer,
            coord_tokens=config.answer_format.coord_tokens if is_grounding else (),
            markup_tokens=config.answer_format.markup_tokens if is_grounding else (),
            has_pieces=is_grounding,
            end_of_turn=end_of_turn(tokenizer) if is_text else END_OF_TURN,
        )
    except MissingTokensError as error:
        raise ConfigError(f"model.path: {path} does not suit the run: {error}") from error
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"model.path: the chat template of {path} has an error in line {error.lineno}:"
            f" {error.message}; correct chat_template.jinja, or fetch it again"
        ) from error
    except (ValueError, OSError) as error:
        raise cannot_load(path, error) from error
    if config.data.max_pixels is not None:
        pictures = None if is_text else pictures_of(processor)
        low, high = pixel_limits(pictures, config.data.max_pixels, path, "data.max_pixels")
        assert pictures is not None, "refused by pixel_limits"
        pictures.limit(low, high)
    _require_ids_as_written(path, tokenizer)
    if of_prompts := list(_prompt_problems(config.data, config.environment, tokenizer)):
        raise ConfigError(of_prompts)
    banned: list[int] = []
    if model_config.model_type in TILED_MODEL_TYPES:
        vocabulary = tokenizer.get_vocab()
        banned = [vocabulary[name] for name in TILE_PLACEHOLDERS if name in vocabulary]
    elif not is_text:
        banned = [getattr(model_config, key) for key in PLACEHOLDER_KEYS]
    # Prompts of an environment may be plain text.
    if is_grounding and processor.chat_template is None:
        raise ConfigError(no_chat_template(path))
    ends = end_token_ids(path, len(tokenizer), codec.special_ids) | {tokenizer.eos_token_id}
    stops = (codec.eos_token_id, *sorted(ends - {codec.eos_token_id, None}))
    base = BaseFiles.read(path)
    return LoadedTokens(processor, tokenizer, codec, tuple(sorted(banned)), stops, base)


def _prompt_problems(
    data: DataSection, environment: EnvironmentSection | None, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield problems of the prompt texts in the configuration.

    The texts of dataset rows are checked when they are encoded (`PromptEncoder`).
    """
    texts = {"data.system_prompt": data.system_prompt, "data.user_prompt": data.user_prompt}
    texts |= {f"data.prompts[{i}]": text for i, text in enumerate(data.prompts)}
    if environment is not None:
        texts["environment.system_prompt"] = environment.system_prompt
    tokens = control_tokens(tokenizer).values()
    for key, text in texts.items():
        if text and (token := find_control_token(text, tokens)):
            yield (
                f"{key}: has {token}, a control token of the tokenizer, which would end the turn"
                " or stand for an image; remove it, or write it in words"
            )


def _require_ids_as_written(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError if transformers gives a token another id than `tokenizer_config.json`."""
    # Rex-Omni's file intends to rename tokens of the vocabulary. Instead, transformers moves all of
    # them to other ids than the model has learned.
    config = path / "tokenizer_config.json"
    written = json.loads(config.read_text()) if config.is_file() else {}
    for token_id, token in written.get("added_tokens_decoder", {}).items():
        read = tokenizer.convert_tokens_to_ids(token["content"])
        if read != int(token_id):
            raise ConfigError(
                f"model.path: {config} says that {token['content']} is token {token_id}, but"
                f" transformers reads it as {read}; for a Rex-Omni checkpoint write the missing"
                f" tokenizer.json with `rollmatch rex-omni model={path}`, for any other checkpoint"
                " add its tokenizer.json"
            )


def load_model(
    config: RunConfig, device: torch.device, mesh: DeviceMesh | None = None
) -> LoadedModel:
    """Load the checkpoint `model.path` on `device` for training, as the run configures it.

    Frozen parameters do not require a gradient. Set torch's seed and thread count for this process.
    Raises ConfigError if the checkpoint cannot be read or trained.

    Args:
        mesh: the ranks among which the model will be sharded. This rank reads only its rows of each
            weight, in float32 (`LoadedModel.rows`). None loads the whole model.
    """
    tokens = load_tokens(config)
    path = Path(config.model.path)
    fresh = FreshTokens.of(path)
    if fresh is not None and fresh.ids.stop > len(tokens.tokenizer):
        raise ConfigError(
            f"model.path: {path / FILE} names tokens that do not exist (count: {fresh.count} ids"
            f" from {fresh.first_id}, but the tokenizer has {len(tokens.tokenizer)}); {REMEDY}"
        )
    torch.manual_seed(config.training.seed)
    # Results of reductions depend on the number of threads. For repeatable runs it is configured,
    # not left to Ray's default of one.
    torch.set_num_threads(config.learner.cpu_threads or len(os.sched_getaffinity(0)))
    attention, is_by_segments = _attention(config.model.attention, path)
    beside = config.tokens_beside_adapter
    rows: dict[nn.Parameter, torch.Tensor] = {}
    if mesh is None:
        dtype = DTYPES[config.model.dtype]
        model, _ = load_complete(path, dtype=dtype, attn_implementation=attention)
    else:
        # An adapter for tokens starts with their rows of the embeddings.
        model, rows = load_rows(path, mesh, attention, whole_embeddings=beside is not None)
    if config.model.is_quantized:
        # From host memory, which holds the whole unquantized model.
        quantize_layers(model, config.adapted_parts, device)
    model = model.to(device)
    prepare_vision_tower(model)
    if is_by_segments:
        attend_by_segments(model)
    if model.config.model_type in HYBRID_MODEL_TYPES:
        # Imported only for such a model: it imports transformers' module of the family.
        from learner.model.linear_attention import keep_segments_apart

        keep_segments_apart(model)
    if config.model.adapter is not None:
        apply_adapter(
            model,
            config.model.adapter,
            base_path=str(path),
            seed=config.training.seed,
            token_ids=() if beside is None else beside.ids,
            parts=config.adapted_parts,
        )
    elif not config.training.parts.language_model.frozen:
        fresh = None
    freeze_parts(model, config.training.parts)
    model.train()
    if config.model.gradient_checkpointing:
        # Not reentrant: the reentrant kind computes no gradient for a layer whose input requires
        # none, such as the first layer if parts are frozen.
        model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False},
            # Without an accelerator, activations are in host memory, which cannot be pinned.
            offload=config.model.activation_offload and torch.accelerator.is_available(),
        )
        _keep_activations(model, config.model)
    if config.model.head_dtype == "float32" and config.model.dtype != "float32":
        use_float32_head(model, path)
    # A model that will be sharded is still in host memory.
    if compiles_blocks(config, model, device.type if mesh is None else mesh.device_type):
        compile_blocks(model)
    if any(module.p for module in model.modules() if isinstance(module, nn.Dropout)):
        raise ConfigError(_has_dropout(path))
    return LoadedModel(
        **{one.name: getattr(tokens, one.name) for one in fields(tokens)},
        model=model,
        device=device,
        coord_ids_C=torch.tensor(tokens.codec.coord_ids, dtype=torch.int64, device=device),
        fresh_tokens=fresh,
        rows=rows,
    )


def _keep_activations(model: PreTrainedModel, section: ModelSection) -> None:
    """Turn recomputation off in the layers that keep their activations.

    transformers' own `every_n_layers` counts through the vision tower and the language model.
    """
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            stack = name.rpartition(".")[0]
            is_recomputed = counts[stack] % section.recompute_every == 0
            if model_part(name) is ModelPart.VISION_TOWER:
                is_recomputed = is_recomputed and section.recompute_tower
            module.gradient_checkpointing = is_recomputed
            counts[stack] += 1


def _has_dropout(path: Path) -> str:
    return f"model.path: {path} has dropout, but engines have none; set dropout to 0 in config.json"


def _attention(wanted: str, path: Path) -> tuple[str, bool]:
    """Return transformers' name of the attention, and whether each segment is computed separately.

    Raises ConfigError if `model.attention` is sdpa, which would ignore the model's cap on scores.
    """
    text_config = AutoConfig.from_pretrained(path).get_text_config()
    is_capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    if wanted == "sdpa" and is_capped:
        raise ConfigError(
            f"model.attention: sdpa would ignore that {path} caps the scores of its attention"
            " (attn_logit_softcapping in config.json); set it to auto or eager"
        )
    # Gemma 2 caps scores, and GPT-OSS adds a learned term to them: only eager computes these.
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text_config), None)
    if wanted == "auto" and (is_capped or (kind is not None and not kind._supports_sdpa)):
        return "eager", False
    return ("sdpa", True) if wanted == "auto" else (wanted, False)


def _require_shareable(attention: str, path: Path) -> None:
    """Raise ConfigError if segments of this checkpoint's model cannot share tokens of a row.

    `attention` is the run's `model.attention`.
    """
    _, is_by_segments = _attention(attention, path)
    config = AutoConfig.from_pretrained(path).get_text_config()
    known = {"full_attention", "sliding_attention"}
    others = sorted(set(getattr(config, "layer_types", None) or ()) - known)
    if others or not is_by_segments:
        kind = ", ".join(others) or "eager attention"
        raise ConfigError(
            f"training.share_prompts: {path} is a {config.model_type} model with {kind}, for which"
            " prompts cannot be shared; set it to false"
        )
