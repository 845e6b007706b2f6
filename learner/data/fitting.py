"""Checks at the start of a run that every sample fits a packed row, and can be encoded to tokens.

The longest prompt + response + append must fit (decision 24). The append is the ground truth, and
the tokenizer must not change its text. The numbers of tokens of all rows are cached as arrays.

Shape legend: K rows that fit, in the order of their file.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from learner.data import kept
from learner.segments import PromptEncoder
from shared.config import RunConfig
from shared.dataset import Dataset, Joined, note_skipped
from shared.errors import BadRows, ConfigError, RecordError
from shared.grounding.formats import COORD_TOKENS_FORMAT
from shared.grounding.geometry import aabb
from shared.grounding.json_list import PictureResize
from shared.grounding.serialize import AnswerFormat, SerializedText
from shared.records import GeometryKind, Sample
from shared.tokens.hf_codec import HFTokenCodec, piece_spans
from shared.tokens.vocabulary import NUM_BINS

# The token at which appended text meets the rollout's is encoded again and may become a few tokens.
_CUT_SLACK = 4
SMALL_PX = 8
"""An object is small if one of its sides has fewer pixels than this. It is under half of the side
of an image token."""


class BadRow(NamedTuple):
    """A row of a data file that cannot be used, and why: the parts of its RecordError."""

    problem: str
    field: str
    remedy: str
    line: int | None
    """Line number in the file, from 1."""


@dataclass(frozen=True, slots=True)
class Measures:
    """The numbers of tokens and objects of each row of a data file, and the rows that are bad.

    The numbers are int64 columns. They depend on the checkpoint's tokenizer and processor.

    Example: if the tokenizer changes the second of three rows, `rows_K` is [0, 2].
    """

    rows_K: np.ndarray
    """Indices of the rows that can be used."""
    prompt_K: np.ndarray
    """Number of prompt tokens, with expanded image placeholders."""
    text_K: np.ndarray
    """Number of tokens of the longest text that can be appended to a rollout, end of turn included.
    If the objects are not taught: of the ground truth written as a whole answer."""
    objects_K: np.ndarray
    small_K: np.ndarray
    """Number of objects with a side under `SMALL_PX` in the image that the model sees."""
    shrunk_K: np.ndarray
    """Number of objects that are small only because the image is resized for the model."""
    digest: str
    """Digest of the usable rows' samples, without the paths of their images."""
    bad: tuple[BadRow, ...] = ()


_COLUMNS = tuple(field.name for field in fields(Measures) if field.name.endswith("_K"))


class Fitting(NamedTuple):
    """The samples of a data file that a run can use, with their numbers of tokens and objects.

    `require_lengths` has checked that each sample fits a packed row and can be encoded to tokens.
    """

    samples: Dataset
    measures: Measures
    """Numbers of tokens and objects: value i of each column belongs to sample i."""
    taught: bool
    """Whether the samples' objects are learned (become targets); False for held-out samples."""


@dataclass(frozen=True, slots=True)
class RowLimits:
    """What `require_lengths` requires of the samples of a data file.

    Example: RowLimits(160, 200) refuses a sample whose prompt of 26 tokens, the longest response of
    160 and its appended objects have more than 200 tokens.
    """

    max_new_tokens: int
    """Tokens of the longest response; 0 if no step generates."""
    global_max_length: int
    """Maximum tokens of a packed row."""
    answer_format: AnswerFormat = COORD_TOKENS_FORMAT
    on_bad_row: Literal["error", "skip"] = "error"
    """Whether to raise for rows that cannot be used, or to skip them."""
    taught: bool = True
    """The objects become targets, so the tokenizer must not change them. False for held-out
    samples, whose sequences end with the response."""
    most: int | None = None
    """The number of samples to return, from the first one; None: all."""


def require_train_lengths(
    config: RunConfig, dataset: Dataset, encoder: PromptEncoder, codec: HFTokenCodec
) -> Fitting:
    """Check the training samples of a run with `require_lengths`, and return its result."""
    limits = RowLimits(
        config.rollout_matching.max_new_tokens if config.num_b_steps else 0,
        config.global_max_length,
        config.answer_format.for_pictures(encoder.picture_resize),
        config.data.on_bad_row,
    )
    return require_lengths(dataset, encoder, codec, limits, Path(config.model.path))


