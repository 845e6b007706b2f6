"""Segments: a prompt with the tokens to learn (its target), the smallest unit of packing.

A prompt is either a sample, which the checkpoint's processor encodes (`PromptEncoder`), or an
engine's tokens with their images (`ImageEncoder`).

Shape legend: P prompt tokens (image placeholders expanded), L target tokens, I images, R image
patches or tiles, D values of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from learner.targets import AdvantageTarget, Target
from shared.errors import ConfigError, RecordError
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
    """One prompt as tokens for an engine's request, and as tokens and pixels for the model.

    In a request each image is one placeholder. For the model, placeholders are expanded to as many
    tokens as the image has.

    Example: 10 text tokens and an image of 8 x 8 patches, 4 patches to a token: 11
    `request_token_ids`, P = 26, `modality_P` with 16 ones, `image_grid_I3` [[1, 8, 8]], R = 64.
    """

    request_token_ids: tuple[int, ...]
    """The tokens of a request, with one placeholder per image."""
    token_ids: tuple[int, ...]
    """[P], placeholders expanded: the tokens that the models of learner and engine both read."""
    modality_P: torch.Tensor
    """int [P]: 0 text, 1 image (transformers' `mm_token_type_ids`)."""
    pixel_values_RD: torch.Tensor
    """float [R, D]: R patches or tiles of the images, D values each; [0, 0] without images."""
    image_grid_I3: torch.Tensor
    """int64 [I, 3], per image: patches in time, height and width (`image_grid_thw`). For models
    with tiles: number of tiles, tokens down a tile and tokens across it."""

    @classmethod
    def from_text(cls, token_ids: Sequence[int]) -> EncodedPrompt:
        """Return a prompt without images. Its tokens for engine and model are equal."""
        ids = tuple(token_ids)
        no_modality_P = torch.zeros(len(ids), dtype=torch.int64)
        return cls(ids, ids, no_modality_P, torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and the tokens to learn after it, with their supervision (the target).

    Example: the sample at position 5 of step 2, a prompt of 26 tokens and a target of 40, generated
    by "rollout-actor-1" with weight version 2: `len(segment)` is 66.
    """

    position: int
    """The sample's position in its step."""
    prompt: EncodedPrompt
    target: Target | AdvantageTarget
    step: int = 0
    """The step that drew the sample. A later step may learn the segment."""
    actor: str | None = None
    """The rollout actor that generated the rollout; None in channel A."""
    weight_version: int | None = None
    """The weight version that generated the rollout; None in channel A."""
    target_modality_L: torch.Tensor | None = None
    """int [L]: 0 text, 1 image, for a target that contains images; None for a target of text."""

    def __len__(self) -> int:
        return len(self.prompt.token_ids) + len(self.target.token_ids)

    def without_images(self) -> Segment:
        """Return the segment with its images and their tokens removed from the prompt."""
        if not len(self.prompt.image_grid_I3):
            return self
        modality = self.prompt.modality_P.tolist()
        pairs = zip(self.prompt.token_ids, modality, strict=True)
        text = [token_id for token_id, is_image in pairs if not is_image]
        return replace(self, prompt=EncodedPrompt.from_text(text))

    @property
    def modality(self) -> torch.Tensor:
        """int [P + L]: 0 for text and 1 for image tokens of the prompt, then of the target."""
        of_target = self.target_modality_L
        if of_target is None:
            of_target = self.prompt.modality_P.new_zeros(len(self.target.token_ids))
        return torch.cat([self.prompt.modality_P, of_target])


def shared_tokens(segments: Sequence[Segment]) -> tuple[int, ...]:
    """Return how many tokens of each segment a row need not repeat (`training.share_prompts`).

    A segment shares the prompt of the segment before it if both prompts and their images are equal,
    except the prompt's last token: its logits predict the target's first token.

    Example: three segments with one prompt of 26 tokens, then one with another: (0, 25, 25, 0).
    """
    return (0, *(_num_shared(before, segment) for before, segment in pairwise(segments)))


def _num_shared(before: Segment, segment: Segment) -> int:
    one = before.prompt
    other = segment.prompt
    is_equal = one is other or (
        one.token_ids == other.token_ids
        and torch.equal(one.image_grid_I3, other.image_grid_I3)
        and torch.equal(one.pixel_values_RD, other.pixel_values_RD)
    )
    if not is_equal:
        return 0
    num_shared = len(other.token_ids) - 1
    # Pixels of images in the target, or at the last token of the prompt, would be needed again.
    return 0 if segment.modality[num_shared:].any() else num_shared


KEPT_TEXTS = 1024
"""Number of prompts whose text and tokens are cached."""


class PromptEncoder:
    """Encodes the prompts of samples with the checkpoint's own processor and chat template.

    All methods that take a sample raise RecordError if its texts contain a control token, and
    ConfigError if the chat template refuses the prompt or is not valid.
    """

    def __init__(self, processor: Any, prompts: Prompts) -> None:
        self._processor = processor
        self._pictures = pictures_of(processor)
        self.prompts = prompts
        self._control_tokens = tuple(control_tokens(processor.tokenizer).values())
        # If no row has its own text, prompts differ only in their number of images.
        self._text_of = lru_cache(maxsize=KEPT_TEXTS)(self._write)
        self._ids_of = lru_cache(maxsize=KEPT_TEXTS)(self._encode_text)

    @property
    def picture_resize(self) -> PictureResize:
        """The function that computes the size to which the model's processor resizes an image."""
        return self._pictures.resize

    def request(
        self, sample: Sample, decode: DecodeSettings, *, step: int, position: int, run_seed: int
    ) -> RolloutRequest:
        """Return the request that asks an engine for a rollout of this sample.

        `position` is the sample's place in the step. Does not read image files.
        """
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
        """Return the token ids of the prompt for a request, with one placeholder per image.

        Does not read image files.
        """
        # Engines expand the placeholders; `check_prompt` compares their tokens with ours.
        return self._ids_of(self.text(sample))

    def num_tokens(self, sample: Sample) -> int:
        """Return the number of tokens of the prompt, with expanded image placeholders.

        Does not read image files. Raises RecordError if the checkpoint's processor does not accept
        the image's size or shape.
        """
        added = 0
        if sample.images:
            try:
                tokens = self._pictures.num_tokens(sample.width, sample.height)
            except ValueError as error:
                raise _not_taken(sample, [(sample.width, sample.height)], error) from error
            # The image's tokens and the tokens around them replace the placeholder.
            added = tokens + sum(map(len, self._pictures.around)) - 1
        return len(self.request_ids(sample)) + len(sample.images) * added

    def encode(self, sample: Sample) -> EncodedPrompt:
        """Return a sample's prompt as tokens, with its images as pixels.

        Raises RecordError if an image file is missing or changed, or if the checkpoint's processor
        does not accept the size of an image.
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
        """Return the prompt's text from the chat template, with one placeholder per image.

        Raises RecordError if the question contains a control token, which would end the turn or
        stand for an image.
        """
        system, user = self.prompts.texts(sample)
        texts = {"prompt": sample.prompt, "system": sample.system, "phrase": sample.phrase}
        texts |= {f"classes[{i}]": name for i, name in enumerate(sample.classes)}
        # The whole question is checked last: its parts may join to a control token.
        for field, text in (*texts.items(), ("prompt", user), ("system", system)):
            if text and (token := find_control_token(text, self._control_tokens)):
                problem = f"sample {sample.sample_id} has {token}, a control token of the tokenizer"
                raise RecordError(problem, field=field, remedy=f"remove {token} from the text")
        return self._text_of(len(sample.images), system, user)

    def _write(self, num_images: int, system_prompt: str | None, user_prompt: str) -> str:
        messages = detection_messages(num_images, system_prompt, user_prompt)
        try:
            text = self._processor.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
        except TemplateError as error:
            folder = self._processor.tokenizer.name_or_path
            raise ConfigError(
                f"model.path: the chat template of {folder} cannot write the prompt: {error};"
                " correct the template, or write the prompt that it asks for (data.system_prompt,"
                " data.user_prompt)"
            ) from error
        return str(text)

    def _encode_text(self, text: str) -> tuple[int, ...]:
        # The chat template has already added the special tokens.
        encoded = self._processor.tokenizer(text, add_special_tokens=False)
        return tuple(encoded["input_ids"])


def _not_taken(sample: Sample, sizes: Sequence[tuple[int, int]], error: ValueError) -> RecordError:
    pixels = " and ".join(f"{width} x {height}" for width, height in sizes)
    problem = (
        f"sample {sample.sample_id} has an image of {pixels} pixels, which the checkpoint's image"
        f" processor does not accept ({error})"
    )
    return RecordError(problem, field="images", remedy="crop or pad the image, or remove the row")


def modality_of(token_ids: Sequence[int], image_token_id: int) -> torch.Tensor:
    """Return whether each prompt token belongs to an image: int [P], 1 or 0."""
    return (torch.tensor(token_ids, dtype=torch.int64) == image_token_id).to(torch.int64)


class ImageEncoder:
    """Encodes images to pixels, for prompts whose tokens are already known from an engine.

    Rollouts of environments contain such prompts.
    """

    def __init__(self, processor: Any) -> None:
        """`processor` belongs to a checkpoint with a vision tower."""
        self._pictures = pictures_of(processor)
        self._token_id = self._pictures.token_id
        # The rollouts of a group have the same images and arrive one after the other.
        self._last: tuple[tuple[str, ...], EncodedImages] | None = None

    def modality(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return whether each prompt token belongs to an image: int [P], 1 or 0."""
        return modality_of(token_ids, self._token_id)

    def encode(self, images: Sequence[ImageRef], token_ids: Sequence[int]) -> EncodedImages:
        """Encode images to pixels. Check that `token_ids` have the right number of tokens for each.

        `token_ids` are an engine's prompt, with expanded image placeholders.

        Raises:
            ValueError: the engine has more or fewer tokens for an image than the learner.
            RecordError: an image cannot be decoded.
        """
        # Pixels are decoded once per group; the tokens of each rollout are checked.
        key = tuple(image.sha256 for image in images)
        if self._last is None or self._last[0] != key:
            self._last = key, self._pictures.encode([decode_image(image) for image in images])
        images_of_key = self._last[1]
        expected = self._pictures.token_counts(images_of_key.image_grid_I3)
        found = self._runs(token_ids)
        if found != expected:
            raise ValueError(
                f"the engine has {found} tokens for its images, the learner {expected}; engines and"
                " learner must load the same checkpoint, with the same image size limits in its"
                " processor files"
            )
        return images_of_key

    def num_images(self, token_ids: Sequence[int]) -> int:
        return len(self._runs(token_ids))

    def _runs(self, token_ids: Sequence[int]) -> list[int]:
        """Return the number of tokens of each image. Other tokens separate two images."""
        runs = groupby(token_ids, key=lambda token_id: token_id == self._token_id)
        return [sum(1 for _ in run) for is_image, run in runs if is_image]


def decode_image(image: ImageRef) -> Image:
    """Decode an image to RGB, with transparent parts on white, as engines do.

    Raises RecordError if the file is missing, changed or not an image. With `data.check_images`, a
    file that is not an image is already found when the data are loaded.
    """
    import PIL  # runs of text models need no Pillow

    data = image.with_data().data
    assert data is not None
    try:
        return on_white(open_picture(data))
    except MemoryError:
        raise
    except Exception as error:
        # Any exception: on damaged files Pillow's decoders raise many types.
        reason = str(error) or type(error).__name__
        if isinstance(error, PIL.UnidentifiedImageError):
            reason = "unknown format"  # Pillow's message names an object in memory
        name = str(image.path)
        remedy = "replace the file; data.check_images: true finds such files at the start"
        if image.path is None:
            name = "an image of a message"
            remedy = "send complete image files"
        problem = f"{name} is not a readable image ({reason})"
        raise RecordError(problem, field="images", remedy=remedy) from error
