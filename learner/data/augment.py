"""Augmentation: mirror, crop, scale and recolour a training sample when it is drawn.

The bytes of the changed image are sent, so engines and learner see the same pixels. The changes
depend only on the run's seed and the draw, and are written to the rollout log.

torchvision's v2 functions change the pixels. They are given Pillow images, because the arithmetic
of Pillow is the same on every processor. The objects are transformed here: torchvision does not
support polygons (it moves key points but never cuts them), and neither does albumentations, which
would be one more package. Cropping and mirroring are a shift and a sign, so only the cut at the
border takes code.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from shared.config.model import AugmentSection
from shared.dataset import Draw
from shared.errors import RecordError
from shared.grounding.coco import has_area, ring_area
from shared.grounding.geometry import MAX_BIN
from shared.records import (
    GeometryKind,
    GroundTruthObject,
    ImageRef,
    Sample,
    in_reading_order,
)

ATTEMPTS = 8
"""How many random augmentations are tried for one sample, until one gives a sample that fits a row
and still has objects."""
NUM_THREADS = 4
"""Number of threads that augment images. They run in parallel, as Pillow releases the GIL."""
_HUE_SHARE = 0.1
_LEAST_SIDE = 2
"""Least width and height of a changed image, in pixels: an axis of one pixel has no bins."""
_SIDE = re.compile(r"\b(left|right)|左|右", re.IGNORECASE)
_WINDOW = (0, 0, MAX_BIN, MAX_BIN)
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Augmentation:
    """The changes to a training sample's images and objects, applied in the order of the fields.

    Example: `Augmentation((40, 0, 600, 480), True, (300, 240), (1.1, 0.9, 1.0), -0.02, 0.25)`.
    """

    crop: tuple[int, int, int, int]
    """Left, top, width and height of the kept part, in the image's pixels."""
    mirrored: bool
    """Whether the image is mirrored, with left and right swapped."""
    size: tuple[int, int]
    """Width and height in pixels after resizing."""
    colour: tuple[float, float, float]
    """Factors of brightness, contrast and saturation."""
    hue: float
    """Shift of the hue; 1 is the whole colour circle."""
    min_visible: float
    """An object is dropped if the crop keeps nothing of it, or a smaller share of its area than
    this."""

    @classmethod
    def draw(
        cls, section: AugmentSection, seed: int, draw: Draw, attempt: int, size: tuple[int, int]
    ) -> Augmentation:
        """Draw random changes for an image of `size` (width, height).

        They depend only on the run's `seed`, on `draw` (which row the run draws and when) and on
        `attempt` (from 0).
        """
        generator = np.random.Generator(
            np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(*draw, attempt)))
        )
        # All numbers are always drawn, so one setting does not change the draws of the others.
        mirror, width, height, left, top, scale, *colours = generator.random(10).tolist()
        brightness, contrast, saturation, hue = (2 * one - 1 for one in colours)
        sides = [
            max(min(_LEAST_SIDE, side), round(side * (section.crop + (1 - section.crop) * share)))
            for side, share in zip(size, (width, height), strict=True)
        ]
        places = [
            math.floor(share * (side - kept + 1))
            for side, kept, share in zip(size, sides, (left, top), strict=True)
        ]
        least, most = section.scale
        factor = least * (most / least) ** scale
        return cls(
            crop=(places[0], places[1], sides[0], sides[1]),
            mirrored=mirror < section.flip,
            size=(
                max(min(_LEAST_SIDE, sides[0]), round(sides[0] * factor)),
                max(min(_LEAST_SIDE, sides[1]), round(sides[1] * factor)),
            ),
            colour=(
                1 + section.colour * brightness,
                1 + section.colour * contrast,
                1 + section.colour * saturation,
            ),
            hue=_HUE_SHARE * section.colour * hue,
            min_visible=section.min_visible,
        )

    def objects(self, sample: Sample) -> tuple[GroundTruthObject, ...]:
        """Return the sample's objects with coordinates in the changed image, in reading order.

        Objects outside of the crop are dropped.
        """
        found = (self._moved(one, sample) for one in sample.objects)
        return in_reading_order([one for one in found if one is not None])

    def _moved(self, one: GroundTruthObject, sample: Sample) -> GroundTruthObject | None:
        bins = one.bins
        if self.crop[2:] != (sample.width, sample.height):
            ring = self._on_crop(bins, sample)
            is_box = one.kind is GeometryKind.BBOX
            if one.kind is GeometryKind.POINT:
                cut = self._cut_point(bins, ring, sample)
            else:
                cut = _cut_box(ring, _WINDOW) if is_box else _cut_polygon(ring, _WINDOW)
            if not cut or _share(cut, ring, is_box=is_box) < self.min_visible:
                return None
            # The same rounding as in `bin_box` and `bin_points`.
            if is_box:
                (x1, y1), (x2, y2) = cut
                bins = (math.floor(x1), math.floor(y1), math.ceil(x2), math.ceil(y2))
            else:
                bins = tuple(math.floor(value + 0.5) for value in chain(*cut))
            if one.kind is GeometryKind.POLY:
                bins = _without_repeats(bins)
                if not has_area(bins):
                    return None
        if self.mirrored:
            if one.kind is GeometryKind.BBOX:
                x1, y1, x2, y2 = bins
                bins = (MAX_BIN - x2, y1, MAX_BIN - x1, y2)
            else:
                bins = tuple(
                    value if number % 2 else MAX_BIN - value for number, value in enumerate(bins)
                )
        return replace(one, bins=bins)

    def _cut_point(self, bins: Sequence[int], moved: Points, sample: Sample) -> Points:
        """Return the point `moved`, or an empty list if the crop drops its nearest pixel."""
        for bin, first, kept, side in zip(
            bins, self.crop[:2], self.crop[2:], (sample.width, sample.height), strict=True
        ):
            if not first <= math.floor(bin * (side - 1) / MAX_BIN + 0.5) < first + kept:
                return []
        # The bin of a pixel at the border may be outside.
        return [(_clamp(x), _clamp(y)) for x, y in moved]

    def _on_crop(self, bins: Sequence[int], sample: Sample) -> Points:
        """Return vertices in bins of the crop, unrounded.

        Coordinates of vertices outside the crop are below 0 or above 999.
        """
        left, top, width, height = self.crop
        axes = []
        for values, first, kept, side in (
            (bins[::2], left, width, sample.width),
            (bins[1::2], top, height, sample.height),
        ):
            if kept == side:  # may be one pixel
                axes.append([float(value) for value in values])
            else:
                # Integer arithmetic with one division, so values on a bin are exact.
                axes.append(
                    [(value * (side - 1) - MAX_BIN * first) / (kept - 1) for value in values]
                )
        return list(zip(*axes, strict=True))

    def picture(self, image: ImageRef, size: tuple[int, int]) -> ImageRef:
        """Return the changed image, as PNG bytes.

        `size` is the width and height, in pixels, that the dataset row states for `image`. Raises
        RecordError as `decode_image` does, or if `image` does not have this size.
        """
        from torchvision.transforms.v2 import functional  # takes seconds

        from learner.segments import decode_image

        pixels = decode_image(image)
        if pixels.size != size:  # only possible if `data.check_images` is off
            problem = f"{image.path} is {pixels.size[0]} x {pixels.size[1]} pixels, the row says"
            remedy = "correct width and height, or the file; boxes are relative to this size"
            raise RecordError(f"{problem} {size[0]} x {size[1]}", field="images", remedy=remedy)
        left, top, width, height = self.crop
        pixels = functional.crop(pixels, top, left, height, width)
        if self.mirrored:
            pixels = functional.horizontal_flip(pixels)
        if self.size != (width, height):
            bicubic = functional.InterpolationMode.BICUBIC  # as Qwen's processors resize
            pixels = functional.resize(pixels, [self.size[1], self.size[0]], interpolation=bicubic)
        if (*self.colour, self.hue) != (1.0, 1.0, 1.0, 0.0):
            brightness, contrast, saturation = self.colour
            pixels = functional.adjust_brightness(pixels, brightness)
            pixels = functional.adjust_contrast(pixels, contrast)
            pixels = functional.adjust_saturation(pixels, saturation)
            pixels = functional.adjust_hue(pixels, self.hue)
        file = io.BytesIO()
        # Lossless. A higher level takes ten times as long and saves a tenth of the bytes.
        pixels.save(file, "PNG", compress_level=1)
        data = file.getvalue()
        return ImageRef(path=None, data=data, sha256=hashlib.sha256(data).hexdigest())

    def without_pictures(self, sample: Sample) -> Sample:
        """Return the sample with the changed size and objects, but with its original images."""
        width, height = self.size
        shown = replace(sample, width=width, height=height, objects=self.objects(sample))
        return replace(shown, annotated=(), ignore=())  # valid only for the original image

    def applied(self, sample: Sample) -> Sample:
        """Return the sample with its images and objects changed. Raises as `picture` does."""
        size = (sample.width, sample.height)
        images = tuple(self.picture(image, size) for image in sample.images)
        return replace(self.without_pictures(sample), images=images)


