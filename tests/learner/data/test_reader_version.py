"""What is kept of a data file is used again by the same `READER_VERSION`: here is what it reads."""

import hashlib
import json

from config_support import configuration, mapping
from PIL import Image
from small_tokenizers import small_codecs

from learner.data.fitting import RowLimits, require_lengths
from learner.data.kept import READER_VERSION
from learner.data.samples import load_samples
from shared.grounding.formats import FORMATS
from shared.grounding.json_list import PictureResize
from shared.records import GeometryKind

DIGESTS = {
    1: "98a0bceca6fd10dd83c84772aa802880e343173019ab94e2b1ee2cc43b163119",
    2: "0b047139e1188fbeb2b96351d7979d0c15d254efda97a1ab8d8e799539cd9481",
}
"""Of what each version reads the files below as. A line is added, and none is ever changed."""
BOX = {"bbox_2d": [10, 20, 300, 400], "desc": "cat"}
RING = {"poly": [500, 500, 900, 500, 900, 800], "desc": "größe 猫"}
ANNOTATION = {"bbox": [1, 2, 30.5, 40], "segmentation": [[1, 2, 31.5, 2, 31.5, 42]]}
ROWS = [
    {"objects": [RING, BOX], "annotated": [{"bbox": [50, 50, 40, 30]}, ANNOTATION]},
    {"objects": [], "ignore": [{"bbox": [0, 0, 9, 9], "desc": "dog", "iscrowd": 1}]},
    {"objects": [BOX, BOX], "sample_id": 7, "prompt": "Find.", "system": "Be brief.", "extra": 1},
    {"objects": [BOX], "phrase": "the cat", "classes": ["cat", "dog"], "images": ["turned.tif"]},
    {"objects": [{**BOX, "bbox_2d": ["<|coord_1|>", 2, 1, 2]}]},
    {"objects": [{**BOX, "desc": "<|im_end|>"}]},
    {"objects": [], "width": 90},
    {"objects": [BOX], "images": ["none.bmp"]},
    {"objects": [BOX], "images": ["cut.bmp"]},
]


class Prompts:
    """One token for every prompt."""

    picture_resize = PictureResize(side=32, min_pixels=1024, max_pixels=4096)

    def num_tokens(self, sample):
        return 1


def test_a_reader_that_reads_something_else_has_another_version(tmp_path):
    Image.new("RGB", (100, 80), "red").save(tmp_path / "a.bmp")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (80, 100), "red").save(tmp_path / "turned.tif", exif=exif)
    (tmp_path / "cut.bmp").write_bytes((tmp_path / "a.bmp").read_bytes()[:999])
    of_all = {"images": ["a.bmp"], "width": 100, "height": 80}
    lines = [json.dumps(of_all | row) for row in ROWS]
    lines += ['{"images": [], "images": []}', "[1", "", lines[0]]
    codec = small_codecs()["gpt2 words"]
    entries = mapping(tmp_path, tmp_path, tmp_path)["rollout_matching"]["pipeline"]["objective"]
    changes = {
        "custom__trainer_variant": "stage1_sft",
        "data__on_bad_row": "skip",
        # Of every format: other losses read coord tokens.
        "rollout_matching__pipeline__objective": [e for e in entries if e["name"] == "token_ce"],
    }
    read = []
    for name in FORMATS:
        changes["data__answer_format"] = name
        config = configuration(tmp_path, tmp_path, tmp_path, **changes)
        text = "\n".join(lines)
        if GeometryKind.POLY not in config.geometry:
            text = text.replace(json.dumps(RING), json.dumps(BOX))
        (tmp_path / "train.jsonl").write_text(text)
        data = load_samples(config, *config.data.sources("train"))
        places = [reason.split(": ")[:2] for reason in data.skipped]  # wording is free
        read.append([data.turned, data.odd, places])
        form = config.answer_format.for_pictures(Prompts.picture_resize)
        for taught in (True, False):
            limits = RowLimits(0, 1000, form, "skip", taught=taught)
            samples, measures, _ = require_lengths(data, Prompts(), codec, limits)
            read.append([list(samples), measures])
    found = repr(read).replace(str(tmp_path), "")
    digest = hashlib.sha256(found.encode()).hexdigest()
    assert max(DIGESTS) == READER_VERSION and len(set(DIGESTS.values())) == len(DIGESTS)
    assert digest == DIGESTS[READER_VERSION], (
        "these files are read as something else: raise READER_VERSION of learner/data/kept.py, so"
        f" that nothing that the reader before kept is used, and add a line here ({found})"
    )
