"""Targets of rollout matching: `Y_train` of a sample, from its ground truth and its rollout.

Channel A: the ground truth serialised, closed, EOS. Channel B: the kept prefix of the model's own
rollout, the unmatched ground truth appended, closed, EOS (spec rollout-matching-sft: one canonical
teacher-forced target sequence; decision 37). Options beyond the specification change which part of
the rollout is kept, what of it is supervised, and which token is taught: docs/objectives.md.

If our text meets the rollout's inside a token, both are encoded together (decision 33). A
vocabulary such as Qwen's has `}}` and `},` as tokens; encoded apart, every target would teach the
model to split them at the very place where it decides to stop or go on.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence, Set
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np

from learner.ot_targets import slot_targets
from learner.targets import LabelOverride, ParsedAndMatched, Target, TargetSettings, TokenRole
from shared.grounding.matching import MatchedPair, match_objects
from shared.grounding.objects import ParsedObject, ParsedRollout
from shared.grounding.parsing import parse_rollout, trim_prefix
from shared.grounding.serialize import AnswerFormat, SerializedText, escaped
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.rollouts import Rollout
from shared.tokens.pieces import piece_spans
from shared.tokens.vocabulary import TokenCodec


def ground_truth_target(sample: Sample, codec: TokenCodec, settings: TargetSettings) -> Target:
    """Make the target of channel A: the sample's objects in record order."""
    answer_format = settings.answer_format.of(sample)
    text = answer_format.layout_objects(sample.objects)
    draft = _Draft(codec.encode(text.text), codec, answer_format)
    draft.add_ours(0)
    draft.add_serialized(text, sample.objects, offset=0)
    return draft.target(sample.sample_id)


def rollout_target(
    rollout: Rollout, sample: Sample, codec: TokenCodec, settings: TargetSettings
) -> Target:
    """Make the target of channel B.

    Matched slots are aimed at the ground truth; objects that were missed are appended.
    """
    parsed = parse_rollout(
        rollout.response_token_ids,
        codec,
        geometry=settings.geometry,
        answer_format=settings.answer_format.of(sample),
    )
    target = parsed_target(parsed, sample, codec, settings)
    if rollout.logprobs is None:
        return target
    assert target.reading is not None
    # EOS is the target's own and teacher-forced, whether or not the rollout's was forced.
    num_sampled = min((target.reading.num_kept, *rollout.forced_positions))
    return replace(target, compared_logprobs=rollout.logprobs[:num_sampled])


def parsed_target(
    parsed: ParsedRollout, sample: Sample, codec: TokenCodec, settings: TargetSettings
) -> Target:
    """Make the target of a rollout that was parsed already.

    A matched prediction whose slots cannot be supervised is excluded: its tokens are neutral and
    its ground truth is appended.
    """
    answer_format = settings.answer_format.of(sample)
    match = match_objects(parsed.objects, sample.objects, **asdict(settings.matching))
    supervised: dict[MatchedPair, tuple[float, ...]] = {}
    for pair in match.pairs:
        prediction = parsed.objects[pair.prediction]
        if not answer_format.coord_tokens:
            # Digits have no slots to aim: their tokens are taught.
            if _is_canonical(parsed.prefix_token_ids[slice(*prediction.span)], codec):
                supervised[pair] = ()
        elif _has_certain_slots(prediction, parsed, codec):
            truth = sample.objects[pair.ground_truth]
            aims = slot_targets(prediction, truth, settings.transport)
            if aims is not None:
                supervised[pair] = aims
    kept = parsed
    if settings.trims_false_positives:
        num_objects = max((pair.prediction + 1 for pair in supervised), default=0)
        kept = trim_prefix(
            parsed,
            num_objects,
            codec,
            geometry=settings.geometry,
            answer_format=answer_format,
        )
    # An excluded pair's ground truth is appended like a missed one: nothing goes untaught.
    taken = {pair.ground_truth for pair in supervised}
    appended = tuple(index for index in range(len(sample.objects)) if index not in taken)
    objects = tuple(sample.objects[index] for index in appended)
    start_index = 1 if kept.max_object_index is None else kept.max_object_index + 1
    text = answer_format.layout_append(kept.prefix_text, objects, start_index=start_index)

    token_ids, num_kept = _written(kept, text.text, codec)
    draft = _Draft(token_ids, codec, answer_format)
    draft.add_matched(kept, {pair.prediction for pair in supervised})
    for pair, aims in supervised.items():
        prediction = parsed.objects[pair.prediction]
        truth = sample.objects[pair.ground_truth]
        is_box = prediction.kind is truth.kind is GeometryKind.BBOX
        if aims:
            draft.add_slots(prediction.coord_positions, aims, is_box=is_box)
    prefix_bytes = b"".join(map(codec.piece_bytes, kept.prefix_token_ids))
    num_prefix_bytes = len(prefix_bytes)
    # The fallback's brace is our text like all that follows it.
    num_prefix = draft.add_ours(0 if kept.fallback else num_prefix_bytes)
    draft.add_serialized(text, objects, offset=num_prefix_bytes)
    if settings.supervises_separators:
        values = (kept.objects[pair.prediction].value for pair in supervised)
        choices = [answer_format.choice_to_go_on(prefix_bytes, value) for value in values]
        draft.add_separators(kept, choices)
    if not answer_format.coord_tokens:
        for pair in supervised:
            right = answer_format.digits(sample.objects[pair.ground_truth].bins)
            draft.add_digits(kept, pair.prediction, right, num_prefix)
    if settings.corrects_names:
        for pair in supervised:
            name = sample.objects[pair.ground_truth].desc
            draft.correct_name(kept, pair.prediction, name, num_prefix)

    reading = ParsedAndMatched(
        parsed,
        kept,
        match,
        supervised=tuple(supervised),
        excluded=tuple(pair for pair in match.pairs if pair not in supervised),
        appended=appended,
        appended_text=text.text,
        num_kept=num_kept,
        num_prefix=num_prefix,
        num_capped=sum(
            _is_capped(parsed.objects[pair.prediction], sample.objects[pair.ground_truth], settings)
            for pair in supervised
        ),
    )
    return replace(draft.target(sample.sample_id), reading=reading)


