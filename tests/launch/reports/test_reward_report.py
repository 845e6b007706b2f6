"""The held-out report of an environment: rewards of greedy rollouts, one per held-out example."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.reports.rewards import RewardReport, write_reward_report
from learner.rollout_logs.trajectories import TrajectoryRecord, read_step, trajectory_record
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
ROLLOUTS = (
    ROLLOUT,
    replace(
        ROLLOUT,
        position=1,
        example=1,
        reward=0.25,
        metrics={"first": 0.5, "last": 0.0},
        is_truncated=True,
        num_turns=1,
    ),
    FAILED,
)


def report(*rollouts: EnvironmentRollout) -> RewardReport:
    return RewardReport(Evaluation(20, 21, rollouts or ROLLOUTS, wall_s=1.5))


def test_the_mean_reward_is_of_the_rollouts_that_did_not_fail() -> None:
    assert report().reward == 0.5
    assert report(FAILED).reward == 0.0, "a score by which checkpoints are kept is a number"
    assert (report().headline.name, report().headline.value) == ("mean reward", report().reward)
    assert (report().num_failed, report(ROLLOUT).num_failed) == (1, 0)


def test_the_line_has_the_reward_functions_and_how_many_failed() -> None:
    assert report().describe() == "mean reward 0.500 (first 0.750, last 0.250), 1 failed"
    assert report(ROLLOUT).describe() == "mean reward 0.750 (first 1.000, last 0.500)"
    assert report(replace(ROLLOUT, metrics={})).describe() == "mean reward 0.750"


def test_the_figures_are_those_of_the_evaluations_line() -> None:
    assert report().metrics() == pytest.approx(
        {
            "val/reward": 0.5,
            "val/num_failed": 1,
            "val/num_reward_errors": 0,
            "val/num_truncated": 1,
            "val/turns": 1.0,
            "val/reward/first": 0.75,
            "val/reward/last": 0.25,
        }
    )


def test_a_reward_function_is_a_mean_over_the_rollouts_that_have_it() -> None:
    """Those of another environment of a group do not."""
    metrics = report(ROLLOUT, replace(ROLLOUT, position=1, metrics={"other": 3.0})).metrics()
    assert (metrics["val/reward/first"], metrics["val/reward/other"]) == (1.0, 3.0)


def rows(folder: Path) -> list[TrajectoryRecord]:
    return read_step(folder / "rollouts.jsonl")


def test_a_report_is_a_folder_with_the_figures_and_every_rollout_whatever_a_model_wrote(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "evaluations" / "step_000020"
    write_reward_report(folder, report())
    figures = json.loads((folder / "report.json").read_text())
    assert (
        figures["step"],
        figures["weight_version"],
        figures["num_samples"],
        figures["wall_s"],
    ) == (20, 21, 3, 1.5)
    assert figures["val/reward"] == pytest.approx(0.5)
    assert [row["example"] for row in rows(folder)] == [0, 1, 2]
    assert rows(folder)[0] == json.loads(json.dumps(trajectory_record(20, ROLLOUT)))
    assert rows(folder)[0]["completion"] == [{"role": "assistant", "content": "4\ud800 猫"}]
    assert (rows(folder)[2]["error"], rows(folder)[2]["completion"]) == ("ValueError: no", None)
    assert [path.name for path in folder.parent.iterdir()] == ["step_000020"]


def test_a_report_of_a_checkpoint_that_does_not_say_its_step_has_lines_without_one(
    tmp_path: Path,
) -> None:
    write_reward_report(
        tmp_path / "report", RewardReport(Evaluation(None, 0, ROLLOUTS, wall_s=1.5))
    )
    assert [row["step"] for row in rows(tmp_path / "report")] == [None] * 3


def test_what_a_report_that_was_interrupted_left_is_no_report_and_in_nobodys_way(
    tmp_path: Path,
) -> None:
    partial = tmp_path / "step_000020.partial"
    partial.mkdir()
    (partial / "old").touch()
    write_reward_report(tmp_path / "step_000020", report())
    assert sorted(path.name for path in (tmp_path / "step_000020").iterdir()) == [
        "report.json",
        "rollouts.jsonl",
    ]
    assert not partial.exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "evaluations").touch()
    with pytest.raises(StorageError, match=r"cannot write .*evaluations/step_000020: "):
        write_reward_report(tmp_path / "evaluations" / "step_000020", report())
