"""Trajectories: policy-gradient training on rollouts of an environment.

    environment request -> rollouts with their own tokens and rewards -> examples -> segments

`rollout_actors.environments.training.runner` runs the environment, which has the dataset. This
module decides which of its rows a step takes. A rollout contains its tokens, log-probabilities and
rewards, so nothing is encoded or parsed here.

Example: `rollouts_per_example` 2, rewards 1 and 0. In the first rollout the second model call
extends the first: one example, one segment, and its sampled tokens have the advantage 0.5. In the
second rollout the calls do not extend each other: two segments with -0.5.

With `environment.refill_rounds` a step has further rounds: rollouts of another example replace a
group without signal (equal rewards). A rollout's new position is its old position plus the round's
number (from 1) times the number of rollouts in the step, so the seeds are new. The new example
depends only on the seed, the step, the round and the group's place in the step. It does not depend
on which other groups are replaced, or on the number of ranks.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image

from learner.algorithms.advantages import (
    AdvantageEstimator,
    TokenAdvantages,
    own_advantages,
    teacher_log_ratios,
)
from learner.algorithms.base import Algorithm, AlgorithmStep, generation_span
from learner.checks import Sampling, check_weight_versions
from learner.model.loading import LoadedTokens
from learner.model.ranks import Ranks
from learner.rollout_logs.trajectories import trajectory_record
from learner.rollout_logs.writer import StepLog
from learner.segments import EncodedPrompt, ImageEncoder, PromptEncoder, Segment
from learner.step_metrics import StepMetrics
from learner.targets import AdvantageTarget
from shared.chunking import rank_share
from shared.config import RunConfig
from shared.dataset import RowStream
from shared.errors import ConfigError, RolloutError
from shared.prompts import Prompts
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

ExampleRollouts = Sequence[EnvironmentRollout]
"""The rollouts that answer one environment request, by position. In training, they all belong to
one example."""

_NUM_FIXED = 40
"""Number of token ids in the fixed segment (`Algorithm.fixed`), before banned ids are removed."""
_FIXED_SIDE = 64
"""Width and height of the fixed segment's image, in pixels."""


def trajectory_target(
    example: TrainingExample, estimator: AdvantageEstimator, *, num_of_rollout: int
) -> tuple[tuple[int, ...], AdvantageTarget] | None:
    """Split a training example into prompt tokens and the target with its advantages.

    Return None if no token of the example is learned.

    Example: token_ids [5, 6, 7, 8] and mask [0, 0, 1, 1] give the prompt (5, 6) and a target with
    the tokens (7, 8). The target of a merged example also contains the tokens between its turns,
    which are not learned.

    Args:
        estimator: computes the advantages.
        num_of_rollout: number of learned tokens in all examples of the same rollout.

    Raises ValueError if the first token is to be learned, but no token precedes it. Also what
    `AdvantageEstimator.estimate` raises.
    """
    learned = np.flatnonzero(example.mask)
    if not len(learned):
        return None
    start = int(learned[0])
    stop = int(learned[-1]) + 1
    if start == 0:
        raise ValueError(
            f"example {example.example_id!r}, rollout {example.rollout}: its first token is to be"
            " learned, but no token precedes it; make examples with mask_prompts=True"
        )
    credit = estimator.estimate(example, start=start, num_of_rollout=num_of_rollout)
    target = AdvantageTarget(
        str(example.example_id),
        tuple(example.token_ids[start:stop]),
        credit,
        compared_logprobs=credit.engine_logprobs,
    )
    return tuple(example.token_ids[:start]), target


