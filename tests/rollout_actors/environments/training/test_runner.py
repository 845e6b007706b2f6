"""A step's examples as rollouts of an environment, by engines that answer by a script (decisions
10, 12, 14, 17 and 41).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import runner_environment
from counted_time import counted
from environment_support import picture
from scene_support import png
from scripted_engines import (
    CHATML,
    Says,
    ScriptedEngines,
    decode_settings,
    demo_tokenizer,
    group_requests,
)

from launch.tools.demo.model import CHAT_TEMPLATE
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.multi_turn import SingleTurnEnv
from rollout_actors.environments.training.runner import (
    EnvironmentRunner,
    RunnerSettings,
    count_examples,
    require_same,
)
from shared.errors import RolloutError, UnreachableError
from shared.rollouts import DecodeMode, FinishReason, Rollout, RolloutRequest
from shared.seeds import request_seed
from shared.trajectory import (
    EnvironmentRequest,
    EnvironmentRollout,
    ExampleCounts,
    ExampleGroup,
    TrainingExample,
)

RUN_SEED = 7
STEP = 3
TOKENIZER = demo_tokenizer(CHATML)
VISION = demo_tokenizer(CHAT_TEMPLATE)
GREEDY = decode_settings(TOKENIZER, mode=DecodeMode.GREEDY, temperature=0.0, max_new_tokens=16)
SETTINGS = RunnerSettings("runner_environment", "model", max_model_len=512, max_under_way=64)
ERROR_LINE = " (runner_environment.py:48)"
Answers = Sequence[Sequence[EnvironmentRollout]]


@pytest.fixture(autouse=True)
def _nothing_noted() -> None:
    runner_environment.CLEANED.clear()


def by_seed(request: RolloutRequest) -> Says:
    """Say as many `x` as the seed says: siblings differ."""
    word = "x" * (request.seed % 4) + "o"
    return Says(TOKENIZER.encode(word, add_special_tokens=False), version=5)


def runner_over(engines: Any, *, tokenizer: Any = TOKENIZER, **changes: Any) -> EnvironmentRunner:
    """`changes` are of the settings; what is none of them is an argument of the environment."""
    known = {field.name for field in fields(RunnerSettings)}
    env_args = {name: value for name, value in changes.items() if name not in known}
    of_settings = {name: value for name, value in changes.items() if name in known}
    settings = replace(SETTINGS, env_args=env_args, **of_settings)
    return EnvironmentRunner("environment-1", settings, engines, tokenizer)


def held_out(number: int = 3) -> list[EnvironmentRequest]:
    groups = tuple(ExampleGroup(index, range(index, index + 1)) for index in range(number))
    return [EnvironmentRequest(STEP, groups, GREEDY, RUN_SEED, is_held_out=True)]


def ran(
    requests: Sequence[EnvironmentRequest], engines: Any = None, **changes: Any
) -> list[tuple[EnvironmentRollout, ...]]:
    return asyncio.run(runner_over(engines or ScriptedEngines(by_seed), **changes).run(requests))


def flat(answers: Answers) -> list[EnvironmentRollout]:
    return [rollout for answer in answers for rollout in answer]


def timeless(answers: Answers) -> list[EnvironmentRollout]:
    return [replace(rollout, started_s=0.0, generate_s=0.0) for rollout in flat(answers)]


def images_of(example: TrainingExample) -> list[bytes | None]:
    return [image.data for image in example.images]


def ending(rollout: EnvironmentRollout) -> tuple[str | None, bool, int]:
    return rollout.error, rollout.is_truncated, rollout.num_turns


# What comes back


@pytest.mark.parametrize(
    "requests", [group_requests(4, 1, first=3), held_out()], ids=["step", "report"]
)
def test_a_rollout_says_with_which_seeds_its_calls_were_asked_and_who_answered(requests):
    engines = ScriptedEngines(by_seed, number=3)
    answers = ran(requests, engines)
    for rollout in flat(answers):
        seeds = [request_seed(RUN_SEED, STEP, rollout.position, turn) for turn in (0, 1)]
        assert [(call.path, call.turn, call.seed) for call in rollout.calls] == [
            ("", 0, seeds[0]),
            ("", 1, seeds[1]),
        ]
        assert {call.engine for call in rollout.calls} == {f"actor-{rollout.position % 3}"}
    asked = sorted((request.position, request.seed) for _, request in engines.requests)
    assert asked == sorted(
        (rollout.position, call.seed) for rollout in flat(answers) for call in rollout.calls
    )


def test_a_rollout_says_what_it_is_worth_and_what_is_learned_of_it():
    (first, second), _ = ran(group_requests(4, 1))
    crosses = [
        [request_seed(RUN_SEED, STEP, position, turn) % 4 for turn in (0, 1)] for position in (0, 1)
    ]
    rewards = (sum(crosses[0]), sum(crosses[1]))
    assert (first.reward, second.reward) == rewards
    assert first.metrics == {"crosses": first.reward}
    assert (*ending(first), first.num_splits) == (None, False, 2, 0)
    (example,) = first.examples
    assert (example.steps, example.weight_version) == ((0, 1), 5)
    assert example.group_rewards == rewards
    assert example.advantage == first.reward - sum(rewards) / 2
    # With an o and the stop token in each turn.
    assert first.num_tokens == example.num_learned == rewards[0] + 2 + 2
    assert first.prompt == [{"role": "user", "content": "q4"}]
    assert [message["content"] for message in first.completion] == [
        "x" * crosses[0][0] + "o",
        "again 4",
        "x" * crosses[0][1] + "o",
    ]
    assert first.generate_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("compares", [False, True])
def test_results_do_not_depend_on_how_the_requests_are_cut_into_calls(compares):
    requests = group_requests(4, 1, 2, 0)
    runner = runner_over(ScriptedEngines(by_seed, number=2), compares=compares)
    whole = asyncio.run(runner.run(requests))
    for cuts in ([0, 1, 4], [0, 2, 4], [0, 1, 2, 3, 4]):
        parts = [requests[start:end] for start, end in pairwise(cuts)]
        answers = [answer for part in parts for answer in asyncio.run(runner.run(part))]
        assert timeless(answers) == timeless(whole)


@pytest.mark.parametrize("compares", [False, True])
def test_an_example_that_is_drawn_twice_in_a_round_makes_two_groups(compares):
    answers = ran(group_requests(4, 4, 1, 4), compares=compares)
    positions = [[rollout.position for rollout in answer] for answer in answers]
    assert positions == [[0, 1], [2, 3], [4, 5], [6, 7]]
    for answer in answers:
        rewards = tuple(rollout.reward for rollout in answer)
        for rollout in answer:
            assert rollout.examples[0].group_rewards == rewards
            assert rollout.examples[0].advantage == rollout.reward - sum(rewards) / len(rewards)


def test_a_rubric_that_scores_at_once_sees_all_rollouts_of_the_step_whatever_was_drawn_twice():
    answers = ran(group_requests(4, 4, 1, 4), ranks=True)
    words = [rollout.completion for rollout in flat(answers)]
    crosses = [runner_environment.crosses(completion) for completion in words]
    rewards = [rollout.reward for rollout in flat(answers)]
    assert rewards == [sum(other < count for other in crosses) for count in crosses]
    assert len(set(rewards)) > 2
    assert {rollout.metrics["num_scored"] for rollout in flat(answers)} == {8.0}
    for answer in answers:
        of_group = tuple(rollout.reward for rollout in answer)
        for rollout in answer:
            assert rollout.examples[0].group_rewards == of_group
            assert rollout.examples[0].advantage == rollout.reward - sum(of_group) / 2
    assert {one.metrics["num_scored"] for one in flat(ran(held_out(), ranks=True))} == {3.0}


@pytest.mark.parametrize("grouped", [False, True])
def test_a_report_is_of_the_evaluation_data_and_greedy_though_the_environment_asks_for_a_temperature(
    grouped,
):
    engines = ScriptedEngines(by_seed)
    sampling_args = {"temperature": 1.0, "max_tokens": 5}
    requests = held_out(6 if grouped else 3)
    answers = flat(ran(requests, engines, sampling_args=sampling_args, grouped=grouped))
    expected = [(index, index, f"q{100 + index % 3}") for index in range(len(answers))]
    assert expected == [
        (rollout.position, rollout.example, rollout.prompt[0]["content"]) for rollout in answers
    ]
    assert {(rollout.error, rollout.examples) for rollout in answers} == {(None, ())}
    decodes = [request.decode for _, request in engines.requests]
    assert {(one.mode, one.temperature) for one in decodes} == {(DecodeMode.GREEDY, 0.0)}


def test_a_report_of_fewer_rows_than_a_group_has_is_of_each_environment_and_says_whose_each_is():
    answers = flat(ran(held_out(4), grouped=True, num_held_out=4))
    assert Counter(rollout.task for rollout in answers) == {"plain": 2, "other": 2}
    assert {rollout.task for rollout in flat(ran(held_out()))} == {None}


def test_a_rollout_that_is_too_long_is_truncated_and_keeps_what_was_sampled():
    """A prompt without room for a token is not asked for at all."""
    ((rollout, _),) = ran(
        group_requests(4), ScriptedEngines(lambda _: Says((1,) * 8)), max_model_len=30
    )
    assert ending(rollout) == (None, True, 1)
    assert rollout.examples[0].num_learned == rollout.num_tokens > 0
    ((rollout, _),) = ran(group_requests(4), max_model_len=5)
    assert (*ending(rollout), rollout.examples) == (None, True, 0, ())
    assert rollout.is_overlong


def test_a_stop_token_that_was_not_sampled_is_not_learned():
    says = Says((1, 2, 3), finish_reason=FinishReason.LENGTH)
    ((rollout, _),) = ran(group_requests(4), ScriptedEngines(lambda _: says))
    assert (rollout.num_tokens, rollout.num_length_limited) == (6, 2)
    assert (rollout.is_truncated, rollout.is_overlong) == (True, False)
    assert sum(example.num_learned for example in rollout.examples) == 6


def test_messages_are_left_out_where_nobody_reads_them():
    for rollout in flat(ran(group_requests(4), keeps_messages=False)):
        assert (rollout.prompt, rollout.completion) == (None, None)
        assert rollout.examples
    for rollout in flat(ran(held_out(), keeps_messages=False)):
        assert rollout.prompt and rollout.completion, "a report writes them down in any case"


def test_no_engine_has_more_requests_at_a_time_than_it_may():
    engines = ScriptedEngines(lambda request: replace(by_seed(request), delay_s=0.005), number=2)
    ran(group_requests(0, 1, 2, 3), engines, max_under_way=3)
    assert engines.most_under_way == [3, 3]


# What fails


def test_a_rollouts_own_error_is_data():
    failed, *others = ran(group_requests(4, 1), trouble="fail", at=4)
    for rollout in failed:
        assert ending(rollout) == ("ZeroDivisionError: no such luck" + ERROR_LINE, False, 1)
        assert (rollout.reward, rollout.examples) == (0.0, ())
        assert rollout.completion[0]["role"] == "assistant", "what it had is kept"
    assert sorted(runner_environment.CLEANED) == [0, 1, 2, 3]
    assert timeless(others) == timeless(ran(group_requests(1, first=1)))


DEAD = RolloutError("its process has ended", actor="rollout-actor-2", phase="generate")


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


@pytest.mark.parametrize(
    ("error", "trouble"),
    [(DEAD, ""), (DEAD, "forgives"), (KeyError("request_id"), "")],
    ids=["its process ends", "the environment would have gone on", "unforeseen"],
)
def test_an_engine_that_fails_ends_the_call_with_its_error_when_every_rollout_has_cleaned_up(
    error, trouble
):
    """No rollout is blamed for it, or rewarded."""
    engines = ScriptedEngines(failing_at(3, error), number=2)
    with pytest.raises(type(error)) as caught:
        ran(group_requests(4, 1, 2), engines, trouble=trouble)
    assert caught.value is error
    assert sorted(runner_environment.CLEANED) == list(range(6))
    assert engines.num_under_way == [0, 0]
    assert engines.num_cancelled == 5


class Unreachable(ScriptedEngines):
    """Three servers, of which these are gone."""

    def __init__(self, *gone: int) -> None:
        super().__init__(by_seed, number=3)
        self._gone = gone

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        if engine in self._gone:
            raise UnreachableError("no connection", actor=f"server-{engine}", phase="generate")
        return await super().generate(engine, request)


def test_what_a_server_cannot_be_asked_is_asked_of_the_next_one_and_the_last_one_ends_the_call():
    """Decision 14: then on another server, with the same seeds."""
    answers = flat(ran(group_requests(4, 1), Unreachable(0, 1)))
    assert {call.engine for rollout in answers for call in rollout.calls} == {"actor-2"}
    rewards = [rollout.reward for rollout in answers]
    assert rewards == [rollout.reward for rollout in flat(ran(group_requests(4, 1)))]
    with pytest.raises(UnreachableError, match=r"generate on server-\d: no connection"):
        ran(group_requests(4, 1), Unreachable(0, 1, 2))


# What the run has fixed


def test_the_models_prompt_begins_with_the_configurations_system_prompt():
    engines = ScriptedEngines(by_seed)
    answers = ran(group_requests(4), engines, system_prompt="Think first.")
    assert {rollout.error for rollout in flat(answers)} == {None}
    prompts = [TOKENIZER.decode(prompt) for prompt in engines.prompts]
    assert all(one.startswith("<|im_start|>system\nThink first.<|im_end|>") for one in prompts)


def test_the_template_gets_the_configurations_arguments_and_an_environment_may_say_no_others():
    """Endpoints need to be told; the run's engines have been."""
    tokenizer = demo_tokenizer("{{ mood }}: " + CHATML)
    asking = {"extra_body": {"chat_template_kwargs": {"mood": "kind"}}}
    changes = {"tokenizer": tokenizer, "sampling_args": asking}
    engines = ScriptedEngines(by_seed)
    answers = ran(group_requests(4), engines, chat_template_args={"mood": "kind"}, **changes)
    assert {rollout.error for rollout in flat(answers)} == {None}
    assert all(tokenizer.decode(prompt).startswith("kind:") for prompt in engines.prompts)
    message = (
        r"sampling_args of runner_environment: chat_template_kwargs: got {'mood': 'kind'}, but this run"
        r" has {'mood': 'grim'}"
    )
    with pytest.raises(RolloutError, match=message):
        ran(group_requests(4), ScriptedEngines([]), chat_template_args={"mood": "grim"}, **changes)


