"""The run's folder: what is in it after each step, and what happens when it cannot be written
(issue 2).
"""

import io
import json
import re
import resource
import tempfile
from contextlib import contextmanager
from dataclasses import replace

import pytest
from config_support import configuration, trajectory_config
from rich.console import Console
from scene_support import guess, png, scene, truth

from launch.processes.batch_algebra import batch_algebra
from launch.processes.replacements import Replacement
from launch.run_folder.held_out import read_evaluations
from launch.run_folder.telemetry import Telemetry
from shared.config.pipeline import Channel
from shared.errors import ConfigError, StorageError
from shared.grounding.evaluation import Evaluation
from shared.metrics import StepReport
from shared.rollouts import SyncReport
from shared.run_files import Span
from shared.schedule import RunSchedule
from shared.seeds import request_seed
from shared.trajectory import EnvironmentRollout
from shared.weight_sync.canary import Differences

METRICS = {
    "loss/total": 1.5,
    "packing/num_rows": 3.0,
    "packing/num_carried": 0.0,
    "time/learn_s": 0.5,
    "time/generate_s": 0.4,
    "rollout/match_rate": 0.25,
    "rollout/num_dropped_objects": 2.0,
    "rollout/num_fallback": 3.0,
    "rollout/num_tokens": 90.0,
    "rollout/length": 7.5,
    "rollout/length_max": 9.0,
    "rollout/length_limited_rate": 0.0,
    "rollout/logprob_max_abs": 3e-6,
}
TRAJECTORIES = {
    **METRICS,
    "rollout/num": 12.0,
    "rollout/reward": 0.5,
    "rollout/reward_std": 0.25,
    "rollout/num_groups": 3.0,
    "rollout/num_groups_without_signal": 1.0,
    "rollout/num_failed": 0.0,
    "rollout/truncated_rate": 0.0,
    "rollout/num_splits": 0.0,
}
FIRST_SYNC = SyncReport(1, 11_000_000, {"wire": 0.01}, 2e-6)


@pytest.fixture
def configured(tmp_path):
    """Configurations without Ray's metrics, which have a test of their own."""
    folders = (tmp_path / "model", tmp_path / "data", tmp_path / "run")
    return lambda **changes: configuration(*folders, telemetry__ray_metrics=False, **changes)


@pytest.fixture
def config(configured):
    return configured()


@pytest.fixture
def output():
    return io.StringIO()


def open_telemetry(config, output=None):
    return Telemetry(config, Console(file=output or io.StringIO(), width=300))


def placed(config, devices=(1, 1), output=None):
    """Telemetry of a run whose engines `a` and `b` are up."""
    telemetry = open_telemetry(config, output)
    telemetry.placed(batch_algebra(config, devices), ("a", "b"), learner_threads=2)
    return telemetry


def take_step(telemetry, config, number=25):
    plan = RunSchedule(config).plan(number)
    spans = (Span("learner", "learn round", 1.0, 2.0), Span("actor", "generate", 1.5, 2.5))
    phases = {"wire": 0.01, "canary": 0.02, "send_wire": 0.01}
    with telemetry.step(plan) as record:
        record.report = StepReport(number, plan.channel, 7, METRICS, spans)
        record.sync = SyncReport(8, 11_000_000, phases, 2e-6)


def lines(config, name):
    return [json.loads(line) for line in (config.telemetry.run_dir / name).read_text().splitlines()]


def has(line, **expected):
    """The entries of a line, and those that are expected."""
    return {name: line[name] for name in expected} == expected


