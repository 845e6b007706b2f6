"""A target together with its prompt: the atomic unit of packing.

Shape legend: P prompt tokens (image placeholders expanded), I images, R image patches, D patch
values.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from learner.targets import Target
from shared.config import RunConfig
from shared.errors import RecordError
from shared.prompts import detection_messages, on_white
from shared.records import ImageRef, Sample
from shared.rollouts import DecodeSettings, RolloutRequest
from shared.seeds import request_seed

if TYPE_CHECKING:
    from PIL.Image import Image


# Images of prompts that come as tokens: what the vision tower is given, and whether the learner's
# processor makes as many tokens of each as the engine did.
#
# Shape legend: P tokens, I images, R image patches, D patch values.


class EncodedImages(NamedTuple):
    """See `learner.segments.EncodedPrompt`."""

    pixel_values_RD: torch.Tensor
    image_grid_I3: torch.Tensor

    def first(self, number: int) -> EncodedImages:
        """The images before the others."""
        grid = self.image_grid_I3[:number]
        return EncodedImages(self.pixel_values_RD[: int(grid.prod(dim=1).sum())], grid)


class ImageEncoder:
    """By a checkpoint's own processor."""

    def __init__(self, processor: Any) -> None:
        """`processor`: of transformers' Qwen-VL models."""
        self._images, self._token_id = processor.image_processor, int(processor.image_token_id)
        self._patches_per_token = processor.image_processor.merge_size**2
        self._last: tuple[tuple[str, ...], EncodedImages] | None = None

    def modality(self, token_ids: Sequence[int]) -> torch.Tensor:
        """int [P]: 1 where a token stands for a part of an image, else 0."""
        return (torch.tensor(token_ids, dtype=torch.int64) == self._token_id).to(torch.int64)

    def encode(self, images: Sequence[ImageRef], token_ids: Sequence[int]) -> EncodedImages:
        """Of `token_ids`, whose placeholders are expanded.

        Raises ValueError where there is another number of placeholders than the images come to
        here, and RecordError for an image that cannot be decoded.
        """
        # The rollouts of a group show the same ones, and come one after the other.
        key = tuple(image.sha256 for image in images)
        if self._last is None or self._last[0] != key:
            made = self._images(
                images=[decode_image(image) for image in images], return_tensors="pt"
            )
            self._last = key, EncodedImages(made["pixel_values"], made["image_grid_thw"])
        encoded = self._last[1]
        expected = [
            patches // self._patches_per_token
            for patches in encoded.image_grid_I3.prod(dim=1).tolist()
        ]
        found = self._runs(token_ids)
        if found != expected:
            told = f"the engine has {found} tokens of its images, the learner {expected}"
            raise ValueError(
                f"{told}; engines and learner must load the same checkpoint, with the image size"
                " limits in its processor files"
            )
        return encoded

    def num_images(self, token_ids: Sequence[int]) -> int:
        """That are shown in these tokens."""
        return len(self._runs(token_ids))

    def _runs(self, token_ids: Sequence[int]) -> list[int]:
        """Tokens of each image: other tokens mark its beginning and its end."""
        return [
            sum(1 for _ in run)
            for is_image, run in groupby(token_ids, key=lambda token_id: token_id == self._token_id)
            if is_image
        ]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """One prompt in both forms (FACTS 4): as the engine is asked, and as both sides compute it."""

    request_token_ids: tuple[int, ...]
    """One placeholder per image: what a request carries."""
    token_ids: tuple[int, ...]
    """[P], placeholders expanded: what the learner's forward sees and the engine must report back.
    """
    modality_P: torch.Tensor
    """int [P]: 0 text, 1 image (transformers' `mm_token_type_ids`)."""
    pixel_values_RD: torch.Tensor
    image_grid_I3: torch.Tensor
    """Patches in time, height and width per image (`image_grid_thw`)."""

    @classmethod
    def of_text(cls, token_ids: Sequence[int]) -> EncodedPrompt:
        """A prompt without images: both of its forms are the same."""
        ids = tuple(token_ids)
        return cls(
            ids,
            ids,
            torch.zeros(len(ids), dtype=torch.int64),
            torch.empty(0, 0),
            torch.empty(0, 3, dtype=torch.int64),
        )


@dataclass(frozen=True, slots=True)
class Segment:
    """A prompt and what is learned of a response to it."""

    position: int
    """The sample's place in its step."""
    prompt: EncodedPrompt
    target: Target
    step: int = 0
    """The step that drew the sample; a later one may learn the segment."""
    actor: str | None = None
    """Who generated the rollout; None in channel A."""
    weight_version: int | None = None
    """Of the weights that generated it; None in channel A."""
    target_modality_L: torch.Tensor | None = None
    """int [L], as the prompt's `modality_P`, of a target in which more images are shown, whose
    patches are the prompt's too. None: it is text.
    """

    def __len__(self) -> int:
        return len(self.prompt.token_ids) + len(self.target.token_ids)

    @property
    def modality(self) -> torch.Tensor:
        """int [P + L]"""
        behind = self.target_modality_L
        return torch.cat(
            [
                self.prompt.modality_P,
                (
                    self.prompt.modality_P.new_zeros(len(self.target.token_ids))
                    if behind is None
                    else behind
                ),
            ]
        )


