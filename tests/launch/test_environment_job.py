"""Trajectories on the actors and the learner of rollout matching: real engines, repeatable, checked
(decisions 10, 12 and 13; issue 5).
"""

from dataclasses import replace
from pathlib import Path

import pytest
import ray
from config_support import configuration
from engine_support import NEIGHBOUR, TIMEOUTS
from foreign_interpreters import interpreter_of
from local_learner import Job, run_job
from openenv_server import openenv_server

from launch.checks.environment import check_environment
from launch.pipeline import one_ahead, one_at_a_time
from launch.processes.cluster import runner_settings
from launch.processes.fleet import Fleet
from rollout_actors.environments.training.actor import EnvironmentActor
from shared.trajectory import EnvironmentRollout

pytestmark = pytest.mark.engine

OBJECTIVE = {
    "name": "policy_gradient",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {
        "clip_low": 0.2,
        "clip_high": 0.28,
        "ratio_cap": 5.0,
        "normalize": "step",
        "advantage_std": False,
    },
}
# Two steps of four examples with four rollouts each, of a model that knows nothing, on a reward
# that even it earns now and then: the length of what it says.
STEPS = {
    "data__train": None,
    "data__val": None,
    "environment": {
        "id": "tests/fixtures/two_lengths.py",
        "rollouts_per_example": 4,
        "num_eval_examples": 3,
    },
    "custom__trainer_variant": "trajectory_pg",
    "global_max_length": 256,
    "training__max_steps": 2,
    "training__effective_batch_size": 16,
    "rollout_matching__decode_batch_size": 4,
    "rollout_matching__max_new_tokens": 12,
    "rollout_matching__decoding": {"temperature": 1.0},
    "rollout_matching__pipeline": {"objective": [OBJECTIVE], "diagnostics": []},
    "stage2_ab": {"channel_b": {"enable_pipeline": True}},
}


@pytest.fixture(scope="module")
def job(engine_pool, demo_checkpoint, demo_data, tmp_path_factory):
    """`job(number of engines, number of environment actors, **changes)` runs the page."""

    def run(num_engines, num_environments=1, queue=one_ahead, **changes) -> Job:
        config = configuration(
            demo_checkpoint, demo_data, tmp_path_factory.mktemp("run"), **STEPS | changes
        )
        size, section = config.rollout_matching.decode_batch_size, config.environment
        examples = check_environment(config, section).examples
        engines = engine_pool.over(*list(engine_pool.actors)[:num_engines], decode_batch_size=size)
        names = [f"environment-{index}" for index in range(num_environments)]
        arguments = (
            runner_settings(config, section, engines.devices, examples, 0),
            engines.engines.actors,
            engines.names,
            engines.engines.timeouts.generate,
        )
        actors = [
            ray.remote(EnvironmentActor)
            .options(num_cpus=0, runtime_env=NEIGHBOUR)
            .remote(name, *arguments)
            for name in names
        ]
        environments = Fleet(actors, names, TIMEOUTS)
        environments.start()
        try:
            engines.generate_through(environments, group_size=section.rollouts_per_example)
            return run_job(config, engines, num_engines, queue, examples)
        finally:
            environments.close()

    return run


@pytest.fixture(scope="module")
def three(job):
    return job(3)


def what_was_said(job: Job) -> list[EnvironmentRollout]:
    """Without who said it, and when."""
    return [
        replace(rollout, actor="", generate_s=0.0, started_s=0.0)
        for answer in job.rollouts
        for rollout in answer
    ]


def assert_same(one: Job, other: Job) -> None:
    """The same rollouts, and the same losses to the bit."""
    assert what_was_said(one) == what_was_said(other)
    assert one.reports.losses == other.reports.losses


def test_two_runs_give_the_same_whatever_the_actors_and_the_rounds_are(job, three):
    """One engine for three, two environment actors for one, larger rounds, and no queue."""
    other = job(1, 2, one_at_a_time, rollout_matching__decode_batch_size=8)
    assert_same(other, three)


def test_every_rollout_has_two_turns_its_own_tokens_and_the_steps_weight_version(three):
    rollouts = what_was_said(three)
    assert [rollout.position for rollout in rollouts] == [*range(16), *range(16)]
    for number, rollout in enumerate(rollouts):
        (example,) = rollout.examples
        assert (rollout.error, rollout.num_turns, rollout.num_splits, example.steps) == (
            None,
            2,
            0,
            (0, 1),
        )
        assert example.weight_version == 1 + number // 16
        assert len(example.group_rewards) == 4
        assert sum(example.mask) == rollout.num_tokens
    assert len({tuple(rollout.examples[0].token_ids) for rollout in rollouts}) == 32, (
        "siblings differ"
    )


