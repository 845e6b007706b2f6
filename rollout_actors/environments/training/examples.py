"""From trajectories to training examples, with the tokens as the engine had them: nothing is
tokenised again (spec: trajectories, 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollout_actors.environments.chat.images import shown_in
from rollout_actors.environments.rubric import relative_steps
from rollout_actors.environments.types import State, TrajectoryStep, TrajectoryStepTokens
from shared.trajectory import TrainingExample


class MergedExamples(NamedTuple):
    examples: list[TrainingExample]
    """In the order of the rollouts, and within one of their first steps."""
    num_splits: int
    """How often a call's prompt did not extend what its rollout had before, so that an example more
    was begun.
    """


def process_trajectories_for_training(
    states: Sequence[State], mask_prompts: bool = True
) -> list[TrainingExample]:
    """An example for each call of the model, in order; a step without tokens has none, and neither
    has a rollout that failed (`state["error"]`).

    Args:
        mask_prompts: False: prompts are learned too, which have no log-probabilities.
    """
    examples = []
    for rollout in _rollouts(states):
        for number, step, tokens in rollout.steps:
            mask = (
                [*tokens["prompt_mask"], *tokens["completion_mask"]]
                if mask_prompts
                else [1] * _length(tokens)
            )
            examples.append(
                TrainingExample(
                    token_ids=[*tokens["prompt_ids"], *tokens["completion_ids"]],
                    logprobs=[0.0] * len(tokens["prompt_ids"])
                    + list(tokens["completion_logprobs"]),
                    mask=mask,
                    reward=_first_of(step.get("reward"), rollout.state.get("reward"), 0.0),
                    advantage=_first_of(step.get("advantage"), rollout.state.get("advantage")),
                    weight_version=_weight_version(step),
                    steps=(number,),
                    token_is_relative=(
                        None
                        if rollout.relative is None
                        else [int(number in rollout.relative)] * len(mask)
                    ),
                    step_ends=(_length(tokens),),
                    engine=_engine([step]),
                    **rollout.described,
                )
            )
    return examples


def merge_trajectories_for_training(
    states: Sequence[State], mask_prompts: bool = True
) -> MergedExamples:
    """Make one example of the calls of a rollout that extend each other.

    Tokens that calls share are read once. With `mask_prompts=True` what is learned stays: loss and
    gradient are those of `process_trajectories_for_training`, since every sampled token is learned
    once, behind the tokens that the engine had read before it, and counts as a token of its own
    call (`step_ends`). With `mask_prompts=False` they differ: tokens that a later prompt repeats
    are learned once here, and there once for every call that read them.

    A call goes on with the example whose tokens its prompt begins with, the longest if there are
    several; else it begins one. What was sampled is learned in the example of its own call alone:
    where a later prompt repeats it in another one, it is masked. A rollout that failed has no
    example, and no split.
    """
    examples: list[TrainingExample] = []
    num_splits = 0
    for rollout in _rollouts(states):
        merged: list[_Merged] = []
        for number, step, tokens in rollout.steps:
            extended = [one for one in merged if one.is_extended_by(tokens["prompt_ids"], step)]
            if extended:
                # Of equally long ones, which are the same tokens, the last.
                chosen = max(reversed(extended), key=lambda one: len(one.token_ids))
            else:
                num_splits += bool(merged)
                chosen = _Merged([], [], [], [], [])
                merged.append(chosen)
            chosen.extend(
                number,
                step,
                tokens,
                _first_of(step.get("advantage"), rollout.state.get("advantage")),
                mask_prompts=mask_prompts,
            )
        examples.extend(one.example(rollout) for one in merged)
    return MergedExamples(examples, num_splits)


@dataclass(frozen=True, slots=True)
class _Rollout:
    state: State
    steps: list[tuple[int, TrajectoryStep, TrajectoryStepTokens]]
    """Those with tokens, numbered as in the trajectory."""
    relative: list[int] | None
    """The steps whose advantage is the group's; None: nobody has noted whose it is."""
    described: dict[str, Any]
    """What all of its examples have in common."""


