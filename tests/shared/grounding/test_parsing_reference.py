"""The parser against one that goes character by character and reads nothing by patterns: the same
answer, field by field.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from damaged_responses import Damage

from shared.grounding.objects import ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.grounding.scanner import scan_container
from shared.records import ALL_GEOMETRY, GeometryKind
from shared.tokens.hf_codec import HFTokenCodec

pytestmark = pytest.mark.slow

Parse = Callable[..., ParsedRollout]


@pytest.fixture
def slow_parse(monkeypatch: pytest.MonkeyPatch) -> Parse:
    """The benchmark's: `benchmarks` is no installed package."""
    monkeypatch.syspath_prepend(Path(__file__).parents[3])
    return importlib.import_module("benchmarks.slow_parser").slow_parse


def test_damaged_responses_are_read_as_the_slow_parser_reads_them(
    codecs: dict[str, HFTokenCodec], slow_parse: Parse
) -> None:
    generator = random.Random(5)
    for codec in codecs.values():
        damage = Damage(generator, codec)
        for _ in range(400):
            token_ids = damage.response()
            geometry = generator.choice([ALL_GEOMETRY, frozenset({GeometryKind.BBOX})])
            assert parse_rollout(token_ids, codec, geometry=geometry) == slow_parse(
                token_ids, codec, geometry
            ), token_ids


def test_a_plain_entry_is_read_like_any_other(codecs: dict[str, HFTokenCodec]) -> None:
    """An escape in its key makes an entry the general reader's business and changes nothing
    else."""
    generator = random.Random(6)
    num_plain = 0
    for codec in codecs.values():
        for token_ids in Damage(generator, codec).sound:
            text = b"".join(map(codec.piece_bytes, token_ids)).decode()
            escaped = text.replace('"object_', '"\\u006fbject_')
            container, of_escaped = map(scan_container, (text.encode(), escaped.encode()))
            assert container is not None
            assert of_escaped is not None
            num_plain += sum(entry.plain is not None for entry in container.entries)
            assert all(entry.plain is None for entry in of_escaped.entries)
            plain, general = (parse_rollout(codec.encode(one), codec) for one in (text, escaped))
            assert [(o.key, o.kind, o.desc, o.bins) for o in plain.objects] == [
                (o.key, o.kind, o.desc, o.bins) for o in general.objects
            ]
            assert plain.dropped == general.dropped
            assert plain.max_object_index == general.max_object_index
    assert num_plain > 1000
