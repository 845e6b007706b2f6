"""Rollout matching: the model learns from its own rollouts, corrected by the ground truth.

    sample -> request -> rollout -> parsed and matched -> target -> segment

Example: a sample with a cat at [100, 100, 300, 300] and a dog. The model answers with one object at
[110, 90, 310, 290]. It is matched with the cat (mask IoU over `maskiou_gate`), so its four coord
slots are trained towards 100, 100, 300, 300. The dog was missed, so its entry is appended to the
kept answer and taught as text. On channel A there is no rollout: the target is the ground truth.

With `policy_gradient` on channel B a rollout is learned twice in the same step: as the corrected
target, and as it was sampled, with its advantage among the `rollouts_per_sample` rollouts of its
sample. The second form is a separate segment, because the corrected target drops the sampled text
after the last complete object and the sampled stop token. The step's loss and gradient are the sums
of both parts, since both are divided by the number of rollouts of the step.

A thread encodes prompts and makes targets before the device needs them (`Ahead`). The learner's
own thread counts and logs, in the order of positions.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from learner.algorithms.advantages import AdvantageEstimator
from learner.algorithms.base import Algorithm, AlgorithmStep, generation_span
from learner.algorithms.matched_targets import ground_truth_target, rollout_target
from learner.checks import Sampling, check_prompt, check_weight_versions
from learner.data.augment import Augmented, AugmentedAhead, Augmenter
from learner.data.fitting import Fitting, fits_a_row, require_train_lengths
from learner.data.samples import load_samples
from learner.held_out import HeldOut
from learner.model.loading import LoadedTokens
from learner.model.ranks import Ranks
from learner.rollout_logs.samples import sample_record
from learner.rollout_logs.writer import StepLog
from learner.segments import EncodedPrompt, PromptEncoder, Segment
from learner.step_metrics import StepMetrics
from learner.targets import AdvantageTarget, Target, target_settings, text_weights
from shared.chunking import rank_share
from shared.config import RunConfig
from shared.config.model import DataSource
from shared.config.pipeline import Channel
from shared.dataset import Draw, MixedStream
from shared.errors import ConfigError, RolloutError
from shared.grounding.evaluation import Scene
from shared.grounding.scores import Criterion, f1, num_found
from shared.records import Sample
from shared.rollouts import DecodeSettings, Rollout, RolloutRequest
from shared.run_files import Span
from shared.schedule import RunSchedule, StepPlan
from shared.trajectory import TrainingExample, has_signal


class RolloutMatching(Algorithm):
    """The training algorithm for samples with ground truth (`data.train`).

    A step of channel A learns the ground truth, a step of channel B corrected rollouts.
    """

    def __init__(
        self, config: RunConfig, tokens: LoadedTokens, decode: DecodeSettings, ranks: Ranks
    ) -> None:
        """Read and check the files of the section `data`.

        Raises ConfigError or RecordError if they are invalid.
        """
        super().__init__(StepLog.of_run(config.telemetry, config.timeouts, ranks.rank))
        self.config = config
        self.tokens = tokens
        self.decode = decode
        self._ranks = ranks
        self.encoder = PromptEncoder(tokens.processor, config.prompts)
        self.settings = target_settings(config).for_pictures(self.encoder.picture_resize)
        self._sources = config.data.sources("train")
        self._fittings = [
            require_train_lengths(config, load_samples(config, source), self.encoder, tokens.codec)
            for source in self._sources
        ]
        self.train = [fitting.samples for fitting in self._fittings]
        """One dataset for each file of `data.train`."""
        self.held_out: HeldOut | None = None
        if held_out := [load_samples(config, source) for source in config.data.sources("val")]:
            self.held_out = HeldOut(config, held_out, tokens)
        self._stream = MixedStream(
            [len(dataset) for dataset in self.train],
            [source.weight for source in self._sources],
            seed=config.training.seed,
            shuffle=config.data.shuffle,
        )
        self._schedule = RunSchedule(config)
        self._augmented: AugmentedAhead | None = None
        if config.data.augment is not None:
            fits = partial(fits_a_row, config, self.encoder, tokens.codec)
            augmenter = Augmenter(config.data.augment, config.training.seed, fits)
            self._augmented = AugmentedAhead(partial(self._shown, augmenter=augmenter))
        first = self.train[0][0]
        # The first row is read without a draw, so the stream of samples does not change.
        self.fixed = Segment(
            0, self.encoder.encode(first), ground_truth_target(first, tokens.codec, self.settings)
        )
        self.fixed_images = first.images
        self.estimator: AdvantageEstimator | None = None
        for path, section in config.rollout_matching.pipeline.policy_gradients():
            most = config.rollout_matching.max_new_tokens
            self.estimator = AdvantageEstimator(section, most, path=path)

    def begin_step(self, plan: StepPlan, metrics: StepMetrics) -> RolloutMatchingStep:
        share, draws = self._draws(plan, self._stream)
        if self._augmented is None:
            shown = {draw: self._shown(draw, None) for draw in draws}
        else:
            shown = self._augmented.take(draws)
            for one in shown.values():
                metrics.totals.add("augment/num_samples", float(one.augmentation is not None))
                metrics.totals.add("augment/num_unchanged", float(one.augmentation is None))
                metrics.totals.add("augment/num_dropped_objects", one.num_dropped)
            if plan.step + 1 < self._schedule.max_steps:
                # The next step's samples are augmented while this step runs.
                _, coming = self._draws(
                    self._schedule.plan(plan.step + 1), copy.deepcopy(self._stream)
                )
                self._augmented.begin(coming)
        return RolloutMatchingStep(self, plan, share, [shown[draw] for draw in draws], metrics)

    def _draws(self, plan: StepPlan, stream: MixedStream) -> tuple[range, list[Draw]]:
        """Draw a step's samples from `stream`. Return this rank's positions and their draws."""
        # All rollouts of one sample have the same draw.
        share = rank_share(plan.num_samples, self._ranks.world_size, self._ranks.rank)
        size = 1
        if plan.channel is Channel.B:
            size = self.config.stage2_ab.channel_b.rollouts_per_sample
        draws = stream.take(plan.num_samples // size)
        return share, [draws[position // size] for position in share]

    def _shown(self, draw: Draw, augmenter: Augmenter | None) -> Augmented:
        """Return the drawn sample as engines and learner receive it, changed by `augmenter`."""
        sample = self.train[draw.source][draw.row]
        shown = Augmented(sample, None, 0) if augmenter is None else augmenter(sample, draw)
        # An image file is read twice, to send it and to encode it, and its digest is compared. An
        # image without a digest (`data.check_images` is off) is read here, so both get the same
        # bytes.
        if all(image.sha256 for image in shown.sample.images):
            return shown
        return shown._replace(sample=shown.sample.with_image_data())

    def held_out_requests(self, step: int) -> list[RolloutRequest]:
        assert self.held_out is not None, "held-out requests need data.val"
        share = rank_share(len(self.held_out.samples), self._ranks.world_size, self._ranks.rank)
        return self.held_out.requests(step, share)

    def score(self, answers: Sequence[Rollout]) -> list[Scene]:
        assert self.held_out is not None
        return self.held_out.score(answers)

    def move_to(self, num_samples: int) -> None:
        self._stream.move_to(num_samples)

    def fingerprints(self) -> dict[str, str]:
        held_out = [] if self.held_out is None else self.held_out.fittings
        return {
            "data.train": _digest(self._sources, self._fittings),
            "data.val": _digest(self.config.data.sources("val"), held_out),
        }

    def require_same(self) -> None:
        """Raise ConfigError if the ranks have read different data from their nodes' disks."""
        if self._ranks.world_size == 1:
            return
        fingerprints = self.fingerprints()
        # The ranks compare 63 bits of each digest.
        numbers = [int(digest[:16], 16) >> 1 for digest in fingerprints.values()]
        differing = self._ranks.first_difference(numbers)
        if differing is not None:
            key = list(fingerprints)[differing]
            sources = self.config.data.sources("train" if key == "data.train" else "val")
            files = ", ".join(str(source.path) for source in sources)
            raise ConfigError(
                f"{key}: the learner ranks read different samples from {files}; copy the same files"
                " and images to every node"
            )

    def close(self) -> None:
        super().close()
        if self._augmented is not None:
            self._augmented.close()


