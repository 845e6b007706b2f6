"""A step's examples as rollouts of an environment, by engines that answer by a script (decisions
10, 12, 14, 17 and 41).
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import runner_environment
from scene_support import png
from scripted_engines import (
    CHATML,
    Says,
    ScriptedEngines,
    decode_settings,
    demo_tokenizer,
    rollout_of,
)

from launch.demo.language_model import make_demo_lm
from launch.demo.model import CHAT_TEMPLATE
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.training.runner import (
    EnvironmentRunner,
    RunnerSettings,
    count_examples,
    load_tokenizer,
    require_same,
)
from shared.errors import RolloutError, UnreachableError
from shared.rollouts import DecodeMode, FinishReason, Rollout, RolloutRequest
from shared.seeds import request_seed
from shared.trajectory import EnvironmentRequest, EnvironmentRollout, ExampleCounts, ExampleGroup

RUN_SEED, STEP, SIZE = 7, 3, 2
TOKENIZER = demo_tokenizer(CHATML)
DECODE = decode_settings(TOKENIZER, max_new_tokens=16)
GREEDY = replace(DECODE, mode=DecodeMode.GREEDY, temperature=0.0)


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    runner_environment.CLEANED.clear()
    runner_environment.TORN_DOWN.clear()


def by_seed(request: RolloutRequest) -> Says:
    """As many `x` as the seed says: siblings differ."""
    return Says(
        TOKENIZER.encode("x" * (request.seed % 4) + "o", add_special_tokens=False), version=5
    )


def made(engines: Any, *, tokenizer: Any = TOKENIZER, **changes: Any) -> EnvironmentRunner:
    """`changes` are of the settings; what is none of them is an argument of the environment."""
    known = {field.name for field in fields(RunnerSettings)}
    arguments = {name: value for name, value in changes.items() if name not in known}
    own = {name: value for name, value in changes.items() if name in known}
    settings = RunnerSettings(
        **{
            "env_id": "runner_environment",
            "model_path": "model",
            "max_model_len": 512,
            "max_under_way": 64,
            "env_args": arguments,
            **own,
        }
    )
    return EnvironmentRunner("environment-1", settings, engines, tokenizer)


def training(*examples: int, first: int = 0) -> list[EnvironmentRequest]:
    """A group of two rollouts of each, from this group on."""
    groups = [
        ExampleGroup(example, range(SIZE * place, SIZE * (place + 1)))
        for place, example in enumerate(examples, first)
    ]
    return [EnvironmentRequest(STEP, (group,), DECODE, RUN_SEED) for group in groups]


def held_out(number: int = 3) -> list[EnvironmentRequest]:
    groups = tuple(ExampleGroup(place, range(place, place + 1)) for place in range(number))
    return [EnvironmentRequest(STEP, groups, GREEDY, RUN_SEED, is_held_out=True)]


def ran(
    requests: Sequence[EnvironmentRequest], engines: Any = None, **changes: Any
) -> list[tuple[EnvironmentRollout, ...]]:
    return asyncio.run(made(engines or ScriptedEngines(by_seed), **changes).run(requests))


def flat(answers: Sequence[Sequence[EnvironmentRollout]]) -> list[EnvironmentRollout]:
    return [rollout for answer in answers for rollout in answer]


def timeless(answers: Sequence[Sequence[EnvironmentRollout]]) -> list[EnvironmentRollout]:
    return [replace(rollout, started_s=0.0, generate_s=0.0) for rollout in flat(answers)]


# What comes back


def test_every_request_is_answered_in_order_by_one_rollout_for_each_of_its_positions() -> None:
    answers = ran(training(4, 1, 2, first=3))
    assert [[(rollout.position, rollout.example) for rollout in answer] for answer in answers] == [
        [(6, 4), (7, 4)],
        [(8, 1), (9, 1)],
        [(10, 2), (11, 2)],
    ]
    assert {rollout.actor for rollout in flat(answers)} == {"environment-1"}
    assert ran([]) == []


def test_seeds_follow_from_the_run_the_step_the_position_and_the_turn() -> None:
    engines = ScriptedEngines(by_seed, number=3)
    ran(training(4, 1, first=3), engines)
    asked = sorted((request.position, request.seed) for _, request in engines.requests)
    assert asked == sorted(
        (position, request_seed(RUN_SEED, STEP, position, turn))
        for position in range(6, 10)
        for turn in (0, 1)
    )
    assert {engine == request.position % 3 for engine, request in engines.requests} == {True}, (
        "all turns of a rollout go to one engine"
    )


def test_a_rollout_says_with_which_seeds_its_calls_were_asked_and_who_answered() -> None:
    """Of one whose last call is not answered, too; and the report's."""
    (first, second), _ = ran(training(4, 1, first=3), ScriptedEngines(by_seed, number=3))
    for rollout, engine in ((first, "actor-0"), (second, "actor-1")):
        seeds = [request_seed(RUN_SEED, STEP, rollout.position, turn) for turn in (0, 1)]
        assert [(call.path, call.turn, call.seed) for call in rollout.calls] == [
            ("", 0, seeds[0]),
            ("", 1, seeds[1]),
        ]
        assert {call.engine for call in rollout.calls} == {engine}
    ((told, *_),) = ran(held_out())
    assert [call.seed for call in told.calls] == [
        request_seed(RUN_SEED, STEP, 0, turn) for turn in (0, 1)
    ]


