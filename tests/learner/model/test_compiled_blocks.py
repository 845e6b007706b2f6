"""Compiled blocks compute what others do, and a learner checks it at its start."""

from __future__ import annotations

import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
from config_support import configuration, trajectory_config
from learner_support import SMALL, finish_step, losses
from text_families import text_model
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.compilers import nop
from trajectory_support import make_learner as make_text_learner

from learner.model.attention import packed_row
from learner.model.compiled_blocks import (
    LEAST_STEPS,
    check_compiled_blocks,
    compile_blocks,
    compiles_blocks,
    has_compiled_blocks,
)
from learner.model.loading import load_model
from learner.model.ranks import Ranks
from shared.errors import ConfigError
from shared.schedule import RunSchedule


@pytest.fixture
def config(demo_checkpoint, demo_data, tmp_path):
    return lambda **changes: configuration(demo_checkpoint, demo_data, tmp_path, **SMALL | changes)


RECOMPUTED = {"model__gradient_checkpointing": True, "model__recompute_every": 2}
COMPILED = {
    "full": ({}, 1e-5, "aot_eager"),
    "recomputed lora": (
        {"model__adapter": {"kind": "lora", "rank": 4}} | RECOMPUTED,
        1e-5,
        "aot_eager",
    ),
    "masks": ({"model__attention": "sdpa"}, 1e-5, "eager"),
    "bfloat16": ({"model__dtype": "bfloat16"}, 2e-2, "eager"),
}
"""Changes, tolerance and compiler. Tracing takes 7 s of a core with `eager`, which leaves gradients
to autograd, and 21 s with `aot_eager`, which makes graphs of them too.
"""


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_blocks_learn_as_others_do_and_rows_of_other_lengths_use_the_same_graphs(
    config, monkeypatch, case
):
    """Without the code of a compiler, which takes minutes to make."""
    changes, tolerance, backend = COMPILED[case]
    traced = partial(compile_blocks, backend=backend)
    monkeypatch.setattr("learner.model.loading.compile_blocks", traced)
    torch._dynamo.reset()
    plain, expected = losses(config(**changes), 3)
    counters["stats"].clear()
    compiled, found = losses(config(**changes, model__compile_blocks=True), 3)
    assert found == pytest.approx(expected, rel=tolerance)
    (finding,) = compiled.findings
    assert finding.startswith("compiled blocks equal eager ones within ")
    assert plain.findings == ()
    names = [name for name, _ in compiled.loaded.model.named_parameters()]
    assert names == [name for name, _ in plain.loaded.model.named_parameters()]
    assert 4 <= counters["stats"]["unique_graphs"] <= 16

    before = counters["stats"]["unique_graphs"]
    for plan in list(RunSchedule(config()).plans())[3:6]:
        compiled.next_requests(plan)
        finish_step(compiled)
    # torch makes other graphs for sizes of 1, such as the number of images in a row.
    assert counters["stats"]["unique_graphs"] <= before + 2


@pytest.mark.slow
def test_a_compilers_code_of_the_blocks_computes_what_torch_does(demo_lm, tmp_path):
    """Loss and gradients of rows of several lengths, compiled as in a run. The last shares tokens."""
    results = []
    for is_compiled in (False, True):
        run = trajectory_config(demo_lm, tmp_path / "run", model__compile_blocks=is_compiled)
        model = load_model(run, torch.device("cpu")).model
        assert has_compiled_blocks(model) is is_compiled
        for lengths, num_shared in (
            ((7, 19), (0, 0)),
            ((5, 3, 11), (0,) * 3),
            ((9, 4, 6), (0, 5, 5)),
        ):
            ids_T = torch.arange(sum(lengths)) % 8
            places = zip(lengths, num_shared, strict=True)
            positions_T = torch.cat([torch.arange(at, at + length) for length, at in places])
            with packed_row(lengths, num_shared):
                body = model.base_model(
                    input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False
                )
            loss = model.lm_head(body.last_hidden_state).logsumexp(-1).sum()
            loss.backward()
        results.append((loss.item(), [one.grad for one in model.parameters()]))
    (loss, gradients), (found, found_gradients) = results
    assert found == pytest.approx(loss, rel=1e-6)
    for expected, gradient in zip(gradients, found_gradients, strict=True):
        torch.testing.assert_close(
            gradient, expected, rtol=0, atol=1e-5 * expected.abs().max().item()
        )


WHEN = [
    ({}, "cuda", True),
    ({}, "cpu", False),
    ({"training__max_steps": LEAST_STEPS - 1}, "cuda", False),
    ({"model__adapter": {"kind": "lora"}}, "cuda", True),
    ({"model__adapter": {"kind": "dora"}}, "cuda", False),
    ({"model__adapter": {"kind": "lora", "quantize": "nf4"}}, "cuda", False),
    ({"model__compile_blocks": False}, "cuda", False),
    ({"model__compile_blocks": True, "training__max_steps": 1}, "cpu", True),
]


@pytest.mark.parametrize(("changes", "device", "expected"), WHEN)
def test_auto_compiles_on_gpus_in_long_runs_if_the_adapter_allows_it(
    config, changes, device, expected
):
    auto = {"model__compile_blocks": "auto", "training__max_steps": LEAST_STEPS}
    run = config(**auto | changes)
    assert compiles_blocks(run, text_model("llama"), device) is expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("llama", "transformers names no blocks of "),
        ("qwen3_5", "is a qwen3_5 model, whose linear"),
    ],
)
def test_blocks_that_cannot_be_compiled_are_refused_and_auto_leaves_them(config, kind, reason):
    model = text_model("llama")
    model.config.model_type = kind
    if kind == "llama":
        model._no_split_modules = None
    auto = config(model__compile_blocks="auto", training__max_steps=LEAST_STEPS)
    assert not compiles_blocks(auto, model, "cuda")
    with pytest.raises(
        ConfigError, match=rf"^model\.compile_blocks: .*{reason}.*; set it to false$"
    ):
        compiles_blocks(config(model__compile_blocks=True), model, "cuda")