def test_the_learner_agrees_with_the_engines_on_every_token_and_says_how_far_off_policy_it_is(
    three,
):
    for report in three.reports.steps:
        assert report.metrics["rollout/num_compared_tokens"] > 100
        assert report.metrics["rollout/logprob_max_abs"] < 1e-4
        assert report.metrics["policy/logprob_difference"] < 1e-4, "over all turns"
        assert report.metrics["policy/ratio"] == pytest.approx(1.0, abs=1e-4)
        assert report.metrics["policy/clipped_share"] == 0.0
        assert report.metrics["policy/entropy"] > 0
        assert report.metrics["rollout/num_groups"] == 4
        assert report.metrics["optim/grad_norm"] > 0


def test_held_out_examples_are_asked_greedily_once_each(three):
    first, last = three.reports.evaluations
    assert [rollout.position for rollout in first.outcomes] == [0, 1, 2]
    assert [rollout.example for rollout in last.outcomes] == [0, 1, 2]
    assert (first.weight_version, last.weight_version) == (1, 3)


@pytest.mark.long
def test_with_staleness_1_the_first_round_of_a_step_is_of_the_weights_before_and_two_runs_agree(
    job,
):
    changes = {
        "rollout_matching__max_staleness": 1,
        "training__max_steps": 3,
        "rollout_matching__decode_batch_size": 4,
    }
    first, second = job(2, **changes), job(2, **changes)
    assert_same(first, second)
    versions = [rollout.examples[0].weight_version for rollout in what_was_said(first)]
    assert versions == [1] * 16 + [1] * 8 + [2] * 8 + [2] * 8 + [3] * 8
    assert [report.metrics["rollout/staleness"] for report in first.reports.steps] == [
        0.0,
        0.5,
        0.5,
    ]


@pytest.mark.long
def test_pictures_of_any_turn_are_learned_with_what_was_said_to_them(job):
    """The learner shows its own vision tower the same pictures: another one, or none, would be
    another probability for every token behind it.
    """
    environment = {
        "id": "tests/fixtures/one_picture.py",
        "rollouts_per_example": 4,
        "num_eval_examples": 3,
        "max_images_per_prompt": 1,
    }
    first = job(2, environment=environment)
    for rollout in what_was_said(first):
        (example,) = rollout.examples
        assert (rollout.error, rollout.num_splits, example.steps, len(example.images)) == (
            None,
            0,
            (0, 1),
            1,
        )
    for report in first.reports.steps:
        assert report.metrics["rollout/num_compared_tokens"] > 100
        assert report.metrics["rollout/logprob_max_abs"] < 1e-4
        assert report.metrics["optim/grad_norm"] > 0


EPISODES = {"episode_reward", "num_steps", "valid_actions"}


def trained_elsewhere(job, name, args, metrics):
    """Train one step on an environment of another library, and look at its rollouts."""
    environment = {
        "id": name,
        "args": {"num_examples": 6, "num_eval_examples": 3, **args},
        "rollouts_per_example": 4,
    }
    trained = job(1, environment=environment, training__max_steps=1)
    (report,) = trained.reports.steps
    for rollout in what_was_said(trained):
        (example,) = rollout.examples
        assert (rollout.error, rollout.num_splits) == (None, 0)
        assert rollout.num_turns >= 2, "more where an answer had no action"
        assert rollout.metrics.keys() == metrics
        assert sum(example.mask) == rollout.num_tokens
        assert example.reward == rollout.reward
    assert report.metrics["rollout/logprob_max_abs"] < 1e-4, "the tokens are those of the engine"
    assert report.metrics["optim/grad_norm"] > 0
    assert [len(one.outcomes) for one in trained.reports.evaluations] == [3, 3]


def test_an_environment_of_gymnasium_is_trained(job):
    trained_elsewhere(job, "gym:gym_lengths:Lengths-v0", {}, EPISODES)


@pytest.mark.long
def test_an_openenv_server_is_trained_on(job, tmp_path):
    with openenv_server(tmp_path, sessions=8) as url:
        trained_elsewhere(job, f"openenv:{url}", {"sessions": 8}, EPISODES)


@pytest.mark.long
def test_an_environment_of_verifiers_is_trained_in_its_own_interpreter(job, monkeypatch):
    interpreter = str(interpreter_of("verifiers"))
    # Where its process looks for modules, as a user's working directory is.
    monkeypatch.chdir(Path(__file__).parents[1] / "fixtures")
    args = {"interpreter": interpreter}
    trained_elsewhere(job, "verifiers:vf_lengths", args, {"length", "longest", "num_turns"})