@pytest.mark.parametrize(("grouped", "name"), [(False, "runner_environment"), (True, "Echo")])
def test_an_environment_whose_sampling_arguments_contradict_the_run_fails_before_anything_is_asked(
    grouped, name
):
    engines = ScriptedEngines([])
    message = (
        f"environment on environment-1: sampling_args of {name}: temperature: got 0.7, but this"
        " run has 1.0; leave it out, or change the value of the run"
    )
    with pytest.raises(RolloutError, match=message):
        ran(group_requests(4), engines, sampling_args={"temperature": 0.7}, grouped=grouped)
    assert engines.requests == []


# Images

PICTURE = png(8, 8)
SHOWING = {"tokenizer": VISION, "image": PICTURE}


@pytest.mark.parametrize("requests", [group_requests(4), held_out()], ids=["training", "held out"])
def test_more_images_than_the_run_was_configured_for_end_the_call(requests):
    engines = ScriptedEngines([])
    message = (
        r"environment on environment-1: example (4|10\d) shows 1 image in a prompt, and"
        r" environment.max_images_per_prompt is 0; set it to 1 or more"
    )
    with pytest.raises(RolloutError, match=message):
        ran(requests, engines, **SHOWING)
    assert engines.requests == []


def test_an_example_brings_the_images_that_its_tokens_have_placeholders_of_and_what_is_written_down_names_them():
    url = picture(PICTURE)["image_url"]["url"]
    for rollout in flat(ran(group_requests(4), max_images=1, **SHOWING)):
        assert [images_of(example) for example in rollout.examples] == [[PICTURE]]
        assert url not in str(rollout.prompt)
        assert f"data:image/png, {len(PICTURE)} bytes, sha256 of the URL" in str(rollout.prompt)


