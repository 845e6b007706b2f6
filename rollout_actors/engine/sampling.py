"""Sampling fields, finish reasons and images in vLLM's terms, without importing vllm."""

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
"""Bias on the logit of a banned id: the lowest that vLLM accepts; `exp(-100)` vanishes in fp32."""
# They score a prompt; the one token sampled after it is ignored.
PROBE_FIELDS: dict[str, object] = {
    "temperature": 0.0,
    "max_tokens": 1,
    "prompt_logprobs": 0,
    "ignore_eos": True,
    "detokenize": False,
}


def sampling_fields(decode: DecodeSettings, seed: int) -> dict[str, object]:
    """Return the `SamplingParams` of a request: every field that a server's defaults could fill."""
    assert decode.mode is not DecodeMode.BEAM, "beams are another call of vLLM"
    fields: dict[str, object] = {
        "temperature": decode.temperature,
        "top_p": decode.top_p,
        "top_k": decode.top_k,
        "repetition_penalty": decode.repetition_penalty,
        "max_tokens": decode.max_new_tokens,
        # Of the request, not of the engine: the same rollout comes again from any engine, in any
        # batch.
        "seed": seed,
        "stop_token_ids": list(decode.stop_token_ids),
        "ignore_eos": True,  # the request names its stop tokens; the tokenizer's do not add to them
        # The learner masks the same ids before it compares log-probabilities.
        "logit_bias": dict.fromkeys(decode.banned_token_ids, BAN) or None,
        "logprobs": 0 if decode.return_logprobs else None,  # 0: of the sampled token alone
        # The learner reads token ids; text would only cost the engine time.
        "detokenize": False,
    }
    if decode.stop:
        # vLLM looks for them in the text that it writes, with special tokens as `hf` reads them.
        fields |= {
            "stop": list(decode.stop),
            "include_stop_str_in_output": True,
            "detokenize": True,
            "skip_special_tokens": False,
        }
    return fields


def finish_reason(reason: str | None, request: RolloutRequest, actor: str) -> FinishReason:
    """Translate vLLM's reason. Raises RolloutError where it gave up (`abort`, `error`)."""
    if reason not in FINISH_REASONS:
        message = (
            f"sample {request.sample_id} was ended with {reason!r}, and half an answer is none; see"
            " the engine's log"
        )
        raise RolloutError(message, actor=actor, phase="generate")
    return FINISH_REASONS[reason]


def decode_images(refs: Sequence[ImageRef], sample_id: str, *, actor: str) -> list[Image.Image]:
    """Decode every image of a sample. Raises RolloutError naming sample and image."""
    # In the order of the prompt's placeholders.
    images = []
    for i, ref in enumerate(refs):
        assert ref.data is not None, f"image {i} of {sample_id} travels without its bytes"
        try:
            images.append(decode_image(ref.data))
        except ValueError as error:
            file = "" if ref.path is None else f" ({ref.path})"
            message = f"image {i} of sample {sample_id}{file} cannot be decoded: {error}"
            raise RolloutError(message, actor=actor, phase="generate") from error
    return images


class EncodedPrompt(NamedTuple):
    """A prompt as the model takes it."""

    token_ids: tuple[int, ...]
    """[P] without padding."""
    features: dict[str, torch.Tensor]
    """The image arguments of the model's forward pass; empty without images."""


def encode_prompt(
    request: RolloutRequest, pictures: Pictures | None, *, actor: str
) -> EncodedPrompt:
    """Expand a request's image placeholders as the checkpoint's processor does.

    Args:
        pictures: the checkpoint's image processing; None for a text model.

    Raises:
        RolloutError: the images cannot be decoded, or there are more or fewer than placeholders.
    """
    if pictures is None:
        return EncodedPrompt(request.prompt_token_ids, {})
    images = decode_images(request.images, request.sample_id, actor=actor)
    # The model would silently read a placeholder without an image as text.
    num_pads = request.prompt_token_ids.count(pictures.token_id)
    if num_pads != len(images):
        message = f"sample {request.sample_id} has {len(images)} images and {num_pads} placeholders"
        raise RolloutError(message, actor=actor, phase="generate")
    if not images:
        return EncodedPrompt(request.prompt_token_ids, {})
    encoded = pictures.encode(images)
    token_ids = pictures.expand(request.prompt_token_ids, encoded.image_grid_I3)
    return EncodedPrompt(token_ids, encoded.arguments())


def open_image(data: bytes) -> Image.Image:
    """Open an image by its header alone, to measure it. Raises ValueError with the reason."""
    return _read(lambda: open_picture(data))


def decode_image(data: bytes) -> Image.Image:
    """Decode to RGB, upright, on white where transparent. Raises ValueError with the reason."""
    image = _read(lambda: on_white(open_picture(data)))
    # vLLM would turn an image by an orientation that is left here.
    image.info = {}
    return image


def png_of(pixels: Image.Image) -> bytes:
    """Encode pixels without a loss."""
    file = io.BytesIO()
    pixels.save(file, "PNG")
    return file.getvalue()


def _read(read: Callable[[], Image.Image]) -> Image.Image:
    try:
        return read()
    except UnidentifiedImageError as error:
        # Pillow's own message names the object that it read from.
        raise ValueError("it is of no format that is known") from error
    except MemoryError:
        raise
    except Exception as error:
        # On damaged files Pillow's decoders raise whatever their parsing runs into (OSError,
        # SyntaxError, struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error
