"""Several ranks train an adapter as one rank does, whole or sharded, write the same checkpoint and
offer the same files (decision 38).
"""

import shutil

import pytest
import rank_jobs
import safetensors.torch
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText

from learner.model.ranks import RankTopology, ReceiverGroup
from shared.tokens.fresh import FreshTokens
from shared.weight_sync.transports import TransportKind

pytestmark = pytest.mark.processes

ALONE = RankTopology("rollmatch_gloo", (ReceiverGroup(1),))
STEPS, CHUNK = 2, 4


@pytest.fixture(scope="module")
def with_fresh_tokens(demo_checkpoint, tmp_path_factory):
    folder = shutil.copytree(demo_checkpoint, tmp_path_factory.mktemp("fresh") / "model")
    FreshTokens(300, 1000).save(folder)
    return folder


def adapter(kind, folder):
    section = {"kind": kind, "rank": 4, "alpha": 8.0}
    return {"model__path": str(folder), "model__adapter": section, "training__learning_rate": 1e-2}


@pytest.fixture(scope="module", params=["dora", "lora"])
def alone(request, rank_config, tmp_path_factory, with_fresh_tokens):
    """The adapter's kind, what one rank has learned, and its checkpoint."""
    folder = tmp_path_factory.mktemp("alone") / "checkpoint"
    config = rank_config(**adapter(request.param, with_fresh_tokens))
    learned = rank_jobs.learn(ALONE, None, config, STEPS, CHUNK, folder)
    start = rank_jobs.learn(ALONE, None, config, 0, CHUNK)
    assert any(
        (weight - start.weights[name]).abs().max() > 1e-3
        for name, weight in learned.weights.items()
    )
    return request.param, learned, folder


def test_two_ranks_train_and_save_the_adapter_that_one_rank_does(
    two_ranks, rank_config, tmp_path, alone, with_fresh_tokens
):
    """Lora is dora without magnitudes: sharded, which is where an adapter is gathered, both are
    looked at.

    Rows of the embedding, of fresh tokens, are trained beside it.
    """
    kind, one_rank, saved = alone
    for parallel in {"dora": ("ddp", "fsdp"), "lora": ("fsdp",)}[kind]:
        folder = tmp_path / parallel
        config = rank_config(
            **adapter(kind, with_fresh_tokens), learner__world_size=2, learner__parallel=parallel
        )
        ranks = two_ranks.run(rank_jobs.learn, config, STEPS, CHUNK // 2, folder)
        assert ranks[0].weights.keys() == one_rank.weights.keys()
        for name, weight in one_rank.weights.items():
            torch.testing.assert_close(ranks[0].weights[name], weight, rtol=0, atol=1e-5)
        for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
            one, several = (safetensors.torch.load_file(place / file) for place in (saved, folder))
            assert one.keys() == several.keys()
            for name, tensor in one.items():
                torch.testing.assert_close(several[name], tensor, rtol=0, atol=1e-5)
        assert (
            "base_model.model.model.language_model.embed_tokens.token_adapter.trainable_tokens_delta"
            in several
        )


@pytest.fixture(scope="module")
def served_lora(demo_checkpoint):
    """Engines that are sent the adapter alone, of a checkpoint without fresh tokens."""
    served = {
        "rollout_matching__vllm__enable_lora": True,
        "rollout_matching__vllm__sync": {"mode": "adapter"},
    }
    return adapter("lora", demo_checkpoint) | served


@pytest.fixture(scope="module")
def offered_alone(rank_config, served_lora):
    return rank_jobs.offer_adapter(ALONE, None, rank_config(**served_lora))


def files_of(offer):
    files = offer.terms.files
    return safetensors.torch.load(files.tensors), files.config


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_rank_0_offers_the_adapter_that_one_rank_does_and_every_rank_falls_back_to_full_weights(
    two_ranks, rank_config, served_lora, offered_alone, demo_checkpoint, tmp_path, parallel
):
    ranks = {"learner__world_size": 2, "learner__parallel": parallel}
    first, second = two_ranks.run(rank_jobs.offer_adapter, rank_config(**served_lora, **ranks))
    assert second.offers == [None, None, None]
    untrained, trained, full = first.offers
    alone_untrained, alone_trained, _ = offered_alone.offers
    assert [offer.version for offer in first.offers] == [1, 2, 3]
    assert (trained.transport, full.transport) == (TransportKind.ADAPTER, TransportKind.GLOO)
    assert untrained.terms.files == alone_untrained.terms.files, "to the bit"
    (tensors, config), (expected, expected_config) = map(files_of, (trained, alone_trained))
    assert config == expected_config
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-5)
    for one, several in ((alone_untrained, untrained), (alone_trained, trained)):
        for scores in ("expected_logprobs", "base_logprobs"):
            expected = getattr(one.canary, scores)
            assert getattr(several.canary, scores) == pytest.approx(expected, abs=1e-4)
    assert trained.canary.base_logprobs != trained.canary.expected_logprobs
    # The files load, and are what the merged weights are of.
    trained.terms.files.save(tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(demo_checkpoint, dtype=torch.float32)
    merged = dict(PeftModel.from_pretrained(base, tmp_path).merge_and_unload().named_parameters())
    assert first.weights.keys() == merged.keys()
    for name, weight in merged.items():
        torch.testing.assert_close(first.weights[name], weight, rtol=0, atol=1e-6)
