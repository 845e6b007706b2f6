"""Augmentation: pixels and objects change alike, by seed, epoch and row (issue 21, point 7)."""

import io
import math
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
from config_changes import fits, load, problems
from PIL import Image, ImageDraw
from scene_support import png, truth

from learner.data import augment
from learner.data.augment import (
    ATTEMPTS,
    NUM_THREADS,
    Augmentation,
    Augmented,
    AugmentedAhead,
    Augmenter,
)
from learner.segments import decode_image
from shared.config.model import AugmentSection
from shared.dataset import Draw
from shared.errors import RecordError
from shared.grounding.geometry import bin_box, bin_points, pixels_of
from shared.records import ImageRef, Sample

WIDTH, HEIGHT = 300, 200
ALL = AugmentSection(flip=0.5, crop=0.5, scale=(0.5, 1.5), min_visible=0.0)
SHAPES = AugmentSection(flip=0.5, crop=0.5, min_visible=0.0)


def drawn(section, number, *, attempt=0):
    return Augmentation.draw(section, 17, Draw(0, number, 0), attempt, (WIDTH, HEIGHT))


def scene(*objects, image=None):
    ref = ImageRef(None, png(WIDTH, HEIGHT) if image is None else image, "")
    return Sample("scene", (ref,), WIDTH, HEIGHT, tuple(objects))


def painted(points):
    """A black picture with a white shape whose corners are these pixels; PNG."""
    picture = Image.new("RGB", (WIDTH, HEIGHT))
    ImageDraw.Draw(picture).polygon(points, fill="white")
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def covered(sample, points):
    """The pixels that a shape of the sample's picture covers: bool [height, width]."""
    mask = Image.new("1", (sample.width, sample.height))
    if len(points) >= 2:
        ImageDraw.Draw(mask).polygon(points, fill=1)
    return np.array(mask)


def iou(one, other):
    return (one & other).sum() / max(1, (one | other).sum())


@pytest.mark.parametrize("number", range(12))
def test_boxes_and_polygons_lie_on_the_pixels_that_they_lay_on(number):
    generator = np.random.default_rng(number)
    centre = generator.uniform((80, 60), (220, 140))
    turns = np.sort(generator.uniform(0, 2 * math.pi, 7))
    points = centre + generator.uniform(25, 55, (7, 1)) * np.stack(
        [np.cos(turns), np.sin(turns)], axis=1
    )
    ring = [value for point in points.tolist() for value in point]
    polygon = truth(*bin_points(ring, width=WIDTH, height=HEIGHT))
    one = drawn(ALL, number)
    before = scene(polygon, image=painted([tuple(point) for point in points.tolist()]))
    after = one.applied(before)
    objects = after.objects
    assert (after.width, after.height) == one.size == decode_image(after.images[0]).size
    white = np.array(decode_image(after.images[0]).convert("L")) > 127
    if not objects:
        assert white.sum() < 20
        return
    flat = pixels_of(objects[0].bins, width=after.width, height=after.height)
    shape = covered(after, list(zip(flat[::2], flat[1::2], strict=True)))
    assert iou(white, shape) > 0.85
    # The box around what was painted.
    xs, ys = points[:, 0], points[:, 1]
    box = bin_box((xs.min(), ys.min(), xs.max(), ys.max()), width=WIDTH, height=HEIGHT)
    corners = [
        (xs.min(), ys.min()),
        (xs.max(), ys.min()),
        (xs.max(), ys.max()),
        (xs.min(), ys.max()),
    ]
    before = scene(truth(*box), image=painted(corners))
    after = one.applied(before)
    (found,) = after.objects
    rows, columns = np.nonzero(np.array(decode_image(after.images[0]).convert("L")) > 127)
    flat = pixels_of(found.bins, width=after.width, height=after.height)
    seen = (columns.min(), rows.min(), columns.max(), rows.max())
    assert np.abs(np.array(flat) - seen).max() <= 2


