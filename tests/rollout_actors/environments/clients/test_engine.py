"""The client over a run's own engines: what its answers carry, what it may be asked, and how much
room there is.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import pickle
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from environment_support import Talk, generated, picture, shown, user
from openai.types.chat import ChatCompletion
from scene_support import png
from scripted_engines import (
    Says,
    ScriptedEngines,
    ask,
    client_over,
    conversation_over,
    decode_settings,
    demo_tokenizer,
    rollout_of,
    says,
)

from launch.tools.demo.model import CHAT_TEMPLATE
from rollout_actors.environments.chat.responses import (
    RETURNS_TOKENS,
    parse_response_messages,
    parse_response_tokens,
)
from rollout_actors.environments.clients.openai import OVERLONG
from rollout_actors.environments.training.examples import merge_trajectories_for_training
from shared.errors import RolloutError
from shared.rollouts import DecodeMode, FinishReason, Rollout, RolloutRequest

TOKENIZER = demo_tokenizer()
HELLO = [user("hello")]
RENDERED = TOKENIZER.encode(
    "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
)
NO_LOGPROBS = decode_settings(TOKENIZER, return_logprobs=False)

# Of a model with a vision tower.
VISION = demo_tokenizer(CHAT_TEMPLATE)
PAD = VISION.convert_tokens_to_ids("<|image_pad|>")
ONE = png(8, 8)
TWO = png(8, 9)
TRUNCATED = (None, True, "prompt_too_long")


def one_answer(script: Any, **changes: Any) -> Any:
    return ask(conversation_over(ScriptedEngines(script), TOKENIZER, **changes), HELLO)


def tokens_of(response: Any) -> Any:
    return asyncio.run(parse_response_tokens(response, "chat"))


def one_rollout(environment: Talk, row: dict[str, Any], client: Any) -> Any:
    (state,) = generated(environment, [row], client).state
    return state


def ending(state: Any) -> tuple[Any, Any, Any]:
    return state["error"], state["is_truncated"], state["stop_condition"]


def test_a_tokenizer_with_the_placeholders_of_two_families_means_the_younger_ones() -> None:
    """InternVL's tokenizer extends Qwen's."""
    both = demo_tokenizer(CHAT_TEMPLATE)
    assert conversation_over(ScriptedEngines(""), both)._settings.placeholder == PAD
    both.add_tokens(["<IMG_CONTEXT>"], special_tokens=True)
    placeholder = conversation_over(ScriptedEngines(""), both)._settings.placeholder
    assert placeholder == both.convert_tokens_to_ids("<IMG_CONTEXT>") != PAD


class Expanding(ScriptedEngines):
    """Engines of a vision model: three tokens for each image's one. They say no."""

    def __init__(self, script: Any = lambda _: says(VISION, "no")) -> None:
        super().__init__(script)

    async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
        rollout = await super().generate(engine, request)
        expanded: list[int] = []
        for token in request.prompt_token_ids:
            expanded += [token] * (3 if token == PAD else 1)
        return replace(rollout, prompt_token_ids=tuple(expanded))


# Answers


@pytest.mark.parametrize(
    ("text", "reason", "sampled"),
    [
        ("red box", FinishReason.STOP, "red box<|im_end|>"),
        ("red box", FinishReason.LENGTH, "red box"),
        # The repeat guard has forced its stop token.
        ("aaaa", FinishReason.REPETITION, "aaaa"),
    ],
)
def test_an_answer_has_every_sampled_token_and_its_log_probability_with_the_stop_token(
    text, reason, sampled
):
    response = one_answer([says(TOKENIZER, text, version=4, finish_reason=reason)])
    tokens = tokens_of(response)
    token_ids = TOKENIZER.encode(sampled, add_special_tokens=False)
    assert tokens["prompt_ids"] == RENDERED
    assert tokens["completion_ids"] == response.choices[0].token_ids == token_ids
    assert tokens["completion_logprobs"] == [-(i + 1) / 8 for i in range(len(token_ids))]
    assert asyncio.run(parse_response_messages(response, "chat")) == [
        {"role": "assistant", "content": text}
    ]
    assert response.choices[0].finish_reason == reason.value
    assert (response.model, response.weight_version, response.engine) == ("m", 4, "actor-0")
    assert response.usage.completion_tokens == len(token_ids)


def test_without_log_probabilities_a_step_has_no_tokens_and_who_asks_for_them_is_refused():
    assert tokens_of(one_answer([says(TOKENIZER, "a")], decode=NO_LOGPROBS)) is None
    with pytest.raises(ValueError, match="return_logprobs"):
        ask(
            conversation_over(ScriptedEngines([]), TOKENIZER, decode=NO_LOGPROBS),
            HELLO,
            logprobs=True,
        )