@dataclass(slots=True)
class _Merged:
    """An example while calls extend it. A column per token, and one of `steps` and `advantages` per
    step.
    """

    token_ids: list[int]
    logprobs: list[float]
    mask: list[int]
    steps: list[tuple[int, TrajectoryStep, int]]
    """Number, step, and the tokens with it."""
    advantages: list[float | None]

    def is_extended_by(self, prompt_ids: Sequence[int], step: TrajectoryStep) -> bool:
        if list(prompt_ids[: len(self.token_ids)]) != self.token_ids:
            return False
        _, last, _ = self.steps[-1]
        before = shown_in(last["prompt"])
        return not before or shown_in(step["prompt"])[: len(before)] == before

    def extend(
        self,
        number: int,
        step: TrajectoryStep,
        tokens: TrajectoryStepTokens,
        advantage: float | None,
        *,
        mask_prompts: bool,
    ) -> None:
        known = len(self.token_ids)
        said = tokens["prompt_ids"][known:]
        self.token_ids += [*said, *tokens["completion_ids"]]
        self.logprobs += [*[0.0] * len(said), *tokens["completion_logprobs"]]
        self.mask += (
            [*tokens["prompt_mask"][known:], *tokens["completion_mask"]]
            if mask_prompts
            else [1] * (len(self.token_ids) - known)
        )
        self.steps.append((number, step, len(self.token_ids)))
        self.advantages.append(advantage)

    def example(self, rollout: _Rollout) -> TrainingExample:
        versions = [
            version for _, step, _ in self.steps if (version := _weight_version(step)) is not None
        ]
        state, differs = (
            rollout.state,
            any(advantage != self.advantages[0] for advantage in self.advantages),
        )
        own = _first_of(state.get("advantage"), *self.advantages)
        return TrainingExample(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            mask=self.mask,
            reward=_first_of(
                state.get("reward"),
                *(step.get("reward") for _, step, _ in reversed(self.steps)),
                0.0,
            ),
            advantage=own if differs else self.advantages[0],
            weight_version=min(versions, default=None),
            token_advantages=self._by_token() if differs else None,
            token_is_relative=self._relative(rollout),
            steps=tuple(number for number, _, _ in self.steps),
            step_ends=tuple(end for _, _, end in self.steps),
            engine=_engine([step for _, step, _ in self.steps]),
            **rollout.described,
        )

    def _by_token(self) -> list[float]:
        values: list[float] = []
        for (_, _, end), advantage in zip(self.steps, self.advantages, strict=True):
            values += [0.0 if advantage is None else advantage] * (end - len(values))
        return [
            value if is_learned else 0.0
            for value, is_learned in zip(values, self.mask, strict=True)
        ]

    def _relative(self, rollout: _Rollout) -> list[int] | None:
        if rollout.relative is None:
            return None
        flags, relative = list[int](), set(rollout.relative)
        for number, _, end in self.steps:
            flags += [int(number in relative)] * (end - len(flags))
        return flags


def _rollouts(states: Sequence[State]) -> list[_Rollout]:
    """Those that have not failed: of the others, nobody knows what the model's part in it was.

    Users make states and steps too, so that no field but the tokens is taken for granted.
    """
    sound = [(place, state) for place, state in enumerate(states) if state.get("error") is None]
    rewards: dict[str, list[float | None]] = {}
    for _, state in sound:
        rewards.setdefault(_group(state), []).append(state.get("reward"))
    groups = {key: () if None in group else tuple(group) for key, group in rewards.items()}
    rollouts = []
    for place, state in sound:
        steps = [
            (number, step, tokens)
            for number, step in enumerate(state.get("trajectory") or ())
            if (tokens := step["tokens"]) is not None
        ]
        described = {
            "example_id": state.get("example_id", 0),
            "rollout": place,
            "group_rewards": groups[_group(state)],
        }
        rollouts.append(_Rollout(state, steps, relative_steps(state), described))
    return rollouts


def _group(state: State) -> str:
    """The same for the rollouts of one row. With the task: two environments may number their rows
    alike.
    """
    return repr((state.get("task"), state.get("example_id", 0)))


def _first_of(*values: float | None) -> Any:
    """The first that is not None, if there is one."""
    return next((value for value in values if value is not None), None)


def _length(tokens: TrajectoryStepTokens) -> int:
    return len(tokens["prompt_ids"]) + len(tokens["completion_ids"])


def _weight_version(step: TrajectoryStep) -> int | None:
    """As the client noted it in the step's extras, or the endpoint in its response."""
    extras = step.get("extras") or {}
    # A field that endpoints of ours add to OpenAI's; others may have one that means something else.
    version = (
        extras["weight_version"]
        if "weight_version" in extras
        else getattr(step.get("response"), "weight_version", None)
    )
    return version if isinstance(version, int) else None


def _engine(steps: Sequence[TrajectoryStep]) -> str | None:
    """Noted likewise; None where there are several."""
    engines = {
        (step.get("extras") or {}).get("engine", getattr(step.get("response"), "engine", None))
        for step in steps
    }
    (engine,) = engines if len(engines) == 1 else (None,)
    return engine if isinstance(engine, str) else None