@pytest.mark.parametrize("number", range(20))
def test_a_polygon_is_cut_at_the_border_and_its_visible_share_is_that_of_its_area(number):
    """Against a grid of points, each of which lies in both or in neither."""
    generator = np.random.default_rng(number)
    points = generator.uniform(0, 100, (generator.integers(3, 9), 2))
    ring = [tuple(point) for point in points.tolist()]
    left, top = generator.uniform(0, 60, 2).tolist()
    window = (left, top, left + 40.0, top + 40.0)
    cut = augment._cut_polygon(ring, window)
    grid = np.stack(np.meshgrid(np.arange(0.13, 100), np.arange(0.37, 100)), axis=-1).reshape(-1, 2)

    def windings(of_ring):
        """How often the ring winds around each point."""
        total = np.zeros(len(grid))
        for (x1, y1), (x2, y2) in zip(of_ring, [*of_ring[1:], of_ring[0]], strict=True):
            a = np.arctan2(y1 - grid[:, 1], x1 - grid[:, 0])
            b = np.arctan2(y2 - grid[:, 1], x2 - grid[:, 0])
            total += (b - a + math.pi) % (2 * math.pi) - math.pi
        return np.round(total / (2 * math.pi))

    inside = (grid >= window[:2]).all(axis=1) & (grid <= window[2:]).all(axis=1)
    expected = np.where(inside, windings(ring), 0)
    found = windings(cut) if cut else np.zeros(len(grid))
    assert (found == expected).all()
    assert all(left <= x <= left + 40 and top <= y <= top + 40 for x, y in cut)


def test_what_a_crop_leaves_too_little_of_is_left_out():
    crop = Augmentation((100, 0, 100, 200), False, (100, 200), (1.0, 1.0, 1.0), 0.0, 0.0)

    def kept(sample, least):
        return replace(crop, min_visible=least).objects(sample)

    half = truth(*bin_box((50, 20, 150, 80), width=WIDTH, height=HEIGHT), desc="half")
    quarter = truth(*bin_box((25, 100, 125, 180), width=WIDTH, height=HEIGHT), desc="quarter")
    away = truth(*bin_box((220, 20, 290, 80), width=WIDTH, height=HEIGHT), desc="away")
    triangle = truth(
        *bin_points((150, 100, 250, 100, 150, 180), width=WIDTH, height=HEIGHT), desc="triangle"
    )  # three quarters of it are left of 200
    sample = scene(half, quarter, away, triangle)
    assert [one.desc for one in kept(sample, 0.0)] == ["half", "quarter", "triangle"]
    assert [one.desc for one in kept(sample, 0.3)] == ["half", "triangle"]
    assert [one.desc for one in kept(sample, 0.6)] == ["triangle"]
    assert [one.desc for one in kept(sample, 0.8)] == []
    (line,) = kept(scene(truth(0, 500, 999, 500)), 0.3)
    assert line.bins == (0, 500, 999, 500), "of one without area its side counts"
    assert kept(scene(truth(0, 500, 999, 500)), 0.4) == ()


def test_a_point_moves_with_its_pixel_and_is_left_out_where_a_crop_leaves_it_out():
    size = (100, 200)
    crop = Augmentation((100, 0, *size), True, size, (1.0, 1.0, 1.0), 0.0, 0.9)
    places = ((100, 0), (199, 199), (150, 100), (99, 0), (200, 0))
    objects = [truth(*bin_points(place, width=WIDTH, height=HEIGHT)) for place in places]
    found = [crop.objects(scene(one)) for one in objects]
    assert [len(one) for one in found] == [1, 1, 1, 0, 0]
    for one, (x, y) in zip(found, [(999, 0), (0, 999), (494, 502)], strict=False):
        assert one[0].bins == pytest.approx((x, y), abs=3)


@pytest.mark.parametrize("size", [(640, 480), (427, 640), (64, 333), (1, 90)])
def test_a_crop_of_one_axis_leaves_the_other_as_it_was_to_the_bin(size):
    width, height = size
    crop = Augmentation((0, 20, width, 40), False, (width, 40), (1.0, 1.0, 1.0), 0.0, 0.0)
    for bin in range(999):
        sample = Sample("a", (), width, height, (truth(bin, 0, bin + 1, 999),))
        assert [one.bins for one in crop.objects(sample)] == [(bin, 0, bin + 1, 999)]


