"""The learner's half of the canary: its log-probabilities of a fixed sequence (decision 38)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import compress
from pathlib import Path

import torch

from learner.model.adapters import without_adapter
from learner.model.loading import LoadedModel
from learner.segments import EncodedPrompt
from shared.errors import LearnerError
from shared.records import ImageRef
from shared.weight_sync.canary import CanaryProbe, Differences
from shared.weight_sync.phases import SyncPhase


class Canary:
    """A prompt and the beginning of a response, by which every sync is proved."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompt: EncodedPrompt,
        images: tuple[ImageRef, ...],
        response_ids: tuple[int, ...],
        *,
        tolerance: float | None,
        proves_adapter: bool,
        run_dir: Path,
    ) -> None:
        """Keep the sequence; compute nothing yet.

        Args:
            tolerance: of a token, as in float32; None: bounds follow from the noise.
            proves_adapter: engines are sent the adapter alone, and its effect is compared too.
            run_dir: a noise that is recorded here is the first offer's already.
        """
        self._loaded = loaded
        self._prompt = prompt
        self._images = tuple(image.with_data() for image in images)
        self._response_ids = response_ids
        self._tolerance = tolerance
        self._proves_adapter = proves_adapter
        self.noise = Differences.load(run_dir) if tolerance is None else None
        """The noise that offers in bfloat16 bring; None until the first sync has measured it."""
        self._base_logprobs: tuple[float, ...] | None = None

    def question(self) -> CanaryProbe:
        """Return the probe without its log-probabilities: no forward."""
        is_placeholder = self._prompt.modality_P.bool().tolist()
        return CanaryProbe(
            token_ids=(*self._prompt.request_token_ids, *self._response_ids),
            images=self._images,
            expanded_token_ids=(*self._prompt.token_ids, *self._response_ids),
            expected_logprobs=None,
            tolerance=self._tolerance,
            placeholder_ids=tuple(sorted(set(compress(self._prompt.token_ids, is_placeholder)))),
            noise=self.noise,
        )

    def probe(self) -> CanaryProbe:
        """Return the probe with its log-probabilities, and those without an adapter sent alone."""
        # The first time alone: the weights under an adapter never change.
        if self._proves_adapter and self._base_logprobs is None:
            with without_adapter(self._loaded.model):
                self._base_logprobs = self.logprobs()
        return replace(
            self.question(), expected_logprobs=self.logprobs(), base_logprobs=self._base_logprobs
        )

    def logprobs(self) -> tuple[float, ...]:
        """Score each token of the question but the first, under the weights as they are.

        Raises LearnerError where one is not finite: no engine could agree with it.
        """
        prompt = self._prompt
        device = self._loaded.device
        token_ids = (*prompt.token_ids, *self._response_ids)
        ids_1T = torch.tensor([token_ids], device=device)
        vision: dict[str, torch.Tensor] = {}
        # Without images a vision tower must not be called with empty pixel values.
        if len(prompt.image_grid_I3):
            of_response = prompt.modality_P.new_zeros(len(self._response_ids))
            vision = {
                "mm_token_type_ids": torch.cat([prompt.modality_P, of_response])[None].to(device),
                "pixel_values": prompt.pixel_values_RD.to(device, self._loaded.model.dtype),
                "image_grid_thw": prompt.image_grid_I3.to(device),
            }
        with torch.no_grad():
            logits_TV = self._loaded.model(input_ids=ids_1T, **vision, use_cache=False).logits[0]
            # In float32: bfloat16 has 8 bits, and rounding them here would add to the noise.
            logprobs_TV = torch.log_softmax(logits_TV[:-1].float(), dim=-1)
            logprobs = logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0].tolist()
        for i, logprob in enumerate(logprobs):
            if not math.isfinite(logprob):
                raise LearnerError(
                    f"its log-probability of the canary's token {i + 1} is {logprob}: the weights"
                    " have diverged, and are not saved; go on from an earlier checkpoint with a"
                    " lower training.learning_rate or training.max_grad_norm",
                    phase=SyncPhase.CANARY,
                )
        return tuple(logprobs)
