"""A finding of the doctor is told once: on the console, in a file and in held-out reports; a resumed
run continues, and `rollmatch doctor` says the same afterwards.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from config_support import configuration
from rich.console import Console
from scene_support import guess, png, scene, truth

from launch.doctor.__main__ import main
from launch.doctor.learning import VERDICT
from launch.processes.batch_algebra import batch_algebra
from launch.run_folder.resume import ResumePoint
from launch.run_folder.saved_checkpoints import RunState
from launch.run_folder.telemetry import Telemetry
from shared.config import RunConfig
from shared.grounding.evaluation import Evaluation
from shared.metrics import StepReport
from shared.run_files import Span
from shared.schedule import RunSchedule

METRICS = {
    "loss/total": 1.5,
    "packing/num_rows": 3,
    "packing/num_carried": 0,
    "rollout/num": 16,
    "rollout/length": 34.0,
    "rollout/length_max": 57,
    "rollout/num_truncated": 16,
    "rollout/num_fallback": 16,
    "rollout/num_length_limited": 0,
    "rollout/length_limited_rate": 0.0,
    "rollout/num_valid_objects": 0,
    "rollout/num_dropped_objects": 0,
    "rollout/num_ground_truth": 48,
    "time/generate_s": 1.0,
    "time/learn_s": 1.0,
}
"""No answer opens."""


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    folders = (tmp_path / "model", tmp_path / "data", tmp_path / "run")
    changes = {"telemetry__ray_metrics": False, "stage2_ab__schedule__warmup_steps": 0}
    return configuration(*folders, **changes)


def begin(config: RunConfig, output: io.StringIO, point: ResumePoint | None = None) -> Telemetry:
    telemetry = Telemetry(config, Console(file=output, width=1000), point)
    telemetry.placed(batch_algebra(config, (1, 1)), ("a", "b"), learner_threads=1)
    if point is not None:
        telemetry.go_on(point)
    return telemetry


def take_steps(telemetry: Telemetry, config: RunConfig, numbers: range) -> None:
    for number in numbers:
        plan = RunSchedule(config).plan(number - 1)
        with telemetry.step(plan) as record:
            share = {"step": number, "first_position": 0, "last_position": 15}
            spans = (
                Span("learner", "draw samples", 0.0, 0.1, {"step": number}),
                Span("a", "generate", 0.1, 5.1, share),
                Span("learner", "learn round", 5.1, 6.1, {"step": number}),
            )
            record.report = StepReport(plan.step, plan.channel, number, METRICS, spans)


def lines(config: RunConfig) -> list[tuple[str, int]]:
    text = (config.telemetry.run_dir / "doctor.jsonl").read_text()
    return [(line["rule"], line["step"]) for line in map(json.loads, text.splitlines())]


def told(config: RunConfig) -> list[tuple[str, int]]:
    return [(rule, step) for rule, step in lines(config) if rule != VERDICT]


def test_a_finding_is_told_once_on_the_console_in_a_file_and_in_the_report(
    config: RunConfig,
) -> None:
    output = io.StringIO()
    found, wrong = truth(0, 0, 99, 99), guess(0, 0, 9, 9)
    with begin(config, output) as telemetry:
        take_steps(telemetry, config, range(1, 7))
        telemetry.evaluation(Evaluation(6, 7, (scene(0, [found], [wrong], image=png()),), 1.0))
    assert told(config) == [("answers never open", 3)]
    shown = output.getvalue()
    assert shown.count("warning   answers never open: answers that never open 1 (") == 1
    assert "time      6 steps of" in shown, "a verdict at the end"
    folder = config.telemetry.run_dir / "evaluations" / "step_000006"
    (finding,) = json.loads((folder / "report.json").read_text())["findings"]
    assert finding.startswith("doctor    step 3, answers never open: ")
    assert "step 3, answers never open: " in (folder / "report.html").read_text()


def test_a_resumed_run_tells_no_finding_again_and_forgets_those_that_it_repeats(
    config: RunConfig,
) -> None:
    with begin(config, io.StringIO()) as telemetry:
        take_steps(telemetry, config, range(1, 4))
    assert told(config) == [("answers never open", 3)]
    for step, again in ((2, 1), (3, 0)):
        output = io.StringIO()
        state = RunState(step, config.model_dump(mode="json"), {})
        with begin(config, output, ResumePoint(config.telemetry.run_dir, state)) as telemetry:
            take_steps(telemetry, config, range(step + 1, 6))
        assert output.getvalue().count("warning   answers never open") == again
        assert told(config) == [("answers never open", 3)]


def test_every_20_steps_a_verdict_is_printed(config: RunConfig) -> None:
    output = io.StringIO()
    with begin(config, output) as telemetry:
        take_steps(telemetry, config, range(1, 22))
    assert "time      20 steps of" in output.getvalue()
    assert "time      1 steps of" in output.getvalue()
    assert [step for rule, step in lines(config) if rule == VERDICT] == [20, 21]
    # A run that is resumed keeps the verdicts on the steps that it does not repeat.
    state = RunState(20, config.model_dump(mode="json"), {})
    with begin(config, output, ResumePoint(config.telemetry.run_dir, state)) as telemetry:
        take_steps(telemetry, config, range(21, 24))
    assert [step for rule, step in lines(config) if rule == VERDICT] == [20, 23]
    assert output.getvalue().count(f"report    {config.telemetry.run_dir / 'report.html'}") == 2


def test_the_command_says_afterwards_what_was_said_live(
    config: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    with begin(config, io.StringIO()) as telemetry:
        take_steps(telemetry, config, range(1, 4))
    with pytest.raises(SystemExit) as ended:
        main([str(config.telemetry.run_dir)])
    assert ended.value.code == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("doctor    step 3, answers never open: answers that never open 1 (")
    assert second.startswith("time      3 steps of ")
    # Without findings the status is 0.
    (config.telemetry.run_dir / "metrics.jsonl").write_text("")
    with pytest.raises(SystemExit) as ended:
        main([str(config.telemetry.run_dir)])
    assert ended.value.code == 0
    assert capsys.readouterr().out == "doctor    no rule is broken\n"


def test_the_command_prints_its_rules_and_refuses_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["rules"])
    assert "no matches\n  match rate, threshold 0.05, 4 steps\n" in capsys.readouterr().out
    for arguments in ([str(tmp_path)], []):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    assert "holds no run" in capsys.readouterr().err