def test_a_rollout_says_what_it_is_worth_and_what_is_learned_of_it() -> None:
    (first, second), _ = ran(training(4, 1))
    said = [
        [request_seed(RUN_SEED, STEP, position, turn) % 4 for turn in (0, 1)] for position in (0, 1)
    ]
    assert [rollout.reward for rollout in (first, second)] == [sum(said[0]), sum(said[1])]
    assert first.metrics == {"crosses": first.reward}
    assert (first.error, first.is_truncated, first.num_turns, first.num_splits) == (
        None,
        False,
        2,
        0,
    )
    (example,) = first.examples
    assert (example.steps, example.weight_version, example.group_rewards) == (
        (0, 1),
        5,
        (first.reward, second.reward),
    )
    assert example.advantage == first.reward - (first.reward + second.reward) / 2
    assert first.num_tokens == example.num_learned == sum(said[0]) + 2 + 2, (
        "with an o and the stop token in each turn"
    )
    assert first.prompt == [{"role": "user", "content": "q4"}]
    assert [message["content"] for message in first.completion] == [
        "x" * said[0][0] + "o",
        "again 4",
        "x" * said[0][1] + "o",
    ]
    assert first.generate_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("compares", [False, True])
def test_results_do_not_depend_on_how_the_requests_are_cut_into_calls(compares: bool) -> None:
    requests = training(4, 1, 2, 0)
    runner = made(ScriptedEngines(by_seed, number=2), compares=compares)
    whole = asyncio.run(runner.run(requests))
    for cuts in ([1], [2], [1, 2, 3]):
        ends = [*cuts, len(requests)]
        parts = [
            asyncio.run(runner.run(requests[start:end]))
            for start, end in zip([0, *cuts], ends, strict=True)
        ]
        assert timeless([answer for part in parts for answer in part]) == timeless(whole)


@pytest.mark.parametrize("compares", [False, True])
def test_an_example_that_is_drawn_twice_in_a_round_makes_two_groups(compares: bool) -> None:
    answers = ran(training(4, 4, 1, 4), compares=compares)
    assert [[rollout.position for rollout in answer] for answer in answers] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    for answer in answers:
        rewards = tuple(rollout.reward for rollout in answer)
        for rollout in answer:
            assert rollout.examples[0].group_rewards == rewards
            assert rollout.examples[0].advantage == rollout.reward - sum(rewards) / len(rewards)