def _digest(sources: Sequence[DataSource], fittings: Sequence[Fitting]) -> str:
    """Return a digest of the samples (without the paths of images) and of the mixture weights."""
    digests = [fitting.measures.digest for fitting in fittings]
    if not fittings:
        return hashlib.sha256().hexdigest()
    if sources[0].name is None:
        return digests[0]
    mixed = [
        (source.name, source.weight, digest)
        for source, digest in zip(sources, digests, strict=True)
    ]
    return hashlib.sha256(repr(mixed).encode()).hexdigest()


class _Scored(NamedTuple):
    """A rollout with its prompt and reward, while it waits for the other rollouts of its sample."""

    rollout: Rollout
    prompt: EncodedPrompt
    reward: float


class RolloutMatchingStep(AlgorithmStep):
    """One learner rank's part of a rollout-matching step.

    `samples[i]` is the sample at position `share[i]`, and `shown[i]` adds how it was augmented.
    """

    def __init__(
        self,
        algorithm: RolloutMatching,
        plan: StepPlan,
        share: range,
        shown: list[Augmented],
        metrics: StepMetrics,
    ) -> None:
        super().__init__(plan, metrics)
        self.share = share
        self.shown = shown
        self.samples = [one.sample for one in shown]
        self._algorithm = algorithm
        pipeline = algorithm.config.rollout_matching.pipeline
        self._text_weights = text_weights(pipeline, plan.channel)
        gate = algorithm.config.maskiou_gate(plan.step)
        self._settings = algorithm.settings.with_gate(gate)
        self._num_targets = 0
        self._group: list[_Scored] = []
        """Rollouts that wait for the other rollouts of their sample, in the order of positions."""
        # The prompts are encoded while the engines generate.
        self._prompts = algorithm.ahead.map(algorithm.encoder.encode, self.samples)

    def requests(self) -> list[RolloutRequest]:
        if self.plan.channel is Channel.A:
            return []
        algorithm = self._algorithm
        run_seed = algorithm.config.training.seed
        request = partial(algorithm.encoder.request, decode=algorithm.decode, run_seed=run_seed)
        requests = [
            request(sample, step=self.plan.step, position=position)
            for position, sample in zip(self.share, self.samples, strict=True)
        ]
        for one in requests:
            self.metrics.record(
                "requests",
                *(one.step, one.position, one.sample_id, one.seed, one.prompt_token_ids),
                *([image.sha256 for image in one.images], one.decode),
            )
        return requests

    def generation_spans(self, answers: Sequence[Rollout]) -> list[Span]:
        """Return timeline spans of the round's generation, one per engine that took part."""
        spans = []
        for engine, share in groupby(answers, key=lambda rollout: rollout.actor):
            rollouts = list(share)
            tokens = sum(len(rollout.response_token_ids) for rollout in rollouts)
            number = self.plan.number
            spans.append(generation_span(engine, "generate", number, rollouts, tokens=tokens))
        return spans

    def segments(self, answers: Sequence[Rollout], *, version: int) -> Iterator[Segment]:
        # All checks of rollouts happen here, when no other rank waits for this one.
        algorithm = self._algorithm
        section = algorithm.config.rollout_matching
        max_staleness = section.max_staleness
        if section.maskiou_gate_schedule is not None:
            self.metrics.totals.add_max("rollout/match_gate", self._settings.matching.maskiou_gate)
        sampled = [Sampling(one.sample_id, one.actor, one.weight_version) for one in answers]
        check_weight_versions(sampled, version, max_staleness=max_staleness)
        pairs = zip(answers, self.samples[self._num_targets :], strict=False)
        targets = algorithm.ahead.map(lambda pair: self._target_and_reward(*pair), pairs)
        for rollout in answers:
            position = self.share.start + self._num_targets
            assert rollout.position == position, (
                f"expected position {position}, got {rollout.position}: rounds arrive in order"
            )
            # Prompts are prepared per step, targets per round, both in the order of positions.
            prompt = next(self._prompts)
            check_prompt(rollout, prompt)
            self.metrics.record(
                "rollouts",
                *(position, rollout.sample_id, rollout.prompt_token_ids, rollout.weight_version),
                *(rollout.response_token_ids, rollout.stop_token_id, rollout.finish_reason),
            )
            target, reward = next(targets)
            assert target.reading is not None
            sample = self.samples[self._num_targets]
            sampled_by = rollout.weight_version
            self.metrics.add_rollout(
                rollout,
                target.reading,
                sample.objects,
                staleness=version - sampled_by,
                source=sample.source,
            )
            self.metrics.add_options(target, self._text_weights)
            self._log_next(target, rollout, reward)
            yield Segment(position, prompt, target, self.plan.step, rollout.actor, sampled_by)
            if reward is not None:
                self.metrics.add_reward(reward)
                self._group.append(_Scored(rollout, prompt, reward))
                yield from self._compared()

    def _target_and_reward(self, rollout: Rollout, sample: Sample) -> tuple[Target, float | None]:
        """Return a rollout's target and its reward: the F1, or None without `policy_gradient`."""
        algorithm = self._algorithm
        target = rollout_target(rollout, sample, algorithm.tokens.codec, self._settings)
        assert target.reading is not None
        if algorithm.estimator is None:
            return target, None
        section = algorithm.config.stage2_ab.channel_b.reward
        objects = target.reading.parsed.objects
        tolerance = algorithm.config.rollout_matching.point_tolerance
        criterion = Criterion(section.iou, section.by_name, tolerance)
        found = num_found(objects, sample.objects, criterion)
        return target, f1(found, len(objects), len(sample.objects))

    def _compared(self) -> Iterator[Segment]:
        """Yield the policy-gradient segments of a sample when its last rollout has arrived."""
        # A group with equal rewards has advantages of 0, so its forward passes are saved.
        algorithm = self._algorithm
        assert algorithm.estimator is not None
        if len(self._group) < algorithm.config.stage2_ab.channel_b.rollouts_per_sample:
            return
        group = self._group
        self._group = []
        rewards = tuple(scored.reward for scored in group)
        differs = has_signal(rewards)
        self.metrics.add_group(has_signal=differs, num_left_out=0 if differs else len(group))
        for scored in group if differs else ():
            rollout = scored.rollout
            if rollout.logprobs is None:
                message = (
                    f"sample {rollout.sample_id}: its rollout has no log-probabilities, which"
                    " policy_gradient needs; use engines that return them"
                )
                raise RolloutError(message, actor=rollout.actor, phase="check")
            token_ids = list(rollout.response_token_ids)
            logprobs = list(rollout.logprobs)
            # A stop token that the repeat guard forced was not sampled.
            if rollout.stop_token_id is not None and rollout.stop_token_logprob is not None:
                token_ids.append(rollout.stop_token_id)
                logprobs.append(rollout.stop_token_logprob)
            number = len(token_ids)
            if not number:
                continue
            # The example contains only the response: prompt tokens have no advantage.
            example = TrainingExample(
                token_ids,
                logprobs,
                [1] * number,
                scored.reward,
                example_id=rollout.sample_id,
                group_rewards=rewards,
            )
            credit = algorithm.estimator.estimate(example, start=0, num_of_rollout=number)
            # Its log-probabilities are compared in the segment of the matched target.
            target = AdvantageTarget(rollout.sample_id, tuple(token_ids), credit)
            yield Segment(
                rollout.position,
                scored.prompt,
                target,
                self.plan.step,
                rollout.actor,
                rollout.weight_version,
            )

    def ground_truth(self) -> Iterator[Segment]:
        if self.plan.channel is Channel.A:
            algorithm = self._algorithm
            make = partial(
                ground_truth_target, codec=algorithm.tokens.codec, settings=algorithm.settings
            )
            targets = algorithm.ahead.map(make, self.samples)
            for target, prompt in zip(targets, self._prompts, strict=True):
                position = self.share.start + self._num_targets
                self._log_next(target, None)
                yield Segment(position, prompt, target, self.plan.step)

    def require_complete(self) -> None:
        assert self._num_targets == len(self.share), (
            f"{self._num_targets} of {len(self.share)} samples came back"
        )

    def _log_next(
        self, target: Target, rollout: Rollout | None, reward: float | None = None
    ) -> None:
        """Count and log the next position's sample, then advance by one position."""
        index = self._num_targets
        self._num_targets += 1
        if (source := self.samples[index].source) is not None:
            self.metrics.totals.add(f"source/num_samples/{source}", 1)
        if (log := self._algorithm.log) is not None:
            log.write(
                sample_record(
                    self.plan,
                    self.share[index],
                    self.samples[index],
                    target,
                    self._text_weights.of(target),
                    self._algorithm.tokens.codec,
                    rollout=rollout,
                    reward=reward,
                    augmentation=self.shown[index].augmentation,
                )
            )