PICTURES = """
from environment_support import shown
from rollout_actors.environments import MultiTurnEnv, Rubric, cleanup
from scene_support import png

class Keeping(MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [shown(png(18 + state["example_id"], 8))]

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
    rows = [{"prompt": [shown(png(8 + n, 8))], "example_id": n} for n in range(2)]
    return Keeping(dataset=rows, rubric=Rubric([lambda state: 1.0]), max_turns=2)
"""
KEPT_URL = {"type": "image_url", "image_url": {"url": "s3://pictures/1.png"}}
NAMED = [{"role": "user", "content": [KEPT_URL]}]


@pytest.fixture
def keeping(tmp_path: Path) -> dict[str, Any]:
    """An environment that keeps `kept` of its prompts, and may forget the first turn."""
    path = tmp_path / "keeping.py"
    path.write_text(PICTURES)
    return {"env_id": str(path), "tokenizer": VISION, "max_images": 2}


@pytest.mark.parametrize(
    "kept",
    [NAMED, "a picture", [], [{"role": "user", "content": [{"type": "file"}]}]],
    ids=["named", "text", "none", "odd"],
)
def test_images_of_an_example_are_those_that_were_sent_whatever_the_environment_keeps_of_its_prompts(
    keeping, kept
):
    for rollout in flat(ran(group_requests(0, 1), kept=kept, **keeping)):
        (example,) = rollout.examples
        assert (rollout.error, example.steps) == (None, (0, 1))
        assert images_of(example) == [png(8 + rollout.example, 8), png(18 + rollout.example, 8)]


