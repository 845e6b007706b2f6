"""From a training example to a prompt and a target, as rows are packed of them. The example's ids are the engine's own: nothing is encoded here."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from learner.credit import CreditRule
from learner.targets import Target, TokenRole
from shared.trajectory import TrainingExample


class TrajectoryTarget(NamedTuple):
    prompt_token_ids: tuple[int, ...]
    """All before the first token that is learned."""
    target: Target
    """From there to the last token that is learned; between the turns of a merged example, with what is only read."""


def trajectory_target(example: TrainingExample, rule: CreditRule, *, num_of_rollout: int) -> TrajectoryTarget | None:
    """Make the prompt and target of an example; None where no token of it is learned.

    Args:
        num_of_rollout: learned tokens of its rollout, in all of the rollout's examples.

    Raises:
        ValueError: the first token is to be learned, which no model predicts, or what
            `CreditRule.credit` raises.
    """
    learned = np.flatnonzero(example.mask)
    if not len(learned):
        return None
    start, stop = int(learned[0]), int(learned[-1]) + 1
    if start == 0:
        raise ValueError(
            f"example {example.example_id!r}, rollout {example.rollout}: its first token is to be learned, and is predicted from nothing; "
            "make examples with mask_prompts=True"
        )
    credit = rule.credit(example, start=start, num_of_rollout=num_of_rollout)
    return TrajectoryTarget(
        tuple(example.token_ids[:start]),
        Target(
            str(example.example_id),
            tuple(example.token_ids[start:stop]),
            np.full(stop - start, TokenRole.NEUTRAL, dtype=np.uint8),
            coord_positions=(),
            coord_targets=(),
            box_slots=(),
            sampled_logprobs=credit.engine_logprobs,
            credit=credit,
        ),
    )
