"""Object detection as an environment: rewards for the objects that a model finds in an image.

`vf-eval rollout_actors.environments.examples.grounding -a '{"data": "val.jsonl"}' ...` evaluates a
model on records.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial

from rollout_actors.environments.answers.parsers import Parser, text_of
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.rubric import Rubric
from rollout_actors.environments.types import Message, State
from shared.dataset import load_dataset
from shared.grounding.objects import ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.grounding.scores import Criterion, num_found
from shared.grounding.serialize import serialize_objects
from shared.model_families import END_OF_TURN
from shared.prompts import DEFAULT_USER_PROMPT, Prompts, detection_messages, orientation_of
from shared.records import DEFAULT_GEOMETRY, GeometryKind, GroundTruthObject, ImageRef, Sample
from shared.tokens.vocabulary import COORD_TOKENS, NUM_BINS, parse_coord_token

_NUM_BYTES = 256
_COORD = re.compile(r"(<\|coord_[0-9]+\|>)")
_MEDIA_TYPES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
"""Media type of an image file by its first bytes; the only other kind in datasets is TIFF."""


def load_environment(
    data: str,
    eval_data: str | None = None,
    max_examples: int | None = None,
    user_prompt: str = DEFAULT_USER_PROMPT,
    system_prompt: str | None = None,
    polygons: bool = True,
    iou: float = 0.5,
    by_name: bool = True,
    format_weight: float = 0.2,
    recall_weight: float = 1.0,
    precision_weight: float = 1.0,
) -> SingleTurnEnv:
    """Return the environment for a dataset in a JSONL file (docs/reference/file_formats.md).

    Args:
        data: the file; images are relative to it.
        eval_data: the file for `evaluate`; None: `data` is used.
        max_examples: limit of rows from each file, taken from its beginning; None: all.
        polygons: whether the data may have polygons, and the model may write them.
        iou: minimum mask IoU of an object that counts as found.
        by_name: whether an object that counts as found must have the right name too.

    Raises RecordError if a file or an image is invalid; it names the line.
    """
    geometry = DEFAULT_GEOMETRY if polygons else frozenset({GeometryKind.BBOX})
    prompts = Prompts((user_prompt,), system_prompt)

    def rows(path: str) -> _SampleRows:
        samples = load_dataset(
            path,
            on_bad_row="error",
            sort_objects=True,
            check_images=True,
            geometry=geometry,
            require=prompts.texts,
        )
        return _SampleRows(samples[:max_examples], prompts)

    rubric = Rubric(
        [well_formed, recall, precision],
        [format_weight, recall_weight, precision_weight],
        Parser(partial(parse_text, geometry=geometry)),
    )
    rubric.class_objects["criterion"] = Criterion(iou, by_name)
    return SingleTurnEnv(
        env_id="grounding",
        dataset=rows(data),
        eval_dataset=None if eval_data is None else rows(eval_data),
        rubric=rubric,
    )


@dataclass(frozen=True, slots=True)
class DetectionResult:
    """How many objects of an answer are right, stored in `state["detection"]` as a mapping.

    Example: one of two objects is found, and one is wrong: `DetectionResult(True, 2, 0, 2, 1)`.
    """

    is_well_formed: bool
    """Whether the answer is one whole JSON object, perhaps followed by text."""
    num_predictions: int
    """Number of valid objects in the answer."""
    num_dropped: int
    """Number of entries in the answer that are not valid objects."""
    num_ground_truth: int
    num_matched: int


def well_formed(state: State, parser: Parser, criterion: Criterion) -> float:
    """Reward function: the share of an answer's entries that are valid objects.

    It is 1 for `{}`, and 0 for broken JSON.
    """
    found = findings(state, parser, criterion)
    num_entries = found.num_predictions + found.num_dropped
    share = found.num_predictions / num_entries if num_entries else 1.0
    return share if found.is_well_formed else 0.0


def recall(state: State, parser: Parser, criterion: Criterion) -> float:
    """Reward function: the share of ground-truth objects that the answer finds; 1 without any."""
    found = findings(state, parser, criterion)
    return found.num_matched / found.num_ground_truth if found.num_ground_truth else 1.0


def precision(state: State, parser: Parser, criterion: Criterion) -> float:
    """Reward function: the share of the answer's valid objects that are right.

    An answer without valid objects is worth 1 if the row has no objects, else 0.
    """
    found = findings(state, parser, criterion)
    if not found.num_predictions:
        return float(not found.num_ground_truth)
    return found.num_matched / found.num_predictions


def findings(state: State, parser: Parser, criterion: Criterion) -> DetectionResult:
    """Compare a rollout's answer with the ground truth. The result is kept in the state."""
    if "detection" not in state:
        messages = parser.get_assistant_messages(state["completion"])
        text = text_of(messages[-1]) if messages else ""
        truth = [
            GroundTruthObject(one.kind, one.bins, one.desc)
            for one in parser.parse(state["answer"]).objects
        ]
        state["detection"] = asdict(_compare(text, truth, parser, criterion))
    return DetectionResult(**state["detection"])


