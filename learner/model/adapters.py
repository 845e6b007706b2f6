"""Low-rank adapters (peft) in the learner's model: injecting, merging out of place, and exporting.

Layers are replaced in place, and the model keeps its class and attribute paths. So no other part
of the learner depends on adapters.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from torch import nn

from learner.model.optimizer.adamw import local_part, whole_tensor
from learner.model.parts import target_problem
from shared.config.model import AdapterSection
from shared.errors import ConfigError
from shared.model_families import ModelPart, find_part
from shared.weight_sync.offer import AdapterFiles

# Importing peft takes seconds, and a learner without an adapter does not need it.
if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from transformers import PreTrainedModel

NAME = "default"
"""The name of the adapter in peft. A model has only one."""
NO_BITSANDBYTES = (
    "model.adapter.quantize: the package bitsandbytes is not installed; run"
    " `pip install 'rollmatch[qlora]'`, or remove the key"
)


def apply_adapter(
    model: PreTrainedModel,
    section: AdapterSection,
    *,
    base_path: str,
    seed: int,
    token_ids: Sequence[int] = (),
    parts: Sequence[ModelPart] = (ModelPart.LANGUAGE_MODEL,),
) -> None:
    """Add low-rank adapters to the linear layers of `model` that `section` names; freeze the rest.

    The initial adapter does not change the model's function. There is no dropout. Raises
    ConfigError for a name that no linear layer of the parts has, and for a part without any named
    layer.

    Args:
        base_path: path of the initial checkpoint, which the adapter's files name.
        seed: determines the initial adapter weights, on any device.
        token_ids: tokens whose rows in the embedding (and in an untied head) are trained too; a
            tied head stays tied.
        parts: parts of the model (language model, vision tower, ...) whose layers are adapted.
    """
    from peft import LoraConfig, inject_adapter_in_model

    language_model = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is language_model)
    paths = _linear_layers(model, parts)
    names = {part: {_name(path) for path in of_part} for part, of_part in paths.items()}
    if problem := target_problem(section.target_modules, names, base_path):
        raise ConfigError(problem)
    # A pattern, because a vision tower may have layers of the same names.
    targets: str | list[str] = (
        rf"{re.escape(prefix)}\..*\.({'|'.join(sorted(section.target_modules))})"
    )
    if tuple(parts) != (ModelPart.LANGUAGE_MODEL,):
        # List paths: a convolution of the tower may have the same name as its linear layers.
        targets = [
            path
            for of_part in paths.values()
            for path in of_part
            if _name(path) in section.target_modules
        ]
    has_own_head = model.lm_head.weight is not model.get_input_embeddings().weight
    # peft itself gives a tied head the embedding's rows.
    embeddings = (f"{prefix}.embed_tokens", *(("lm_head",) if has_own_head else ()))
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # declared int, but only divided by the rank
        lora_dropout=0.0,
        bias="none",
        use_dora=section.kind == "dora",
        target_modules=targets,
        base_model_name_or_path=base_path,
        trainable_token_indices=(
            {path: list(token_ids) for path in embeddings} if token_ids else None
        ),
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if section.quantize is not None:
            model.is_loaded_in_4bit = True  # peft requires it to adapt such layers
        inject_adapter_in_model(config, model, NAME)
    if section.quantize is not None:
        del model.is_loaded_in_4bit
        for layer in adapted_layers(model).values():
            # The same number type as for adapters of unquantized weights.
            for matrix in (layer.lora_A[NAME], layer.lora_B[NAME]):
                matrix.to(layer.base_layer.compute_dtype)


def compute_magnitudes(model: nn.Module) -> None:
    """Compute DoRA's initial magnitudes from the weights of `model`, as peft does.

    It is needed if the weights had no values when the adapter was added.
    """
    for layer in adapted_layers(model).values():
        if NAME in layer.lora_magnitude_vector:
            # The norm of a row: a rank needs only its rows.
            rows = local_part(layer.base_layer.weight.detach())
            norms = torch.linalg.norm(rows, dim=1)
            local_part(layer.lora_magnitude_vector[NAME].weight.detach()).copy_(norms)


def quantize_layers(
    model: PreTrainedModel, parts: Sequence[ModelPart], device: torch.device
) -> None:
    """Quantize the linear layers of these parts of `model` to 4 bits (NF4), in place.

    Every 64 weights share a float32 scale. Layers are packed one by one on `device`, which
    therefore never holds the unquantized model. Raises ConfigError if the package bitsandbytes is
    missing.
    """
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise ConfigError(NO_BITSANDBYTES) from error
    for path in (path for of_part in _linear_layers(model, parts).values() for path in of_part):
        layer = model.get_submodule(path)
        dtype = layer.weight.dtype
        held = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=dtype,
            quant_type="nf4",
            device="meta",
        )
        held.bias = layer.bias
        packed = Params4bit(layer.weight.data, compress_statistics=False, quant_type="nf4")
        held.weight = packed.to(device)
        # Otherwise, on some CPUs, generating would reorder the packed weights, and weight syncs
        # could not read them.
        held.support_avx512bf16_for_cpu = False
        model.set_submodule(path, held)


def _linear_layers(
    model: PreTrainedModel, parts: Sequence[ModelPart]
) -> dict[ModelPart, list[str]]:
    """Return the paths of the linear layers of each part, without the head."""
    paths: dict[ModelPart, list[str]] = {part: [] for part in parts}
    for path, module in model.named_modules():
        part = find_part(f"{path}.")
        if isinstance(module, nn.Linear) and module is not model.lm_head and part in paths:
            paths[part].append(path)
    return paths


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def stored_as(parameter: nn.Parameter) -> tuple[torch.dtype, torch.Size]:
    """Return number type and shape of a parameter after it is dequantized (see `in_full`)."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.dtype, parameter.shape
    return state.dtype, state.shape


