"""A language model's logits from its hidden states, without the rest of its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states [N, D] to logits [N, V] of a model of transformers.

    It is the model's head, with the scale or the cap that some families apply to logits. Other
    families may have others: `learner.model.row_check` compares with the whole forward.
    """
    config = model.config.get_text_config()
    divisor = getattr(config, "logits_scaling", None)  # Granite
    factor = getattr(config, "logit_scale", None)  # Cohere
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma 2 and later
    if divisor is None and factor is None and cap is None:
        head: Callable[[torch.Tensor], torch.Tensor] = model.lm_head
        return head

    def logits(hidden_ND: torch.Tensor) -> torch.Tensor:
        logits_NV = model.lm_head(hidden_ND)
        if divisor is not None:
            logits_NV = logits_NV / divisor
        if factor is not None:
            logits_NV = logits_NV * factor
        if cap is not None:
            logits_NV = torch.tanh(logits_NV / cap) * cap
        return logits_NV

    return logits