def _written(parsed: ParsedRollout, append: str, codec: TokenCodec) -> tuple[list[int], int]:
    """Write prefix and append as tokens; return them and how many are the rollout's own."""
    prefix = list(parsed.prefix_token_ids)
    num_kept = parsed.num_unchanged
    begin = num_kept
    while begin and codec.coord_bin(prefix[begin - 1]) is None:
        begin -= 1
    sampled = prefix[begin:num_kept]
    # All text behind the last coord token, which is a token under any circumstances, is encoded as
    # one, as long as the rollout's tokens there are the tokenizer's. They mostly stay; but one that
    # writes `"]` `]},` and `"]]` `}}` makes the choice to stop or go on before the cut.
    if codec.encode(_text_of(sampled, codec)) == sampled:
        joint = codec.encode(_text_of(prefix[begin:], codec) + append)
        pairs = zip(sampled, joint, strict=False)
        num_same = next((n for n, (old, new) in enumerate(pairs) if old != new), len(sampled))
        return [*prefix[:begin], *joint], begin + num_same
    # Where the rollout wrote its text in other tokens, these stay; only the kept text of the cut
    # token is encoded with the append.
    if num_kept < len(prefix):
        cut_and_append = codec.encode(_text_of(prefix[num_kept:], codec) + append)
        return [*prefix[:num_kept], *cut_and_append], num_kept
    # A last token that was not cut is encoded anew too where the tokenizer would join its text with
    # the append.
    last = _text_of(prefix[-1:], codec)
    joint = codec.encode(last + append)
    ends = [end for _, end in piece_spans(joint, codec)]
    # A token that begins inside a character has no text of its own to encode.
    if last.encode() == codec.piece_bytes(prefix[-1]) and len(last.encode()) not in ends:
        return [*prefix[:-1], *joint], num_kept - 1
    return [*prefix, *codec.encode(append)], num_kept


def _text_of(token_ids: Sequence[int], codec: TokenCodec) -> str:
    return b"".join(map(codec.piece_bytes, token_ids)).decode(errors="replace")


