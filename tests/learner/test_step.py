"""Loss and gradient of a step do not depend on packing (DESIGN 5, decision 6; FACTS 4), and equal a slow version written here."""

import pytest
import torch
from config_support import configuration

from learner.collate import collate
from learner.loading import load_model
from learner.objectives.registry import build_objectives
from learner.rules import target_rules, text_weights
from learner.segments import PromptEncoder, Segment
from learner.step import Sampling, backward_row, learning_rate_at
from learner.targets import TokenRole, ground_truth_target, rollout_target
from shared.config.pipeline import Channel
from shared.dataset import load_dataset
from shared.rollouts import FinishReason, Rollout

NUM_SEGMENTS = 6


@pytest.fixture(scope="module")
def parts(demo_checkpoint, demo_data, tmp_path_factory):
    """Configuration, model and segments of both channels, each with its image."""
    config = configuration(demo_checkpoint, demo_data, tmp_path_factory.mktemp("run"))
    loaded = load_model(config, torch.device("cpu"))
    encoder = PromptEncoder(loaded.processor, system_prompt=None, user_prompt=config.data.user_prompt)
    samples = load_dataset(config.data.train, on_bad_row="error", sort_objects=True, check_images=True)[:NUM_SEGMENTS]
    rules = target_rules(config)
    prompts = [encoder.encode(sample) for sample in samples]
    # A response that found the first object only, a little shifted: matched slots, neutral text and an append in one target.
    responses = [ground_truth_target(sample, loaded.codec, rules).token_ids[:-2] for sample in samples]
    rollouts = [
        Rollout(0, i, s.sample_id, (), r[: len(r) // len(s.objects)], None, None, None, FinishReason.LENGTH, (), 0, "a", 0, 1, 0.0)
        for i, (s, r) in enumerate(zip(samples, responses, strict=True))
    ]
    targets = {
        Channel.A: [ground_truth_target(sample, loaded.codec, rules) for sample in samples],
        Channel.B: [rollout_target(rollout, sample, loaded.codec, rules) for rollout, sample in zip(rollouts, samples, strict=True)],
    }
    segments = {channel: [Segment(i, prompt, target) for i, (prompt, target) in enumerate(zip(prompts, of, strict=True))] for channel, of in targets.items()}
    return config, loaded, segments


def step(parts, channel, rows):
    """Loss and gradients of a step made of these rows."""
    config, loaded, _ = parts
    loaded.model.zero_grad(set_to_none=True)
    pipeline = config.rollout_matching.pipeline
    loss, terms = 0.0, {}
    for segments in rows:
        row = collate(segments, text_weights=text_weights(pipeline, channel), rope_index=loaded.model.model.get_rope_index)
        result = backward_row(loaded.model, row, build_objectives(pipeline, channel, loaded.coord_ids_C), Sampling(0.0, loaded.banned_token_ids))
        loss += result.loss
        for name, value in result.terms.items():
            terms[name] = terms.get(name, 0.0) + value
    gradients = {name: p.grad / NUM_SEGMENTS for name, p in loaded.model.named_parameters() if p.grad is not None}
    return loss / NUM_SEGMENTS, {name: term / NUM_SEGMENTS for name, term in terms.items()}, gradients


@pytest.mark.parametrize("channel", list(Channel))
def test_loss_and_gradients_do_not_depend_on_packing_with_images(parts, channel):
    segments = parts[2][channel]
    loss, terms, gradients = step(parts, channel, [[segment] for segment in segments])
    for rows in ([segments], [segments[:2], segments[2:5], segments[5:]], [list(reversed(segments))]):
        packed_loss, packed_terms, packed_gradients = step(parts, channel, rows)
        assert packed_loss == pytest.approx(loss, abs=2e-5)
        assert packed_terms == pytest.approx(terms, abs=2e-5)
        assert packed_gradients.keys() == gradients.keys()
        assert any("visual" in name for name in gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(packed_gradients[name], gradient, atol=5e-5, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}")


def test_the_same_rows_twice_give_the_same_bits(parts):
    segments = parts[2][Channel.B]
    first, second = (step(parts, Channel.B, [segments[:3], segments[3:]]) for _ in range(2))
    assert first[0] == second[0]
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


@pytest.mark.parametrize("channel", list(Channel))
def test_the_loss_is_the_mean_over_segments_of_each_terms_mean_over_its_own_positions(parts, channel):
    _config, loaded, segments = parts
    loss, terms, _ = step(parts, channel, [segments[channel][:4], segments[channel][4:]])
    expected = {"ce": 0.0, "soft": 0.0, "w1": 0.0, "gate": 0.0}
    weights = {TokenRole.STRUCTURE: 1.0, TokenRole.DESC: 1.0, TokenRole.CLOSING: 1.0, TokenRole.MATCHED_STRUCTURE: 1.0}
    for segment in segments[channel]:
        prompt, target = segment.prompt, segment.target
        ids = torch.tensor([[*prompt.token_ids, *target.token_ids]])
        modality = torch.cat([prompt.modality_P, torch.zeros(len(target.token_ids), dtype=prompt.modality_P.dtype)])[None]
        with torch.no_grad():
            logits = loaded.model(input_ids=ids, mm_token_type_ids=modality, pixel_values=prompt.pixel_values_RD, image_grid_thw=prompt.image_grid_I3).logits[0]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        at = len(prompt.token_ids) - 1
        total = sum(weights.get(TokenRole(int(role)), 0.0) for role in target.roles)
        for i, (token, role) in enumerate(zip(target.token_ids, target.roles, strict=True)):
            expected["ce"] -= weights.get(TokenRole(int(role)), 0.0) / total * logprobs[at + i, token].item() / NUM_SEGMENTS
        for position, bin_ in zip(target.coord_positions, target.coord_targets, strict=True):
            coord = logits[at + position, loaded.coord_ids_C].double()
            k = torch.arange(1000)
            q = torch.where((k - bin_).abs() <= 16, torch.exp(-0.5 * ((k - bin_) / 2.0) ** 2), 0.0).double()
            q /= q.sum()
            share = 1 / len(target.coord_positions) / NUM_SEGMENTS
            expected["soft"] -= (q * torch.log_softmax(coord, dim=-1)).sum().item() * share
            expected["w1"] += (torch.softmax(coord, dim=-1).cumsum(0) - q.cumsum(0)).abs().sum().item() / 999 * share
            expected["gate"] += (torch.logsumexp(logits[at + position].double(), 0) - torch.logsumexp(coord, 0)).item() * share
    assert terms["loss/token_ce"] == pytest.approx(expected["ce"], rel=1e-4)
    assert terms["loss/coord_reg.soft_ce"] == pytest.approx(expected["soft"], rel=1e-4)
    assert terms["loss/coord_reg.w1"] == pytest.approx(expected["w1"], rel=1e-4)
    assert terms["loss/coord_reg.coord_gate"] == pytest.approx(expected["gate"], rel=1e-4)
    assert loss == pytest.approx(sum(expected.values()), rel=1e-4)


def test_a_row_longer_than_a_logit_chunk_gives_the_same_loss_and_gradient(parts, monkeypatch):
    segments = parts[2][Channel.B]
    loss, terms, gradients = step(parts, Channel.B, [segments])
    monkeypatch.setattr("learner.step.LOGIT_CHUNK", 17)
    chunked_loss, chunked_terms, chunked_gradients = step(parts, Channel.B, [segments])
    assert chunked_loss == pytest.approx(loss, rel=1e-5)
    assert chunked_terms == pytest.approx(terms, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(chunked_gradients[name], gradient, atol=1e-5, rtol=1e-3)


def test_the_learning_rate_warms_up_and_falls_to_its_floor(parts):
    training = parts[0].training.model_copy(update={"learning_rate": 1.0, "lr_warmup_steps": 4, "lr_schedule": "cosine", "min_lr_ratio": 0.2, "max_steps": 104})
    assert [learning_rate_at(step, training) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate_at(54, training) == pytest.approx(0.6)
    assert learning_rate_at(104, training) == pytest.approx(0.2)
    assert learning_rate_at(54, training.model_copy(update={"lr_schedule": "linear"})) == pytest.approx(0.6)
    assert learning_rate_at(54, training.model_copy(update={"lr_schedule": "constant"})) == 1.0