def test_two_rows_of_one_id_are_one_example_to_the_rubric_and_are_kept_apart(
    tmp_path: Path,
) -> None:
    """Ids are the environment's own to give."""
    source = """
from runner_environment import Echo, Rubric, crosses
def load_environment():
    rows = [{"question": f"q{n}", "example_id": "same"} for n in range(3)]
    return Echo("", None, dataset=rows, rubric=Rubric([crosses]))
"""
    (tmp_path / "same_ids.py").write_text(source)
    answers = ran(training(0, 1, 2), env_id=str(tmp_path / "same_ids.py"))
    assert [rollout.prompt[0]["content"] for rollout in flat(answers)] == [
        "q0",
        "q0",
        "q1",
        "q1",
        "q2",
        "q2",
    ]
    for answer in answers:
        assert {rollout.examples[0].group_rewards for rollout in answer} == {
            tuple(rollout.reward for rollout in answer)
        }


def test_a_held_out_report_is_of_the_evaluation_data_and_greedy() -> None:
    engines = ScriptedEngines(by_seed)
    answers = ran(held_out(), engines)
    assert [
        (rollout.position, rollout.example, rollout.prompt[0]["content"])
        for rollout in flat(answers)
    ] == [(0, 0, "q100"), (1, 1, "q101"), (2, 2, "q102")]
    assert {
        (request.decode.mode, request.decode.temperature) for _, request in engines.requests
    } == {(DecodeMode.GREEDY, 0.0)}
    assert {rollout.examples for rollout in flat(answers)} == {()}, "nothing is learned of it"


def test_a_rollout_that_is_too_long_is_truncated_and_keeps_what_was_sampled() -> None:
    """A prompt without room for a token is not asked for at all."""
    said = ran(training(4), ScriptedEngines(lambda _: Says((1,) * 8)), max_model_len=30)
    rollout, _ = said[0]
    assert (rollout.error, rollout.is_truncated, rollout.num_turns) == (None, True, 1)
    assert rollout.examples[0].num_learned == rollout.num_tokens > 0
    rollout, _ = ran(training(4), max_model_len=5)[0]
    assert (rollout.error, rollout.is_truncated, rollout.num_turns, rollout.examples) == (
        None,
        True,
        0,
        (),
    )


def test_messages_are_left_out_where_nobody_reads_them() -> None:
    answers = ran(training(4), keeps_messages=False)
    assert {(rollout.prompt, rollout.completion) for rollout in flat(answers)} == {(None, None)}
    assert all(rollout.examples for rollout in flat(answers))
    report = ran(held_out(), keeps_messages=False)
    assert all(rollout.prompt and rollout.completion for rollout in flat(report)), (
        "a report writes them down in any case"
    )


def test_messages_travel_as_json_whatever_an_environment_puts_into_them() -> None:
    rollout, _ = ran(training(4), trouble="odd")[0]
    assert rollout.error is None
    assert "object object at" in json.loads(json.dumps(rollout.completion))[1]["seen_by"]


def test_no_engine_has_more_requests_at_a_time_than_it_may() -> None:
    engines = ScriptedEngines(lambda request: replace(by_seed(request), delay_s=0.005), number=2)
    ran(training(0, 1, 2, 3), engines, max_under_way=3)
    assert engines.most_under_way == [3, 3]


# What fails


def test_a_rollouts_own_error_is_data() -> None:
    engines = ScriptedEngines(by_seed)
    answers = ran(training(4, 1), engines, trouble="fail", at=4)
    for rollout in answers[0]:
        assert (rollout.error, rollout.reward, rollout.examples, rollout.num_turns) == (
            "ZeroDivisionError: no such luck (runner_environment.py:48)",
            0.0,
            (),
            1,
        )
        assert rollout.completion[0]["role"] == "assistant", "what it had is kept"
    assert timeless(answers[1:]) == timeless(ran(training(1, first=1)))
    assert sorted(runner_environment.CLEANED[:4]) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_rollout_that_hangs_is_cut_off_and_the_other_groups_are_as_without_it() -> None:
    answers = ran(training(4, 1), trouble="sleep", at=4, rollout_timeout_s=1.0)
    assert [rollout.reward for rollout in answers[0]] == [0.0, 0.0] and all(
        not rollout.examples for rollout in answers[0]
    )
    assert {rollout.error for rollout in answers[0]} == {
        (
            "TimeoutError: not done after rollout_timeout_s = 1 s; check what its turns, tools and"
            " cleanups wait for, or allow more"
        )
    }
    assert timeless(answers[1:]) == timeless(ran(training(1, first=1)))


