"""Held-out samples: what the engines are asked about them, and what is read from the answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from learner.checks import check_prompt
from learner.data.fitting import require_lengths
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
    """The held-out samples: greedy requests for them, and their answers as scenes to be scored.

    Example: 50 samples on 2 ranks: `requests(step, range(25, 50))` are the second rank's, and
    `score(25 rollouts)` reads its answers strictly, one `Scene` each.
    """

    def __init__(
        self, config: RunConfig, datasets: Sequence[Dataset], tokens: LoadedTokens
    ) -> None:
        """Take the first `data.max_val_samples` of each data set. Raises as `require_lengths`."""
        self.codec = tokens.codec
        self.encoder = PromptEncoder(tokens.processor, config.prompts)
        self._geometry = config.geometry
        self._format = config.answer_format.for_pictures(self.encoder.picture_resize)
        self._run_seed = config.training.seed
        self._score_by = config.evaluation.score
        self.fittings = [
            require_lengths(
                dataset,
                self.encoder,
                tokens.codec,
                max_new_tokens=config.rollout_matching.max_new_tokens,
                global_max_length=config.global_max_length,
                on_bad_row=config.data.on_bad_row,
                taught=False,
                most=config.data.max_val_samples,
                answer_format=self._format,
                checkpoint=Path(config.model.path),
            )
            for dataset in datasets
        ]
        """One for each file."""
        self.samples = Joined([fitting.samples for fitting in self.fittings])
        """In the order of the validation files; a request's position is its sample's place here."""
        decode = config.rollout_matching.decode_settings(
            stop_token_ids=tokens.stop_token_ids, banned_token_ids=tokens.banned_token_ids
        )
        # Greedy whatever training does: reports of two checkpoints then differ by weights only.
        # Probabilities are asked for only if they are read: they cost the engine time.
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
        """Make one request per sample, in order: of all, or of those at `positions`."""
        request = partial(self.encoder.request, decode=self._decode, step=step)
        return [
            request(self.samples[position], position=position, run_seed=self._run_seed)
            for position in (range(len(self.samples)) if positions is None else positions)
        ]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scene]:
        """Read the answers, one scene per rollout, in order.

        Raises RolloutError when an engine saw another prompt than this side encodes.
        """
        return [self._scene(rollout) for rollout in rollouts]

    def _scene(self, rollout: Rollout) -> Scene:
        sample = self.samples[rollout.position]
        # The pictures are encoded again: an engine that resized them otherwise must not pass.
        check_prompt(rollout, self.encoder.encode(sample))
        answer_format = self._format.of(sample)
        parsed = parse_rollout(
            rollout.response_token_ids,
            self.codec,
            geometry=self._geometry,
            answer_format=answer_format,
        )
        # Bytes are joined before they are decoded: a token may end inside a character.
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
        """Score an object, 0..1, by the engine's log-probabilities at temperature 1."""
        if self._score_by == "constant":
            return 1.0
        assert rollout.logprobs is not None, "requested so"
        # A mean: a product would rank polygons below boxes for their number of coordinates.
        return fmean(math.exp(rollout.logprobs[position]) for position in found.coord_positions)
