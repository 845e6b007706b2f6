"""The update: parts, schedule per part, updates that are skipped, masters in float32 (spec: one
optimizer update per step).
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from learner.model.optimizer.adamw import (
    InPlaceEmbedding,
    Optimizer,
    learning_rate_at,
    update_metrics,
)
from learner.model.parts import freeze_parts
from learner.model.ranks import Ranks
from shared.config.training import TrainingSection
from shared.errors import ConfigError, LearnerError

NAN = float("nan")


class Tiny(nn.Module):
    """The parameter names of a Qwen-VL model around three matrices and three biases."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        visual = nn.ModuleDict({"patch_embed": nn.Linear(4, 4), "merger": nn.Linear(4, 4)})
        self.model = nn.ModuleDict({"visual": visual, "language_model": nn.Linear(4, 3)})
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        visual = self.model["visual"]
        seen = torch.tanh(visual["merger"](torch.tanh(visual["patch_embed"](inputs))))
        return self.model["language_model"](seen)


def training(**changes):
    return TrainingSection(**{"seed": 1, "max_steps": 10, "learning_rate": 0.01, **changes})


def optimizer_of(model, ranks=None, **changes):
    return Optimizer(model, training(**changes), ranks or Ranks())


def row(index, dtype=torch.float32):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(index)).to(dtype)


def learn(model, updater, step, rows=3, spoil=None):
    """A step of some rows; `spoil` takes the place of the last row's loss's factor."""
    dtype = next(model.parameters()).dtype
    for index in range(rows):
        factor = spoil if spoil is not None and index == rows - 1 else 1.0
        (factor * model(row(100 * step + index, dtype)).float().square().sum()).backward()
    return updater.update(step, rows)


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def state_tensors(model, updater):
    """What the updater holds beside the model: masters of its own, and AdamW's moments."""
    pairs = zip(updater.masters, model.parameters(), strict=True)
    own = [master for master, parameter in pairs if master is not parameter]
    states = updater.optimizer.state.values()
    return own + [value for state in states for name, value in state.items() if name != "step"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_without_parts_the_update_is_plain_adamw_of_all_parameters_to_the_bit():
    model, config = Tiny(), training(lr_warmup_steps=2, lr_schedule="cosine", adam_beta2=0.95)
    slow = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        slow.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True
    )
    updater = Optimizer(model, config, Ranks())
    for step in range(4):
        result = learn(model, updater, step)
        for index in range(3):
            slow(row(100 * step + index)).square().sum().backward()
        for parameter in slow.parameters():
            parameter.grad /= 3
        norm = torch.nn.utils.clip_grad_norm_(slow.parameters(), 1.0)
        rate = optimizer.param_groups[0]["lr"] = learning_rate_at(step, config, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        assert (result.grad_norm, result.learning_rate) == (float(norm), rate)
        assert same(weights(model), weights(slow))


def test_a_frozen_part_keeps_its_bits_and_the_others_move():
    model, config = Tiny(), training(parts={"vision_tower": {"frozen": True}})
    freeze_parts(model, config.parts)
    before, updater = weights(model), Optimizer(model, config, Ranks())
    learn(model, updater, 0)
    after = weights(model)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {
        f"model.{part}.{kind}"
        for part in ("visual.merger", "language_model")
        for kind in ("weight", "bias")
    }


def test_nothing_left_to_train_is_refused():
    parts = {part: {"frozen": True} for part in ("vision_tower", "aligner", "language_model")}
    with pytest.raises(ValidationError, match="so nothing is trained; unfreeze"):
        training(parts=parts)
    adapted, config = Tiny(), training(parts={"language_model": {"frozen": True}})
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("language_model" in name)
    with pytest.raises(ConfigError, match=r"training\.parts: .*unfreeze .*model\.adapter"):
        freeze_parts(adapted, config.parts)


def test_every_part_has_its_own_peak_on_the_same_schedule():
    parts = {"vision_tower": {"learning_rate": 0.001}, "aligner": {"learning_rate": 0.1}}
    schedule = {"lr_warmup_steps": 4, "lr_schedule": "cosine", "min_lr_ratio": 0.1}
    model = Tiny()
    updater = optimizer_of(model, **schedule, parts=parts)
    for step in range(10):
        result = learn(model, updater, step, rows=1)
        rates, metrics = result.part_learning_rates, update_metrics([result])
        assert rates["vision_tower"] == pytest.approx(result.learning_rate * 0.1)
        assert rates["aligner"] == pytest.approx(result.learning_rate * 10)
        assert metrics["optim/learning_rate.aligner"] == rates["aligner"]
        assert "optim/learning_rate.language_model" not in metrics


def test_a_part_moves_by_its_own_rate():
    """The first step of Adam moves every element by the learning rate, whatever its gradient."""
    model = Tiny()
    rates = {"vision_tower": {"learning_rate": 1e-4}, "language_model": {"learning_rate": 1e-2}}
    before, updater = weights(model), optimizer_of(model, max_grad_norm=None, parts=rates)
    learn(model, updater, 0)
    after = weights(model)
    for part, rate in (
        ("visual.patch_embed", 1e-4),
        ("visual.merger", 0.01),
        ("language_model", 1e-2),
    ):
        name = f"model.{part}.weight"
        moved = (after[name] - before[name]).abs().mean().item()
        assert moved == pytest.approx(rate, rel=1e-2), name


def test_matrices_decay_and_norms_and_biases_do_not():
    model = Tiny()
    before, updater = weights(model), optimizer_of(model, weight_decay=0.5)
    (0.0 * model(row(0)).sum()).backward()
    updater.update(0, 1)
    for name, parameter in weights(model).items():
        expected = before[name] * (1 - 0.01 * 0.5) if name.endswith("weight") else before[name]
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-7)