def test_every_step_has_its_plan_before_it_and_its_metrics_after_it(config):
    with placed(config) as telemetry:
        take_step(telemetry, config)
        (plan,) = lines(config, "plan.jsonl")
        (metrics,) = lines(config, "metrics.jsonl")
    assert has(plan, step=26, channel=Channel.B, engines=["a", "b"], sync_mode="full")
    assert plan["rounds"] == [[[0, 11]], [[11, 22]], [[22, 32]]]
    assert plan["rollout_seed_base"] == request_seed(17, 25, 0)
    expected = {
        "loss/total": 1.5,
        "sync/version": 8,
        "sync/mode": "full",
        "time/sync_s": pytest.approx(0.03),
        "sync/wire_gb_per_s": pytest.approx(1.1),
        "rollout/decode_mode": "greedy",
        "time/queue_wait_s": 0.0,
    }
    assert has(metrics, **expected)
    assert not any("iou" in name.lower() for name in metrics)
    placement = json.loads((config.telemetry.run_dir / "placement.json").read_text())
    assert has(placement, engines=["a", "b"], devices=[1, 1], servers=[], learner_threads=2)
    assert (config.telemetry.run_dir / "batch_algebra.txt").read_text().startswith("updates ")


def test_the_wait_for_a_checkpoint_is_in_the_metrics_of_the_next_step_and_its_writing_on_the_timeline(
    config, output
):
    folder = config.telemetry.run_dir / "checkpoints" / "step_000026"
    with placed(config, output=output) as telemetry:
        take_step(telemetry, config, number=25)
        telemetry.waited_for_save(folder, 1.5)
        telemetry.waited_for_save(folder, 0.25)
        telemetry.saved(folder, [Span("learner, checkpoints", "write step_000026", 2.0, 5.0)])
        take_step(telemetry, config, number=26)
        take_step(telemetry, config, number=27)
    before, after, later = lines(config, "metrics.jsonl")
    assert has(after, **{"time/save_s": 1.75})
    assert "time/save_s" not in before.keys() | later.keys()
    events = json.loads((config.telemetry.run_dir / "timeline.json").read_text())
    durations = {event["name"]: event["dur"] for event in events if event["ph"] == "X"}
    assert durations["write step_000026"] == 3_000_000
    assert "save step_000026" in durations
    assert f"saved     {folder}" in output.getvalue()


def test_a_step_in_which_an_actor_was_replaced_has_it_in_metrics_and_timeline(config):
    with placed(config) as telemetry:
        take_step(telemetry, config, 25)
        plan = RunSchedule(config).plan(26)
        with telemetry.step(plan) as record:
            span = Span("learner", "learn round", 1.0, 2.0)
            record.report = StepReport(26, plan.channel, 7, METRICS, (span,))
            record.replaced = [
                Replacement("a", "generate on a: its process has ended", 100.0, 131.5),
                Replacement("b", "start on b: no room", 110.0, 120.0),
            ]
        before, after = lines(config, "metrics.jsonl")
    assert "rollout/num_replaced" not in before
    assert has(after, **{"rollout/num_replaced": 2, "time/replace_s": 31.5})
    events = json.loads((config.telemetry.run_dir / "timeline.json").read_text())
    spans = [event for event in events if event["name"] == "replace"]
    assert [(event["dur"], event["args"]) for event in spans] == [
        (31.5e6, {"reason": "generate on a: its process has ended"}),
        (10e6, {"reason": "start on b: no room"}),
    ]


def test_a_step_has_one_number_in_every_file_and_on_the_console(config, output):
    """Step 26 is the update behind which the report of 26 steps comes."""
    with placed(config, output=output) as telemetry:
        take_step(telemetry, config, 25)
        telemetry.evaluation(evaluation(26, num_right=3))
        for name in ("plan.jsonl", "metrics.jsonl", "evaluations.jsonl"):
            assert [line["step"] for line in lines(config, name)] == [26]
    assert "step   26/" in output.getvalue() and "held out  after 26 steps" in output.getvalue()
    assert '"name": "step 26 (B)"' in (config.telemetry.run_dir / "timeline.json").read_text()
    assert (config.telemetry.run_dir / "evaluations" / "step_000026").is_dir()


SERVERS = [
    {"base_url": "http://127.0.0.1:8000", "group_port": 51216},
    {"base_url": "http://127.0.0.1:8001", "group_port": 0},
]
PORTS = (51216, 40123)


