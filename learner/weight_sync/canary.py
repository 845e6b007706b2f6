"""The learner's half of the canary: what it thinks of a fixed sequence with its current weights
(DESIGN 9).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import compress
from pathlib import Path
from typing import Protocol

import torch

from learner.model.adapters import without_adapter
from learner.model.loading import LoadedModel
from learner.segments import EncodedPrompt
from shared.errors import LearnerError
from shared.records import ImageRef
from shared.weight_sync.canary import CanaryProbe
from shared.weight_sync.differences import Differences
from shared.weight_sync.phases import SyncPhase


class AsksCanary(Protocol):
    """The proof of one offer."""

    def question(self) -> CanaryProbe:
        """The probe without its log-probabilities: no forward."""
        ...

    def logprobs(self) -> tuple[float, ...]:
        """Of each token of the question but the first, under the learner's weights as they are now.
        Raises LearnerError where one is no number.
        """
        ...

    def probe(self) -> CanaryProbe:
        """Both, and what the learner thinks without an adapter that is sent by itself."""
        ...


@dataclass(frozen=True, slots=True)
class ComputedCanary:
    """A probe that is there already."""

    computed: CanaryProbe

    def question(self) -> CanaryProbe:
        return replace(self.computed, expected_logprobs=None)

    def logprobs(self) -> tuple[float, ...]:
        assert self.computed.expected_logprobs is not None
        return self.computed.expected_logprobs

    def probe(self) -> CanaryProbe:
        return self.computed


class Canary:
    """One sequence, a prompt and the beginning of a response, that every sync is proved by."""

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
        """`proves_adapter`: the engines are sent the adapter by itself, and its effect is compared
        too.

        `run_dir`: where no `tolerance` is given, the noise that a record in this folder holds is
        the first offer's already. Raises ConfigError for a record that says something else.
        """
        self._loaded = loaded
        self._prompt = prompt
        self._images = tuple(image.with_data() for image in images)
        self._response_ids = response_ids
        self._tolerance = tolerance
        self._proves_adapter = proves_adapter
        self.noise = Differences.kept(run_dir) if tolerance is None else None
        """The noise that offers in bfloat16 bring; None until the first sync has measured it."""
        self._base_logprobs: tuple[float, ...] | None = None

    def probe(self) -> CanaryProbe:
        """One forward of the model, and the first time another one, since what is under an adapter
        stays.
        """
        if self._proves_adapter and self._base_logprobs is None:
            with without_adapter(self._loaded.model):
                self._base_logprobs = self.logprobs()
        return replace(
            self.question(), expected_logprobs=self.logprobs(), base_logprobs=self._base_logprobs
        )

    def question(self) -> CanaryProbe:
        of_images = self._prompt.modality_P.bool().tolist()
        return CanaryProbe(
            token_ids=(*self._prompt.request_token_ids, *self._response_ids),
            images=self._images,
            expanded_token_ids=(*self._prompt.token_ids, *self._response_ids),
            expected_logprobs=None,
            tolerance=self._tolerance,
            placeholder_ids=tuple(sorted(set(compress(self._prompt.token_ids, of_images)))),
            noise=self.noise,
        )

    def logprobs(self) -> tuple[float, ...]:
        """One forward of the model."""
        device = self._loaded.device
        ids_1T = torch.tensor([(*self._prompt.token_ids, *self._response_ids)], device=device)
        with torch.no_grad():
            logits_TV = self._loaded.model(
                input_ids=ids_1T, **self._image_arguments(), use_cache=False
            ).logits[0]
            logprobs = torch.log_softmax(logits_TV[:-1].float(), dim=-1).gather(
                1, ids_1T[0, 1:, None]
            )[:, 0]
        return _finite(logprobs.tolist())

    def _image_arguments(self) -> dict[str, torch.Tensor]:
        """Nothing without images: a text model takes none, and no vision tower takes none of no
        images.
        """
        prompt, device = self._prompt, self._loaded.device
        if not len(prompt.image_grid_I3):
            return {}
        return {
            "mm_token_type_ids": (
                torch.cat(
                    [prompt.modality_P, prompt.modality_P.new_zeros(len(self._response_ids))]
                )[None].to(device)
            ),
            "pixel_values": prompt.pixel_values_RD.to(device, self._loaded.model.dtype),
            "image_grid_thw": prompt.image_grid_I3.to(device),
        }


def _finite(logprobs: list[float]) -> tuple[float, ...]:
    """The same. Raises LearnerError where one is not finite: no engine could agree with it."""
    for i, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise LearnerError(
                f"its log-probability of the canary's token {i + 1} is {logprob}: the weights have"
                " diverged, and are not saved; go on from an earlier checkpoint with a lower"
                " training.learning_rate or training.max_grad_norm",
                phase=SyncPhase.CANARY,
            )
    return tuple(logprobs)