def test_the_gradient_is_clipped_over_all_parts_together():
    model, clipped = Tiny(), []
    updater = optimizer_of(model, max_grad_norm=1e-3, parts={"aligner": {"learning_rate": 0.5}})
    updater.optimizer.register_step_pre_hook(
        lambda *_: clipped.extend(float(p.grad.square().sum()) for p in model.parameters())
    )
    result = learn(model, updater, 0)
    assert result.grad_norm > 1e-3
    assert math.sqrt(sum(clipped)) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("spoil", [NAN, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(spoil, dtype):
    model = Tiny(dtype)
    updater = optimizer_of(model, max_nonfinite_updates=2, lr_schedule="linear")
    learn(model, updater, 0)
    before, state = weights(model), [tensor.clone() for tensor in state_tensors(model, updater)]
    skipped = [learn(model, updater, step, spoil=spoil) for step in (1, 2)]
    assert same(weights(model), before)
    assert all(torch.equal(a, b) for a, b in zip(state, state_tensors(model, updater), strict=True))
    counts = [(result.skipped, result.num_skipped_in_a_row) for result in skipped]
    assert counts == [(True, 1), (True, 2)]
    assert update_metrics(skipped[1:]) == {
        "optim/learning_rate": pytest.approx(0.008),
        "optim/num_skipped": 1.0,
        "optim/num_skipped_in_a_row": 2.0,
    }
    good = learn(model, updater, 3)
    assert (good.skipped, good.num_skipped_in_a_row) == (False, 0)
    assert good.learning_rate == pytest.approx(0.007)
    assert not same(weights(model), before)


def test_one_more_than_the_allowed_number_in_a_row_stops_the_run_with_a_remedy():
    model = Tiny()
    updater = optimizer_of(model, max_nonfinite_updates=1)
    learn(model, updater, 0, spoil=NAN)
    learn(model, updater, 1)
    learn(model, updater, 2, spoil=NAN)
    message = (
        r"step 4: the gradient norm is nan, and the 1 updates before were not finite .*lower"
        r" training\.learning_rate"
    )
    with pytest.raises(LearnerError, match=message):
        learn(model, updater, 3, spoil=NAN)
    message = r"step 1: the gradient norm is nan \(training\.max_nonfinite_updates: 0\)"
    with pytest.raises(LearnerError, match=message):
        learn(model, optimizer_of(model), 0, spoil=NAN)


class TwoRanks:
    """This rank of two; the other one's gradients are given, in the order of this one's."""

    rank, world_size = 0, 2

    def __init__(self, other) -> None:
        self.other = other

    def any_of(self, flags):
        return [True] * len(flags)

    def sum_gradients(self, gradients):
        for gradient, other in zip(gradients, self.other, strict=True):
            gradient += other


def test_a_gradient_that_is_not_finite_on_another_rank_is_skipped_here_too():
    model = Tiny()
    others = [torch.zeros_like(parameter) for parameter in model.parameters()]
    others[2][0] = NAN
    before = weights(model)
    updater = optimizer_of(model, TwoRanks(others), max_nonfinite_updates=1)
    assert learn(model, updater, 0).skipped
    assert same(weights(model), before)


@pytest.mark.slow
def test_in_bfloat16_updates_too_small_for_it_add_up_in_the_masters():
    model, exact = Tiny(torch.bfloat16), Tiny(torch.bfloat16).float()
    settings = {"learning_rate": 1e-5, "max_steps": 400}
    updater, reference = optimizer_of(model, **settings), optimizer_of(exact, **settings)
    start = weights(model)

    def moves(of):
        return torch.cat([(weight - start[name].float()).flatten() for name, weight in of.items()])

    for step in range(400):
        learn(model, updater, step, rows=1)
        learn(exact, reference, step, rows=1)
        if step == 0:
            changed = int((moves(weights(model)) != 0).sum())
            assert changed < 10, "1e-5 is less than half a unit of most weights"
    similarity = torch.nn.functional.cosine_similarity
    assert similarity(moves(weights(model)), moves(weights(exact)), dim=0) > 0.98
    for parameter in model.parameters():
        assert parameter.dtype is torch.bfloat16
        assert parameter.grad is None


@pytest.mark.slow
def test_in_bfloat16_the_gradients_of_a_step_s_rows_are_summed_in_float32():
    model = Tiny(torch.bfloat16)
    updater = Optimizer(model, training(), Ranks())
    rows = []
    for index in range(64):
        model(row(index, torch.bfloat16)).float().square().sum().backward()
        single = Tiny(torch.bfloat16)
        single(row(index, torch.bfloat16)).float().square().sum().backward()
        rows.append([parameter.grad.float() for parameter in single.parameters()])
    for total, *gradients in zip(updater.weights.gradients(), *rows, strict=True):
        assert torch.equal(total, sum(gradients[1:], gradients[0]))


def test_bfloat16_weights_are_the_rounded_masters_and_two_runs_give_the_same_bits():
    ends = []
    for _ in range(2):
        model = Tiny(torch.bfloat16)
        updater = optimizer_of(model, parts={"aligner": {"learning_rate": 0.002}})
        for step in range(3):
            learn(model, updater, step)
        pairs = zip(updater.masters, model.parameters(), strict=True)
        assert all(torch.equal(master.bfloat16(), parameter) for master, parameter in pairs)
        ends.append(weights(model))
    assert same(*ends)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        *(("cosine", step, 0.25 * (step + 1)) for step in range(4)),
        ("cosine", 54, pytest.approx(0.6)),
        ("cosine", 104, pytest.approx(0.2)),
        ("linear", 54, pytest.approx(0.6)),
        ("constant", 54, 1.0),
    ],
)
def test_the_learning_rate_warms_up_and_falls_to_its_floor(schedule, step, rate):
    config = training(lr_warmup_steps=4, lr_schedule=schedule, min_lr_ratio=0.2, max_steps=104)
    assert learning_rate_at(step, config, 1.0) == rate


