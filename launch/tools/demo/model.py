"""Makes the demo's model: a Qwen3-VL with 2.7 million random weights.

`AutoModelForImageTextToText`, `AutoProcessor` and vLLM load it without code of this project. The
same arguments give the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from launch.tools.add_coord_tokens import NUM_WAVES, mixed_waves
from launch.tools.demo.once import make_once
from launch.tools.demo.scenes import CANVAS, GRID, NAMES
from shared.grounding.serialize import serialize_objects
from shared.records import GeometryKind, GroundTruthObject
from shared.tokens.vocabulary import COORD_TOKENS, NUM_BINS, coord_token

PATCH = GRID
MERGE = 2
TEMPORAL_PATCH = 2
HIDDEN = 128
INITIALIZER_RANGE = 0.06
"""Standard deviation of random weights, close to 1 / sqrt(HIDDEN). With transformers' default of
0.02, training would first have to make the weights larger."""
MAX_LENGTH = 4096
NO_SETTINGS: Mapping[str, object] = MappingProxyType({})

PAD = "<|endoftext|>"
START = "<|im_start|>"
END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
SPECIAL_TOKENS = (PAD, START, END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

# A word with the space before it, `{}`, a closing brace with the brace or comma after it, or a run
# of other characters. As in Qwen's vocabulary, the brace that ends an object is one token together
# with the next character: `}}` or `},`.
PIECES = r" ?[\p{L}\p{N}_]+|\{\}|\}[},]?|[^\p{L}\p{N}_}]+"

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type in ('image', 'image_url') %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif part.type in ('video', 'video_url') %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def tokenizer_texts(prompt: str, names: Sequence[str] = NAMES) -> Iterator[str]:
    """Yield texts with all words that the demo's tokenizer must know: prompt, roles, answers.

    There is one answer for each kind of geometry (box, polygon) with each order of an object's
    fields.
    """
    yield from ("system\n", "user\n", "assistant\n", "{}", prompt)
    box = GroundTruthObject(kind=GeometryKind.BBOX, bins=(0, 0, 1, 1), desc="")
    triangle = GroundTruthObject(kind=GeometryKind.POLY, bins=(0, 0, 1, 1, 0, 1), desc="")
    for shape, field_order in product((box, triangle), ("desc_first", "geometry_first")):
        objects = [GroundTruthObject(kind=shape.kind, bins=shape.bins, desc=name) for name in names]
        yield serialize_objects(objects, field_order=field_order)


def make_tokenizer(prompt: str, names: Sequence[str] = NAMES) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with one token for each word of `tokenizer_texts`.

    After these tokens come special tokens, and then the coordinate tokens in the order of bins.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    # The vocabulary is not limited: training ends when every word is one token.
    trainer = trainers.BpeTrainer(
        vocab_size=100_000,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (
            piece
            for text in tokenizer_texts(prompt, names)
            for piece in re.split(r"<\|\w+\|>", text)
        ),
        trainer,
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    # These are not special tokens, so that decoding with skip_special_tokens keeps them.
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in COORD_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def make_processor(tokenizer: PreTrainedTokenizerFast, *, canvas: int = CANVAS) -> Qwen3VLProcessor:
    # Resizes every image to the pixels of one scene. The setting is in the processor and not in
    # requests, so that learner and engines agree.
    scene = canvas * canvas
    common = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    images = Qwen2VLImageProcessor(size={"shortest_edge": scene, "longest_edge": scene}, **common)
    videos = Qwen3VLVideoProcessor(
        size={"shortest_edge": scene, "longest_edge": 4 * scene},
        min_frames=2,
        max_frames=4,
        cap_pixels_per_frame=False,
        **common,
    )
    return Qwen3VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=videos,
        chat_template=CHAT_TEMPLATE,
    )


def make_config(
    tokenizer: PreTrainedTokenizerFast,
    *,
    canvas: int = CANVAS,
    text_settings: Mapping[str, object] = NO_SETTINGS,
) -> Qwen3VLConfig:
    """Return the demo model's configuration, for scenes of `canvas` x `canvas` pixels.

    `text_settings` replace settings of the language model.
    """
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": MAX_LENGTH,
        # The 16 rotated pairs of a head are divided among time, height and width.
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "tie_word_embeddings": True,
        "initializer_range": INITIALIZER_RANGE,
        **text_settings,
    }
    vision = {
        "depth": 3,
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "num_heads": 4,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": (canvas // PATCH) ** 2,
        "deepstack_visual_indexes": [0, 1, 2],
        "initializer_range": INITIALIZER_RANGE,
    }
    return Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE_PAD),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO_PAD),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(VISION_START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(VISION_END),
        tie_word_embeddings=True,
        dtype="float32",
    )


def _order_coord_embeddings(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Give neighbouring bins similar embeddings, at the scale of the other embeddings."""
    # With 1,000 independent rows, the demo is too short for the model to learn their order.
    embeddings = model.get_input_embeddings().weight
    first = tokenizer.convert_tokens_to_ids(coord_token(0))
    mixed_CD = mixed_waves(torch.randn(HIDDEN, NUM_WAVES))
    with torch.no_grad():
        embeddings[first : first + NUM_BINS] = mixed_CD * (embeddings.std() / mixed_CD.std())


def make_demo_model(out: Path, *, seed: int, prompt: str) -> bool:
    """Write the checkpoint of the demo's model to the folder `out` with `make_once`.

    Return whether the folder is new.
    """

    def make(folder: Path) -> None:
        model, processor = random_model(seed, prompt, canvas=CANVAS)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)

    return make_once(out, {"seed": seed, "prompt": prompt}, make)


def random_model(
    seed: int,
    prompt: str,
    *,
    canvas: int,
    text_settings: Mapping[str, object] = NO_SETTINGS,
    names: Sequence[str] = NAMES,
) -> tuple[Qwen3VLForConditionalGeneration, Qwen3VLProcessor]:
    """Return a random model and its processor for images of `canvas` x `canvas` pixels.

    Images of another shape are resized to about as many pixels. `text_settings`: as in
    `make_config`. `names`: of the objects; each becomes a token.
    """
    tokenizer = make_tokenizer(prompt, names)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = make_config(tokenizer, canvas=canvas, text_settings=text_settings)
        model = Qwen3VLForConditionalGeneration(config)
        _order_coord_embeddings(model, tokenizer)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )
    return model, make_processor(tokenizer, canvas=canvas)
