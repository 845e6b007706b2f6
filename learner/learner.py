"""The learner: owns the data iterator, the model and the optimizer; turns rollouts into one update per step.

    next_requests -> accumulate (per round) -> finish_step

A channel-A step is a step without requests: its targets need no rollouts, so `finish_step` makes and learns them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import torch

from learner.canary import canary_probe
from learner.checkpoint import save_checkpoint
from learner.checks import check_logprobs, check_prompt, check_weight_version, compares_logprobs
from learner.collate import collate
from learner.counters import StepTally
from learner.heldout import HeldOut
from learner.lengths import require_lengths
from learner.loading import load_model
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.optimizer import Updater, UpdateResult
from learner.place import LearnerPlace
from learner.ranks import OneRank, Ranks
from learner.rollout_log import RolloutLog
from learner.rows import row_policy
from learner.rules import target_rules, text_weights
from learner.samples import load_samples
from learner.segments import EncodedPrompt, PromptEncoder, Segment
from learner.step import backward_row
from learner.targets import Target, ground_truth_target, rollout_target
from learner.weight_sender import WeightSender
from learner.weight_source import FullWeights
from shared.config import RunConfig
from shared.config.pipeline import Channel
from shared.dataset import SampleStream
from shared.evaluation import Scene
from shared.records import Sample
from shared.reports import StepReport
from shared.rollouts import Rollout, RolloutRequest, WeightOffer
from shared.schedule import RunSchedule, StepPlan
from shared.seeds import request_seed
from shared.timeline import Span
from shared.weight_sync import SendReport

TRACK = "learner"
# Of the canary's response: enough to pass every layer and the head, little enough to cost one short prefill per sync.
_CANARY_TOKENS = 32


@dataclass(slots=True)
class _StepInProgress:
    """What a step gathers between `next_requests` and `finish_step`. Lists are in position order."""

    plan: StepPlan
    samples: list[Sample]
    """Their images with data: read once, sent to the engines, encoded here."""
    tally: StepTally
    num_targets: int = 0
    generate_s: float = 0.0
    spans: list[Span] = field(default_factory=list)


class Learner:
    """One rank. Not thread-safe: its methods are called in the order of the module's first lines."""

    def __init__(self, config: RunConfig, place: LearnerPlace) -> None:
        """Raises ConfigError and RecordError for what is wrong with model and data."""
        self._config = config
        self._ranks: Ranks = OneRank()
        self._loaded = load_model(config, torch.device(place.device))
        self._rules = target_rules(config)
        self._encoder = PromptEncoder(self._loaded.processor, system_prompt=config.data.system_prompt, user_prompt=config.data.user_prompt)
        self._decode = config.rollout_matching.decode_settings(
            stop_token_ids=(self._loaded.codec.eos_token_id,), banned_token_ids=self._loaded.banned_token_ids
        )
        self._train = load_samples(config, config.data.train)
        self._stream = SampleStream(len(self._train), seed=config.training.seed, shuffle=config.data.shuffle)
        require_lengths(
            self._train,
            self._encoder,
            self._loaded.codec,
            max_new_tokens=config.rollout_matching.max_new_tokens if RunSchedule(config).num_b_steps else 0,
            global_max_length=config.global_max_length,
        )
        self._held_out = self._load_held_out()
        pipeline = config.rollout_matching.pipeline
        self._objectives = {channel: build_objectives(pipeline, channel, self._loaded.coord_ids_C) for channel in Channel}
        self._text_weights = {channel: text_weights(pipeline, channel) for channel in Channel}
        # Greedy engines (temperature 0) report the log-probability at temperature 1.
        self._sampled_under = Normalizer(self._decode.temperature or 1.0, self._loaded.banned_token_ids)
        self._rows = row_policy(config)
        self._log = RolloutLog(config.telemetry.run_dir / "rollouts", self._loaded.codec) if config.telemetry.rollouts else None
        self._updater = Updater(self._loaded.model, config.training, self._ranks)
        self._sender = WeightSender(
            FullWeights(self._loaded.model),
            transport=place.transport,
            receivers=place.receivers,
            host=place.host,
            timeout_s=config.timeouts.sync_phase_s,
            bucket_bytes=config.rollout_matching.vllm.sync.bucket_bytes,
        )
        self._canary_prompt = self._encoder.encode(self._train[0])
        self._version = 0
        self._step: _StepInProgress | None = None

    # One step

    def next_requests(self, plan: StepPlan) -> list[RolloutRequest]:
        """Draw the step's samples and ask for their rollouts, in position order; channel A asks for nothing."""
        assert self._step is None, "finish_step ends a step before the next begins"
        started_s = time.time()
        samples = [self._train[index].with_image_data() for index in self._stream.take(plan.num_samples)]
        # A row of one segment is not underfilled where nothing is packed.
        min_fill_ratio = self._config.training.packing_min_fill_ratio if self._config.training.packing else 0.0
        self._step = _StepInProgress(plan, samples, StepTally(plan.step, capacity=self._config.global_max_length, min_fill_ratio=min_fill_ratio))
        if self._log is not None:
            self._log.begin(plan.step, plan.channel)
        requests = [] if plan.channel is Channel.A else [self._request(position) for position in range(plan.num_samples)]
        self._mark("draw samples", started_s)
        return requests

    def accumulate(self, rollouts: Sequence[Rollout]) -> None:
        """Check, parse, match and learn from a round's rollouts, in position order. Raises RolloutError when engine and learner disagree."""
        step, started_s = self._current, time.time()
        generation = _generation_spans(rollouts)
        step.spans += generation
        step.generate_s += max(span.end_s for span in generation) - min(span.start_s for span in generation)
        for rollout in rollouts:
            assert rollout.position == step.num_targets, f"expected position {step.num_targets}, got {rollout.position}: rounds arrive in order"
            sample = step.samples[rollout.position]
            prompt = self._encoder.encode(sample)
            check_weight_version(rollout, self._version)
            check_prompt(rollout, prompt)
            target = rollout_target(rollout, sample, self._loaded.codec, self._rules)
            assert target.reading is not None
            step.tally.add_rollout(rollout, target.reading, len(sample.objects))
            self._take(prompt, target, rollout)
        self._mark("learn round", started_s, rollouts=len(rollouts))

    def finish_step(self) -> StepReport:
        """Learn what is left and take exactly one optimizer update."""
        step, started_s = self._current, time.time()
        if step.plan.channel is Channel.A:
            for sample in step.samples:
                self._take(self._encoder.encode(sample), ground_truth_target(sample, self._loaded.codec, self._rules))
        assert step.num_targets == step.plan.num_samples, f"{step.num_targets} of {step.plan.num_samples} samples came back"
        for row in self._rows.finish_step():
            self._learn(row)
        # Step mode learns every sample it drew; carrying, what was learned is known only now (DESIGN 5, decisions 6 and 7).
        denominator = step.tally.num_segments if self._rows.carries else step.plan.num_samples
        update = self._updater.update(step.plan.step, denominator)
        self._mark("finish step", started_s)
        self._step = None
        return StepReport(step.plan.step, step.plan.channel, self._version, self._metrics(step, update, denominator), tuple(step.spans))

    # Weights

    def offer_weights(self) -> WeightOffer:
        """The next version of the weights, with the probe that proves their arrival."""
        self._version += 1
        response = ground_truth_target(self._train[0], self._loaded.codec, self._rules).token_ids[:_CANARY_TOKENS]
        tolerance = self._config.rollout_matching.vllm.sync.canary_tolerance
        return self._sender.offer(self._version, canary_probe(self._loaded, self._canary_prompt, self._train[0].images, response, tolerance=tolerance))

    def send_weights(self, offer: WeightOffer) -> SendReport:
        """Returns when the weights are out. Raises WeightSyncError."""
        return self._sender.send(offer)

    def save(self, folder: Path) -> None:
        save_checkpoint(self._loaded.model, self._loaded.processor, folder)

    def close(self) -> None:
        self._sender.close()
        if self._log is not None:
            self._log.close()

    # The held-out report

    def held_out_requests(self, step: int) -> list[RolloutRequest]:
        assert self._held_out is not None, "there is a report only with data.val"
        return self._held_out.requests(step)

    def score(self, rollouts: Sequence[Rollout]) -> list[Scene]:
        assert self._held_out is not None
        return self._held_out.score(rollouts)

    # Inside

    @property
    def _current(self) -> _StepInProgress:
        assert self._step is not None, "next_requests begins a step"
        return self._step

    def _load_held_out(self) -> HeldOut | None:
        path = self._config.data.val
        return None if path is None else HeldOut.of(self._config, load_samples(self._config, path), self._loaded)

    def _request(self, position: int) -> RolloutRequest:
        step = self._current
        sample = step.samples[position]
        return RolloutRequest(
            step=step.plan.step,
            position=position,
            sample_id=sample.sample_id,
            prompt_token_ids=self._encoder.request_ids(sample),
            images=sample.images,
            decode=self._decode,
            seed=request_seed(self._config.training.seed, step.plan.step, position),
        )

    def _take(self, prompt: EncodedPrompt, target: Target, rollout: Rollout | None = None) -> None:
        """Hand over the next position's target, and learn the rows that are due."""
        step = self._current
        position = step.num_targets
        step.num_targets += 1
        if self._log is not None:
            weights_L = self._text_weights[step.plan.channel].of(target.roles)
            self._log.write(rollout, step.samples[position], target, weights_L, position)
        for row in self._rows.add(Segment(position, prompt, target, step.plan.step, None if rollout is None else rollout.actor)):
            self._learn(row)

    def _learn(self, segments: list[Segment]) -> None:
        """Forward and backward of one row, and the comparison of its sampled tokens with the engine's."""
        step, model, channel = self._current, self._loaded.model, self._current.plan.channel
        segments = [segment if segment.step == step.plan.step else _without_logprobs(segment) for segment in segments]
        row = collate(segments, text_weights=self._text_weights[channel], rope_index=model.model.get_rope_index)
        result = backward_row(model, row.to(self._loaded.device), self._objectives[channel], self._sampled_under)
        if channel is Channel.B and compares_logprobs(self._decode):
            tolerance = self._config.rollout_matching.logprob_tolerance
            difference = check_logprobs(segments, result.sampled_logprobs_K, row.sampled.logprobs, tolerance=tolerance)
            step.tally.add_comparison(len(row.sampled.logprobs), difference)
        step.tally.add_row(row, result)

    def _metrics(self, step: _StepInProgress, update: UpdateResult, denominator: int) -> dict[str, float]:
        totals = step.tally.totals
        step.tally.divide_losses(denominator)
        totals.add("packing/num_carried", self._rows.num_carried)
        totals.raise_to("time/learn_s", sum(span.duration_s for span in step.spans if span.track == TRACK))
        if step.plan.channel is Channel.B:
            totals.raise_to("time/generate_s", step.generate_s)
        return {**totals.as_dict(), "optim/learning_rate": update.learning_rate, "optim/grad_norm": update.grad_norm}

    def _mark(self, name: str, started_s: float, **args: int) -> None:
        self._current.spans.append(Span(TRACK, name, started_s, time.time(), {"step": self._current.plan.step, **args}))


def _generation_spans(rollouts: Sequence[Rollout]) -> list[Span]:
    """One span per actor's share of the round."""
    spans = []
    for actor, share in groupby(rollouts, key=lambda rollout: rollout.actor):
        of_actor = list(share)
        start_s, end_s = min(r.started_s for r in of_actor), max(r.started_s + r.generate_s for r in of_actor)
        tokens = sum(len(r.response_token_ids) for r in of_actor)
        place = {"step": of_actor[0].step, "first_position": of_actor[0].position, "last_position": of_actor[-1].position}
        spans.append(Span(actor, "generate", start_s, end_s, {**place, "tokens": tokens}))
    return spans


def _without_logprobs(segment: Segment) -> Segment:
    """A carried segment: its log-probabilities are those of weights that have changed since."""
    return replace(segment, target=replace(segment.target, sampled_logprobs=()))
