from __future__ import annotations

import numpy as np
import pytest

from shared.grounding.coco import (
    ImagePredictions,
    ScoredObject,
    bins_of_coco_box,
    bins_of_coco_ring,
    box_around,
    has_area,
    number_categories,
    predictions_to_coco,
    ring_area,
    ring_of,
    samples_to_coco,
)
from shared.grounding.geometry import box_iou, pixels_of
from shared.records import GeometryKind, GroundTruthObject, Sample

BOX = ScoredObject(GeometryKind.BBOX, (0, 0, 999, 999), "cat", 0.5)
TRIANGLE = ScoredObject(GeometryKind.POLY, (0, 0, 999, 0, 0, 999), "dog", 0.25)
WHOLE = (0, 0, 999, 999)


def coco_box(bins, width: int, height: int) -> list[float]:
    return box_around(pixels_of(bins, width=width, height=height))


@pytest.mark.parametrize(
    ("box", "bins"),
    [
        # Rounded outwards: 10 / 99 * 999 = 100.9, 40 / 99 * 999 = 403.6; 20 / 49 * 999 = 407.8,
        # 25 / 49 * 999 = 509.7
        ([10, 20, 30, 5], (100, 407, 404, 510)),
        ([0, 0, 100, 50], WHOLE),
        # What reaches beyond the image is clamped, also where 1e308 * 999 or the far edge is not
        # finite.
        ([-5, -5, 200, 200], WHOLE),
        ([0, 0, 1e308, 1e308], WHOLE),
        ([-1, 0, 1.7e308, 1.7e308], WHOLE),
    ],
)
def test_a_coordinate_is_its_pixel_over_the_last_pixel_and_boxes_round_outwards(box, bins) -> None:
    assert bins_of_coco_box(box, 100, 50) == bins


@pytest.mark.parametrize(
    ("ring", "bins"),
    [
        ([10, 20, 40, 20, 40, 25], (101, 408, 404, 408, 404, 510)),
        ([-5, 0, 200, 0, 0, 60], (0, 0, 999, 0, 0, 999)),
        ([-1e308, 0, 1e308, 0, 0, 1e308], (0, 0, 999, 0, 0, 999)),
        # Repeated vertices are one vertex.
        ([0, 0, 99, 0, 99, 49, 0, 0], (0, 0, 999, 0, 999, 999)),
        ([0, 0, 0.001, 0.001, 99, 0, 99, 49], (0, 0, 999, 0, 999, 999)),
        ([0, 0, 99, 0, 99, 0, 99, 49, 99, 49], (0, 0, 999, 0, 999, 999)),
    ],
)
def test_vertices_go_to_the_nearest_bin(ring, bins) -> None:
    assert bins_of_coco_ring(ring, 100, 50) == bins


def test_there_and_back_a_box_is_within_one_bin_of_itself() -> None:
    rng = np.random.default_rng(3)
    for _ in range(500):
        width, height = (int(v) for v in rng.integers(2, 2000, size=2))
        # Within the first and the last pixel: beyond `W - 1` there is no bin.
        x1, x2 = np.sort(rng.uniform(0, width - 1, size=2))
        y1, y2 = np.sort(rng.uniform(0, height - 1, size=2))
        bins = bins_of_coco_box([x1, y1, x2 - x1, y2 - y1], width, height)
        x, y, w, h = coco_box(bins, width, height)
        x_bin, y_bin = (width - 1) / 999 * 1.001, (height - 1) / 999 * 1.001
        assert x1 - x_bin <= x <= x1 + 1e-9
        assert x2 - 1e-9 <= x + w <= x2 + x_bin
        assert y1 - y_bin <= y <= y1 + 1e-9
        assert y2 - 1e-9 <= y + h <= y2 + y_bin


def test_there_and_back_every_vertex_is_within_half_a_bin() -> None:
    rng = np.random.default_rng(4)
    ring = rng.uniform(0, 639, size=24).tolist()
    back = ring_of(pixels_of(bins_of_coco_ring(ring, 640, 640), width=640, height=640))
    assert np.abs(np.array(back) - ring).max() <= 639 / 999 / 2 * 1.001