def test_a_picture_that_cannot_be_read_is_the_error_of_its_rollouts_alone(tmp_path):
    source = """
from environment_support import shown, user
from rollout_actors.environments import Rubric, SingleTurnEnv
def load_environment():
    rows = [{"prompt": [message], "example_id": n} for n, message in enumerate([user("q"), shown(b"torn")])]
    return SingleTurnEnv(dataset=rows, rubric=Rubric([lambda completion: 1.0]))
"""
    (tmp_path / "torn.py").write_text(source)
    changes = {"env_id": str(tmp_path / "torn.py"), "tokenizer": VISION, "max_images": 1}
    sound, torn = ran(group_requests(0, 1), **changes)
    assert [rollout.error for rollout in sound] == [None, None]
    message = "ValueError: image_url: 'data:image/png;base64,dG9ybg=='... cannot be decoded: its format is not known"
    for rollout in torn:
        assert rollout.examples == ()
        assert (rollout.error or "").startswith(message)


# The beginning


def test_examples_are_counted_and_a_report_may_be_of_fewer():
    environment = load_environment("runner_environment")
    for num_held_out, expected in ((None, 3), (2, 2), (0, 0), (9, 3)):
        assert count_examples(environment, num_held_out) == ExampleCounts(6, expected)
    without = load_environment("runner_environment", num_eval_rows=None)
    assert count_examples(without, None) == ExampleCounts(6, 0), "not those of the training"
    at_once = load_environment("runner_environment", ranks=True)
    assert count_examples(at_once, None).scores_at_once
    with pytest.raises(ValueError, match="runner_environment has a dataset without rows"):
        count_examples(load_environment("runner_environment", num_rows=0), None)


