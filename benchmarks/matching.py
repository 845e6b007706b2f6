"""Compare matching of 60 predictions and 60 ground truths with a slow simple version.

`python -m benchmarks.matching` uses one core and the default settings. Three kinds of scene: boxes,
polygons of 12 points, and both mixed. Sizes are log-uniform and include small shapes (fewer than 16
canvas pixels). Predictions are ground truths with moved coordinates. Both versions must give the
same pairs and IoUs. Printed are the medians in milliseconds, their ratio and the project's limit.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable
from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from shared.grounding.geometry import Point, Shape, aabb, vertices
from shared.grounding.matching import MatchResult, match_objects
from shared.grounding.objects import ParsedObject
from shared.records import GeometryKind, GroundTruthObject

NUM_OBJECTS = 60
NUM_POINTS = 12
RESOLUTION = 256
TOP_K = 10
GATE = 0.3
SMALL = 16
RADII = (5.0, 200.0)
"""Least and greatest radius of the random shapes, in bins."""
JITTER = 0.08
"""Standard deviation of the movement of a prediction's coordinates, in radii of the shape."""
BOUNDS_MS = {"boxes": 3.0, "polygons": 20.0, "mixed": 20.0}

Scene = tuple[list[ParsedObject], list[GroundTruthObject]]


def scene(kinds: tuple[GeometryKind, ...], seed: int) -> Scene:
    draw = random.Random(seed)
    predictions = []
    ground_truth = []
    for index in range(NUM_OBJECTS):
        kind = kinds[index % len(kinds)]
        radius = math.exp(draw.uniform(*map(math.log, RADII)))
        cx = draw.uniform(radius, 999 - radius)
        cy = draw.uniform(radius, 999 - radius)
        outline = (
            box_outline(draw, cx, cy, radius)
            if kind is GeometryKind.BBOX
            else star_outline(draw, cx, cy, radius)
        )
        bins = [
            (to_bins(outline)),
            to_bins([value + draw.gauss(0, JITTER * radius) for value in outline]),
        ]
        truth, guess = (
            [(*map(min, box[:2], box[2:]), *map(max, box[:2], box[2:])) for box in bins]
            if kind is GeometryKind.BBOX
            else bins
        )
        ground_truth.append(GroundTruthObject(kind, truth, "thing"))
        predictions.append(
            ParsedObject(
                f"object_{index}",
                index,
                kind,
                "thing",
                guess,
                tuple(range(len(guess))),
                (0, len(guess)),
            )
        )
    draw.shuffle(predictions)
    return predictions, ground_truth


def box_outline(draw: random.Random, cx: float, cy: float, radius: float) -> list[float]:
    width = radius * draw.uniform(0.3, 1)
    height = radius * draw.uniform(0.3, 1)
    return [cx - width, cy - height, cx + width, cy + height]


def star_outline(draw: random.Random, cx: float, cy: float, radius: float) -> list[float]:
    spokes = [
        (radius * draw.uniform(0.5, 1), 2 * math.pi * i / NUM_POINTS) for i in range(NUM_POINTS)
    ]
    return [
        value
        for spoke, angle in spokes
        for value in (cx + spoke * math.cos(angle), cy + spoke * math.sin(angle))
    ]


def to_bins(values: list[float]) -> tuple[int, ...]:
    return tuple(min(max(round(value), 0), 999) for value in values)


def slow_match(
    predictions: list[ParsedObject], ground_truth: list[GroundTruthObject]
) -> tuple[list[tuple[int, int, float]], int]:
    """Match objects in the simple way, as decision 34 defines it.

    Return the pairs, and the number of pairs that were rejected because their IoU is too low.
    Each shape has a full canvas, every pixel is tested, and pairs are compared one by one.
    """
    masks_a = [slow_mask(shape) for shape in predictions]
    masks_b = [slow_mask(shape) for shape in ground_truth]
    iou_PG = np.full((len(predictions), len(ground_truth)), -1.0)
    rejections = 0
    for i, prediction in enumerate(predictions):
        for j in slow_candidates(prediction, ground_truth, TOP_K):
            if min(masks_a[i].sum(), masks_b[j].sum()) < SMALL:
                iou_PG[i, j] = slow_area_iou(vertices(prediction), vertices(ground_truth[j]))
            else:
                iou_PG[i, j] = (masks_a[i] & masks_b[j]).sum() / (masks_a[i] | masks_b[j]).sum()
            rejections += iou_PG[i, j] < GATE
    cost = np.zeros((iou_PG.shape[0] + iou_PG.shape[1],) * 2)
    cost[: len(predictions), : len(ground_truth)] = np.where(iou_PG >= GATE, 1 - iou_PG, np.inf)
    cost[: len(predictions), len(ground_truth) :] = cost[
        len(predictions) :, : len(ground_truth)
    ] = 1.0
    chosen = zip(*linear_sum_assignment(cost), strict=True)
    return [
        (int(i), int(j), float(iou_PG[i, j]))
        for i, j in chosen
        if i < len(predictions) and j < len(ground_truth)
    ], rejections


