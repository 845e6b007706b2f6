"""The held-out samples: greedy requests for them, and what the answers say, parsed strictly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

from learner.checks import check_prompt
from learner.lengths import require_lengths
from learner.loading import LoadedTokens
from learner.rules import target_rules
from learner.segments import PromptEncoder
from shared.coco import ScoredObject
from shared.config import RunConfig
from shared.dataset import Dataset
from shared.evaluation import Scene
from shared.grounding.objects import ParsedObject
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind
from shared.rollouts import DecodeMode, DecodeSettings, Rollout, RolloutRequest
from shared.tokens.vocabulary import TokenCodec


@dataclass(frozen=True, slots=True)
class HeldOut:
    """How the held-out samples are asked for, and their rollouts read."""

    samples: Dataset
    """In the order of the validation file; a request's position is its sample's place here."""
    encoder: PromptEncoder
    codec: TokenCodec
    decode: DecodeSettings
    """Greedy."""
    geometry: frozenset[GeometryKind]
    run_seed: int
    score_by: Literal["constant", "coord_probability"]

    @classmethod
    def of(cls, config: RunConfig, dataset: Dataset, tokens: LoadedTokens) -> HeldOut:
        """The first `data.max_val_samples` of `dataset`, as this configuration prompts and decodes. Raises as `require_lengths` does."""
        encoder = PromptEncoder.of(config, tokens.processor)
        samples, _ = require_lengths(
            dataset,
            encoder,
            tokens.codec,
            max_new_tokens=config.rollout_matching.max_new_tokens,
            global_max_length=config.global_max_length,
            on_bad_row=config.data.on_bad_row,
            taught=False,
            most=config.data.max_val_samples,
        )
        decode = config.rollout_matching.decode_settings(stop_token_ids=(tokens.codec.eos_token_id,), banned_token_ids=tokens.banned_token_ids)
        score_by = config.evaluation.score
        return cls(
            samples,
            encoder,
            tokens.codec,
            replace(decode, mode=DecodeMode.GREEDY, temperature=0.0, top_p=1.0, top_k=-1, num_beams=1, return_logprobs=score_by == "coord_probability"),
            target_rules(config).geometry,
            config.training.seed,
            score_by,
        )

    def requests(self, step: int, positions: range | None = None) -> list[RolloutRequest]:
        """One per sample, in order: of all, or of those at `positions`. Reads no image."""
        return [
            self.encoder.request(self.samples[position], self.decode, step=step, position=position, run_seed=self.run_seed)
            for position in (range(len(self.samples)) if positions is None else positions)
        ]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scene]:
        """One scene per rollout, in order. RolloutError when an engine saw another prompt than this side encodes."""
        return [self._scene(rollout) for rollout in rollouts]

    def _scene(self, rollout: Rollout) -> Scene:
        sample = self.samples[rollout.position]
        check_prompt(rollout, self.encoder.encode(sample))
        parsed = parse_rollout(rollout.response_token_ids, self.codec, geometry=self.geometry)
        return Scene(
            position=rollout.position,
            sample=sample,
            objects=tuple(ScoredObject(found.kind, found.bins, found.desc, self._confidence(found, rollout)) for found in parsed.objects),
            dropped=tuple(dropped.reason for dropped in parsed.dropped),
            truncated=parsed.truncated,
            text=b"".join(map(self.codec.piece_bytes, rollout.response_token_ids)).decode(errors="replace"),
            finish_reason=rollout.finish_reason,
        )

    def _confidence(self, found: ParsedObject, rollout: Rollout) -> float:
        """0..1. What the engine gave is under the ban of vision placeholders and the repetition penalty, which the report names where there is one;
        at temperature 1: greedy decoding divides by nothing.
        """
        if self.score_by == "constant":
            return 1.0
        assert rollout.logprobs is not None, "requested by `of`"
        return fmean(math.exp(rollout.logprobs[position]) for position in found.coord_positions)