def test_server_mode_logs_reproducibility_metadata(configured, output):
    """Server endpoints, sync mode and rollout seed of every step, and a fallback when it
    happens."""
    vllm = {
        "mode": "server",
        "server": {"servers": SERVERS},
        "enable_lora": True,
        "sync": {"mode": "adapter"},
    }
    config = configured(rollout_matching__vllm=vllm, model__adapter={"kind": "lora"})
    fallback = "wire on b: [KeyError]"
    with placed(config, output=output) as telemetry:
        take_step(telemetry, config, 25)
        telemetry.sync(SyncReport(9, 1, {"wire": 0.01}, 0.0, fell_back=fallback, ports=PORTS))
        take_step(telemetry, config, 26)
        first, second = lines(config, "plan.jsonl")
    warning = f"the adapter sync failed, full weights are sent from now on: {fallback}"
    assert warning in output.getvalue()
    for entry, server in zip(first["servers"], SERVERS, strict=True):
        assert has(entry, **server)
    # Port 0 was any free one.
    assert [server["group_port"] for server in second["servers"]] == list(PORTS)
    assert has(first, sync_mode="adapter", sync_fallback=None)
    assert has(second, sync_mode="full", sync_fallback=fallback)
    # Every call has the seed of its first request, and the step's calls are known before it.
    parts = [[("a", 0, 6), ("b", 6, 5)], [("a", 11, 6), ("b", 17, 5)], [("a", 22, 5), ("b", 27, 5)]]
    for step, plan in ((25, first), (26, second)):
        assert plan["rollout_seed_base"] == request_seed(17, step, 0)
        assert [[tuple(call.values()) for call in round_] for round_ in plan["calls"]] == [
            [(*part, request_seed(17, step, part[1])) for part in round_] for round_ in parts
        ]


def test_the_noise_that_the_first_sync_measures_is_kept_in_the_runs_folder(config):
    noise = Differences(mean=0.0041, largest=0.11)
    with placed(config) as telemetry:
        telemetry.sync(SyncReport(1, 1, {"wire": 0.01}, 0.0, canary_noise=noise))
        assert Differences.load(config.telemetry.run_dir) == noise
        telemetry.sync(SyncReport(2, 1, {"wire": 0.01}, 0.0))
    assert Differences.load(config.telemetry.run_dir) == noise


def test_of_several_learner_ranks_the_plan_says_which_positions_each_learns_in_each_round(
    configured,
):
    config = configured(learner__world_size=2)
    with placed(config, devices=(1, 1, 1)) as telemetry:
        take_step(telemetry, config)
    (plan,) = lines(config, "plan.jsonl")
    assert plan["rounds"] == [[[0, 8], [16, 24]], [[8, 16], [24, 32]]]


def test_the_timeline_is_a_trace_that_perfetto_opens(config):
    timeline = config.telemetry.run_dir / "timeline.json"
    with placed(config) as telemetry:
        take_step(telemetry, config)
        telemetry.evaluation(Evaluation(26, 8, (), wall_s=1.0))
        # The array form needs no closing bracket: the file of a run that was killed opens as well.
        assert json.loads(timeline.read_text() + "]")
    events = json.loads(timeline.read_text())
    complete = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in complete}
    assert names == {"step 26 (B)", "learn round", "generate", "sync v8", "held-out report"}
    assert all(event["dur"] >= 0 and {"pid", "tid", "ts"} <= event.keys() for event in complete)
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"driver", "learner", "actor"}


def evaluation(step, num_right):
    right = guess(0, 0, 99, 99)
    wrong = guess(0, 0, 9, 9)
    scenes = [
        scene(i, [truth(0, 0, 99, 99)], [right if i < num_right else wrong], image=png())
        for i in range(4)
    ]
    return Evaluation(step, step + 1, tuple(scenes), wall_s=1.0)


