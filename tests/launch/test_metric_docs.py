"""docs/metrics.md names every figure of both kinds of held-out report (the training-time table has
its test in tests/shared/test_metrics.py).
"""

import re
from pathlib import Path

from config_support import configuration
from scene_support import guess, scene, truth

from launch.reports.detection import make_report
from launch.reports.rewards import RewardReport
from shared.grounding.evaluation import Evaluation
from shared.trajectory import EnvironmentRollout

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def documented(heading: str) -> list[str]:
    """The names of the table under this heading."""
    _, _, section = DOCS.read_text().partition(f"\n## {heading}\n")
    return re.findall(r"^\| `(val/[^`]+)` \|", section.partition("\n## ")[0], flags=re.MULTILINE)


def rollout(position: int, **metrics: float) -> EnvironmentRollout:
    nothing_learned = {
        "num_tokens": 4,
        "num_length_limited": 0,
        "num_splits": 0,
        "examples": (),
        "prompt": None,
        "completion": None,
    }
    of_the_call = {"actor": "environment-0", "started_s": 0.0, "generate_s": 1.0}
    return EnvironmentRollout(
        position=position,
        example=position,
        reward=1.0,
        metrics=metrics,
        error=None,
        is_truncated=False,
        num_turns=2,
        **nothing_learned,
        **of_the_call,
    )


def test_every_figure_of_a_report_on_samples_is_documented_and_nothing_else(tmp_path):
    evaluation = Evaluation(
        1, 1, (scene(0, [truth(0, 0, 500, 500)], [guess(0, 0, 500, 500)]),), wall_s=1.0
    )
    report = make_report(evaluation, configuration(tmp_path, tmp_path, tmp_path), subject="x")
    assert documented("Of samples") == [name for name in report.metrics() if "@" not in name]


def test_every_figure_of_a_report_on_an_environment_is_documented_and_nothing_else():
    report = RewardReport(
        Evaluation(1, 1, (rollout(0, correct=1.0), rollout(1, correct=0.0)), wall_s=1.0)
    )
    logged = [name.replace("/correct", "/<function>") for name in report.metrics()]
    assert documented("Of an environment") == logged


def test_the_first_figure_of_a_table_is_the_reports_headline(tmp_path):
    detections = make_report(
        Evaluation(1, 1, (scene(0, [truth(0, 0, 9, 9)], []),), wall_s=1.0),
        configuration(tmp_path, tmp_path, tmp_path),
        subject="x",
    )
    rewards = RewardReport(Evaluation(1, 1, (rollout(0, correct=0.5),), wall_s=1.0))
    for report, heading in ((detections, "Of samples"), (rewards, "Of an environment")):
        assert report.metrics()[documented(heading)[0]] == report.headline.value