def test_a_reward_function_that_hangs_has_no_figure_at_its_limit() -> None:
    answers = ran(training(4), trouble="unjudged", scoring_timeout_s=0.05)
    for rollout in answers[0]:
        assert rollout.reward_errors["endless"].startswith(
            "TimeoutError: reward function endless is not done after scoring_timeout_s = 0.05 s"
        )


DEAD = RolloutError(
    "its process has ended; check its log", actor="rollout-actor-2", phase="generate"
)


def failing_at(position: int, error: Exception) -> Any:
    """The second turn of this position's rollout; the others are slow."""
    turns: Counter[int] = Counter()

    def script(request: RolloutRequest) -> Says | BaseException:
        turns[request.position] += 1
        is_second = turns[request.position] == 2
        if is_second and request.position == position:
            return error
        return replace(by_seed(request), delay_s=30.0 if is_second else 0.0)

    return script


@pytest.mark.parametrize("trouble", ["", "forgives"])
def test_an_engine_that_fails_ends_the_call_with_its_error_when_every_rollout_has_cleaned_up(
    trouble: str,
) -> None:
    """Also where the environment would have gone on: no rollout is blamed for it, or rewarded."""
    engines = ScriptedEngines(failing_at(3, DEAD), number=2)
    with pytest.raises(RolloutError, match="its process has ended; check its log") as caught:
        ran(training(4, 1, 2), engines, trouble=trouble)
    assert (caught.value.actor, caught.value.phase) == ("rollout-actor-2", "generate")
    assert sorted(runner_environment.CLEANED) == list(range(6))
    assert engines.num_under_way == [0, 0]
    assert engines.num_cancelled == 5


def test_what_an_engine_fails_with_unforeseen_is_no_rollouts_error() -> None:
    with pytest.raises(KeyError, match="request_id"):
        ran(training(4, 1), ScriptedEngines(failing_at(1, KeyError("request_id"))))
    assert sorted(runner_environment.CLEANED) == list(range(4))


class Unreachable(ScriptedEngines):
    """Servers of which these numbers are gone."""

    def __init__(self, number: int, gone: Sequence[int]) -> None:
        super().__init__(by_seed, number=number)
        self._gone = gone

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        if engine in self._gone:
            raise UnreachableError("no connection", actor=f"server-{engine}", phase="generate")
        return await super().generate(engine, request)


def test_what_a_server_cannot_be_asked_is_asked_of_the_next_one() -> None:
    """Decision 14: then on another server, with the same seeds."""
    answers = ran(training(4, 1), Unreachable(3, gone=[0, 1]))
    assert timeless(answers) == timeless(ran(training(4, 1)))


def test_when_no_server_can_be_asked_the_call_ends_with_the_last_ones_name() -> None:
    with pytest.raises(UnreachableError, match=r"generate on server-\d: no connection"):
        ran(training(4, 1), Unreachable(2, gone=[0, 1]))


def test_an_engine_that_answers_another_prompt_ends_the_call() -> None:
    """What it sampled is of no prompt that anybody has."""

    class Confused(ScriptedEngines):
        async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
            rollout = await super().generate(engine, request)
            return (
                replace(rollout, prompt_token_ids=rollout.prompt_token_ids[1:])
                if request.position == 3
                else rollout
            )

    with pytest.raises(
        RolloutError,
        match=(
            "check on actor-1: answered another prompt than the one of example 1; engines must have"
            " the tokenizer"
        ),
    ):
        ran(training(4, 1), Confused(by_seed, number=2))


