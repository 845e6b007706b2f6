"""The held-out set: requests for answers to its samples, and the parsed answers to be scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from learner.checks import check_prompt
from learner.data.fitting import RowLimits, require_lengths
from learner.model.loading import LoadedTokens
from learner.segments import PromptEncoder
from shared.config import RunConfig
from shared.dataset import Dataset, Joined
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import Scene
from shared.grounding.objects import ParsedObject
from shared.grounding.parsing import parse_rollout
from shared.rollouts import DecodeMode, Rollout, RolloutRequest


class HeldOut:
    """The held-out set: makes greedy requests for its samples, and parses the answers.

    Example: 50 samples on 2 ranks: `requests(step, range(25, 50))` are the second rank's requests,
    and `score(25 rollouts)` parses its answers strictly, into one `Scene` each.
    """

    def __init__(
        self, config: RunConfig, datasets: Sequence[Dataset], tokens: LoadedTokens
    ) -> None:
        """Take the first `data.max_val_samples` samples of each dataset.

        Raises as `require_lengths` does, for example if a sample is too long.
        """
        self.codec = tokens.codec
        self.encoder = PromptEncoder(tokens.processor, config.prompts)
        self._geometry = config.geometry
        self._format = config.answer_format.for_pictures(self.encoder.picture_resize)
        self._run_seed = config.training.seed
        self._score_by = config.evaluation.score
        limits = RowLimits(
            config.rollout_matching.max_new_tokens,
            config.global_max_length,
            self._format,
            config.data.on_bad_row,
            taught=False,
            most=config.data.max_val_samples,
        )
        checkpoint = Path(config.model.path)
        self.fittings = [
            require_lengths(dataset, self.encoder, tokens.codec, limits, checkpoint)
            for dataset in datasets
        ]
        """The checked samples of each validation file."""
        self.samples = Joined([fitting.samples for fitting in self.fittings])
        """All held-out samples, in the order of the validation files. A request's position is the
        index of its sample."""
        decode = config.rollout_matching.decode_settings(
            stop_token_ids=tokens.stop_token_ids, banned_token_ids=tokens.banned_token_ids
        )
        # Always greedy, so that reports of two checkpoints differ only by their weights.
        # Log-probabilities cost engine time and are requested only if they are read.
        self._decode = replace(
            decode,
            mode=DecodeMode.GREEDY,
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            num_beams=1,
            return_logprobs=self._score_by == "coord_probability",
        )

    def requests(self, step: int, positions: range | None = None) -> list[RolloutRequest]:
        """Return one greedy request per sample, for all samples or for those at `positions`.

        `step` is the number of finished steps. Seeds of the requests depend on it.
        """
        request = partial(self.encoder.request, decode=self._decode, step=step)
        return [
            request(self.samples[position], position=position, run_seed=self._run_seed)
            for position in (range(len(self.samples)) if positions is None else positions)
        ]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scene]:
        """Parse the answers. Return one scene per rollout: the sample and the objects found.

        Each object has a confidence.

        Raises RolloutError if the engine read other prompt tokens than the learner encodes.
        """
        return [self._scene(rollout) for rollout in rollouts]

    def _scene(self, rollout: Rollout) -> Scene:
        sample = self.samples[rollout.position]
        # Images are encoded again to detect an engine that resizes them differently.
        check_prompt(rollout, self.encoder.encode(sample))
        answer_format = self._format.of(sample)
        parsed = parse_rollout(
            rollout.response_token_ids,
            self.codec,
            geometry=self._geometry,
            answer_format=answer_format,
        )
        # Join the bytes before decoding them: a token may end inside a character.
        text = b"".join(map(self.codec.piece_bytes, rollout.response_token_ids))
        return Scene(
            position=rollout.position,
            sample=sample,
            objects=tuple(
                ScoredObject(
                    found.kind,
                    found.bins,
                    found.desc,
                    self._confidence(found, rollout),
                    answer_format.pixels(found, sample),
                )
                for found in parsed.objects
            ),
            dropped=tuple(dropped.reason for dropped in parsed.dropped),
            num_behind=parsed.num_behind,
            truncated=parsed.truncated,
            text=text.decode(errors="replace"),
            finish_reason=rollout.finish_reason,
            answer_format=self._format,
        )

    def _confidence(self, found: ParsedObject, rollout: Rollout) -> float:
        """Return an object's score, 0..1. It is the mean probability of its coordinate tokens at
        temperature 1, or 1 with `evaluation.score: constant`.
        """
        if self._score_by == "constant":
            return 1.0
        assert rollout.logprobs is not None, "the request asks for log-probabilities"
        # A mean: with a product, polygons would rank below boxes due to their many coordinates.
        return fmean(math.exp(rollout.logprobs[position]) for position in found.coord_positions)