def test_an_answer_can_be_pickled_copied_and_written():
    response = one_answer([says(TOKENIZER, "red box", version=2)])
    for again in (pickle.loads(pickle.dumps(response)), copy.deepcopy(response)):
        assert isinstance(again, ChatCompletion)
        assert again.weight_version == 2
        assert tokens_of(again) == tokens_of(response)
    assert response.model_dump()["choices"][0]["message"]["content"] == "red box"


def test_who_asks_an_answer_for_an_object_of_each_token_gets_it():
    conversation = conversation_over(ScriptedEngines([says(TOKENIZER, "red box")]), TOKENIZER)
    logprobs = ask(conversation, HELLO, logprobs=True).choices[0].logprobs
    sampled = TOKENIZER.encode("red box<|im_end|>", add_special_tokens=False)
    assert [(one.token, one.logprob) for one in logprobs.content] == [
        (f"token_id:{token_id}", -(i + 1) / 8) for i, token_id in enumerate(sampled)
    ]


def test_an_engine_that_answers_another_prompt_is_an_error():
    class Confused(ScriptedEngines):
        async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
            return replace(rollout_of(request, Says((1,))), prompt_token_ids=(1, 2, 3))

    message = (
        "check on actor-0: the engine answered another prompt than that of example 40; engines must"
        " have the tokenizer"
    )
    with pytest.raises(RolloutError, match=message):
        ask(conversation_over(Confused([]), TOKENIZER), HELLO)


# Room


def test_an_overlong_prompt_is_answered_as_such_without_asking_the_engine():
    engines = ScriptedEngines([])
    conversation = conversation_over(engines, TOKENIZER, max_model_len=len(RENDERED))
    assert ask(conversation, HELLO).id == OVERLONG
    assert engines.requests == []


def test_a_response_is_asked_to_fit_the_room_that_is_left():
    engines = ScriptedEngines([says(TOKENIZER, "a b c d e f g")])
    conversation = conversation_over(engines, TOKENIZER, max_model_len=len(RENDERED) + 1)
    assert ask(conversation, HELLO).choices[0].finish_reason == "length"
    assert engines.requests[0][1].decode.max_new_tokens == 1


def test_an_answer_that_its_images_have_made_longer_than_this_client_may_take_is_no_answer():
    """The engine has room for longer ones, and in what it was asked an image is one token."""
    engines = Expanding()
    answer = ask(conversation_over(engines, VISION), [shown(ONE)])
    length = len(engines.prompts[0]) + 2 + len(answer.choices[0].token_ids)
    for max_model_len, answered in ((length, answer.id), (length - 1, OVERLONG)):
        conversation = conversation_over(engines, VISION, max_model_len=max_model_len)
        assert ask(conversation, [shown(ONE)]).id == answered
    assert len(engines.requests) == 3, "it is known only of the answer"
    client = client_over(engines, VISION, max_model_len=length - 1)
    state = one_rollout(Talk(max_turns=2), {"prompt": [shown(ONE)]}, client)
    assert ending(state) == TRUNCATED
    assert state["trajectory"] == []


def test_a_prompt_that_shows_fewer_images_than_the_last_call_has_the_room_that_it_has_alone():
    engines = Expanding()
    many = [{"role": "user", "content": [picture(ONE)] * 4}]
    few = [shown(TWO), user("<|coord_7|>" * 20)]
    ask(conversation_over(engines, VISION), few)
    conversation = conversation_over(engines, VISION, max_model_len=len(engines.prompts[0]) + 6)
    assert ask(conversation, many).choices
    assert ask(conversation, few).choices, "it has no image of the last call"
    assert [request.decode.max_new_tokens for _, request in engines.requests[2:]] == [6]
    assert conversation.num_splits == 1


@pytest.mark.parametrize(
    ("row", "refusal", "ended"),
    [
        (
            {"prompt": [shown(ONE)]},
            "sample 0 was refused: it is longer than the maximum model length of 512",
            TRUNCATED,
        ),
        ({"prompt": [shown(ONE)]}, "image 0 of sample 0 cannot be decoded", None),
        ({"prompt": [shown()]}, "sample 0 is longer than the maximum model length", None),
    ],
    ids=["only its images make it too long", "another refusal", "a prompt without images"],
)
def test_what_an_engine_refuses_is_its_rollouts_error_but_for_a_prompt_that_images_make_too_long(
    row, refusal, ended
):
    error = RolloutError(refusal, actor="actor-0", phase="generate")
    engines = Expanding([says(VISION, "no"), error])
    state = one_rollout(Talk(max_turns=3), row, client_over(engines, VISION))
    failed = (f"RolloutError: generate on actor-0: {refusal}", False, "error")
    assert ending(state) == (ended or failed)
    assert len(state["trajectory"]) == 1


