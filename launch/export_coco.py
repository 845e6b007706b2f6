"""`python -m launch.export_coco predictions=RUN/.../predictions.jsonl
categories=data/val.categories.json out=results.json`: COCO results.

`predictions` is what an evaluation wrote, one row per sample: `{"sample_id", "width", "height",
"metadata": {"image_id"}, "objects": [{"kind", "bins", "desc", "score"}], "finish_reason", "text"}`;
`categories` what `launch.import_coco` wrote beside the data. An object whose name is no category's
is left out and counted. Nothing is overwritten.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator
from rich.console import Console

from launch.cli import explained, read_arguments
from launch.coco.files import counted, parse_json, read_categories, require_absent, write_json
from shared.config.base import ConfigPath, Section
from shared.errors import RecordError
from shared.grounding.coco import CocoResults, ImagePredictions, ScoredObject, predictions_to_coco
from shared.records import GeometryKind
from shared.tokens.vocabulary import NUM_BINS


class ExportOptions(Section):
    predictions: Annotated[
        ConfigPath, Field(examples=["outputs/demo/evaluation/predictions.jsonl"])
    ]
    """JSONL file of predictions, written by an evaluation."""

    categories: Annotated[ConfigPath, Field(examples=["data/val.categories.json"])]
    """JSON file of category ids and names, written by the import of the data."""

    out: Annotated[ConfigPath, Field(examples=["results.json"])]
    """JSON file of COCO results to write."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, allow_inf_nan=False)


class _Object(_Part):
    kind: GeometryKind
    bins: list[Annotated[int, Field(ge=0, lt=NUM_BINS)]]
    desc: str
    score: float

    @model_validator(mode="after")
    def _arity(self) -> _Object:
        if (
            (len(self.bins) != 4)
            if self.kind is GeometryKind.BBOX
            else (len(self.bins) < 6 or len(self.bins) % 2)
        ):
            raise ValueError(f"a {self.kind} cannot have {len(self.bins)} bins")
        return self


class _Metadata(_Part):
    image_id: int
    """Of the COCO data set; data from `launch.import_coco` have it."""


class _ExportRow(_Part):
    width: Annotated[int, Field(ge=2)]
    height: Annotated[int, Field(ge=2)]
    metadata: _Metadata
    objects: list[_Object]

    def predictions(self) -> ImagePredictions:
        objects = tuple(
            ScoredObject(one.kind, tuple(one.bins), one.desc, one.score) for one in self.objects
        )
        return ImagePredictions(self.metadata.image_id, self.width, self.height, objects)


_REMEDIES = {
    "metadata.image_id": (
        "only an evaluation of data that launch.import_coco wrote can be exported: evaluate those"
        " (data.val=...)"
    )
}


def export_coco(options: ExportOptions) -> CocoResults:
    """Writes the results, and returns them. RecordError names file, line and field of what is
    wrong; ConfigError where `out` exists.
    """
    require_absent([options.out])
    category_ids = read_categories(options.categories)
    results = predictions_to_coco(read_predictions(options.predictions), category_ids)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, results.results)
    return results


def read_predictions(path: Path) -> list[ImagePredictions]:
    """One for each line of a report's `predictions.jsonl`, in order. Raises RecordError with file,
    line and remedy.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(
            f"cannot be read: {error.strerror}",
            field="file",
            remedy="correct the path, or evaluate first",
            file=str(path),
        ) from error
    found: dict[int, ImagePredictions] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = parse_json(
            path, _ExportRow.model_validate_json, line, line=number, remedies=_REMEDIES
        ).predictions()
        if row.image_id in found:
            raise RecordError(
                f"{row.image_id} is there twice",
                field="metadata.image_id",
                remedy="keep one row per image",
                file=str(path),
                line=number,
            )
        found[row.image_id] = row
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(Console(stderr=True, soft_wrap=True)):
        options = read_arguments(ExportOptions, sys.argv[1:] if arguments is None else arguments)
        results = export_coco(options)
        print(f"results   {len(results.results)} objects in {options.out}")
        print(
            f"skipped   {sum(results.unknown_names.values())} objects of no category:"
            f" {counted(results.unknown_names)}"
        )


if __name__ == "__main__":
    main()