def slow_mask(shape: Shape) -> np.ndarray:
    """Return the pixels that a filled shape covers: bool [R, R].

    It uses integer arithmetic in units of 1 / 1998 of a pixel.
    """
    ring = [(x * 2 * (RESOLUTION - 1), y * 2 * (RESOLUTION - 1)) for x, y in vertices(shape)]
    x, y = np.meshgrid(*[(2 * np.arange(RESOLUTION) + 1) * 999] * 2)
    inside = np.zeros((RESOLUTION, RESOLUTION), dtype=bool)
    for p, q in zip(ring, [*ring[1:], ring[0]], strict=True):
        (ax, ay), (bx, by) = sorted([p, q], key=lambda point: point[1])
        inside ^= (ay <= y) & (y < by) & ((x - ax) * (by - ay) >= (y - ay) * (bx - ax))
    return inside


def slow_candidates(
    prediction: Shape, ground_truth: list[GroundTruthObject], top_k: int
) -> list[int]:
    px1, py1, px2, py2 = aabb(prediction)

    def key(j: int) -> tuple[float, int, int]:
        x1, y1, x2, y2 = aabb(ground_truth[j])
        common = max(0, min(px2, x2) - max(px1, x1)) * max(0, min(py2, y2) - max(py1, y1))
        union = (px2 - px1) * (py2 - py1) + (x2 - x1) * (y2 - y1) - common
        return (
            (-common / union, 0, j)
            if common
            else (0.0, (px1 + px2 - x1 - x2) ** 2 + (py1 + py2 - y1 - y2) ** 2, j)
        )

    return sorted(range(len(ground_truth)), key=key)[:top_k]


def slow_area_iou(a: list[Point], b: list[Point]) -> float:
    """Return the exact IoU of two polygons.

    Areas are summed over slabs between all vertices and crossings of edges.
    """
    rings = [
        [
            (p, q) if p[1] < q[1] else (q, p)
            for p, q in zip(ring, [*ring[1:], ring[0]], strict=True)
            if p[1] != q[1]
        ]
        for ring in (a, b)
    ]
    levels = {Fraction(point[1]) for edge in rings[0] + rings[1] for point in edge}
    for ((ax, ay), (bx, by)), ((cx, cy), (dx, dy)) in combinations(rings[0] + rings[1], 2):
        if determinant := (bx - ax) * (dy - cy) - (by - ay) * (dx - cx):
            y = ay + Fraction(
                (by - ay) * ((cx - ax) * (dy - cy) - (cy - ay) * (dx - cx)), determinant
            )
            if max(ay, cy) < y < min(by, dy):
                levels.add(y)
    common = union = Fraction(0)
    for low, high in pairwise(sorted(levels)):
        y = (low + high) / 2
        crossings = [
            [
                ax + (y - ay) * Fraction(bx - ax, by - ay)
                for (ax, ay), (bx, by) in ring
                if ay < y < by
            ]
            for ring in rings
        ]
        for left, right in pairwise(sorted(crossings[0] + crossings[1])):
            inside = [sum(x <= left for x in ring) % 2 for ring in crossings]
            common += all(inside) * (right - left) * (high - low)
            union += any(inside) * (right - left) * (high - low)
    return float(common / union) if union else float(set(a) == set(b))


def check_same(fast: MatchResult, slow: tuple[list[tuple[int, int, float]], int]) -> None:
    pairs, rejections = slow
    assert [pair[:2] for pair in fast.pairs] == [pair[:2] for pair in pairs], (
        "the two versions chose different pairs"
    )
    assert all(
        abs(pair.iou - other[2]) < 1e-12 for pair, other in zip(fast.pairs, pairs, strict=True)
    ), "the two versions differ in an IoU"
    assert fast.gating_rejections == rejections, (
        "the two versions rejected different numbers of pairs"
    )


def median_ms(call: Callable[[Scene], object], scenes: list[Scene]) -> float:
    times = []
    for each in scenes:
        start = time.perf_counter()
        call(each)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenes",
        type=int,
        default=5,
        help="different scenes per kind, each answered by both versions",
    )
    parser.add_argument(
        "--repeats", type=int, default=20, help="times that the fast version answers each scene"
    )
    arguments = parser.parse_args()
    print(
        f"{'60 x 60':10} {'ms':>8} {'slow ms':>9} {'ratio':>7} {'bound ms':>9}  pairs of the first"
        " scene"
    )
    for name, kinds in {
        "boxes": (GeometryKind.BBOX,),
        "polygons": (GeometryKind.POLY,),
        "mixed": (GeometryKind.BBOX, GeometryKind.POLY),
    }.items():
        scenes = [scene(kinds, seed) for seed in range(arguments.scenes)]
        for each in scenes:
            check_same(match_objects(*each), slow_match(*each))
        fast = median_ms(lambda each: match_objects(*each), scenes * arguments.repeats)
        slow = median_ms(lambda each: slow_match(*each), scenes)
        print(
            f"{name:10} {fast:8.2f} {slow:9.1f} {slow / fast:6.0f}x {BOUNDS_MS[name]:9.1f} "
            f" {len(match_objects(*scenes[0]).pairs)}"
        )
    print("Both versions gave the same pairs, IoUs and rejections.")


if __name__ == "__main__":
    main()
