"""The held-out report of an environment: rewards of greedy rollouts, one per held-out example."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from launch.reports.rewards import RewardReport, write_reward_report
from learner.rollout_logs.trajectories import read_step, trajectory_record
from shared.errors import StorageError
from shared.grounding.evaluation import Evaluation
from shared.trajectory import EnvironmentRollout

ROLLOUT = EnvironmentRollout(
    position=0,
    example=0,
    reward=0.75,
    metrics={"first": 1.0, "last": 0.5},
    error=None,
    is_truncated=False,
    num_turns=2,
    num_tokens=5,
    num_length_limited=0,
    num_splits=0,
    examples=(),
    prompt=[{"role": "user", "content": "first of 431"}],
    completion=[{"role": "assistant", "content": "4\ud800 猫"}],
    actor="environment-0",
    started_s=100.0,
    generate_s=0.5,
)
TRUNCATED = replace(
    ROLLOUT,
    position=1,
    example=1,
    reward=0.25,
    metrics={"first": 0.5, "last": 0.0},
    is_truncated=True,
    num_turns=1,
)
FAILED = replace(
    ROLLOUT,
    position=2,
    example=2,
    reward=0.0,
    metrics={},
    error="ValueError: no",
    completion=None,
    num_turns=0,
)


def report(*rollouts: EnvironmentRollout, step: int | None = 20) -> RewardReport:
    outcomes = rollouts or (ROLLOUT, TRUNCATED)
    return RewardReport(Evaluation(step, 21, outcomes, wall_s=1.5))


def test_one_in_twenty_rollouts_may_fail_and_the_mean_is_of_the_others():
    twenty = report(*[ROLLOUT] * 10, *[TRUNCATED] * 9, FAILED)
    mean = (10 * 0.75 + 9 * 0.25) / 19
    assert twenty.headline == ("mean reward", pytest.approx(mean))
    assert (twenty.num_failed, report().num_failed) == (1, 0)
    assert twenty.describe().endswith(", 1 failed")


@pytest.mark.parametrize(
    "rollouts", [[FAILED], [ROLLOUT, *[FAILED] * 7], [*[ROLLOUT] * 18, FAILED, FAILED]]
)
def test_a_report_of_which_more_failed_has_no_score(rollouts):
    """Neither 0, which beats negative rewards, nor the mean of a few lucky ones."""
    failed = report(*rollouts)
    assert failed.headline == ("mean reward", None)
    metrics = failed.metrics()
    assert "val/reward" not in metrics
    assert metrics["val/num_failed"] == sum(one is FAILED for one in rollouts)
    assert f"{failed.num_failed} of {len(rollouts)} rollouts failed" in failed.describe()


def test_the_line_has_the_reward_functions():
    assert report().describe() == "mean reward 0.500 (first 0.750, last 0.250)"
    assert report(ROLLOUT).describe() == "mean reward 0.750 (first 1.000, last 0.500)"
    assert report(replace(ROLLOUT, metrics={})).describe() == "mean reward 0.750"


def test_the_figures_are_those_of_the_evaluations_line():
    assert report().metrics() == pytest.approx(
        {
            "val/reward": 0.5,
            "val/num_failed": 0,
            "val/num_reward_errors": 0,
            "val/num_truncated": 1,
            "val/num_overlong": 0,
            "val/turns": 1.5,
            "val/reward/first": 0.75,
            "val/reward/last": 0.25,
        }
    )


def test_a_reward_function_is_a_mean_over_the_rollouts_that_have_it():
    metrics = report(ROLLOUT, replace(ROLLOUT, position=1, metrics={"other": 3.0})).metrics()
    assert (metrics["val/reward/first"], metrics["val/reward/other"]) == (1.0, 3.0)


def test_of_a_group_each_environment_has_its_figures(tmp_path):
    rollouts = [
        replace(ROLLOUT, task="last"),
        replace(TRUNCATED, task="sort"),
        replace(TRUNCATED, task="sort"),
        *[replace(FAILED, task="stack")] * 2,
    ]
    of_group = report(*rollouts)
    metrics = of_group.metrics()
    assert (metrics["val/reward/last"], metrics["val/reward/sort"]) == (0.75, 0.25)
    # Of a function that has an environment's name.
    assert metrics["val/reward/last (function)"] == pytest.approx(0.5 / 3)
    assert "val/reward/stack" not in metrics
    assert "last 0.750 of 1, sort 0.250 of 2, stack - of 2" in of_group.describe()
    write_reward_report(tmp_path / "report", of_group)
    assert json.loads((tmp_path / "report" / "report.json").read_text())["tasks"] == {
        "last": {"num_samples": 1, "reward": 0.75, "num_failed": 0},
        "sort": {"num_samples": 2, "reward": 0.25, "num_failed": 0},
        "stack": {"num_samples": 2, "reward": None, "num_failed": 2},
    }
    rows = read_step(tmp_path / "report" / "rollouts.jsonl")
    assert [row["task"] for row in rows] == ["last", "sort", "sort", "stack", "stack"]


def test_a_report_is_a_folder_with_the_figures_and_every_rollout_whatever_a_model_wrote(tmp_path):
    folder = tmp_path / "evaluations" / "step_000020"
    write_reward_report(folder, report(ROLLOUT, TRUNCATED, FAILED))
    figures = json.loads((folder / "report.json").read_text())
    expected = {"step": 20, "weight_version": 21, "num_samples": 3, "wall_s": 1.5}
    assert {name: figures[name] for name in expected} == expected
    assert (figures["val/num_failed"], "val/reward" in figures) == (1, False)
    rows = read_step(folder / "rollouts.jsonl")
    assert [row["example"] for row in rows] == [0, 1, 2]
    assert rows[0] == json.loads(json.dumps(trajectory_record(20, ROLLOUT)))
    assert rows[0]["completion"] == [{"role": "assistant", "content": "4\ud800 猫"}]
    assert (rows[2]["error"], rows[2]["completion"]) == ("ValueError: no", None)
    assert [path.name for path in folder.parent.iterdir()] == ["step_000020"]
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "rollouts.jsonl"]


def test_a_report_of_a_checkpoint_that_does_not_say_its_step_has_lines_without_one(tmp_path):
    write_reward_report(tmp_path / "report", report(step=None))
    rows = read_step(tmp_path / "report" / "rollouts.jsonl")
    assert [row["step"] for row in rows] == [None] * 2


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "evaluations").touch()
    with pytest.raises(StorageError, match=r"cannot write .*evaluations/step_000020: "):
        write_reward_report(tmp_path / "evaluations" / "step_000020", report())
