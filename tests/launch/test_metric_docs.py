"""docs/reference/metrics.md names every figure of both kinds of held-out report (the training-time
table has its test in tests/shared/test_metrics.py).
"""

import re
from dataclasses import replace
from pathlib import Path

from config_support import configuration
from scene_support import guess, scene, truth

from launch.reports.detection import make_report
from launch.reports.rewards import RewardReport
from shared.grounding.evaluation import Evaluation
from shared.trajectory import EnvironmentRollout

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def documented(heading: str) -> list[str]:
    """The names of the table under this heading."""
    _, _, section = DOCS.read_text().partition(f"\n## {heading}\n")
    return re.findall(r"^`(val/[^`]+)` \|", section.partition("\n## ")[0], flags=re.MULTILINE)


def rollout(position: int, **metrics: float) -> EnvironmentRollout:
    rest = (None, False, 2, 4, 0, 0, (), None, None, "environment-0", 1.0, 0.0)
    return EnvironmentRollout(position, position, 1.0, metrics, *rest)


def test_every_figure_of_a_report_on_samples_is_documented_and_nothing_else(tmp_path):
    found = scene(0, [truth(0, 0, 500, 500)], [guess(0, 0, 500, 500)])
    config = configuration(tmp_path, tmp_path, tmp_path)
    report = make_report(Evaluation(1, 1, (found,), wall_s=1.0), config, subject="x")
    names = documented("Held-out reports of samples")
    assert names == [name for name in report.metrics() if "@" not in name]
    assert report.metrics()[names[0]] == report.headline.value
    files = [{"path": "coco.jsonl"}]
    found = replace(found, sample=replace(found.sample, source="coco"))
    config = configuration(tmp_path, tmp_path, tmp_path, data__val=files)
    report = make_report(Evaluation(1, 1, (found,), wall_s=1.0), config, subject="x")
    of_file = [name for name in report.metrics() if name.endswith("/coco")]
    page = DOCS.read_text()
    assert of_file
    assert all(f"`{name.removesuffix('coco')}<source>`" in page for name in of_file)


def test_every_figure_of_a_report_on_an_environment_is_documented_and_nothing_else():
    rollouts = (rollout(0, correct=1.0), rollout(1, correct=0.0))
    rollouts = tuple(replace(one, task="math") for one in rollouts)
    report = RewardReport(Evaluation(1, 1, rollouts, wall_s=1.0))
    names = documented("Held-out reports of an environment")
    kinds = {"val/reward/correct": "val/reward/<function>", "val/reward/math": "val/reward/<task>"}
    assert sorted(names) == sorted(kinds.get(name, name) for name in report.metrics())
    assert report.metrics()[names[0]] == report.headline.value
