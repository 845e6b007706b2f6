"""The OpenAI routes of a server that is given adapters: answers are of the adapter that was sent
last, and of nothing between.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from adapted_learner import AdaptedLearner
from endpoint_support import GREEDY, Endpoint, asked_throughout, greedy
from engine_support import SmallLearner, small_settings
from serve_process import OneServer, serve_process

from rollout_actors.backends.rollmatch_server import ServerClient, serve_arguments
from rollout_actors.server.token_file import find_token
from shared.weight_sync.offer import AdapterFiles, AdapterOffer
from shared.weight_sync.phases import sync_weights

pytestmark = [pytest.mark.engine, pytest.mark.long]

NUM_TOKENS = GREEDY["max_tokens"]


@pytest.fixture(scope="module")
def served(
    demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Endpoint, OneServer]]:
    settings = small_settings(demo_checkpoint, enable_lora=True, max_lora_rank=4)
    arguments = [*serve_arguments(settings, port=0), "served_model_name=policy"]
    with serve_process(arguments, tmp_path_factory.mktemp("serve")) as one:
        pool = OneServer(ServerClient("server-0", one.address(), index=0, expected=settings))
        assert pool.start() == 1
        yield Endpoint(one.url, "policy", find_token(one.url) or ""), pool
        pool.close()


@pytest.fixture
def endpoint(served: tuple[Endpoint, OneServer]) -> Endpoint:
    return served[0]


@pytest.fixture
def pool(served: tuple[Endpoint, OneServer]) -> OneServer:
    return served[1]


@pytest.fixture(scope="module")
def adapted(demo_checkpoint: Path) -> Iterator[AdaptedLearner]:
    with closing(AdaptedLearner(demo_checkpoint)) as learner:
        yield learner


def says(endpoint: Endpoint, learner: SmallLearner) -> list[int]:
    """The version and the log-probabilities of the answer are the learner's, too."""
    response = endpoint.chat(**GREEDY)
    assert (response.weight_version, response.model) == (learner.version, "policy")
    tokens = endpoint.tokens(response)
    assert tokens["completion_ids"] == greedy(learner, tokens["prompt_ids"], NUM_TOKENS)
    return tokens["completion_ids"]


def test_an_answer_is_of_the_adapter_that_was_sent_and_then_of_the_next(
    endpoint: Endpoint, pool: OneServer, adapted: AdaptedLearner
) -> None:
    base = says(endpoint, adapted)  # an adapter that has learned nothing
    said = {tuple(base)}
    for seed in (11, 12):
        adapted.learn(seed)
        report = sync_weights(adapted, pool)
        assert (report.mode, report.version) == ("adapter", adapted.version)
        said.add(tuple(says(endpoint, adapted)))
    assert (len(said), adapted.version) == (3, 2)


def test_no_answer_is_of_two_adapters_however_often_they_arrive(
    endpoint: Endpoint, pool: OneServer, adapted: AdaptedLearner
) -> None:
    sync_weights(adapted, pool)
    prompt_ids = endpoint.tokens(endpoint.chat(**GREEDY))["prompt_ids"]
    expected = {adapted.version: greedy(adapted, prompt_ids, NUM_TOKENS)}

    def syncs() -> None:
        for seed in (21, 22, 23):
            adapted.learn(seed)
            assert sync_weights(adapted, pool).mode == "adapter"
            expected[adapted.version] = greedy(adapted, prompt_ids, NUM_TOKENS)

    said = asked_throughout(endpoint, syncs)
    answered = [one for one in said if not isinstance(one, str)]
    for one in answered:
        assert endpoint.tokens(one)["completion_ids"] == expected[one.weight_version]
    assert {one.weight_version for one in answered} >= {adapted.version, adapted.version - 1}
    assert len({tuple(tokens) for tokens in expected.values()}) == 4


def test_after_a_fall_back_an_answer_is_of_the_merged_weights_alone(
    endpoint: Endpoint, pool: OneServer, adapted: AdaptedLearner
) -> None:
    """Last: from here on the learner sends all of its weights."""
    adapted.learn(31)

    def changed_on_the_way(terms: AdapterOffer) -> AdapterOffer:
        tensors = terms.files.tensors
        return replace(
            terms, files=AdapterFiles(tensors[:-1] + bytes([tensors[-1] ^ 1]), terms.files.config)
        )

    adapted.spoil = changed_on_the_way
    report = sync_weights(adapted, pool)
    assert (report.mode, report.fell_back is None) == ("full", False)
    says(endpoint, adapted)
