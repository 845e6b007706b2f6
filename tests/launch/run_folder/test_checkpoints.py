"""Checkpoints of a run on disk: how long they may take, what is logged, and that they load.

Which are there is shown by test_checkpoints_in_any_order.py.
"""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from config_support import configuration
from learner_support import finish_step, make_learner
from saving_learner import SavingLearner
from transformers import AutoModelForImageTextToText, AutoProcessor

from launch.run_folder.checkpoints import Checkpoints
from shared.errors import RolloutError, StorageError
from shared.run_files import RUN_FILE, Patience
from shared.schedule import RunSchedule

GONE = RolloutError("gone", actor="server-0", phase="generate")
INTERRUPT_S = 240.0


@pytest.fixture
def world(tmp_path, demo_checkpoint, demo_data):
    """A run's folder, its writer and telemetry, and `Checkpoints` of a configuration."""

    def make(clock_s=time.monotonic, **checkpoint):
        make.run_dir.mkdir(exist_ok=True)
        changes = {f"checkpoint__{key}": value for key, value in checkpoint.items()}
        changes["timeouts__interrupt_s"] = INTERRUPT_S
        config = configuration(demo_checkpoint, demo_data, make.run_dir, **changes)
        return Checkpoints(config, make.writer, make.telemetry, clock_s=clock_s)

    make.run_dir = tmp_path / "run"
    make.writer = SavingLearner()
    make.telemetry = Mock(sync_fallback=None, patience=Patience())
    return make


@pytest.fixture
def now_s(monkeypatch):
    """The seconds of the run's clock, which stands still where a test does not move it."""
    seconds = [0.0]
    clock = Mock(monotonic=lambda: seconds[0])
    monkeypatch.setattr("launch.run_folder.checkpoints.time", clock)
    return seconds


def end(checkpoints, error):
    """The run ends early with this error, which stays what it was."""
    with pytest.raises(type(error)) as caught, checkpoints.saved_at_an_early_end():
        raise error
    assert caught.value is error


def finish(checkpoints):
    """The run ends as it was to."""
    with checkpoints.saved_at_an_early_end():
        pass


def index(run_dir):
    return json.loads((run_dir / "checkpoints.json").read_text())


def entry(folder, step, reason, score=None):
    return {"folder": folder, "step": step, "score": score, "reasons": [reason]}


def folders(run_dir):
    found = (path.parent.relative_to(run_dir) for path in run_dir.glob("checkpoint*/**/run_state"))
    return sorted(map(str, found))


def warnings(world):
    return [call.args[0] for call in world.telemetry.warn.call_args_list]


def saved(world):
    return [call.args[0] for call in world.telemetry.saved.call_args_list]


def test_the_index_says_folder_step_score_and_why(world):
    checkpoints = world(save_steps=2, keep_last=1, keep_best=1)
    checkpoints.after_report(0, 0.25)
    for step in range(1, 5):
        checkpoints.after_step(step)
        if step == 2:
            checkpoints.after_report(2, 0.5)
    checkpoints.at_end(4)
    assert index(world.run_dir) == [
        entry("checkpoints/step_000002", 2, "best", 0.5),
        entry("checkpoints/step_000004", 4, "periodic"),
        entry("checkpoint", 4, "final"),
    ]
    assert folders(world.run_dir) == sorted(kept["folder"] for kept in index(world.run_dir))
    # The run waits only for the last.
    world.telemetry.note.assert_called_once_with(f"saving    {world.run_dir / 'checkpoint'}")


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_the_disk_refuses_is_logged_and_tried_again_as_a_whole(world, background):
    told = []
    world.telemetry.patience = Patience(60.0, told.append)
    checkpoints = world(save_steps=2, background=background)
    world.writer.refusals = 0 if background else 1
    checkpoints.after_step(2)
    world.writer.refusals = 1 if background else 0
    checkpoints.after_step(3)
    assert [kept["step"] for kept in index(world.run_dir)] == [2]
    refused, written = told
    assert re.search(r"checkpoints/step_000002: \[Errno 28\] .*; the run waits", refused)
    assert re.search(r"checkpoints/step_000002 was written after [1-9]\d* s", written)