def test_a_call_that_is_cancelled_ends_its_rollouts_which_clean_up() -> None:
    engines = ScriptedEngines(lambda request: replace(by_seed(request), delay_s=30.0))

    async def cancelled() -> None:
        running = asyncio.ensure_future(made(engines).run(training(4, 1)))
        while engines.num_under_way != [4]:
            await asyncio.sleep(0.001)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(cancelled())
    assert sorted(runner_environment.CLEANED) == [0, 1, 2, 3]
    assert (engines.num_cancelled, engines.num_under_way) == (4, [0])


def test_a_runner_that_failed_once_can_be_asked_again() -> None:
    """Whatever one call came to is of that call alone."""
    calls = iter([DEAD])
    runner = made(ScriptedEngines(lambda request: next(calls, None) or by_seed(request)))
    with pytest.raises(RolloutError):
        asyncio.run(runner.run(training(4)))
    assert timeless(asyncio.run(runner.run(training(4)))) == timeless(ran(training(4)))


def test_a_teardown_that_raises_is_told_and_keeps_no_other_from_its_turn() -> None:
    runner = made(ScriptedEngines(by_seed), trouble="teardown")
    with pytest.raises(ZeroDivisionError, match="no such luck at the end"):
        asyncio.run(runner.aclose())
    assert runner_environment.TORN_DOWN == ["runner_environment"]
    asyncio.run(runner.aclose())
    assert runner_environment.TORN_DOWN == ["runner_environment"], "once"


# What the template asks for


def test_the_chat_template_gets_the_arguments_of_the_configuration() -> None:
    tokenizer = demo_tokenizer("{{ mood }}: " + CHATML)
    engines = ScriptedEngines(by_seed)
    ran(training(4), engines, tokenizer=tokenizer, chat_template_args={"mood": "kind"})
    assert all(tokenizer.decode(prompt).startswith("kind:") for prompt in engines.prompts)


def test_an_environment_may_say_of_the_template_what_the_configuration_says_and_nothing_else() -> (
    None
):
    """Endpoints need to be told; the run's engines have been."""
    engines, mood = (
        ScriptedEngines(by_seed),
        {"extra_body": {"chat_template_kwargs": {"mood": "kind"}}},
    )
    given = {"tokenizer": demo_tokenizer("{{ mood }}: " + CHATML), "sampling_args": mood}
    assert {
        rollout.error
        for rollout in flat(ran(training(4), engines, chat_template_args={"mood": "kind"}, **given))
    } == {None}
    asked = len(engines.requests)
    told = (
        r"sampling_args of runner_environment: chat_template_kwargs: {'mood': 'kind'} was asked"
        r" for, and this run has {'mood': 'grim'}"
    )
    with pytest.raises(RolloutError, match=told):
        ran(training(4), engines, chat_template_args={"mood": "grim"}, **given)
    assert len(engines.requests) == asked


# What no rollout could do


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampling_args", "told"),
    [
        (
            {"temperature": 0.7},
            (
                "temperature: 0.7 was asked for, and this run has 1.0; leave it out, or change what"
                " the run has"
            ),
        ),
        ({"top_p": 0.9}, "top_p: 0.9 was asked for, and this run has 1.0"),
        (
            {"max_tokens": 99},
            "max_tokens: must be a whole number from 1 to the run's max_new_tokens = 16, got 99",
        ),
        ({"extra_body": {"top_k": 4}}, "top_k: 4 was asked for, and this run has -1"),
        ({"seed": 3}, "seed: the engines of a run take no such sampling argument"),
    ],
)
@pytest.mark.parametrize("grouped", [False, True])
def test_an_environment_whose_sampling_arguments_contradict_the_run_fails_before_anything_is_asked(
    sampling_args: dict[str, Any], told: str, grouped: bool
) -> None:
    engines = ScriptedEngines(by_seed)
    with pytest.raises(RolloutError) as caught:
        ran(training(4), engines, sampling_args=sampling_args, grouped=grouped)
    assert (
        "environment on environment-1: sampling_args of"
        f" {'Echo' if grouped else 'runner_environment'}: {told}" in str(caught.value)
    )
    assert engines.requests == []


