"""What rows are made of is prepared beside the device and the engines, in order, and nothing of it
is lost or taken twice.
"""

from threading import Event, Semaphore, get_ident
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from config_support import configuration, trajectory_config

from learner.algorithms import base, rollout_matching
from learner.algorithms.base import NUM_AHEAD, Ahead
from learner.algorithms.rollout_matching import RolloutMatchingStep
from learner.algorithms.trajectories import TrajectoryBatch
from learner.data.augment import Augmented
from learner.targets import target_settings
from shared.config.pipeline import Channel
from shared.records import Sample
from shared.schedule import StepPlan

LIMIT_S = 60.0
"""For what happens at once on a machine that is not busy."""


@pytest.fixture
def one_ahead():
    prepares = Ahead()
    yield prepares
    prepares.close()


@pytest.mark.parametrize("count", [0, 1, NUM_AHEAD, NUM_AHEAD + 1, 3 * NUM_AHEAD])
def test_everything_comes_once_and_in_order(one_ahead, count):
    assert list(one_ahead.map(str, range(count))) == [str(number) for number in range(count)]


def test_no_more_is_prepared_than_what_comes_next(one_ahead, monkeypatch):
    monkeypatch.setattr(base, "NUM_AHEAD", 2)
    begun = []
    results = one_ahead.map(begun.append, range(9))
    next(results)
    next(results)
    one_ahead._thread.submit(int).result()
    assert begun == [0, 1, 2, 3]


def test_an_error_comes_in_its_item_s_place_and_what_is_behind_it_is_not_prepared(one_ahead):
    going_on, done = Event(), []

    def prepare(number):
        if number == 1:
            raise KeyError(number)
        if number > 1:
            assert going_on.wait(LIMIT_S)
        done.append(number)
        return number

    results = one_ahead.map(prepare, range(NUM_AHEAD))
    assert next(results) == 0
    with pytest.raises(KeyError):
        next(results)
    going_on.set()
    one_ahead._thread.submit(int).result()
    assert set(done) <= {0, 2}


@pytest.fixture
def matching(tmp_path, one_ahead, monkeypatch):
    """A step's work without a model: `counted` is released for every prompt, `targets` for every
    target that is made.
    """
    counted, targets, threads = Semaphore(0), Semaphore(0), set()

    def encode(sample):
        threads.add(get_ident())
        counted.release()
        return f"prompt of {sample.sample_id}"

    def ground_truth_target(sample, codec, settings):
        threads.add(get_ident())
        targets.release()
        return f"target of {sample.sample_id}"

    monkeypatch.setattr(rollout_matching, "ground_truth_target", ground_truth_target)
    monkeypatch.setattr(RolloutMatchingStep, "_log_next", lambda step, target, rollout: None)
    config = configuration(tmp_path, tmp_path, tmp_path)
    encoder, tokens = SimpleNamespace(encode=encode), SimpleNamespace(codec=None)
    settings = target_settings(config)
    algorithm = SimpleNamespace(
        config=config, ahead=one_ahead, encoder=encoder, tokens=tokens, settings=settings, log=None
    )
    return SimpleNamespace(algorithm=algorithm, counted=counted, targets=targets, threads=threads)


def matching_step(matching, channel):
    shown = [Augmented(Sample(f"s{number}", (), 8, 8, ()), None, 0) for number in range(3)]
    return RolloutMatchingStep(
        matching.algorithm, StepPlan(0, channel, 3, 0, False, False), range(3), shown, Mock()
    )


def test_prompts_are_encoded_before_engines_have_answered(matching):
    matching_step(matching, Channel.B)
    assert all(matching.counted.acquire(timeout=LIMIT_S) for _ in range(3))


def test_the_next_segments_are_made_while_the_present_one_is_learned(matching):
    segments = matching_step(matching, Channel.A).ground_truth()
    first = next(segments)
    assert all(
        matching.counted.acquire(timeout=LIMIT_S) and matching.targets.acquire(timeout=LIMIT_S)
        for _ in range(3)
    )
    assert [(s.prompt, s.target) for s in (first, *segments)] == [
        (f"prompt of s{i}", f"target of s{i}") for i in range(3)
    ]
    assert get_ident() not in matching.threads


def test_the_next_rollouts_are_made_into_examples_while_the_present_one_is_learned(
    tmp_path, one_ahead, monkeypatch
):
    started = Semaphore(0)

    def learned(step, rollout):
        started.release()
        yield from (f"{rollout.position}a", f"{rollout.position}b")

    monkeypatch.setattr(TrajectoryBatch, "_segments_of", learned)
    config = trajectory_config(tmp_path, tmp_path, environment__drop_equal_groups=True)
    work = SimpleNamespace(config=config, environment=config.environment, ahead=one_ahead, log=None)
    rewards = [(0.0, 1.0), (1.0, 1.0), (1.0, 0.0)]
    of_nothing = {"example": 0, "error": None, "examples": ()}
    answers = [
        [
            SimpleNamespace(position=2 * g + i, reward=reward, **of_nothing)
            for i, reward in enumerate(group)
        ]
        for g, group in enumerate(rewards)
    ]
    plan = StepPlan(0, Channel.B, 6, 0, False, False)
    step = TrajectoryBatch(work, plan, range(6), [0, 1, 2], Mock())
    segments = step.segments(answers, version=0)
    first = next(segments)
    assert all(started.acquire(timeout=LIMIT_S) for _ in range(4))
    # The second group has equal rewards, and is left out.
    assert [first, *segments] == ["0a", "0b", "1a", "1b", "4a", "4b", "5a", "5b"]
    groups = step.metrics.add_group.call_args_list
    assert [call.kwargs["num_left_out"] for call in groups] == [0, 2, 0]