class Augmented(NamedTuple):
    """A training sample as the model sees it, and how it was augmented."""

    sample: Sample
    augmentation: Augmentation | None
    """The changes to the sample; None if it is unchanged."""
    num_dropped: int
    """Number of objects that the crop removed from the sample."""


class Augmenter:
    """Augments the training samples that a run draws.

    The same draw gets the same changes on every learner rank.
    """

    def __init__(self, section: AugmentSection, seed: int, fits: Callable[[Sample], bool]) -> None:
        """`fits` returns whether a changed sample is short enough to be learned.

        It reads only the size and the objects of the sample, not the images.
        """
        self._section = section
        self._seed = seed
        self._fits = fits

    def __call__(self, sample: Sample, draw: Draw) -> Augmented:
        """Return the sample with random changes, or unchanged if none of `ATTEMPTS` draws fits.

        Raises RecordError if an image is missing, has changed or cannot be decoded.
        """
        size = (sample.width, sample.height)
        for attempt in range(ATTEMPTS):
            one = Augmentation.draw(self._section, self._seed, draw, attempt, size)
            if one.mirrored and _names_a_side(sample):
                one = replace(one, mirrored=False)
            left = one.without_pictures(sample)
            # If the crop drops all objects, parts of them may still be visible, so an empty answer
            # would be wrong.
            if self._fits(left) and (left.objects or not sample.objects):
                changed = one.applied(sample)
                return Augmented(changed, one, len(sample.objects) - len(changed.objects))
        return Augmented(sample, None, 0)


