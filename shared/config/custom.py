"""`custom`: which training loop runs."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shared.config.base import Section, refusal


class TrainerVariant(StrEnum):
    STAGE1_SFT = "stage1_sft"
    """Teacher-forced on ground truth (channel A only)."""
    STAGE2_ROLLOUT_ALIGNED = "stage2_rollout_aligned"
    """On the model's own rollouts, segments carried from step to step."""
    STAGE2_TWO_CHANNEL = "stage2_two_channel"
    """Channel A or channel B at each step, every step learned to completion."""
    TRAJECTORY_PG = "trajectory_pg"
    """Policy gradient on environments."""

    @property
    def uses_rollouts(self) -> bool:
        """Whether training asks for rollouts."""
        return self is not TrainerVariant.STAGE1_SFT


_FORMER_NAMES = {
    "stage_1": TrainerVariant.STAGE1_SFT,
    "stage_2": TrainerVariant.STAGE2_ROLLOUT_ALIGNED,
    "rollout_matching_sft": TrainerVariant.STAGE2_ROLLOUT_ALIGNED,
    "stage2_ab": TrainerVariant.STAGE2_TWO_CHANNEL,
    "stage2_ab_training": TrainerVariant.STAGE2_TWO_CHANNEL,
}


def _no_former_name(value: Any) -> Any:
    if isinstance(value, str) and value in _FORMER_NAMES:
        raise refusal(f"'{value}' was renamed", f"write {_FORMER_NAMES[value]}")
    return value


class CustomSection(Section):
    trainer_variant: Annotated[TrainerVariant, Field(strict=False, examples=["stage2_two_channel"]), BeforeValidator(_no_former_name)]
    """The training loop."""

    object_field_order: Literal["desc_first", "geometry_first"] = "desc_first"
    """Order of the fields of each serialised ground-truth object."""
