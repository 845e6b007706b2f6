"""The page of runs: what it reads from their files, and what a person can do with it in a browser
(issue 42, "Pages").
"""

from __future__ import annotations

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from statistics import fmean

import pytest
from browser import CHROMIUM, browser
from config_support import GROUP, configuration, trajectory_config

from launch.inspect.view import main, runs_of, server_of
from launch.reports.run_page import changed_keys, curves, faults, page, step_rows, write_page
from launch.run_folder.timeline import TraceWriter
from learner.rollout_logs.trajectories import trajectory_record
from learner.rollout_logs.writer import StepLog
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.run_files import Span
from shared.trajectory import EnvironmentRollout, TrainingExample, group_advantages

HOSTILE = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
STEPS = 4
GROUPS = 3


def rollout(step: int, position: int) -> EnvironmentRollout:
    """Rewards of a step's first group differ by 0.1, of the second by 0.2, of the third not."""
    group, member = divmod(position, GROUP)
    rewards = [0.1 * (group + 1) * n if group < 2 else 0.5 for n in range(GROUP)]
    example = TrainingExample(
        [5, 6],
        [-0.5, -0.5],
        [1, 1],
        rewards[member],
        advantage=group_advantages(rewards)[member],
        example_id="x",
        group_rewards=tuple(rewards),
    )
    failed = step == 2 and position == 5
    return EnvironmentRollout(
        position=position,
        example=10 * step + group,
        reward=0.0 if failed else rewards[member],
        metrics={"exact": rewards[member]},
        error=HOSTILE if failed else None,
        is_truncated=position == 1,
        num_turns=1,
        num_tokens=7 + position,
        num_length_limited=0,
        num_splits=0,
        examples=() if failed else (example,),
        prompt=[{"role": "user", "content": f"question {group}"}],
        completion=[{"role": "assistant", "content": f"answer {position} {HOSTILE}"}],
        actor="environment-0",
        started_s=0.0,
        generate_s=1.0,
    )


def metrics_line(step: int) -> dict[str, object]:
    return {
        "step": step,
        "channel": "B",
        "loss/total": 2.0 / step,
        "rollout/reward": 0.1 * step,
        "rollout/num_failed": int(step == 2),
        "time/step_s": 60.0,
        "time/bounded_by": "generation" if step < 4 else "sync",
    }


def lines_of(*lines: object) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run(folder: Path, config: RunConfig, num_steps: int = STEPS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config.model_dump_json())
    (folder / "metrics.jsonl").write_text(lines_of(*map(metrics_line, range(1, num_steps + 1))))
    reports = [
        {"step": step, "headline": "mean reward", "score": score, "val/reward": score}
        for step, score in ((0, 0.1), (4, 0.4))
    ]
    (folder / "evaluations.jsonl").write_text(lines_of(*reports))
    finding = {"rule": "no signal", "step": 3, "value": 1.0, "text": f"why {HOSTILE}"}
    verdict = {"rule": "time", "step": 4, "value": 4, "text": "4 steps of 60 s: bounded by sync"}
    (folder / "doctor.jsonl").write_text(lines_of(finding, verdict))
    log = StepLog(folder / "rollouts")
    for step in range(1, num_steps + 1):
        log.begin(step)
        for position in range(GROUPS * GROUP):
            log.write(trajectory_record(step, rollout(step, position)))
    log.close()
    return folder


def run_of(folder: Path, **changes: object) -> Path:
    changes = {"telemetry__name": f"reward {HOSTILE}"} | changes
    return write_run(folder, trajectory_config(folder.parent / "model", folder, **changes))


def data_of(html: str) -> dict[str, object]:
    """What the page's script reads."""
    (found,) = re.findall('<script type="application/json" id="data">(.*?)</script>', html)
    return json.loads(found)


def test_the_page_has_the_figures_of_the_files(tmp_path):
    run = run_of(tmp_path / "run")
    data = data_of(page(runs_of([run]), tmp_path))
    (shown,) = data["runs"]
    assert shown["curves"]["rollout/reward"] == {"x": [1, 2, 3, 4], "y": [0.1, 0.2, 0.3, 0.4]}
    assert shown["heldOut"]["val/reward"] == {"x": [0, 4], "y": [0.1, 0.4]}
    assert [(one["rule"], one["step"]) for one in shown["findings"]] == [("no signal", 3)]
    assert shown["verdict"] == "4 steps of 60 s: bounded by sync"
    assert shown["bounds"] == [["generation", 3], ["sync", 1]]
    assert (shown["seconds"], shown["lastStep"], shown["link"]) == (240.0, 4, "run")
    assert data["meanings"]["rollout/reward"] == "Reward of the rollouts that did not fail."
    assert list(data["rollouts"][0]) == ["1", "2", "3", "4"]


