"""Low-rank adapters (peft) inside the learner's model: put in, merged out of place, written down.

The layers are exchanged in place and the model keeps its class and its attribute paths, so nothing
else of the learner knows of adapters.
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
from torch.distributed.tensor import DTensor

from learner.model.parts import target_problem
from shared.config.model import AdapterSection
from shared.errors import ConfigError
from shared.model_families import ModelPart, find_part
from shared.weight_sync.offer import AdapterFiles

# peft takes seconds to import, and a learner without an adapter does without it.
if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.trainable_tokens import TrainableTokensLayer
    from transformers import PreTrainedModel

NAME = "default"
"""What peft calls the one adapter."""
NO_BITSANDBYTES = (
    "model.adapter.quantize: bitsandbytes, which holds weights in 4 bits, is not installed; run"
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
    """Adapt the linear layers of these parts that `section` names and freeze the rest.

    The first weights leave the model's function as it is. There is no dropout. Raises ConfigError
    for a name that no linear layer of the parts has, and for a part of which none is named.

    Args:
        seed: the first weights follow from it alone, on any device.
        token_ids: their rows in the embedding, and in a head with weights of its own, are trained
            too; a head that is tied to the embedding stays so.
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
        # Each by its path: a convolution of the tower may have the name of its linear layers.
        targets = [
            path
            for of_part in paths.values()
            for path in of_part
            if _name(path) in section.target_modules
        ]
    has_own_head = model.lm_head.weight is not model.get_input_embeddings().weight
    # peft gives a tied head the embedding's rows by itself.
    embeddings = (f"{prefix}.embed_tokens", *(("lm_head",) if has_own_head else ()))
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # declared int, and only ever divided by the rank
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
            model.is_loaded_in_4bit = True  # peft asks for it before it adapts such layers
        inject_adapter_in_model(config, model, NAME)
    if section.quantize is not None:
        del model.is_loaded_in_4bit
        for layer in adapted_layers(model).values():
            # As over weights in full, where they are of the model's number type.
            for matrix in (layer.lora_A[NAME], layer.lora_B[NAME]):
                matrix.to(layer.base_layer.compute_dtype)


def quantize_layers(
    model: PreTrainedModel, parts: Sequence[ModelPart], device: torch.device
) -> None:
    """Hold the linear layers of these parts in 4 bits (NF4, by bitsandbytes), in place.

    Every 64 weights share a float32 scale. One layer is packed after the other on `device`, which
    so never holds the whole in full. Raises ConfigError where bitsandbytes is missing.
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
        # Else some CPUs would put the packed weights into another order, which syncs do not read,
        # where the model generates.
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
    """Return the number type and the shape of what `in_full` returns."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.dtype, parameter.shape
    return state.dtype, state.shape


def in_full(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's values, detached: those that weights in 4 bits are computed as."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(parameter.data, state)
    return values


def adapted_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapted layers by their path, in the model's order."""
    return _peft_layers(model, ("lora", "Linear"), ("lora.bnb", "Linear4bit"))


def embeddings_with_trained_rows(model: nn.Module) -> dict[str, TrainableTokensLayer]:
    """Return the embedding and the head, by their path, where some of their rows are trained."""
    return _peft_layers(model, ("trainable_tokens", "TrainableTokensLayer"))


def _peft_layers(model: nn.Module, *kinds: tuple[str, str]) -> dict[str, Any]:
    # A layer of peft's comes with its module.
    modules = [(sys.modules.get(f"peft.tuners.{tuner}"), kind) for tuner, kind in kinds]
    types = tuple(getattr(module, kind) for module, kind in modules if hasattr(module, kind))
    return {path: layer for path, layer in model.named_modules() if isinstance(layer, types)}


def merged_weight(layer: LoraLinear) -> torch.Tensor:
    """Return the one matrix that does what the layer does, [out, in].

    It is peft's own merge to the bit, and the layer stays as it is.
    """
    with torch.no_grad():
        weight = in_full(layer.base_layer.weight)
        delta = layer.get_delta_weight(NAME)
        if NAME not in layer.lora_magnitude_vector:
            return weight + delta.to(weight.dtype)
        magnitude = layer.lora_magnitude_vector[NAME]
        norm = magnitude.get_weight_norm(weight, delta, scaling=1)  # the delta is scaled already
        factor = (magnitude.weight / norm).view(-1, 1)
        merged: torch.Tensor = (factor * (weight + delta)).to(weight.dtype)
        return merged


def merged_embedding(layer: TrainableTokensLayer) -> torch.Tensor:
    """Return the whole matrix with the trained rows in their places, [vocabulary, hidden].

    The layer stays as it is. Where the model is sharded, all ranks call it at once.
    """
    with torch.no_grad():
        weight = _whole(layer.base_layer.weight)
        rows = _whole(layer.trainable_tokens_delta[NAME]).to(weight.dtype)
        at = torch.tensor(layer.token_indices[NAME], device=weight.device)
        return weight.index_copy(0, at, rows)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Make a model compute what it does without its adapter and without trained rows."""
    layers = (*adapted_layers(model).values(), *embeddings_with_trained_rows(model).values())
    try:
        for layer in layers:
            # Not by peft's `enable_adapters`, which has the adapter's tensors lose their gradient.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_files(model: PreTrainedModel) -> AdapterFiles | None:
    """Return the adapter as it is now; None where the model has none.

    Where the model is sharded, all ranks call it at once.
    """
    if not adapted_layers(model):
        return None
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=NAME, save_embedding_layers=False)
    # The prefix is that of peft's wrapper, which this model does without.
    tensors = {
        f"base_model.model.{name}": _whole(tensor).detach().contiguous().cpu()
        for name, tensor in state.items()
    }
    config = replace(model.peft_config[NAME], inference_mode=True).to_dict()
    # sorted: of sets, which JSON does not have
    text = json.dumps(config, sort_keys=True, default=sorted)
    return AdapterFiles(safetensors.torch.save(tensors), text)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor of which this rank may hold a part; then it is a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
