"""docs/metrics.md names every figure of a held-out report (the training-time table has its test in tests/shared/test_metrics.py)."""

import re
from pathlib import Path

from config_support import configuration
from scene_support import guess, scene, truth

from launch.report import make_report
from shared.evaluation import Evaluation

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_figure_of_a_report_is_documented_and_nothing_else(tmp_path):
    evaluation = Evaluation(1, 1, (scene(0, [truth(0, 0, 500, 500)], [guess(0, 0, 500, 500)]),), wall_s=1.0)
    logged = {name for name in make_report(evaluation, configuration(tmp_path, tmp_path, tmp_path), subject="x").metrics() if "@" not in name}
    assert logged == set(re.findall(r"^\| `(val/[^`]+)` \|", DOCS.read_text(), flags=re.MULTILINE))