def test_sampling_arguments_that_agree_with_the_run_are_taken() -> None:
    engines = ScriptedEngines(by_seed)
    ran(training(4), engines, sampling_args={"temperature": 1.0, "max_tokens": 5})
    assert {request.decode.max_new_tokens for _, request in engines.requests} == {5}


@pytest.mark.parametrize("grouped", [False, True])
def test_a_report_is_greedy_though_the_environment_asks_for_the_runs_temperature(
    grouped: bool,
) -> None:
    engines = ScriptedEngines(by_seed)
    answers = ran(
        held_out(6 if grouped else 3),
        engines,
        sampling_args={"temperature": 1.0, "max_tokens": 5},
        grouped=grouped,
    )
    assert {rollout.error for rollout in flat(answers)} == {None}
    assert {request.decode.temperature for _, request in engines.requests} == {0.0}


PICTURE = png(8, 8)
IMAGE = "data:image/png;base64," + base64.b64encode(PICTURE).decode()


@pytest.mark.parametrize("requests", [training(4), held_out()], ids=["training", "held out"])
def test_more_images_than_the_run_was_configured_for_end_the_call(
    requests: list[EnvironmentRequest],
) -> None:
    engines = ScriptedEngines(by_seed)
    told = (
        r"environment on environment-1: example (4|10\d) shows 1 image in a prompt, and"
        r" environment.max_images_per_prompt is 0; set it to 1 or more"
    )
    with pytest.raises(RolloutError, match=told):
        ran(requests, engines, tokenizer=demo_tokenizer(CHAT_TEMPLATE), image=IMAGE)
    assert engines.requests == []


def test_an_example_brings_the_images_that_its_tokens_have_placeholders_of_and_what_is_written_down_names_them() -> (
    None
):
    (rollouts,) = ran(
        training(4), tokenizer=demo_tokenizer(CHAT_TEMPLATE), image=IMAGE, max_images=1
    )
    for rollout in rollouts:
        assert [image.data for example in rollout.examples for image in example.images] == [PICTURE]
        assert IMAGE not in str(
            rollout.prompt
        ) and f"data:image/png, {len(PICTURE)} bytes, sha256 of the URL" in str(rollout.prompt)


def test_a_prompt_that_only_its_images_make_too_long_ends_its_rollouts_alone() -> None:
    """The client counts an image as one token, and only the engine knows how many it is."""
    refusal = "sample 4 was refused: it is longer than the maximum model length of 512"
    error = RolloutError(refusal, actor="actor-0", phase="generate")
    (rollouts,) = ran(
        training(4),
        ScriptedEngines(lambda _: error),
        tokenizer=demo_tokenizer(CHAT_TEMPLATE),
        image=IMAGE,
        max_images=1,
    )
    for rollout in rollouts:
        assert (rollout.error, rollout.is_truncated, rollout.num_turns) == (None, True, 0)


PICTURES = """
import base64
from rollout_actors.environments import MultiTurnEnv, Rubric, cleanup
from scene_support import png

def shown(number):
    url = "data:image/png;base64," + base64.b64encode(png(8 + number, 8)).decode()
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]}

class Keeping(MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [shown(10 + state["example_id"])]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        return [messages[-1]] if FORGETS else messages

    @cleanup
    async def keep_less(self, state):  # pictures are large
        for step in state["trajectory"]:
            if state["example_id"] == 1:
                step["prompt"] = KEPT

def load_environment(kept, forgets=False):
    global KEPT, FORGETS
    KEPT, FORGETS = kept, forgets
    return Keeping(dataset=[{"prompt": [shown(number)], "example_id": number} for number in range(2)], rubric=Rubric([lambda state: 1.0]), max_turns=2)
"""
NAMED = [
    {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": "s3://pictures/1.png"}}],
    }
]


