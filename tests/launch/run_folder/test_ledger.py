"""`ledger.jsonl`: a chained line per step of what decided it; edits and cuts are named."""

from __future__ import annotations

import hashlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import resumable_run
from config_support import configuration, trajectory_config
from edited_lines import edit_line
from rich.console import Console

from launch.processes.batch_algebra import batch_algebra
from launch.run_folder import ledger
from launch.run_folder.ledger import check_ledger, main
from launch.run_folder.resume import ResumePoint
from launch.run_folder.saved_checkpoints import RunState
from launch.run_folder.telemetry import Telemetry
from shared.metrics import DIGESTS, StepReport
from shared.run_files import Span
from shared.schedule import RunSchedule

METRICS = {
    "loss/total": 1.5,
    "optim/grad_norm": 0.25,
    "packing/num_rows": 3.0,
    "packing/num_carried": 0.0,
    "time/learn_s": 0.5,
}


def take(folder: Path, last: int, *, behind: int | None = None, **changes) -> str:
    """Take steps up to `last`, from the start or of a run that is resumed behind a step; return the
    console's lines.
    """
    settings = {"stage2_ab__schedule__warmup_steps": 9, "telemetry__ray_metrics": False, **changes}
    config = configuration(Path("model"), Path("data"), folder, **settings)
    console = io.StringIO()
    point = None
    if behind is not None:
        point = ResumePoint(folder / "checkpoint", RunState(behind, {}, {}))
    with Telemetry(config, Console(file=console, width=400), point) as telemetry:
        telemetry.placed(batch_algebra(config, (1,)), ("a",), learner_threads=1)
        if point is not None:
            telemetry.go_on(point)
        for step in range(behind or 0, last):
            plan = RunSchedule(config).plan(step)
            digests = {"targets": f"t{step}", "weights": f"w{step}"}
            with telemetry.step(plan) as record:
                spans = (Span("learner", "learn", 1.0, 2.0),)
                record.report = StepReport(step, plan.channel, 1, METRICS, spans, digests)
    return console.getvalue()


@pytest.fixture
def run(tmp_path):
    take(tmp_path / "run", 4)
    return tmp_path / "run"


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def test_behind_its_head_the_ledger_has_a_line_for_every_step_with_the_hash_of_the_one_before(run):
    head, first, second, *_ = lines(run)
    assert head["step"] == 0
    assert {"python", "torch", "ray"} <= head["versions"].keys()
    size = first["samples"][1]
    assert first == {
        "step": 1,
        "channel": "A",
        "samples": [0, size],
        "seed": 17,
        "weight_version": 1,
        "targets": "t0",
        "weights": "w0",
        "loss": 1.5,
        "grad_norm": 0.25,
        "previous": head["hash"],
        "hash": first["hash"],
    }
    assert (second["samples"], second["previous"]) == ([size, 2 * size], first["hash"])
    text = (run / "ledger.jsonl").read_text().splitlines()[1].partition(', "hash"')[0]
    assert first["hash"] == hashlib.sha256(text.encode()).hexdigest()
    assert check_ledger(run) is None


def edited(entries: list[str]) -> list[str]:
    return [*entries[:2], entries[2].replace("1.5", "1.4"), *entries[3:]]


def edited_with_its_hash(entries: list[str]) -> list[str]:
    text = entries[2].replace("1.5", "1.4").partition(', "hash"')[0]
    line = f'{text}, "hash": "{hashlib.sha256(text.encode()).hexdigest()}"}}'
    return [*entries[:2], line, *entries[3:]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (edited, "line 3: its hash does not match; the line was edited"),
        (edited_with_its_hash, "line 4: it does not follow the line before it"),
        (lambda entries: entries[:2] + entries[3:], "line 3: it does not follow"),
        (lambda entries: entries[1:], "line 1: it does not follow"),
        (lambda entries: [entries[0], entries[2], entries[1]], "line 2: it does not follow"),
        (lambda entries: [*entries[:2], "", *entries[2:]], "line 3: its hash does not match"),
        (lambda entries: [*entries, entries[-1]], "line 6: it does not follow"),
        (
            lambda entries: entries[:-1],
            "it ends at step 3, but metrics.jsonl at 4; its end was cut",
        ),
        (lambda entries: [], "it ends at step 0, but metrics.jsonl at 4; its end was cut"),
    ],
)
def test_the_first_line_that_does_not_fit_is_named(run, change, problem):
    path = run / "ledger.jsonl"
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))
    assert problem in (check_ledger(run) or "")
    with pytest.raises(SystemExit) as ended:
        main([str(run)])
    assert ended.value.code in (1, 2)


def test_a_resumed_run_goes_on_with_the_chain_and_a_new_head_says_what_has_changed(
    run, tmp_path, monkeypatch, capsys
):
    take(tmp_path / "parts", 3)
    take(tmp_path / "parts", 4, behind=2, rollout_matching__decode_batch_size=3)
    whole, parts = (tmp_path / name / "ledger.jsonl" for name in ("run", "parts"))
    assert parts.read_bytes() == whole.read_bytes()
    monkeypatch.setattr(ledger, "_commit", lambda: "f" * 40)
    take(tmp_path / "parts", 5, behind=3)
    assert [line["step"] for line in lines(tmp_path / "parts")] == [0, 1, 2, 3, 3, 4, 5]
    assert lines(tmp_path / "parts")[4]["commit"] == "f" * 40
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "parts")])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("complete, steps 1 to 5, last hash ")


