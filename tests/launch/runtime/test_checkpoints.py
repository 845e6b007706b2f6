"""Checkpoints of a run on disk: complete before an older one goes, listed, loaded elsewhere."""

from __future__ import annotations

import json
import resource
import time

import pytest
import torch
from config_support import configuration, trajectory_config
from learner_support import finish_step, make_learner
from transformers import AutoModelForImageTextToText, AutoProcessor

from launch.reports.rewards import RewardReport
from launch.runtime.checkpoints import Checkpoints
from shared.errors import LearnerError, RolloutError, StorageError, WeightSyncError
from shared.grounding.evaluation import Evaluation
from shared.schedule import RunSchedule
from shared.trajectory import EnvironmentRollout


class Writer:
    """A learner that writes one file per checkpoint, or fails as a full disk does."""

    def __init__(self):
        self.full, self.events, self.finished, self.lost, self.stops = False, [], 0, False, []
        self.interrupted = None
        """In the midst of the next save, the driver is interrupted: what of it becomes complete,
        `writes` or `fails`.
        """

    def stop(self, *, timeout_s):
        self.stops.append(timeout_s)
        if self.lost:
            raise LearnerError("its process ended", phase="stop")
        return self.finished

    def save(self, folder, *, timeout_s=None):
        if self.full:
            raise StorageError(str(folder), "[Errno 28] No space left on device")
        interrupted, self.interrupted = self.interrupted, None
        if interrupted == "fails":
            raise KeyboardInterrupt
        folder.mkdir(parents=True)
        (folder / "weights").write_text("")
        self.events.append(
            (folder.name, sorted(path.name for path in folder.parent.iterdir()), timeout_s)
        )
        if interrupted == "writes":
            raise KeyboardInterrupt


class Told:
    """Telemetry, as far as it hears of checkpoints."""

    def __init__(self):
        self.checkpoints, self.errors = [], []

    def saved(self, checkpoint):
        self.checkpoints.append(checkpoint)

    def not_saved(self, error):
        self.errors.append(error)


@pytest.fixture
def world(tmp_path, demo_checkpoint, demo_data):
    """A run's folder, its writer, and `Checkpoints` of a configuration."""
    writer, told = Writer(), Told()

    def make(clock_s=time.monotonic, **checkpoint):
        (tmp_path / "run").mkdir(exist_ok=True)
        changes = {f"checkpoint__{key}": value for key, value in checkpoint.items()}
        config = configuration(
            demo_checkpoint, demo_data, tmp_path / "run", timeouts__interrupt_s=7.0, **changes
        )
        return Checkpoints(config, writer, told, clock_s=clock_s)

    make.run_dir, make.writer, make.told = tmp_path / "run", writer, told
    return make


def end(checkpoints, error):
    """The run ends early with this error, which stays what it was."""
    with pytest.raises(type(error)) as caught, checkpoints.saved_at_an_early_end():
        raise error
    assert caught.value is error


def index(run_dir):
    return json.loads((run_dir / "checkpoints.json").read_text())


def there(run_dir):
    return sorted(str(path.relative_to(run_dir)) for path in run_dir.glob("checkpoint*/**/weights"))


def test_a_new_checkpoint_is_complete_before_an_old_one_goes(world):
    checkpoints = world(save_steps=1, keep_last=1)
    checkpoints.after_step(1)
    checkpoints.after_step(2)
    assert world.writer.events[1] == ("step_000002", ["step_000001", "step_000002"], None)
    assert there(world.run_dir) == ["checkpoints/step_000002/weights"]
    assert world.told.checkpoints == [
        world.run_dir / "checkpoints" / f"step_00000{step}" for step in (1, 2)
    ]


