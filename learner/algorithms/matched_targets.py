"""Targets of rollout matching: the tokens to learn, from a sample's ground truth and its rollout.

Channel A: the serialised ground truth with its closing brackets, then EOS. Channel B: the kept
prefix of the model's own rollout, the appended unmatched ground truth, closing brackets, EOS (spec
rollout-matching-sft: one canonical teacher-forced target sequence; decision 37). Options beyond
the specification change what is kept, supervised and taught: docs/explanation/objectives.md.

If the appended text meets the rollout's text inside a token, both are encoded together (decision
33). A vocabulary such as Qwen's has `}}` and `},` as tokens. Encoded separately, every target would
teach the model to split these tokens exactly where it decides to stop or to continue.
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
from shared.tokens.hf_codec import piece_spans
from shared.tokens.vocabulary import TokenCodec


def ground_truth_target(sample: Sample, codec: TokenCodec, settings: TargetSettings) -> Target:
    """Return the target of channel A: the sample's ground truth as text, then EOS.

    The objects are in the order of the sample's row.
    """
    answer_format = settings.answer_format.of(sample)
    text = answer_format.layout_objects(sample.objects)
    draft = _Draft(codec.encode(text.text), codec, answer_format)
    draft.add_ours(0)
    draft.add_serialized(text, sample.objects, offset=0)
    return draft.target(sample.sample_id)


def rollout_target(
    rollout: Rollout, sample: Sample, codec: TokenCodec, settings: TargetSettings
) -> Target:
    """Return the target of channel B: the model's own answer, corrected by the ground truth.

    The coordinates of objects that match the ground truth are trained towards it. Objects that the
    answer lacks are appended.
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
    # The target's EOS is always teacher-forced, so it is not compared with the rollout's. Tokens
    # from the first one that the repeat guard forced are not compared either.
    num_sampled = min((target.reading.num_kept, *rollout.forced_positions))
    return replace(target, compared_logprobs=rollout.logprobs[:num_sampled])


def parsed_target(
    parsed: ParsedRollout, sample: Sample, codec: TokenCodec, settings: TargetSettings
) -> Target:
    """Return the target of channel B (see `rollout_target`) for an answer that is already parsed.

    A matched object whose coordinate tokens cannot be supervised is excluded: its tokens are not
    trained, and its ground truth is appended.
    """
    answer_format = settings.answer_format.of(sample)
    match = match_objects(parsed.objects, sample.objects, **asdict(settings.matching))
    supervised: dict[MatchedPair, tuple[float, ...]] = {}
    for pair in match.pairs:
        prediction = parsed.objects[pair.prediction]
        if not answer_format.coord_tokens:
            # Coordinates in digits have no slots. Their tokens are taught as text.
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
    # The ground truth of an excluded pair is appended like a missed one, so every object is taught.
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
    # In the fallback the opening brace is appended text too.
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
    """Encode the kept prefix with the text to append.

    Return the tokens, and how many of the first tokens the engine sampled.
    """
    prefix = list(parsed.prefix_token_ids)
    num_kept = parsed.num_unchanged
    begin = num_kept
    while begin and codec.coord_bin(prefix[begin - 1]) is None:
        begin -= 1
    sampled = prefix[begin:num_kept]
    # A coord token never fuses with other text. So the text after the last coord token is encoded
    # together with the append, if the tokenizer would write the rollout's tokens the same way. Most
    # sampled tokens stay the same. A tokenizer that writes `"]` `]},` to continue and `"]]` `}}` to
    # stop chooses already one token before the cut, so that token changes too.
    if codec.encode(_text_of(sampled, codec)) == sampled:
        joint = codec.encode(_text_of(prefix[begin:], codec) + append)
        pairs = zip(sampled, joint, strict=False)
        num_same = next((n for n, (old, new) in enumerate(pairs) if old != new), len(sampled))
        return [*prefix[:begin], *joint], begin + num_same
    # If the tokenizer would write the text differently, the rollout's tokens stay. Only the kept
    # text of the cut token is encoded with the append.
    if num_kept < len(prefix):
        cut_and_append = codec.encode(_text_of(prefix[num_kept:], codec) + append)
        return [*prefix[:num_kept], *cut_and_append], num_kept
    # If no token was cut, the last token is encoded again if it would fuse with the append.
    last = _text_of(prefix[-1:], codec)
    joint = codec.encode(last + append)
    ends = [end for _, end in piece_spans(joint, codec)]
    # A token that begins inside a character cannot be encoded separately.
    if last.encode() == codec.piece_bytes(prefix[-1]) and len(last.encode()) not in ends:
        return [*prefix[:-1], *joint], num_kept - 1
    return [*prefix, *codec.encode(append)], num_kept


def _text_of(token_ids: Sequence[int], codec: TokenCodec) -> str:
    return b"".join(map(codec.piece_bytes, token_ids)).decode(errors="replace")