def test_a_step_has_a_row_for_each_rollout_with_its_group_and_advantage(tmp_path):
    config = trajectory_config(tmp_path, tmp_path / "run")
    rows = step_rows(write_run(tmp_path / "run", config), 2, config)
    assert [row["group"] for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    assert rows[3] | {"answer": "", "prompt": ""} == {
        "group": 0,
        "position": 3,
        "name": "row 20",
        "reward": pytest.approx(0.3),
        "advantage": pytest.approx(0.15),
        "tokens": 10,
        "end": "ended",
        "parts": "exact 0.3",
        "turns": 1,
        "prompt": "",
        "answer": "",
    }
    assert rows[1]["end"] == "cut"
    failed = rows[5]
    assert (failed["end"], failed["error"]) == ("failed", HOSTILE)
    assert "reward" not in failed and "advantage" not in failed


def sample_line(position: int, channel: str = "B") -> dict[str, object]:
    """Of three objects as many are matched as the position says; what is left was dropped."""
    box = {"kind": "bbox_2d", "bins": [0, 0, 9, 9], "desc": "cat"}
    found = {**box, "key": "object_1", "span": [0, 4], "coord_positions": [0, 1, 2, 3]}
    reading = {
        "prefix_text": "{",
        "num_kept_bytes": 1,
        "num_kept": 1,
        "num_prefix": 1,
        "truncated": False,
        "fallback": False,
        "max_object_index": None,
        "objects": [found] * position,
        "dropped": [{"key": "x", "reason": "bad_bins"}] * (3 - position),
        "pairs": [
            {"prediction": n, "ground_truth": n, "iou": 1.0, "supervised": True}
            for n in range(position)
        ],
        "excluded": [],
        "unmatched_predictions": [],
        "gating_rejections": 0,
        "appended": [],
        "appended_text": "",
    }
    answer = {
        "weight_version": 1,
        "actor": "a",
        "seed": 1,
        "attempt": 0,
        "finish_reason": "stop",
        "num_prompt_tokens": 3,
        "response_token_ids": [1] * (5 - position),
        "forced_positions": [],
        "text": "{}",
    }
    is_b = channel == "B"
    return {
        "step": 1,
        "position": position,
        "channel": channel,
        "sample_id": f"pets/{position}",
        "ground_truth": [box] * 3,
        "rollout": answer if is_b else None,
        "reading": reading if is_b else None,
        "target": {"token_ids": [1], "supervision": [], "coord_positions": [], "coord_targets": []},
    }


def detection_run(folder: Path) -> tuple[Path, RunConfig]:
    """Step 1 is supervised, step 2 has rollouts; the samples come from two files."""
    sources = [{"path": str(folder / f"{name}.jsonl"), "weight": 1} for name in ("pets", "farm")]
    config = configuration(folder, folder, folder, data__train=sources, data__val=None)
    log = StepLog(write_run(folder, config) / "rollouts")
    for step, channel in ((1, "A"), (2, "B")):
        log.begin(step)
        for position in range(3):
            log.write(sample_line(position, channel))
    log.close()
    return folder, config


def test_a_sample_has_its_match_rate_what_was_dropped_and_its_file(tmp_path):
    run, config = detection_run(tmp_path / "run")
    rows = step_rows(run, 2, config)
    assert [row["match"] for row in rows] == [0, pytest.approx(1 / 3), pytest.approx(2 / 3)]
    dropped = [row["dropped"].split(", ") for row in rows]
    assert dropped == [["bad_bins"] * 3, ["bad_bins"] * 2, ["bad_bins"]]
    assert [row["source"] for row in rows] == ["pets"] * 3
    assert [row["group"] for row in rows] == [0, 1, 2]
    supervised = step_rows(run, 1, config)
    assert [set(row) for row in supervised] == [
        {"group", "position", "name", "source", "truth"}
    ] * 3


def test_a_long_run_is_drawn_by_means_and_extremes():
    lines = [
        {"step": step, "channel": "AB"[step % 2], "loss/total": step % 7, "optim/grad_norm": step}
        for step in range(1, 1101)
    ]
    lines[10]["loss/total"] = float("nan")
    found = curves(lines, 10)
    assert sorted(found) == [
        *(f"loss/total, channel {channel}" for channel in "AB"),
        *(f"optim/grad_norm, channel {channel}" for channel in "AB"),
    ]
    odd = found["loss/total, channel B"]
    values = [step % 7 for step in (13, 15, 17, 19)]  # 11 was no number
    assert (odd["x"][1], odd["low"][1], odd["high"][1]) == (20, min(values), max(values))
    assert odd["y"][1] == fmean(values)
    assert [len(odd[key]) for key in ("x", "y", "low", "high")] == [110] * 4
    # With a single channel the name is the metric's.
    assert curves([metrics_line(1)], 1)["loss/total"] == {"x": [1], "y": [2.0]}


def test_a_run_that_is_alive_and_one_that_has_just_begun_have_a_page(tmp_path):
    run = run_of(tmp_path / "run")
    for name in ("metrics.jsonl", "rollouts/step_000004.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 5, "posi')
    data = data_of(page(runs_of([run]), tmp_path))
    assert data["runs"][0]["lastStep"] == 4
    assert len(data["rollouts"][0]["4"]) == GROUPS * GROUP
    young = tmp_path / "young"
    young.mkdir()
    (young / "config.json").write_text((run / "config.json").read_text())
    (shown,) = data_of(page(runs_of([young]), tmp_path))["runs"]
    assert (shown["curves"], shown["logged"], shown["verdict"]) == ({}, [], None)


def test_runs_that_differ_in_their_seed_are_one_setting(tmp_path):
    runs = [
        run_of(tmp_path / f"trial_{number}", training__seed=seed, training__learning_rate=rate)
        for number, (seed, rate) in enumerate(((1, 1e-3), (2, 1e-3), (1, 2e-3)))
    ]
    assert changed_keys(runs) == [
        ("training.seed", ["1", "2", "1"]),
        ("training.learning_rate", ["0.001", "0.001", "0.002"]),
    ]
    shown = data_of(page(runs_of(runs), tmp_path))["runs"]
    assert [one["setting"] for one in shown] == [0, 0, 2]
    assert [one["name"] for one in shown] == ["trial_0", "trial_1", "trial_2"]


def test_faults_and_repairs_are_listed(tmp_path):
    run = run_of(tmp_path / "run")
    lines = [metrics_line(1), metrics_line(2) | {"rollout/num_replaced": 1}]
    trace = TraceWriter(run / "timeline.json")
    trace.write([Span("rollout-actor-1", "replace", 10.0, 12.5, {"reason": "was killed"})])
    trace.write([Span("learner", "learn round", 12.5, 13.0)])
    with (run / "timeline.json").open("a") as file:
        file.write(',\n{"ph": "X", "name": "replace", "ti')  # the run is alive, or was killed
    (run / "ledger.jsonl").write_text(lines_of(*({"step": n, "versions": {}} for n in (0, 2))))
    (run / "error_1.txt").write_text("Traceback\n  line\nLostLearnerError: gone\n\n")
    found = faults(run, lines)
    assert found[0].startswith("rollout/num_replaced 1 (step 2): Actors and servers")
    assert found[1].startswith("rollout/num_failed 1 (step 2): ")
    assert found[2:] == [
        "rollout-actor-1 was replaced in 2.5 s: was killed",
        "resumed after step 2 with another configuration, code or packages",
        "error_1.txt: LostLearnerError: gone",
    ]


def test_a_sweep_stands_for_its_trials_in_order(tmp_path):
    for number in (10, 2):
        run_of(tmp_path / f"trial_{number}")
    single = run_of(tmp_path / "single")
    trials = [tmp_path / "trial_2", tmp_path / "trial_10"]
    assert list(runs_of([tmp_path, single])) == [*trials, single]


def test_the_command_writes_a_file_or_says_what_is_wrong(tmp_path, capsys):
    run = run_of(tmp_path / "run")
    main([str(run), "step=2"])
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    assert list(data_of((run / "report.html").read_text())["rollouts"][0]) == ["2"]
    main([str(run), str(run)])
    assert (run / "compared.html").exists()
    for words, problem in (
        ([str(tmp_path / "none")], "holds no run"),
        ([str(run), "step=9"], "has no step 9 in rollouts/; it has 1 to 4"),
        ([], "needs a run folder"),
        ([str(run), "step=0"], "step: "),
        ([str(run), "port=none"], "port: "),
        ([str(run), "port=65536"], "port: "),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
        assert problem in " ".join(capsys.readouterr().err.split())


def test_the_server_answers_this_machine_alone(tmp_path):
    run = run_of(tmp_path / "run")
    with server_of(runs_of([run]), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"

        def ask(path: str, **headers: str) -> str:
            request = urllib.request.Request(url + path, headers=headers)
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.read().decode()

        assert data_of(ask("/"))["served"] and not data_of(ask("/"))["rollouts"][0]
        assert len(json.loads(ask("/rows?run=0&step=3"))) == GROUPS * GROUP
        report = run / "evaluations" / "step_000004" / "report.html"
        report.parent.mkdir(parents=True)
        report.write_text("worst scenes")
        (shown,) = data_of(ask("/"))["runs"]
        assert ask(f"/{shown['link']}/{shown['reports'][1]['page']}") == "worst scenes"
        for path, headers, status, problem in (
            ("/rows?run=0&step=3", {"Host": "evil.example"}, 403, "127.0.0.1"),
            ("/rows?run=0&step=9", {}, 404, "step_000009.jsonl"),
            ("/sample?run=0&step=9&position=1", {}, 404, "has no step 9"),
            ("/../config.json", {}, 404, "config.json"),
            ("/0/evaluations/../config.json", {}, 404, "is not a page"),
            ("/rows?run=7&step=1", {}, 404, "run: is 7"),
            ("/rows?run=0&step=one", {}, 404, "step: "),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(path, **headers)
            assert refused.value.code == status
            assert problem in refused.value.read().decode()
        with pytest.raises(ConfigError, match=f"port: {server.server_port} cannot be used"):
            server_of(runs_of([run]), server.server_port)
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    if not CHROMIUM:
        pytest.skip("no browser: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("chromium")) as one:
        yield one
        assert one.errors == []


def test_a_click_leads_from_a_curve_to_a_step_a_group_and_a_sample(tmp_path, tab):
    run = run_of(tmp_path / "run")
    sample = run / "samples" / "step_000004_position_005.html"
    sample.parent.mkdir()
    sample.write_text("<title>sample 5</title>")
    write_page(runs_of([run]), run / "report.html")
    tab.open((run / "report.html").as_uri())
    assert "0.4" in " ".join(tab.texts("section:first-child td"))
    assert tab.texts("#view section h2")[:3] == ["Run", "Findings", "Curves"]
    assert tab.run("document.querySelectorAll('.charts circle').length") >= 2, "held-out points"
    tab.click(".charts svg")
    tab.wait_for("/step=[23]$/.test(location.hash)")  # the middle of a curve of four steps
    tab.run("location.hash = '#run=0&step=4'")
    tab.wait_for("document.querySelectorAll('.groups tbody tr').length === 3")

    positions = (
        "[...document.querySelectorAll('.groups tbody tr')].map((e) => +e.cells[0].textContent)"
    )
    assert tab.run(positions) == [0, 4, 8]
    tab.run("location.hash = '#run=0&step=4&sort=spread&order=down'")
    tab.wait_for(f"{positions}.join() === '4,0,8'")
    tab.type("input[name=from]", "0.1")
    tab.wait_for(f"{positions}.join() === '4,0'")
    assert "from=0.1" in tab.run("location.hash")
    tab.type("input[name=text]", "answer 5")
    tab.wait_for(f"{positions}.join() === '4'")

    tab.click(".groups tbody tr a")
    tab.wait_for("document.querySelectorAll('.siblings article').length === 4")
    assert [text.split("advantage ")[1][:4] for text in tab.texts(".siblings article ul")] == [
        *("-0.3", "-0.1", "0.1l", "0.3l")
    ]
    assert f"answer 5 {HOSTILE}" in tab.texts(".siblings .text")[1]
    assert tab.run("window.broken") is None, "a text of the run was run as a script"
    tab.click(".siblings article:nth-child(2) a")
    tab.wait_for("document.title === 'sample 5'")


def test_two_settings_are_laid_over_one_another_with_seeds_as_a_band(tmp_path, tab):
    changes = ({"training__seed": 1}, {"training__seed": 2}, {"training__learning_rate": 0.5})
    runs = [run_of(tmp_path / f"run_{n}", **changed) for n, changed in enumerate(changes)]
    write_page(runs_of(runs), tmp_path / "page.html")
    tab.open((tmp_path / "page.html").as_uri())
    assert tab.texts(".key > span") == ["learning_rate 0.001 (2 seeds)", "learning_rate 0.5"]
    assert (
        tab.run("document.querySelector('.charts svg').querySelectorAll('path.band').length") == 1
    )
    assert "training.learning_rate" in tab.texts("section td")


def test_a_served_page_opens_every_step_and_names_what_it_lacks(tmp_path, tab):
    run = run_of(tmp_path / "run")
    with server_of(runs_of([run]), 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tab.open(f"http://127.0.0.1:{server.server_port}/#run=0&step=2&end=failed")
        tab.wait_for("document.querySelectorAll('.groups tbody tr').length === 1")
        assert tab.texts(".groups tbody a") == ["row 21"]
        tab.run("location.hash = '#run=0&step=7'")
        tab.wait_for("document.body.textContent.includes('step_000007.jsonl')")
        server.shutdown()
    write_page(runs_of([run]), run / "report.html", 2)
    tab.open((run / "report.html").as_uri() + "#step=3")
    tab.wait_for("document.querySelectorAll('code').length === 2")
    assert tab.texts("code")[0] == f"rollmatch view {run} step=3"
    # An address that another page had leads to what there is.
    for fragment, heading in (
        ("#run=7&step=2", "Run"),
        ("#step=x", "Run"),
        ("#step=2&group=99", "3 of 3 groups"),
    ):
        tab.open((run / "report.html").as_uri() + fragment)
        assert tab.texts("section h2")[0] == heading
