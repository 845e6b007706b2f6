"""Training examples made from an environment's rollouts, with exactly the engine's tokens.

Nothing is tokenised again (spec: trajectories, 6).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rollout_actors.environments.chat.images import shown_in
from rollout_actors.environments.chat.responses import SENT_IMAGES
from rollout_actors.environments.rewards import relative_steps
from rollout_actors.environments.types import State, TrajectoryStep, TrajectoryStepTokens
from shared.trajectory import TrainingExample

T = TypeVar("T")


class MergedExamples(NamedTuple):
    """Training examples of rollouts. Model calls that continue each other share an example."""

    examples: list[TrainingExample]
    """In the order of the rollouts, and within a rollout in the order of their first model call."""
    num_splits: int
    """Number of model calls whose prompt continued no earlier tokens of their rollout, so that a
    further example was begun.
    """


def process_trajectories_for_training(
    states: Sequence[State], mask_prompts: bool = True
) -> list[TrainingExample]:
    """Make one training example of each model call of the rollouts, in order.

    A call without tokens has no example, and neither has a failed rollout (`state["error"]`).

    `mask_prompts`: False: prompts are trained too, although they have no log-probabilities.
    """
    return _examples(states, mask_prompts, merges=False).examples


def merge_trajectories_for_training(
    states: Sequence[State], mask_prompts: bool = True
) -> MergedExamples:
    """Make one training example of all model calls of a rollout that continue each other.

    Tokens that calls share are read once. With `mask_prompts=True`, loss and gradient are the same
    as with `process_trajectories_for_training`: every sampled token is trained once, after the
    tokens that the engine had read before it, and counts as a token of its call (`step_ends`). With
    `mask_prompts=False` they differ: tokens that a later prompt repeats are trained once by this
    function, and once per call by `process_trajectories_for_training`.

    A call continues the example whose tokens its prompt begins with, or the longest of several such
    examples. If there is none, the call begins an example. Sampled tokens are trained only in the
    example of their call: if a later prompt repeats them in another example, they are masked. A
    failed rollout has no example, and no split.

    Example:
        Two calls with the prompts `[1]` and `[1, 2, 3]` that sampled `[2]` and `[4]` make one
        example: `token_ids=[1, 2, 3, 4]`, `mask=[0, 1, 0, 1]`, `step_ends=(2, 4)`.
    """
    return _examples(states, mask_prompts, merges=True)


def _examples(states: Sequence[State], mask_prompts: bool, *, merges: bool) -> MergedExamples:
    # The model's part in a failure is unknown, so failed rollouts are left out. Users make states
    # and steps too, so only the tokens are certain to exist.
    sound = [(index, state) for index, state in enumerate(states) if state.get("error") is None]
    groups: dict[str, list[float | None]] = {}
    for _, state in sound:
        groups.setdefault(_group(state), []).append(state.get("reward"))
    examples: list[TrainingExample] = []
    num_splits = 0
    for index, state in sound:
        drafts: list[_Draft] = []
        for number, step in enumerate(state.get("trajectory") or ()):
            tokens = step["tokens"]
            if tokens is None:
                continue
            extended = [one for one in drafts if merges and one.is_extended_by(step, tokens)]
            if extended:
                # Examples of equal length have the same tokens: take the last of them.
                draft = max(reversed(extended), key=lambda one: len(one.token_ids))
            else:
                num_splits += bool(drafts)
                draft = _Draft()
                drafts.append(draft)
            draft.extend(number, step, tokens, mask_prompts=mask_prompts)
        rewards = groups[_group(state)]
        known = tuple(reward for reward in rewards if reward is not None)
        # If one of them is missing, no mean over the group is right, so there are no rewards.
        group_rewards = known if len(known) == len(rewards) else ()
        relative = relative_steps(state)
        for draft in drafts:
            examples.append(draft.example(index, state, group_rewards, relative, merges=merges))
    return MergedExamples(examples, num_splits)


@dataclass(slots=True)
class _Draft:
    """An unfinished training example, which further model calls may extend."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    steps: list[tuple[int, TrajectoryStep, int]] = field(default_factory=list)
    """For each model call: its index in the trajectory, its step, and the index in `token_ids`
    after its last token."""

    def is_extended_by(self, step: TrajectoryStep, tokens: TrajectoryStepTokens) -> bool:
        if list(tokens["prompt_ids"][: len(self.token_ids)]) != self.token_ids:
            return False
        _, last, _ = self.steps[-1]
        before = _shown(last)
        # The same tokens may stand for other images.
        return not before or _shown(step)[: len(before)] == before

    def extend(
        self,
        number: int,
        step: TrajectoryStep,
        tokens: TrajectoryStepTokens,
        *,
        mask_prompts: bool,
    ) -> None:
        num_known = len(self.token_ids)
        added = tokens["prompt_ids"][num_known:]
        self.token_ids += [*added, *tokens["completion_ids"]]
        self.logprobs += [*[0.0] * len(added), *tokens["completion_logprobs"]]
        if mask_prompts:
            self.mask += [*tokens["prompt_mask"][num_known:], *tokens["completion_mask"]]
        else:
            self.mask += [1] * (len(self.token_ids) - num_known)
        self.steps.append((number, step, len(self.token_ids)))

    def example(
        self,
        rollout: int,
        state: State,
        group_rewards: tuple[float, ...],
        relative: Sequence[int],
        *,
        merges: bool,
    ) -> TrainingExample:
        numbers, steps, _ = zip(*self.steps, strict=True)
        own_advantage = state.get("advantage")
        advantages = [_first_of([step.get("advantage"), own_advantage]) for step in steps]
        differs = any(advantage != advantages[0] for advantage in advantages)
        rewards = [state.get("reward"), *(step.get("reward") for step in reversed(steps))]
        # A call's own reward comes first, except in a merged example, which has several calls.
        reward = _first_of(rewards if merges else reversed(rewards))
        noted = [_noted(step, "weight_version") for step in steps]
        versions = [version for version in noted if isinstance(version, int)]
        engines = {_noted(step, "engine") for step in steps}
        engine = engines.pop() if len(engines) == 1 else None
        token_advantages = None
        if differs:
            pairs = zip(self._by_token(advantages), self.mask, strict=True)
            token_advantages = [
                value if is_learned and value is not None else 0.0 for value, is_learned in pairs
            ]
        token_is_relative = None
        if any(advantage is not None for advantage in advantages):
            token_is_relative = self._by_token([int(number in relative) for number in numbers])
        return TrainingExample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            mask=self.mask,
            reward=0.0 if reward is None else reward,
            advantage=_first_of([own_advantage, *advantages]) if differs else advantages[0],
            example_id=state.get("example_id", 0),
            weight_version=min(versions, default=None),
            token_advantages=token_advantages,
            token_is_relative=token_is_relative,
            rollout=rollout,
            steps=numbers,
            step_ends=tuple(end for _, _, end in self.steps),
            group_rewards=group_rewards,
            engine=engine if isinstance(engine, str) else None,
        )

    def _by_token(self, by_step: Sequence[T]) -> list[T]:
        values: list[T] = []
        for (_, _, end), value in zip(self.steps, by_step, strict=True):
            values += [value] * (end - len(values))
        return values


def _shown(step: TrajectoryStep) -> list[object]:
    # As sent, because the environment may have changed its prompt since.
    sent = getattr(step.get("response"), SENT_IMAGES, None)
    return shown_in(step["prompt"]) if sent is None else sent


def _group(state: State) -> str:
    # With the task, because two environments may use the same ids.
    return repr((state.get("task"), state.get("example_id", 0)))


def _first_of(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _noted(step: TrajectoryStep, name: str) -> object:
    # The client's note in the step's extras takes precedence over the fields of our endpoints.
    extras = step.get("extras") or {}
    return extras[name] if name in extras else getattr(step.get("response"), name, None)
