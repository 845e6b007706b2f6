"""Which part of a model a parameter belongs to: what `training.parts` freezes and gives learning rates of their own."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from torch import nn

from shared.config.training import PartSection, PartsSection
from shared.errors import ConfigError


class Part(StrEnum):
    """The keys of `training.parts`."""

    VISION_TOWER = "vision_tower"
    ALIGNER = "aligner"
    LANGUAGE_MODEL = "language_model"


# The first prefix that fits. Qwen2.5-VL has one merger; Qwen3-VL has more, for the vision layers that it feeds into the first text layers.
# A tied head has no name of its own and follows the embedding; so does an untied one by this table.
# Behind `lm_head.`: what the files of a Qwen2.5-VL call what its parameters call `model.visual.` and `model.language_model.`.
_PREFIXES = (
    ("model.visual.merger.", Part.ALIGNER),
    ("model.visual.deepstack_merger_list.", Part.ALIGNER),
    ("model.visual.", Part.VISION_TOWER),
    ("model.language_model.", Part.LANGUAGE_MODEL),
    ("lm_head.", Part.LANGUAGE_MODEL),
    ("visual.merger.", Part.ALIGNER),
    ("visual.", Part.VISION_TOWER),
    ("model.embed_tokens.", Part.LANGUAGE_MODEL),
    ("model.layers.", Part.LANGUAGE_MODEL),
    ("model.norm.", Part.LANGUAGE_MODEL),
)


def find_part(name: str) -> Part | None:
    """The part of the parameter that `named_parameters` of a Qwen2.5-VL or Qwen3-VL, adapters included, or a file of its checkpoint calls `name`.

    None where neither has such a name.
    """
    return next((part for prefix, part in _PREFIXES if name.startswith(prefix)), None)


def part_of(name: str) -> Part:
    """As `find_part`, of a model that is known to be of these families."""
    found = find_part(name)
    assert found is not None, f"{name} belongs to no part: learner/model/loading.py admits a model that learner/model/parts.py does not know"
    return found


def section_of(part: Part, config: PartsSection) -> PartSection:
    match part:
        case Part.VISION_TOWER:
            return config.vision_tower
        case Part.ALIGNER:
            return config.aligner
        case Part.LANGUAGE_MODEL:
            return config.language_model


def freeze_parts(model: nn.Module, config: PartsSection) -> None:
    """Keep the frozen parts out of every gradient; what is frozen already stays so. ConfigError where nothing is left to train."""
    for name, parameter in model.named_parameters():
        if section_of(part_of(name), config).frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("training.parts: nothing is left to train; unfreeze a part, with model.adapter the language model, which holds the adapter")


def trained_parameters(model: nn.Module) -> Iterator[tuple[Part, nn.Parameter]]:
    """Every parameter with a gradient, once, in the model's order."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield part_of(name), parameter
