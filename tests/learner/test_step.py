"""Loss and gradient of a step do not depend on packing (decision 6), and equal a
slow version written here.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from config_support import configuration
from rollout_support import make_rollout
from slow_losses import SlowRow

from learner.algorithms.matched_targets import ground_truth_target, rollout_target
from learner.collate import collate
from learner.model.loading import load_model
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import PromptEncoder, Segment
from learner.step import train_row
from learner.targets import TextWeights, TokenRole, target_settings, text_weights
from shared.config.pipeline import Channel
from shared.dataset import load_dataset

pytestmark = pytest.mark.slow

NUM_SEGMENTS = 6
ON = {"enabled": True, "weight": 1.0, "channels": ["A", "B"]}
COORD_TERMS = ("coord_ce", "soft_ce", "w1", "coord_gate", "text_gate")
COORD_REG = {f"{term}_weight": 1.0 for term in COORD_TERMS} | {
    "temperature": 0.8,
    "target_sigma": 2.0,
    "target_truncate": 16,
}
TOKEN_CE = {
    "desc_ce_weight": 1.0,
    "rollout_fn_desc_weight": 1.0,
    "rollout_matched_prefix_struct_weight": 1.0,
    "matched_desc_weight": 1.0,
}
PIPELINE = {
    "objective": [
        {"name": "token_ce", **ON, "config": TOKEN_CE},
        {"name": "coord_reg", **ON, "config": COORD_REG},
        {"name": "bbox_geo", **ON, "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0}},
    ],
    "diagnostics": [{"name": "coord_diag", **ON, "config": {}}],
}
TEXT_ROLES = (
    TokenRole.STRUCTURE,
    TokenRole.DESC,
    TokenRole.CLOSING,
    TokenRole.MATCHED_STRUCTURE,
    TokenRole.CORRECTED_DESC,
)


@pytest.fixture(scope="module")
def parts(demo_checkpoint, demo_data, tmp_path_factory):
    """Configuration with every term, model and segments of both channels, each with its image."""
    folder = tmp_path_factory.mktemp("run")
    config = configuration(demo_checkpoint, demo_data, folder, rollout_matching__pipeline=PIPELINE)
    loaded = load_model(config, torch.device("cpu"))
    encoder = PromptEncoder(loaded.processor, config.prompts)
    samples = load_dataset(
        config.data.train, on_bad_row="error", sort_objects=True, check_images=True
    )[:NUM_SEGMENTS]
    rules = target_settings(config)
    segments = {channel: [] for channel in Channel}
    for position, sample in enumerate(samples):
        prompt = encoder.encode(sample)
        truth = ground_truth_target(sample, loaded.codec, rules)
        segments[Channel.A].append(Segment(position, prompt, truth))
        # A response that found the first object only, a little shifted: matched slots, neutral text
        # and an append in one target.
        response = truth.token_ids[:-2]
        half = make_rollout(response[: len(response) // len(sample.objects) + 1], position=position)
        # The model called it otherwise: a name is corrected, too.
        first, *others = sample.objects
        renamed = replace(sample, objects=(replace(first, desc="zebra"), *others))
        target = _between_bins(rollout_target(half, renamed, loaded.codec, rules))
        segments[Channel.B].append(Segment(position, prompt, target))
    assert any(segment.target.label_overrides for segment in segments[Channel.B])
    return config, loaded, segments


def row_of(loaded, segments, weights):
    rope_index = loaded.model.model.get_rope_index
    return collate(segments, text_weights=weights, rope_index=rope_index)


def gradients_of(model):
    named = model.named_parameters()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def packings(segments):
    return ([segments], [segments[:2], segments[2:5], segments[5:]], [segments[::-1]])


def assert_same_gradients(packed, gradients):
    assert packed.keys() == gradients.keys()
    for name, gradient in gradients.items():
        named = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(packed[name], gradient, atol=5e-5, rtol=1e-3, msg=named)


def _between_bins(target):
    """Every third slot aims at a fraction, as optimal transport makes them."""
    aims = enumerate(target.coord_targets)
    moved = tuple(min(999.0, aim + 0.3 * (slot % 3 == 0)) for slot, aim in aims)
    return replace(target, coord_targets=moved)


def step(parts, channel, rows):
    """Loss, terms, diagnostics and gradients of a step made of these rows."""
    config, loaded, _ = parts
    loaded.model.zero_grad(set_to_none=True)
    pipeline = config.rollout_matching.pipeline
    objectives = build_objectives(pipeline, channel, loaded.coord_ids_C)
    sampling = Normalizer(excluded_ids=loaded.banned_token_ids)
    loss, terms, sums, slots = 0.0, Counter(), Counter(), Counter()
    for segments in rows:
        row = row_of(loaded, segments, text_weights(pipeline, channel))
        result = train_row(loaded.model, row, objectives, sampling)
        loss += result.loss / NUM_SEGMENTS
        for name, value in result.terms.items():
            terms[name] += value / NUM_SEGMENTS
        for name, (total, num_slots) in result.diagnostics.items():
            sums[name] += total
            slots[name] += num_slots
    means = {name: total / slots[name] for name, total in sums.items()}
    gradients = gradients_of(loaded.model)
    return loss, terms | means, {name: grad / NUM_SEGMENTS for name, grad in gradients.items()}


@pytest.mark.parametrize("channel", list(Channel))
def test_loss_and_gradients_do_not_depend_on_packing_with_images(parts, channel):
    segments = parts[2][channel]
    loss, terms, gradients = step(parts, channel, [[segment] for segment in segments])
    assert any("visual" in name for name in gradients)
    for rows in packings(segments):
        packed_loss, packed_terms, packed_gradients = step(parts, channel, rows)
        assert packed_loss == pytest.approx(loss, abs=2e-5)
        # Relative, too: an error of 246 bins is told in steps of 1.5e-5.
        assert packed_terms == pytest.approx(terms, rel=1e-6, abs=2e-5)
        assert_same_gradients(packed_gradients, gradients)


def slow_row(loaded, segment):
    """One segment alone, whose weights are means over its own positions."""
    prompt, target = segment.prompt, segment.target
    modality = torch.cat([prompt.modality_P, prompt.modality_P.new_zeros(len(target.token_ids))])
    with torch.no_grad():
        logits = loaded.model(
            input_ids=torch.tensor([[*prompt.token_ids, *target.token_ids]]),
            mm_token_type_ids=modality[None],
            pixel_values=prompt.pixel_values_RD,
            image_grid_thw=prompt.image_grid_I3,
        ).logits[0, len(prompt.token_ids) - 1 :]
    text = [i for i, role in enumerate(target.roles) if role in TEXT_ROLES]
    num_gated = sum(target.roles[i] != TokenRole.CLOSING for i in text)
    slots = list(zip(target.coord_positions, target.coord_targets, strict=True))
    boxes = target.box_slots
    labels = list(target.token_ids)
    for override in target.label_overrides:
        labels[override.position] = override.token_id
    return SlowRow(
        logits.double(),
        labels,
        loaded.coord_ids_C.tolist(),
        [(i, 1 / len(text), (target.roles[i] != TokenRole.CLOSING) / num_gated) for i in text],
        [(position, aim, 1 / len(slots)) for position, aim in slots],
        [(list(range(first, first + 4)), 1 / len(boxes)) for first in boxes],
    )


@pytest.mark.parametrize("channel", list(Channel))
def test_the_loss_is_the_mean_over_segments_of_each_terms_mean_over_its_own_positions(
    parts, channel
):
    _, loaded, segments = parts
    loss, terms, _ = step(parts, channel, [segments[channel][:4], segments[channel][4:]])
    slow = [slow_row(loaded, segment) for segment in segments[channel]]
    expected = {"loss/token_ce": [row.token_ce() for row in slow]}
    expected["loss/bbox_geo"] = [sum(row.bbox_geo().values()) for row in slow]
    for term in COORD_TERMS:
        expected[f"loss/coord_reg.{term}"] = [row.coord_reg(COORD_REG)[term] for row in slow]
    losses = {name: sum(values) / NUM_SEGMENTS for name, values in expected.items()}
    for name, value in losses.items():
        assert terms.pop(name) == pytest.approx(value, rel=2e-4, abs=1e-5), name
    error, top5, mass = np.mean([slot for row in slow for slot in row.coord_diag()], axis=0)
    assert terms == {
        "coord_diag/expected_bin_error": pytest.approx(error, rel=1e-4),
        "coord_diag/top5_accuracy": pytest.approx(top5, rel=1e-6),
        "coord_diag/coord_mass": pytest.approx(mass, rel=1e-4),
    }
    assert loss == pytest.approx(sum(losses.values()), rel=1e-4)


def test_prefix_coord_tokens_can_be_supervised_without_supervising_prefix_text_tokens(parts):
    """The loss half: which of a row's hidden states get a gradient from the unified loss of the old
    text.
    """
    config, loaded, segments = parts
    pipeline = config.rollout_matching.pipeline
    unified = pipeline.model_copy(update={"objective": pipeline.objective[:2]})
    readings = ((segment, segment.target.reading) for segment in segments[Channel.B])
    segment = next(one for one, reading in readings if reading.supervised and reading.appended)
    target = segment.target
    # As if every token of the prefix had been compared with the engine's: it is read, and not
    # learned from.
    num_prefix = target.reading.num_prefix
    compared = replace(segment, target=replace(target, compared_logprobs=(-1.0,) * num_prefix))
    row = row_of(loaded, [compared], TextWeights(desc=0.0, matched_structure=0.0))
    size = loaded.model.config.text_config.hidden_size
    hidden = torch.randn(1, row.num_tokens, size, requires_grad=True)
    objectives = build_objectives(unified, Channel.B, loaded.coord_ids_C)
    train_row(_Given(hidden, loaded.model), row, objectives, Normalizer())
    first = len(segment.prompt.token_ids) - 1
    learned = {n - first for n in hidden.grad[0].any(dim=1).nonzero()[:, 0].tolist()}
    slots = {i for i in target.coord_positions if i < num_prefix}
    assert {i for i in learned if i < num_prefix} == slots != set()
    tail = set(range(num_prefix, len(target.token_ids)))
    descs = {i for i in tail if target.roles[i] == TokenRole.DESC}
    assert descs
    assert learned & tail == tail - descs


def test_a_row_with_pixels_in_bfloat16_has_the_bits_of_one_whose_model_rounds_them(
    parts, demo_checkpoint, demo_data, tmp_path
):
    config = configuration(demo_checkpoint, demo_data, tmp_path, model__dtype="bfloat16")
    loaded = load_model(config, torch.device("cpu"))
    weights = text_weights(config.rollout_matching.pipeline, Channel.A)
    objectives = build_objectives(config.rollout_matching.pipeline, Channel.A, loaded.coord_ids_C)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        loaded.model.zero_grad(set_to_none=True)
        row = collate(
            parts[2][Channel.A],
            text_weights=weights,
            rope_index=loaded.rope_index,
            pixel_dtype=dtype,
        )
        assert row.inputs.pixel_values.dtype is dtype
        loss = train_row(loaded.model, row, objectives, Normalizer()).loss
        found[dtype] = loss, gradients_of(loaded.model)
    (loss, gradients), (rounded_loss, rounded) = found.values()
    assert rounded_loss == loss != 0
    for name, gradient in gradients.items():
        assert torch.equal(rounded[name], gradient), name


class _Given:
    """A model with the hidden states it is given."""

    def __init__(self, hidden, model):
        self.base_model, self.lm_head, self.dtype = lambda **_: self, model.lm_head, model.dtype
        self.config = model.config
        self.last_hidden_state = hidden