def test_a_held_out_report_is_a_line_a_row_and_a_folder(config, output):
    with open_telemetry(config, output) as telemetry:
        telemetry.evaluation(evaluation(20, num_right=3))
    (row,) = lines(config, "evaluations.jsonl")
    printed = (
        "held out  after 20 steps, 4 samples: F1@0.5 0.750, precision 0.750, recall 0.750,"
        " valid objects 1.000, "
    )
    assert printed in output.getvalue()
    assert has(row, step=20, weight_version=21, num_samples=4, headline="F1@0.5", score=0.75)
    assert has(row, **{"val/f1": 0.75, "val/f1@0.75": 0.75, "val/class_accuracy": 1.0})
    assert 0 < row["val/coco_ap"] < 1
    folder = config.telemetry.run_dir / "evaluations" / "step_000020"
    assert json.loads((folder / "report.json").read_text())["subject"] == "run after 20 steps"
    assert [path.name for path in (folder / "pictures").iterdir()] == ["00003.png"]
    assert lines(config, "metrics.jsonl") == []


def test_the_closing_line_compares_the_last_report_with_that_of_the_warm_ups_end(config):
    with open_telemetry(config) as telemetry:
        for step, num_right, line in (
            (10, 0, None),
            (20, 1, "val F1@0.5 warm-up 0.25 -> final 0.25, with names 0.25 -> 0.25"),
            (30, 4, "val F1@0.5 warm-up 0.25 -> final 1.00, with names 0.25 -> 1.00"),
            (100, 3, "val F1@0.5 warm-up 0.25 -> final 0.75, with names 0.25 -> 0.75"),
        ):
            telemetry.evaluation(evaluation(step, num_right))
            assert telemetry.improvement() == line


def test_the_closing_line_has_the_lenient_figure_if_it_differs(config):
    coords = ", ".join(f"<|coord_{bin}|>" for bin in (0, 0, 99, 99))
    text = f'Sure: {{"bbox": [{coords}], "label": "cat"}}'
    with open_telemetry(config) as telemetry:
        for step in (20, 100):
            of_step = evaluation(step, 0)
            scenes = tuple(
                replace(one, objects=(), text=text, truncated=True) for one in of_step.outcomes
            )
            telemetry.evaluation(replace(of_step, outcomes=scenes))
        assert telemetry.improvement().endswith(", read leniently 1.00 -> 1.00")
    first, _ = read_evaluations(config.telemetry.run_dir)
    assert (first.score, first.lenient_f1) == (0.0, 1.0)


# Of an environment


@pytest.fixture
def of_environment(tmp_path):
    telemetry = {"run_dir": str(tmp_path / "run"), "ray_metrics": False}
    return trajectory_config(tmp_path / "model", tmp_path / "run", telemetry=telemetry)


def rewards(step, *values):
    prompt = [{"role": "user", "content": "?"}]
    rest = (None, False, 2, 4, 0, 0, (), prompt, [], "environment-0", 1.0, 0.5)
    rollouts = tuple(
        EnvironmentRollout(position, position, value, {"last": value}, *rest)
        for position, value in enumerate(values)
    )
    return Evaluation(step, step + 1, rollouts, wall_s=1.0)


def test_a_held_out_report_of_an_environment_is_its_mean_reward_in_a_line_a_row_and_a_folder(
    of_environment, output
):
    with open_telemetry(of_environment, output) as telemetry:
        assert telemetry.evaluation(rewards(20, 0.5, 0.75, 1.0)) == 0.75
    (row,) = lines(of_environment, "evaluations.jsonl")
    printed = "held out  after 20 steps, 3 samples: mean reward 0.750 (last 0.750)"
    assert printed in output.getvalue()
    assert has(row, step=20, weight_version=21, num_samples=3, headline="mean reward", score=0.75)
    assert has(row, **{"val/reward": 0.75, "val/reward/last": 0.75})
    folder = of_environment.telemetry.run_dir / "evaluations" / "step_000020"
    assert json.loads((folder / "report.json").read_text())["val/reward"] == 0.75
    assert len((folder / "rollouts.jsonl").read_text().splitlines()) == 3


