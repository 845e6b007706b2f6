r"""Converts COCO annotations to records, and predictions of an evaluation to COCO results.

    rollmatch coco import annotations=instances.json images=FOLDER out=data/train.jsonl
    rollmatch coco export predictions=RUN/.../predictions.jsonl \
        categories=data/train.categories.json out=results.json

`import` writes two files next to `train.jsonl`: `train.categories.json` for the export, and
`train.import.json`, which counts what was left out or changed, by reason. It counts each annotation
in one of `boxes`, `polygons` and `skipped`. `train.jsonl` appears only after the training loader
has read it without an error. `export` leaves out points, and objects whose name is not a category,
and prints their numbers. Existing files are not overwritten. `rollmatch coco import --help` lists
the keys of `import`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from launch.cli import explained, read_arguments
from launch.run_folder.console import escaped, make_console
from launch.tools.import_data.__main__ import main as import_main
from launch.tools.import_data.coco import CocoCategory
from launch.tools.import_data.files import (
    FileEntry,
    parse_json,
    read_bytes,
    require_absent,
    write_json,
)
from launch.tools.import_data.objects import SourceObject
from launch.tools.import_data.source import counted
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError, RecordError
from shared.grounding.coco import CocoResults, ImagePredictions, ScoredObject, predictions_to_coco


class ExportOptions(Section):
    predictions: Annotated[
        ConfigPath, Field(examples=["outputs/demo/evaluation/predictions.jsonl"])
    ]
    """JSONL file of predictions, written by an evaluation."""

    categories: Annotated[ConfigPath, Field(examples=["data/val.categories.json"])]
    """JSON file of category ids and names, written by the import of the data."""

    out: Annotated[ConfigPath, Field(examples=["results.json"])]
    """JSON file of COCO results to write."""


class _Metadata(FileEntry):
    image_id: int
    exif_orientation: Annotated[int, Field(ge=1, le=8)] = 1
    """EXIF orientation that the import applied to the annotations; 1: none."""


class _PredictionRow(FileEntry):
    width: int
    height: int
    metadata: _Metadata
    objects: tuple[ScoredObject, ...]


def read_predictions(path: Path) -> list[ImagePredictions]:
    """Read the `predictions.jsonl` of a held-out report, one image per line.

    Raises RecordError if a line is malformed, or an image occurs twice.
    """
    remedy = (
        "only evaluations of imported data can be exported: import the annotations"
        " again (rollmatch import-data), and evaluate those records (data.val=...)"
    )
    found: dict[int, ImagePredictions] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        row = parse_json(path, _PredictionRow.model_validate_json, line, remedy, number)
        id, orientation = row.metadata.image_id, row.metadata.exif_orientation
        if id in found:
            twice = RecordError(
                f"{id} occurs twice", field="metadata.image_id", remedy="keep one row per image"
            )
            raise twice.at(str(path), number)
        found[id] = ImagePredictions(id, row.width, row.height, row.objects, orientation)
    return list(found.values())


def export_coco(options: ExportOptions) -> CocoResults:
    """Convert predictions to COCO results; write the results to `options.out` and return them.

    Raises:
        RecordError: an input file is malformed.
        ConfigError: `out` exists.
    """
    require_absent(options.out)
    content = read_bytes(options.categories)
    parse = TypeAdapter(list[CocoCategory]).validate_json
    categories = parse_json(options.categories, parse, content, "import the annotations again")
    category_ids: dict[str, int] = {}
    for category in categories:
        first = category_ids.setdefault(category.name, category.id)
        if first != category.id:
            problem = f"{first} and {category.id} are both called {category.name!r}"
            remedy = "keep one: predictions are assigned to categories by name"
            raise RecordError(
                problem, field="categories", remedy=remedy, file=str(options.categories)
            )
    predictions = read_predictions(options.predictions)
    results = predictions_to_coco(predictions, category_ids)
    _turn_back(results, predictions)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, results.results)
    return results


def _turn_back(results: CocoResults, predictions: Sequence[ImagePredictions]) -> None:
    """Undo, in the results, the EXIF rotation that the import applied to annotations.

    The results then refer to the stored images, as the annotations do.
    """
    turned = {image.image_id: image for image in predictions if image.orientation != 1}
    for result in results.results:
        if image := turned.get(result["image_id"]):
            # Orientations 6 and 8 undo each other; every other orientation undoes itself.
            back = {6: 8, 8: 6}.get(image.orientation, image.orientation)
            shown = SourceObject("", result["bbox"], result["segmentation"])
            stored = shown.upright(back, image.width, image.height)
            result.update(bbox=list(stored.box), segmentation=stored.rings)


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        command, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
        if command == "import":
            import_main(["format=coco", *rest])
        elif command == "export":
            options = read_arguments(ExportOptions, rest)
            exported = export_coco(options)
            unknown = exported.unknown_names
            print(f"results   {len(exported.results)} objects in {options.out}")
            names = escaped(counted(unknown))
            print(f"skipped   {sum(unknown.values())} objects without a category: {names}")
            if exported.num_points:
                points = f"{exported.num_points} points"
                print(f"skipped   {points}, which COCO results cannot hold")
        elif command in ("-h", "--help"):
            print(__doc__)
        else:
            raise ConfigError(f"{command!r} is not a command; write `import` or `export` first")


if __name__ == "__main__":
    main()