def test_a_run_that_a_full_disk_ends_saves_elsewhere_what_it_can_and_does_not_wait_again(world):
    told = []
    world.telemetry.patience = Patience(60.0, told.append)
    world.writer.finished = 3
    world.writer.refusals = 99
    end(world(), StorageError("metrics.jsonl", "no space", can_pass=True))
    assert told == [], "no wait"
    (refused,) = warnings(world)
    assert "could not be saved: cannot write" in refused
    assert "checkpoint_interrupted_000003: [Errno 28]" in refused


def test_an_interrupted_run_saves_its_last_finished_update_within_a_stated_time(world, now_s):
    world.telemetry.patience = Patience(300.0)
    checkpoints = world(save_steps=5)
    checkpoints.after_step(6)
    world.writer.finished = 7  # the interruption came before the driver had heard of it
    end(checkpoints, KeyboardInterrupt())
    name, left_s = world.writer.saves[-1]
    assert (name, world.writer.stops) == ("checkpoint_interrupted_000007", [INTERRUPT_S])
    assert left_s == INTERRUPT_S, "one limit for the learner's present row and for the writing"
    assert world.telemetry.patience.limit_s == INTERRUPT_S / 2, "and for a disk that refuses"
    assert index(world.run_dir)[-1] == entry("checkpoint_interrupted_000007", 7, "interrupted")


def test_weights_that_cannot_be_saved_are_told_and_the_run_ends_with_what_ended_it(world):
    world.writer.finished = 3
    world.writer.refusals = 99
    end(world(), GONE)
    world.writer.lost = True
    end(world(), KeyboardInterrupt())
    refused, lost = warnings(world)
    assert "could not be saved: cannot write" in refused
    assert re.search("saved: stop on the learner: .*ended", lost)
    assert folders(world.run_dir) == []


def test_by_default_no_more_than_fifteen_minutes_of_learning_can_be_lost(world):
    minutes = [0.0]
    checkpoints = world(clock_s=lambda: 60 * minutes[0])
    for step, now in ((1, 14.9), (2, 15.0), (3, 29.9), (4, 31.0), (5, 46.0)):
        minutes[0] = now
        checkpoints.after_step(step)
    finish(checkpoints)
    names = [name for name, _ in world.writer.saves]
    assert names == ["step_000002", "step_000004", "step_000005"]
    assert index(world.run_dir) == [
        entry(f"checkpoints/step_00000{step}", step, "periodic") for step in (4, 5)
    ]


def test_the_minutes_are_counted_from_the_end_of_the_last_save(world):
    """Or a disk that takes as long as that for every one would be written to after every step."""
    minutes = [0.0]

    def save(folder, run, answers_ahead=None, *, background, timeout_s=None):
        minutes[0] += 20.0
        folder.mkdir(parents=True)

    world.writer.save = save
    checkpoints = world(clock_s=lambda: 60 * minutes[0], save_steps=2, background=False)
    for step in range(1, 5):
        minutes[0] += 6.0
        checkpoints.after_step(step)
    assert [kept["step"] for kept in index(world.run_dir)] == [2, 4]


# Beside the run


def test_a_checkpoint_gets_its_name_after_the_first_step_behind_its_writing(world):
    checkpoints = world(save_steps=2)
    world.writer.is_written = False
    for step in (1, 2, 3):
        checkpoints.after_step(step)
    assert (folders(world.run_dir), saved(world)) == ([], [])
    world.writer.is_written = True
    checkpoints.after_step(3)
    assert folders(world.run_dir) == ["checkpoints/step_000002"]
    (told,) = world.telemetry.saved.call_args_list
    assert [span.track for span in told.args[1]] == ["learner, checkpoints"]
    waits = [call.args[0].name for call in world.telemetry.waited_for_save.call_args_list]
    assert waits == ["step_000002", "step_000002"], "for its copy, and for its name"