# Images


def test_images_of_messages_reach_the_engine_and_its_expanded_prompts_extend_each_other():
    engines = Expanding()
    row = {"prompt": [shown(ONE, TWO)]}
    state = one_rollout(Talk(max_turns=2), row, client_over(engines, VISION))
    first, second = state["trajectory"]
    sent = [[(ref.data, ref.sha256) for ref in request.images] for _, request in engines.requests]
    assert sent == [[(data, hashlib.sha256(data).hexdigest()) for data in (ONE, TWO)]] * 2
    assert first["tokens"]["prompt_ids"].count(PAD) == 6
    so_far = first["tokens"]["prompt_ids"] + first["tokens"]["completion_ids"]
    assert second["tokens"]["prompt_ids"][: len(so_far)] == so_far
    assert state["num_splits"] == 0


def test_an_image_in_place_of_an_earlier_one_splits_the_rollout_though_the_tokens_are_the_same():
    class Screen(Talk):
        async def get_prompt_messages(self, state: Any) -> Any:
            messages = await super().get_prompt_messages(state)
            return [shown(TWO), *messages[1:]] if state["trajectory"] else messages

    engines = Expanding()
    row = {"prompt": [shown(ONE)]}
    state = one_rollout(Screen(max_turns=2), row, client_over(engines, VISION))
    sent = [[image.data for image in request.images] for _, request in engines.requests]
    assert sent == [[ONE], [TWO]]
    merged = merge_trajectories_for_training([state])
    assert [example.steps for example in merged.examples] == [(0,), (1,)]
    assert state["num_splits"] == merged.num_splits == 1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            "engines download nothing",
        ),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,*"}}, "is not base64"),
        ({"type": "input_audio", "input_audio": {}}, "got 'input_audio'"),
        (picture(b"torn file"), "cannot be decoded: .*send a whole PNG"),
        (picture(ONE[: len(ONE) // 2]), "cannot be decoded: .*send a whole PNG"),
        (picture(b""), "cannot be decoded: .*send a whole PNG"),
    ],
)
def test_parts_of_messages_that_no_engine_can_show_are_refused_with_a_remedy(part, message):
    engines = ScriptedEngines([])
    with pytest.raises(ValueError, match=message) as caught:
        ask(conversation_over(engines, VISION), [{"role": "user", "content": [part]}])
    assert "0x" not in str(caught.value), "an address in memory"
    assert "None" not in str(caught.value)
    assert engines.requests == []


def test_a_placeholder_in_the_text_of_a_message_is_refused_and_not_sent():
    engines = ScriptedEngines([])
    conversation = conversation_over(engines, VISION)
    for images, counts in (([], "has 1 x .*, but 0 images"), ([ONE], "has 2 x .*, but 1 images")):
        with pytest.raises(ValueError, match=f"{counts}.*; remove .*text"):
            ask(conversation, [shown(*images, text="You said <|image_pad|>.")])
    with pytest.raises(ValueError, match=r"has 1 x <\|image_pad\|>, but 0 images"):
        asyncio.run(conversation.completions.create(model="m", prompt="What is <|image_pad|>?"))
    assert engines.requests == []


def test_a_placeholder_in_a_later_turn_is_its_rollouts_error_too():
    class Quoting(Talk):
        async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> Any:
            return [user("You said <|image_pad|>.")]

    engines = Expanding()
    row = {"prompt": [shown(ONE)]}
    state = one_rollout(Quoting(max_turns=2), row, client_over(engines, VISION))
    message = "ValueError: prompt: has 2 x <|image_pad|>, but 1 images; remove this"
    assert state["error"].startswith(message)
    assert len(engines.requests) == len(state["trajectory"]) == 1


def test_a_placeholder_that_a_model_of_text_has_sampled_is_no_error():
    """Nothing keeps it from that, and in its prompts it stands for nothing."""
    no = TOKENIZER.encode("no", add_special_tokens=False)
    engines = ScriptedEngines(lambda _: Says((PAD, *no)))
    client = client_over(engines, TOKENIZER)
    state = one_rollout(Talk(max_turns=3), {"question": "hello"}, client)
    assert (state["error"], state["num_splits"]) == (None, 0)
    assert [prompt.count(PAD) for prompt in engines.prompts] == [0, 1, 2]


def test_an_image_that_the_template_does_not_write_is_an_error_with_a_remedy():
    blind = demo_tokenizer("{%- for message in messages %}{{- message.role }}{%- endfor %}")
    message = (
        r"has 0 x <\|image_pad\|>, but 1 images; the chat template writes no placeholder for some"
    )
    with pytest.raises(ValueError, match=message):
        ask(conversation_over(ScriptedEngines([]), blind), [shown(ONE)])


def test_an_answer_names_the_images_of_its_prompt():
    conversation = conversation_over(Expanding(), VISION)
    for messages, images in ((HELLO, []), ([shown(ONE, TWO)], [ONE, TWO])):
        answer = ask(conversation, messages)
        names = [hashlib.sha256(data).hexdigest() for data in images]
        assert answer.image_sha256 == answer.model_dump(mode="json")["image_sha256"] == names


# Arguments


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        (RETURNS_TOKENS, 64),
        (
            {
                "logprobs": 1,
                "extra_body": {
                    "return_tokens_as_token_ids": True,
                    "return_token_ids": True,
                    "prompt_logprobs": 1,
                },
            },
            64,
        ),
        (
            {
                "temperature": 1.0,
                "top_p": 1.0,
                "n": 1,
                "stop": None,
                "extra_body": {"top_k": -1, "stop_token_ids": [*NO_LOGPROBS.stop_token_ids]},
            },
            64,
        ),
        ({"max_tokens": 8}, 8),
        ({"max_completion_tokens": 8}, 8),
    ],
    ids=["for tokens", "the specification's listing", "as the run has them", "limit", "its name"],
)
def test_arguments_that_agree_with_the_run_are_taken(arguments, limit):
    engines = ScriptedEngines([says(TOKENIZER, "a")])
    assert ask(conversation_over(engines, TOKENIZER), HELLO, **arguments).choices
    assert engines.requests[0][1].decode.max_new_tokens == limit