class Wide(nn.Module):
    """Two matrices of 4,096 values and more, an embedding, a bias."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(70, 64),
                "layers": nn.Linear(64, 64),
                "norm": nn.Linear(64, 80, bias=False),
            }
        )
        self.model = nn.ModuleDict({"language_model": self.model})
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        part = self.model["language_model"]
        words = part["embed_tokens"]((inputs[:, 0].abs() * 20).long().clamp(max=69))
        return part["norm"](torch.tanh(part["layers"](words)))


class Tied(nn.Module):
    """A language model of an embedding, with padding, that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        words = nn.Embedding(40, 6, padding_idx=3)
        self.model = nn.ModuleDict({"language_model": nn.ModuleDict({"embed_tokens": words})})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.model["language_model"]["embed_tokens"]
        return torch.tanh(words(ids)) @ words.weight.T


def test_an_embedding_adds_its_gradients_in_place_and_as_torch_does():
    plain = Tied()
    ours = copy.deepcopy(plain)
    optimizer_of(ours)
    embedding = ours.model["language_model"]["embed_tokens"]
    assert type(embedding) is InPlaceEmbedding
    places = set()
    for ids in ([[5, 3, 5, 9]], [[9, 9, 0, 3]], [[5, 1]]):
        for model in (plain, ours):
            model(torch.tensor(ids)).square().sum().backward()
        (expected,) = (parameter.grad for parameter in plain.parameters())
        torch.testing.assert_close(embedding.weight.grad, expected, rtol=1e-6, atol=1e-7)
        places.add(embedding.weight.grad.data_ptr())
    assert len(places) == 1
    with torch.no_grad():
        ids = torch.tensor([[5, 1]])
        assert torch.equal(ours(ids), plain(ids))