def test_no_save_is_due_by_the_minutes_while_one_is_written(world):
    minutes = [0.0]
    checkpoints = world(clock_s=lambda: 60 * minutes[0])
    world.writer.is_written = False
    for step, now in ((1, 15.0), (2, 31.0), (3, 50.0)):
        minutes[0] = now
        checkpoints.after_step(step)
    assert world.writer.saves == []
    finish(checkpoints)
    assert [kept["step"] for kept in index(world.run_dir)] == [1]


def test_a_disk_that_refuses_what_is_written_beside_the_run_costs_no_save_of_the_last_update(
    world, now_s
):
    world.telemetry.patience = Patience(300.0)
    checkpoints = world(save_steps=2, keep_last=1)
    checkpoints.after_step(2)
    checkpoints.after_step(4)
    world.writer.finished = 5
    world.writer.refusals = 1
    end(checkpoints, GONE)
    assert [one["step"] for one in index(world.run_dir)] == [2, 5]
    (given_up,) = warnings(world)
    assert re.search(r"step_000004: \[Errno 28\] .*; free space.* given up", given_up)
    _, left_s = world.writer.saves[-1]
    assert left_s == INTERRUPT_S, "the time of timeouts.interrupt_s is the last update's"
    assert world.telemetry.patience.limit_s == INTERRUPT_S / 2


def test_the_wait_for_what_is_written_beside_the_run_is_no_time_of_the_last_update(world, now_s):
    world.telemetry.patience = Patience(300.0)
    checkpoints = world(save_steps=2)
    checkpoints.after_step(2)
    world.writer.finished = 3
    finish_save = world.writer.finish_save

    def finish_slowly(**limits):
        now_s[0] += 200.0
        return finish_save(**limits)

    world.writer.finish_save = finish_slowly
    end(checkpoints, KeyboardInterrupt())
    _, left_s = world.writer.saves[-1]
    assert left_s == INTERRUPT_S - 200.0
    assert world.telemetry.patience.limit_s == left_s / 2, "half of what is left of it"


@pytest.fixture
def index_refused(world):
    """Checkpoints whose second one is being written, with no way to write the index behind it:
    a folder is where it is written first.
    """
    checkpoints = world(save_steps=2, keep_last=1)
    checkpoints.after_step(2)
    checkpoints.after_step(4)
    world.writer.finished = 5
    in_the_way = world.run_dir / "checkpoints.json.partial"
    in_the_way.mkdir()
    yield checkpoints, in_the_way
    assert [one["step"] for one in index(world.run_dir)] == [4, 5]
    kept = ["checkpoint_interrupted_000005", "checkpoints/step_000004"]
    assert folders(world.run_dir) == kept, "what the whole one replaces goes behind the index"


def test_a_whole_checkpoint_is_not_given_up_where_the_index_cannot_be_written(world, index_refused):
    checkpoints, in_the_way = index_refused
    world.telemetry.warn = Mock(side_effect=lambda _: in_the_way.rmdir())
    end(checkpoints, KeyboardInterrupt())
    (refused,) = warnings(world)
    assert "checkpoints.json: [Errno 21]" in refused
    assert refused.endswith("the last update is saved anyway")


def test_a_run_that_the_index_ends_has_the_whole_checkpoint_and_the_last_update(
    world, index_refused
):
    checkpoints, in_the_way = index_refused
    with pytest.raises(StorageError, match=r"checkpoints\.json") as caught:
        checkpoints.after_step(5)
    in_the_way.rmdir()
    end(checkpoints, caught.value)
    assert warnings(world) == []


@pytest.mark.slow
@pytest.mark.parametrize(("saves", "finished"), [(False, 3), (True, 0)])
def test_where_nothing_else_is_saved_the_disk_is_asked_again_for_what_is_written_beside_the_run(
    world, saves, finished
):
    """Nothing else is wanted, or there was no update since the report of the first weights."""
    world.telemetry.patience = Patience(300.0)
    checkpoints = world(keep_best=1, save_on_interrupt=saves)
    checkpoints.after_report(0, 0.5)
    world.writer.finished = finished
    world.writer.refusals = 1
    end(checkpoints, KeyboardInterrupt())
    assert [one["step"] for one in index(world.run_dir)] == [0]
    assert warnings(world) == []