@pytest.mark.parametrize(
    "kept",
    [NAMED, "a picture", [], [{"role": "user", "content": [{"type": "file"}]}]],
    ids=["named", "text", "none", "odd"],
)
def test_images_of_an_example_are_those_that_were_sent_whatever_the_environment_keeps_of_its_prompts(
    tmp_path: Path, kept: Any
) -> None:
    (tmp_path / "keeping.py").write_text(PICTURES)
    answers = ran(
        training(0, 1),
        env_id=str(tmp_path / "keeping.py"),
        tokenizer=demo_tokenizer(CHAT_TEMPLATE),
        max_images=2,
        kept=kept,
    )
    for rollout in flat(answers):
        (example,) = rollout.examples
        assert (rollout.error, example.steps) == (None, (0, 1))
        assert [image.data for image in example.images] == [
            png(8 + rollout.example, 8),
            png(18 + rollout.example, 8),
        ]


class Blind(ScriptedEngines):
    """Answers a prompt that splits the rollout with the tokens that it had before and more: of
    other images.
    """

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        rollout = await super().generate(engine, request)
        before = next(
            earlier for _, earlier in self.requests if earlier.position == request.position
        )
        return (
            rollout
            if before is request
            else replace(
                rollout,
                prompt_token_ids=(
                    *rollout_of(before, by_seed(before)).prompt_token_ids,
                    *self.sampled(before),
                ),
            )
        )

    def sampled(self, request: RolloutRequest) -> tuple[int, ...]:
        rollout = rollout_of(request, by_seed(request))
        return (*rollout.response_token_ids, rollout.stop_token_id or 0, *request.prompt_token_ids)


@pytest.mark.parametrize("kept", [NAMED, "a picture"], ids=["named", "text"])
def test_calls_that_were_sent_other_images_are_examples_of_their_own_though_what_is_kept_is_the_same(
    tmp_path: Path, kept: Any
) -> None:
    """Of the same tokens, and more."""
    (tmp_path / "keeping.py").write_text(PICTURES)
    changes = {
        "env_id": str(tmp_path / "keeping.py"),
        "tokenizer": demo_tokenizer(CHAT_TEMPLATE),
        "max_images": 1,
    }
    for rollout in flat(ran(training(0, 1), Blind(by_seed), kept=kept, forgets=True, **changes)):
        assert (rollout.error, [example.steps for example in rollout.examples]) == (
            None,
            [(0,), (1,)],
        )
        sent = [[image.data for image in example.images] for example in rollout.examples]
        assert sent == [[png(8 + rollout.example, 8)], [png(18 + rollout.example, 8)]]


def test_a_picture_that_cannot_be_read_is_the_error_of_its_rollouts_alone(tmp_path: Path) -> None:
    (tmp_path / "torn.py").write_text(
        "from rollout_actors.environments import Rubric, SingleTurnEnv\nshown = [{'type':"
        " 'image_url', 'image_url': {'url': 'data:image/png;base64,dG9ybg=='}}]\ndef"
        " load_environment():\n    rows = [{'prompt': [{'role': 'user', 'content': content}],"
        " 'example_id': n} for n, content in enumerate(['q', shown])]\n    return"
        " SingleTurnEnv(dataset=rows, rubric=Rubric([lambda completion: 1.0]))\n"
    )
    sound, torn = ran(
        training(0, 1),
        env_id=str(tmp_path / "torn.py"),
        tokenizer=demo_tokenizer(CHAT_TEMPLATE),
        max_images=1,
    )
    assert [rollout.error for rollout in sound] == [None, None]
    for rollout in torn:
        assert rollout.examples == () and rollout.error is not None
        assert rollout.error.startswith(
            "ValueError: image_url: 'data:image/png;base64,dG9ybg=='... cannot be decoded: it is of"
            " no format that is known; send"
        )


# The beginning


