"""The client over a run's own engines: what its answers carry, what it may be asked, and how much
room there is.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import pickle
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from environment_support import Talk, generated, user
from openai.types.chat import ChatCompletion
from scene_support import png
from scripted_engines import (
    Says,
    ScriptedEngines,
    ask,
    client_over,
    decode_settings,
    demo_tokenizer,
    rollout_of,
    says,
    state_at,
)

from launch.demo.model import CHAT_TEMPLATE
from rollout_actors.environments.chat.responses import (
    RETURNS_TOKENS,
    parse_response_messages,
    parse_response_tokens,
)
from rollout_actors.environments.clients.openai import OVERLONG
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from shared.errors import RolloutError
from shared.rollouts import DecodeMode, FinishReason, Rollout, RolloutRequest


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return demo_tokenizer()


def one_answer(tokenizer: Any, script: Any, **changes: Any) -> Any:
    """To `hello`."""
    return ask(
        client_over(ScriptedEngines(script), tokenizer, **changes).conversation(state_at()),
        [user("hello")],
    )


def test_the_models_name_chooses_nothing_and_is_in_the_answer(tokenizer: Any) -> None:
    assert one_answer(tokenizer, [says(tokenizer, "a")]).model == "m"


def test_an_answer_has_every_sampled_token_and_its_log_probability_with_the_stop_token(
    tokenizer: Any,
) -> None:
    engines = ScriptedEngines([says(tokenizer, "red box", version=4)])
    response = ask(client_over(engines, tokenizer).conversation(state_at()), [user("hello")])
    tokens = asyncio.run(parse_response_tokens(response, "chat"))
    assert tokens is not None
    sampled = tokenizer.encode("red box<|im_end|>", add_special_tokens=False)
    assert tokens["prompt_ids"] == tokenizer.encode(
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )
    assert tokens["completion_ids"] == sampled
    assert tokens["completion_logprobs"] == [-(i + 1) / 8 for i in range(len(sampled))]
    assert asyncio.run(parse_response_messages(response, "chat")) == [
        {"role": "assistant", "content": "red box"}
    ]
    assert response.choices[0].finish_reason == "stop"
    assert response.weight_version == 4
    assert response.usage.completion_tokens == len(sampled)


def test_an_answer_that_ended_at_its_limit_has_no_stop_token(tokenizer: Any) -> None:
    response = one_answer(
        tokenizer, [says(tokenizer, "red box", finish_reason=FinishReason.LENGTH)]
    )
    assert response.choices[0].finish_reason == "length"
    assert response.choices[0].token_ids == tokenizer.encode("red box", add_special_tokens=False)


def test_a_stop_token_that_the_repeat_guard_has_forced_is_not_among_the_sampled_ones(
    tokenizer: Any,
) -> None:
    response = one_answer(
        tokenizer, [says(tokenizer, "aaaa", finish_reason=FinishReason.REPETITION)]
    )
    assert response.choices[0].finish_reason == "repetition"
    tokens = asyncio.run(parse_response_tokens(response, "chat"))
    assert tokens is not None
    assert tokens["completion_ids"] == tokenizer.encode("aaaa", add_special_tokens=False)


def test_without_log_probabilities_a_step_has_no_tokens(tokenizer: Any) -> None:
    response = one_answer(
        tokenizer, [says(tokenizer, "a")], decode=decode_settings(tokenizer, return_logprobs=False)
    )
    assert asyncio.run(parse_response_tokens(response, "chat")) is None


def test_an_answer_travels_and_can_be_written(tokenizer: Any) -> None:
    import pickle

    response = one_answer(tokenizer, [says(tokenizer, "a", version=2)])
    again = pickle.loads(pickle.dumps(response))
    assert (again.weight_version, again.prompt_token_ids, again.choices[0].token_ids) == (
        2,
        response.prompt_token_ids,
        response.choices[0].token_ids,
    )
    assert response.model_dump()["choices"][0]["message"]["content"] == "a"


# Room


def test_an_overlong_prompt_is_answered_as_such_without_asking_the_engine(tokenizer: Any) -> None:
    engines = ScriptedEngines([])
    messages = [user("hello")]
    length = len(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
    response = ask(
        client_over(engines, tokenizer, max_model_len=length).conversation(state_at()), messages
    )
    assert response.id == OVERLONG
    assert engines.requests == []


def test_a_response_is_asked_to_fit_the_room_that_is_left(tokenizer: Any) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "a b c d e f g"))
    messages = [user("hello")]
    length = len(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )
    response = ask(
        client_over(engines, tokenizer, max_model_len=length + 1).conversation(state_at()), messages
    )
    assert engines.requests[0][1].decode.max_new_tokens == 1
    assert response.choices[0].finish_reason == "length"


def test_an_over_long_conversation_ends_a_rollout_as_truncated_with_its_steps_kept(
    tokenizer: Any,
) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "no"))
    results = generated(
        Talk(max_turns=-1),
        [{"question": "hello"}],
        client_over(engines, tokenizer, max_model_len=60),
    )
    (state,) = results.state
    assert state["is_truncated"] and state["stop_condition"] == "prompt_too_long"
    assert len(state["trajectory"]) == len(engines.requests) > 1
    assert all(step["tokens"] is not None for step in state["trajectory"])
    assert state["error"] is None


# Images

ONE, TWO = png(8, 8), png(8, 9)


def picture(data: bytes) -> dict[str, Any]:
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"},
    }


class Expanding(ScriptedEngines):
    """As a vision model's: three tokens for each image's one."""

    def __init__(self, script: Any, *, pad: int) -> None:
        super().__init__(script)
        self._pad = pad

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        rollout = await super().generate(engine, request)
        expanded = [
            token
            for one in request.prompt_token_ids
            for token in [one] * (3 if one == self._pad else 1)
        ]
        return replace(rollout, prompt_token_ids=tuple(expanded))


def test_images_of_messages_reach_the_engine_and_its_expanded_prompts_extend_each_other() -> None:
    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    engines = Expanding(lambda _: says(tokenizer, "no"), pad=pad)
    prompt = [
        {"role": "user", "content": [picture(ONE), picture(TWO), {"type": "text", "text": "What?"}]}
    ]
    (state,) = generated(
        Talk(max_turns=2), [{"prompt": prompt}], client_over(engines, tokenizer)
    ).state
    first, second = state["trajectory"]
    sent = [[(ref.data, ref.sha256) for ref in request.images] for _, request in engines.requests]
    assert sent == [[(data, hashlib.sha256(data).hexdigest()) for data in (ONE, TWO)]] * 2
    assert first["tokens"]["prompt_ids"].count(pad) == 6
    so_far = first["tokens"]["prompt_ids"] + first["tokens"]["completion_ids"]
    assert second["tokens"]["prompt_ids"][: len(so_far)] == so_far
    assert state["num_splits"] == 0


def refusing(error: RolloutError) -> Expanding:
    """Engines that refuse the second call."""
    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    calls = iter([says(tokenizer, "no"), error])
    return Expanding(lambda _: next(calls), pad=tokenizer.convert_tokens_to_ids("<|image_pad|>"))


def test_an_image_in_place_of_an_earlier_one_splits_the_rollout_though_the_tokens_are_the_same() -> (
    None
):
    class Screen(Talk):
        async def get_prompt_messages(self, state: Any) -> Any:
            messages = await super().get_prompt_messages(state)
            return [looked_at(TWO), *messages[1:]] if state["trajectory"] else messages

    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    engines = Expanding(
        lambda _: says(tokenizer, "no"), pad=tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    (state,) = generated(
        Screen(max_turns=2), [{"prompt": [looked_at(ONE)]}], client_over(engines, tokenizer)
    ).state
    assert [[image.data for image in request.images] for _, request in engines.requests] == [
        [ONE],
        [TWO],
    ]
    made = merge_trajectories_for_training([state])
    assert [example.steps for example in made.examples] == [(0,), (1,)] and state[
        "num_splits"
    ] == made.num_splits == 1


def looked_at(data: bytes) -> dict[str, Any]:
    picture = {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(data).decode()}"},
    }
    return {"role": "user", "content": [picture, {"type": "text", "text": "What?"}]}


def test_a_prompt_that_only_its_images_make_too_long_ends_a_rollout_as_truncated_with_its_steps_kept() -> (
    None
):
    told = (
        "sample 0 was refused: The decoder prompt (length 530) is longer than the maximum model"
        " length of 512."
    )
    engines = refusing(RolloutError(told, actor="actor-0", phase="generate"))
    row = {
        "prompt": [{"role": "user", "content": [picture(ONE), {"type": "text", "text": "What?"}]}]
    }
    (state,) = generated(
        Talk(max_turns=3), [row], client_over(engines, demo_tokenizer(CHAT_TEMPLATE))
    ).state
    assert (
        state["error"],
        state["is_truncated"],
        state["stop_condition"],
        len(state["trajectory"]),
    ) == (None, True, "prompt_too_long", 1)


def test_an_answer_that_its_images_have_made_longer_than_this_client_may_take_is_no_answer() -> (
    None
):
    """The engine has room for longer ones, and in what it was asked an image is one token."""
    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    engines = Expanding(
        lambda _: says(tokenizer, "no"), pad=tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    shown = [{"role": "user", "content": [picture(ONE), {"type": "text", "text": "What?"}]}]
    answer = ask(client_over(engines, tokenizer).conversation(state_at()), shown)
    length = len(engines.prompts[0]) + 2 + len(answer.choices[0].token_ids)
    assert (
        ask(
            client_over(engines, tokenizer, max_model_len=length).conversation(state_at()), shown
        ).id
        == answer.id
    )
    assert (
        ask(
            client_over(engines, tokenizer, max_model_len=length - 1).conversation(state_at()),
            shown,
        ).id
        == OVERLONG
    )
    assert len(engines.requests) == 3, "it is known only of the answer"
    (state,) = generated(
        Talk(max_turns=2),
        [{"prompt": shown}],
        client_over(engines, tokenizer, max_model_len=length - 1),
    ).state
    assert (
        state["error"],
        state["is_truncated"],
        state["stop_condition"],
        state["trajectory"],
    ) == (None, True, "prompt_too_long", [])


@pytest.mark.slow
def test_an_answer_that_was_too_long_leaves_the_room_of_other_calls_as_it_was() -> None:
    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    engines = Expanding(
        lambda _: says(tokenizer, "no"), pad=tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    filled = [picture(ONE), {"type": "text", "text": "<|im_start|>" * 9}]
    fits, too_long = (
        [{"role": "user", "content": content}] for content in (filled, [picture(ONE)] * 4)
    )
    # Of both before their images are expanded, the one by two tokens and the other by eight.
    (length,) = {
        len(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
        for messages in (fits, too_long)
    }
    conversation = client_over(engines, tokenizer, max_model_len=length + 6).conversation(
        state_at()
    )
    assert ask(conversation, too_long).id == OVERLONG
    assert ask(conversation, fits).choices[0].message.content == "no"


@pytest.mark.parametrize(
    ("has_image", "told"),
    [
        (True, "image 0 of sample 0 cannot be decoded"),
        (False, "sample 0 was refused: it is longer than the maximum model length"),
    ],
)
def test_other_refusals_are_the_rollouts_error(has_image: bool, told: str) -> None:
    engines = refusing(RolloutError(told, actor="actor-0", phase="generate"))
    content = [*([picture(ONE)] if has_image else []), {"type": "text", "text": "What?"}]
    (state,) = generated(
        Talk(max_turns=3),
        [{"prompt": [{"role": "user", "content": content}]}],
        client_over(engines, demo_tokenizer(CHAT_TEMPLATE)),
    ).state
    assert state["error"] == f"RolloutError: generate on actor-0: {told}"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            "engines fetch nothing",
        ),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}, "is not base64"),
        ({"type": "input_audio", "input_audio": {}}, "got 'input_audio'"),
    ],
)
def test_other_parts_of_messages_are_refused_by_name(part: dict[str, Any], told: str) -> None:
    conversation = client_over(ScriptedEngines([]), demo_tokenizer(CHAT_TEMPLATE)).conversation(
        state_at()
    )
    with pytest.raises(ValueError, match=told):
        ask(conversation, [{"role": "user", "content": [part]}])


def test_what_is_no_picture_is_refused_with_a_remedy_and_no_address_in_memory() -> None:
    """The specification: a rollout that fails is data. An engine that fails ends the run."""
    engines = ScriptedEngines([])
    for data in (b"torn file", ONE[: len(ONE) // 2], b""):
        (state,) = generated(
            Talk(max_turns=1),
            [{"prompt": [looked_at(data)]}],
            client_over(engines, demo_tokenizer(CHAT_TEMPLATE)),
        ).state
        assert state["error"].startswith("ValueError: image_url: 'data:image/png;base64,")
        assert "cannot be decoded" in state["error"] and "send a whole PNG" in state["error"]
        assert "0x" not in state["error"] and "None" not in state["error"]
    assert engines.requests == []


def test_a_placeholder_in_the_text_of_a_message_is_the_error_of_its_rollout_and_not_sent() -> None:
    """As an environment writes it that quotes its model: as a token it would stand for another
    image, or for none.
    """
    engines = ScriptedEngines([])
    conversation = client_over(engines, demo_tokenizer(CHAT_TEMPLATE)).conversation(state_at())
    quoting = {"type": "text", "text": "You said <|image_pad|>."}
    for content, told in (
        ([quoting], "has 1 x .* and 0 x an image"),
        ([picture(ONE), quoting], "has 2 x .* and 1 x an image"),
    ):
        with pytest.raises(ValueError, match=f"{told}; leave that out of the text of messages"):
            ask(conversation, [{"role": "user", "content": content}])
    with pytest.raises(ValueError, match=r"has 1 x <\|image_pad\|> and 0 x"):
        asyncio.run(conversation.completions.create(model="m", prompt="What is <|image_pad|>?"))
    assert engines.requests == []


def test_a_placeholder_in_a_later_turn_is_its_rollouts_error_too() -> None:
    class Quoting(Talk):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [user("You said <|image_pad|>.")]

    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    engines = Expanding(
        lambda _: says(tokenizer, "no"), pad=tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    (state,) = generated(
        Quoting(max_turns=2), [{"prompt": [looked_at(ONE)]}], client_over(engines, tokenizer)
    ).state
    assert (state["error"] or "").startswith(
        "ValueError: prompt: has 2 x <|image_pad|> and 1 x an image; leave that out"
    )
    assert len(engines.requests) == len(state["trajectory"]) == 1


def test_a_placeholder_that_a_model_of_text_has_sampled_is_no_error(tokenizer: Any) -> None:
    """Nothing keeps it from that, and in its prompts it stands for nothing."""
    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    engines = ScriptedEngines(
        lambda _: Says((pad, *tokenizer.encode("no", add_special_tokens=False)))
    )
    (state,) = generated(
        Talk(max_turns=3), [{"question": "hello"}], client_over(engines, tokenizer)
    ).state
    assert state["error"] is None and state["num_splits"] == 0
    assert [prompt.count(pad) for prompt in engines.prompts] == [0, 1, 2]


def test_an_image_that_the_template_does_not_write_is_an_error_with_a_remedy() -> None:
    blind = demo_tokenizer("{%- for message in messages %}{{- message.role }}{%- endfor %}")
    with pytest.raises(
        ValueError,
        match=(
            r"has 0 x <\|image_pad\|> and 1 x an image; the chat template writes none for some;"
            r" show images where it does, or take a model with a vision tower"
        ),
    ):
        ask(client_over(ScriptedEngines([]), blind).conversation(state_at()), [looked_at(ONE)])


def test_a_prompt_that_shows_fewer_images_than_the_last_call_has_the_room_that_it_has_alone() -> (
    None
):
    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    engines = Expanding(
        lambda _: says(tokenizer, "no"), pad=tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    many, few = (
        [{"role": "user", "content": [picture(ONE)] * 4}],
        [looked_at(TWO), user("<|im_start|>" * 20)],
    )
    ask(client_over(engines, tokenizer).conversation(state_at()), few)
    conversation = client_over(
        engines, tokenizer, max_model_len=len(engines.prompts[0]) + 6
    ).conversation(state_at())
    assert ask(conversation, many).choices
    assert ask(conversation, few).choices, "it has no image of the last call"
    assert [request.decode.max_new_tokens for _, request in engines.requests[2:]] == [6]
    assert conversation.num_splits == 1


def test_an_answer_names_the_images_of_its_prompt() -> None:
    tokenizer = demo_tokenizer(CHAT_TEMPLATE)
    engines = Expanding(
        lambda _: says(tokenizer, "no"), pad=tokenizer.convert_tokens_to_ids("<|image_pad|>")
    )
    conversation = client_over(engines, tokenizer).conversation(state_at())
    answers = [
        ask(conversation, [user("hello")]),
        ask(conversation, [{"role": "user", "content": [picture(ONE), picture(TWO)]}]),
    ]
    named = [[], [hashlib.sha256(data).hexdigest() for data in (ONE, TWO)]]
    assert [answer.image_sha256 for answer in answers] == named
    assert [answer.model_dump(mode="json")["image_sha256"] for answer in answers] == named


# Arguments


def test_arguments_that_agree_with_the_run_are_taken_those_of_the_specifications_own_listing_too(
    tokenizer: Any,
) -> None:
    engines = ScriptedEngines(lambda _: says(tokenizer, "a"))
    conversation = client_over(engines, tokenizer).conversation(state_at())
    listing = {
        "logprobs": 1,
        "extra_body": {
            "return_tokens_as_token_ids": True,
            "return_token_ids": True,
            "prompt_logprobs": 1,
        },
    }
    agreeing = {
        "temperature": 1.0,
        "top_p": 1.0,
        "n": 1,
        "stop": None,
        "extra_body": {
            "top_k": -1,
            "stop_token_ids": list(decode_settings(tokenizer).stop_token_ids),
        },
    }
    for arguments in (
        RETURNS_TOKENS,
        listing,
        agreeing,
        {"max_tokens": 8},
        {"max_completion_tokens": 8},
    ):
        assert ask(conversation, [user("hello")], **arguments).choices
    assert [request.decode.max_new_tokens for _, request in engines.requests] == [64, 64, 64, 8, 8]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"temperature": 0.7}, r"temperature: 0.7 was asked for, and this run has 1.0"),
        ({"extra_body": {"top_k": 20}}, r"top_k: 20 was asked for, and this run has -1"),
        ({"stop": ["\n"]}, r"stop: \['\\n'\] was asked for"),
        ({"n": 2}, r"n: 2 was asked for, and this run has 1"),
        (
            {"max_tokens": 65},
            r"max_tokens: must be a whole number from 1 to the run's max_new_tokens = 64, got 65",
        ),
        ({"max_tokens": 0}, r"max_tokens: must be a whole number from 1"),
        ({"seed": 1}, r"seed: the engines of a run take no such sampling argument"),
        (
            {"logit_bias": {"3": 1}},
            (
                r"logit_bias: the engines of a run take no such sampling argument; leave it out."
                r" They know .*max_tokens"
            ),
        ),
        ({"extra_body": {"guided_json": {}}}, r"guided_json: the engines of a run take no such"),
    ],
)
def test_arguments_that_the_run_has_fixed_otherwise_and_unknown_ones_are_refused_by_name(
    tokenizer: Any, arguments: dict[str, Any], told: str
) -> None:
    engines = ScriptedEngines([])
    with pytest.raises(ValueError, match=told):
        ask(client_over(engines, tokenizer).conversation(state_at()), [user("hello")], **arguments)
    assert engines.requests == []


def test_log_probabilities_that_the_run_does_not_return_are_refused(tokenizer: Any) -> None:
    client = client_over(
        ScriptedEngines([]), tokenizer, decode=decode_settings(tokenizer, return_logprobs=False)
    )
    with pytest.raises(ValueError, match="return_logprobs"):
        ask(client.conversation(state_at()), [user("hello")], logprobs=True)


def test_beams_and_bounds_of_none_are_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="beam"):
        client_over(
            ScriptedEngines([]), tokenizer, decode=decode_settings(tokenizer, mode=DecodeMode.BEAM)
        )
    with pytest.raises(ValueError, match="max_under_way"):
        client_over(ScriptedEngines([]), tokenizer, max_under_way=0)


def test_an_engine_that_answers_another_prompt_is_an_error(tokenizer: Any) -> None:
    class Confused(ScriptedEngines):
        async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
            return replace(rollout_of(request, Says((1,))), prompt_token_ids=(1, 2, 3))

    with pytest.raises(
        RolloutError,
        match=(
            "check on actor-0: answered another prompt than the one of example 40; engines must"
            " have the tokenizer"
        ),
    ):
        ask(client_over(Confused([]), tokenizer).conversation(state_at()), [user("hello")])


def test_an_answer_names_the_engine_that_sampled_it(tokenizer: Any) -> None:
    conversation = client_over(
        ScriptedEngines([says(tokenizer, "a"), says(tokenizer, "b")]), tokenizer
    ).conversation(state_at())
    assert ask(conversation, [user("hello")]).engine == "actor-0"
    assert (
        asyncio.run(conversation.completions.create(model="m", prompt="hello")).engine == "actor-0"
    )


def test_who_asks_an_answer_for_an_object_of_each_token_gets_it(tokenizer: Any) -> None:
    conversation = client_over(
        ScriptedEngines([says(tokenizer, "red box")]), tokenizer
    ).conversation(state_at())
    logprobs = ask(conversation, [user("hello")], logprobs=True).choices[0].logprobs
    sampled = tokenizer.encode("red box<|im_end|>", add_special_tokens=False)
    assert [one.token for one in logprobs.content] == [
        f"token_id:{token_id}" for token_id in sampled
    ]
    assert [one.logprob for one in logprobs.content] == [-(i + 1) / 8 for i in range(len(sampled))]


def test_an_answer_can_be_pickled_and_copied_with_its_log_probabilities(tokenizer: Any) -> None:
    response = one_answer(tokenizer, [says(tokenizer, "red box")])
    for again in (pickle.loads(pickle.dumps(response)), copy.deepcopy(response)):
        assert isinstance(again, ChatCompletion)
        assert asyncio.run(parse_response_tokens(again, "chat")) == asyncio.run(
            parse_response_tokens(response, "chat")
        )


def test_an_answer_costs_as_many_calls_whatever_its_length(tokenizer: Any) -> None:
    """Made and read. Objects of its tokens would be thousands."""

    class Ready(ScriptedEngines):
        async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
            return replace(self.answer, prompt_token_ids=request.prompt_token_ids)

    def num_calls(number: int) -> int:
        decode = decode_settings(tokenizer, max_new_tokens=2 * number)
        engines = Ready([])
        request = RolloutRequest(3, 0, "s", (), (), decode, 0)
        engines.answer = rollout_of(request, Says(tuple(range(number))))
        client = client_over(engines, tokenizer, decode=decode, max_model_len=9000)
        conversation = client.conversation(state_at())

        async def made_and_read() -> None:
            answer = await conversation.chat.completions.create(model="m", messages=[user("q")])
            assert await parse_response_tokens(answer, "chat") is not None

        kinds: Counter[str] = Counter()

        def count(frame: Any, kind: str, value: Any) -> None:
            # transformers looks at each token of what it decodes
            if "/transformers/" not in frame.f_code.co_filename:
                kinds[kind] += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            asyncio.run(made_and_read())
        finally:
            sys.setprofile(before)
        return kinds["call"] + kinds["c_call"]

    num_calls(10)  # openai's library makes its types
    assert num_calls(4000) < num_calls(10) + 1000
