"""Compare the speed of `parse_rollout` with a character-by-character parser (`slow_parser`).

`python -m benchmarks.parsing [--repetitions 40] [--responses 2000] [--tokenizer
outputs/demo/model]` uses one core. First, both must give the same result, field by field, on
well-formed responses and on randomly mutated ones. This is checked with every tokenizer: the given
one if it exists, and two that are trained here, with Qwen's splitting and without splitting.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.slow_parser import slow_parse
from shared.grounding.objects import ParsedRollout
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import FIELD_ORDERS, serialize_objects
from shared.records import ALL_GEOMETRY, GeometryKind, GroundTruthObject
from shared.tokens.hf_codec import HFTokenCodec, add_coord_tokens
from shared.tokens.vocabulary import TokenCodec

# The regex of Qwen2 and Qwen3.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NUM_OBJECTS = 60
NUM_VERTICES = 12
NAMES = [
    "black cat",
    "dog",
    "traffic light",
    "person in a red coat",
    "größe",
    "猫",
    "bicycle 🙂",
    "stop sign",
    "potted plant",
    "dining table",
]
DESCS = [*NAMES, 'a "b"', "{}", "}]", "\\", '"object_9": {', "x.", "<|coord_5|>"]
SCRAPS = [
    "{",
    "}",
    "[",
    "]",
    '"',
    ",",
    ":",
    " ",
    "\\",
    '"object_5": ',
    '"desc": ',
    "}}",
    '"]}}',
    "},",
    "null",
    "1",
    "猫",
    "<|coord_7|>",
    '"x": [1], ',
    "<|im_end|>",
]


def trained(num_merges: int, splitter: Any) -> Any:
    """Train a byte-level BPE tokenizer with `num_merges` merges.

    The training texts are responses and this repository's Markdown pages.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    generator = random.Random(3)
    responses = [
        serialize_objects(
            objects(generator, generator.randint(1, 12), kind, NAMES), field_order=order
        )
        for kind in GeometryKind
        for order in FIELD_ORDERS * 20
    ]
    pages = [path.read_text() for path in sorted(Path(__file__).parents[1].glob("*.md"))]
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + num_merges, initial_alphabet=alphabet, show_progress=False
    )
    # Tokenizers cut out coord tokens before they split text.
    tokenizer.train_from_iterator(
        [part for text in responses for part in text.split("<|coord_0|>")] + pages, trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    add_coord_tokens(fast)
    return fast


def objects(
    generator: random.Random, count: int, kind: GeometryKind, descs: list[str], *, zero: bool = True
) -> list[GroundTruthObject]:
    """Return random objects of this kind, for answers to parse.

    `zero`: every coordinate is bin 0, so all coordinate tokens have the same text.
    """
    found = []
    for _ in range(count):
        bins = generator.choices(
            [0] if zero else range(1000), k=4 if kind is GeometryKind.BBOX else 2 * NUM_VERTICES
        )
        if kind is GeometryKind.BBOX:
            bins = [
                min(bins[0], bins[2]),
                min(bins[1], bins[3]),
                max(bins[0], bins[2]),
                max(bins[1], bins[3]),
            ]
        found.append(GroundTruthObject(kind, tuple(bins), generator.choice(descs)))
    return found


def mutated(generator: random.Random, codec: TokenCodec) -> list[int]:
    def response() -> list[int]:
        kind = generator.choice(list(GeometryKind))
        text = serialize_objects(
            objects(generator, generator.randint(0, 4), kind, DESCS, zero=False),
            field_order=generator.choice(FIELD_ORDERS),
        )
        return codec.encode(
            text if generator.random() < 0.7 else text.replace('"<', "<").replace('>"', ">")
        )

    ids = response()
    for _ in range(generator.randint(0, 3)):
        at = generator.randint(0, len(ids))
        other = generator.randint(0, len(ids))
        match generator.randrange(7):
            case 0:
                del ids[at : at + generator.randint(1, 3)]
            case 1:
                ids[at:at] = codec.encode(generator.choice(SCRAPS))
            case 2:
                ids[at : at + 1] = codec.encode(generator.choice(SCRAPS))
            case 3:
                ids[at:at] = [generator.randrange(2 * codec.eos_token_id) for _ in range(2)]
            case 4:
                ids[at:at] = ids[min(at, other) : max(at, other)]
            case 5:
                del ids[max(at, other) :]
            case 6:
                ids[at:] = response()[generator.randint(0, 20) :]
    return ids


def check(codec: TokenCodec, well_formed: list[list[int]], num_responses: int) -> dict[str, int]:
    """Require that both parsers give the same result on all answers.

    Return how often the randomly mutated answers had each kind of result.
    """
    generator = random.Random(17)
    seen = {"objects": 0, "dropped": 0, "fallback": 0}
    for ids in well_formed:
        assert parse_rollout(ids, codec) == slow_parse(ids, codec)
    for _ in range(num_responses):
        ids = mutated(generator, codec)
        fast = parse_rollout(ids, codec, geometry=ALL_GEOMETRY)
        slow = slow_parse(ids, codec)
        assert fast == slow, f"{b''.join(map(codec.piece_bytes, ids))!r}\n{ids}\n{fast}\n{slow}"
        seen = {
            "objects": seen["objects"] + len(fast.objects),
            "dropped": seen["dropped"] + len(fast.dropped),
            "fallback": seen["fallback"] + fast.fallback,
        }
    return seen


def tokens_per_s(
    parse: Callable[[list[int], TokenCodec], ParsedRollout],
    ids: list[int],
    codec: TokenCodec,
    repetitions: int,
) -> float:
    """Return the median speed of a parser in tokens per second, over several repetitions.

    It is measured in processor time of this thread, so other processes hardly change it.
    """
    seconds = []
    for _ in range(repetitions):
        started = time.thread_time()
        parse(ids, codec)
        seconds.append(time.thread_time() - started)
    return len(ids) / statistics.median(seconds)


def shapes(codec: TokenCodec) -> dict[str, list[int]]:
    generator = random.Random(0)
    boxes = serialize_objects(objects(generator, NUM_OBJECTS, GeometryKind.BBOX, NAMES, zero=False))
    polygons = serialize_objects(
        objects(generator, NUM_OBJECTS, GeometryKind.POLY, NAMES, zero=False)
    )
    texts = {
        f"{NUM_OBJECTS} boxes": boxes,
        f"{NUM_OBJECTS} polygons of {NUM_VERTICES} points": polygons,
        f"{NUM_OBJECTS} boxes, coord tokens unquoted": boxes.replace('"<', "<").replace('>"', ">"),
        f"{NUM_OBJECTS} boxes, each with a key too many (all dropped)": boxes.replace(
            '{"desc"', '{"x": 1, "desc"'
        ),
    }
    return {name: codec.encode(text) for name, text in texts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=40)
    parser.add_argument(
        "--responses",
        type=int,
        default=2000,
        help="mutated responses per tokenizer on which both parsers must agree",
    )
    parser.add_argument("--tokenizer", type=Path, default=Path("outputs/demo/model"))
    options = parser.parse_args()
    splitter = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizers = {
        "4,000 merges, Qwen's splitting": trained(4000, splitter),
        "4,000 merges, no splitting": trained(
            4000, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        ),
    }
    if options.tokenizer.is_dir():
        tokenizers = {
            str(options.tokenizer): AutoTokenizer.from_pretrained(options.tokenizer)
        } | tokenizers
    for name, tokenizer in tokenizers.items():
        codec = HFTokenCodec(tokenizer)
        responses = shapes(codec)
        print(
            f"{name}: both agree on {len(responses)} well-formed responses and {options.responses}"
            " mutated ones",
            end=" ",
        )
        print(check(codec, list(responses.values()), options.responses))
        for shape, ids in responses.items():
            fast = tokens_per_s(parse_rollout, ids, codec, options.repetitions)
            slow = tokens_per_s(slow_parse, ids, codec, max(options.repetitions // 8, 1))
            print(
                f"  {shape:>55}: {len(ids):5d} tokens, {fast / 1e6:.2f} M tokens/s, slow"
                f" {slow / 1e6:.3f} M tokens/s, ratio {fast / slow:.1f}"
            )


if __name__ == "__main__":
    main()