class AugmentedAhead:
    """Threads that augment the training samples of the next step during the current step.

    At most the samples of one step wait for `take`.
    """

    def __init__(self, show: Callable[[Draw], Augmented]) -> None:
        self._show = show
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="augment")
        self._begun: dict[Draw, Future[Augmented]] = {}

    def begin(self, draws: Iterable[Draw]) -> None:
        """Start to augment the samples of these draws in the threads, each draw once."""
        for draw in draws:
            if draw not in self._begun:
                self._begun[draw] = self._threads.submit(self._show, draw)

    def take(self, draws: Sequence[Draw]) -> dict[Draw, Augmented]:
        """Return the augmented samples of these draws, and wait for those that are not ready.

        Exceptions of the threads are raised here.
        """
        self.begin(draws)
        return {draw: self._begun.pop(draw).result() for draw in dict.fromkeys(draws)}

    def close(self) -> None:
        """Stop the threads. Samples that they have not begun are not augmented."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _names_a_side(sample: Sample) -> bool:
    """Return whether the row's question or answer contains left or right, in English or Chinese."""
    of_question = (sample.prompt, sample.system, sample.phrase, *sample.classes)
    texts = chain(filter(None, of_question), (one.desc for one in sample.objects))
    return any(_SIDE.search(text) for text in texts)


def _cut_box(corners: Points, window: tuple[float, float, float, float]) -> Points:
    """Cut a box (two corners) at a window's borders. The result is empty if the box is outside."""
    (x1, y1), (x2, y2) = corners
    left, top, right, bottom = window
    x1, y1, x2, y2 = max(x1, left), max(y1, top), min(x2, right), min(y2, bottom)
    return [(x1, y1), (x2, y2)] if x1 <= x2 and y1 <= y2 else []


def _cut_polygon(ring: Points, window: tuple[float, float, float, float]) -> Points:
    """Cut a ring at a window's borders (Sutherland and Hodgman, 1974), one border at a time.

    If the cut divides a ring, the parts stay one ring. They are joined along the border, without
    area between them.
    """
    for axis, border, inside in ((0, 0, 1), (1, 1, 1), (0, 2, -1), (1, 3, -1)):
        limit = window[border]
        cut: Points = []
        for before, point in zip([ring[-1], *ring[:-1]] if ring else [], ring, strict=True):
            was_in = (before[axis] - limit) * inside >= 0
            is_in = (point[axis] - limit) * inside >= 0
            if was_in is not is_in:
                part = (limit - before[axis]) / (point[axis] - before[axis])
                other = before[1 - axis] + part * (point[1 - axis] - before[1 - axis])
                cut.append((limit, other) if axis == 0 else (other, limit))
            if is_in:
                cut.append(point)
        ring = cut
    return ring


def _clamp(value: float) -> float:
    return min(max(value, 0.0), float(MAX_BIN))


def _share(cut: Points, whole: Points, *, is_box: bool) -> float:
    """Return the kept share of a shape's area, or of its sides if it has no area."""
    areas = [_area(one, is_box=is_box) for one in (cut, whole)]
    if areas[1] > 0:
        return areas[0] / areas[1]
    share = 1.0
    for axis in (0, 1):
        left, all_of_it = (
            max(point[axis] for point in one) - min(point[axis] for point in one)
            for one in (cut, whole)
        )
        share *= left / all_of_it if all_of_it else 1.0
    return share


def _area(shape: Points, *, is_box: bool) -> float:
    if not is_box:
        return ring_area(list(chain.from_iterable(shape)))
    (x1, y1), (x2, y2) = shape
    return (x2 - x1) * (y2 - y1)


def _without_repeats(bins: Sequence[int]) -> tuple[int, ...]:
    """Merge neighbouring vertices on the same bin. The last and the first are neighbours."""
    points = list(zip(bins[::2], bins[1::2], strict=True))
    kept = [point for number, point in enumerate(points) if point != points[number - 1]]
    return tuple(chain.from_iterable(kept))