def in_full(parameter: nn.Parameter) -> torch.Tensor:
    """Return the detached values of a parameter. If it is stored in 4 bits, dequantize it."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(parameter.data, state)
    return values


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the linear layers that have an adapter, by their path, in the model's order."""
    return _peft_layers(model, ("lora", "Linear"), ("lora.bnb", "Linear4bit"))


def embeddings_with_trained_rows(model: nn.Module) -> dict[str, TrainableTokensLayer]:
    """Return the embedding and the head by path, if an adapter trains some of their rows."""
    return _peft_layers(model, ("trainable_tokens", "TrainableTokensLayer"))


def _peft_layers(model: nn.Module, *kinds: tuple[str, str]) -> dict[str, Any]:
    # If a model has a layer of peft, the layer's module is already imported.
    modules = [(sys.modules.get(f"peft.tuners.{tuner}"), kind) for tuner, kind in kinds]
    types = tuple(getattr(module, kind) for module, kind in modules if hasattr(module, kind))
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, types)}


def merged_weight(layer: LoraLinear) -> torch.Tensor:
    """Return the weight of an adapted linear layer with the adapter merged into it: [out, in].

    The result equals peft's own merge bit for bit. The layer is not changed.
    """
    with torch.no_grad():
        weight = in_full(layer.base_layer.weight)
        delta = layer.get_delta_weight(NAME)
        if NAME not in layer.lora_magnitude_vector:
            return weight + delta.to(weight.dtype)
        magnitude = layer.lora_magnitude_vector[NAME]
        norm = magnitude.get_weight_norm(weight, delta, scaling=1)  # the delta is already scaled
        factor = (magnitude.weight / norm).view(-1, 1)
        merged: torch.Tensor = (factor * (weight + delta)).to(weight.dtype)
        return merged


def merged_embedding(layer: TrainableTokensLayer) -> torch.Tensor:
    """Return the matrix of an embedding or head with its trained rows: [vocabulary, hidden].

    The layer is not changed. If the model is sharded, this is a collective.
    """
    with torch.no_grad():
        weight = whole_tensor(layer.base_layer.weight)
        rows = whole_tensor(layer.trainable_tokens_delta[NAME]).to(weight.dtype)
        at = torch.tensor(layer.token_indices[NAME], device=weight.device)
        return weight.index_copy(0, at, rows)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Make the model compute without its adapter inside the block, as before training.

    Trained rows of embedding and head are disabled too.
    """
    layers = (*adapted_layers(model).values(), *embeddings_with_trained_rows(model).values())
    try:
        for layer in layers:
            # peft's `enable_adapters` is not used: it turns off the adapter's `requires_grad`.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_files(model: PreTrainedModel) -> AdapterFiles | None:
    """Return the model's current adapter in peft's file format; None if it has no adapter.

    If the model is sharded, this is a collective.
    """
    if not adapted_layers(model):
        return None
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    # peft's file format has the prefix of peft's wrapper, which this model does not have.
    tensors = {
        f"base_model.model.{name}": whole_tensor(tensor).detach().contiguous().cpu()
        for name, tensor in state.items()
    }
    config = replace(model.peft_config[NAME], inference_mode=True).to_dict()
    # `default=sorted` turns sets into lists, because JSON has no sets
    text = json.dumps(config, sort_keys=True, default=sorted)
    return AdapterFiles(safetensors.torch.save(tensors), text)
