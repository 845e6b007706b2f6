import pytest

from shared.evaluation import DetectionCounts, score_detections
from shared.grounding.objects import ParsedObject
from shared.records import GeometryKind, GroundTruthObject


def truth(*bins: int, desc: str = "cat") -> GroundTruthObject:
    return GroundTruthObject(GeometryKind.BBOX, bins, desc)


def guess(*bins: int, desc: str = "cat") -> ParsedObject:
    return ParsedObject("object_1", 1, GeometryKind.BBOX, desc, bins, (0, 1, 2, 3), (0, 4))


def test_counts_and_ratios_of_a_scene() -> None:
    predictions = [guess(0, 0, 100, 100), guess(200, 200, 300, 300, desc="dog"), guess(600, 600, 700, 700)]
    ground_truth = [truth(200, 200, 300, 310), truth(0, 0, 100, 90)]
    counts = score_detections(predictions, ground_truth, num_dropped=1)
    assert counts == DetectionCounts(num_predictions=3, num_dropped=1, num_ground_truth=2, num_matched=2, num_class_correct=1)
    assert (counts.valid_rate, counts.precision, counts.recall, counts.f1, counts.class_accuracy) == (3 / 4, 2 / 3, 1.0, 0.8, 0.5)
    assert counts.f1 == pytest.approx(2 * counts.precision * counts.recall / (counts.precision + counts.recall))


def test_pairs_are_taken_greedily_by_iou() -> None:
    # The best total would pair 0 with 0 and 1 with 1; the best pair is 0 with 1, and 1 with 0 is under the threshold.
    predictions, ground_truth = [guess(0, 0, 100, 100), guess(45, 0, 145, 100)], [truth(0, 0, 60, 100), truth(15, 0, 115, 100)]
    assert score_detections(predictions, ground_truth).num_matched == 1


def test_ties_go_to_the_earlier_prediction_then_to_the_earlier_ground_truth() -> None:
    twins = [guess(0, 0, 100, 100, desc="cat"), guess(0, 0, 100, 100, desc="dog")]
    assert score_detections(twins, [truth(0, 0, 100, 100, desc="cat")]).num_class_correct == 1
    assert score_detections(twins[::-1], [truth(0, 0, 100, 100, desc="cat")]).num_class_correct == 0
    assert score_detections([twins[0]], [truth(0, 0, 100, 100, desc="dog"), truth(0, 0, 100, 100, desc="cat")]).num_class_correct == 0


def test_the_threshold_itself_counts() -> None:
    predictions, ground_truth = [guess(0, 0, 100, 100)], [truth(0, 0, 50, 100)]
    assert score_detections(predictions, ground_truth).num_matched == 1
    assert score_detections(predictions, ground_truth, iou_threshold=0.51).num_matched == 0


def test_counts_of_scenes_are_added() -> None:
    counts = [score_detections([guess(0, 0, 9, 9)], [truth(0, 0, 9, 9)]), score_detections([], [truth(0, 0, 9, 9)], num_dropped=2)]
    total = sum(counts, DetectionCounts())
    assert total == DetectionCounts(1, 2, 2, 1, 1) and total.recall == 0.5 and total.valid_rate == 1 / 3


def test_a_ratio_over_nothing_is_0() -> None:
    empty = score_detections([], [])
    assert empty == DetectionCounts()
    assert (empty.valid_rate, empty.precision, empty.recall, empty.f1, empty.class_accuracy) == (0.0,) * 5
