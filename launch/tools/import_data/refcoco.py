"""Reads RefCOCO, RefCOCO+ and RefCOCOg: phrases for objects of COCO (Yu et al., 2016)."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NoReturn

from pydantic import Field, TypeAdapter

from launch.tools.import_data.coco import (
    CocoFile,
    Malformed,
    require_unique_ids,
    source_object,
)
from launch.tools.import_data.files import FileEntry, parse_json, read_bytes, require_folder
from launch.tools.import_data.objects import ObjectSkip, is_learnable
from launch.tools.import_data.source import (
    ImageSkip,
    ImportOptions,
    ImportReport,
    Source,
    SourceImage,
)
from shared.config.base import ConfigPath
from shared.data.limits import MAX_PICKLE_BYTES, MAX_VALUES, above
from shared.errors import RecordError


class _Sentence(FileEntry):
    sent: str
    """The phrase, in lower case without punctuation."""


class _Ref(FileEntry):
    ref_id: int
    ann_id: int
    image_id: int
    split: str
    sentences: list[_Sentence]


class RefcocoImport(ImportOptions):
    """Options of `rollmatch import-data format=refcoco`: references ("refs") to COCO objects.

    Each sentence of a ref becomes a row. `phrase` is the sentence, and the only object has the
    name of the annotation's category.
    """

    source_key: ClassVar[str] = "images"

    refs: Annotated[ConfigPath, Field(examples=["refcoco/refs(unc).p"])]
    """File of the refs: the released pickle, or the same list as JSON."""

    annotations: Annotated[ConfigPath, Field(examples=["refcoco/instances.json"])]
    """JSON file of the instances, from the same release."""

    images: Annotated[ConfigPath, Field(examples=["train2014"])]
    """Folder of COCO's `train2014` images."""

    split: str = "train"
    """Split in the refs: `train`, `val`, `test`, `testA` or `testB`."""

    @property
    def name(self) -> str:
        return self.split

    def no_coco_results(self, _report: ImportReport, /) -> str | None:
        return (
            "a row asks for one object by a phrase, but COCO results are of every object of a class"
        )

    def read(self) -> Source:
        require_folder("images", self.images, "the annotations' file names are relative to")
        remedy = "correct the entry, or remove it"
        content = read_bytes(self.refs, "MAX_PICKLE_BYTES", MAX_PICKLE_BYTES)
        refs = parse_json(self.refs, self._parse_refs, content, remedy)
        chosen = [ref for ref in refs if ref.split == self.split]
        if not chosen:
            splits = ", ".join(sorted({ref.split for ref in refs})) or "none"
            raise RecordError(
                f"is {self.split}: no ref has it", field="split", remedy=f"choose from {splits}",
                file=str(self.refs),
            )  # fmt: skip
        file = parse_json(
            self.annotations, CocoFile.model_validate_json, read_bytes(self.annotations), remedy
        )
        # A ref names its image, annotation and category by id.
        require_unique_ids(
            self.annotations,
            images=file.images,
            annotations=file.annotations,
            categories=file.categories,
        )
        return Source(self.refs, self._images(chosen, file))

    def _images(self, refs: list[_Ref], file: CocoFile) -> Iterator[SourceImage]:
        names = {category.id: category.name for category in file.categories}
        images = {image.id: image for image in file.images}
        annotations = {one.id: one for one in file.annotations if isinstance(one.id, int)}
        for ref in refs:
            image = images.get(ref.image_id)
            annotation = annotations.get(ref.ann_id)
            for number, sentence in enumerate(ref.sentences, 1):
                sample_id = f"{ref.ref_id}:{number}"
                phrase = sentence.sent
                if image is None or annotation is None or annotation.image_id != image.id:
                    skip = ImageSkip.UNKNOWN_ANNOTATION
                    yield SourceImage(sample_id, self.refs, [], skip=skip)
                    continue
                yield SourceImage(
                    sample_id,
                    self.images / image.file_name,
                    [
                        ObjectSkip.MALFORMED
                        if isinstance(annotation, Malformed)
                        else source_object(annotation, names, self.reading)
                    ],
                    image.size,
                    reading=self.reading,
                    keys={"phrase": phrase, "image_id": image.id, "ref_id": ref.ref_id},
                    skip=None if is_learnable(phrase) else ImageSkip.UNUSABLE_TEXT,
                )

    def _parse_refs(self, content: bytes) -> list[_Ref]:
        refs = TypeAdapter(list[_Ref])
        if self.refs.suffix.lower() == ".json":
            return refs.validate_json(content)
        remedy = "give a released file such as refs(unc).p, or the same list as a .json file"
        try:
            # Python 2 wrote the released file, so its strings are bytes.
            plain = _PlainUnpickler(io.BytesIO(content), encoding="utf-8", errors="replace").load()
        except Exception as error:
            # Catch all errors: damaged bytes make the unpickler raise errors of any type.
            problem = f"is not a pickle of lists, dictionaries, texts and numbers ({error})"
            raise RecordError(problem, field="refs", remedy=remedy, file=str(self.refs)) from error
        found = _problem_of([plain])
        if found is not None:
            raise RecordError(found, field="refs", remedy=remedy, file=str(self.refs))
        return refs.validate_python(plain)


_CONTAINERS = frozenset({list, tuple, set, frozenset, dict})


def _problem_of(value: Any) -> str | None:
    """Return the problem of a file of refs (too many values, or large integers), or None."""
    waiting = [value]
    num_values = 1
    while waiting:
        one = waiting.pop()
        inner = one.values() if isinstance(one, dict) else one
        num_values += len(inner)
        if num_values > MAX_VALUES:
            return f"expands to {above('MAX_VALUES', MAX_VALUES)}"
        for value in inner:
            if type(value) in _CONTAINERS:
                waiting.append(value)
            elif type(value) is int and value.bit_length() > 64:
                return "has an integer of more than 64 bits"
    return None


class _PlainUnpickler(pickle.Unpickler):
    """Unpickles plain data only, because a pickle may call any function it names."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