def require_lengths(
    dataset: Dataset,
    encoder: PromptEncoder,
    codec: HFTokenCodec,
    limits: RowLimits,
    checkpoint: Path | None = None,
) -> Fitting:
    """Check that every sample fits a packed row with the longest response, and can be encoded.

    Return the samples that are not skipped, with their numbers of tokens and objects. If
    `checkpoint` is set, the folder of `encoder` and `codec`, the numbers are cached for later runs.

    Raises:
        ConfigError: a sample could exceed `global_max_length` (the message shows the longest one),
            or the tokenizer changes the text between objects.
        RecordError: the tokenizer changes the text of samples, or the processor refuses their
            images; the message names all such samples. With `on_bad_row: skip` only if no row is
            left.
    """
    taught = limits.taught
    key = ""
    if checkpoint is not None and dataset.key:
        key = kept.digest_of(
            *(dataset.key, _checkpoint_digest(checkpoint), encoder.prompts, encoder.picture_resize),
            *(limits.answer_format, taught, limits.most, _COLUMNS),
        )
    arrays, (digest, bad_rows) = kept.read_or_measure(
        kept.kept_file(dataset.path, "taught" if taught else "held_out"),
        key,
        lambda: _measure(dataset, encoder, codec, limits),
        lost="measures all rows",
    )
    measures = Measures(**arrays, digest=digest, bad=tuple(BadRow(*row) for row in bad_rows))
    bad = BadRows()
    skipped = list(dataset.skipped)
    for row in measures.bad:
        located = RecordError(
            row.problem, field=row.field, remedy=row.remedy, file=str(dataset.path), line=row.line
        )
        if limits.on_bad_row == "error":
            bad.add(located)
        else:
            skipped.append(note_skipped(located))
    bad.raise_if_any()
    samples = dataset.keep(measures.rows_K, skipped)
    _require_room(samples, measures, limits)
    return Fitting(samples, measures, taught)


def _require_room(samples: Dataset, measures: Measures, limits: RowLimits) -> None:
    """Raise ConfigError if a sample and its longest response may not fit a packed row."""
    total_K = measures.prompt_K + limits.max_new_tokens
    if limits.taught:
        total_K = total_K + measures.text_K + _CUT_SLACK
    longest = int(np.argmax(total_K))
    total = int(total_K[longest])
    if total > limits.global_max_length:
        parts = f"prompt {measures.prompt_K[longest]}"
        lower = ""
        if limits.max_new_tokens:
            parts += f" + response {limits.max_new_tokens} (rollout_matching.max_new_tokens)"
            lower = " lower rollout_matching.max_new_tokens,"
        if limits.taught:
            kind = "appended objects" if limits.max_new_tokens else "answer"
            parts += f" + {kind} {measures.text_K[longest]} + {_CUT_SLACK} for the cut"
        others = int((total_K > limits.global_max_length).sum()) - 1
        and_others, these = (
            (f" and {others} others", "these samples") if others else ("", "the sample")
        )
        raise ConfigError(
            f"global_max_length: {limits.global_max_length} is too short for sample"
            f" {samples[longest].sample_id} of {samples.path}{and_others}: {parts} = {total}"
            f" tokens; raise global_max_length to {total},{lower} or remove {these}"
        )


def fits_a_row(
    config: RunConfig, encoder: PromptEncoder, codec: HFTokenCodec, sample: Sample
) -> bool:
    """Return whether a training sample and its longest possible answer fit a packed row.

    Also False for a sample that `require_lengths` refuses with a RecordError.
    """
    answer_format = config.answer_format.for_pictures(encoder.picture_resize).of(sample)
    longest = config.rollout_matching.max_new_tokens if config.num_b_steps else 0
    try:
        longest += encoder.num_tokens(sample) + _append_length(sample, codec, answer_format)
    except RecordError:
        return False
    return longest + _CUT_SLACK <= config.global_max_length


