"""A whole learner with an adapter: what its steps change, what it offers, and what it goes on with
after a failure (spec: weight sync mode selection).
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from config_support import configuration
from learner_support import make_learner, weights_of
from peft import PeftModel
from transformers import AutoModelForImageTextToText, AutoTokenizer

from learner.model.adapters import apply_adapter
from learner.model.parts import model_part
from learner.weight_sync.publisher import adapter_to_offer
from shared.config.model import AdapterSection
from shared.config.pipeline import Channel
from shared.errors import WeightSyncError
from shared.model_families import ModelPart
from shared.schedule import StepPlan
from shared.tokens.fresh import FreshTokens
from shared.tokens.vocabulary import COORD_TOKENS, NUM_BINS
from shared.weight_sync.transports import TransportKind

pytestmark = pytest.mark.slow

VLLM = "rollout_matching__vllm"
SMALL = {
    "global_max_length": 512,
    "training__max_steps": 4,
    "training__effective_batch_size": 4,
    "training__learning_rate": 1e-2,
    "stage2_ab__schedule__warmup_steps": 4,
}


@pytest.fixture
def learner(demo_checkpoint, demo_data, tmp_path):
    learners = []

    def make(kind="lora", mode="adapter", checkpoint=demo_checkpoint, **changes):
        adapter = {"kind": kind, "rank": 4, "alpha": 8.0}
        sync = {f"{VLLM}__enable_lora": mode != "full", f"{VLLM}__sync": {"mode": mode}}
        changes = {"model__adapter": adapter, **SMALL, **sync, **changes}
        config = configuration(checkpoint, demo_data, tmp_path / "run", **changes)
        learners.append(make_learner(config))
        return learners[-1]

    yield make
    for one in learners:
        one.close()


def steps(learner, count):
    plan = StepPlan(0, Channel.A, 4, rollout_seed_base=0, evaluate_before=False, sync_after=False)
    for step in range(count):
        learner.next_requests(replace(plan, step=step))
        yield learner.finish_step()


def offered(learner):
    offer = learner.publisher.offer()
    learner.publisher.done()
    return offer


def differ(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > 0.01


def test_over_weights_in_4_bits_the_adapter_alone_learns_and_the_checkpoint_thinks_what_it_does(
    learner, tmp_path
):
    adapter = {"kind": "lora", "rank": 4, "alpha": 8.0, "quantize": "nf4"}
    one = learner(mode="full", model__adapter=adapter)
    before = weights_of(one)
    (report,) = steps(one, 1)
    assert report.step_metrics["optim/grad_norm"] > 0
    after = weights_of(one)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".lora_" in name for name in changed)
    assert one.publisher.offer().transport == TransportKind.GLOO
    one.publisher.done()
    one.save(tmp_path / "saved", "{}")
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    ids_1T = torch.tensor([one.publisher.canary.question().expanded_token_ids[-20:]])
    with torch.no_grad():
        mine, theirs = (
            model(input_ids=ids_1T, use_cache=False).logits for model in (one.loaded.model, saved)
        )
    torch.testing.assert_close(theirs, mine, rtol=0, atol=2e-5)


def test_an_adapter_in_the_vision_tower_learns_at_its_part_s_rate(learner):
    rates = {"vision_tower": {"adapted": True, "learning_rate": 1e-3}}
    adapter = {"kind": "lora", "rank": 4, "alpha": 8.0, "target_modules": ["qkv", "q_proj"]}
    one = learner(
        mode="auto",
        model__adapter=adapter,
        training__parts=rates,
        model__gradient_checkpointing=True,
    )
    before = weights_of(one)
    (report,) = steps(one, 1)
    assert report.step_metrics["optim/learning_rate.vision_tower"] == 1e-3
    assert report.step_metrics["optim/learning_rate"] == 1e-2
    after = weights_of(one)
    # The first step of AdamW moves by the rate, where the gradient is well above epsilon.
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    for name in (name for name, distance in moved.items() if distance):
        in_tower = name.startswith("model.visual.")
        assert moved[name] == pytest.approx(1e-3 if in_tower else 1e-2, rel=0.05), name
    parts = {model_part(name) for name, distance in moved.items() if distance}
    assert parts == {ModelPart.VISION_TOWER, ModelPart.LANGUAGE_MODEL}
    assert one.publisher.offer().transport == TransportKind.GLOO, "in full weights"


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_fresh_tokens_of_the_checkpoint_are_learned_offered_and_saved(
    learner, demo_checkpoint, tmp_path, gradient_checkpointing
):
    folder = shutil.copytree(demo_checkpoint, tmp_path / "fresh")
    vocabulary = AutoTokenizer.from_pretrained(folder).get_vocab()
    fresh = FreshTokens(vocabulary[COORD_TOKENS[0]], NUM_BINS)
    fresh.save(folder)
    one = learner(
        mode="auto", checkpoint=folder, model__gradient_checkpointing=gradient_checkpointing
    )
    embedding = "model.language_model.embed_tokens.weight"
    before = dict(one.parallel.weights.tensors())[embedding].clone()
    list(steps(one, 2))
    after = dict(one.parallel.weights.tensors())[embedding]
    assert (after != before).any(dim=1).nonzero()[:, 0].tolist() == list(fresh.ids)
    offer = one.publisher.offer()
    assert offer.transport == TransportKind.GLOO
    assert embedding in {tensor.name for tensor in offer.terms.tensors}
    one.publisher.done()
    one.publisher.checkpoint(tmp_path / "saved").write()
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.equal(saved.get_input_embeddings().weight, after)
    assert saved.lm_head.weight is saved.get_input_embeddings().weight
    assert FreshTokens.of(tmp_path / "saved") == fresh


def test_a_checkpoint_of_a_run_that_trains_the_embeddings_has_no_fresh_tokens(
    learner, demo_checkpoint, tmp_path
):
    folder = shutil.copytree(demo_checkpoint, tmp_path / "fresh")
    FreshTokens(100, 1000).save(folder)
    one = learner(mode="full", checkpoint=folder, model__adapter=None)
    one.publisher.checkpoint(tmp_path / "saved").write()
    assert FreshTokens.of(tmp_path / "saved") is None


def test_the_offer_is_the_adapter_and_after_a_fallback_the_merged_weights(learner):
    one = learner()
    list(steps(one, 1))
    offer = one.publisher.offer()
    assert (offer.transport, offer.version) == (TransportKind.ADAPTER, 1)
    assert len(safetensors.torch.load(offer.terms.files.tensors)) == 2 * 3 * 7
    assert one.publisher.send(offer).phase_s == {}
    one.publisher.done()
    one.publisher.fall_back_to_full()
    for version in (2, 3):
        offer = offered(one)
        names = " ".join(tensor.name for tensor in offer.terms.tensors)
        assert (offer.transport, offer.version) == ("rollmatch_gloo", version)
        assert "lora" not in names
        assert "base_layer" not in names


def test_the_canary_is_what_the_adapted_policy_thinks_and_the_checkpoint_thinks_it_too(
    learner, demo_checkpoint, tmp_path
):
    one = learner(mode="auto")
    untrained = offered(one).canary
    list(steps(one, 2))
    trained = offered(one).canary
    assert trained.expanded_token_ids == untrained.expanded_token_ids
    assert differ(trained.expected_logprobs, untrained.expected_logprobs)
    one.publisher.checkpoint(tmp_path / "saved").write()
    base = AutoModelForImageTextToText.from_pretrained(demo_checkpoint, dtype=torch.float32)
    saved = AutoModelForImageTextToText.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    restored = PeftModel.from_pretrained(base, tmp_path / "saved/adapter")
    ids_1T = torch.tensor([trained.expanded_token_ids[-20:]])
    with torch.no_grad():
        expected, *others = (
            model.eval()(input_ids=ids_1T, use_cache=False).logits
            for model in (one.loaded.model, saved, restored)
        )
    for logits in others:
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_the_canary_without_the_adapter_is_what_the_base_model_thinks_also_where_the_adapter_has_learned_before_it_was_first_asked(
    learner,
):
    one = learner()
    untrained = one.publisher.canary.logprobs()  # a fresh adapter has no effect
    list(steps(one, 2))
    probe = one.publisher.canary.probe()
    assert probe.base_logprobs == untrained
    assert differ(probe.expected_logprobs, probe.base_logprobs)


def test_an_adapter_that_cannot_be_written_down_is_a_failed_adapter_sync(demo_checkpoint):
    model = AutoModelForImageTextToText.from_pretrained(demo_checkpoint, dtype=torch.float32)
    apply_adapter(model, AdapterSection(kind="lora", rank=4), base_path="here", seed=0)
    model.peft_config.clear()
    message = r"offer on learner: the adapter cannot be serialized \(KeyError: 'default'\)"
    with pytest.raises(WeightSyncError, match=message):
        adapter_to_offer(model)