def test_an_environment_that_is_a_file_is_in_the_head_by_its_content(tmp_path):
    def head_with(environment: str) -> dict:
        folder = tmp_path / "run"
        config = trajectory_config(tmp_path, folder, environment__id=environment)
        return ledger.head_of(config)

    file = tmp_path / "env.py"
    file.write_text("one = 1")
    before = head_with(str(file))
    assert head_with(str(file)) == before
    file.write_text("one = 2")
    after = head_with(str(file))
    assert [name for name in before if before[name] != after[name]] == ["environment"]
    assert "environment" not in head_with("copy_digits")


def test_a_line_whose_metrics_were_not_written_any_more_is_written_again(run):
    before = (run / "ledger.jsonl").read_bytes()
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:-1]))
    assert check_ledger(run) is None
    take(run, 4, behind=3)
    assert (run / "ledger.jsonl").read_bytes() == before


def test_a_resumption_tells_of_a_broken_chain_and_goes_on(run):
    edit_line(run / "ledger.jsonl", 2, lambda line: line.update(loss=1.4))
    told = take(run, 5, behind=4)
    assert f"{run / 'ledger.jsonl'} line 3: its hash does not match" in told
    assert len(lines(run)) == 6
    assert "line 3" in (check_ledger(run) or "")


def test_a_ledger_that_cannot_be_read_is_put_aside_and_named(run, capsys):
    path = run / "ledger.jsonl"
    path.write_text(path.read_text().replace('{"step": 3', '{step": 3'))
    with pytest.raises(SystemExit) as ended:
        main([str(run)])
    assert ended.value.code == 1
    assert re.search("line 4: .*hash", capsys.readouterr().out)
    take(run, 5, behind=4)
    assert (run / "ledger.jsonl.damaged").exists()
    assert [line["step"] for line in lines(run)] == [4, 5]
    assert check_ledger(run) is None


def test_the_head_of_a_resumption_that_came_to_nothing_goes(run, monkeypatch):
    before = (run / "ledger.jsonl").read_bytes()
    with monkeypatch.context() as other_code:
        other_code.setattr("launch.run_folder.ledger._digest_of_code", lambda: "other")
        take(run, 4, behind=4)  # ends before its first step
    assert len(lines(run)) == 6
    take(run, 4, behind=4)
    assert (run / "ledger.jsonl").read_bytes() == before


def test_steps_without_a_ledger_are_told(run, tmp_path):
    take(tmp_path / "without", 2, telemetry__ledger=False)
    assert not (tmp_path / "without" / "ledger.jsonl").exists()
    assert check_ledger(tmp_path / "without") is None
    take(run, 5, behind=4, telemetry__ledger=False)
    take(run, 6, behind=5)
    assert re.search("line 6: .* step 4;", check_ledger(run) or "")


SETTINGS = {
    "global_max_length": 512,
    "training__max_steps": 3,
    "training__effective_batch_size": 4,
    "training__packing_window": 4,
    "stage2_ab__channel_b__rollouts_per_step": 4,
    "stage2_ab__schedule__warmup_steps": 1,
    "learner__cpu_threads": 1,
    "telemetry__ray_metrics": False,
    "data__val": None,
}


@pytest.mark.slow
def test_equal_runs_have_equal_bytes_and_another_token_changes_the_rollouts_hash_and_none_before(
    demo_checkpoint, demo_data, tmp_path, monkeypatch
):
    def run(name: str, **changes) -> list[dict]:
        settings = {**SETTINGS, **changes}
        config = configuration(demo_checkpoint, demo_data, tmp_path / name, **settings)
        resumable_run.start(config, round_size=2 if changes else 4)
        assert check_ledger(tmp_path / name) is None
        return lines(tmp_path / name)

    whole = run("whole")
    run("other rounds", rollout_matching__decode_batch_size=2)
    files = [tmp_path / name / "ledger.jsonl" for name in ("whole", "other rounds")]
    assert files[0].read_bytes() == files[1].read_bytes()
    digests = [{"targets", "weights"}, {*DIGESTS}, {*DIGESTS}]  # nothing is asked on channel A
    assert [line.keys() & {*DIGESTS} for line in whole[1:]] == digests
    answer = resumable_run.answer

    def with_another_token(request, *arguments):
        rollout = answer(request, *arguments)
        if (request.step, request.position) != (2, 1):
            return rollout
        last = 5 if rollout.response_token_ids[-1] != 5 else 6
        return replace(rollout, response_token_ids=(*rollout.response_token_ids[:-1], last))

    monkeypatch.setattr(resumable_run, "answer", with_another_token)
    other = run("another token")
    assert other[:3] == whole[:3]
    differing = [name for name in whole[3] if whole[3][name] != other[3][name]]
    assert differing[0] == "rollouts"