PARAMETERS = {"type": "object", "properties": {}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}


@pytest.mark.parametrize(("grouped", "name"), [(False, "runner_environment"), (True, "Echo")])
def test_an_environment_with_tools_whose_calls_nobody_reads_is_refused_at_its_start(grouped, name):
    message = (
        rf"^environment\.tool_call_parser: {name} has tools, but neither this key nor .* names"
        r" a parser for the model's calls; set it to .* hermes$"
    )
    with pytest.raises(ValueError, match=message):
        runner_over(ScriptedEngines([]), oai_tools=[TOOL], grouped=grouped)


@pytest.mark.engine
def test_a_parser_of_tool_calls_that_vllm_does_not_know_is_refused_at_the_start():
    message = r"^environment\.tool_call_parser: vLLM has no parser 'hermez'"
    with pytest.raises(ValueError, match=message):
        runner_over(ScriptedEngines([]), oai_tools=[TOOL], tool_parser="hermez")
    runner_over(ScriptedEngines([]), oai_tools=[TOOL], tool_parser="hermes")


def test_an_environment_whose_rows_differ_from_process_to_process_is_refused_at_its_start():
    def counts_of(words: str) -> ExampleCounts:
        rows = [{"question": word} for word in words]
        return count_examples(SingleTurnEnv(dataset=rows, eval_dataset=[{"question": "z"}]), None)

    found = counts_of("abc")
    require_same(counts_of("abc"), found, "words")
    message = (
        "environment words: this process found other rows than the driver; make the rows the same"
        " in every process: seed random draws"
    )
    with pytest.raises(ValueError, match=message):
        require_same(counts_of("bac"), found, "words")
    message = "found 2 rows to train on and 1 held out, and the driver 3 rows to train on and 1"
    with pytest.raises(ValueError, match=message):
        require_same(counts_of("ab"), found, "words")
    with pytest.raises(ValueError, match="runner_environment: this process found"):
        runner_over(ScriptedEngines([]), examples=found)


