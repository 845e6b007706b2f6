"""Make a stock checkpoint and a dataset in COCO's format, as a new user would have them.

    python examples/make_stock.py FOLDER

`FOLDER/model` is a Qwen3-VL of three million parameters in its publisher's form, without coordinate
tokens. It was trained on Qwen's answer format with random boxes, so it keeps the format and guesses
the boxes. `FOLDER/coco` has COCO's layout (`annotations/instances_train2017.json`, `train2017/`),
with one square or disc in each image, so large that ten steps show a difference.
"""

import json
import sys
from pathlib import Path
from random import Random

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3VLForConditionalGeneration

from launch.tools.demo.model import END, PAD, SPECIAL_TOKENS, make_config, make_processor
from shared.prompts import LIST_USER_PROMPT

SIDE = 96
"""Width and height of an image in pixels."""
SHAPES = ("square", "disc")
QUESTION = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>"
    f"{LIST_USER_PROMPT}<|im_end|>\n<|im_start|>assistant\n"
)


def guess(random: Random) -> str:
    """Write an answer with a random box."""
    left, top, right, bottom = (random.randint(*at) for at in ((0, 400),) * 2 + ((500, 999),) * 2)
    label = random.choice(SHAPES)
    return f'[{{"bbox_2d": [{left}, {top}, {right}, {bottom}], "label": "{label}"}}]'


def draw(random: Random) -> tuple[Image.Image, int, list[int]]:
    """Return an image, the index of its shape, and the shape's x, y, width and height."""
    shape = random.randrange(len(SHAPES))
    x, y, side = random.choice((8, 16)), random.choice((8, 16)), random.choice((64, 72))
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(picture)
    (pen.ellipse if shape else pen.rectangle)((x, y, x + side - 1, y + side - 1), "navy")
    return picture, shape, [x, y, side, side]


def make_tokenizer(random: Random) -> Qwen2Tokenizer:
    """Make Qwen's tokenizer, with a vocabulary of this task's words."""
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = Qwen2Tokenizer(vocab={}, merges=[]).backend_tokenizer.pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    texts = [LIST_USER_PROMPT, "user\nassistant\n", *(guess(random) for _ in range(10))]
    learned.train_from_iterator(texts, trainer)
    bpe = json.loads(learned.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(merge) for merge in bpe["merges"]],
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[token for token in SPECIAL_TOKENS if token not in (PAD, END)],
        model_max_length=4096,
    )


def make_model(folder: Path) -> None:
    """Train a randomly initialised model on the format, with boxes that are not in the image."""
    torch.set_num_threads(1)  # it is small, and cores may be busy
    torch.manual_seed(3)
    random = Random(3)
    tokenizer = make_tokenizer(random)
    processor = make_processor(tokenizer, canvas=SIDE)
    model = Qwen3VLForConditionalGeneration(make_config(tokenizer, canvas=SIDE))
    model.model.visual.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        batch = processor(
            text=[f"{QUESTION}{guess(random)}{END}" for _ in range(8)],
            images=[draw(random)[0] for _ in range(8)],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        labels = batch.input_ids.where(batch.attention_mask.bool(), -100)
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def make_coco(folder: Path, part: str, num_pictures: int) -> None:
    random = Random(part)
    pictures = folder / f"{part}2017"
    pictures.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(1, num_pictures + 1):
        picture, shape, box = draw(random)
        file = f"{number:012}.png"
        picture.save(pictures / file)
        images.append({"id": number, "file_name": file, "width": SIDE, "height": SIDE})
        area = box[2] * box[3]
        annotation = {"id": number, "image_id": number, "category_id": shape, "bbox": box}
        annotations.append({**annotation, "area": area, "iscrowd": 0})
    categories = [{"id": index, "name": name} for index, name in enumerate(SHAPES)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    out = folder / "annotations" / f"instances_{part}2017.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(content))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    make_model(out / "model")
    make_coco(out / "coco", "train", 320)
    make_coco(out / "coco", "val", 16)
