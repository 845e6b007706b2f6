"""Reads the weights of a checkpoint with transformers: the whole model, or a rank's rows of it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from learner.model.checkpoint_folder import weight_problems
from shared.errors import ConfigError


def load_complete(
    folder: Path,
    *,
    key: str = "model.path",
    change: Callable[[type[PreTrainedModel]], type[PreTrainedModel]] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Load a checkpoint's model with transformers, and check that its files hold all weights.

    If the files contain a head that differs from the embedding, it is used even if `config.json`
    ties the two, and the loaded model's configuration is set to untied. vLLM does the same.

    Args:
        key: the configuration key that names `folder`.
        change: returns the class to load, from transformers' class; the model gets the latter.
        options: options of `from_pretrained`. With `device_map={"": "meta"}` only the files'
            headers are read.

    Returns:
        The model, and the names of tensors in the files that the model does not have.

    Raises:
        ConfigError: files are missing, damaged or do not fit the model; its message begins with
            `key`.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        is_text = "vision_config" not in config.sub_configs
        kinds = MODEL_FOR_CAUSAL_LM_MAPPING if is_text else MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        if type(config) not in kinds:
            raise ValueError(f"transformers generates no text with a {config.model_type} model")
        kind = kinds[type(config)]
        # Different shapes are reported below, together with missing tensors.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        changed = kind if change is None else change(kind)
        model, found = changed.from_pretrained(folder, config=config, **options)
        model.__class__ = kind
    # RuntimeError: a tensor cannot be converted to the model's layout.
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise cannot_load(folder, error, key) from error
    missing, surplus, shapes = (
        sorted(found[name]) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    if problems := tuple(weight_problems(folder, key, missing, surplus, shapes)):
        raise ConfigError(problems)
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    if tied.keys() - model.all_tied_weights_keys.keys():
        for section in (model.config, model.config.get_text_config()):
            section.tie_word_embeddings = False
    return model, tuple(surplus)


def load_rows(
    path: Path, mesh: DeviceMesh, attention: str, *, whole_embeddings: bool
) -> tuple[PreTrainedModel, dict[nn.Parameter, torch.Tensor]]:
    """Load the checkpoint `path` in float32, but of each weight only this rank's rows of `mesh`.

    Return the model and its rows (`LoadedModel.rows`). With `whole_embeddings` its embedding and
    its head are read whole.
    """
    # First only the headers, so that all ranks report the same problems, with whole shapes.
    empty, _ = load_complete(path, device_map={"": "meta"})
    # The meta device leaves weights apart that are tied only if files hold equal values for both.
    ties = empty.all_tied_weights_keys.items()
    whole = {name for tie in ties if len({*map(empty.get_parameter, tie)}) > 1 for name in tie}
    if whole_embeddings:
        embeddings = (empty.get_input_embeddings(), empty.get_output_embeddings())
        whole |= {
            name
            for name, one in empty.named_parameters(remove_duplicate=False)
            if any(one is embedding.weight for embedding in embeddings)
        }
    # FSDP2 keeps parameters in float32 and casts them itself, for the forward.
    model, _ = load_complete(
        path,
        change=partial(_reading_rows, mesh=mesh, whole=whole),
        dtype=torch.float32,
        attn_implementation=attention,
    )
    return model, _take_rows(model)


def _reading_rows(
    kind: type[PreTrainedModel], *, mesh: DeviceMesh, whole: Collection[str]
) -> type[PreTrainedModel]:
    """Return a subclass of `kind` with which `from_pretrained` reads only this rank's rows.

    Its parameters are DTensors, and transformers reads their local part. The other weights are read
    whole: those with the names `whole`, those with fewer rows than ranks, and all of a model
    whose files are converted in a way that mixes rows.
    """

    def initialize(self: Any, *arguments: Any, **options: Any) -> None:
        kind.__init__(self, *arguments, **options)
        conversions = get_model_conversion_mapping(self)
        converters = [one for one in conversions if isinstance(one, WeightConverter)]
        if not all(_keeps_rows(one) for converter in converters for one in converter.operations):
            return

        def of_rank(name: str, parameter: nn.Parameter) -> nn.Parameter:
            parts = parameter.chunk(mesh.size()) if parameter.ndim else ()
            if len(parts) < mesh.size() or name in whole:
                return parameter
            own = parts[mesh.get_local_rank()]
            shape, stride = parameter.shape, parameter.stride()
            return nn.Parameter(
                DTensor.from_local(
                    own, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
                )
            )

        exchange_parameters(self, of_rank)

    def get_parameter(self: Any, target: str) -> torch.Tensor:
        found: torch.Tensor = kind.get_parameter(self, target)
        # With this shape, transformers decides whether files hold experts transposed.
        return found.to_local() if isinstance(found, DTensor) and found.ndim == 3 else found

    members = {
        "__module__": kind.__module__,
        "__init__": initialize,
        "get_parameter": get_parameter,
    }
    return type(kind.__name__, (kind,), members)


def _keeps_rows(operation: ConversionOps) -> bool:
    """Return whether a conversion of files' tensors can be computed for a part of the rows."""
    match operation:
        case MergeModulelist():  # transformers reads the experts that are its rows
            return operation.dim == 0
        case Concatenate():
            return operation.dim > 0
        case Transpose():
            return operation.dim0 > 0 and operation.dim1 > 0
    return False


def _take_rows(model: nn.Module) -> dict[nn.Parameter, torch.Tensor]:
    """Replace each DTensor of `model` by zeros of the whole shape, which need no memory.

    Return the DTensor's local part for each of these new parameters.
    """
    rows = {}

    def without_values(_name: str, parameter: nn.Parameter) -> nn.Parameter:
        if not isinstance(parameter, DTensor):
            return parameter
        # Not on the meta device: peft computes with weights when it adds an adapter.
        zero = torch.zeros((), dtype=parameter.dtype)
        empty = nn.Parameter(zero.expand(parameter.shape))
        rows[empty] = parameter.to_local().detach()
        return empty

    exchange_parameters(model, without_values)
    return rows


def exchange_parameters(
    model: nn.Module, exchange: Callable[[str, nn.Parameter], nn.Parameter]
) -> None:
    """Replace each parameter of `model` by what `exchange` returns for its name and itself.

    Tied parameters stay tied: they are exchanged once, under their first name.
    """
    exchanged: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in [*model.named_parameters(remove_duplicate=False)]:
        if parameter not in exchanged:
            exchanged[parameter] = exchange(name, parameter)
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, exchanged[parameter])


def cannot_load(path: Path, error: Exception, key: str = "model.path") -> ConfigError:
    """Return the error for a folder `path`, named by `key`, that transformers cannot read."""
    return ConfigError(
        f"{key}: {path} cannot be loaded ({error}); give a folder written by save_pretrained,"
        " with a model that has the tokens of the run"
    )
