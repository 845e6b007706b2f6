"""Makes the model of the crowded scenes: the demo's model with a vision tower that recognises
digits (launch/tools/demo/tower.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from launch.tools.demo.model import random_model
from launch.tools.demo.once import make_once
from launch.tools.demo.scenes import CROWDED_CANVAS as CANVAS
from launch.tools.demo.scenes import (
    NAMES,
    SPLITS,
    Scene,
    crowded_scenes,
    draw,
    load_all_digits,
)
from launch.tools.demo.tower import LabelledBox, LabelledImage, teach_tower
from shared.tokens.vocabulary import NUM_BINS, coord_token

TEXT_SETTINGS: Mapping[str, object] = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [12, 10, 10],
            "mrope_interleaved": True,
        },
    }
)
"""Settings of the language model. Finding one digit among many needs more layers and wider heads
than the demo's model has (docs/explanation/evidence.md)."""


def make_crowded_model(
    out: Path,
    *,
    seed: int,
    prompt: str,
    steps: int,
    report: Callable[[str], None],
) -> bool:
    """Train the tower and write the checkpoint of crowded scenes to `out` with `make_once`.

    Return whether the folder is new.

    Args:
        steps: updates of the tower, each with `BATCH` new scenes of training digits; may be 0.
        report: called with lines about the progress.
    """

    def make(folder: Path) -> None:
        model, processor = random_model(seed, prompt, canvas=CANVAS, text_settings=TEXT_SETTINGS)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            first = processor.tokenizer.convert_tokens_to_ids(coord_token(0))
            coord_CD = model.get_input_embeddings().weight[first : first + NUM_BINS].detach()
            tower = model.model.visual
            train = crowded_scenes(
                load_all_digits()[SPLITS["train"]], np.random.default_rng([seed, 3])
            )
            teach_tower(
                tower,
                processor.image_processor,
                coord_CD,
                labelled(train),
                num_names=len(NAMES),
                steps=steps,
                report=report,
            )
        model.save_pretrained(folder)
        processor.save_pretrained(folder)

    settings: dict[str, str | int] = {"scenes": "crowded", "seed": seed}
    settings |= {"prompt": prompt, "tower_steps": steps}
    return make_once(out, settings, make)


def labelled(scenes: Iterable[Scene]) -> Iterator[LabelledImage]:
    """Yield each scene as an image with the boxes of its digits, without the clutter."""
    for scene in scenes:
        boxes = [
            LabelledBox(
                placed.left,
                placed.top,
                placed.left + placed.size,
                placed.top + placed.size,
                NAMES.index(placed.name),
            )
            for placed in scene
            if placed.name
        ]
        yield LabelledImage(draw(scene), boxes)
