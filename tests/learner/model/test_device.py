"""Work on a GPU is queued: what needs it done waits first. The device here notes that it does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_support import configuration
from peft import LoraConfig, inject_adapter_in_model
from ray.exceptions import ActorDiedError
from torch import nn
from torch.distributed import DistBackendError
from transformers import PreTrainedConfig

from launch.processes import learner_client
from launch.processes.learner_client import LearnerCall, LearnerClient, RayRanks
from learner.learner import Learner
from learner.model.adapters import NAME
from learner.model.checkpoint import CheckpointWeights
from learner.model.checkpoint_folder import BaseFiles
from learner.model.ranks import LearnerDevice, Ranks, RankTopology, ReceiverGroup
from learner.model.sharding import Parallel
from learner.segments import EncodedPrompt
from learner.weight_sync.canary import Canary
from learner.weight_sync.publisher import WeightPublisher
from learner.weight_sync.sender import WeightSender
from rollout_actors.engine import ray_calls
from shared.config.job import TimeoutsSection
from shared.errors import CollectiveError, ConfigError, LearnerError, LostLearnerError
from shared.weight_sync.transports import Device, TransportKind

CPU = torch.device("cpu")


class WatchedDevice(LearnerDevice):
    """A device that notes when it is waited for."""

    def __init__(self, events: list[str], *, finds: Exception | None = None) -> None:
        """`finds`: what waiting for it raises."""
        super().__init__(CPU)
        self._events = events
        self._finds = finds
        self.waited_until_s = 0.0

    def wait(self) -> None:
        self._events.append("wait")
        if self._finds is not None:
            raise self._finds
        self.waited_until_s = time.time()


class WatchedModel(nn.Module):
    """A model of one adapted layer that notes who looks at its parameters or computes with them."""

    dtype = torch.float32

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self._events = events
        self.layer = nn.Linear(4, 9)
        inject_adapter_in_model(LoraConfig(target_modules=["layer"]), self, NAME)
        events.clear()

    def named_parameters(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        self._events.append("read")
        return super().named_parameters(*arguments, **options)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        self._events.append("read")
        return super().state_dict(*arguments, **options)

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        self._events.append("canary")
        return SimpleNamespace(logits=self.layer(torch.ones(1, input_ids.shape[1], 4)))

    config: Any = PreTrainedConfig()
    _weight_conversions: tuple[Any, ...] = ()


def publisher(
    transport: str = "rollmatch_gloo", *, offers_adapter: bool = False, of_several: bool = False
) -> tuple[WeightPublisher, list[str]]:
    events: list[str] = []
    model = WatchedModel(events)
    base = BaseFiles("{}", {})
    loaded: Any = SimpleNamespace(model=model, base=base, device=CPU, fresh_tokens=None)
    prompt = EncodedPrompt.from_text((1, 2))
    canary = Canary(
        loaded, prompt, (), (3, 4), tolerance=1e-4, proves_adapter=False, run_dir=Path("unused")
    )
    source = CheckpointWeights(model)
    parallel = Parallel(model, source, Ranks())
    sender = WeightSender(source, transport=transport, receivers=(ReceiverGroup(1),), timeout_s=0.5)
    device = WatchedDevice(events)
    ranks = ranks_on(LearnerDevice(CPU), events) if of_several else Ranks()
    return WeightPublisher(
        ranks, device, loaded, parallel, sender, canary, offers_adapter=offers_adapter
    ), events


@pytest.mark.parametrize(
    ("transport", "offers_adapter", "readers"),
    [
        ("rollmatch_gloo", False, {"read"}),
        ("inproc", False, {"read", "canary"}),
        ("rollmatch_gloo", True, {"read", "canary"}),
    ],
)
def test_an_offer_waits_for_the_update_before_weights_adapter_or_canary_are_read(
    transport: str, offers_adapter: bool, readers: set[str]
) -> None:
    publishes, events = publisher(transport, offers_adapter=offers_adapter)
    publishes.offer()
    publishes.close()
    assert events[0] == "wait"
    assert set(events[1:]) == readers


def test_several_ranks_meet_before_rank_0_offers_and_before_a_version_is_served() -> None:
    publishes, events = publisher(of_several=True)
    publishes.offer()
    assert events[:2] == ["wait", "reduce"] and "read" in events[2:]
    events.clear()
    publishes.done()
    publishes.close()
    assert (events, publishes.version) == (["reduce"], 1)


def test_a_checkpoint_waits_for_the_update_before_it_reads(tmp_path: Path) -> None:
    publishes, events = publisher()
    publishes.checkpoint(tmp_path / "checkpoint").write()
    assert events[0] == "wait"
    assert "read" in events and (tmp_path / "checkpoint" / "model.safetensors").is_file()


class FakeGroup:
    """A process group whose reductions are only queued."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self._events.append("reduce")
        return SimpleNamespace(wait=lambda: None)