def test_the_closing_line_of_an_environment_compares_the_first_mean_reward_with_the_last(
    of_environment,
):
    with open_telemetry(of_environment) as telemetry:
        telemetry.evaluation(rewards(0, 0.0, 0.1))
        assert telemetry.improvement() is None
        telemetry.evaluation(rewards(20, 0.5, 0.5))
        telemetry.evaluation(rewards(30, 0.8, 0.82))
        assert telemetry.improvement() == "val mean reward first 0.05 -> final 0.81"


@pytest.mark.parametrize(
    ("metrics", "is_warned"),
    [
        ({"rollout/num_tool_calls": 0.0}, True),
        ({"rollout/num_tool_calls": 1.0}, False),
        ({"reward/last": 0.25}, False),
    ],
)
def test_a_step_whose_rollouts_called_no_tool_is_warned_of(
    of_environment, output, metrics, is_warned
):
    with placed(of_environment, devices=(1,), output=output) as telemetry:
        plan = RunSchedule(of_environment).plan(1)
        with telemetry.step(plan) as record:
            spans = (Span("learner", "learn", 1.0, 2.0),)
            record.report = StepReport(1, plan.channel, 2, TRAJECTORIES | metrics, spans)
    (written,) = lines(of_environment, "plan.jsonl")
    assert written["rounds"] == [[[0, 4]], [[4, 8]], [[8, 12]]], "whole groups: six are one of four"
    (logged,) = lines(of_environment, "metrics.jsonl")
    assert has(logged, **metrics, **{"rollout/decode_mode": "sample"})
    assert "reward 0.500 ±0.25  no signal 1/3" in output.getvalue()
    warning = "warning   uncalled tools: rollouts with tools and no call 12"
    assert (warning in output.getvalue()) == is_warned


# How a run ends


@pytest.mark.parametrize(
    ("begin", "ending"),
    [(open_telemetry, RuntimeError("the engines did not start")), (placed, KeyboardInterrupt())],
    ids=["failed at its start", "interrupted before its first sync"],
)
def test_a_start_that_failed_leaves_its_folder_to_another_one(config, begin, ending):
    """With what it was started with and what ended it, until another one has begun."""
    folder = config.telemetry.run_dir
    with pytest.raises(type(ending)), begin(config):
        raise ending
    assert not (folder / "config.json").exists()
    failed = json.loads((folder / "config_of_failed_start.json").read_text())
    assert failed["training"]["seed"] == 17
    assert (folder / "error.txt").exists() == isinstance(ending, Exception)
    with placed(config) as telemetry:
        take_step(telemetry, config)
    assert len(lines(config, "plan.jsonl")) == len(lines(config, "metrics.jsonl")) == 1
    names = {path.name for path in folder.iterdir()}
    assert not {"error.txt", "config_of_failed_start.json"} & names


def test_a_run_that_fails_after_its_first_sync_keeps_its_folder(config):
    telemetry = placed(config)
    telemetry.sync(FIRST_SYNC)
    with pytest.raises(RuntimeError), telemetry:
        raise RuntimeError("gone")
    with pytest.raises(ConfigError, match=r"telemetry\.run_dir: .* holds a run already"):
        open_telemetry(config)


def test_a_full_disk_ends_the_run_with_the_path_and_what_to_do(config):
    config.telemetry.run_dir.mkdir(parents=True)
    (config.telemetry.run_dir / "metrics.jsonl").symlink_to("/dev/full")
    telemetry = placed(config)
    full = r"cannot write .*metrics\.jsonl: .*No space left on device; free space"
    with pytest.raises(StorageError, match=full):
        take_step(telemetry, config)


