"""Rollout matching as a learner's work: samples with ground truth, and rollouts that are parsed,
matched and completed with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby

from learner.ahead import Ahead
from learner.checks import check_prompt, check_weight_versions
from learner.held_out import HeldOut, require_train_lengths
from learner.model.loading import LoadedTokens
from learner.model.ranks import Ranks
from learner.rollout_logs.samples import RolloutLog
from learner.samples import load_samples
from learner.segments import PromptEncoder, Segment
from learner.step_metrics import StepMetrics
from learner.targets import (
    Target,
    ground_truth_target,
    rollout_target,
    target_settings,
    text_weights,
)
from shared.chunking import rank_share
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.dataset import SampleStream
from shared.errors import ConfigError
from shared.grounding.evaluation import Scene
from shared.records import ImageRef, Sample
from shared.rollouts import DecodeSettings, Rollout, RolloutRequest
from shared.run_files import Span
from shared.schedule import StepPlan

# What a learner rank learns from: its samples, in the order of the run, and the held-out ones.


class LearnerData:
    """Read before the first step; then one pass after another over the samples."""

    def __init__(self, config: RunConfig, tokens: LoadedTokens) -> None:
        """Reads the files of `data`. Raises ConfigError and RecordError for what is wrong with
        them.
        """
        assert config.data.train is not None, "checked with the configuration"
        self._config = config.data
        self.encoder = PromptEncoder.of(config, tokens.processor)
        self.train, _ = require_train_lengths(
            config, load_samples(config, config.data.train), self.encoder, tokens.codec
        )
        self.held_out = (
            None
            if config.data.val is None
            else HeldOut.of(config, load_samples(config, config.data.val), tokens)
        )
        self._stream = SampleStream(
            len(self.train), seed=config.training.seed, shuffle=config.data.shuffle
        )

    def draw(self, num_samples: int, share: range) -> list[Sample]:
        """Of the next `num_samples` those at the positions of a rank's share.

        An image is read where it is sent and where it is encoded, and its digest compared. One
        without a digest (`data.check_images` is off) is read here, so that both get the same bytes:
        RecordError when its file is gone.
        """
        indexes = self._stream.take(num_samples)
        drawn = [self.train[indexes[position]] for position in share]
        return [
            sample if all(image.sha256 for image in sample.images) else sample.with_image_data()
            for sample in drawn
        ]

    def require_same(self, ranks: Ranks) -> None:
        """Each rank reads the data from its own node's disk: ConfigError where they do not have the
        same. A collective.
        """
        held_out = () if self.held_out is None else self.held_out.samples
        where = ranks.first_difference([_digest(self.train), _digest(held_out)])
        if where is not None:
            key, path = (("data.train", self._config.train), ("data.val", self._config.val))[where]
            raise ConfigError(
                f"{key}: the learner ranks read different samples from {path}; make the file and"
                " its images the same on every node"
            )


def _digest(samples: Sequence[Sample]) -> int:
    """Of everything in them but where their images lie; of 63 bits."""
    digest = hashlib.sha256()
    for sample in samples:
        images = [image.sha256 for image in sample.images]
        digest.update(
            repr((sample.sample_id, images, sample.width, sample.height, sample.objects)).encode()
        )
    return int.from_bytes(digest.digest()[:8], "big") >> 1


class RolloutMatching:
    """`learner.algorithms.base.Algorithm` of the samples of `data`."""

    def __init__(
        self, config: RunConfig, tokens: LoadedTokens, decode: DecodeSettings, ranks: Ranks
    ) -> None:
        """Reads the files of `data`. Raises ConfigError and RecordError for what is wrong with
        them.
        """
        self.config, self.tokens, self.decode = config, tokens, decode
        self._ranks = ranks
        self.rules = target_settings(config)
        self.data = LearnerData(config, tokens)
        self.encoder = self.data.encoder
        self.ahead = Ahead()
        first = self.data.train[0]
        self.fixed = Segment(
            0, self.encoder.encode(first), ground_truth_target(first, tokens.codec, self.rules)
        )
        self.fixed_images: tuple[ImageRef, ...] = first.images
        self.log = (
            RolloutLog(config.telemetry.run_dir / "rollouts", tokens.codec, rank=ranks.rank)
            if config.telemetry.rollouts
            else None
        )

    def begin_step(self, plan: StepPlan, tally: StepMetrics) -> RolloutMatchingStep:
        share = rank_share(plan.num_samples, self._ranks.world_size, self._ranks.rank)
        return RolloutMatchingStep(
            self, plan, share, self.data.draw(plan.num_samples, share), tally
        )

    def held_out_requests(self, step: int) -> list[RolloutRequest]:
        held_out = self.data.held_out
        assert held_out is not None, "there is a report only with data.val"
        return held_out.requests(
            step, rank_share(len(held_out.samples), self._ranks.world_size, self._ranks.rank)
        )

    def score(self, answers: Sequence[Rollout]) -> list[Scene]:
        assert self.data.held_out is not None
        return self.data.held_out.score(answers)

    def require_same(self) -> None:
        self.data.require_same(self._ranks)

    def close(self) -> None:
        self.ahead.close()
        if self.log is not None:
            self.log.close()


class RolloutMatchingStep:
    """`learner.algorithms.base.AlgorithmStep` of a step's samples."""

    def __init__(
        self,
        work: RolloutMatching,
        plan: StepPlan,
        share: range,
        samples: list[Sample],
        tally: StepMetrics,
    ) -> None:
        """`samples` are those at the positions of `share`."""
        self._work, self._plan, self.share, self._tally = work, plan, share, tally
        self.samples = samples
        self._text_weights = text_weights(work.config.rollout_matching.pipeline, plan.channel)
        self._num_targets = 0
        # While the engines generate.
        self._prompts = work.ahead.map(work.encoder.encode, samples)

    def sample(self, position: int) -> Sample:
        return self.samples[position - self.share.start]

    def requests(self) -> list[RolloutRequest]:
        if self._plan.channel is Channel.A:
            return []
        encoder, run_seed = self._work.encoder, self._work.config.training.seed
        return [
            encoder.request(
                self.sample(position),
                self._work.decode,
                step=self._plan.step,
                position=position,
                run_seed=run_seed,
            )
            for position in self.share
        ]

    def become_current(self) -> None:
        if self._work.log is not None:
            self._work.log.begin(self._plan.number, self._plan.channel)

    def generation_spans(self, answers: Sequence[Rollout]) -> list[Span]:
        """One per engine's share of the round."""
        spans = []
        for engine, share in groupby(answers, key=lambda rollout: rollout.actor):
            of_engine = list(share)
            start_s, end_s = (
                min(r.started_s for r in of_engine),
                max(r.started_s + r.generate_s for r in of_engine),
            )
            tokens = sum(len(r.response_token_ids) for r in of_engine)
            place = {
                "step": self._plan.number,
                "first_position": of_engine[0].position,
                "last_position": of_engine[-1].position,
            }
            spans.append(Span(engine, "generate", start_s, end_s, {**place, "tokens": tokens}))
        return spans

    def segments(self, answers: Sequence[Rollout], *, version: int) -> Iterator[Segment]:
        """Whatever is wrong with a rollout is found in here, where no rank waits for this one."""
        work = self._work
        check_weight_versions(
            answers, version, max_staleness=work.config.rollout_matching.max_staleness
        )
        pairs = zip(answers, self.samples[self._num_targets :], strict=False)
        targets = work.ahead.map(
            lambda pair: rollout_target(*pair, work.tokens.codec, work.rules), pairs
        )
        for rollout in answers:
            assert rollout.position == self._next_position, (
                f"expected position {self._next_position}, got {rollout.position}: rounds arrive in"
                " order"
            )
            sample = self._next_sample
            prompt = next(self._prompts)
            check_prompt(rollout, prompt)
            target = next(targets)
            assert target.reading is not None
            self._tally.add_rollout(
                rollout,
                target.reading,
                len(sample.objects),
                staleness=version - rollout.weight_version,
            )
            position = self._taken(target, rollout)
            yield Segment(
                position, prompt, target, self._plan.step, rollout.actor, rollout.weight_version
            )

    def ground_truth(self) -> Iterator[Segment]:
        if self._plan.channel is Channel.A:
            work = self._work
            targets = work.ahead.map(
                lambda sample: ground_truth_target(sample, work.tokens.codec, work.rules),
                self.samples,
            )
            for target, prompt in zip(targets, self._prompts, strict=True):
                yield Segment(self._taken(target, None), prompt, target, self._plan.step)

    def require_complete(self) -> None:
        assert self._num_targets == len(self.share), (
            f"{self._num_targets} of {len(self.share)} samples came back"
        )

    @property
    def _next_position(self) -> int:
        """Of the first sample without a target."""
        return self.share.start + self._num_targets

    @property
    def _next_sample(self) -> Sample:
        return self.samples[self._num_targets]

    def _taken(self, target: Target, rollout: Rollout | None) -> int:
        """Write the next position's target down; the position."""
        position, sample = self._next_position, self._next_sample
        self._num_targets += 1
        if self._work.log is not None:
            self._work.log.write(
                rollout, sample, target, self._text_weights.of(target.roles), position
            )
        return position
