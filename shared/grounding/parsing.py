"""The strict parser: from an answer's token ids to its objects and its usable prefix (decision 32).

The answer format (`shared.grounding.formats`) defines the syntax.

The bytes of all tokens are scanned as one text, and byte offsets map back to tokens. So at most one
token is encoded again: a token in which the kept prefix ends. A malformed answer never raises an
error.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from shared.grounding.formats import COORD_TOKENS_FORMAT
from shared.grounding.objects import DroppedObject, DropReason, ParsedObject, ParsedRollout
from shared.grounding.scanner import SPACE, Container, Entry
from shared.grounding.serialize import AnswerFormat
from shared.grounding.validation import Response
from shared.records import DEFAULT_GEOMETRY, GeometryKind
from shared.tokens.vocabulary import TokenCodec

_SHAPE_KEY = re.compile(
    rb'"(?:%b)"' % b"|".join(kind.encode() for kind in GeometryKind) + SPACE + b":"
)


@dataclass(frozen=True, slots=True)
class _Prefix:
    token_ids: list[int]
    ends: list[int]
    """[token]: offset after each token's bytes."""
    num_unchanged: int
    cut: int
    """Number of bytes of the answer that are kept; 0 in the fallback."""


def parse_rollout(
    token_ids: Sequence[int],
    codec: TokenCodec,
    *,
    geometry: frozenset[GeometryKind] = DEFAULT_GEOMETRY,
    answer_format: AnswerFormat = COORD_TOKENS_FORMAT,
) -> ParsedRollout:
    """Find the valid objects of a model's answer, and the prefix that training keeps.

    The time is linear in the length of the answer.

    Args:
        token_ids: the answer, with or without its stop token.
        geometry: kinds of shapes that are kept; without `poly` every valid polygon is dropped.
        answer_format: the format that the prompt asks for.

    Raises:
        ValueError: `geometry` does not include boxes. A malformed answer raises no error.
    """
    if GeometryKind.BBOX not in geometry:
        raise ValueError(f"geometry {sorted(geometry)} lacks bbox_2d, which is always read; add it")
    response = Response.read(token_ids, codec)
    container = answer_format.scan(response.text) or Container((), closed=False)
    prefix = _prefix(response, container.entries, codec, answer_format.empty_prefix)
    entries = [entry for entry in container.entries if entry.start < prefix.cut]
    objects: list[ParsedObject] = []
    dropped: list[DroppedObject] = []
    for entry in entries:
        shape = answer_format.validate(entry, response, prefix.ends, geometry)
        if isinstance(shape, DropReason):
            dropped.append(DroppedObject(entry.key, shape))
            continue
        assert entry.value is not None
        # Half-open range of the tokens that overlap the value.
        first = bisect_right(prefix.ends, entry.value[0])
        span = (first, bisect_left(prefix.ends, entry.value[1]) + 1)
        objects.append(
            ParsedObject(
                entry.key,
                entry.number,
                shape.kind,
                shape.desc,
                shape.bins,
                shape.coord_positions,
                span,
                entry.value,
                shape.desc_span,
                shape.coord_spans,
                shape.numbers,
            )
        )

    return ParsedRollout(
        prefix_token_ids=tuple(prefix.token_ids),
        prefix_text=(
            response.text[: prefix.cut].decode(errors="replace")
            if prefix.cut
            else answer_format.empty_prefix
        ),
        objects=tuple(objects),
        dropped=tuple(dropped),
        max_object_index=answer_format.max_index(response.text[: prefix.cut], entries),
        truncated=not container.closed,
        fallback=not prefix.cut,
        num_unchanged=prefix.num_unchanged,
        num_behind=len(_SHAPE_KEY.findall(response.text, container.end)) if container.closed else 0,
    )


def trim_prefix(
    parsed: ParsedRollout,
    num_objects: int,
    codec: TokenCodec,
    *,
    geometry: frozenset[GeometryKind] = DEFAULT_GEOMETRY,
    answer_format: AnswerFormat = COORD_TOKENS_FORMAT,
) -> ParsedRollout:
    """Return a parsed answer that ends after its first `num_objects` valid objects.

    With 0 objects nothing is kept (`ParsedRollout.fallback`). `geometry` and `answer_format` must
    be as in the call of `parse_rollout`.

    Example: a prefix of two objects and a damaged entry, cut after 1, is `{"object_1": {...}`.
    """
    token_ids: Sequence[int] = ()
    if num_objects:
        ends = accumulate(len(codec.piece_bytes(token_id)) for token_id in parsed.prefix_token_ids)
        # Include the token that contains the cut; the parser cuts it.
        last = bisect_left(list(ends), parsed.objects[num_objects - 1].value[1])
        token_ids = parsed.prefix_token_ids[: last + 1]
    trimmed = parse_rollout(token_ids, codec, geometry=geometry, answer_format=answer_format)
    assert len(trimmed.objects) == num_objects, "a prefix must parse as the answer does"
    num_unchanged = min(trimmed.num_unchanged, parsed.num_unchanged)
    return replace(
        trimmed,
        truncated=parsed.truncated,
        num_unchanged=num_unchanged,
        num_behind=parsed.num_behind,
    )


def _prefix(response: Response, entries: Sequence[Entry], codec: TokenCodec, empty: str) -> _Prefix:
    """Cut the answer after its last complete entry.

    Only a token that the cut divides is replaced. `empty` is the prefix if nothing can be kept.
    """
    for entry in reversed(entries):
        if entry.value is None:
            continue
        cut = entry.value[1]
        last = bisect_left(response.ends, cut)
        if response.ends[last] == cut:
            return _Prefix(response.token_ids[: last + 1], response.ends[: last + 1], last + 1, cut)
        start = response.ends[last - 1] if last else 0
        needed = response.text[start:cut]
        replacement = codec.encode(needed.decode(errors="replace"))
        pieces = [codec.piece_bytes(token_id) for token_id in replacement]
        # If the token begins inside a character, the part before the cut cannot be encoded: cut
        # after the previous entry instead.
        if b"".join(pieces) == needed:
            ends = [start + end for end in accumulate(map(len, pieces))]
            return _Prefix(
                response.token_ids[:last] + replacement, response.ends[:last] + ends, last, cut
            )
    return _Prefix(codec.encode(empty), [], 0, 0)
