"""Images of prompts that come as tokens: what is made of them is what the processor makes of a
prompt with the same images.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tiny_qwen import TOWERS, make_stock_model
from trajectory_support import picture
from transformers import AutoProcessor

from learner.segments import ImageEncoder, decode_image
from shared.errors import RecordError
from shared.records import ImageRef

# Patches of 8 pixels, two by two merged; the last is no multiple of them, and is resized.
SIZES = ((96, 64), (80, 112), (150, 45))


@pytest.fixture(scope="module", params=TOWERS)
def processor(request, tmp_path_factory):
    return AutoProcessor.from_pretrained(
        make_stock_model(tmp_path_factory.mktemp(request.param), request.param)
    )


@pytest.fixture
def encoder(processor):
    return ImageEncoder(processor)


@pytest.fixture(scope="module")
def images():
    return tuple(picture(width, height, seed) for seed, (width, height) in enumerate(SIZES))


def prompt_of(processor, images):
    """As the processor makes it, with text before, between and behind the images."""
    one = "Image {}: <|vision_start|><|image_pad|><|vision_end|>"
    text = "".join(map(one.format, range(len(images))))
    pictures = [decode_image(image) for image in images]
    encoded = processor(text=[f"{text} What?"], images=pictures, return_tensors="pt")
    return encoded["input_ids"][0].tolist(), encoded


@pytest.mark.parametrize(
    ("brought", "counts"),
    [([0], "24"), ([0, 1, 2], "24, 35, 27"), ([0, 2], "24, 27"), ([1, 0], "35, 24")],
)
def test_other_images_than_those_of_the_tokens_are_refused_with_both_counts(
    processor, encoder, images, brought, counts
):
    two, _ = prompt_of(processor, images[:2])
    message = rf"engine .*\[24, 35\] .*learner \[{counts}\]; .*checkpoint, .*image size limits"
    with pytest.raises(ValueError, match=message):
        encoder.encode([images[index] for index in brought], two)
    text = [token_id for token_id in two if not encoder.num_images([token_id])]
    with pytest.raises(ValueError, match=r"engine .*\[\] tokens .*images, .*learner"):
        encoder.encode([images[index] for index in brought], text)


def test_the_images_of_the_rollout_before_are_not_encoded_again(processor, images):
    own = processor.image_processor
    counting = Mock(side_effect=own, merge_size=own.merge_size)
    encoder = ImageEncoder(
        SimpleNamespace(image_processor=counting, image_token_id=processor.image_token_id)
    )
    one, two = (prompt_of(processor, images[:number])[0] for number in (1, 2))
    first = encoder.encode(images[:2], two)
    # Rollouts of a group come from several calls: the same image is not the same object.
    copies = [ImageRef(None, image.data, image.sha256) for image in images[:2]]
    again = encoder.encode(copies, [*two, *two[:3]])
    assert counting.call_count == 1
    assert torch.equal(again.pixel_values_RD, first.pixel_values_RD)
    message = r"the engine has \[24\] tokens for its images, the learner \[24, 35\]"
    with pytest.raises(ValueError, match=message):
        encoder.encode(images[:2], one)
    encoder.encode(images[:1], one)
    assert torch.equal(encoder.encode(images[:2], two).pixel_values_RD, first.pixel_values_RD)
    assert [len(call.kwargs["images"]) for call in counting.call_args_list] == [2, 1, 2]


@pytest.mark.parametrize("damage", ["no picture", "truncated"])
def test_an_image_that_cannot_be_decoded_is_a_bad_record(processor, encoder, images, damage):
    data = b"no picture" if damage == "no picture" else images[0].data[:200]
    token_ids, _ = prompt_of(processor, images[:1])
    with pytest.raises(RecordError, match=r"^images: .* is not a readable image"):
        encoder.encode([ImageRef(None, data, "damaged")], token_ids)