def _measure(
    dataset: Dataset,
    encoder: PromptEncoder,
    codec: HFTokenCodec,
    limits: RowLimits,
) -> kept.Kept:
    """Count tokens and objects of all rows, or of the first `most` rows that can be used.

    Return the columns of `Measures`, and a list of its other fields.

    Raises ConfigError as `require_lengths` does.
    """
    resize = encoder.picture_resize
    values = array("q")
    bad = []
    digest = hashlib.sha256()
    for index, sample in enumerate(dataset):
        if limits.most is not None and len(values) == limits.most * len(_COLUMNS):
            break
        of_sample = limits.answer_format.of(sample)
        try:
            prompt = encoder.num_tokens(sample)
            if limits.taught:
                text = _append_length(sample, codec, of_sample)
            else:
                text = len(codec.encode(of_sample.layout_objects(sample.objects).text)) + 1
        except RecordError as error:
            bad.append(BadRow(error.problem, error.field, error.remedy, dataset.line_of(index)))
            continue
        values.extend((index, prompt, text, *_num_small(sample, resize)))
        digest.update(_content(sample).encode())
    columns = np.frombuffer(values, dtype=np.int64).reshape(-1, len(_COLUMNS)).T
    return kept.Kept(dict(zip(_COLUMNS, columns, strict=True)), [digest.hexdigest(), bad])


def _content(sample: Sample) -> str:
    """Return a text of everything in a sample except the paths of its images.

    Checkpoints contain digests of it, so the text of rows without their own question must not
    change.
    """
    images = [image.sha256 for image in sample.images]
    content = repr((sample.sample_id, images, sample.width, sample.height, sample.objects))
    question = (sample.prompt, sample.system, sample.phrase, sample.classes)
    return content + repr(question) if any(question) else content


