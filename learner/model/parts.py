"""The parts of a model that `training.parts` can freeze or train with a separate learning rate."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from shared.config.training import PartSection, PartsSection
from shared.errors import ConfigError
from shared.model_families import ModelPart, find_part

if TYPE_CHECKING:
    from torch import nn


def model_part(name: str) -> ModelPart:
    """Return the part of the model (such as the vision tower) that a parameter's name belongs to.

    The model must belong to a known family.
    """
    part = find_part(name)
    assert part is not None, (
        f"{name} does not belong to a part: learner/model/loading.py accepts a model that"
        " shared/model_families.py does not know"
    )
    return part


def part_settings(part: ModelPart, config: PartsSection) -> PartSection:
    match part:
        case ModelPart.VISION_TOWER:
            return config.vision_tower
        case ModelPart.ALIGNER:
            return config.aligner
        case ModelPart.LANGUAGE_MODEL:
            return config.language_model


def freeze_parts(model: nn.Module, config: PartsSection) -> None:
    """Freeze the parameters of the model's parts that the configuration freezes.

    Raises ConfigError if no trainable parameter remains.
    """
    # Never unfreeze: with an adapter, most parameters are already frozen and must stay frozen.
    for name, parameter in model.named_parameters():
        if part_settings(model_part(name), config).frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "training.parts: nothing is left to train; unfreeze a part, or with model.adapter one"
            " of the adapted parts"
        )


def target_problem(
    named: Collection[str], layers: Mapping[ModelPart, Collection[str]], base_path: str
) -> str | None:
    """Return a message if `model.adapter.target_modules` names wrong layers; else None.

    Args:
        named: the value of this key: names of the linear layers to adapt.
        layers: names of the linear layers of each part to adapt.
        base_path: path of the initial checkpoint, for the message.
    """
    titles = {part: part.replace("_", " ") for part in layers}
    unknown = sorted(set(named).difference(*layers.values()))
    without = [part for part, names in layers.items() if not set(named) & set(names)]
    if unknown:
        parts = " and the ".join(titles.values())
        wrong = f"no linear layer of the {parts} in {base_path} is called {', '.join(unknown)}"
    elif without:
        wrong = f"it names no linear layer of the {titles[without[0]]} in {base_path}"
        wrong += f", but training.parts.{without[0]}.adapted requires one"
    else:
        return None
    has = [
        f"{'it' if len(layers) == 1 else f'the {titles[part]}'} has"
        f" {', '.join(sorted(set(names))) or 'none'}"
        for part, names in layers.items()
    ]
    return f"model.adapter.target_modules: {wrong}; {'; '.join(has)}"


def trained_parameters(model: nn.Module) -> Iterator[tuple[ModelPart, nn.Parameter]]:
    """Yield every trainable parameter once, with its part of the model, in the model's order."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield model_part(name), parameter