def test_examples_are_counted_and_a_report_may_be_of_fewer() -> None:
    assert count_examples(load_environment("runner_environment"), None) == ExampleCounts(6, 3)
    assert count_examples(load_environment("runner_environment"), 2) == ExampleCounts(6, 2)
    assert count_examples(load_environment("runner_environment"), 0) == ExampleCounts(6, 0)
    assert count_examples(load_environment("runner_environment"), 9) == ExampleCounts(6, 3)
    assert count_examples(
        load_environment("runner_environment", num_eval_rows=None), None
    ) == ExampleCounts(6, 0), "not those that it is trained on"
    with pytest.raises(ValueError, match="runner_environment has a dataset without rows"):
        count_examples(load_environment("runner_environment", num_rows=0), None)


def test_an_environment_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(
        ValueError, match=r"no environment 'copy_digit' \(did you mean copy_digits\?\)"
    ):
        made(ScriptedEngines(by_seed), env_id="copy_digit")
    with pytest.raises(ValueError, match="num_row"):
        made(ScriptedEngines(by_seed), num_row=3)


TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize(("grouped", "name"), [(False, "runner_environment"), (True, "Echo")])
def test_an_environment_with_tools_whose_calls_nobody_reads_is_refused_at_its_start(
    grouped: bool, name: str
) -> None:
    told = (
        rf"^environment\.tool_call_parser: {name} has tools, and neither this key nor .* says how"
        r" the model's calls are read; set it to .* hermes$"
    )
    with pytest.raises(ValueError, match=told):
        made(ScriptedEngines(by_seed), oai_tools=[TOOL], grouped=grouped)


@pytest.mark.engine
def test_a_parser_of_tool_calls_that_vllm_does_not_know_is_refused_at_the_start() -> None:
    with pytest.raises(
        ValueError, match=r"^environment\.tool_call_parser: vLLM has none of the name 'hermez'"
    ):
        made(ScriptedEngines(by_seed), oai_tools=[TOOL], tool_parser="hermez")
    made(ScriptedEngines(by_seed), oai_tools=[TOOL], tool_parser="hermes")


def test_the_tokenizer_is_the_checkpoints_with_its_template(tmp_path: Path) -> None:
    make_demo_lm(tmp_path / "model", seed=17)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "last"}], tokenize=False)
        == "<|im_start|>user\nlast<|im_end|>"
    )


def test_a_stop_token_that_was_not_sampled_is_not_learned() -> None:
    """As where an answer came to its limit: the turn's last token is the model's."""
    engines = ScriptedEngines(
        lambda request: Says(
            (1, 2, 3),
            finish_reason=FinishReason.LENGTH,
            version=rollout_of(request, Says(())).weight_version,
        )
    )
    rollout, _ = ran(training(4), engines)[0]
    assert (rollout.num_tokens, rollout.num_length_limited) == (6, 2)
    assert sum(example.num_learned for example in rollout.examples) == 6


def test_an_environment_whose_rows_differ_from_process_to_process_is_refused_at_its_start():
    def rows(*words: str) -> SingleTurnEnv:
        return SingleTurnEnv(
            dataset=[{"question": word} for word in words], eval_dataset=[{"question": "z"}]
        )

    found = count_examples(rows("a", "b", "c"), None)
    require_same(count_examples(rows("a", "b", "c"), None), found, "words")
    with pytest.raises(
        ValueError,
        match=(
            "environment words: found other rows than before the start; make them the same in every"
            " process: seed what is random"
        ),
    ):
        require_same(count_examples(rows("b", "a", "c"), None), found, "words")
    with pytest.raises(
        ValueError,
        match=(
            "found 2 rows to train on and 1 held out, and before the start 3 rows to train on and 1"
            " held out"
        ),
    ):
        require_same(count_examples(rows("a", "b"), None), found, "words")
    with pytest.raises(ValueError, match="runner_environment: found"):
        made(ScriptedEngines(by_seed), examples=found)