def test_a_box_that_falls_on_bins_of_the_crop_has_exactly_these():
    # Of 1000 pixels in a row, every one is a bin; of 112 of them every ninth bin is one.
    crop = Augmentation((300, 0, 112, 1000), False, (112, 1000), (1.0, 1.0, 1.0), 0.0, 0.0)
    for first in range(111):
        sample = Sample("a", (), 1000, 1000, (truth(300 + first, 5, 301 + first, 6),))
        assert [one.bins for one in crop.objects(sample)] == [(9 * first, 5, 9 * first + 9, 6)]


def test_without_a_crop_a_mirror_image_of_a_mirror_image_is_what_was_and_reading_order_is_kept():
    mirror = Augmentation((0, 0, WIDTH, HEIGHT), True, (WIDTH, HEIGHT), (1.0, 1.0, 1.0), 0.0, 1.0)
    objects = (truth(10, 5, 30, 40), truth(700, 5, 731, 77), truth(1, 9, 50, 9, 50, 70))
    sample = scene(*objects)
    mirrored = mirror.objects(sample)
    assert [one.bins for one in mirrored] == [
        (268, 5, 299, 77),
        (969, 5, 989, 40),
        (998, 9, 949, 9, 949, 70),
    ]
    assert mirror.objects(replace(sample, objects=mirrored)) == objects
    still = replace(mirror, mirrored=False, size=(30, 20))
    assert still.objects(sample) == objects


def test_the_same_draw_has_the_same_change_and_any_other_another():
    first = drawn(ALL, 3)
    assert drawn(ALL, 3) == first
    others = [
        drawn(ALL, 4),
        drawn(ALL, 3, attempt=1),
        Augmentation.draw(ALL, 18, Draw(0, 3, 0), 0, (WIDTH, HEIGHT)),
        Augmentation.draw(ALL, 17, Draw(0, 3, 1), 0, (WIDTH, HEIGHT)),
        Augmentation.draw(ALL, 17, Draw(1, 3, 0), 0, (WIDTH, HEIGHT)),
    ]
    assert len({first, *others}) == 6
    coloured = ALL.model_copy(update={"colour": 0.4})
    assert replace(drawn(coloured, 3), colour=first.colour, hue=first.hue) == first
    assert drawn(coloured, 3).colour != first.colour


def test_what_is_drawn_lies_within_what_is_asked_for():
    section = AugmentSection(flip=0.3, crop=0.6, scale=(0.5, 2.0), colour=0.2)
    found = [drawn(section, number) for number in range(300)]
    assert 0.2 < np.mean([one.mirrored for one in found]) < 0.4
    for one in found:
        left, top, width, height = one.crop
        assert round(0.6 * WIDTH) <= width <= WIDTH and 0 <= left <= WIDTH - width
        assert round(0.6 * HEIGHT) <= height <= HEIGHT and 0 <= top <= HEIGHT - height
        assert 0.49 < one.size[0] / width < 2.01
        assert all(0.8 <= factor <= 1.2 for factor in one.colour)
        assert abs(one.hue) <= 0.02
    assert 0.4 < np.mean([one.size[0] < one.crop[2] for one in found]) < 0.6
    tiny = Augmentation.draw(AugmentSection(crop=0.01), 0, Draw(0, 0, 0), 0, (1, 90))
    assert (tiny.crop[2], tiny.crop[3]) == (1, max(2, tiny.crop[3]))


def test_what_does_not_fit_is_drawn_again_and_at_last_the_sample_stays_as_it_is():
    sample = scene(truth(0, 0, 999, 999))
    asked = []

    def small(candidate):
        asked.append((candidate.width, candidate.height))
        assert candidate.images == sample.images, "nothing is painted before it fits"
        return candidate.width < 180

    shown = Augmenter(ALL, 17, small)(sample, Draw(0, 0, 0))
    assert shown.sample.width == asked[-1][0] < 180 <= min(width for width, _ in asked[:-1])
    assert shown.augmentation == drawn(ALL, 0, attempt=len(asked) - 1)
    asked.clear()
    never = Augmenter(ALL, 17, lambda candidate: asked.append(candidate) or False)
    assert never(sample, Draw(0, 0, 0)) == (sample, None, 0)
    assert len(asked) == ATTEMPTS