OFFLOADING = ("adamw_offload", "adamw_offload_all")
SAVING = ("adamw_bnb_8bit", *OFFLOADING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Tiny, Wide])
@pytest.mark.parametrize("optimizer", OFFLOADING)
def test_with_masters_and_moments_offloaded_every_bit_is_as_without(optimizer, kind, dtype):
    plain, offloaded = kind(dtype), kind(dtype)
    settings = {"weight_decay": 0.1, "adam_beta2": 0.95}
    here = optimizer_of(plain, **settings)
    away = optimizer_of(offloaded, optimizer=optimizer, **settings)
    for step in range(4):
        assert learn(plain, here, step) == learn(offloaded, away, step)
    assert same(weights(plain), weights(offloaded))
    assert same(here.tensors(), away.tensors())
    assert all(parameter.grad is None for parameter in offloaded.parameters())
    assert not any(
        master is parameter
        for master, parameter in zip(away.masters, offloaded.parameters(), strict=True)
    )


@pytest.mark.slow
def test_8_bit_moments_move_the_weights_as_those_of_32_bits_do():
    """Within a twentieth of the way of 20 updates (0.020 of it on 2026-11-27)."""
    exact, coded = Wide(), Wide()
    start = weights(exact)
    updaters = optimizer_of(exact), optimizer_of(coded, optimizer="adamw_bnb_8bit")
    for step in range(20):
        for model, updater in zip((exact, coded), updaters, strict=True):
            learn(model, updater, step)
    moved = torch.cat([(weights(exact)[name] - start[name]).flatten() for name in start])
    apart = torch.cat([(weights(exact)[name] - weights(coded)[name]).flatten() for name in start])
    assert 0 < apart.norm() < 0.05 * moved.norm()
    states = {
        name: updaters[1].optimizer.state[master]["state1"].dtype
        for (name, _), master in zip(coded.named_parameters(), updaters[1].masters, strict=True)
    }
    half = "model.language_model"
    assert states == {
        f"{half}.embed_tokens.weight": torch.float32,
        f"{half}.layers.weight": torch.uint8,
        f"{half}.layers.bias": torch.float32,
        f"{half}.norm.weight": torch.uint8,
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("optimizer", SAVING)
def test_a_resumed_run_goes_on_as_if_it_had_never_ended(optimizer, dtype):
    whole, first, resumed = Wide(dtype), Wide(dtype), Wide(dtype)
    going, ending = (optimizer_of(model, optimizer=optimizer) for model in (whole, first))
    for step in range(3):
        learn(whole, going, step)
        learn(first, ending, step)
    goes_on = optimizer_of(resumed, optimizer=optimizer)
    goes_on.load_tensors({name: value.clone() for name, value in ending.tensors().items()})
    for step in range(3, 6):
        assert learn(whole, going, step) == learn(resumed, goes_on, step)
    assert same(weights(whole), weights(resumed))
    assert same(going.tensors(), goes_on.tensors())


@pytest.mark.slow
def test_moments_of_another_optimizer_are_refused_by_name():
    model = Wide()
    updater = optimizer_of(model)
    learn(model, updater, 0)
    other = optimizer_of(Wide(), optimizer="adamw_bnb_8bit")
    message = r"resume\.run: the checkpoint has other moments of .*adamw_bnb_8bit; resume with"
    with pytest.raises(ConfigError, match=message):
        other.load_tensors(updater.tensors())


@pytest.mark.parametrize(
    ("optimizer", "dtype", "held"),
    [
        ("adamw_torch", torch.float32, 2),
        ("adamw_torch", torch.bfloat16, 3),
        *((optimizer, torch.float32, None) for optimizer in SAVING),
    ],
)
def test_moving_the_state_between_rows_and_updates_changes_no_bit(optimizer, dtype, held):
    stays, moves = Wide(dtype), Wide(dtype)
    staying, moving = (optimizer_of(model, optimizer=optimizer) for model in (stays, moves))
    for step in range(3):
        for model in (stays, moves):
            model(row(1000 + step, dtype)).float().square().sum().backward()
        moving.move_to(torch.device("cpu"))
        learn(stays, staying, step)
        learn(moves, moving, step)
        tensors = state_tensors(moves, moving)
        assert held is None or len(tensors) == len(list(moves.parameters())) * held
    assert same(weights(stays), weights(moves))
    if dtype is torch.float32 and optimizer != "adamw_bnb_8bit":
        moving.move_to(torch.device("meta"))
        away = {tensor.is_meta for tensor in state_tensors(moves, moving)}
        assert away == {optimizer == "adamw_torch"}
        assert not any(parameter.is_meta for parameter in moves.parameters())
