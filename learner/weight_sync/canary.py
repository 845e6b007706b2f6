"""The learner's side of the canary, a fixed prompt that tests every weight sync (decision 38)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from itertools import compress
from pathlib import Path

import torch

from learner.model.adapters import without_adapter
from learner.model.loading import LoadedModel
from learner.segments import EncodedPrompt
from shared.errors import LearnerError
from shared.records import ImageRef
from shared.tokens.pictures import EncodedImages
from shared.weight_sync.canary import CanaryProbe, Differences, Logprobs
from shared.weight_sync.phases import SyncPhase


@dataclass(eq=False, repr=False)
class Canary:
    """A prompt and the beginning of a response, with which every weight sync is verified.

    Learner and engines compute the log-probabilities of the canary's tokens with the new weights,
    and these must agree. Raises ConfigError if the noise file in `run_dir` is damaged.
    """

    loaded: LoadedModel
    prompt: EncodedPrompt
    images: tuple[ImageRef, ...]
    response_ids: tuple[int, ...]
    _: KW_ONLY
    tolerance: float | None
    """Permitted difference of a token's log-probability in float32, in nats; None in bfloat16: the
    limits follow from `noise`."""
    is_raised_by_noise: bool = False
    """Whether `noise` may raise `tolerance`. False if the user has set the tolerance."""
    proves_adapter: bool
    """Whether engines receive only the adapter. Then the log-probabilities without the adapter are
    compared too, to verify that engines apply it."""
    run_dir: InitVar[Path]
    noise: Differences | None = field(init=False, default=None)
    """How far log-probabilities of learner and engine differ by rounding; None until the first
    sync has measured it."""
    _base_logprobs: Logprobs | None = field(init=False, default=None)

    def __post_init__(self, run_dir: Path) -> None:
        self.images = tuple(image.with_data() for image in self.images)
        if self.tolerance is None or self.is_raised_by_noise:
            self.noise = Differences.load(run_dir)

    def question(self) -> CanaryProbe:
        """Return the canary as engines get it, without the learner's log-probabilities.

        Does not run a forward.
        """
        is_placeholder = self.prompt.modality_P.bool().tolist()
        return CanaryProbe(
            token_ids=(*self.prompt.request_token_ids, *self.response_ids),
            images=self.images,
            expanded_token_ids=(*self.prompt.token_ids, *self.response_ids),
            expected_logprobs=None,
            tolerance=self.tolerance,
            is_raised_by_noise=self.is_raised_by_noise,
            placeholder_ids=tuple(sorted(set(compress(self.prompt.token_ids, is_placeholder)))),
            noise=self.noise,
        )

    def probe(
        self, forward: Callable[[Callable[[], Logprobs]], Logprobs] = lambda score: score()
    ) -> CanaryProbe:
        """Return the canary as engines get it, with the learner's log-probabilities.

        If weight syncs send only the adapter, it also contains the log-probabilities that the model
        has without the adapter. `forward` calls a function that runs one forward
        (`Parallel.forward`). If the model is sharded, this is a collective.
        """
        # Computed only the first time: the weights under an adapter never change.
        if self.proves_adapter and self._base_logprobs is None:
            with without_adapter(self.loaded.model):
                self._base_logprobs = forward(self.logprobs)
        return replace(
            self.question(),
            expected_logprobs=forward(self.logprobs),
            base_logprobs=self._base_logprobs,
        )

    def logprobs(self) -> Logprobs:
        """Return the log-probability of each canary token except the first, with current weights.

        Raises LearnerError if a value is not finite, because no engine could agree with it.
        """
        prompt = self.prompt
        device = self.loaded.device
        token_ids = (*prompt.token_ids, *self.response_ids)
        ids_1T = torch.tensor([token_ids], device=device)
        vision: dict[str, torch.Tensor] = {}
        # Without images, do not call a vision tower with empty pixel values.
        if len(prompt.image_grid_I3):
            pixel_values_RD = prompt.pixel_values_RD.to(device, self.loaded.model.dtype)
            vision = EncodedImages(pixel_values_RD, prompt.image_grid_I3.to(device)).arguments()
            if self.loaded.rope_index is not None:
                of_response = prompt.modality_P.new_zeros(len(self.response_ids))
                modality_1T = torch.cat([prompt.modality_P, of_response])[None]
                vision["mm_token_type_ids"] = modality_1T.to(device)
        with torch.no_grad():
            logits_TV = self.loaded.model(input_ids=ids_1T, **vision, use_cache=False).logits[0]
            # In float32: rounding to the 8 bits of bfloat16 here would add noise.
            logprobs_TV = torch.log_softmax(logits_TV[:-1].float(), dim=-1)
            logprobs = logprobs_TV.gather(1, ids_1T[0, 1:, None])[:, 0].tolist()
        for i, logprob in enumerate(logprobs):
            if not math.isfinite(logprob):
                raise LearnerError(
                    f"the log-probability of the canary's token {i + 1} is {logprob}: the weights"
                    " have diverged and are not saved; resume from an earlier checkpoint with a"
                    " lower training.learning_rate or training.max_grad_norm",
                    phase=SyncPhase.CANARY,
                )
        return tuple(logprobs)