def test_a_crop_that_leaves_no_object_is_drawn_again_and_a_sample_without_any_may_be_cropped():
    crops = AugmentSection(crop=0.3, min_visible=0.9)
    augmented = Augmenter(crops, 17, lambda candidate: True)
    sample = scene(truth(0, 0, 120, 120))
    found = [augmented(sample, Draw(0, number, 0)) for number in range(60)]
    assert all(one.sample.objects for one in found)
    first_draws = [drawn(crops, number).without_pictures(sample) for number in range(60)]
    assert any(not one.objects for one in first_draws)
    assert augmented(scene(), Draw(0, 0, 0)).augmentation is not None


@pytest.mark.parametrize(
    ("words", "is_mirrored"),
    [
        ({"phrase": "the cat on the Left"}, False),
        ({"phrase": "the bright cat that is lefthanded"}, False),
        ({"phrase": "the bright cat"}, True),
        ({"prompt": "Find the rightmost cat."}, False),
        ({"system": "Left is where the heart is."}, False),
        ({"classes": ("cat", "right shoe")}, False),
        ({"objects": (truth(1, 2, 3, 4, desc="左边的猫"),)}, False),
        ({"objects": (truth(1, 2, 3, 4, desc="copyright"),)}, True),
    ],
)
def test_a_row_whose_words_tell_left_from_right_is_not_mirrored(words, is_mirrored):
    sample = replace(scene(truth(1, 2, 3, 4)), **words)
    shown = Augmenter(AugmentSection(flip=1.0), 17, lambda _: True)(sample, Draw(0, 0, 0))
    assert shown.augmentation.mirrored is is_mirrored


def test_colours_change_and_shapes_do_not():
    pixels = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    sample = scene(truth(1, 2, 3, 4), image=file.getvalue())
    shown = Augmenter(AugmentSection(colour=0.5), 17, lambda _: True)(sample, Draw(0, 0, 0))
    assert shown.sample.objects == sample.objects
    assert shown.num_dropped == 0
    after = np.array(decode_image(shown.sample.images[0]))
    assert after.shape == pixels.shape
    assert (after != pixels).mean() > 0.9


def test_what_became_of_a_sample_is_told_when_it_is_taken_and_nothing_begins_after_the_end():
    begun = []
    may_end = Event()

    def show(draw):
        begun.append(draw.row)
        if draw.row == 1:
            raise RecordError("is gone", field="images", remedy="restore it")
        assert draw.row == 0 or may_end.wait(240)
        return Augmented(scene(), None, 0)

    ahead = AugmentedAhead(show)
    first, gone, *others = (Draw(0, row, 0) for row in range(2 + 2 * NUM_THREADS))
    ahead.begin([first, gone])
    assert list(ahead.take([first, first])) == [first]
    with pytest.raises(RecordError, match="is gone"):
        ahead.take([gone])
    ahead.begin(others)
    ahead.close()
    may_end.set()
    assert len(begun) <= 2 + NUM_THREADS
    assert begun.count(0) == 1


def test_a_picture_of_another_size_than_its_row_says_is_told():
    sample = replace(scene(), height=HEIGHT + 1)
    with pytest.raises(RecordError, match="is 300 x 200 pixels, the row says 300 x 201; correct"):
        Augmenter(ALL, 17, lambda _: True)(sample, Draw(0, 0, 0))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({}, "data.augment: changes nothing; set flip, crop, scale or colour"),
        ({"min_visible": 0.5}, "data.augment: changes nothing"),
        ({"crop": 0.0}, "data.augment.crop: must be greater than 0"),
        ({"flip": 1.5}, "data.augment.flip: must be at most 1"),
        ({"scale": [2.0, 1.0]}, "data.augment.scale: the least factor, 2, is above the greatest"),
        ({"scale": [1.0, 5.0]}, "data.augment.scale[1]: must be at most 4"),
        ({"color": 0.1}, "data.augment.color: is not a known key; did you mean 'colour'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(section, expected):
    (problem,) = problems({"data.augment": section})
    assert fits(problem, expected)
    assert load({}).data.augment is None
    assert load({"data.augment": {"scale": [0.5, 2.0]}}).data.augment.scale == (0.5, 2.0)