def test_rows_with_another_info_are_other_rows():
    def digest_of(*info: object) -> str:
        rows = [{"question": "a", "info": one} for one in info]
        return count_examples(SingleTurnEnv(dataset=rows), None).digest

    # A key that JSON does not have must not end the run.
    odd = {"tests": [1], (0, 1): "x", "set": {1, 2}}
    assert digest_of(odd) == digest_of(dict(odd))
    digests = {digest_of(one) for one in (None, {"truth": "1"}, {"truth": "2"}, odd)}
    assert len(digests) == 4


def test_two_rows_of_one_id_are_one_example_to_the_rubric_and_are_kept_apart(tmp_path):
    """Ids are the environment's own to give."""
    source = """
from runner_environment import Echo, Rubric, crosses
def load_environment():
    rows = [{"question": f"q{n}", "example_id": "same"} for n in range(3)]
    return Echo(dataset=rows, rubric=Rubric([crosses]))
"""
    (tmp_path / "same_ids.py").write_text(source)
    answers = ran(group_requests(0, 1, 2), env_id=str(tmp_path / "same_ids.py"))
    questions = [rollout.prompt[0]["content"] for rollout in flat(answers)]
    assert questions == ["q0", "q0", "q1", "q1", "q2", "q2"]
    for answer in answers:
        rewards = tuple(rollout.reward for rollout in answer)
        assert {rollout.examples[0].group_rewards for rollout in answer} == {rewards}


def test_a_rollout_that_hangs_is_cut_off_and_the_other_groups_are_as_without_it():
    runner = runner_over(ScriptedEngines(by_seed), trouble="sleep", at=4, rollout_timeout_s=1.0)
    (cut_off, *others), _ = counted(runner.run(group_requests(4, 1)))
    message = (
        "TimeoutError: rollout not done after rollout_timeout_s = 1 s; check what its turns, tools"
        " and cleanups wait for, or raise rollout_timeout_s"
    )
    for rollout in cut_off:
        assert (rollout.error, rollout.reward, rollout.examples) == (message, 0.0, ())
    assert timeless(others) == timeless(ran(group_requests(1, first=1)))


def test_a_reward_function_that_hangs_has_no_figure_at_its_limit():
    message = "TimeoutError: reward function endless is not done after scoring_timeout_s = 0.05 s"
    for rollout in flat(ran(group_requests(4), trouble="unjudged", scoring_timeout_s=0.05)):
        assert rollout.reward_errors["endless"].startswith(message)


def test_a_prompt_that_only_its_images_make_too_long_ends_its_rollouts_alone():
    """The client counts an image as one token, and only the engine knows how many it is."""
    refusal = "sample 4 was refused: it is longer than the maximum model length of 512"
    error = RolloutError(refusal, actor="actor-0", phase="generate")
    for rollout in flat(
        ran(group_requests(4), ScriptedEngines(lambda _: error), max_images=1, **SHOWING)
    ):
        assert ending(rollout) == (None, True, 0)