def _checkpoint_digest(checkpoint: Path) -> str:
    """Return a digest of the tokenizer's and the processor's files."""
    digest = hashlib.sha256(repr([version("transformers"), version("tokenizers")]).encode())
    for file in sorted(checkpoint.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model"):
            digest.update(f"{file.name}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _num_small(sample: Sample, resize: PictureResize) -> tuple[int, int, int]:
    """Count the sample's objects, the small ones, and the ones that only resizing makes small."""
    shown = resize.size_of(sample.width, sample.height)
    small = 0
    shrunk = 0
    for one in sample.objects:
        if one.kind is GeometryKind.POINT:  # has no size
            continue
        x1, y1, x2, y2 = aabb(one)
        sides = ((x2 - x1) / (NUM_BINS - 1), (y2 - y1) / (NUM_BINS - 1))
        if min(sides[0] * shown[0], sides[1] * shown[1]) < SMALL_PX:
            small += 1
            shrunk += min(sides[0] * sample.width, sides[1] * sample.height) >= SMALL_PX
    return len(sample.objects), small, shrunk


def describe_small_objects(key: str, fittings: Sequence[Fitting], resize: PictureResize) -> str:
    """Return a text that says how many objects are too small in the image that the model sees.

    Such an object has a side of under `SMALL_PX` pixels. The text names the image with most of
    them. `key` is the configuration key that names the data.
    """
    num_objects = sum(int(one.measures.objects_K.sum()) for one in fittings)
    num_small = sum(int(one.measures.small_K.sum()) for one in fittings)
    if not num_small:
        return f"no object of {key} ({num_objects:,}) is shown with a side under {SMALL_PX} pixels"
    num_shrunk = sum(int(one.measures.shrunk_K.sum()) for one in fittings)
    because = ""
    if num_shrunk:
        because = (
            f", {num_shrunk:,} of them because images are resized to at most"
            f" {resize.max_pixels:,} pixels"
        )
    # The image with most objects that resizing makes small, then with most small objects.
    small_K = np.concatenate([one.measures.small_K for one in fittings])
    shrunk_K = np.concatenate([one.measures.shrunk_K for one in fittings])
    worst = int(np.lexsort((-np.arange(len(small_K)), small_K, shrunk_K))[-1])
    sample = Joined([one.samples for one in fittings])[worst]
    width, height = resize.size_of(sample.width, sample.height)
    return (
        f"{num_small:,} of {num_objects:,} objects of {key} are shown with a side under"
        f" {SMALL_PX} pixels{because}; most in {sample.images[0].path} (sample"
        f" {sample.sample_id}): {small_K[worst]} of {len(sample.objects)}, shown as"
        f" {width} x {height} of {sample.width} x {sample.height}"
    )


def describe_cut_answers(
    fitting: Fitting,
    codec: HFTokenCodec,
    *,
    max_new_tokens: int,
    answer_format: AnswerFormat,
    checkpoint: Path | None = None,
) -> str | None:
    """Return a text that says how many ground truths are longer than `max_new_tokens`.

    Return None if there are none. If `checkpoint` is set, the folder of `codec`, the lengths are
    cached for later runs.
    """
    samples = fitting.samples
    text_K = fitting.measures.text_K
    key = ""
    if fitting.taught and checkpoint is not None and samples.key:
        rows = fitting.measures.rows_K.tolist()
        of_text = (_checkpoint_digest(checkpoint), answer_format, max_new_tokens)
        key = kept.digest_of(samples.key, rows, *of_text)

    def measure() -> kept.Kept:
        # The append has the same objects with longer keys. If the append is short enough, the
        # answer is too and need not be encoded.
        candidates = (samples[row] for row in np.flatnonzero(text_K >= max_new_tokens).tolist())
        texts = (answer_format.of(one).layout_objects(one.objects).text for one in candidates)
        # Plus the stop token.
        lengths = (len(codec.encode(text)) + 1 for text in texts)
        return kept.Kept({}, [length for length in lengths if length > max_new_tokens])

    if fitting.taught:
        file = kept.kept_file(samples.path, "cut")
        # Reading a few numbers costs less than reading the measures of all rows.
        quick_s = kept.QUICK_S / 10
        lost = "measures the answers"
        cut = kept.read_or_measure(file, key, measure, lost=lost, quick_s=quick_s).rest
    else:
        cut = text_K[text_K > max_new_tokens].tolist()
    if not cut:
        return None
    return (
        f"rollout_matching.max_new_tokens: {max_new_tokens} is less than the ground truth of"
        f" {len(cut)} of the {len(samples)} samples of {samples.path}, which takes up to {max(cut)}"
        f" tokens; raise it to {max(cut)}, or expect such answers to be cut"
    )


def _append_length(sample: Sample, codec: HFTokenCodec, answer_format: AnswerFormat) -> int:
    """Count the tokens of the longest text that appends all objects to a rollout, EOS included.

    Raises RecordError if the tokenizer changes the text of an object.
    """
    text = answer_format.longest_append(sample.objects)
    token_ids = codec.encode(text.text)
    wanted = text.text.encode()
    encoded = b"".join(codec.piece_bytes(token_id) for token_id in token_ids)
    if encoded != wanted:
        pairs = enumerate(zip(wanted, encoded, strict=False))
        changed = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(encoded)))
        for index, layout in enumerate(text.objects):
            if layout.value[0] <= changed < layout.value[1]:
                problem = "which the tokenizer changes when it encodes it"
                remedy = "write it in the form that the tokenizer keeps (Unicode NFC for most)"
                raise _bad_desc(sample, index, problem, remedy)
        raise ConfigError(
            f"model.path: the tokenizer changes the text {text.text!r} when it encodes it; use"
            " one that adds and removes nothing"
        )
    _require_text_in_descs(sample, text, token_ids, codec)
    return len(token_ids) + 1


def _require_text_in_descs(
    sample: Sample, text: SerializedText, token_ids: Sequence[int], codec: HFTokenCodec
) -> None:
    """Raise RecordError if a description contains a control token or a coord token."""
    starts = [start for start, _ in piece_spans(token_ids, codec)]
    for index, layout in enumerate(text.objects):
        first = bisect_left(starts, layout.desc[0])
        stop = bisect_left(starts, layout.desc[1])
        for token_id in token_ids[first:stop]:
            if token_id in codec.control_ids or codec.coord_bin(token_id) is not None:
                token = codec.piece_bytes(token_id).decode()
                problem = f"in which the tokenizer reads {token} as a control or coord token"
                raise _bad_desc(sample, index, problem, "write it in words")


def _bad_desc(sample: Sample, index: int, problem: str, remedy: str) -> RecordError:
    desc = sample.objects[index].desc
    problem = f"sample {sample.sample_id} (objects in reading order) has {desc!r}, {problem}"
    return RecordError(problem, field=f"objects[{index}].desc", remedy=remedy)