@pytest.mark.slow
def test_a_disk_that_refuses_is_waited_for_once_a_run_has_begun(config):
    """A start is told at once; a step waits."""
    limits = config.timeouts.model_copy(update={"storage_s": 120.0})
    config = config.model_copy(update={"timeouts": limits})
    config.telemetry.run_dir.mkdir(parents=True)
    metrics = config.telemetry.run_dir / "metrics.jsonl"
    metrics.symlink_to("/dev/full")

    class MadeRoom(io.StringIO):
        """A console: when it says that the run waits, the disk has room."""

        def write(self, text):
            if "retries for" in text:
                metrics.unlink()
                metrics.touch()
            return super().write(text)

    output = MadeRoom()
    with placed(config, output=output) as telemetry:
        assert telemetry.patience.limit_s == 0.0
        take_step(telemetry, config)
    assert len(lines(config, "metrics.jsonl")) == 1
    shown = output.getvalue()
    assert re.search(r"warning +cannot write .*metrics\.jsonl: .*retries for 120 s", shown)
    assert re.search(r"warning +.*metrics\.jsonl was written after [1-9]\d* s", shown)


def test_where_the_run_s_folder_takes_no_error_it_is_kept_elsewhere(
    config, output, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config.telemetry.run_dir.mkdir(parents=True)
    (config.telemetry.run_dir / "error.txt").symlink_to("/dev/full")
    with pytest.raises(ZeroDivisionError), open_telemetry(config, output):
        raise ZeroDivisionError("the first cause")
    (story,) = tmp_path.glob(f"rollmatch_{config.telemetry.run_dir.name}_error_*.txt")
    assert "ZeroDivisionError: the first cause" in story.read_text()
    assert f"the run ended; details in {story}" in output.getvalue()


@contextmanager
def full_disk_after(opened):
    """No file takes a byte more once `opened` exists."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield opened
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("ending", "unwritten"), [(ZeroDivisionError, "error"), (KeyboardInterrupt, "timeline")]
)
def test_a_full_disk_does_not_take_the_place_of_what_ended_the_run(
    config, output, ending, unwritten, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    opened = open_telemetry(config, output)
    with full_disk_after(opened) as telemetry, pytest.raises(ending), telemetry:
        raise ending
    shown = output.getvalue()
    assert re.search(rf"warning +cannot write .*{unwritten}\.\w+: .*File too large; free", shown)
    if ending is ZeroDivisionError:
        assert "raise ending" in shown and "the run ended; details above" in shown
    assert not list(tmp_path.glob("rollmatch_*_error_*")), "an empty file tells nobody anything"


def test_a_full_disk_is_the_error_of_a_run_that_ends_well(config):
    opened = open_telemetry(config)
    error = pytest.raises(StorageError, match=r"timeline\.json")
    with full_disk_after(opened) as telemetry, error, telemetry:
        pass


def test_a_page_that_cannot_be_written_is_a_warning_and_the_run_ends_well(config, output):
    config.telemetry.run_dir.mkdir(parents=True)
    (config.telemetry.run_dir / "report.html.partial").symlink_to("/dev/full")
    with placed(config, output=output) as telemetry:
        telemetry.patience.limit_s = 60.0
        take_step(telemetry, config)
    shown = " ".join(output.getvalue().split())
    assert re.search(
        r"warning cannot write .*report\.html: .*No space left on device; free space.*;"
        rf" then write the page with `rollmatch view {config.telemetry.run_dir}`",
        shown,
    )
    assert "retries" not in shown, "the end of a run does not wait for its page"


def test_what_ended_a_run_is_kept_with_its_traceback_whatever_a_file_is_called(config):
    with pytest.raises(RuntimeError), open_telemetry(config):
        raise RuntimeError("the real fault is in \udcff.png")
    story = (config.telemetry.run_dir / "error.txt").read_text()
    assert r"the real fault is in \udcff.png" in story and "Traceback" in story


def test_a_story_that_cannot_be_kept_leaves_the_timeline_whole(config, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    telemetry = open_telemetry(config)
    (config.telemetry.run_dir / "error.txt").mkdir()
    with pytest.raises(RuntimeError, match="x"), telemetry:
        raise RuntimeError("x")
    assert json.loads((config.telemetry.run_dir / "timeline.json").read_text())