def test_the_index_says_folder_step_score_and_why(world):
    checkpoints = world(save_steps=2, keep_last=1, keep_best=1)
    checkpoints.after_report(0, 0.25)
    for step in range(1, 5):
        checkpoints.after_step(step)
        if step == 2:
            checkpoints.after_report(2, 0.5)
    checkpoints.at_end(4)
    assert index(world.run_dir) == [
        {"folder": "checkpoints/step_000002", "step": 2, "score": 0.5, "reasons": ["best"]},
        {"folder": "checkpoints/step_000004", "step": 4, "score": None, "reasons": ["periodic"]},
        {"folder": "checkpoint", "step": 4, "score": None, "reasons": ["final"]},
    ]
    assert there(world.run_dir) == sorted(
        f"{entry['folder']}/weights" for entry in index(world.run_dir)
    )


def test_of_an_environment_the_score_is_the_mean_reward_and_the_best_are_the_highest(
    world, tmp_path
):
    config = trajectory_config(tmp_path / "model", tmp_path / "run", checkpoint__keep_best=1)
    world.run_dir.mkdir()
    checkpoints = Checkpoints(config, world.writer, world.told)
    for step, rewards in ((0, (0.0, 0.25)), (10, (1.0, 0.5)), (20, (0.5, 0.5))):
        checkpoints.after_report(
            step,
            RewardReport(
                Evaluation(step, step, tuple(map(rollout_worth, rewards)), wall_s=1.0)
            ).headline.value,
        )
    assert index(world.run_dir) == [
        {"folder": "checkpoints/step_000010", "step": 10, "score": 0.75, "reasons": ["best"]}
    ]
    assert there(world.run_dir) == ["checkpoints/step_000010/weights"]


def rollout_worth(reward):
    return EnvironmentRollout(
        0, 0, reward, {}, None, False, 1, 1, 0, 0, (), None, None, "environment-0", 1.0, 0.5
    )


def test_a_full_disk_is_named_and_the_older_checkpoints_stay(world):
    checkpoints = world(save_steps=1, keep_last=1)
    checkpoints.after_step(1)
    world.writer.full = True
    with pytest.raises(StorageError, match=r"step_000002: .*No space left"):
        checkpoints.after_step(2)
    assert there(world.run_dir) == ["checkpoints/step_000001/weights"]
    assert [entry["step"] for entry in index(world.run_dir)] == [1]


def test_an_interrupted_run_saves_its_last_finished_update_within_a_stated_time(world):
    checkpoints = world(save_steps=5)
    checkpoints.after_step(6)
    world.writer.finished = 7  # the interruption came before the driver had heard of it
    end(checkpoints, KeyboardInterrupt())
    name, _, left_s = world.writer.events[-1]
    assert (name, world.writer.stops) == ("checkpoint_interrupted_000007", [7.0])
    assert 6.0 < left_s <= 7.0, "one limit for the learner's present row and for the writing"
    assert index(world.run_dir)[-1] == {
        "folder": "checkpoint_interrupted_000007",
        "step": 7,
        "score": None,
        "reasons": ["interrupted"],
    }


@pytest.mark.parametrize("config", [{"save_on_interrupt": False}, {}])
def test_without_an_update_or_when_it_is_not_wanted_an_interruption_saves_nothing(world, config):
    checkpoints = world(**config)
    world.writer.finished = 1 if config else 0
    end(checkpoints, KeyboardInterrupt())
    assert world.writer.events == world.told.errors == []


@pytest.mark.parametrize(
    "error",
    [
        RolloutError("gone", actor="server-0", phase="generate"),
        WeightSyncError("late", actor="rollout-actor-0", phase="wire"),
    ],
)
def test_a_run_that_a_rollout_or_a_sync_ends_saves_its_last_finished_update(world, error):
    world.writer.finished = 3
    end(world(), error)
    assert index(world.run_dir) == [
        {"folder": "checkpoint_interrupted_000003", "step": 3, "score": None, "reasons": ["failed"]}
    ]
    assert world.told.checkpoints == [world.run_dir / "checkpoint_interrupted_000003"]


def test_weights_that_are_saved_for_good_are_not_saved_again_when_the_last_report_fails(world):
    checkpoints = world()
    world.writer.finished = 3
    checkpoints.at_end(3)
    end(checkpoints, RolloutError("gone", actor="server-0", phase="generate"))
    assert there(world.run_dir) == ["checkpoint/weights"]