class _Draft:
    """An unfinished target: its tokens without EOS, and the role of each token.

    Spans are byte offsets in the text of the target.
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
        """Supervise the text of the matched objects in the kept prefix.

        `matched` are indices into `parsed.objects`.
        """
        for number in matched:
            value = self._overlapping(parsed.objects[number].value)
            self._roles[value] = TokenRole.MATCHED_STRUCTURE
        # Tokens of a description and of unmatched objects are neutral.
        for number, prediction in enumerate(parsed.objects):
            value = self._overlapping(prediction.value)
            if number not in matched:
                self._roles[value] = TokenRole.NEUTRAL
                continue
            # A token that ends after the matched object, such as `},`, is neutral too. Only correct
            # separators would be taught, so the model would continue too often. (The option
            # `supervise_separators` teaches them nevertheless.)
            last = value.stop - 1
            if self._spans[last][1] > prediction.value[1]:
                self._roles[last] = TokenRole.NEUTRAL
            self._roles[self._overlapping(prediction.desc_value)] = TokenRole.NEUTRAL
        # A token id beyond the vocabulary has no text, so it is neutral.
        self._roles[[start == end for start, end in self._spans]] = TokenRole.NEUTRAL

    def add_separators(self, parsed: ParsedRollout, choices: Sequence[int]) -> None:
        """Supervise the tokens at the byte offsets `choices`.

        With each of these tokens, the answer continues with a matched object instead of ending.
        """
        # `choices` are the offsets where the answer could have ended instead: the comma before
        # an entry, or the first character of the first entry. If `},` is one token, the whole token
        # is supervised, although its `}` closes the object before.
        for choice in choices:
            self._roles[self._overlapping((choice, choice + 1))] = TokenRole.SEPARATOR
        # A separator token that contains the end of a name would teach that name: make it neutral.
        for prediction in parsed.objects:
            desc = self._overlapping(prediction.desc_value)
            is_separator = self._roles[desc] == TokenRole.SEPARATOR
            self._roles[desc][is_separator] = TokenRole.NEUTRAL

    def correct_name(self, parsed: ParsedRollout, number: int, name: str, num_prefix: int) -> None:
        """Teach the right `name` of object `number` at the first sampled token that differs."""
        # The context of a token is the sampled text before it, so later tokens of the correct name
        # cannot be taught. No token is taught if the tokenizer would write the sampled text
        # differently, or at or after position `num_prefix`, where the appended text begins.
        prediction = parsed.objects[number]
        if prediction.desc == name:
            return
        # Tokens depend on the text around them, at most up to the nearest coord tokens, because
        # these never fuse. Without coord tokens the text of the object is enough.
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
        # There is a difference, at the latest at the quote after the shorter name.
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
        """Teach the coordinates of the matched object `number`.

        `right` has the digits of each coordinate of the ground truth.
        """
        # The correct first tokens of a coordinate are taught. At the first token that differs from
        # `right`, the token of the correct number is taught. Later tokens are not taught, because
        # their context is wrong.
        prediction = parsed.objects[number]
        for span in prediction.coord_spans:
            self._roles[self._overlapping(span)] = TokenRole.NEUTRAL
        # Tokens depend on the text around them. The text of all tokens that overlap the object is
        # enough if the tokenizer writes it in the same tokens.
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
        # Set last. A token with parts of two coordinates gets one override.
        self._roles[list(overrides)] = TokenRole.CORRECTED_DIGITS
        self._label_overrides += overrides.values()

    def add_slots(
        self, positions: Sequence[int], targets: Sequence[float], *, is_box: bool
    ) -> None:
        """Supervise coord slots. `is_box`: the targets come from a box, not from transport."""
        if is_box:
            self._box_slots.append(len(self._coord_positions))
        self._roles[list(positions)] = TokenRole.COORD
        self._coord_positions.extend(positions)
        self._coord_targets.extend(targets)

    def add_ours(self, start: int) -> int:
        """Give the role STRUCTURE to all tokens that end after byte `start`.

        Return the position of the first of them.
        """
        first = bisect_right(self._spans, start, key=lambda span: span[1])
        self._roles[first:] = TokenRole.STRUCTURE
        return first

    def add_serialized(
        self, text: SerializedText, objects: Sequence[GroundTruthObject], *, offset: int
    ) -> None:
        """Supervise the serialised `objects`. Their `text` begins at byte `offset`."""
        end = offset + len(text.text.encode())
        written = self._spans[-1][1] if self._spans else 0
        assert written == end, "encoding the target changed its text"
        # In the order of the text, which groups objects with the same phrase.
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
        """Return the finished target, which ends with EOS."""
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
        """Return the positions of the tokens that overlap `span`, counted from byte `offset`.

        The result is empty for an empty span at the beginning of a token.
        """
        start = offset + span[0]
        stop = offset + span[1]
        first = bisect_right(self._spans, start, key=lambda token: token[1])
        return slice(first, bisect_left(self._spans, stop, lo=first, key=lambda token: token[0]))


def _is_canonical(token_ids: Sequence[int], codec: TokenCodec) -> bool:
    """Return whether the tokenizer encodes the text of these tokens as the same tokens."""
    return codec.encode(_text_of(token_ids, codec)) == list(token_ids)


def _is_capped(
    prediction: ParsedObject, truth: GroundTruthObject, settings: TargetSettings
) -> bool:
    """Return whether the pair uses optimal transport with an epsilon that `epsilon_cap` lowers."""
    is_transported = GeometryKind.POLY in (prediction.kind, truth.kind)
    transport = settings.transport
    return is_transported and transport.epsilon_of(truth) < transport.epsilon


def _has_certain_slots(prediction: ParsedObject, parsed: ParsedRollout, codec: TokenCodec) -> bool:
    """Return whether each of the object's `coord_positions` has the coordinate token of its bin.

    The positions must also be ascending and inside the object.
    """
    positions = prediction.coord_positions
    start, stop = prediction.span
    return (
        all(a < b for a, b in pairwise(positions))
        and all(start <= position < stop for position in positions)
        and [codec.coord_bin(parsed.prefix_token_ids[position]) for position in positions]
        == list(prediction.bins)
    )
