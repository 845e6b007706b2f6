"""What packed rows need of transformers' models: logits of chosen positions, and a check.

Any text model of transformers may be trained. Some do not separate the segments of a packed row
(position embeddings of their own, layers with a state), or change logits after the head. A check at
a run's start detects both.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from learner.model.attention import packed_row
from shared.errors import ConfigError

_REMEDY = (
    "try model.attention=eager or model.attention=sdpa; if both fail, choose another model type,"
    " such as llama or qwen3"
)
_LENGTHS = (7, 19, 12)
_SEED = 20261129
# Of a log-probability, in nats. Right models differ by 1e-6 in float32; a model whose segments see
# each other by 0.01 and more.
_LARGEST_FLOAT32 = 1e-3
# Mean over the most probable tokens; logits between 16 and 32 are rounded to an eighth.
_MEAN_BFLOAT16 = 0.1

Forward = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
"""Calls a function that runs one forward of the model (`Parallel.forward`).

If the model is sharded, the call is a collective.
"""


def logits_of(model: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the function from hidden states [N, D] to logits [N, V] of a model of transformers.

    It is the model's head, with the scale or the cap that some families apply to logits. Another
    family may change logits in another way, which `check_packed_rows` detects.
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


def check_packed_rows(model: Any, path: str, dtype: str, forward: Forward) -> float:
    """Compare a packed row's log-probabilities with those of its segments, computed one by one.

    The segments run through the model's own forward, without packing. Return the largest difference
    of a log-probability, in nats. Weights do not change.

    Args:
        model: a text model of transformers, as the run has loaded it.
        path: the model's checkpoint, for the message.
        dtype: number type of the forward pass (`model.dtype`). A sharded model computes in it too,
            although its shards are float32.

    Raises:
        ConfigError: the model cannot compute packed rows, or not with the run's `model.attention`.
    """
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(_SEED)
    ids_T = torch.randint(vocabulary, (sum(_LENGTHS),), generator=generator).to(model.device)
    positions_T = torch.cat([torch.arange(length) for length in _LENGTHS]).to(model.device)

    def packed() -> torch.Tensor:
        with packed_row(_LENGTHS):
            body = model.base_model(
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                attention_mask=None,
                use_cache=False,
            )
        return logits_of(model)(body.last_hidden_state[0])

    def alone(part_L: torch.Tensor) -> torch.Tensor:
        logits_LV: torch.Tensor = model(input_ids=part_L[None], use_cache=False).logits[0]
        return logits_LV

    with torch.no_grad():
        try:
            row_TV = forward(packed).float().log_softmax(-1)
        except (AttributeError, TypeError) as error:
            kind = model.config.model_type
            wrong = f"model.path: {path} is a {kind} model, which cannot compute packed rows"
            raise ConfigError(f"{wrong} ({error}); {_REMEDY}") from error
        parts = [forward(partial(alone, part_L)) for part_L in ids_T.split(_LENGTHS)]
        alone_TV = torch.cat(parts).float().log_softmax(-1)
    difference_TV = (row_TV - alone_TV).abs()
    largest = float(difference_TV.max())
    if dtype == "float32":
        is_right = largest <= _LARGEST_FLOAT32
    else:
        of_best_T1 = difference_TV.gather(1, alone_TV.argmax(-1, keepdim=True))
        is_right = float(of_best_T1.mean()) <= _MEAN_BFLOAT16
    if not is_right:  # also for NaN
        token = int(difference_TV.amax(-1).nan_to_num(torch.inf).argmax())
        raise ConfigError(
            f"model.path: {path} is a {model.config.model_type} model, and a packed row of three"
            f" segments gives other results than the segments one by one: at token {token} of"
            f" {sum(_LENGTHS)} a log-probability differs by {largest:.2g}; {_REMEDY}"
        )
    return largest
