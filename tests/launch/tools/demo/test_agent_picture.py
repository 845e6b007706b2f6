"""A picture of an environment's run: its held-out rewards, and answers before and after it."""

import json

import pytest
from PIL import Image

from launch.tools.demo.__main__ import main
from launch.tools.demo.agent_picture import GREEN, RED, draw_environment_run
from shared.errors import ConfigError


def rollout(position, question, answer, reward):
    return {
        "position": position,
        "reward": reward,
        "error": None,
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }


@pytest.fixture
def run(tmp_path):
    """A run that learned the second of three questions."""
    run = tmp_path / "run"
    lines = []
    for step, rewards in ((0, (0.0, 0.0, 1.0)), (8, (0.0, 1.0, 1.0))):
        folder = run / "evaluations" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        rollouts = [rollout(n, f"What is {n}?", "a " * 80, one) for n, one in enumerate(rewards)]
        (folder / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rollouts)) + "\n")
        line = {"step": step, "weight_version": step + 1, "num_samples": 3}
        lines.append(line | {"headline": "mean reward", "score": sum(rewards) / 3})
    (run / "evaluations.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return run


def colours(run, questions):
    with Image.open(draw_environment_run(run, num_questions=questions)) as picture:
        return {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}


def test_the_questions_that_were_learned_are_drawn_first(run):
    assert {GREEN, RED} <= colours(run, 1)
    (report,) = (run / "evaluations" / "step_000008").glob("rollouts.jsonl")
    report.write_text(report.read_text().replace("1.0", "0.0"))
    assert GREEN not in colours(run, 2), "a question that was never answered comes before"


def test_a_run_without_two_scored_reports_is_refused(run, tmp_path, capsys):
    main(["picture", "--run", str(run)])
    assert str(run / "demo.png") in capsys.readouterr().out
    lines = (run / "evaluations.jsonl").read_text()
    (run / "evaluations.jsonl").write_text(lines.replace("0.6666666666666666", "null"))
    with pytest.raises(ConfigError, match="no score"):
        draw_environment_run(run, num_questions=1)
    (run / "evaluations" / "step_000008" / "rollouts.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"has 1 .* two"):
        draw_environment_run(run, num_questions=1)
