"""Conversion of rollout requests to vLLM's parameters and images, without importing vllm."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image, UnidentifiedImageError

from shared.errors import RolloutError
from shared.prompts import on_white, open_picture
from shared.records import ImageRef
from shared.rollouts import DecodeMode, DecodeSettings, FinishReason, RolloutRequest

if TYPE_CHECKING:
    import torch

    from shared.tokens.pictures import Pictures

FINISH_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "repetition": FinishReason.REPETITION,
}
BAN = -100.0
"""Logit bias of a banned token: the lowest that vLLM accepts; `exp(-100)` vanishes in fp32."""
# Parameters that score a prompt. vLLM must sample one token; it is ignored.
PROBE_FIELDS: dict[str, object] = {
    "temperature": 0.0,
    "max_tokens": 1,
    "prompt_logprobs": 0,
    "ignore_eos": True,
    "detokenize": False,
}


def sampling_fields(decode: DecodeSettings, seed: int) -> dict[str, object]:
    """Return the arguments of vLLM's `SamplingParams` for a request with these settings.

    They include every parameter that a server could otherwise replace by its own default.
    """
    assert decode.mode is not DecodeMode.BEAM, "vLLM has a separate method for beam search"
    fields: dict[str, object] = {
        "temperature": decode.temperature,
        "top_p": decode.top_p,
        "top_k": decode.top_k,
        "repetition_penalty": decode.repetition_penalty,
        "max_tokens": decode.max_new_tokens,
        # A seed per request: any engine generates the same rollout, in any batch.
        "seed": seed,
        "stop_token_ids": list(decode.stop_token_ids),
        "ignore_eos": True,  # only the stop tokens of the request count, not the tokenizer's
        # The learner masks the same ids before it compares log-probabilities.
        "logit_bias": dict.fromkeys(decode.banned_token_ids, BAN) or None,
        "logprobs": 0 if decode.return_logprobs else None,  # 0: only of the sampled token
        # The learner reads token ids, so decoding text would only cost time.
        "detokenize": False,
    }
    if decode.stop:
        # vLLM searches its decoded text, which includes special tokens as in the backend `hf`.
        fields |= {
            "stop": list(decode.stop),
            "include_stop_str_in_output": True,
            "detokenize": True,
            "skip_special_tokens": False,
        }
    return fields


def finish_reason(reason: str | None, request: RolloutRequest, actor: str) -> FinishReason:
    """Return the `FinishReason` for vLLM's finish reason of an answer.

    Raises RolloutError if the answer is incomplete, for example for the reason `abort`.
    """
    if reason not in FINISH_REASONS:
        message = (
            f"sample {request.sample_id}: vLLM ended its answer early with the reason {reason!r};"
            " see the engine's log"
        )
        raise RolloutError(message, actor=actor, phase="generate")
    return FINISH_REASONS[reason]


def decode_images(refs: Sequence[ImageRef], sample_id: str, *, actor: str) -> list[Image.Image]:
    """Decode the images of a prompt, in order. Raises RolloutError that names sample and image."""
    # In the order of the prompt's placeholders.
    images = []
    for i, ref in enumerate(refs):
        assert ref.data is not None, f"image {i} of {sample_id} was sent without its bytes"
        try:
            images.append(decode_image(ref.data))
        except ValueError as error:
            file = "" if ref.path is None else f" ({ref.path})"
            message = f"image {i} of sample {sample_id}{file} cannot be decoded: {error}"
            raise RolloutError(message, actor=actor, phase="generate") from error
    return images


class PromptInputs(NamedTuple):
    """A prompt as inputs of the model's forward pass."""

    token_ids: tuple[int, ...]
    """[P] token ids, with expanded image placeholders and without padding."""
    features: dict[str, torch.Tensor]
    """The image arguments of the model's forward pass; empty without images."""


def encode_prompt(
    request: RolloutRequest, pictures: Pictures | None, *, actor: str
) -> PromptInputs:
    """Expand a request's image placeholders as the checkpoint's processor does.

    `pictures`: the checkpoint's image processing; None for a text model.

    Raises RolloutError if the images cannot be decoded, or there are more or fewer than
    placeholders.
    """
    if pictures is None:
        return PromptInputs(request.prompt_token_ids, {})
    images = decode_images(request.images, request.sample_id, actor=actor)
    # The model would silently read a placeholder without an image as text.
    num_pads = request.prompt_token_ids.count(pictures.token_id)
    if num_pads != len(images):
        message = f"sample {request.sample_id} has {len(images)} images and {num_pads} placeholders"
        raise RolloutError(message, actor=actor, phase="generate")
    if not images:
        return PromptInputs(request.prompt_token_ids, {})
    encoded = pictures.encode(images)
    token_ids = pictures.expand(request.prompt_token_ids, encoded.image_grid_I3)
    return PromptInputs(token_ids, encoded.arguments())


def open_image(data: bytes) -> Image.Image:
    """Open an image to measure it; only its header is read. Raises ValueError with the reason."""
    return _read(lambda: open_picture(data))


def decode_image(data: bytes) -> Image.Image:
    """Decode an image file to upright RGB, on white if transparent. Raises ValueError."""
    image = _read(lambda: on_white(open_picture(data)))
    # Otherwise vLLM would rotate the image again by the orientation in `info`.
    image.info = {}
    return image


def png_of(pixels: Image.Image) -> bytes:
    """Encode an image as PNG, which is lossless."""
    file = io.BytesIO()
    pixels.save(file, "PNG")
    return file.getvalue()


def _read(read: Callable[[], Image.Image]) -> Image.Image:
    try:
        return read()
    except UnidentifiedImageError as error:
        # Pillow's own message contains the repr of the file object.
        raise ValueError("its format is not known") from error
    except MemoryError:
        raise
    except Exception as error:
        # On damaged files Pillow's decoders raise many types of errors (OSError, SyntaxError,
        # struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error