def ranks_on(device: LearnerDevice, events: list[str]) -> Ranks:
    group: Any = FakeGroup(events)
    return Ranks(0, 2, group, device, timeout_s=7.0)


def test_the_time_of_reducing_gradients_ends_when_the_device_has_reduced_them() -> None:
    events: list[str] = []
    device = WatchedDevice(events)
    ranks = ranks_on(device, events)
    ranks.sum_gradients([torch.ones(3), torch.ones(2)])
    assert events == ["reduce", "wait"]
    (span,) = ranks.pop_spans()
    assert (span.name, span.end_s >= device.waited_until_s > 0) == ("reduce gradients", True)


def test_a_peer_that_is_lost_in_a_reduction_is_missed_there() -> None:
    device = WatchedDevice([], finds=DistBackendError("NCCL communicator was aborted"))
    ranks = ranks_on(device, [])
    message = r"^finish_step .* rank 0 of 2: .*timeouts\.learn_s"
    missed = pytest.raises(CollectiveError, match=message)
    with missed, ranks.of_phase("finish_step"):
        ranks.sum_gradients([torch.ones(3)])


def test_a_rank_on_a_gpu_whose_process_has_ended_may_have_lost_a_peer() -> None:
    """NCCL's watchdog ends the process: there is nobody left to say what it waited for."""
    call = LearnerCall("finish_step", None, "", LearnerError)
    on_gpu = replace(call, watchdog_from=0.0).translate_error("rank 1", ActorDiedError())
    assert isinstance(on_gpu, CollectiveError), "what another rank says of itself says more"
    for part in ("rank 1's process has ended", "it may have lost a peer", "timeouts.learn_s"):
        assert part in str(on_gpu)
    alone = call.translate_error("the learner", ActorDiedError())
    assert type(alone) is LostLearnerError
    assert "its process has ended" in str(alone)
    assert "peer" not in str(alone)


class EndingRanks:
    """In place of Ray, with its clock: ranks that end so many seconds after they are asked."""

    def __init__(self, *ends_s: float) -> None:
        self.now_s = 0.0
        self._ends_s = ends_s

    def actors(self) -> list[Any]:
        def rank(index: int) -> Any:
            def run(name: str) -> Any:
                return SimpleNamespace(remote=lambda *_: "started" if name == "start" else index)

            return SimpleNamespace(run=SimpleNamespace(options=run))

        return [rank(index) for index in range(len(self._ends_s))]

    def wait(self, refs: list[Any], *, timeout: float) -> tuple[list[Any], list[Any]]:
        first = min(refs, key=lambda ref: 0.0 if isinstance(ref, str) else self._ends_s[ref])
        ends_s = 0.0 if isinstance(first, str) else self._ends_s[first]
        if ends_s > self.now_s + timeout:
            self.now_s += timeout
            return [], refs
        self.now_s = max(self.now_s, ends_s)
        return [first], [ref for ref in refs if ref != first]

    def get(self, refs: Any) -> Any:
        if isinstance(refs, int):
            raise ActorDiedError
        return (1, False, None)


