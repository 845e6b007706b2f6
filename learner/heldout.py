"""The report on held-out samples: greedy rollouts, parsed strictly, scored against the ground truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from learner.checks import check_prompt
from learner.segments import PromptEncoder
from shared.evaluation import DetectionCounts, score_detections
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind, Sample
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest
from shared.seeds import request_seed
from shared.tokens.vocabulary import TokenCodec


@dataclass(frozen=True, slots=True)
class HeldOut:
    samples: Sequence[Sample]
    encoder: PromptEncoder
    codec: TokenCodec
    decode: DecodeSettings
    geometry: frozenset[GeometryKind]
    run_seed: int

    def requests(self, step: int) -> list[RolloutRequest]:
        """One greedy request per sample; position is the sample's place in the validation file."""
        greedy = replace(self.decode, mode=DecodeMode.GREEDY, temperature=0.0, top_p=1.0, top_k=-1, num_beams=1, return_logprobs=False)
        return [
            RolloutRequest(
                step=step,
                position=position,
                sample_id=sample.sample_id,
                prompt_token_ids=self.encoder.request_ids(sample),
                images=sample.with_image_data().images,
                decode=greedy,
                seed=request_seed(self.run_seed, step, position),
            )
            for position, sample in enumerate(self.samples)
        ]

    def score(self, rollouts: Sequence[Rollout]) -> DetectionCounts:
        """Counts over these rollouts, each with the sample at its position."""
        total = DetectionCounts()
        for rollout in rollouts:
            sample = self.samples[rollout.position]
            check_prompt(rollout, self.encoder.encode(sample))
            parsed = parse_rollout(rollout.response_token_ids, self.codec, geometry=self.geometry)
            total = total + score_detections(parsed.objects, sample.objects, num_dropped=len(parsed.dropped))
        return total
