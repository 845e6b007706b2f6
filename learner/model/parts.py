"""Which part of a model a parameter belongs to: what `training.parts` freezes and gives learning
rates of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from torch import nn

from shared.config.training import PartSection, PartsSection
from shared.errors import ConfigError


class ModelPart(StrEnum):
    """The keys of `training.parts`."""

    VISION_TOWER = "vision_tower"
    ALIGNER = "aligner"
    LANGUAGE_MODEL = "language_model"


# The first prefix that fits. Qwen2.5-VL has one merger; Qwen3-VL has more, for the vision layers
# that it feeds into the first text layers. A tied head has no name of its own and follows the
# embedding; so does an untied one by this table. Behind `lm_head.`: what the files of a Qwen2.5-VL
# call what its parameters call `model.visual.` and `model.language_model.`.
_PREFIXES = (
    ("model.visual.merger.", ModelPart.ALIGNER),
    ("model.visual.deepstack_merger_list.", ModelPart.ALIGNER),
    ("model.visual.", ModelPart.VISION_TOWER),
    ("model.language_model.", ModelPart.LANGUAGE_MODEL),
    ("lm_head.", ModelPart.LANGUAGE_MODEL),
    ("visual.merger.", ModelPart.ALIGNER),
    ("visual.", ModelPart.VISION_TOWER),
    ("model.embed_tokens.", ModelPart.LANGUAGE_MODEL),
    ("model.layers.", ModelPart.LANGUAGE_MODEL),
    ("model.norm.", ModelPart.LANGUAGE_MODEL),
)


def find_part(name: str) -> ModelPart | None:
    """The part of the parameter that `named_parameters` of a Qwen2.5-VL or Qwen3-VL, adapters
    included, or a file of its checkpoint calls `name`.

    None where neither has such a name.
    """
    return next((part for prefix, part in _PREFIXES if name.startswith(prefix)), None)


def model_part(name: str) -> ModelPart:
    """As `find_part`, of a model that is known to be of these families."""
    found = find_part(name)
    assert found is not None, (
        f"{name} belongs to no part: learner/model/loading.py admits a model that"
        " learner/model/parts.py does not know"
    )
    return found


def part_settings(part: ModelPart, config: PartsSection) -> PartSection:
    match part:
        case ModelPart.VISION_TOWER:
            return config.vision_tower
        case ModelPart.ALIGNER:
            return config.aligner
        case ModelPart.LANGUAGE_MODEL:
            return config.language_model


def freeze_parts(model: nn.Module, config: PartsSection) -> None:
    """Keep the frozen parts out of every gradient; what is frozen already stays so. ConfigError
    where nothing is left to train.
    """
    for name, parameter in model.named_parameters():
        if part_settings(model_part(name), config).frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "training.parts: nothing is left to train; unfreeze a part, with model.adapter the"
            " language model, which holds the adapter"
        )


def trained_parameters(model: nn.Module) -> Iterator[tuple[ModelPart, nn.Parameter]]:
    """Every parameter with a gradient, once, in the model's order."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield model_part(name), parameter