class Trajectories(Algorithm):
    """The training algorithm for rollouts of an environment, with policy gradient (channel B)."""

    def __init__(
        self,
        config: RunConfig,
        tokens: LoadedTokens,
        decode: DecodeSettings,
        ranks: Ranks,
        examples: ExampleCounts,
    ) -> None:
        assert config.environment is not None, "checked with the configuration"
        super().__init__(StepLog.of_run(config.telemetry, config.timeouts, ranks.rank))
        self.config = config
        self.decode = decode
        self.environment = config.environment
        self.ranks = ranks
        self.rows = RowStream(
            examples.train, examples.mixture, config.training.seed, config.data.shuffle
        )
        self._num_examples = examples.train
        self._num_held_out = examples.held_out
        self._digest = f"{examples.train} {examples.held_out} {examples.digest}"
        if examples.mixture:
            self._digest += f" {[list(part) for part in examples.mixture]}"
        matching = config.rollout_matching
        path, advantages = next(matching.pipeline.policy_gradients())
        self.estimator = AdvantageEstimator(
            advantages, matching.max_new_tokens, config.environment.teacher, path
        )
        self.images: ImageEncoder | None = None
        if self.environment.max_images_per_prompt:
            self.images = ImageEncoder(tokens.processor)
            self.fixed_images = (_fixed_image(),)
        self.fixed = _fixed_segment(config.prompts, tokens, self.fixed_images)

    def begin_step(self, plan: StepPlan, metrics: StepMetrics) -> TrajectoryBatch:
        size = self.environment.rollouts_per_example
        drawn = self.rows.take(plan.num_samples // size)
        share = rank_share(plan.num_samples, self.ranks.world_size, self.ranks.rank, together=size)
        return TrajectoryBatch(self, plan, share, drawn, metrics)

    def refill_order(self, plan: StepPlan, drawn: Sequence[int]) -> list[int]:
        """Return all examples in the order that a step's refill rounds follow.

        A refill round requests new groups in place of groups whose rewards are all equal. The order
        is a permutation that depends on the run's seed and the step. Examples that the step has
        `drawn` come last. In a round (from 1), group `g` of `G` gets the example at index
        `(round - 1) G + g`, modulo the number of examples. In a mixture, only examples of the
        group's environment are counted.
        """
        seed = self.config.training.seed
        # Epoch orders use a seed of two numbers (`SampleStream`). The third number must not be 0:
        # numpy gives the same order for a seed of two numbers and for the same seed followed by 0.
        generator = np.random.Generator(np.random.PCG64((seed, plan.step, 1)))
        order = generator.permutation(self._num_examples)
        is_drawn = np.isin(order, drawn)
        return [*order[~is_drawn].tolist(), *order[is_drawn].tolist()]

    def held_out_requests(self, step: int) -> list[EnvironmentRequest]:
        greedy = replace(self.decode, mode=DecodeMode.GREEDY, temperature=0.0)
        share = rank_share(self._num_held_out, self.ranks.world_size, self.ranks.rank)
        groups = [ExampleGroup(index, range(index, index + 1)) for index in share]
        # Each request has as many rollouts as in training, so the rounds have the same size.
        size = self.environment.rollouts_per_example
        chunks = [tuple(groups[start : start + size]) for start in range(0, len(groups), size)]
        seed = self.config.training.seed
        return [EnvironmentRequest(step, chunk, greedy, seed, is_held_out=True) for chunk in chunks]

    def score(self, answers: Sequence[ExampleRollouts]) -> list[EnvironmentRollout]:
        """Return the held-out rollouts, which the environment has already scored, in order."""
        rollouts = list(itertools.chain.from_iterable(answers))
        for rollout in rollouts:
            _require_reward(rollout)
        return rollouts

    def move_to(self, num_samples: int) -> None:
        self.rows.move_to(num_samples // self.environment.rollouts_per_example)

    def fingerprints(self) -> dict[str, str]:
        return {"environment.id": self._digest}


class TrajectoryBatch(AlgorithmStep):
    """One learner rank's part of a step with an environment: rollouts at the positions `share`."""

    def __init__(
        self,
        algorithm: Trajectories,
        plan: StepPlan,
        share: range,
        drawn: list[int],
        metrics: StepMetrics,
    ) -> None:
        """`drawn` are the examples (rows of the environment's dataset) of the step on all ranks."""
        super().__init__(plan, metrics)
        self._algorithm = algorithm
        self._share = share
        self._drawn = drawn
        self._refill_round = 0
        """Number of refill rounds so far."""
        self._without_signal: list[int] = []
        """Groups to replace in the next refill round, by the position of their first rollout."""
        self._positions = list(share)
        """Positions of the requested rollouts."""
        self._num_taken = 0
        self._num_failed = 0
        self._first_failure: EnvironmentRollout | None = None

    def requests(self) -> list[EnvironmentRequest]:
        size = self._algorithm.environment.rollouts_per_example
        places = self._share[::size]
        return [self._request(position, self._drawn[position // size]) for position in places]

    def refill_requests(self) -> list[EnvironmentRequest]:
        """Return requests for new groups, in place of the groups without signal.

        A group is the rollouts of one example. It has no signal if all its rewards are equal. Each
        request is for a group of another example.
        """
        algorithm = self._algorithm
        size = algorithm.environment.rollouts_per_example
        places = self._without_signal
        self._without_signal = []
        first = self._refill_round * len(self._drawn)
        self._refill_round += 1
        order = algorithm.refill_order(self.plan, self._drawn) if places else []
        requests = []
        for place in places:
            # The new example is of the same environment, so the shares of a mixture stay exact.
            alike = algorithm.rows.alike(self._drawn[place // size], order)
            example = alike[(first + place // size) % len(alike)]
            position = self._refill_round * self.plan.num_samples + place
            requests.append(self._request(position, example))
            self._positions += range(position, position + size)
            self.metrics.refilled[place] = example
        return requests

    def _request(self, position: int, example: int) -> EnvironmentRequest:
        algorithm = self._algorithm
        size = algorithm.environment.rollouts_per_example
        group = ExampleGroup(example, range(position, position + size))
        run_seed = algorithm.config.training.seed
        request = EnvironmentRequest(self.plan.step, (group,), algorithm.decode, run_seed)
        self.metrics.record("requests", request)
        return request

    def generation_spans(self, answers: Sequence[ExampleRollouts]) -> list[Span]:
        """Return timeline spans of the round's rollouts, one per environment actor."""
        by_actor: dict[str, list[EnvironmentRollout]] = {}
        for rollout in itertools.chain.from_iterable(answers):
            by_actor.setdefault(rollout.actor, []).append(rollout)
        spans = []
        for actor, rollouts in by_actor.items():
            turns = sum(rollout.num_turns for rollout in rollouts)
            tokens = sum(rollout.num_tokens for rollout in rollouts)
            counts = {"turns": turns, "tokens": tokens}
            spans.append(generation_span(actor, "rollouts", self.plan.number, rollouts, **counts))
        return spans

    def segments(self, answers: Sequence[ExampleRollouts], *, version: int) -> Iterator[Segment]:
        """Yield one segment per training example that is learned.

        Failed rollouts have no training examples. `version` is the learner's weight version. The
        weights of rollouts may be up to `max_staleness` versions older.
        """
        # The whole round is checked together, across all environments and engines.
        sampled = []
        for rollout in itertools.chain.from_iterable(answers):
            sampled += [_sampled(rollout, example) for example in rollout.examples]
            _require_reward(rollout)
        max_staleness = self._algorithm.config.rollout_matching.max_staleness
        check_weight_versions(sampled, version, max_staleness=max_staleness)
        # A group with equal rewards has advantages of 0, so its forward passes can be saved.
        pipeline = self._algorithm.config.rollout_matching.pipeline
        drops_equal = self._algorithm.environment.drops_equal(pipeline)
        drops_truncated = self._algorithm.environment.drop_truncated
        refill_rounds = self._algorithm.environment.refill_rounds
        differ = []
        is_replaced = []
        is_learned = []
        for group in answers:
            rewards = [rollout.reward for rollout in group if rollout.error is None]
            differ.append(has_signal(rewards))
            teaches = differ[-1] or _has_own_advantages(group)
            is_replaced.append(not teaches and self._refill_round < refill_rounds)
            is_learned.append(teaches or not (drops_equal or is_replaced[-1]))
            if is_replaced[-1]:
                self._without_signal.append(group[0].position % self.plan.num_samples)
        learned_groups = itertools.compress(answers, is_learned)
        segments = self._algorithm.ahead.map(
            lambda rollout: list(self._segments_of(rollout)),
            (
                rollout
                for rollout in itertools.chain.from_iterable(learned_groups)
                if not (drops_truncated and _is_cut(rollout))
            ),
        )
        kinds = zip(differ, is_replaced, is_learned, strict=True)
        for group, (has_differed, replaced, learned) in zip(answers, kinds, strict=True):
            num_left_out = 0 if learned else len(group)
            self.metrics.add_group(has_signal=has_differed, num_left_out=num_left_out)
            if refill_rounds:
                self.metrics.totals.add("rollout/num_refilled", float(self._refill_round > 0))
            for rollout in group:
                self._take(rollout, version)
                masked = drops_truncated and _is_cut(rollout)
                # The tokens and rollouts of a skipped group stay in the step's divisor, because
                # skipping its rows must not change the policy gradient. A replaced group does not
                # belong to the step, so its tokens are not counted.
                num_tokens = sum(example.num_learned for example in rollout.examples)
                num_credited = 0 if masked or replaced else num_tokens
                self.metrics.add_credited(num_credited, is_masked=masked and not replaced)
                if learned and not masked:
                    yield from next(segments)

    def require_complete(self) -> None:
        assert self._num_taken == len(self._positions), (
            f"{self._num_taken} of {len(self._positions)} rollouts came back"
        )
        # Summed over all ranks, so the number of ranks does not decide whether the run ends.
        num_sound = self._algorithm.ranks.sum(self._num_taken - self._num_failed)
        if num_sound:
            return
        num_taken = self._algorithm.ranks.sum(self._num_taken)
        first = self._first_failure
        if first is not None:
            raise RolloutError(
                f"all {num_taken} rollouts of step {self.plan.number} failed, the one"
                f" at position {first.position} with: {first.error}; check the environment",
                actor=first.actor,
                phase="environment",
            )

    def _take(self, rollout: EnvironmentRollout, version: int) -> None:
        """Check, count and log the next rollout."""
        assert self._num_taken < len(self._positions), "more rollouts arrived than were requested"
        expected = self._positions[self._num_taken]
        assert rollout.position == expected, (
            f"expected position {expected}, got {rollout.position}: rounds arrive in order"
        )
        self._num_taken += 1
        if rollout.error is not None:
            self._num_failed += 1
            self._first_failure = self._first_failure or rollout
        self.metrics.add_environment_rollout(rollout)
        for example in rollout.examples:
            if example.teacher_logprobs is not None:
                log_ratio = sum(teacher_log_ratios(example))
                name = "policy/teacher_log_ratio"
                self.metrics.totals.add_mean(name, log_ratio, example.num_learned)
        # Without the text of the error, which may contain a process id or an address.
        self.metrics.record(
            "rollouts",
            *(rollout.position, rollout.example, rollout.reward, rollout.error is None),
            [
                (one.token_ids, one.mask, one.weight_version, [file.sha256 for file in one.images])
                for one in rollout.examples
            ],
        )
        of_examples = (example.weight_version for example in rollout.examples)
        versions = [one for one in of_examples if one is not None]
        if versions:
            self.metrics.add_staleness(version - min(versions))
        if (log := self._algorithm.log) is not None:
            if self._algorithm.config.telemetry.rollout_images:
                # Image files are written before the log line that refers to them.
                for image in itertools.chain.from_iterable(one.images for one in rollout.examples):
                    log.keep_picture(image)
            log.write(trajectory_record(self.plan.number, rollout))

    def _segments_of(self, rollout: EnvironmentRollout) -> Iterator[Segment]:
        num_of_rollout = sum(example.num_learned for example in rollout.examples)
        for example in rollout.examples:
            try:
                learned = trajectory_target(
                    example, self._algorithm.estimator, num_of_rollout=num_of_rollout
                )
            except ConfigError:  # of the user's baseline, not of the rollout
                raise
            except ValueError as error:
                raise RolloutError(str(error), actor=rollout.actor, phase="score") from error
            if learned is not None:
                prompt_ids, target = learned
                prompt, modality = self._encode_images(
                    rollout, example, prompt_ids, target.token_ids
                )
                yield Segment(
                    rollout.position,
                    prompt,
                    target,
                    self.plan.step,
                    example.engine or rollout.actor,
                    example.weight_version,
                    modality,
                )

    def _encode_images(
        self,
        rollout: EnvironmentRollout,
        example: TrainingExample,
        prompt_ids: tuple[int, ...],
        target_ids: tuple[int, ...],
    ) -> tuple[EncodedPrompt, torch.Tensor | None]:
        """Return the encoded prompt, and the target's modality if the example has images."""
        images = self._algorithm.images
        if images is None:
            assert not example.images, "environments refuse more than max_images_per_prompt"
            return EncodedPrompt.from_text(prompt_ids), None
        # With a wrong number, the forward pass would use patches of another example or fail.
        num_places = images.num_images(example.token_ids)
        if num_places != len(example.images):
            message = (
                f"example {rollout.example}: its tokens have places for {num_places} images, but"
                f" the example has {len(example.images)}; the environment must not write image"
                " placeholders as text in its messages, nor change the model's answers in its steps"
            )
            raise RolloutError(message, actor=rollout.actor, phase="check")
        if not example.images:
            return EncodedPrompt.from_text(prompt_ids), None
        try:
            encoded = images.encode(example.images, example.token_ids)
        except ValueError as error:
            message = f"example {rollout.example}: {error}"
            actor = example.engine or rollout.actor
            raise RolloutError(message, actor=actor, phase="check") from error
        # The prompt has the pixels of all images up to the last learned token.
        pixels, grid = encoded.first(images.num_images((*prompt_ids, *target_ids)))
        # No engine receives this prompt again, so both forms are the engine's token ids.
        prompt = EncodedPrompt(prompt_ids, prompt_ids, images.modality(prompt_ids), pixels, grid)
        return prompt, images.modality(target_ids)


def _sampled(rollout: EnvironmentRollout, example: TrainingExample) -> Sampling:
    """Return which engine and weight version sampled an example. Raises RolloutError if unknown."""
    if example.weight_version is None:
        message = (
            f"example {rollout.example}: the engine did not report its weight version; the"
            " environment must call the model by the client that the run passes to it"
        )
        raise RolloutError(message, actor=rollout.actor, phase="check")
    return Sampling(str(rollout.example), example.engine or rollout.actor, example.weight_version)


def _is_cut(rollout: EnvironmentRollout) -> bool:
    """Return whether the rollout was cut by a length limit and did not fail."""
    # Logs of older versions set `is_truncated` only if the conversation was cut.
    is_cut = rollout.is_truncated or rollout.num_length_limited > 0
    return is_cut and rollout.error is None


def _has_own_advantages(group: ExampleRollouts) -> bool:
    """Return whether the environment itself set an advantage other than 0."""
    for example in (one for rollout in group for one in rollout.examples):
        columns = zip(*own_advantages(example), strict=True)
        if any(own for own, is_relative in columns if not is_relative):
            return True
    return False


def _require_reward(rollout: EnvironmentRollout) -> None:
    if not math.isfinite(rollout.reward):
        message = (
            f"example {rollout.example}, position {rollout.position}: the reward is"
            f" {rollout.reward}; a rubric must return finite numbers"
        )
        raise RolloutError(message, actor=rollout.actor, phase="score")


def _fixed_segment(prompts: Prompts, tokens: LoadedTokens, images: tuple[ImageRef, ...]) -> Segment:
    """Return a segment with token ids from the whole vocabulary. `images` precede them."""
    # So the canary also reads embedding rows that do not occur in the environment's examples. If
    # the model is trained on text only, checksums verify the vision tower.
    size = len(tokens.tokenizer)
    spread = dict.fromkeys(size * index // _NUM_FIXED for index in range(_NUM_FIXED))
    ids = [token_id for token_id in spread if token_id not in tokens.banned_token_ids]
    if images:
        sample = Sample("fixed", images, _FIXED_SIDE, _FIXED_SIDE, (), {})
        prompt = PromptEncoder(tokens.processor, prompts).encode(sample)
        response = tuple(ids)
    else:
        num_prompt = len(ids) // 4
        prompt = EncodedPrompt.from_text(ids[:num_prompt])
        response = tuple(ids[num_prompt:])
    length = len(response)
    zeros = (0.0,) * length
    weights = (1.0 / length,) * length
    credit = TokenAdvantages(tuple(range(length)), zeros, zeros, weights, (0,) * length)
    return Segment(0, prompt, AdvantageTarget("fixed", response, credit))


def _fixed_image() -> ImageRef:
    """Return an image with colour gradients in both directions."""
    shades = np.arange(_FIXED_SIDE, dtype=np.uint8) * (256 // _FIXED_SIDE)
    across, down = np.meshgrid(shades, shades)
    file = io.BytesIO()
    Image.fromarray(np.stack([across, down, 255 - across], axis=-1)).save(file, format="PNG")
    data = file.getvalue()
    return ImageRef(path=None, data=data, sha256=hashlib.sha256(data).hexdigest())