def _compare(
    text: str, truth: Sequence[GroundTruthObject], parser: Parser, criterion: Criterion
) -> DetectionResult:
    answer: ParsedRollout = parser.parse(text)
    # Without entries only `{}` is an answer: the parsed prefix looks the same as for prose.
    is_empty_object = "".join(text.partition(END_OF_TURN)[0].split()) == "{}"
    return DetectionResult(
        not answer.truncated and (not answer.fallback or is_empty_object),
        len(answer.objects),
        len(answer.dropped),
        len(truth),
        num_found(answer.objects, truth, criterion),
    )


def parse_text(text: str, *, geometry: frozenset[GeometryKind] = DEFAULT_GEOMETRY) -> ParsedRollout:
    """Parse the objects in an answer that is known only as text, without a tokenizer."""
    codec = TextCodec()
    return parse_rollout(codec.encode(text), codec, geometry=geometry)


class TextCodec:
    """Splits a text into tokens for the parser of answers, without a tokenizer.

    Each coordinate token is a token, and so is each byte of other text.
    """

    eos_token_id = _NUM_BYTES + NUM_BINS

    def piece_bytes(self, token_id: int) -> bytes:
        if token_id == self.eos_token_id:
            return END_OF_TURN.encode()
        return (
            bytes([token_id])
            if token_id < _NUM_BYTES
            else COORD_TOKENS[token_id - _NUM_BYTES].encode()
        )

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for part in _COORD.split(text):
            bin = parse_coord_token(part)
            token_ids.extend(part.encode(errors="replace") if bin is None else [self.coord_id(bin)])
        return token_ids

    def coord_bin(self, token_id: int) -> int | None:
        return token_id - _NUM_BYTES if _NUM_BYTES <= token_id < self.eos_token_id else None

    def coord_id(self, bin: int) -> int:
        return _NUM_BYTES + bin


class _SampleRows:
    """Samples as rows of a dataset. Images are read when a row is accessed."""

    def __init__(self, samples: Sequence[Sample], prompts: Prompts) -> None:
        self._samples = samples
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, object]:
        sample = self._samples[index]
        messages = detection_messages(len(sample.images), *self._prompts.texts(sample))
        return {
            "prompt": _with_images(messages, sample.images),
            "answer": serialize_objects(sample.objects),
            "info": {"sample_id": sample.sample_id},
        }


def _with_images(messages: list[Message], images: Sequence[ImageRef]) -> list[Message]:
    """Replace the placeholder of each image in the messages by the image as a data URL."""
    urls = iter([_data_url(image) for image in images])
    for message in messages:
        for number, part in enumerate(message["content"]):
            if part["type"] == "image":
                message["content"][number] = {"type": "image_url", "image_url": {"url": next(urls)}}
    return messages


def _data_url(image: ImageRef) -> str:
    from rollout_actors.engine.sampling import decode_image, open_image, png_of

    data = image.with_data().data
    assert data is not None, "with_data reads it"
    # Not every endpoint applies an image's EXIF orientation. The engine refuses broken images.
    with suppress(ValueError):
        if orientation_of(open_image(data)) != 1:
            data = png_of(decode_image(data))
    kinds = [kind for start, kind in _MEDIA_TYPES.items() if data.startswith(start)]
    media_type = kinds[0] if kinds else "image/tiff"
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
