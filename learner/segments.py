"""A target together with its prompt: the atomic unit of packing.

Prompts come as samples, which the checkpoint's processor encodes (`PromptEncoder`), or as an
engine's tokens with their images (`ImageEncoder`).

Shape legend: P prompt tokens (image placeholders expanded), L target tokens, I images, R image
patches or tiles, D their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from learner.targets import AdvantageTarget, Target
from shared.errors import RecordError
from shared.grounding.json_list import PictureResize
from shared.prompts import Prompts, detection_messages, on_white, open_picture
from shared.records import ImageRef, Sample
from shared.rollouts import DecodeSettings, RolloutRequest
from shared.seeds import request_seed
from shared.tokens.hf_codec import control_tokens, find_control_token
from shared.tokens.pictures import EncodedImages, pictures_of

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt in both forms: as the engine is asked, and as both sides compute it.

    Example: 10 text tokens and an image of 8 x 8 patches, 4 patches to a token: 11
    `request_token_ids`, P = 26, `modality_P` with 16 ones, `image_grid_I3` [[1, 8, 8]], R = 64.
    """

    request_token_ids: tuple[int, ...]
    """One placeholder per image: a request carries these."""
    token_ids: tuple[int, ...]
    """[P], placeholders expanded: the learner's forward sees these, and so must the engine."""
    modality_P: torch.Tensor
    """int [P]: 0 text, 1 image (transformers' `mm_token_type_ids`)."""
    pixel_values_RD: torch.Tensor
    image_grid_I3: torch.Tensor
    """Patches in time, height and width per image (`image_grid_thw`), or tiles and their tokens."""

    @classmethod
    def from_text(cls, token_ids: Sequence[int]) -> EncodedPrompt:
        """Make a prompt without images: both of its forms are the same."""
        ids = tuple(token_ids)
        no_modality_P = torch.zeros(len(ids), dtype=torch.int64)
        return cls(ids, ids, no_modality_P, torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and the target that is learned of a response to it.

    Example: the sample at position 5 of step 2, a prompt of 26 tokens and a target of 40, generated
    by "rollout-actor-1" with version 2 of the weights: `len(segment)` is 66.
    """

    position: int
    """The sample's place in its step."""
    prompt: EncodedPrompt
    target: Target | AdvantageTarget
    step: int = 0
    """The step that drew the sample; a later one may learn the segment."""
    actor: str | None = None
    """The actor that generated the rollout; None in channel A."""
    weight_version: int | None = None
    """Version of the weights that generated it; None in channel A."""
    target_modality_L: torch.Tensor | None = None
    """int [L], as `modality_P`, of a target that shows more images; None: it is text."""

    def __len__(self) -> int:
        return len(self.prompt.token_ids) + len(self.target.token_ids)

    def without_images(self) -> Segment:
        """Return the same text as a prompt that shows nothing; of text, the segment itself."""
        if not len(self.prompt.image_grid_I3):
            return self
        modality = self.prompt.modality_P.tolist()
        pairs = zip(self.prompt.token_ids, modality, strict=True)
        text = [token_id for token_id, is_image in pairs if not is_image]
        return replace(self, prompt=EncodedPrompt.from_text(text))

    @property
    def modality(self) -> torch.Tensor:
        """int [P + L]"""
        of_target = self.target_modality_L
        if of_target is None:
            of_target = self.prompt.modality_P.new_zeros(len(self.target.token_ids))
        return torch.cat([self.prompt.modality_P, of_target])


KEPT_TEXTS = 1024
"""Prompts whose text and tokens are kept."""


class PromptEncoder:
    """Encodes prompts with the checkpoint's own processor and chat template."""

    def __init__(self, processor: Any, prompts: Prompts) -> None:
        self._processor = processor
        self._pictures = pictures_of(processor)
        self.prompts = prompts
        self._control_tokens = tuple(control_tokens(processor.tokenizer).values())
        # Where no row has a text of its own, prompts differ in their number of images alone.
        self._text_of = lru_cache(maxsize=KEPT_TEXTS)(self._write)
        self._ids_of = lru_cache(maxsize=KEPT_TEXTS)(self._encode_text)

    @property
    def picture_resize(self) -> PictureResize:
        """The size at which the model is shown a picture."""
        return self._pictures.resize

    def request(
        self, sample: Sample, decode: DecodeSettings, *, step: int, position: int, run_seed: int
    ) -> RolloutRequest:
        """Make the request for a sample's rollout. Reads no image."""
        return RolloutRequest(
            step=step,
            position=position,
            sample_id=sample.sample_id,
            prompt_token_ids=self.request_ids(sample),
            images=sample.images,
            decode=decode,
            seed=request_seed(run_seed, step, position),
        )

    def request_ids(self, sample: Sample) -> tuple[int, ...]:
        """Encode the prompt with one placeholder per image. Reads no image."""
        # Engines expand the placeholders themselves; `check_prompt` compares the results.
        return self._ids_of(self.text(sample))

    def num_tokens(self, sample: Sample) -> int:
        """Count the prompt's tokens, placeholders expanded, from its images' size. Reads no image.

        Raises RecordError for a size or shape that the checkpoint's processor does not take.
        """
        added = 0
        if sample.images:
            try:
                tokens = self._pictures.num_tokens(sample.width, sample.height)
            except ValueError as error:
                raise _not_taken(sample, [(sample.width, sample.height)], error) from error
            # The placeholder itself gives way to the picture's tokens and what is around them.
            added = tokens + sum(map(len, self._pictures.around)) - 1
        return len(self.request_ids(sample)) + len(sample.images) * added

    def encode(self, sample: Sample) -> EncodedPrompt:
        """Encode the prompt and its images.

        Raises RecordError when an image file is gone or changed, or not of a size that the
        checkpoint's processor takes.
        """
        images = [decode_image(image) for image in sample.images]
        request_ids = self.request_ids(sample)
        try:
            pixel_values_RD, image_grid_I3 = self._pictures.encode(images)
        except ValueError as error:
            raise _not_taken(sample, [image.size for image in images], error) from error
        token_ids = self._pictures.expand(request_ids, image_grid_I3)
        modality_P = modality_of(token_ids, self._pictures.token_id)
        return EncodedPrompt(request_ids, token_ids, modality_P, pixel_values_RD, image_grid_I3)

    def text(self, sample: Sample) -> str:
        """Write the prompt by the chat template, one placeholder per image.

        Raises RecordError for a question with a control token: it would end the turn, or stand for
        an image.
        """
        system, user = self.prompts.texts(sample)
        texts = {"prompt": sample.prompt, "system": sample.system, "phrase": sample.phrase}
        texts |= {f"classes[{i}]": name for i, name in enumerate(sample.classes)}
        # The whole question last: its parts may join to a token.
        for field, text in (*texts.items(), ("prompt", user), ("system", system)):
            if text and (token := find_control_token(text, self._control_tokens)):
                problem = f"sample {sample.sample_id} has {token}, a control token of the tokenizer"
                raise RecordError(problem, field=field, remedy="remove it, or write it in words")
        return self._text_of(len(sample.images), system, user)

    def _write(self, num_images: int, system_prompt: str | None, user_prompt: str) -> str:
        messages = detection_messages(num_images, system_prompt, user_prompt)
        text = self._processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return str(text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        # The chat template has written them already.
        encoded = self._processor.tokenizer(text, add_special_tokens=False)
        return tuple(encoded["input_ids"])


def _not_taken(sample: Sample, sizes: Sequence[tuple[int, int]], error: ValueError) -> RecordError:
    pixels = " and ".join(f"{width} x {height}" for width, height in sizes)
    problem = (
        f"sample {sample.sample_id} has a picture of {pixels} pixels, which the checkpoint's image"
        f" processor does not take ({error})"
    )
    return RecordError(problem, field="images", remedy="crop or pad the picture, or remove the row")


def modality_of(token_ids: Sequence[int], image_token_id: int) -> torch.Tensor:
    """Return 1 where a token stands for a part of an image, else 0: int [P]."""
    return (torch.tensor(token_ids, dtype=torch.int64) == image_token_id).to(torch.int64)


class ImageEncoder:
    """Encodes the images of prompts that come as an engine's tokens."""

    def __init__(self, processor: Any) -> None:
        """`processor`: of a checkpoint with a vision tower."""
        self._pictures = pictures_of(processor)
        self._token_id = self._pictures.token_id
        # The rollouts of a group show the same images, and come one after the other.
        self._last: tuple[tuple[str, ...], EncodedImages] | None = None

    def modality(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return 1 where a token stands for a part of an image, else 0: int [P]."""
        return modality_of(token_ids, self._token_id)

    def encode(self, images: Sequence[ImageRef], token_ids: Sequence[int]) -> EncodedImages:
        """Encode the images of `token_ids`, whose placeholders are expanded.

        Raises:
            ValueError: the engine has another number of tokens for them than the learner.
            RecordError: an image cannot be decoded.
        """
        # Pixels are decoded once for the rollouts of a group; tokens are checked for each.
        key = tuple(image.sha256 for image in images)
        if self._last is None or self._last[0] != key:
            self._last = key, self._pictures.encode([decode_image(image) for image in images])
        images_of_key = self._last[1]
        expected = self._pictures.token_counts(images_of_key.image_grid_I3)
        found = self._runs(token_ids)
        if found != expected:
            raise ValueError(
                f"the engine has {found} tokens of its images, the learner {expected}; engines and"
                " learner must load the same checkpoint, with the image size limits in its"
                " processor files"
            )
        return images_of_key

    def num_images(self, token_ids: Sequence[int]) -> int:
        """Count the images that are shown in these tokens."""
        return len(self._runs(token_ids))

    def _runs(self, token_ids: Sequence[int]) -> list[int]:
        """Count the tokens of each image: other tokens mark its beginning and its end."""
        runs = groupby(token_ids, key=lambda token_id: token_id == self._token_id)
        return [sum(1 for _ in run) for is_image, run in runs if is_image]


def decode_image(image: ImageRef) -> Image:
    """Decode an image to RGB, on white where it is transparent, as engines do.

    Raises RecordError when the file is gone, changed, or no image (which is only found here where
    `data.check_images` is off).
    """
    import PIL  # runs of text models need no Pillow

    data = image.with_data().data
    assert data is not None
    try:
        return on_white(open_picture(data))
    except MemoryError:
        raise
    except Exception as error:
        # All of them: on damaged files Pillow's decoders raise whatever their parsing runs into.
        reason = str(error) or type(error).__name__
        if isinstance(error, PIL.UnidentifiedImageError):
            reason = "of no format that is known"  # Pillow's words name an object in memory
        name = str(image.path)
        remedy = "replace the file, or set data.check_images: true"
        if image.path is None:
            name = "one of a message"
            remedy = "send whole files"
        problem = f"{name} is no readable image ({reason})"
        raise RecordError(problem, field="images", remedy=remedy) from error
