"""The learner on an emulated CUDA device computes what it computes on the CPU, and waits rarely.

The kernels are those of the CPU, so in float32 a row has the same bits. Nothing here runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from config_support import configuration, trajectory_config
from emulated_cuda import CUDA, HOST, CudaTensor, EmulatedCuda, emulated_cuda, on_host
from learner_support import finish_step, half_right, timeless
from trajectory_support import begin, make_learner
from transformers import AutoConfig, AutoModelForCausalLM

from learner.algorithms.advantages import TokenAdvantages
from learner.algorithms.matched_targets import ground_truth_target
from learner.collate import collate
from learner.learner import Learner
from learner.model.checkpoint import CheckpointWeights
from learner.model.loading import load_model
from learner.model.optimizer.adamw import Optimizer
from learner.model.ranks import Ranks, RankTopology
from learner.model.sharding import Parallel, Reference
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.segments import PromptEncoder, Segment
from learner.step import RowResult, train_row
from learner.targets import AdvantageTarget, TextWeights, target_settings
from shared.config import RunConfig
from shared.config.pipeline import Channel, PipelineSection
from shared.dataset import load_dataset
from shared.schedule import RunSchedule, StepPlan
from shared.weight_sync.offer import CHECKSUMS
from shared.weight_sync.transports import Device, TransportKind

MOST_SYNCS = 8
"""Waits of the host for the device in a row."""


ON_CPU = RankTopology(TransportKind.INPROC, ())
ON_DEVICE = RankTopology(TransportKind.IPC, (), device=Device.CUDA)


# The emulation


def ones(device: torch.device = CUDA) -> torch.Tensor:
    return torch.ones(3).to(device)


REFUSED: list[Callable[[], object]] = [
    lambda: ones() + ones(HOST),
    lambda: torch.ones((), device=CUDA) * ones(HOST),
    lambda: ones(HOST).add_(ones()),
    lambda: torch.ones(()).add_(torch.ones((), device=CUDA)),
    lambda: torch.stack([torch.ones(()), torch.ones((), device=CUDA)]),
    lambda: torch.cat([ones(), ones(HOST)]),
    lambda: ones(HOST)[torch.tensor([0], device=CUDA)],
    lambda: ones().index_put((torch.tensor([0], device=CUDA),), torch.zeros(1)),
    lambda: ones().index_add(0, torch.tensor([0]), torch.zeros(1, device=CUDA)),
    lambda: torch.nn.functional.embedding(torch.tensor([0]), torch.ones(2, 2).to(CUDA)),
    lambda: torch._foreach_add_([ones()], [ones(HOST)]),
]


@pytest.mark.parametrize("operation", REFUSED, ids=range(len(REFUSED)))
def test_operands_on_two_devices_are_refused(operation: Callable[[], object]) -> None:
    refused = pytest.raises(RuntimeError, match="at least two devices")
    with emulated_cuda(), refused:
        operation()


def grown() -> None:
    """The gradient of an indexed parameter, through operators that C++ code calls."""
    weight = ones().requires_grad_()
    (weight[torch.tensor([0, 0, 2], device=CUDA)] * ones()).sum().backward()
    assert isinstance(weight.grad, CudaTensor)
    assert on_host(weight.grad).tolist() == [2, 0, 1]


COUNTED: list[tuple[Callable[[], object], int, int]] = [
    (lambda: ones() * torch.tensor(2.0) + 1, 0, 1),
    (lambda: ones()[torch.tensor([0])], 0, 2),
    (lambda: torch.tensor([1.0], device=CUDA), 0, 1),
    (lambda: torch.ones(3).pin_memory().to(CUDA, non_blocking=True), 0, 0),
    (lambda: torch.zeros(3, device=CUDA).new_zeros(2), 0, 0),
    (lambda: torch.zeros(3, device=CUDA).sum().item(), 1, 0),
    (lambda: bool(torch.zeros((), device=CUDA)), 1, 0),
    (lambda: f"{torch.zeros((), device=CUDA)}", 1, 0),
    (lambda: torch.zeros(3, device=CUDA).cpu(), 1, 0),
    (lambda: torch.zeros(3, device=CUDA).tolist(), 1, 0),
    (lambda: torch.zeros(3).copy_(torch.zeros(3, device=CUDA)), 1, 0),
    (lambda: torch.zeros(3, device=CUDA).nonzero(), 1, 0),
    (lambda: torch.nonzero_static(torch.zeros(3, device=CUDA), size=0), 0, 0),
    (lambda: torch.zeros(3, device=CUDA)[torch.zeros(3, device=CUDA) > 1], 1, 0),
    (lambda: torch.arange(3, device=CUDA).repeat_interleave(torch.arange(3, device=CUDA)), 1, 0),
    (grown, 0, 3),
]


@pytest.mark.parametrize(("operation", "syncs", "uploads"), COUNTED, ids=range(len(COUNTED)))
def test_waits_and_copies_to_the_device_are_counted(
    operation: Callable[[], object], syncs: int, uploads: int
) -> None:
    with emulated_cuda() as cuda:
        operation()
        assert (len(cuda.syncs), len(cuda.uploads)) == (syncs, uploads)


# A row


def entry(name: str, config: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "enabled": True, "weight": 0.5, "channels": ["B"], "config": config}


TERMS = ("coord_ce", "soft_ce", "w1", "coord_gate", "text_gate")
TEXT = {
    "desc_ce_weight": 1.0,
    "rollout_fn_desc_weight": 1.0,
    "rollout_matched_prefix_struct_weight": 1.0,
    "label_smoothing": 0.1,
}
COORD = {"temperature": 0.8, "target_sigma": 2.0, "target_truncate": 16}
POLICY = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "ratio_cap": 3.0,
    "normalize": "step",
    "advantage_std": False,
}
GROUNDING = [
    entry("token_ce", TEXT),
    entry("coord_reg", COORD | {f"{term}_weight": 1.0 for term in TERMS}),
    entry("bbox_geo", {"smoothl1_weight": 1.0, "ciou_weight": 1.0}),
]
ADAPTER = {"model__adapter": {"kind": "dora", "rank": 4}}
CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "no reference": ([entry("policy_gradient", POLICY | {"ratio_level": "call"})], {}),
    "k3": ([entry("policy_gradient", POLICY), entry("reference_kl", {"estimator": "k3"})], {}),
    "top, adapter": (
        [
            entry("policy_gradient", POLICY | {"clip": "dual", "ratio_level": "call_mean"}),
            entry("reference_kl", {"estimator": "top", "top_tokens": 3}),
        ],
        ADAPTER,
    ),
}


@dataclass
class Learned:
    """What a row has taught, on the host, and what the row cost on the emulated device."""

    result: RowResult
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    """After an update with these gradients."""
    syncs: tuple[str, ...] = ()
    uploads: tuple[str, ...] = ()
    num_varlen: int = 0


def segments_of(config: RunConfig, loaded: Any) -> list[Segment]:
    """Scenes with their images: two with the ground truth to learn, two with advantages."""
    samples = load_dataset(
        config.data.train, on_bad_row="error", sort_objects=True, check_images=True
    )[:4]
    encoder = PromptEncoder(loaded.processor, config.prompts)
    draw = np.random.default_rng(3)
    segments = []
    for position, sample in enumerate(samples):
        target: Any = ground_truth_target(sample, loaded.codec, target_settings(config))
        if position % 2:
            count = len(target.token_ids)
            columns = (draw.uniform(low, 1.0, count).tolist() for low in (-3.0, -1.0, 0.1, -2.0))
            logprobs, advantages, weights, of_teacher = map(tuple, columns)
            calls = tuple(number // 7 for number in range(count))
            credit = TokenAdvantages(
                tuple(range(count)), logprobs, advantages, weights, calls, of_teacher, 0.5
            )
            target = AdvantageTarget("x", target.token_ids, credit, logprobs)
        segments.append(Segment(position, encoder.encode(sample), target))
    return segments


def learn(
    config: RunConfig, policy: list[dict[str, Any]], cuda: EmulatedCuda | None = None
) -> Learned:
    """Train a row in chunks of 16 logits, on the CPU or the emulated device, and update."""
    device = HOST if cuda is None else CUDA
    loaded = load_model(config, device)
    pipeline = PipelineSection(
        objective=[*GROUNDING, *policy], diagnostics=[entry("coord_diag", {})]
    )
    reference = None
    if pipeline.needs_reference:
        copy = None if config.model.adapter else load_model(config, device).model
        parallel = Parallel(copy or loaded.model, CheckpointWeights(loaded.model), Ranks())
        reference = Reference(loaded.model, copy, parallel)
    draw = torch.Generator().manual_seed(0)
    trained = {name: one for name, one in loaded.model.named_parameters() if one.requires_grad}
    with torch.no_grad():  # away from the reference
        for parameter in trained.values():
            noise = 0.02 * torch.randn(parameter.shape, generator=draw)
            parameter += noise.to(device, parameter.dtype)
    optimizer = Optimizer(loaded.model, config.training, Ranks())
    objectives = build_objectives(pipeline, Channel.B, loaded.coord_ids_C)
    segments = segments_of(config, loaded)
    row = collate(segments, text_weights=TextWeights(1.0, 1.0), rope_index=loaded.rope_index)
    sampled_under = Normalizer(0.9, loaded.banned_token_ids)
    if cuda is not None:
        cuda.reset()
    result = train_row(
        loaded.model,
        row.to(device),
        objectives,
        sampled_under,
        logit_chunk=16,
        reference=reference,
    )
    assert len(row.positions_N) > 5 * 16
    cost = () if cuda is None else (tuple(cuda.syncs), tuple(cuda.uploads), cuda.num_varlen)
    gradients = [on_host(one).clone() for one in optimizer.weights.gradients()]
    optimizer.update(0, len(segments))
    weights = {name: on_host(one.detach()).clone() for name, one in trained.items()}
    return Learned(result, dict(zip(trained, gradients, strict=True)), weights, *cost)


@pytest.fixture
def configured(demo_checkpoint: Path, demo_data: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    settings = {"learner__cpu_threads": 1, "training__adam_epsilon": 1e-4}
    return lambda **changes: configuration(
        demo_checkpoint, demo_data, tmp_path, **settings | changes
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_row_in_float32_has_the_bits_of_the_cpu_and_waits_eight_times_at_most(
    case: str, configured: Callable[..., RunConfig]
) -> None:
    policy, changes = CASES[case]
    config = configured(**changes)
    expected = learn(config, policy)
    with emulated_cuda() as cuda:
        found = learn(config, policy, cuda)
    assert found.result.loss == expected.result.loss != 0.0
    assert found.result.terms == expected.result.terms
    assert found.result.diagnostics == expected.result.diagnostics
    assert torch.equal(found.result.compared_logprobs_K, expected.result.compared_logprobs_K)
    for name, gradient in expected.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name
    # The fused kernel of AdamW rounds in another order.
    for name, weight in expected.weights.items():
        torch.testing.assert_close(found.weights[name], weight, atol=1e-6, rtol=1e-5)
    assert len(found.syncs) <= MOST_SYNCS, found.syncs
    assert found.uploads == ()


@pytest.mark.slow
@pytest.mark.parametrize("head_dtype", ["model", "float32"])
def test_in_bfloat16_one_call_of_the_flash_kernel_computes_a_layer_of_a_row(
    configured: Callable[..., RunConfig], head_dtype: str
) -> None:
    policy, _ = CASES["k3"]
    config = configured(model__dtype="bfloat16", model__head_dtype=head_dtype)
    expected = learn(config, policy)
    with emulated_cuda() as cuda:
        found = learn(config, policy, cuda)
    shape = AutoConfig.from_pretrained(config.model.path)
    num_layers = shape.text_config.num_hidden_layers + shape.vision_config.depth
    assert found.num_varlen == 2 * num_layers, "of the model and of its reference"
    assert found.result.loss == pytest.approx(expected.result.loss, rel=0.01)
    apart, size = 0.0, 0.0
    for name, gradient in expected.gradients.items():
        assert found.gradients[name].dtype is torch.float32, "the gradient of a master weight"
        apart += (found.gradients[name] - gradient).square().sum().item()
        size += gradient.square().sum().item()
    assert 0 < apart < 0.05**2 * size
    assert len(found.syncs) <= MOST_SYNCS, found.syncs
    assert found.uploads == ()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_an_offloaded_optimizer_only_an_update_moves_gradients_and_each_of_them_once(
    configured: Callable[..., RunConfig], dtype: str
) -> None:
    policy, _ = CASES["k3"]
    found = {}
    for optimizer in ("adamw_torch", "adamw_offload", "adamw_offload_all"):
        config = configured(model__dtype=dtype, training__optimizer=optimizer)
        with emulated_cuda() as cuda:
            learned = learn(config, policy, cuda)
            found[optimizer] = (
                learned,
                [one for one in cuda.syncs if one.startswith("optimizer/adamw.py")],
            )
    (plain, _), (summed_there, moved), (summed_here, moved_by_all) = found.values()
    for one in (summed_there, summed_here):
        assert one.result.loss == plain.result.loss
        assert all(torch.equal(one.gradients[name], of) for name, of in plain.gradients.items())
        for name, weight in plain.weights.items():
            # The fused kernel of AdamW rounds in another order.
            torch.testing.assert_close(one.weights[name], weight, atol=1e-6, rtol=1e-2)
    assert len(summed_there.syncs) <= MOST_SYNCS, summed_there.syncs
    assert len(moved) == 1 + len(plain.gradients), "the gradient's norm, and each gradient"
    assert len(summed_here.syncs) - len(summed_there.syncs) == len(plain.gradients)
    assert len(moved_by_all) == len(plain.gradients), "in the row"


@pytest.mark.slow
def test_with_deterministic_algorithms_a_row_uses_no_operator_that_torch_refuses(
    configured: Callable[..., RunConfig],
) -> None:
    policy, _ = CASES["k3"]
    expected = learn(configured(), policy)
    with emulated_cuda() as cuda:
        torch.use_deterministic_algorithms(True)
        try:
            with pytest.raises(RuntimeError, match="cumsum has no deterministic kernel"):
                torch.ones(3).to(CUDA).cumsum(0)
            found = learn(configured(), policy, cuda)
        finally:
            torch.use_deterministic_algorithms(False)
    assert found.result.loss == pytest.approx(expected.result.loss, rel=1e-6)
    for name, gradient in expected.gradients.items():
        torch.testing.assert_close(found.gradients[name], gradient, atol=1e-6, rtol=1e-4)


# A run


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, ADAPTER], ids=["", "dora"])
def test_weights_and_canary_of_a_sync_are_those_of_the_cpu_to_the_bit(
    changes: dict[str, Any], configured: Callable[..., RunConfig]
) -> None:
    config = configured(rollout_matching__vllm__sync__bucket_bytes=200_000, **changes)

    def offered(place: RankTopology) -> tuple[Any, dict[str, torch.Tensor]]:
        publisher = Learner(config, place).publisher
        offer = publisher.offer()
        assert offer is not None and publisher.sender is not None
        tensors = publisher.sender.source.tensors()
        return offer, on_host(dict(publisher.sender.outgoing(offer.terms, tuple, tensors)))

    offer, weights = offered(ON_CPU)
    with emulated_cuda() as cuda:
        offer_of_device, weights_of_device = offered(ON_DEVICE)
        assert len(cuda.waits) == 1, "the update has ended before weights are read"
    assert offer_of_device.canary == offer.canary
    assert len(offer.canary.expected_logprobs) > 32
    assert weights_of_device.keys() == weights.keys()
    assert len(weights[CHECKSUMS]) >= 5 * 8
    for name, weight in weights.items():
        assert torch.equal(weights_of_device[name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"model__dtype": "bfloat16", "training__optimizer": "adamw_offload"}],
    ids=["float32", "masters on the host"],
)
def test_a_run_on_the_device_learns_as_on_the_cpu_and_resumes_to_the_bit(
    changes: dict[str, Any], configured: Callable[..., RunConfig], tmp_path: Path
) -> None:
    settings = {
        "training__max_steps": 2,
        "training__effective_batch_size": 4,
        "stage2_ab__schedule__warmup_steps": 1,
        "stage2_ab__channel_b__rollouts_per_step": 4,
    }
    config = configured(**settings | changes)
    exact = config.model.dtype == "float32"
    of_ground_truth, of_rollouts = RunSchedule(config).plans()

    def learned(learner: Learner, plan: StepPlan) -> dict[str, float]:
        if answers := half_right(learner, plan):
            learner.accumulate(answers)
        return timeless(finish_step(learner).metrics)

    on_cpu = Learner(config, ON_CPU)
    expected = [learned(on_cpu, plan) for plan in (of_ground_truth, of_rollouts)]
    with emulated_cuda() as cuda:
        learner = Learner(config, ON_DEVICE)
        found = [learned(learner, of_ground_truth)]
        in_updates = [entry for entry in cuda.syncs if entry.startswith("optimizer/adamw.py")]
        learner.save(tmp_path / "saved", "{}")
        saved = on_host(learner.optimizer.tensors())
        found.append(learned(learner, of_rollouts))
        resumed = Learner(
            configured(**settings, **changes, resume__run=tmp_path / "saved"), ON_DEVICE
        )
        restored = on_host(resumed.optimizer.tensors())
        resumed.publisher.version = learner.publisher.version
        assert learned(resumed, of_rollouts) == found[1]
    for of_cpu, of_device in zip(expected, found, strict=True):
        assert of_device == pytest.approx(of_cpu, rel=1e-4 if exact else 0.02, abs=1e-6)
    assert restored.keys() == saved.keys()
    for name, tensor in saved.items():
        assert torch.equal(restored[name], tensor), name
    if exact:
        assert len(in_updates) == 1, "only the norm of the gradient is read"


@pytest.mark.slow
def test_the_next_row_is_prepared_before_the_host_waits_for_a_row(
    configured: Callable[..., RunConfig],
) -> None:
    config = configured(
        training__packing=False,
        training__effective_batch_size=4,
        stage2_ab__schedule__warmup_steps=0,
        stage2_ab__channel_b__rollouts_per_step=4,
    )
    of_rollouts = RunSchedule(config).plan(0)
    reads: list[int] = []
    with emulated_cuda() as cuda:
        learner = Learner(config, ON_DEVICE)
        answers = half_right(learner, of_rollouts)
        body = learner.loaded.model.model
        rope_index = body.get_rope_index

        def collated(*ids: Any, **options: Any) -> Any:
            reads.append(sum(entry.endswith("copy to the host") for entry in cuda.syncs))
            return rope_index(*ids, **options)

        body.get_rope_index = collated
        cuda.reset()
        learner.accumulate(answers)
        assert cuda.uploads == []
    assert reads == [0, 0, 1, 2], "results that were read before a row was collated"


@pytest.mark.slow
def test_a_text_model_learns_with_an_adapter_near_its_start_as_on_the_cpu(
    demo_lm: Path, tmp_path: Path
) -> None:
    config = trajectory_config(
        demo_lm, tmp_path, reference={"estimator": "k3"}, model__adapter={"kind": "lora", "rank": 4}
    )
    plan = RunSchedule(config).plan(0)
    whole = AutoModelForCausalLM.from_pretrained(demo_lm)

    def learned(place: RankTopology) -> tuple[Any, dict[str, float]]:
        learner = make_learner(config, place=place)
        learner.accumulate(begin(learner, plan, model=whole))
        return learner.findings, timeless(finish_step(learner).metrics)

    expected = learned(ON_CPU)
    with emulated_cuda() as cuda:
        found = learned(ON_DEVICE)
        in_rows = [entry for entry in cuda.syncs if entry.startswith("learner/step.py")]
    assert found == expected
    assert len(in_rows) == expected[1]["packing/num_rows"]