def test_what_a_failed_learner_holds_is_not_saved(world):
    world.writer.finished = 3
    end(world(), LearnerError("the gradient norm is nan", phase="update"))
    assert (world.writer.stops, world.told.checkpoints) == ([], [])


def test_weights_that_cannot_be_saved_are_told_and_the_run_ends_with_what_ended_it(world):
    world.writer.finished, world.writer.full = 3, True
    end(world(), RolloutError("gone", actor="server-0", phase="generate"))
    world.writer.lost = True
    end(world(), KeyboardInterrupt())
    assert [type(error) for error in world.told.errors] == [StorageError, LearnerError]
    assert there(world.run_dir) == []


def test_a_run_that_keeps_nothing_on_its_way_writes_no_index_before_its_end(world):
    checkpoints = world(save_final=False)
    checkpoints.after_step(1)
    checkpoints.after_report(1, 0.5)
    checkpoints.at_end(1)
    assert list(world.run_dir.iterdir()) == []


def test_by_default_no_more_than_fifteen_minutes_of_learning_can_be_lost(world):
    minutes = [0.0]
    checkpoints = world(clock_s=lambda: 60 * minutes[0])
    for step, now in ((1, 14.9), (2, 15.0), (3, 29.9), (4, 31.0), (5, 46.0)):
        minutes[0] = now
        checkpoints.after_step(step)
    assert [name for name, _, _ in world.writer.events] == [
        "step_000002",
        "step_000004",
        "step_000005",
    ]
    assert [(entry["step"], entry["reasons"]) for entry in index(world.run_dir)] == [
        (4, ["periodic"]),
        (5, ["periodic"]),
    ]


def test_the_minutes_are_counted_from_the_end_of_the_last_save(world):
    """Or a disk that takes as long as that for every one would be written to after every step."""
    minutes = [0.0]

    def save(folder, *, timeout_s=None):
        minutes[0] += 20.0
        folder.mkdir(parents=True)

    world.writer.save = save
    checkpoints = world(clock_s=lambda: 60 * minutes[0], save_steps=2)
    for step in range(1, 5):
        minutes[0] += 6.0
        checkpoints.after_step(step)
    assert [entry["step"] for entry in index(world.run_dir)] == [2, 4]


def test_without_save_minutes_time_saves_nothing(world):
    minutes = iter(range(0, 10**6, 1000))
    checkpoints = world(clock_s=lambda: 60 * next(minutes), save_minutes=None)
    checkpoints.after_step(1)
    assert world.writer.events == []


@pytest.mark.parametrize("save_on_interrupt", [True, False])
def test_a_final_save_that_was_interrupted_and_became_complete_is_in_the_index_and_not_written_twice(
    world, save_on_interrupt
):
    checkpoints = world(save_on_interrupt=save_on_interrupt)
    world.writer.finished, world.writer.interrupted = 3, "writes"
    with pytest.raises(KeyboardInterrupt), checkpoints.saved_at_an_early_end():
        checkpoints.at_end(3)
    assert index(world.run_dir) == [
        {"folder": "checkpoint", "step": 3, "score": None, "reasons": ["final"]}
    ]
    assert there(world.run_dir) == ["checkpoint/weights"]
    assert world.told.checkpoints == [world.run_dir / "checkpoint"]


def test_a_final_save_that_was_interrupted_and_came_to_nothing_is_made_up_for_and_not_in_the_index(
    world,
):
    checkpoints = world()
    world.writer.finished, world.writer.interrupted = 3, "fails"
    with pytest.raises(KeyboardInterrupt), checkpoints.saved_at_an_early_end():
        checkpoints.at_end(3)
    assert index(world.run_dir) == [
        {
            "folder": "checkpoint_interrupted_000003",
            "step": 3,
            "score": None,
            "reasons": ["interrupted"],
        }
    ]