class _Draft:
    """A target in the making: its tokens without EOS, and their supervision.

    Spans count the bytes of its text.
    """

    def __init__(
        self, token_ids: list[int], codec: TokenCodec, answer_format: AnswerFormat
    ) -> None:
        self._codec = codec
        self._has_coord_tokens = bool(answer_format.coord_tokens)
        self._token_ids = token_ids
        self._spans = piece_spans(token_ids, codec)
        self._roles = np.full(len(token_ids), TokenRole.NEUTRAL, dtype=np.uint8)
        self._coord_positions: list[int] = []
        self._coord_targets: list[float] = []
        self._box_slots: list[int] = []
        self._label_overrides: list[LabelOverride] = []

    def add_matched(self, parsed: ParsedRollout, matched: Set[int]) -> None:
        """Supervise the text of a prefix's matched objects, which are indices into its objects."""
        for number in matched:
            value = self._overlapping(parsed.objects[number].value)
            self._roles[value] = TokenRole.MATCHED_STRUCTURE
        # Neutral is a token that holds a description, or any of an object that is not matched.
        for number, prediction in enumerate(parsed.objects):
            value = self._overlapping(prediction.value)
            if number not in matched:
                self._roles[value] = TokenRole.NEUTRAL
                continue
            # So is one that reaches past a matched object, as `},` does: to teach only those
            # separators of the prefix that turned out right would teach too many. (The option to
            # teach them all the same is `add_separators`.)
            last = value.stop - 1
            if self._spans[last][1] > prediction.value[1]:
                self._roles[last] = TokenRole.NEUTRAL
            self._roles[self._overlapping(prediction.desc_value)] = TokenRole.NEUTRAL
        # An id beyond the vocabulary has no text to be supervised for.
        self._roles[[start == end for start, end in self._spans]] = TokenRole.NEUTRAL

    def add_separators(self, parsed: ParsedRollout, choices: Sequence[int]) -> None:
        """Supervise the choice to go on to each of a prefix's matched objects."""
        # `choices` are the bytes where the closing bracket could have been: the comma before an
        # entry, the first character of the first. With `},` in one token it is all of the token,
        # whatever object that closes.
        for choice in choices:
            self._roles[self._overlapping((choice, choice + 1))] = TokenRole.SEPARATOR
        # A name that a token holds the end of would be taught with it.
        for prediction in parsed.objects:
            desc = self._overlapping(prediction.desc_value)
            is_separator = self._roles[desc] == TokenRole.SEPARATOR
            self._roles[desc][is_separator] = TokenRole.NEUTRAL

    def correct_name(self, parsed: ParsedRollout, number: int, name: str, num_prefix: int) -> None:
        """Teach `name` at the first token at which that of a prefix's object differs from it."""
        # A token is taught after the text that the model wrote before it, so no other token of the
        # right name can be. If the model's tokens are not the tokenizer's, none is; nor in the
        # place of our own text, which begins at position `num_prefix`.
        prediction = parsed.objects[number]
        if prediction.desc == name:
            return
        # Tokens depend on the text around them: on that up to the nearest coord tokens at most,
        # which never fuse; where there are none, an object's is enough of it.
        if self._has_coord_tokens:
            tokens = self._overlapping(prediction.desc_value)
            first = tokens.start
            while first and self._codec.coord_bin(self._token_ids[first - 1]) is None:
                first -= 1
            stop = tokens.stop
            while stop < len(self._token_ids) and (
                self._codec.coord_bin(self._token_ids[stop]) is None
            ):
                stop += 1
        else:
            region = self._overlapping(prediction.value)
            first, stop = region.start, region.stop
        written = self._token_ids[first:stop]
        text = b"".join(map(self._codec.piece_bytes, written))
        if not _is_canonical(written, self._codec):
            return
        start, end = (offset - self._spans[first][0] for offset in prediction.desc_value)
        right = text[:start] + escaped(name).encode() + text[end:]
        corrected = self._codec.encode(right.decode())
        pairs = zip(written, corrected, strict=False)
        # The texts differ at the quote behind the shorter name at the latest, so the tokens do.
        position, token_id = next(
            (n, new) for n, (old, new) in enumerate(pairs, first) if old != new
        )
        is_taken = position in {one.position for one in self._label_overrides}
        if position < num_prefix and not is_taken:
            self._roles[position] = TokenRole.CORRECTED_DESC
            self._label_overrides.append(LabelOverride(position, token_id, number))

    def add_digits(
        self, parsed: ParsedRollout, number: int, right: Sequence[str], num_prefix: int
    ) -> None:
        """Teach the coordinates of a prefix's matched object; `right` has the true digits."""
        # As far as a coordinate is right it is taught as it stands. At the first token at which it
        # differs from `right`, that of the right number is taught; what the model wrote after it is
        # no context for the rest.
        prediction = parsed.objects[number]
        for span in prediction.coord_spans:
            self._roles[self._overlapping(span)] = TokenRole.NEUTRAL
        # Tokens depend on the text around them; an object's, with what its outer tokens hold beside
        # it, is enough of it where it is written as the tokenizer writes it.
        region = self._overlapping(prediction.value)
        written = self._token_ids[region]
        if not _is_canonical(written, self._codec):
            return
        text = b"".join(map(self._codec.piece_bytes, written))
        begin = self._spans[region.start][0]
        overrides: dict[int, LabelOverride] = {}
        for (start, stop), digits in zip(prediction.coord_spans, right, strict=True):
            tokens = self._overlapping((start, stop))
            corrected = text[: start - begin] + digits.encode() + text[stop - begin :]
            if corrected == text:
                self._roles[tokens] = TokenRole.DIGITS
                continue
            pairs = zip(written, self._codec.encode(corrected.decode()), strict=False)
            position, token_id = next(
                (n, new) for n, (old, new) in enumerate(pairs, region.start) if old != new
            )
            self._roles[tokens.start : position] = TokenRole.DIGITS
            if position < num_prefix:
                overrides.setdefault(position, LabelOverride(position, token_id, number))
        # Last, and one for a token that holds parts of two coordinates.
        self._roles[list(overrides)] = TokenRole.CORRECTED_DIGITS
        self._label_overrides += overrides.values()

    def add_slots(
        self, positions: Sequence[int], targets: Sequence[float], *, is_box: bool
    ) -> None:
        """Supervise coord slots. `is_box`: the targets are a box's own, not optimal transport's."""
        if is_box:
            self._box_slots.append(len(self._coord_positions))
        self._roles[list(positions)] = TokenRole.COORD
        self._coord_positions.extend(positions)
        self._coord_targets.extend(targets)

    def add_ours(self, start: int) -> int:
        """Supervise each token with text from `start` on; return the position of the first."""
        first = bisect_right(self._spans, start, key=lambda span: span[1])
        self._roles[first:] = TokenRole.STRUCTURE
        return first

    def add_serialized(
        self, text: SerializedText, objects: Sequence[GroundTruthObject], *, offset: int
    ) -> None:
        """Supervise the serialised `objects`, whose text begins at `offset`."""
        end = offset + len(text.text.encode())
        written = self._spans[-1][1] if self._spans else 0
        assert written == end, "encoding the target changed its text"
        # In the order of the text: objects of one phrase stand together.
        placed = sorted(zip(text.objects, objects, strict=True), key=lambda pair: pair[0].value)
        for layout, object_ in placed:
            self._roles[self._overlapping(layout.desc, offset)] = TokenRole.DESC
            if not self._has_coord_tokens:
                for coord in layout.coords:
                    self._roles[self._overlapping(coord, offset)] = TokenRole.DIGITS
                continue
            positions = [self._overlapping(coord, offset).start for coord in layout.coords]
            bins = [self._codec.coord_bin(self._token_ids[position]) for position in positions]
            assert bins == list(object_.bins)
            self.add_slots(positions, object_.bins, is_box=object_.kind is GeometryKind.BBOX)
        self._roles[self._overlapping(text.closing, offset)] = TokenRole.CLOSING

    def target(self, sample_id: str) -> Target:
        """Close the target with EOS."""
        return Target(
            sample_id,
            (*self._token_ids, self._codec.eos_token_id),
            np.append(self._roles, np.uint8(TokenRole.CLOSING)),
            coord_positions=tuple(self._coord_positions),
            coord_targets=tuple(self._coord_targets),
            box_slots=tuple(self._box_slots),
            label_overrides=tuple(sorted(self._label_overrides)),
        )

    def _overlapping(self, span: tuple[int, int], offset: int = 0) -> slice:
        """Find the tokens whose bytes overlap `span`, which is counted from `offset`.

        None of an empty span at the beginning of a token.
        """
        start = offset + span[0]
        stop = offset + span[1]
        first = bisect_right(self._spans, start, key=lambda token: token[1])
        return slice(first, bisect_left(self._spans, stop, lo=first, key=lambda token: token[0]))


def _is_canonical(token_ids: Sequence[int], codec: TokenCodec) -> bool:
    """Tell whether the tokenizer writes the text of these tokens as they do."""
    return codec.encode(_text_of(token_ids, codec)) == list(token_ids)


def _is_capped(
    prediction: ParsedObject, truth: GroundTruthObject, settings: TargetSettings
) -> bool:
    """Tell whether the pair is transported, and with an epsilon that the cap has lowered."""
    is_transported = GeometryKind.POLY in (prediction.kind, truth.kind)
    transport = settings.transport
    return is_transported and transport.epsilon_of(truth) < transport.epsilon


def _has_certain_slots(prediction: ParsedObject, parsed: ParsedRollout, codec: TokenCodec) -> bool:
    """Tell whether the positions are one coord token for each bin, in order, inside the object."""
    positions = prediction.coord_positions
    start, stop = prediction.span
    return (
        all(a < b for a, b in pairwise(positions))
        and all(start <= position < stop for position in positions)
        and [codec.coord_bin(parsed.prefix_token_ids[position]) for position in positions]
        == list(prediction.bins)
    )
