"""Converts annotations of other formats to records.

    rollmatch import-data format=yolo source=FOLDER out=data/train.jsonl

Formats: coco, lvis, refcoco, yolo, voc, swift, hf; `format=NAME --help` lists the keys of a format.
Writes two files next to `train.jsonl`. `train.import.json` counts what was left out or changed, by
reason; it counts each annotation in one of `boxes`, `polygons` and `skipped`. `rollmatch coco
export` needs `train.categories.json` to convert predictions to COCO results. `train.jsonl` appears
only after the training loader has read it without an error. Existing files are not overwritten.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from launch.cli import explained, read_arguments
from launch.run_folder.console import escaped, make_console
from launch.tools.import_data.coco import CocoImport, LvisImport
from launch.tools.import_data.hugging_face import HuggingFaceImport
from launch.tools.import_data.records import import_data
from launch.tools.import_data.refcoco import RefcocoImport
from launch.tools.import_data.source import ImportOptions
from launch.tools.import_data.swift import SwiftImport
from launch.tools.import_data.voc import VocImport
from launch.tools.import_data.yolo import YoloImport
from shared.errors import ConfigError

# Own readers: `supervision` reads only two of the formats (YOLO, VOC), depends on OpenCV, and does
# not report what it leaves out.
FORMATS: dict[str, type[ImportOptions]] = {
    "coco": CocoImport,
    "lvis": LvisImport,
    "refcoco": RefcocoImport,
    "yolo": YoloImport,
    "voc": VocImport,
    "swift": SwiftImport,
    "hf": HuggingFaceImport,
}


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        words = sys.argv[1:] if arguments is None else arguments
        formats = [word for word in words if word.startswith("format=")]
        if not formats and {"-h", "--help"} & set(words):
            print(__doc__)
            return
        name = formats[0].removeprefix("format=") if len(formats) == 1 else None
        if name not in FORMATS:
            got = ", ".join(formats) or "nothing"
            known = ", ".join(FORMATS)
            raise ConfigError(f"format: must be one of {known}, got {got}; write format=NAME once")
        rest = [word for word in words if word not in formats]
        options = read_arguments(FORMATS[name], rest)
        report = import_data(options)
        print(escaped(f"records   {options.records}\n{report.describe()}"))


if __name__ == "__main__":
    main()
