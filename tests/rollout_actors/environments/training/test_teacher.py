"""Sampled tokens are scored by a teacher that is served elsewhere, here by a rule, over real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_server import serving
from fake_teacher import FakeTeacher, scripted_logprob
from scripted_engines import (
    Says,
    ScriptedEngines,
    demo_tokenizer,
    group_requests,
)

from learner.algorithms.advantages import AdvantageEstimator
from learner.algorithms.trajectories import trajectory_target
from learner.objectives.base import NOTHING_LEARNED, TeacherSupervision
from learner.objectives.policy_gradient import advantages
from learner.rollout_logs.trajectories import logged_rollout, trajectory_record
from rollout_actors.environments.training.runner import EnvironmentRunner, RunnerSettings
from rollout_actors.environments.training.teacher import Teacher, TeacherSettings
from shared.config.algorithm import TeacherSection
from shared.config.pipeline import PolicyGradientConfig
from shared.errors import ConfigError, RolloutError, UnreachableError
from shared.rollouts import RolloutRequest
from shared.trajectory import (
    EnvironmentRequest,
    EnvironmentRollout,
    TrainingExample,
)

TOKENIZER = demo_tokenizer()
LONGEST = 512
OBJECTIVE = {"clip_low": 0.2, "clip_high": 0.3, "ratio_cap": 2.0, "normalize": "step"}
EXAMPLE = TrainingExample([5, 6, 7, 8], [0.0, 0.0, -0.5, 0.0], [0, 0, 1, 0], 1.0, advantage=0.5)


@contextmanager
def taught(teacher: FakeTeacher, **keys: Any) -> Iterator[tuple[Teacher, TeacherSection]]:
    """The client of this teacher, and its section of the configuration, with these keys."""
    with serving(teacher.app()) as url:
        section = TeacherSection(**{"base_url": url, "model": "teacher", "timeout_s": 60.0} | keys)
        yield Teacher(TeacherSettings.from_section(section), max_under_way=3), section


@dataclass(frozen=True)
class Other:
    """A tokenizer with as many ids, whose texts are so many ids further on."""

    size: int
    shift: int = 0

    def __len__(self) -> int:
        return self.size

    def decode(self, token_ids: list[int]) -> str:
        return str(TOKENIZER.decode([max(0, token_ids[0] - self.shift)]))


def score(teacher: FakeTeacher, *examples: TrainingExample, **keys: Any) -> list[TrainingExample]:
    with taught(teacher, **keys) as (client, _):
        return asyncio.run(client.score(examples))


def start(teacher: FakeTeacher, **keys: Any) -> None:
    with taught(teacher, **keys) as (client, _):
        asyncio.run(client.require_suitable(TOKENIZER, LONGEST))


def by_seed(request: RolloutRequest) -> Says:
    word = "x" * (request.seed % 4) + "o"
    return Says(TOKENIZER.encode(word, add_special_tokens=False), version=5)


def played(
    section: TeacherSection, requests: Sequence[EnvironmentRequest], **env_args: Any
) -> list[EnvironmentRollout]:
    settings = RunnerSettings(
        "runner_environment",
        "model",
        LONGEST,
        64,
        env_args=env_args,
        teacher=TeacherSettings.from_section(section),
    )
    runner = EnvironmentRunner("environment-1", settings, ScriptedEngines(by_seed), TOKENIZER)

    async def run() -> list[EnvironmentRollout]:
        await runner.require_teacher()
        return [rollout for answer in await runner.run(requests) for rollout in answer]

    return asyncio.run(run())


# What is learned


@pytest.mark.parametrize("advantage_std", [False, True])
@pytest.mark.parametrize(("weight", "reward_weight"), [(1.0, 1.0), (0.25, 3.0), (2.0, 0.0)])
def test_a_tokens_advantage_is_the_rewards_and_how_much_more_probable_the_teacher_finds_it(
    weight: float, reward_weight: float, advantage_std: bool
) -> None:
    """`reward_weight A + weight (log p_teacher - log p_learner)`, token by token, with a learner that
    finds tokens as probable as the engines. These say -(i + 1) / 8 of the i-th token of a call, and
    the teacher reads all that came before a token.
    """
    with taught(FakeTeacher(TOKENIZER), weight=weight, reward_weight=reward_weight) as (_, section):
        rollouts = played(section, group_requests(4, 1))
    config = PolicyGradientConfig(**OBJECTIVE, advantage_std=advantage_std)
    rule = AdvantageEstimator(config, 16, section)
    assert len(rollouts) == 4
    for group in (rollouts[:2], rollouts[2:]):
        rewards = [rollout.reward for rollout in group]
        for rollout in group:
            of_reward = rollout.reward - fmean(rewards)
            if advantage_std and stdev(rewards):
                of_reward /= stdev(rewards) + config.advantage_epsilon
            (example,) = rollout.examples
            expected = []
            previous = False
            number = 0
            for place, learned in enumerate(example.mask):
                number = number + 1 if learned and previous else int(bool(learned))
                previous = bool(learned)
                if learned:
                    of_teacher = scripted_logprob(example.token_ids[: place + 1]) + number / 8
                    expected.append(reward_weight * of_reward + weight * of_teacher)
            target = trajectory_target(example, rule, num_of_rollout=example.num_learned)
            assert target is not None
            credit = target[1].credit
            assert credit.teacher_logprobs is not None and credit.teacher_weight == weight
            of_engines = torch.tensor(credit.engine_logprobs)
            sampled = NOTHING_LEARNED._replace(
                advantage=torch.tensor(credit.advantages),
                teacher=TeacherSupervision(
                    torch.tensor(credit.teacher_logprobs), torch.full_like(of_engines, weight)
                ),
            )
            found = advantages(of_engines, sampled).tolist()
            assert found == pytest.approx(expected, abs=1e-5)
            assert len(expected) > 3


def test_the_log_of_a_rollout_has_the_teachers_log_probabilities_and_needs_no_teacher_again(
    tmp_path: Any,
) -> None:
    with taught(FakeTeacher(TOKENIZER)) as (_, section):
        rollout = played(section, group_requests(4))[0]
    line = json.loads(json.dumps(trajectory_record(3, rollout)))
    (again,) = logged_rollout(line, tmp_path).examples
    (example,) = rollout.examples
    assert again.teacher_logprobs == example.teacher_logprobs
    places = [place for place, learned in enumerate(example.mask) if learned]
    assert example.teacher_logprobs == [
        scripted_logprob(example.token_ids[: place + 1]) if place in places else 0.0
        for place in range(len(example.mask))
    ]
    alone = trajectory_record(3, replace(rollout, examples=(EXAMPLE,)))
    assert "teacher_logprobs" not in alone["examples"][0]


# How it is asked


def test_it_is_asked_for_each_example_as_far_as_it_is_learned_and_so_many_at_a_time() -> None:
    teacher = FakeTeacher(TOKENIZER, key="secret", meets=3)
    unlearned = replace(EXAMPLE, mask=[0] * 4)
    examples = [replace(EXAMPLE, token_ids=[number, 6, 7, 8]) for number in range(8)]
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TEACHERS_KEY", "secret")
        scored = score(teacher, *examples, unlearned, token_env="TEACHERS_KEY")
    assert [one.token_ids for one in scored] == [one.token_ids for one in [*examples, unlearned]]
    assert [one.teacher_logprobs for one in scored] == [
        *([0.0, 0.0, scripted_logprob([number, 6, 7]), 0.0] for number in range(8)),
        [0.0] * 4,
    ]
    bodies = sorted(teacher.bodies, key=lambda body: body["prompt"])
    for number, body in enumerate(bodies):
        assert body == {
            "model": "teacher",
            "prompt": [number, 6, 7],
            "prompt_logprobs": 0,
            "max_tokens": 1,
            "temperature": 0.0,
        }
    assert teacher.most_under_way == 3


def test_an_answer_that_fails_is_asked_for_once_more_and_then_ends_the_run() -> None:
    assert score(FakeTeacher(TOKENIZER, troubles=[500]), EXAMPLE)[0].teacher_logprobs is not None
    again = FakeTeacher(TOKENIZER, troubles=[500, 500])
    problem = "score on teacher: http://.* 2 times, .*HTTP 500: no such luck; "
    with pytest.raises(RolloutError, match=problem):
        score(again, EXAMPLE)
    refused = FakeTeacher(TOKENIZER, troubles=[404])
    with pytest.raises(RolloutError, match="3 token ids: HTTP 404: no such luck; "):
        score(refused, EXAMPLE)
    assert [len(one.bodies) for one in (again, refused)] == [2, 1]
    with pytest.raises(RolloutError, match=r"HTTP 401: .*environment\.teacher\.token_env$"):
        score(FakeTeacher(TOKENIZER, troubles=[401]), EXAMPLE)


def test_a_teacher_that_is_started_again_is_waited_for_within_its_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_actors.environments.training.teacher.POLL_S", 0.02)
    loads = FakeTeacher(TOKENIZER, troubles=[502, 503, 503, 504])
    assert score(loads, EXAMPLE)[0].teacher_logprobs is not None
    assert len(loads.bodies) == 5
    # Half of the limit is over after the first try, and all of it after the second.
    clock = SimpleNamespace(monotonic=count(0.0, 30.0).__next__)
    monkeypatch.setattr("rollout_actors.environments.training.teacher.time", clock)
    section = TeacherSection(base_url="http://127.0.0.1:9", model="teacher", timeout_s=60.0)
    gone = Teacher(TeacherSettings.from_section(section), max_under_way=3)
    problem = (
        r"score on teacher: http://127\.0\.0\.1:9 could not be reached for"
        r" environment\.teacher\.timeout_s = 60 s \(last: .*\); read in its output why it ended"
    )
    with pytest.raises(RolloutError, match=problem):
        asyncio.run(gone.score([EXAMPLE]))


def test_an_answer_that_does_not_come_says_which_key_it_should_fit_into() -> None:
    silent = FakeTeacher(TOKENIZER, troubles=[0, 0])
    key = r"no answer to /v1/completions after 0.2 s; check .* environment\.teacher\.timeout_s = 0"
    with pytest.raises(RolloutError, match=key):
        score(silent, EXAMPLE, timeout_s=0.2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"changes": {2: -9999.0}},
            "gave token 2 of example 0 the log-probability -9999, which is",
        ),
        ({"changes": {2: None}}, "gave token 2 of example 0 the log-probability -9999, which is"),
        (
            {"changes": {2: 12.5}},
            "log-probability 12.5, which is invalid; .*--logprobs-mode raw_logp",
        ),
        ({"scores": False}, "returned no log-probabilities for 3 tokens; serve the teacher by"),
    ],
)
def test_what_is_no_log_probability_ends_the_run_with_its_token(
    changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RolloutError, match=f"score on teacher: http://.*{problem}"):
        score(FakeTeacher(TOKENIZER, **changes), EXAMPLE)


# At the start


def test_a_teacher_with_the_students_vocabulary_suits_also_one_that_still_loads() -> None:
    teacher = FakeTeacher(TOKENIZER, loads=1, max_model_len=LONGEST + 1)
    start(teacher)
    (body,) = teacher.bodies
    assert {0, len(TOKENIZER) - 1} <= set(body["prompt"])
    assert len(body["prompt"]) <= LONGEST


@pytest.mark.parametrize(
    ("changes", "keys", "problem"),
    [
        ({}, {"model": "other"}, "serves teacher, but environment.teacher.model is other; write"),
        (
            {"max_model_len": LONGEST},
            {},
            (
                "accepts 512 tokens, but needs global_max_length 512 and 1 more, which it samples;"
                " start it with --max-model-len 513, or lower global_max_length to 511"
            ),
        ),
        ({"key": "k"}, {}, "answers /v1/models with HTTP 401: .* in environment.teacher.token_env"),
        ({"scores": False}, {}, "returned no log-probabilities for"),
    ],
)
def test_a_teacher_that_does_not_suit_is_refused_with_what_to_do(
    changes: dict[str, Any], keys: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RolloutError, match=f"start on teacher: http://.* {problem}"):
        start(FakeTeacher(TOKENIZER, **changes), **keys)


def test_a_teacher_with_another_vocabulary_is_refused_by_the_first_token_that_differs() -> None:
    problem = r"Token id \d+ is out of vocabulary; .*environment\.teacher\.model has the vocabulary of model\.path"
    with pytest.raises(RolloutError, match=problem):
        start(FakeTeacher(Other(size=len(TOKENIZER) - 1)))
    problem = r"token id .* as .*, .*model\.path as .*: .*vocabulary"
    with pytest.raises(RolloutError, match=problem):
        start(FakeTeacher(Other(size=len(TOKENIZER), shift=1)))


def test_a_token_that_is_not_exported_is_named() -> None:
    section = TeacherSection(base_url="http://h:1", model="m", token_env="NOBODY_SET_THIS")
    with pytest.raises(ConfigError, match=r"\.teacher\.token_env: .*NOBODY_SET_THIS"):
        TeacherSettings.from_section(section)


def test_a_teacher_that_is_not_there_is_waited_for_and_then_named_with_its_keys() -> None:
    section = TeacherSection(base_url="http://127.0.0.1:9", model="teacher", timeout_s=0.6)
    client = Teacher(TeacherSettings.from_section(section), max_under_way=3)
    problem = (
        r"start on teacher: http://127\.0\.0\.1:9 was not ready within"
        r" environment\.teacher\.timeout_s = 0\.6 s \(last: .*\); check that it runs, that"
        r" environment\.teacher\.base_url is its address without /v1"
    )
    with pytest.raises(UnreachableError, match=problem):
        asyncio.run(client.require_suitable(TOKENIZER, LONGEST))
