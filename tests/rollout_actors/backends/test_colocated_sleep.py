"""When an engine beside the learner sleeps, on a platform where it can: vLLM's `LLM` is played by
one that does nothing while it is asleep.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, replace
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import pytest
from backend_support import colocated_settings
from fake_server import DECODE, make_request
from torch import nn

from learner.model.checkpoint import CheckpointWeights
from learner.weight_sync.sender import WeightSender
from rollout_actors.backends.calls import EngineCalls
from rollout_actors.backends.colocate import ColocatedBackend
from rollout_actors.weight_sync.adapters import ADAPTER_ID
from rollout_actors.weight_sync.receiver import LoadReport
from shared.errors import RolloutError, WeightSyncError
from shared.records import ImageRef
from shared.rollouts import DecodeMode, WeightOffer
from shared.weight_sync.canary import CanaryProbe, Differences
from shared.weight_sync.offer import AdapterFiles, AdapterOffer
from shared.weight_sync.transports import TransportKind

pytestmark = pytest.mark.engine

PROBE = CanaryProbe((1, 2, 3), (), (1, 2, 3), (-0.5, -0.25), tolerance=1e-4)
IN_BFLOAT16 = replace(PROBE, tolerance=None)
GREEDY = replace(DECODE, mode=DecodeMode.GREEDY, temperature=0.0, return_logprobs=False)
REQUESTS = [make_request(position, decode=GREEDY) for position in range(2)]


class Scene:
    """Host and engine write down what they do, in order; what is named in `fails` they do not
    manage, once.
    """

    def __init__(self):
        self.events: list[str] = []
        self.fails = ""

    def note(self, event):
        self.events.append(event)
        if event == self.fails:
            self.fails = ""
            raise RuntimeError(f"could not {event}")

    def take(self):
        events, self.events = self.events, []
        return events


class Host:
    """A `BackendHost`."""

    name = "colocated"
    processor = None

    def __init__(self, scene):
        self._scene = scene
        self.model = nn.Linear(2, 2, bias=False)
        self.goes_on = True
        self.updates_next = False

    def raise_if_stopping(self):
        if not self.goes_on:
            raise RolloutError("told to stop", actor=self.name, phase="generate")

    def weights(self):
        return CheckpointWeights(self.model).tensors()

    @contextmanager
    def offloaded(self, *, model=True):
        self._scene.events.append("host away" if model else "optimizer away")
        try:
            yield
        finally:
            self._scene.events.append("back")


class SleepyLLM:
    """Of vLLM's `LLM` what a `ColocatedLLM` calls. Its memory is there while it is awake, and
    nothing else works without.
    """

    scene: Scene
    raise_if_stopping: Callable[[], None]

    def __init__(self, **arguments):
        self.scene.note("load")
        self.can_sleep = arguments["enable_sleep_mode"]
        self.asleep: set[str] = set()
        self._queued: list[str] = []
        self._num_requests = 0
        core = SimpleNamespace(shutdown=lambda timeout: self.scene.note("shut down"))
        self.llm_engine = SimpleNamespace(
            engine_core=core,
            has_unfinished_requests=lambda: bool(self._queued),
            step=self._step,
            abort_request=self._abort,
            reset_encoder_cache=lambda: self._work("reset"),
            add_lora=lambda request: self._work("adapter"),
            list_loras=lambda: {ADAPTER_ID},
            remove_lora=lambda adapter_id: None,
        )

    def sleep(self, level=1, mode="abort"):
        assert (self.can_sleep, self.asleep, mode) == (True, set(), "abort")
        self.scene.note("sleep" if level == 1 else f"sleep {level}")
        self.asleep, self._queued = {"weights", "kv_cache"}, []

    def wake_up(self, tags=None):
        assert tags is not None and set(tags) <= self.asleep, "vLLM wakes nothing then"
        self.scene.note("wake" if len(tags) == 2 else f"wake {tags[0]}")
        self.asleep -= set(tags)
        return not self.asleep

    def _work(self, event):
        # An update needs the weights' memory alone.
        is_update = event in (*SYNC[:-1], "adapter")
        needed = {"weights"} if is_update else {"weights", "kv_cache"}
        assert not self.asleep & needed, f"asleep, and asked to {event}"
        self.scene.note(event)

    def enqueue(self, prompts, params, *, lora_request, use_tqdm):
        self._work("queue")
        self._queued.append(str(self._num_requests))
        self._num_requests += 1
        return self._queued[-1:]

    def _step(self):
        from vllm.outputs import CompletionOutput, RequestOutput

        self._work("step")
        ended, self._queued = self._queued, []
        answer = CompletionOutput(
            index=0,
            text="",
            token_ids=[7, 9],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason="stop",
        )
        return [
            RequestOutput(request_id, None, [1, 2], None, [answer], finished=True)
            for request_id in ended
        ]

    def _abort(self, request_ids, internal):
        self._queued = [each for each in self._queued if each not in request_ids]

    def start_weight_update(self):
        self._work("begin update")

    def update_weights(self, request):
        assert list(request["update_info"]["weights"])
        self._work("update")

    def finish_weight_update(self):
        self._work("finish update")

    def reset_prefix_cache(self):
        self._work("reset")
        return True

    def reset_mm_cache(self):
        self._work("reset")

    def update_weight_version(self, new_version): ...

    def collective_rpc(self, method, args=()):
        if method in ("keep_unsynced", "restore_unsynced"):
            assert "weights" not in self.asleep, f"the memory is not there to {method}"
            self.scene.note(method)
        answers = {
            "guard_by": {"runner": "V1", "is_loaded": True, "settings": None},
            "load_report": asdict(LoadReport([5], [5], [], [], 0.0, 0.0, [])),
        }
        return [answers.get(method)]

    def generate(self, prompts, params, *, use_tqdm, lora_request):
        from vllm.logprobs import Logprob
        from vllm.outputs import RequestOutput

        self._work("canary")
        scores = [None, {2: Logprob(-0.5)}, {3: Logprob(-0.25)}]
        return [RequestOutput("canary", None, [1, 2, 3], scores, [], finished=True)]


def set_sleep_mode(monkeypatch, available):
    from rollout_actors.backends import colocated_llm

    platform = SimpleNamespace(is_sleep_mode_available=lambda: available)
    monkeypatch.setattr(colocated_llm, "current_platform", platform)
    monkeypatch.setattr(colocated_llm, "BeamLLM", SleepyLLM)


@pytest.fixture
def scene(monkeypatch):
    scene = Scene()
    monkeypatch.setattr(SleepyLLM, "scene", scene, raising=False)
    set_sleep_mode(monkeypatch, available=True)
    return scene


@pytest.fixture
def host(scene):
    return Host(scene)


def make_backend(host, *, sleep=True, **changes):
    return ColocatedBackend(host, colocated_settings(Path("model"), **changes), sleep=sleep)


@pytest.fixture
def backend(host, scene):
    backend = make_backend(host)
    scene.take()
    yield backend
    backend.close()


@pytest.fixture(params=[PROBE, IN_BFLOAT16], ids=["float32", "bfloat16"])
def probe(request):
    return request.param


def an_offer(host, version=1, probe=PROBE):
    sender = WeightSender(
        CheckpointWeights(host.model), transport="inproc", receivers=(), timeout_s=60.0
    )
    return sender.offer(version, probe)


QUEUED = ["queue"] * len(REQUESTS)
SYNC = ["begin update", "update", "finish update", "reset", "reset", "reset", "canary"]
FULL_SYNC = ["wake weights", *SYNC[:-1], "wake kv_cache", "canary", "sleep"]


def test_the_fake_sleeps_and_wakes_by_vllms_own_calls():
    from vllm import LLM

    for name in ("sleep", "wake_up"):
        asked = [
            [(each, of.default) for each, of in signature(vars(kind)[name]).parameters.items()]
            for kind in (SleepyLLM, LLM)
        ]
        assert asked[0] == asked[1]


def test_an_engine_sleeps_from_its_start_and_behind_every_generation_before_the_host_comes_back(
    host, scene
):
    backend = make_backend(host)
    assert scene.take() == ["host away", "load", "sleep", "back"]
    for _ in range(2):
        rollouts = backend.generate(REQUESTS)
        assert [rollout.response_token_ids for rollout in rollouts] == [(7,), (7,)]
        assert scene.take() == ["host away", "wake", *QUEUED, "step", "sleep", "back"]
    assert backend.generate([]) == [] and scene.take() == [], "nobody is woken for nothing"


def test_an_engine_that_serves_is_awake_when_calls_begin_and_asleep_when_they_are_over(
    backend, host, scene
):
    calls = EngineCalls(host.name)
    calls.open()

    def begin():
        assert scene.take() == ["host away", "wake"]
        calls.close()

    backend.serve(calls, begin)
    assert scene.take() == ["sleep", "back"]
    host.goes_on = False
    calls.open()
    with pytest.raises(RolloutError, match="told to stop"):
        backend.serve(calls, lambda: None)
    assert scene.take() == ["host away", "wake", "sleep", "back"]


def test_a_sync_wakes_the_engine_and_leaves_it_asleep_before_the_host_can_learn(
    backend, host, scene
):
    """The cache comes behind the copies. Steps of channel A follow one another without a
    `generate`."""
    for version in (1, 2):
        assert backend.receive_weights(an_offer(host, version)).version == version
        assert scene.take() == ["optimizer away", *FULL_SYNC, "back"]
    backend.generate(REQUESTS)
    assert scene.take() == ["host away", "wake", *QUEUED, "step", "sleep", "back"]


KEEPING = ["keep_unsynced", "sleep 2", "back"]


def test_weights_that_the_next_sync_replaces_are_dropped_and_the_rest_of_the_model_is_kept(
    backend, host, scene
):
    backend.receive_weights(an_offer(host))
    backend.generate(REQUESTS)
    host.updates_next = True
    scene.take()
    backend.generate(REQUESTS)
    assert scene.take() == ["host away", "wake", *QUEUED, "step", *KEEPING]
    host.updates_next = False
    backend.receive_weights(an_offer(host, 2))
    synced = ["wake weights", "restore_unsynced", *FULL_SYNC[1:]]
    assert scene.take() == ["optimizer away", *synced, "back"]
    backend.generate(REQUESTS)
    assert scene.take() == ["host away", "wake", *QUEUED, "step", "sleep", "back"]


def test_an_engine_without_weights_does_not_generate_until_a_sync_has_brought_some(
    backend, host, scene
):
    backend.receive_weights(an_offer(host))
    host.updates_next = True
    backend.generate(REQUESTS)
    with pytest.raises(RolloutError, match="a sync of all weights is next"):
        backend.generate(REQUESTS)


def test_weights_are_kept_while_syncs_bring_an_adapter_alone(host, scene):
    host.updates_next = True
    backend = make_backend(host, enable_lora=True)
    terms = AdapterOffer.make(AdapterFiles(b"", "{}"), timeout_s=60.0)
    probe = replace(PROBE, base_logprobs=PROBE.expected_logprobs)
    for offer, asleep in (
        (WeightOffer(1, TransportKind.ADAPTER, terms, probe), "sleep"),
        (an_offer(host, 2), "sleep 2"),
    ):
        backend.receive_weights(offer)
        backend.generate(REQUESTS)
        assert scene.take()[-2:] == [asleep, "back"]
    backend.close()


def test_weights_are_kept_after_rollouts_that_failed_and_before_the_first_sync(
    backend, host, scene
):
    host.updates_next = True
    backend.generate(REQUESTS)
    assert scene.take()[-2:] == ["sleep", "back"], "the noise is measured with these"
    backend.receive_weights(an_offer(host))
    host.goes_on = False
    with pytest.raises(RolloutError, match="told to stop"):
        backend.generate(REQUESTS)
    assert scene.take()[-2:] == ["sleep", "back"]


def test_an_engine_whose_noise_is_measured_is_awake_as_a_whole_before_it_scores_what_it_holds(
    backend, host, scene
):
    """With a part of its memory away vLLM schedules nothing, and a probe is waited for forever."""
    report = backend.receive_weights(an_offer(host, probe=IN_BFLOAT16))
    assert report.canary_noise == Differences(0.0, 0.0)
    assert scene.take() == ["optimizer away", "wake", "canary", *SYNC, "sleep", "back"]
    backend.generate(REQUESTS)
    scene.take()
    assert backend.receive_weights(an_offer(host, 2, IN_BFLOAT16)).canary_noise is None
    assert scene.take()[:2] == ["optimizer away", "wake weights"], "only once in a run"


def test_a_refused_request_and_a_host_that_is_told_to_stop_leave_the_engine_asleep(
    backend, host, scene
):
    host.goes_on = False
    with pytest.raises(RolloutError, match="told to stop"):
        backend.generate(REQUESTS)
    assert scene.take() == ["host away", "wake", *QUEUED, "sleep", "back"]
    broken = replace(REQUESTS[1], sample_id="broken", images=(ImageRef(None, b"no image", ""),))
    with pytest.raises(RolloutError, match="image 0 of sample broken"):
        backend.generate([REQUESTS[0], broken])
    assert scene.take() == ["host away", "wake", "queue", "sleep", "back"]
    host.goes_on = True
    assert len(backend.generate(REQUESTS)) == len(REQUESTS)
    assert scene.take() == ["host away", "wake", *QUEUED, "step", "sleep", "back"]


@pytest.mark.parametrize("phase", ["begin update", "update", "canary"])
def test_behind_a_failed_sync_the_next_one_finds_the_engine_awake(
    backend, host, scene, phase, probe
):
    scene.fails = phase
    with pytest.raises(WeightSyncError, match=f"could not {phase}"):
        backend.receive_weights(an_offer(host, probe=probe))
    scene.take()
    assert backend.receive_weights(an_offer(host, 2, probe)).version == 2
    events = scene.take()
    assert "wake weights" not in events
    assert events[-2:] == ["sleep", "back"]


AWAY = "optimizer away"


@pytest.mark.parametrize(
    ("receives", "fails", "phase", "events"),
    [
        (None, "wake", "generate", ["host away", "wake", "back"]),
        (None, "step", "generate", ["host away", "wake", *QUEUED, "step", "sleep", "back"]),
        (PROBE, "wake weights", "pause", [AWAY, "wake weights", "back"]),
        (IN_BFLOAT16, "wake", "pause", [AWAY, "wake", "back"]),
        (PROBE, "sleep", "canary", [AWAY, *FULL_SYNC, "back"]),
    ],
)
def test_an_engine_that_does_not_wake_step_or_fall_asleep_is_not_asked_again(
    backend, host, scene, receives, fails, phase, events
):
    scene.fails = fails
    failed = f"{phase} on colocated: RuntimeError: could not {fails};"
    if receives is None:
        with pytest.raises(RolloutError, match=failed):
            backend.generate(REQUESTS)
    else:
        with pytest.raises(WeightSyncError, match=failed):
            backend.receive_weights(an_offer(host, probe=receives))
    assert scene.take() == events
    with pytest.raises(RolloutError, match="serves no rollouts: it failed"):
        backend.generate(REQUESTS)
    assert scene.take() == []


def test_an_engine_that_does_not_fall_asleep_fails_its_start(host, scene):
    scene.fails = "sleep"
    with pytest.raises(RolloutError, match=r"start .*colocated: RuntimeError: could not sleep"):
        make_backend(host)
    assert scene.events[-2:] == ["back", "shut down"], "its caller has no backend to close"


@pytest.mark.parametrize(("wanted", "available"), [(False, True), (True, False)])
def test_where_it_is_not_wanted_or_not_to_be_had_nobody_sleeps(
    host, scene, monkeypatch, probe, *, wanted, available
):
    set_sleep_mode(monkeypatch, available)
    backend = make_backend(host, sleep=wanted)
    backend.receive_weights(an_offer(host, probe=probe))
    backend.generate(REQUESTS)
    assert not {"sleep", "wake"} & set(scene.take())