def test_the_overlap_of_boxes_is_the_same_number_in_bins_and_in_pixels() -> None:
    rng = np.random.default_rng(5)
    for _ in range(50):
        bins = np.sort(rng.integers(0, 1000, size=(2, 2, 2)), axis=1).reshape(2, 4)
        boxes = np.array([coco_box(tuple(int(v) for v in row), 641, 321) for row in bins])
        corners = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], axis=1)
        expected = box_iou(bins[:1], bins[1:])
        assert box_iou(corners[:1], corners[1:]) == pytest.approx(expected, abs=1e-9)


def test_the_box_of_a_polygon_encloses_it_and_the_ring_of_a_box_is_its_corners() -> None:
    assert coco_box((999, 0, 0, 999, 999, 999), 11, 21) == [0, 0, 10, 20]
    # One that ends at the far border comes back one pixel shorter.
    assert coco_box(WHOLE, 100, 50) == [0, 0, 99, 49]
    assert ring_of((0, 0, 10, 20)) == [0, 0, 10, 0, 10, 20, 0, 20]
    assert ring_area(ring_of((0, 0, 10, 20))) == 200
    for ring in ((0, 0, 10, 0, 0, 20), (0, 20, 10, 0, 0, 0)):
        assert ring_area(ring) == 100


@pytest.mark.parametrize(
    ("bins", "expected"),
    [
        ((), False),
        ((1, 1, 1, 1), False),
        ((1, 1, 2, 2, 5, 5), False),
        ((1, 1, 1, 1, 2, 2, 3, 4), True),
        ((0, 0, 1, 0, 0, 1), True),
    ],
)
def test_vertices_on_one_line_enclose_nothing(bins: tuple[int, ...], expected: bool) -> None:
    assert has_area(bins) is expected


def test_predictions_become_results_and_unknown_names_are_counted() -> None:
    unknown = ScoredObject(GeometryKind.BBOX, (1, 1, 2, 2), "unicorn", 1.0)
    predictions = [
        ImagePredictions(7, 11, 21, (BOX, unknown)),
        ImagePredictions(8, 11, 21, (ScoredObject(GeometryKind.POINT, (1, 1), "cat", 1.0),)),
        ImagePredictions(9, 11, 21, (TRIANGLE, unknown)),
    ]
    written = predictions_to_coco(predictions, {"cat": 17, "dog": 18})
    box = {"bbox": [0, 0, 10, 20], "segmentation": [[0, 0, 10, 0, 10, 20, 0, 20]]}
    triangle = {"bbox": [0, 0, 10, 20], "segmentation": [[0, 0, 10, 0, 0, 20]]}
    assert written.results == [
        {"image_id": 7, "category_id": 17, **box, "score": 0.5},
        {"image_id": 9, "category_id": 18, **triangle, "score": 0.25},
    ]
    assert written.unknown_names == {"unicorn": 2}
    assert written.num_points == 1


def test_samples_become_a_data_set_with_categories_in_order_of_their_names() -> None:
    cat = GroundTruthObject(GeometryKind.BBOX, BOX.bins, "cat")
    bee = GroundTruthObject(GeometryKind.POLY, TRIANGLE.bins, "bee")
    point = GroundTruthObject(GeometryKind.POINT, (1, 1), "cat")
    objects_of = {"a": (cat, bee), "b": (point,), "c": (point, cat)}
    samples = [Sample(name, (), 11, 21, objects) for name, objects in objects_of.items()]
    written = samples_to_coco(samples, [4, 5, 6], number_categories(["cat", "bee", "cat"]))
    assert written["categories"] == [{"id": 1, "name": "bee"}, {"id": 2, "name": "cat"}]
    assert written["images"] == [{"id": id, "width": 11, "height": 21} for id in (4, 5, 6)]
    keys = ("id", "image_id", "category_id", "area", "iscrowd")
    assert [tuple(one[key] for key in keys) for one in written["annotations"]] == [
        (1, 4, 2, 200, 0),
        (2, 4, 1, 100, 0),
        (3, 6, 2, 200, 0),
    ]
