"""The learner's half of the canary: what it thinks of a fixed sequence with its current weights (DESIGN 9)."""

from __future__ import annotations

import torch

from learner.loading import LoadedModel
from learner.segments import EncodedPrompt
from shared.canary import CanaryProbe
from shared.records import ImageRef


def canary_probe(loaded: LoadedModel, prompt: EncodedPrompt, images: tuple[ImageRef, ...], response_ids: tuple[int, ...], *, tolerance: float) -> CanaryProbe:
    """A probe of prompt and response under the learner's weights as they are now."""
    token_ids = (*prompt.token_ids, *response_ids)
    modality = torch.cat([prompt.modality_P, prompt.modality_P.new_zeros(len(response_ids))])
    device = loaded.device
    ids_1T = torch.tensor([token_ids], device=device)
    with torch.no_grad():
        logits_TV = loaded.model(
            input_ids=ids_1T,
            mm_token_type_ids=modality[None].to(device),
            pixel_values=prompt.pixel_values_RD.to(device, loaded.model.dtype),
            image_grid_thw=prompt.image_grid_I3.to(device),
            use_cache=False,
        ).logits[0]
        logprobs = torch.log_softmax(logits_TV[:-1].float(), dim=-1).gather(1, ids_1T[0, 1:, None])[:, 0]
    return CanaryProbe(
        token_ids=(*prompt.request_token_ids, *response_ids),
        images=tuple(image.with_data() for image in images),
        expanded_token_ids=token_ids,
        expected_logprobs=tuple(logprobs.tolist()),
        tolerance=tolerance,
    )