def eager(graph, _inputs):
    return graph.forward


def times(factor):
    """Return a compiler whose code computes values of another size."""

    def compiled(graph, _inputs):
        # Of the values, sizes are no tensors.
        return lambda *arguments: tuple(
            one * factor if isinstance(one, torch.Tensor) else one for one in graph(*arguments)
        )

    return compiled


def broken(_graph, _inputs):
    raise ValueError("no compiler here\nand more lines")


def broken_backward(graph, inputs):
    """Compile a forward. Its backward is compiled when it begins, after others have ended."""
    return aot_autograd(fw_compiler=nop, bw_compiler=broken)(graph, inputs)


def times_gradients(graph, inputs):
    """Compile a right forward, and a backward whose gradients have another size."""

    def backward(graph, inputs):
        return make_boxed_func(times(1.1)(graph, inputs))

    return aot_autograd(fw_compiler=nop, bw_compiler=backward)(graph, inputs)


def check(config, backend):
    """Check a text model's compiled blocks; return the outcome, and the model's logits."""
    torch._dynamo.reset()
    model = text_model("llama").requires_grad_(True)
    compile_blocks(model, backend=backend)
    ids_T = torch.arange(20) % 8

    def loss_of_row():
        hidden_TD = model.base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
        return torch.nn.functional.cross_entropy(model.lm_head(hidden_TD), ids_T)

    found = check_compiled_blocks(config, model, lambda loss: loss(), Ranks(), loss_of_row)
    assert [one.grad for one in model.parameters() if one.grad is not None] == []
    return found, has_compiled_blocks(model), loss_of_row()


FAULTS = [
    (
        times(1.1),
        r"compiled blocks of .* give other results than eager ones: .* differ by [\de.+-]+ of",
    ),
    (
        times(torch.nan),
        r"compiled blocks of .* give other results than eager ones: .* differ by nan of",
    ),
    (
        times_gradients,
        r"compiled blocks of .* give other results than eager ones: .* of their size",
    ),
    (broken, r"torch cannot compile the blocks of .* \(.*no compiler here\)"),
    (broken_backward, r"torch cannot compile the blocks of .* \(no compiler here and more lines\)"),
]


@pytest.mark.parametrize(("backend", "reason"), FAULTS)
def test_auto_leaves_blocks_that_a_compiler_gets_wrong_and_true_refuses_them(
    config, backend, reason
):
    expected = check(config(model__compile_blocks=True), eager)
    assert expected[0].startswith("compiled blocks equal eager ones within ")
    assert expected[1]
    found, is_compiled, loss = check(config(model__compile_blocks="auto"), backend)
    assert re.fullmatch(rf"blocks are not compiled: {reason}.*", found)
    assert not is_compiled
    assert loss == expected[2], "the loss of eager blocks, to the bit"
    with pytest.raises(ConfigError, match=rf"^model\.compile_blocks: {reason}.*; set it to false$"):
        check(config(model__compile_blocks=True), backend)


def test_an_error_of_eager_blocks_is_raised_as_it_is(config):
    def loss_of_row():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        check_compiled_blocks(
            config(model__compile_blocks="auto"),
            text_model("llama"),
            lambda loss: loss(),
            Ranks(),
            loss_of_row,
        )


def test_shards_whose_blocks_cannot_be_compiled_are_refused_also_by_auto(config):
    """Their forward has ended in the middle."""
    sharded = config(
        model__compile_blocks="auto",
        learner__parallel="fsdp",
        learner__world_size=2,
        rollout_matching__rollout_backend="vllm",
    )
    with pytest.raises(
        ConfigError, match=r"^model\.compile_blocks: torch cannot .* set it to false$"
    ):
        check(sharded, broken)


def test_a_difference_on_another_rank_leaves_the_blocks_of_all_ranks(config):
    class SecondOfTwo(Ranks):
        def max(self, value):
            assert value == 0, "this rank's blocks are right"
            return 1

    with patch(f"{__name__}.Ranks", SecondOfTwo):
        found, is_compiled, _ = check(config(model__compile_blocks="auto"), eager)
    assert found.startswith("blocks are not compiled: on another learner rank, compiled blocks of ")
    assert not is_compiled


def test_a_learner_leaves_the_blocks_of_its_reference_too(demo_lm, tmp_path, monkeypatch):
    monkeypatch.setattr("learner.model.loading.compiles_blocks", lambda *_: True)
    compiled = partial(compile_blocks, backend=times(1.1))
    monkeypatch.setattr("learner.model.loading.compile_blocks", compiled)
    torch._dynamo.reset()
    run = trajectory_config(
        demo_lm, tmp_path, reference={"estimator": "k3"}, model__compile_blocks="auto"
    )
    learner = make_text_learner(run)
    assert learner.findings[0].startswith("blocks are not compiled: ")
    assert learner.findings[1].startswith("a packed row equals its segments, ")
    assert not has_compiled_blocks(learner.loaded.model)
    assert not has_compiled_blocks(learner.reference.copy)
