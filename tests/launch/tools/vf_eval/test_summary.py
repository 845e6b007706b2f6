"""The summary of an evaluation on the console."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console

from launch.tools.vf_eval.arguments import read_options
from launch.tools.vf_eval.record import EvaluationSettings
from launch.tools.vf_eval.results_file import FinishedRollout
from launch.tools.vf_eval.summary import results_of, summary_tables
from rollout_actors.environments.multi_turn import SingleTurnEnv

SETTINGS = EvaluationSettings.from_options(read_options(["echo", "-m", "demo"]))


def finished(example: int, *, rollout: int = 0, **changes: Any) -> FinishedRollout:
    state = {
        "id": example,
        "example_id": example,
        "prompt": "?",
        "completion": "!",
        "task": "default",
        "reward": 1.0,
        "metrics": {"right": 1.0, "judge": 0.5},
        "error": None,
        "stop_condition": "max_turns_reached",
        "is_truncated": False,
        "timing": {},
    }
    place = {"example": example, "rollout": rollout, "row": "digest"}
    tokens = {"prompt_tokens": None, "completion_tokens": None}
    return FinishedRollout.model_validate({**place, **tokens, "state": state | changes})


def shown(*rollouts: FinishedRollout) -> str:
    console = Console(width=200)
    environment = SingleTurnEnv(dataset=[{"question": "?"}])
    metadata = results_of(rollouts, SETTINGS, environment, wall_s=1.0, date="").metadata
    with console.capture() as capture:
        for table in summary_tables(rollouts, metadata, solved_at=0.0):
            console.print(table)
    return " ".join(capture.get().split())


def test_a_reward_function_that_failed_is_told_with_how_often_and_of_what():
    unjudged = finished(1, metrics={"right": 1.0}, reward_errors={"judge": "TimeoutError: 60 s"})
    text = shown(finished(0), unjudged)
    assert "right 1.0000" in text and "judge 0.5000" in text
    assert re.search("reward errors 1 x judge, .*: TimeoutError: 60 s", text)


def test_a_rollout_that_failed_is_in_no_mean_and_has_not_solved_its_example():
    failed = finished(0, rollout=1, reward=0.0, metrics={}, error="ValueError: no")
    text = shown(finished(0), failed)
    assert "reward 1.0000 - 1.0000 1.0000 right 1.0000" in text
    assert re.search("errors 1, .* 1 x ValueError: no", text)
    assert "pass@1 0.5000" in text
    assert "reward" not in shown(failed, failed).partition("rollouts")[0], "there is none to show"