def test_an_end_that_saves_nothing_does_not_wait_for_the_learner_and_writes_no_index(world):
    checkpoints = world(save_on_interrupt=False)
    checkpoints.after_step(3)
    end(checkpoints, KeyboardInterrupt())
    assert world.writer.stops == []
    assert not (world.run_dir / "checkpoints.json").exists()


def test_a_checkpoint_that_cannot_be_read_back_for_a_moment_is_looked_at_again(world, monkeypatch):
    world.telemetry.patience = Patience(300.0)
    checkpoints = world(save_steps=1, background=False)
    read, errors = Path.read_bytes, [OSError(5, "Input/output error")]

    def read_bytes(path):
        if path.name == RUN_FILE and errors:
            raise errors.pop()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    checkpoints.after_step(3)
    assert [one["step"] for one in index(world.run_dir)] == [3] and not errors


def test_a_copy_that_there_is_no_memory_for_is_not_made_and_that_is_told_once(world):
    checkpoints = world(save_steps=1)
    world.writer.reason = "the copy needs 9 GiB"
    for step in (1, 2):
        checkpoints.after_step(step)
    assert [kept["step"] for kept in index(world.run_dir)] == [1, 2]
    (reason,) = warnings(world)
    assert reason.endswith("(checkpoint.background): the copy needs 9 GiB")


@pytest.fixture
def trained(tmp_path, demo_checkpoint, demo_data):
    """A learner, the configuration of its run, and `Checkpoints` of its weights."""
    changes = {
        "training__max_steps": 2,
        "stage2_ab__schedule__warmup_steps": 2,
        "training__effective_batch_size": 4,
        "global_max_length": 512,
        "checkpoint__save_steps": 1,
    }
    config = configuration(demo_checkpoint, demo_data, tmp_path / "run", **changes)
    (tmp_path / "run").mkdir()
    learner = make_learner(config)

    def save(folder, run, ahead, *, background, timeout_s):
        return learner.save(folder, run, background=background)

    def finish_save(*, wait, timeout_s):
        return learner.finish_save(wait=wait)

    saves = Mock(save=save, finish_save=finish_save)
    return (
        learner,
        config,
        Checkpoints(config, saves, Mock(sync_fallback=None, patience=Patience())),
    )


@pytest.mark.slow
def test_every_checkpoint_loads_elsewhere_with_the_weights_of_its_step(trained):
    learner, config, checkpoints = trained
    weights = {}
    for plan in RunSchedule(config).plans():
        learner.next_requests(plan)
        finish_step(learner)
        parameters = learner.loaded.model.named_parameters()
        weights[plan.step + 1] = {name: value.detach().clone() for name, value in parameters}
        checkpoints.after_step(plan.step + 1)
    finish(checkpoints)
    entries = index(config.telemetry.run_dir)
    assert [kept["step"] for kept in entries] == [1, 2]
    for kept in entries:
        folder = config.telemetry.run_dir / kept["folder"]
        model = AutoModelForImageTextToText.from_pretrained(folder)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights[kept["step"]][name])
        tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
        first = learner.loaded.codec.coord_id(0)
        assert tokenizer.convert_tokens_to_ids("<|coord_0|>") == first


@pytest.mark.slow
def test_a_disk_that_fills_while_the_weights_are_written_leaves_the_older_checkpoint_and_no_half_one(
    trained,
):
    _, config, checkpoints = trained
    folder = config.telemetry.run_dir / "checkpoints"
    checkpoints.after_step(1)
    finish(checkpoints)

    def sizes():
        return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}

    before = sizes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, limits[1]))
    try:
        checkpoints.after_step(2)
        with pytest.raises(StorageError, match=r"cannot write .*step_000002"):
            checkpoints.after_step(3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    assert sizes() == before
