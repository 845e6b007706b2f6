"""Held-out samples, and the checks of length and text that every sample passes before the start.

Longest prompt + response + append must fit (decision 24), and the append, which is the ground
truth, has to survive the tokenizer to be a target.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from statistics import fmean
from typing import Literal, NamedTuple

from learner.checks import check_prompt
from learner.model.loading import LoadedTokens
from learner.segments import PromptEncoder
from shared.config import RunConfig
from shared.config.derive import num_b_steps
from shared.dataset import Dataset, note_skipped
from shared.errors import BadRows, ConfigError, RecordError
from shared.grounding.coco import ScoredObject
from shared.grounding.evaluation import Scene
from shared.grounding.formats import COORD_TOKENS_FORMAT, AnswerFormat
from shared.grounding.objects import ParsedObject
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import SerializedText
from shared.records import Sample
from shared.rollouts import DecodeMode, Rollout, RolloutRequest
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.pieces import piece_spans


class HeldOut:
    """The held-out samples: greedy requests for them, and their answers as scenes to be scored.

    Example: 50 samples on 2 ranks: `requests(step, range(25, 50))` are the second rank's, and
    `score(25 rollouts)` reads its answers strictly, one `Scene` each.
    """

    def __init__(
        self, config: RunConfig, datasets: Sequence[Dataset], tokens: LoadedTokens
    ) -> None:
        """Take the first `data.max_val_samples` of each data set. Raises as `require_lengths`."""
        self.codec = tokens.codec
        self.encoder = PromptEncoder.from_config(config, tokens.processor)
        self._geometry = config.geometry
        self._format = config.answer_format.for_pictures(self.encoder.picture_resize)
        self._run_seed = config.training.seed
        self._score_by = config.evaluation.score
        self.datasets = [
            require_lengths(
                dataset,
                self.encoder,
                tokens.codec,
                max_new_tokens=config.rollout_matching.max_new_tokens,
                global_max_length=config.global_max_length,
                on_bad_row=config.data.on_bad_row,
                taught=False,
                most=config.data.max_val_samples,
                answer_format=self._format,
            ).samples
            for dataset in datasets
        ]
        self.samples = [sample for dataset in self.datasets for sample in dataset]
        """In the order of the validation files; a request's position is its sample's place here."""
        decode = config.rollout_matching.decode_settings(
            stop_token_ids=(tokens.codec.eos_token_id,), banned_token_ids=tokens.banned_token_ids
        )
        self._decode = replace(
            decode,
            mode=DecodeMode.GREEDY,
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            num_beams=1,
            return_logprobs=self._score_by == "coord_probability",
        )

    def requests(self, step: int, positions: range | None = None) -> list[RolloutRequest]:
        """Make one request per sample, in order: of all, or of those at `positions`."""
        request = partial(self.encoder.request, decode=self._decode, step=step)
        return [
            request(self.samples[position], position=position, run_seed=self._run_seed)
            for position in (range(len(self.samples)) if positions is None else positions)
        ]

    def score(self, rollouts: Sequence[Rollout]) -> list[Scene]:
        """Read the answers, one scene per rollout, in order.

        Raises RolloutError when an engine saw another prompt than this side encodes.
        """
        return [self._scene(rollout) for rollout in rollouts]

    def _scene(self, rollout: Rollout) -> Scene:
        sample = self.samples[rollout.position]
        check_prompt(rollout, self.encoder.encode(sample))
        parsed = parse_rollout(
            rollout.response_token_ids,
            self.codec,
            geometry=self._geometry,
            answer_format=self._format.of(sample),
        )
        text = b"".join(map(self.codec.piece_bytes, rollout.response_token_ids))
        return Scene(
            position=rollout.position,
            sample=sample,
            objects=tuple(
                ScoredObject(found.kind, found.bins, found.desc, self._confidence(found, rollout))
                for found in parsed.objects
            ),
            dropped=tuple(dropped.reason for dropped in parsed.dropped),
            truncated=parsed.truncated,
            text=text.decode(errors="replace"),
            finish_reason=rollout.finish_reason,
            answer_format=self._format,
        )

    def _confidence(self, found: ParsedObject, rollout: Rollout) -> float:
        """Score an object, 0..1, by the engine's log-probabilities at temperature 1."""
        if self._score_by == "constant":
            return 1.0
        assert rollout.logprobs is not None, "requested so"
        return fmean(math.exp(rollout.logprobs[position]) for position in found.coord_positions)


# Where our text meets the rollout's, both are encoded anew: a few tokens where there was one.
_CUT_SLACK = 4


class Fitting(NamedTuple):
    """The samples that a model can be shown."""

    samples: Dataset
    appends: list[int]
    """Tokens of each one's objects after the longest prefix; empty where they are not taught."""


def require_train_lengths(
    config: RunConfig, dataset: Dataset, encoder: PromptEncoder, codec: HFTokenCodec
) -> Fitting:
    """Apply `require_lengths` to the training samples of a run."""
    return require_lengths(
        dataset,
        encoder,
        codec,
        max_new_tokens=config.rollout_matching.max_new_tokens if num_b_steps(config) else 0,
        global_max_length=config.global_max_length,
        on_bad_row=config.data.on_bad_row,
        answer_format=config.answer_format.for_pictures(encoder.picture_resize),
    )


