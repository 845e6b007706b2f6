"""The tables of rollouts that loggers show, from the files that runs write."""

from __future__ import annotations

import json

from launch.loggers.events import MAX_CHARACTERS, MAX_ROWS, RolloutFile, rollout_table
from learner.rollout_logs.trajectories import trajectory_record
from shared.trajectory import EnvironmentRollout


def rollout(position, completion, **changes):
    prompt = [
        {"role": "user", "content": [{"type": "text", "text": "Which?"}, {"type": "image"}]},
    ]
    fields = {"reward": 0.5, "metrics": {"exact": 1.0}, "error": None, **changes}
    rest = (False, 2, 4, 0, 0, (), prompt, completion, [], "environment-0", 1.0)
    return EnvironmentRollout(
        position, position, fields["reward"], fields["metrics"], fields["error"], *rest
    )


def written(path, rollouts):
    path.write_text("".join(json.dumps(trajectory_record(7, one)) + "\n" for one in rollouts))
    return path


def test_a_dialogue_is_a_cell_that_every_package_can_store(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    spoken = {"role": "assistant", "content": "half \ud83d of a pair"}
    path = written(
        tmp_path / "step_000007.jsonl",
        [
            rollout(0, [call, spoken]),
            rollout(1, "x" * 10_000, reward=0.0, metrics={}, error="[late] no answer"),
        ],
    )
    table = rollout_table(path, RolloutFile.TRAJECTORIES)
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert first == {
        "position": 0,
        "example": 0,
        "reward": 0.5,
        "prompt": 'user: [{"type": "text", "text": "Which?"}, {"type": "image"}]',
        "completion": 'assistant:  {"tool_calls": [{"id": "1"}]}\nassistant: half ? of a pair',
        "rewards": "exact 1",
        "turns": 2,
        "error": "",
    }
    assert second["completion"] == "x" * MAX_CHARACTERS + "..."
    assert second["error"] == "[late] no answer"


def test_a_table_has_the_first_rollouts_of_a_file(tmp_path):
    path = written(tmp_path / "rollouts.jsonl", [rollout(i, "a") for i in range(MAX_ROWS + 5)])
    table = rollout_table(path, RolloutFile.TRAJECTORIES)
    assert [row[0] for row in table.rows] == list(range(MAX_ROWS))


def test_samples_that_were_not_generated_are_no_rows(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps({"position": 0, "rollout": None, "reading": None}) + "\n")
    assert rollout_table(path, RolloutFile.SAMPLES).rows == []
