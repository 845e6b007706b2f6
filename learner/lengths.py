"""No run dies of a sample that is too long, or of a text that the tokenizer cannot write: both are known before the start.

DESIGN 5, decision 24: longest prompt + response + append; the append is the ground truth, which has to survive the tokenizer to be a target.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from learner.segments import PromptEncoder
from shared.config import RunConfig
from shared.config.derive import num_b_steps
from shared.dataset import Dataset
from shared.errors import BadRows, ConfigError, RecordError
from shared.grounding.serialize import SerializedText, layout_append, serialize_objects
from shared.records import Sample
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.pieces import piece_spans

# The longest key that parses is object_999999999 (DESIGN 5, decision 26); what is appended behind it starts one higher.
_LONGEST_PREFIX = '{"object_999999999": {}'
_LONGEST_KEY_INDEX = 10**9
# Where our text meets the rollout's, both are encoded anew: a handful of tokens where there was one.
_CUT_SLACK = 4


@dataclass(frozen=True, slots=True)
class _Length:
    """The longest sequence that can come of one sample, in tokens."""

    sample: Sample
    prompt: int
    response: int
    append: int | None
    """Every object appended, closing brace and EOS; None where nothing is."""

    @property
    def total(self) -> int:
        return self.prompt + self.response + (0 if self.append is None else self.append + _CUT_SLACK)

    def describe(self) -> str:
        appended = "" if self.append is None else f" + appended objects {self.append} + {_CUT_SLACK} for the cut"
        return f"prompt {self.prompt} + response {self.response} (rollout_matching.max_new_tokens){appended} = {self.total} tokens"


def require_train_lengths(config: RunConfig, dataset: Dataset, encoder: PromptEncoder, codec: HFTokenCodec) -> None:
    """`require_lengths` of the training samples of a run."""
    longest = config.rollout_matching.max_new_tokens if num_b_steps(config) else 0
    require_lengths(dataset, encoder, codec, max_new_tokens=longest, global_max_length=config.global_max_length)


def require_lengths(dataset: Dataset, encoder: PromptEncoder, codec: HFTokenCodec, *, max_new_tokens: int, global_max_length: int, taught: bool = True) -> None:
    """Every sample fits, whatever the model answers, and can be written.

    Args:
        max_new_tokens: longest response; 0 where no step generates.
        taught: the objects become targets: they are appended to responses, as text that the tokenizer must keep. False for held-out
            samples, whose sequences end with the response.

    Raises:
        ConfigError: prompt + response + append of a sample could exceed `global_max_length`; shows the longest.
        RecordError: of every sample whose objects the tokenizer changes, whose descriptions hold a control or coord token for it, or whose images the
            processor does not take.
    """
    bad = BadRows()
    prompt_lengths: dict[tuple[int, int, int], int] = {}
    longest: _Length | None = None
    for sample in dataset:
        # A prompt's length depends on the number of images and their size alone.
        shape = (len(sample.images), sample.width, sample.height)
        try:
            if shape not in prompt_lengths:
                prompt_lengths[shape] = len(encoder.encode(sample).token_ids)
            append = _append_length(sample, codec) if taught else None
        except RecordError as error:
            bad.add(RecordError(error.problem, field=error.field, remedy=error.remedy, file=str(dataset.path)))
            continue
        length = _Length(sample, prompt_lengths[shape], max_new_tokens, append)
        if longest is None or length.total > longest.total:
            longest = length
    bad.raise_if_any()
    assert longest is not None, "a dataset is never empty"
    if longest.total > global_max_length:
        raise ConfigError(
            f"global_max_length: {global_max_length} is too short for sample {longest.sample.sample_id} of {dataset.path}: {longest.describe()}; "
            f"raise global_max_length to {longest.total}, lower rollout_matching.max_new_tokens, or remove the sample"
        )


def describe_cut_answers(dataset: Dataset, codec: HFTokenCodec, *, max_new_tokens: int, field_order: str) -> str | None:
    """Tell how many samples have a ground truth longer than an answer may be; None where all of them fit.

    A run may mean it so: what was complete before the cut counts. It is told, because the default of an experiment is that of its own data.
    """
    # With the stop token, which an answer needs to end by itself.
    lengths = [len(codec.encode(serialize_objects(sample.objects, field_order=field_order))) + 1 for sample in dataset]
    num_cut = sum(length > max_new_tokens for length in lengths)
    if not num_cut:
        return None
    return (
        f"rollout_matching.max_new_tokens: {max_new_tokens} is less than the ground truth of {num_cut} of the {len(lengths)} samples of {dataset.path}, "
        f"which takes up to {max(lengths)} tokens; raise it to {max(lengths)}, or expect such answers to be cut"
    )


def _append_length(sample: Sample, codec: HFTokenCodec) -> int:
    """Tokens of all objects behind the longest prefix, EOS included. RecordError where their text does not survive the tokenizer."""
    text = layout_append(_LONGEST_PREFIX, sample.objects, start_index=_LONGEST_KEY_INDEX)
    token_ids = codec.encode(text.text)
    changed = _changed_at(text, token_ids, codec)
    if changed is not None:
        index = next((i for i, layout in enumerate(text.objects) if layout.value[0] <= changed < layout.value[1]), None)
        if index is None:
            raise ConfigError(f"model.path: the tokenizer changes the text {text.text!r} when it encodes it; use one that adds and removes nothing")
        problem, remedy = "which the tokenizer changes when it encodes it", "write it in the form that the tokenizer keeps (Unicode NFC for most)"
        raise _bad_desc(sample, index, problem, remedy)
    found = _token_in_desc(text, token_ids, codec)
    if found is not None:
        index, token = found
        raise _bad_desc(sample, index, f"in which the tokenizer reads {token} as a control or coord token", "write it in words")
    return len(token_ids) + 1


def _changed_at(text: SerializedText, token_ids: Sequence[int], codec: HFTokenCodec) -> int | None:
    """The first byte of `text` that its tokens do not give back."""
    wanted, encoded = text.text.encode(), b"".join(codec.piece_bytes(token_id) for token_id in token_ids)
    if encoded == wanted:
        return None
    return next((i for i, (a, b) in enumerate(zip(wanted, encoded, strict=False)) if a != b), min(len(wanted), len(encoded)))


def _token_in_desc(text: SerializedText, token_ids: Sequence[int], codec: HFTokenCodec) -> tuple[int, str] | None:
    """The first object (its index) whose description holds a token that stands for no text, and that token."""
    starts = [start for start, _ in piece_spans(token_ids, codec)]
    for index, layout in enumerate(text.objects):
        for token_id in token_ids[bisect_left(starts, layout.desc[0]) : bisect_left(starts, layout.desc[1])]:
            if token_id in codec.special_ids or codec.coord_bin(token_id) is not None:
                return index, codec.piece_bytes(token_id).decode()
    return None


def _bad_desc(sample: Sample, index: int, problem: str, remedy: str) -> RecordError:
    problem = f"sample {sample.sample_id} (objects in reading order) has {sample.objects[index].desc!r}, {problem}"
    return RecordError(problem, field=f"objects[{index}].desc", remedy=remedy)
