"""The update: parts, schedule per part, updates that are skipped, masters in float32 (spec: one
optimizer update per step).
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from learner.model.optimizer import Optimizer, learning_rate_at
from learner.model.parts import freeze_parts
from learner.model.ranks import Ranks
from shared.config.training import TrainingSection
from shared.errors import ConfigError, LearnerError

NAN = float("nan")


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.merger = nn.Linear(4, 4), nn.Linear(4, 4)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.visual, self.language_model = Vision(), nn.Linear(4, 3)


class Tiny(nn.Module):
    """The parameter names of a Qwen-VL model around three matrices and three biases."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model = Body()
        self.to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model.language_model(
            torch.tanh(self.model.visual.merger(torch.tanh(self.model.visual.patch_embed(inputs))))
        )


def training(**changes):
    return TrainingSection.model_validate(
        {"seed": 1, "max_steps": 10, "learning_rate": 0.01, **changes}
    )


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
    own = [
        master
        for master, parameter in zip(updater.masters, model.parameters(), strict=True)
        if master is not parameter
    ]
    return own + [
        value
        for state in updater.optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_without_parts_the_update_is_plain_adamw_of_all_parameters_to_the_bit():
    model, config = Tiny(), training(lr_warmup_steps=2, lr_schedule="cosine", adam_beta2=0.95)
    slow = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(
        slow.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    updater = Optimizer(model, config, Ranks())
    for step in range(4):
        result = learn(model, updater, step)
        for index in range(3):
            slow(row(100 * step + index)).square().sum().backward()
        for parameter in slow.parameters():
            parameter.grad /= 3
        norm = torch.nn.utils.clip_grad_norm_(slow.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = learning_rate_at(step, config, 0.01)
        optimizer.step()
        optimizer.zero_grad()
        assert (result.grad_norm, result.learning_rate) == (
            float(norm),
            optimizer.param_groups[0]["lr"],
        )
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
    config = training(
        parts={part: {"frozen": True} for part in ("vision_tower", "aligner", "language_model")}
    )
    with pytest.raises(ConfigError, match=r"training\.parts: nothing is left to train; unfreeze"):
        freeze_parts(Tiny(), config.parts)
    adapted, config = Tiny(), training(parts={"language_model": {"frozen": True}})
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("language_model" in name)
    with pytest.raises(ConfigError, match=r"with model\.adapter the language model"):
        freeze_parts(adapted, config.parts)


def test_every_part_has_its_own_peak_on_the_same_schedule():
    config = training(
        lr_warmup_steps=4,
        lr_schedule="cosine",
        min_lr_ratio=0.1,
        parts={"vision_tower": {"learning_rate": 0.001}, "aligner": {"learning_rate": 0.1}},
    )
    model = Tiny()
    updater = Optimizer(model, config, Ranks())
    for step in range(10):
        result = learn(model, updater, step, rows=1)
        assert result.part_learning_rates["vision_tower"] == pytest.approx(
            result.learning_rate * 0.1
        )
        assert result.part_learning_rates["aligner"] == pytest.approx(result.learning_rate * 10)
        assert (
            result.metrics()["optim/learning_rate.aligner"] == result.part_learning_rates["aligner"]
        )
        assert "optim/learning_rate.language_model" not in result.metrics()


def test_a_part_moves_by_its_own_rate():
    """The first step of Adam moves every element by the learning rate, whatever its gradient."""
    model, config = (
        Tiny(),
        training(
            max_grad_norm=None,
            parts={
                "vision_tower": {"learning_rate": 1e-4},
                "language_model": {"learning_rate": 1e-2},
            },
        ),
    )
    before, updater = weights(model), Optimizer(model, config, Ranks())
    learn(model, updater, 0)
    moved = {
        name: (parameter - before[name]).abs().mean().item()
        for name, parameter in weights(model).items()
    }
    assert moved["model.visual.patch_embed.weight"] == pytest.approx(1e-4, rel=1e-2)
    assert moved["model.visual.merger.weight"] == pytest.approx(0.01, rel=1e-2)
    assert moved["model.language_model.weight"] == pytest.approx(1e-2, rel=1e-2)


def test_matrices_decay_and_norms_and_biases_do_not():
    model, config = Tiny(), training(weight_decay=0.5)
    before, updater = weights(model), Optimizer(model, config, Ranks())
    (0.0 * model(row(0)).sum()).backward()
    updater.update(0, 1)
    for name, parameter in weights(model).items():
        expected = before[name] * (1 - 0.01 * 0.5) if name.endswith("weight") else before[name]
        torch.testing.assert_close(parameter, expected, rtol=0, atol=1e-7)


def test_the_gradient_is_clipped_over_all_parts_together():
    model, config = Tiny(), training(max_grad_norm=1e-3, parts={"aligner": {"learning_rate": 0.5}})
    seen = {}
    updater = Optimizer(model, config, Ranks())
    updater.optimizer.register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in model.named_parameters()})
    )
    result = learn(model, updater, 0)
    assert result.grad_norm > 1e-3
    assert math.sqrt(
        sum(float(gradient.square().sum()) for gradient in seen.values())
    ) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("spoil", [NAN, float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_with_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(spoil, dtype):
    model, config = Tiny(dtype), training(max_nonfinite_updates=2, lr_schedule="linear")
    updater = Optimizer(model, config, Ranks())
    learn(model, updater, 0)
    before, state = weights(model), [tensor.clone() for tensor in state_tensors(model, updater)]
    skipped = [learn(model, updater, step, spoil=spoil) for step in (1, 2)]
    assert same(weights(model), before)
    assert all(torch.equal(a, b) for a, b in zip(state, state_tensors(model, updater), strict=True))
    assert [(result.skipped, result.num_skipped_in_a_row) for result in skipped] == [
        (True, 1),
        (True, 2),
    ]
    assert skipped[1].metrics() == {
        "optim/learning_rate": pytest.approx(0.008),
        "optim/num_skipped": 1.0,
        "optim/num_skipped_in_a_row": 2.0,
    }
    good = learn(model, updater, 3)
    assert (good.skipped, good.num_skipped_in_a_row, good.learning_rate) == (
        False,
        0,
        pytest.approx(0.007),
    )
    assert not same(weights(model), before)


def test_one_more_than_the_allowed_number_in_a_row_stops_the_run_with_a_remedy():
    model = Tiny()
    updater = Optimizer(model, training(max_nonfinite_updates=1), Ranks())
    learn(model, updater, 0, spoil=NAN)
    learn(model, updater, 1)
    learn(model, updater, 2, spoil=NAN)
    with pytest.raises(
        LearnerError,
        match=(
            r"step 4: the gradient norm is nan, and so were those of the 1 updates before .*lower"
            r" training\.learning_rate"
        ),
    ):
        learn(model, updater, 3, spoil=NAN)
    with pytest.raises(
        LearnerError,
        match=r"step 1: the gradient norm is nan \(training\.max_nonfinite_updates: 0\)",
    ):
        learn(model, Optimizer(model, training(), Ranks()), 0, spoil=NAN)


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
    assert learn(
        model, Optimizer(model, training(max_nonfinite_updates=1), TwoRanks(others)), 0
    ).skipped
    assert same(weights(model), before)


def test_a_rank_without_rows_takes_the_other_rank_s_update():
    alone, model = Tiny(), Tiny()
    learn(alone, Optimizer(alone, training(), Ranks()), 0)
    sample = Tiny()
    for index in range(3):
        sample(row(index)).square().sum().backward()
    Optimizer(
        model, training(), TwoRanks([parameter.grad for parameter in sample.parameters()])
    ).update(0, 3)
    assert same(weights(model), weights(alone))


@pytest.mark.slow
def test_in_bfloat16_updates_too_small_for_it_add_up_in_the_masters():
    model, exact = Tiny(torch.bfloat16), Tiny(torch.bfloat16).float()
    config = training(learning_rate=1e-5, max_steps=400)
    updater, reference = Optimizer(model, config, Ranks()), Optimizer(exact, config, Ranks())
    start = weights(model)
    learn(model, updater, 0, rows=1)
    learn(exact, reference, 0, rows=1)
    assert (
        sum(int((parameter != start[name]).sum()) for name, parameter in weights(model).items())
        < 10
    ), "1e-5 is less than half a unit of most weights"
    for step in range(1, 400):
        learn(model, updater, step, rows=1)
        learn(exact, reference, step, rows=1)
    moved = torch.cat(
        [
            (parameter.float() - start[name].float()).flatten()
            for name, parameter in weights(model).items()
        ]
    )
    should = torch.cat(
        [(parameter - start[name].float()).flatten() for name, parameter in weights(exact).items()]
    )
    assert torch.nn.functional.cosine_similarity(moved, should, dim=0) > 0.98
    assert all(
        parameter.dtype is torch.bfloat16 and parameter.grad is None
        for parameter in model.parameters()
    )


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
    for master, *gradients in zip(updater.masters, *rows, strict=True):
        assert torch.equal(master.grad, sum(gradients[1:], gradients[0]))


def test_bfloat16_weights_are_the_rounded_masters_and_two_runs_give_the_same_bits():
    ends = []
    for _ in range(2):
        model = Tiny(torch.bfloat16)
        updater = Optimizer(model, training(parts={"aligner": {"learning_rate": 0.002}}), Ranks())
        for step in range(3):
            learn(model, updater, step)
        assert all(
            torch.equal(master.bfloat16(), parameter)
            for master, parameter in zip(updater.masters, model.parameters(), strict=True)
        )
        ends.append(weights(model))
    assert same(*ends)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moving_the_state_between_rows_and_updates_changes_no_bit(dtype):
    stays, moves = Tiny(dtype), Tiny(dtype)
    updaters = [Optimizer(model, training(), Ranks()) for model in (stays, moves)]
    for step in range(3):
        for model in (stays, moves):
            model(row(1000 + step, dtype)).float().square().sum().backward()
        updaters[1].move_to(torch.device("cpu"))
        learn(stays, updaters[0], step)
        learn(moves, updaters[1], step)
        assert len(state_tensors(moves, updaters[1])) == len(list(moves.parameters())) * (
            2 if dtype is torch.float32 else 3
        )
    assert same(weights(stays), weights(moves))


def test_all_of_the_state_moves_and_nothing_of_the_model():
    model = Tiny()
    updater = Optimizer(model, training(), Ranks())
    learn(model, updater, 0)
    updater.move_to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in state_tensors(model, updater))
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_the_learning_rate_warms_up_and_falls_to_its_floor():
    config = training(lr_warmup_steps=4, lr_schedule="cosine", min_lr_ratio=0.2, max_steps=104)
    assert [learning_rate_at(step, config, 1.0) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate_at(54, config, 1.0) == pytest.approx(0.6)
    assert learning_rate_at(104, config, 1.0) == pytest.approx(0.2)
    assert learning_rate_at(
        54, config.model_copy(update={"lr_schedule": "linear"}), 1.0
    ) == pytest.approx(0.6)
    assert learning_rate_at(54, config.model_copy(update={"lr_schedule": "constant"}), 1.0) == 1.0