class PromptEncoder:
    """Encodes prompts with the checkpoint's own processor and chat template."""

    def __init__(self, processor: Any, *, system_prompt: str | None, user_prompt: str) -> None:
        self._processor = processor
        self._system_prompt = system_prompt
        self._user_prompt = user_prompt
        self._texts: dict[int, str] = {}
        self._ids: dict[int, tuple[int, ...]] = {}
        """By the number of images, which alone makes prompts differ: a step's requests are not to
        wait for a template each.
        """

    @classmethod
    def of(cls, config: RunConfig, processor: Any) -> PromptEncoder:
        return cls(
            processor, system_prompt=config.data.system_prompt, user_prompt=config.data.user_prompt
        )

    def request(
        self, sample: Sample, decode: DecodeSettings, *, step: int, position: int, run_seed: int
    ) -> RolloutRequest:
        """What an engine is asked for a sample. Reads no image."""
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
        """The unexpanded prompt; reads no image."""
        number = len(sample.images)
        if number not in self._ids:
            self._ids[number] = tuple(
                self._processor.tokenizer(self.text(sample), add_special_tokens=False)["input_ids"]
            )
        return self._ids[number]

    def num_tokens(self, sample: Sample) -> int:
        """Length of the prompt with placeholders expanded, which follows from the size of the
        images: reads none.

        RecordError for a size or shape that the checkpoint's processor does not take.
        """
        processor = self._processor.image_processor
        try:
            patches = (
                processor.get_number_of_image_patches(sample.height, sample.width)
                if sample.images
                else 0
            )
        except ValueError as error:
            raise _not_taken(sample, [(sample.width, sample.height)], error) from error
        of_an_image = patches // processor.merge_size**2
        return len(self.request_ids(sample)) + len(sample.images) * (of_an_image - 1)

    def encode(self, sample: Sample) -> EncodedPrompt:
        """Both forms of the prompt, and the image features' inputs. RecordError when an image file
        is gone or changed, or of a size or shape that the checkpoint's processor does not take."""
        images = [decode_image(image) for image in sample.images]
        try:
            encoded = self._processor(text=[self.text(sample)], images=images, return_tensors="pt")
        except ValueError as error:
            raise _not_taken(sample, [image.size for image in images], error) from error
        return EncodedPrompt(
            request_token_ids=self.request_ids(sample),
            token_ids=tuple(encoded["input_ids"][0].tolist()),
            modality_P=encoded["mm_token_type_ids"][0],
            pixel_values_RD=encoded["pixel_values"],
            image_grid_I3=encoded["image_grid_thw"],
        )

    def text(self, sample: Sample) -> str:
        """The prompt as the chat template writes it, one placeholder per image."""
        number = len(sample.images)
        if number not in self._texts:
            messages = detection_messages(
                number, system_prompt=self._system_prompt, user_prompt=self._user_prompt
            )
            self._texts[number] = str(
                self._processor.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False
                )
            )
        return self._texts[number]


def _not_taken(sample: Sample, sizes: Sequence[tuple[int, int]], error: ValueError) -> RecordError:
    pixels = " and ".join(f"{width} x {height}" for width, height in sizes)
    problem = (
        f"sample {sample.sample_id} has a picture of {pixels} pixels, which the checkpoint's image"
        f" processor does not take ({error})"
    )
    return RecordError(problem, field="images", remedy="crop or pad the picture, or remove the row")


def decode_image(image: ImageRef) -> Image:
    """RGB pixels, on white where they are transparent: those that engines get. RecordError when the
    file is gone, changed, or no image (which is only found here where `data.check_images` is off).
    """
    import PIL.Image  # runs of text models need no Pillow

    data = image.with_data().data
    assert data is not None
    try:
        return on_white(PIL.Image.open(io.BytesIO(data)))
    except MemoryError:
        raise
    except Exception as error:
        # All of them: on damaged files Pillow's decoders raise whatever their parsing runs into. Of
        # an unknown format its words are of an object in memory.
        reason = (
            "of no format that is known"
            if isinstance(error, PIL.UnidentifiedImageError)
            else str(error) or type(error).__name__
        )
        if image.path is None:  # it came in an environment's message
            raise RecordError(
                f"one of a message is no readable image ({reason})",
                field="images",
                remedy="send whole files",
            ) from error
        raise RecordError(
            f"{image.path} is no readable image ({reason})",
            field="images",
            remedy="replace the file, or set data.check_images: true",
        ) from error
