"""The `evaluation` section."""

from __future__ import annotations

import pytest

THRESHOLDS = "evaluation.iou_thresholds"


def test_the_report_has_defaults(load):
    evaluation = load({}).evaluation
    assert (evaluation.iou_thresholds, evaluation.score, evaluation.worst_scenes) == (
        (0.5, 0.75),
        "coord_probability",
        8,
    )


def test_thresholds_score_and_pictures_are_chosen(load):
    evaluation = load(
        {THRESHOLDS: [0.3, 0.5, 1.0], "evaluation.score": "constant", "evaluation.worst_scenes": 0}
    ).evaluation
    assert (evaluation.iou_thresholds, evaluation.score, evaluation.worst_scenes) == (
        (0.3, 0.5, 1.0),
        "constant",
        0,
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            THRESHOLDS,
            [],
            (
                f"{THRESHOLDS}: must name at least one threshold, in rising order, got []; write"
                " [0.5, 0.75]"
            ),
        ),
        (
            THRESHOLDS,
            [0.75, 0.5],
            f"{THRESHOLDS}: must name at least one threshold, in rising order, got [0.75, 0.5]; ",
        ),
        (
            THRESHOLDS,
            [0.5, 0.5],
            f"{THRESHOLDS}: must name at least one threshold, in rising order, got [0.5, 0.5]; ",
        ),
        (THRESHOLDS, [0.5, 1.5], f"{THRESHOLDS}[1]: must be at most 1, got 1.5; "),
        (THRESHOLDS, [0.0, 0.5], f"{THRESHOLDS}[0]: must be greater than 0, got 0.0; "),
        (
            THRESHOLDS,
            ["0.5"],
            f"{THRESHOLDS}[0]: must be a number, got the text '0.5'; write 0.5 without quotes",
        ),
        (THRESHOLDS, 0.5, f"{THRESHOLDS}: must be a list, got 0.5; "),
        (
            "evaluation.score",
            "mean",
            "evaluation.score: must be one of constant, coord_probability, got the text 'mean'; ",
        ),
        ("evaluation.worst_scenes", -1, "evaluation.worst_scenes: must be at least 0, got -1; "),
        (
            "evaluation.iou_threshold",
            [0.5],
            "evaluation.iou_threshold: is not a known key; did you mean 'iou_thresholds'?",
        ),
        (
            "training.eval_steps",
            0,
            (
                "training.eval_steps: must be greater than 0, got 0; change it (Evaluate after"
                " every this many updates, on `data.val`"
            ),
        ),
    ],
)
def test_what_is_no_report_is_refused(problems, path, value, message):
    (line,) = problems({path: value})
    assert line.startswith(message)


def test_reports_during_training_need_held_out_samples(problems):
    assert problems({"training.eval_steps": 10}) == []
    (line,) = problems({"training.eval_steps": 10, "data.val": None})
    assert line.startswith(
        "training.eval_steps: 10 asks for reports on held-out samples, and data.val is not set; "
    )