def require_lengths(
    dataset: Dataset,
    encoder: PromptEncoder,
    codec: HFTokenCodec,
    *,
    max_new_tokens: int,
    global_max_length: int,
    on_bad_row: Literal["error", "skip"],
    taught: bool = True,
    most: int | None = None,
    answer_format: AnswerFormat = COORD_TOKENS_FORMAT,
) -> Fitting:
    """Check that every sample fits, whatever the model answers, and can be written.

    Example: prompt 26 + response 160 + append 45 + 4 for the cut = 235 tokens: refused where
    `global_max_length` is 200.

    Args:
        max_new_tokens: longest response; 0 where no step generates.
        taught: the objects become targets, which the tokenizer must keep. False for held-out
            samples, whose sequences end with the response.
        most: the number of samples that are wanted, the first ones; None: all.

    Returns:
        The samples that are not skipped.

    Raises:
        ConfigError: a sample could exceed `global_max_length`; shows the longest.
        RecordError: the tokenizer does not keep the text of samples, or the processor does not take
            their images; names all of them. With `on_bad_row: skip` only where no other is left.
    """
    bad = BadRows()
    skipped = list(dataset.skipped)
    fitting: list[Sample] = []
    appends: list[int] = []
    longest_total = -1
    longest = ""
    for sample in dataset:
        if len(fitting) == most:
            break
        try:
            prompt = encoder.num_tokens(sample)
            append = _append_length(sample, codec, answer_format.of(sample)) if taught else None
        except RecordError as error:
            located = RecordError(
                error.problem, field=error.field, remedy=error.remedy, file=str(dataset.path)
            )
            if on_bad_row == "error":
                bad.add(located)
            else:
                skipped.append(note_skipped(located))
            continue
        fitting.append(sample)
        total = prompt + max_new_tokens
        appended = ""
        if append is not None:
            appends.append(append)
            total += append + _CUT_SLACK
            appended = f" + appended objects {append} + {_CUT_SLACK} for the cut"
        if total > longest_total:
            longest_total = total
            longest = (
                f"sample {sample.sample_id} of {dataset.path}: prompt {prompt} + response"
                f" {max_new_tokens} (rollout_matching.max_new_tokens){appended} = {total} tokens"
            )
    bad.raise_if_any()
    samples = Dataset.of(dataset.path, fitting, skipped)
    if longest_total > global_max_length:
        raise ConfigError(
            f"global_max_length: {global_max_length} is too short for {longest}; raise"
            f" global_max_length to {longest_total}, lower rollout_matching.max_new_tokens, or"
            " remove the sample"
        )
    return Fitting(samples, appends)


def describe_cut_answers(
    fitting: Fitting, codec: HFTokenCodec, *, max_new_tokens: int, answer_format: AnswerFormat
) -> str | None:
    """Say how many samples have a ground truth longer than an answer may be; None if none has."""
    samples = fitting.samples
    appends = fitting.appends or repeat(max_new_tokens, len(samples))
    # The append has the same objects under longer keys: where it is short enough, so is the answer,
    # and need not be encoded too.
    texts = (
        answer_format.of(sample).layout_objects(sample.objects).text
        for sample, append in zip(samples, appends, strict=True)
        if append >= max_new_tokens
    )
    # With the stop token, which an answer needs to end by itself.
    cut = [length for text in texts if (length := len(codec.encode(text)) + 1) > max_new_tokens]
    if not cut:
        return None
    return (
        f"rollout_matching.max_new_tokens: {max_new_tokens} is less than the ground truth of"
        f" {len(cut)} of the {len(samples)} samples of {samples.path}, which takes up to {max(cut)}"
        f" tokens; raise it to {max(cut)}, or expect such answers to be cut"
    )


def _append_length(sample: Sample, codec: HFTokenCodec, answer_format: AnswerFormat) -> int:
    """Count the tokens of all objects after the longest prefix, EOS included.

    Raises RecordError where their text does not survive the tokenizer.
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
    """Raise RecordError for a description with a token that stands for no text."""
    starts = [start for start, _ in piece_spans(token_ids, codec)]
    for index, layout in enumerate(text.objects):
        first = bisect_left(starts, layout.desc[0])
        stop = bisect_left(starts, layout.desc[1])
        for token_id in token_ids[first:stop]:
            if token_id in codec.special_ids or codec.coord_bin(token_id) is not None:
                token = codec.piece_bytes(token_id).decode()
                problem = f"in which the tokenizer reads {token} as a control or coord token"
                raise _bad_desc(sample, index, problem, "write it in words")


def _bad_desc(sample: Sample, index: int, problem: str, remedy: str) -> RecordError:
    desc = sample.objects[index].desc
    problem = f"sample {sample.sample_id} (objects in reading order) has {desc!r}, {problem}"
    return RecordError(problem, field=f"objects[{index}].desc", remedy=remedy)
