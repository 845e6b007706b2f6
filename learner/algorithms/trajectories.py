"""Trajectories as a learner's work: examples of an environment, and rollouts that bring their own
tokens, log-probabilities and rewards.

The environment runs elsewhere (`rollout_actors.environments.training.runner`) and has the data;
which of its rows a step takes is decided here.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from learner.ahead import Ahead
from learner.algorithms.advantages import AdvantageEstimator, TokenAdvantages
from learner.checks import check_weight_versions
from learner.model.loading import LoadedTokens
from learner.model.ranks import Ranks
from learner.rollout_logs.trajectories import trajectory_record
from learner.rollout_logs.writer import StepLog
from learner.segments import EncodedPrompt, ImageEncoder, PromptEncoder, Segment
from learner.step_metrics import StepMetrics
from learner.targets import Target, TokenRole
from shared.chunking import rank_share
from shared.config import RunConfig
from shared.config.pipeline import Channel, PolicyGradientEntry
from shared.dataset import SampleStream
from shared.errors import RolloutError
from shared.records import ImageRef, Sample
from shared.rollouts import DecodeMode, DecodeSettings
from shared.run_files import Span
from shared.schedule import StepPlan
from shared.trajectory import (
    EnvironmentRequest,
    EnvironmentRollout,
    ExampleCounts,
    ExampleGroup,
    TrainingExample,
    has_signal,
)

# From a training example to a prompt and a target, as rows are packed of them. The example's ids
# are the engine's own: nothing is encoded here.


class TrajectoryTarget(NamedTuple):
    prompt_token_ids: tuple[int, ...]
    """All before the first token that is learned."""
    target: Target
    """From there to the last token that is learned; between the turns of a merged example, with
    what is only read.
    """


def trajectory_target(
    example: TrainingExample, rule: AdvantageEstimator, *, num_of_rollout: int
) -> TrajectoryTarget | None:
    """Make the prompt and target of an example; None where no token of it is learned.

    Args:
        num_of_rollout: learned tokens of its rollout, in all of the rollout's examples.

    Raises:
        ValueError: the first token is to be learned, which no model predicts, or what
            `AdvantageEstimator.credit` raises.
    """
    learned = np.flatnonzero(example.mask)
    if not len(learned):
        return None
    start, stop = int(learned[0]), int(learned[-1]) + 1
    if start == 0:
        raise ValueError(
            f"example {example.example_id!r}, rollout {example.rollout}: its first token is to be"
            " learned, and is predicted from nothing; make examples with mask_prompts=True"
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


ExampleRollouts = Sequence[EnvironmentRollout]
"""To one request, in the order of positions: in training the rollouts of one example."""

_NUM_FIXED = 40
"""Tokens of the fixed sequence: enough to pass every layer and the head."""
_FIXED_SIDE = 64
"""Pixels of the fixed image's width and height."""