def test_a_final_save_that_was_interrupted_and_came_to_nothing_is_not_made_up_for_where_that_is_not_wanted(
    world,
):
    checkpoints = world(save_on_interrupt=False)
    world.writer.finished, world.writer.interrupted = 3, "fails"
    with pytest.raises(KeyboardInterrupt), checkpoints.saved_at_an_early_end():
        checkpoints.at_end(3)
    assert index(world.run_dir) == []
    assert there(world.run_dir) == []


def test_an_interruption_behind_a_save_does_not_wait_for_the_learner_where_nothing_is_to_be_saved(
    world,
):
    checkpoints = world(save_on_interrupt=False, save_steps=1)
    checkpoints.after_step(1)
    end(checkpoints, KeyboardInterrupt())
    assert world.writer.stops == []


@pytest.mark.parametrize(("became", "kept"), [("writes", [1, 2, 3]), ("fails", [1, 3])])
def test_after_an_interrupted_save_on_the_way_the_index_is_what_is_there(world, became, kept):
    checkpoints = world(save_steps=1, keep_last=1)
    checkpoints.after_step(1)
    world.writer.finished, world.writer.interrupted = 3, became
    with pytest.raises(KeyboardInterrupt), checkpoints.saved_at_an_early_end():
        checkpoints.after_step(2)
    assert [entry["step"] for entry in index(world.run_dir)] == kept, (
        "the one that was to go is there still"
    )
    assert there(world.run_dir) == sorted(
        f"{entry['folder']}/weights" for entry in index(world.run_dir)
    )


@pytest.fixture
def learner(tmp_path, demo_checkpoint, demo_data):
    changes = {
        "training__max_steps": 2,
        "stage2_ab__schedule__warmup_steps": 2,
        "training__effective_batch_size": 4,
        "global_max_length": 512,
    }
    config = configuration(
        demo_checkpoint, demo_data, tmp_path / "run", checkpoint__save_steps=1, **changes
    )
    learner = make_learner(config)
    (tmp_path / "run").mkdir(exist_ok=True)
    return config, learner


class Saves:
    """`Learner` as `RayLearner` shows it to the driver."""

    def __init__(self, learner):
        self._learner = learner

    def save(self, folder, *, timeout_s=None):
        self._learner.publisher.save(folder)


@pytest.mark.slow
def test_every_checkpoint_loads_elsewhere_with_the_weights_of_its_step(learner):
    config, trained = learner
    checkpoints, weights = Checkpoints(config, Saves(trained), Told()), {}
    for plan in RunSchedule(config).plans():
        trained.next_requests(plan)
        finish_step(trained)
        weights[plan.step + 1] = {
            name: parameter.detach().clone()
            for name, parameter in trained.loaded.model.named_parameters()
        }
        checkpoints.after_step(plan.step + 1)
    for entry in index(config.telemetry.run_dir):
        folder = config.telemetry.run_dir / entry["folder"]
        model = AutoModelForImageTextToText.from_pretrained(folder)
        assert all(
            torch.equal(parameter, weights[entry["step"]][name])
            for name, parameter in model.named_parameters()
        )
        assert AutoProcessor.from_pretrained(folder).tokenizer.convert_tokens_to_ids(
            "<|coord_0|>"
        ) == trained.loaded.codec.coord_id(0)


@pytest.mark.slow
def test_a_disk_that_fills_while_the_weights_are_written_leaves_the_older_checkpoint_and_no_half_one(
    learner,
):
    config, trained = learner
    checkpoints, folder = (
        Checkpoints(config, Saves(trained), Told()),
        config.telemetry.run_dir / "checkpoints",
    )
    checkpoints.after_step(1)
    before = {path.name: path.stat().st_size for path in (folder / "step_000001").iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"cannot write .*step_000002"):
            checkpoints.after_step(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in folder.iterdir()] == ["step_000001"]
    assert {path.name: path.stat().st_size for path in (folder / "step_000001").iterdir()} == before