@pytest.mark.parametrize(
    ("ends_s", "whose", "is_victim"),
    [
        ((40.0, 12.0), "rank 1's", False),  # the other one's limit had not come when it was told
        ((12.0, 13.0), "rank 0's", False),  # ended by what ended the first
        ((99.5, 97.5), "rank 1's", True),
        ((99.0, 88.0), "rank 1's", False),
    ],
)
def test_the_rank_that_ended_long_before_nccl_gave_up_waiting_is_the_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, ends_s: tuple[float, float], whose: str, *, is_victim: bool
) -> None:
    ranks = EndingRanks(*ends_s)
    clock = SimpleNamespace(monotonic=lambda: ranks.now_s)
    monkeypatch.setattr(ray_calls, "ray", ranks)
    for module in (learner_client, ray_calls):
        monkeypatch.setattr(module, "time", clock)
    learner = LearnerClient(RayRanks(ranks.actors()), TimeoutsSection(learn_s=100.0))
    config = configuration(Path("model"), Path("data"), Path("run"))
    place = RankTopology("nccl", (), device=Device.CUDA, world_size=2)
    learner.start(config, [replace(place, rank=rank) for rank in (0, 1)])
    with pytest.raises(LearnerError, match=f"finish_step .*: {whose} process has ended") as caught:
        learner.finish_step()
    assert isinstance(caught.value, CollectiveError) == is_victim
    assert ("lost a peer" in str(caught.value)) == is_victim


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], tuple[bool, str | None]]]:
    """Whether torch uses deterministic kernels, and cuBLAS's variable, both unset at first."""
    variable = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.setenv(variable, "")  # so that it is removed after the test
    del os.environ[variable]
    yield lambda: (torch.are_deterministic_algorithms_enabled(), os.environ.get(variable))
    torch.use_deterministic_algorithms(False)


def test_a_gpu_repeats_to_the_bit_after_cublas_was_given_its_workspaces(
    kernels: Callable[[], tuple[bool, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    LearnerDevice(CPU).use_deterministic_kernels()
    assert kernels() == (False, None), "a CPU repeats anyway"
    gpu = LearnerDevice(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="CUDA has started"):
        gpu.use_deterministic_kernels()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    gpu.use_deterministic_kernels()
    assert kernels() == (True, ":4096:8")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    gpu.use_deterministic_kernels()
    assert kernels() == (True, ":16:8"), "the user's other value"


@pytest.mark.parametrize("is_set", [True, False])
def test_a_learner_asks_for_such_kernels_before_it_loads_its_model(
    kernels: Callable[[], tuple[bool, str | None]],
    precisions: Callable[[], set[str]],
    is_set: bool,
    tmp_path: Path,
) -> None:
    config = configuration(tmp_path, tmp_path, tmp_path, training__deterministic=is_set)
    place = RankTopology(TransportKind.NCCL, (), device=Device.CUDA)
    with pytest.raises(ConfigError, match=r"model\.path"):
        Learner(config, place)
    assert kernels()[0] == is_set


@pytest.fixture
def precisions() -> Iterator[Callable[[], set[str]]]:
    """How a process that multiplied in TF32 multiplies now, on a GPU."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    flags: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv)  # type: ignore[attr-defined]
    yield lambda: {flag.fp32_precision for flag in flags}
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def test_on_a_gpu_float32_is_multiplied_in_float32(precisions: Callable[[], set[str]]) -> None:
    LearnerDevice(CPU).use_full_float32()
    assert precisions() == {"tf32"}, "a CPU leaves a GPU's settings as they are"
    LearnerDevice(torch.device("cuda")).use_full_float32()
    assert precisions() <= {"ieee", "none"}
    assert not torch.backends.cudnn.allow_tf32, "others can still ask"


def test_a_gpu_is_waited_for_on_the_stream_of_the_update_and_a_cpu_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []

    def current_stream(device: torch.device) -> Any:
        return SimpleNamespace(synchronize=lambda: waited.append(device))

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    LearnerDevice(CPU).wait()
    assert waited == []
    LearnerDevice(torch.device("cuda", 1)).wait()
    assert waited == [torch.device("cuda", 1)]