class Trajectories:
    """`learner.algorithms.base.Algorithm` of an environment's examples."""

    def __init__(
        self,
        config: RunConfig,
        tokens: LoadedTokens,
        decode: DecodeSettings,
        ranks: Ranks,
        examples: ExampleCounts,
    ) -> None:
        assert config.environment is not None, "checked with the configuration"
        self.config, self.decode, self.environment = config, decode, config.environment
        self.ranks = ranks
        self.ahead = Ahead()
        self._stream = SampleStream(
            examples.train, seed=config.training.seed, shuffle=config.data.shuffle
        )
        self._num_held_out = examples.held_out
        objective = next(
            entry
            for entry in config.rollout_matching.pipeline.active(Channel.B)
            if isinstance(entry, PolicyGradientEntry)
        )
        self.rule = AdvantageEstimator.of(
            objective.config, max_new_tokens=config.rollout_matching.max_new_tokens
        )
        self.images = (
            ImageEncoder(tokens.processor) if self.environment.max_images_per_prompt else None
        )
        self.fixed_images: tuple[ImageRef, ...] = (
            (_fixed_image(),) if self.images is not None else ()
        )
        self.fixed = _fixed(config, tokens, self.fixed_images)
        self.log = (
            StepLog(config.telemetry.run_dir / "rollouts", rank=ranks.rank)
            if config.telemetry.rollouts
            else None
        )

    def begin_step(self, plan: StepPlan, tally: StepMetrics) -> TrajectoryBatch:
        size = self.environment.rollouts_per_example
        drawn = self._stream.take(plan.num_samples // size)
        share = rank_share(plan.num_samples, self.ranks.world_size, self.ranks.rank, together=size)
        return TrajectoryBatch(
            self, plan, share, [drawn[position // size] for position in share[::size]], tally
        )

    def held_out_requests(self, step: int) -> list[EnvironmentRequest]:
        greedy = replace(self.decode, mode=DecodeMode.GREEDY, temperature=0.0)
        share, size = (
            rank_share(self._num_held_out, self.ranks.world_size, self.ranks.rank),
            self.environment.rollouts_per_example,
        )
        groups = [ExampleGroup(place, range(place, place + 1)) for place in share]
        # As many rollouts in each as in training, so that the rounds are as large.
        return [
            EnvironmentRequest(
                step,
                tuple(groups[start : start + size]),
                greedy,
                self.config.training.seed,
                is_held_out=True,
            )
            for start in range(0, len(groups), size)
        ]

    def score(self, answers: Sequence[ExampleRollouts]) -> list[EnvironmentRollout]:
        """They come with their rewards."""
        outcomes = [rollout for answer in answers for rollout in answer]
        for rollout in outcomes:
            _require_reward(rollout)
        return outcomes

    def require_same(self) -> None:
        """The data are the environment's."""

    def close(self) -> None:
        self.ahead.close()
        if self.log is not None:
            self.log.close()


class TrajectoryBatch:
    """`learner.algorithms.base.AlgorithmStep` of a step's examples."""

    def __init__(
        self,
        work: Trajectories,
        plan: StepPlan,
        share: range,
        examples: list[int],
        tally: StepMetrics,
    ) -> None:
        """`examples` are the rows whose rollouts have the positions of `share`."""
        self._work, self._plan, self._share, self._examples, self._tally = (
            work,
            plan,
            share,
            examples,
            tally,
        )
        self._num_taken = self._num_failed = 0
        self._failure: EnvironmentRollout | None = None

    def requests(self) -> list[EnvironmentRequest]:
        size, decode, run_seed = (
            self._work.environment.rollouts_per_example,
            self._work.decode,
            self._work.config.training.seed,
        )
        groups = [
            ExampleGroup(example, range(position, position + size))
            for position, example in zip(self._share[::size], self._examples, strict=True)
        ]
        return [EnvironmentRequest(self._plan.step, (group,), decode, run_seed) for group in groups]

    def become_current(self) -> None:
        if self._work.log is not None:
            self._work.log.begin(self._plan.number)

    def generation_spans(self, answers: Sequence[ExampleRollouts]) -> list[Span]:
        """One per environment actor's part of the round."""
        rollouts: dict[str, list[EnvironmentRollout]] = {}
        for rollout in (rollout for answer in answers for rollout in answer):
            rollouts.setdefault(rollout.actor, []).append(rollout)
        return [self._span(actor, of_actor) for actor, of_actor in rollouts.items()]

    def segments(self, answers: Sequence[ExampleRollouts], *, version: int) -> Iterator[Segment]:
        """The examples of each rollout in order: one where its calls extend each other, none where
        it failed.
        """
        # All of the round at once: it is of one version, whichever environments and engines it came
        # from.
        rollouts = [rollout for group in answers for rollout in group]
        sampled = [
            _Sampled.of(rollout, example) for rollout in rollouts for example in rollout.examples
        ]
        for rollout in rollouts:
            _require_reward(rollout)
        check_weight_versions(
            sampled, version, max_staleness=self._work.config.rollout_matching.max_staleness
        )
        differ = [
            has_signal([rollout.reward for rollout in group if rollout.error is None])
            for group in answers
        ]
        drops = self._work.environment.drop_equal_groups
        left_out = [
            drops and not differs and not _has_own_advantages(group)
            for group, differs in zip(answers, differ, strict=True)
        ]
        learned_rollouts = [
            rollout
            for group, is_left_out in zip(answers, left_out, strict=True)
            if not is_left_out
            for rollout in group
        ]
        segments = self._work.ahead.map(
            lambda rollout: list(self._learned(rollout)), learned_rollouts
        )
        for group, differs, is_left_out in zip(answers, differ, left_out, strict=True):
            self._tally.add_group(has_signal=differs, num_left_out=len(group) if is_left_out else 0)
            for rollout in group:
                self._take(rollout, version)
                if not is_left_out:
                    yield from next(segments)

    def ground_truth(self) -> Iterator[Segment]:
        """There is none."""
        return iter(())

    def require_complete(self) -> None:
        assert self._num_taken == len(self._share), (
            f"{self._num_taken} of {len(self._share)} rollouts came back"
        )
        # Over all ranks: how many there are must not decide what ends a run.
        num_sound = self._work.ranks.sum(self._num_taken - self._num_failed)
        if self._failure is not None and not num_sound:
            first = self._failure
            told = (
                f"all {self._plan.num_samples} rollouts of step {self._plan.number} failed, the one"
                f" at position {first.position} with: {first.error}"
            )
            raise RolloutError(
                f"{told}; check the environment", actor=first.actor, phase="environment"
            )

    def _take(self, rollout: EnvironmentRollout, version: int) -> None:
        """Check it, count it and write it down."""
        expected = self._share.start + self._num_taken
        assert rollout.position == expected, (
            f"expected position {expected}, got {rollout.position}: rounds arrive in order"
        )
        self._num_taken += 1
        if rollout.error is not None:
            self._num_failed += 1
            self._failure = self._failure or rollout
        self._tally.add_environment_rollout(rollout)
        versions = [
            example.weight_version
            for example in rollout.examples
            if example.weight_version is not None
        ]
        if versions:
            self._tally.add_staleness(version - min(versions))
        if self._work.log is not None:
            self._work.log.write(trajectory_record(self._plan.number, rollout))

    def _learned(self, rollout: EnvironmentRollout) -> Iterator[Segment]:
        num_of_rollout = sum(example.num_learned for example in rollout.examples)
        for example in rollout.examples:
            try:
                learned = trajectory_target(example, self._work.rule, num_of_rollout=num_of_rollout)
            except ValueError as error:
                raise RolloutError(str(error), actor=rollout.actor, phase="score") from error
            if learned is not None:
                prompt, target_modality = self._shown(rollout, example, learned)
                engine = example.engine or rollout.actor
                yield Segment(
                    rollout.position,
                    prompt,
                    learned.target,
                    self._plan.step,
                    engine,
                    example.weight_version,
                    target_modality,
                )

    def _shown(
        self, rollout: EnvironmentRollout, example: TrainingExample, learned: TrajectoryTarget
    ) -> tuple[EncodedPrompt, torch.Tensor | None]:
        """The prompt, with all images that are shown until the last token that is learned, and
        where they are in the target.
        """
        prompt_ids, target_ids, images = (
            learned.prompt_token_ids,
            learned.target.token_ids,
            self._work.images,
        )
        assert images is not None or not example.images, (
            "environments refuse more images than environment.max_images_per_prompt"
        )
        if images is None:
            return EncodedPrompt.of_text(prompt_ids), None
        # In the forward they would take another example's patches, or none.
        if (number := images.num_images(example.token_ids)) != len(example.images):
            told = (
                f"example {rollout.example}: its tokens have places for {number} images, and it"
                f" brings {len(example.images)}"
            )
            remedy = (
                "an environment leaves the text of placeholders out of its messages, and the"
                " answers in its steps as they came"
            )
            raise RolloutError(f"{told}; {remedy}", actor=rollout.actor, phase="check")
        if not example.images:
            return EncodedPrompt.of_text(prompt_ids), None
        try:
            encoded = images.encode(example.images, example.token_ids).first(
                images.num_images((*prompt_ids, *target_ids))
            )
        except ValueError as error:
            raise RolloutError(
                f"example {rollout.example}: {error}",
                actor=example.engine or rollout.actor,
                phase="check",
            ) from error
        # Nobody is asked it again: both forms are the engine's.
        return EncodedPrompt(
            prompt_ids, prompt_ids, images.modality(prompt_ids), *encoded
        ), images.modality(target_ids)

    def _span(self, actor: str, rollouts: Sequence[EnvironmentRollout]) -> Span:
        start_s, end_s = (
            min(r.started_s for r in rollouts),
            max(r.started_s + r.generate_s for r in rollouts),
        )
        place = {
            "step": self._plan.number,
            "first_position": rollouts[0].position,
            "last_position": rollouts[-1].position,
        }
        counts = {
            "turns": sum(r.num_turns for r in rollouts),
            "tokens": sum(r.num_tokens for r in rollouts),
        }
        return Span(actor, "rollouts", start_s, end_s, {**place, **counts})


class _Sampled(NamedTuple):
    """`learner.checks.Sampling`"""

    sample_id: str
    actor: str
    weight_version: int

    @classmethod
    def of(cls, rollout: EnvironmentRollout, example: TrainingExample) -> _Sampled:
        if example.weight_version is None:
            told = (
                f"example {rollout.example}: the engine did not say which weights sampled it; use"
                " engines of the run or `python -m launch.serve`"
            )
            raise RolloutError(told, actor=rollout.actor, phase="check")
        return cls(str(rollout.example), example.engine or rollout.actor, example.weight_version)


def _has_own_advantages(group: ExampleRollouts) -> bool:
    """Whether a rubric has given other advantages than equal rewards come to, which is 0
    everywhere.
    """
    examples = [example for rollout in group for example in rollout.examples]
    return any(
        example.advantage != 0 or any(example.token_advantages or ()) for example in examples
    )


def _require_reward(rollout: EnvironmentRollout) -> None:
    if not math.isfinite(rollout.reward):
        told = (
            f"example {rollout.example}, position {rollout.position}: has the reward"
            f" {rollout.reward}; a rubric must give finite numbers"
        )
        raise RolloutError(told, actor=rollout.actor, phase="score")


def _fixed(config: RunConfig, tokens: LoadedTokens, images: tuple[ImageRef, ...]) -> Segment:
    """Ids from all over the vocabulary, so that a canary reads rows of the embedding that no
    example of the environment has, behind the images, if there are any: of a model that is trained
    on text alone a vision tower is proved by its checksums."""
    size = len(tokens.tokenizer)
    spread = (size * place // _NUM_FIXED for place in range(_NUM_FIXED))
    ids = [
        token_id for token_id in dict.fromkeys(spread) if token_id not in tokens.banned_token_ids
    ]
    num_prompt = 0 if images else len(ids) // 4
    prompt = EncodedPrompt.of_text(ids[:num_prompt])
    if images:
        prompt = PromptEncoder.of(config, tokens.processor).encode(
            Sample("fixed", images, _FIXED_SIDE, _FIXED_SIDE, (), {})
        )
    response = tuple(ids[num_prompt:])
    zeros, weights = (0.0,) * len(response), (1.0 / len(response),) * len(response)
    credit = TokenAdvantages(tuple(range(len(response))), zeros, zeros, weights)
    roles = np.full(len(response), TokenRole.NEUTRAL, dtype=np.uint8)
    return Segment(0, prompt, Target("fixed", response, roles, (), (), (), credit=credit))


def _fixed_image() -> ImageRef:
    """Every shade of two colours, as a file."""
    shades = np.arange(_FIXED_SIDE, dtype=np.uint8) * (256 // _FIXED_SIDE)
    across, down = np.meshgrid(shades, shades)
    file = io.BytesIO()
    Image.fromarray(np.stack([across, down, 255 - across], axis=-1)).save(file, format="PNG")
    return ImageRef(
        path=None, data=file.getvalue(), sha256=hashlib.sha256(file.getvalue()).hexdigest()
    )