@pytest.mark.parametrize("stop", ["</answer>", ["</answer>"]])
def test_the_stop_texts_of_the_run_may_be_repeated_and_reach_the_engine(stop):
    decode = replace(NO_LOGPROBS, stop=("</answer>",))
    engines = ScriptedEngines([says(TOKENIZER, "a</answer>")])
    conversation = conversation_over(engines, TOKENIZER, decode=decode)
    answer = ask(conversation, HELLO, stop=stop)
    assert answer.choices[0].message.content == "a</answer>"
    assert engines.requests[0][1].decode.stop == ("</answer>",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": 0.7}, r"temperature: got 0.7, but this run has 1.0"),
        ({"extra_body": {"top_k": 20}}, r"top_k: got 20, but this run has -1"),
        ({"stop": ["\n"]}, r"stop: got \['\\n'\], but.*rollout_matching.decoding.stop"),
        ({"n": 2}, r"n: got 2, but this run has 1"),
        (
            {"max_tokens": 65},
            r"max_tokens: must be a whole number from 1 to the run's max_new_tokens = 64, got 65",
        ),
        ({"max_tokens": 0}, r"max_tokens: must be a whole number from 1"),
        ({"seed": 1}, r"seed: the engines of a run have no such sampling argument"),
        ({"logit_bias": {"3": 1}}, r"logit_bias: .*; leave it out. They accept .*max_tokens"),
        ({"extra_body": {"guided_json": {}}}, r"guided_json: the engines of a run have no such"),
    ],
)
def test_arguments_that_the_run_has_fixed_otherwise_and_unknown_ones_are_refused_by_name(
    arguments, message
):
    engines = ScriptedEngines([])
    with pytest.raises(ValueError, match=message):
        ask(conversation_over(engines, TOKENIZER), HELLO, **arguments)
    assert engines.requests == []


def test_beams_are_refused():
    decode = decode_settings(TOKENIZER, mode=DecodeMode.BEAM)
    with pytest.raises(ValueError, match="beam"):
        client_over(ScriptedEngines([]), TOKENIZER, decode=decode)


def test_an_answer_costs_as_many_calls_whatever_its_length():
    """Objects of its tokens would be thousands."""

    class Ready(ScriptedEngines):
        async def generate(self, engine: int, request: RolloutRequest) -> Rollout:
            return replace(self.answer, prompt_token_ids=request.prompt_token_ids)

    def num_calls(number: int) -> int:
        decode = decode_settings(TOKENIZER, max_new_tokens=2 * number)
        engines = Ready([])
        request = RolloutRequest(3, 0, "s", (), (), decode, 0)
        engines.answer = rollout_of(request, Says(tuple(range(number))))
        conversation = conversation_over(engines, TOKENIZER, decode=decode, max_model_len=9000)
        kinds: Counter[str] = Counter()

        def count(frame: Any, kind: str, value: Any) -> None:
            # transformers looks at each token of what it decodes
            if "/transformers/" not in frame.f_code.co_filename:
                kinds[kind] += 1

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            assert tokens_of(ask(conversation, HELLO)) is not None
        finally:
            sys.setprofile(before)
        return kinds["call"] + kinds["c_call"]

    num_calls(10)  # openai's library makes its types
    assert num_calls(4000) < num_calls(10) + 1000
