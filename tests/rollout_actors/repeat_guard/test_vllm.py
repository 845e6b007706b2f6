"""Both of vLLM's model runners are told to end the sequences that the rule ends, however they move
their requests about.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rollout_actors.engine.settings import GUARD_PROCESSOR, engine_arguments
from rollout_actors.repeat_guard.rule import engine_rule, guard_call, repeat_rule, require_guard
from shared.errors import RolloutError
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule

V1 = "V1"
V2 = "V2"
SETTINGS = RepeatGuardSettings(5, 4, 2, 3, None)
WITH_KEYS = RepeatGuardSettings(5, 4, 2, 3, 2)
VOCABULARY = 12
SLOTS = 6
LONGEST = 40


@pytest.fixture(scope="module")
def module() -> Any:
    import rollout_actors.repeat_guard.vllm

    return rollout_actors.repeat_guard.vllm


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Twelve tokens, some of which are parts of keys."""
    pieces = ["a", "b", "c", "d", "e", "f", '"object_1":', '"object_', "2", '":', '"', "z"]
    model = BPE({piece: i for i, piece in enumerate(pieces)}, [])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model)).save_pretrained(folder)
    return str(folder)


def config(tokenizer: str = "", **changes: Any) -> Any:
    sampling = SimpleNamespace(enable_batch_sharded_sampling=False)
    fields = {"speculative_config": None, "parallel_config": sampling} | changes
    return SimpleNamespace(model_config=SimpleNamespace(tokenizer=tokenizer), **fields)


def guard_of(module: Any, version: str, **changes: Any) -> Any:
    device = (torch.device("cpu"), False)
    arguments = device if version == V1 else (FakeRunner().state(),)
    return module.VllmRepeatGuard(config(**changes), *arguments)


@dataclass(eq=False)
class Request:
    """One request, as the test knows it."""

    stop: int | None
    prompt: list[int]
    output: list[int] = field(default_factory=list)

    def params(self) -> Any:
        from vllm import SamplingParams

        stops = [] if self.stop is None else [self.stop]
        return SamplingParams(stop_token_ids=stops, ignore_eos=True)

    def is_over(self, rule: RepeatRule) -> bool:
        guard = rule.guard()
        verdicts = [guard.push(token) for token in self.output]
        return self.stop is not None and bool(verdicts) and verdicts[-1]


def new_request(rng: random.Random) -> Request:
    # The prompt ends as a repetition would begin.
    return Request(rng.choice([None, 3, 9, 9]), [rng.randrange(VOCABULARY)] * rng.randint(1, 4))


def next_token(request: Request, rng: random.Random) -> int:
    known = [*request.prompt, *request.output]
    if len(known) > 1 and rng.random() < 0.75:
        return known[-rng.choice([1, 2])]
    return rng.randrange(VOCABULARY)


def check_forced(
    logits: torch.Tensor, before: torch.Tensor, requests: list[Request], rule: RepeatRule
) -> int:
    """Check that rows of ended requests are certain of their stop token, and that all others are
    what they were. Return how many are ended.
    """
    num_over = 0
    for row, request in enumerate(requests):
        expected = before[row].clone()
        if request.is_over(rule):
            assert request.stop is not None
            probabilities = (logits[row] / 0.7).log_softmax(-1)
            assert probabilities[request.stop] == 0.0
            assert int(logits[row].argmax()) == request.stop
            expected[request.stop] = logits[row, request.stop]
            num_over += 1
        assert torch.equal(logits[row], expected)
    return num_over


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, WITH_KEYS])
def test_v1_follows_requests_through_additions_removals_moves_and_preemptions(
    module, tokenizer, settings
):
    from vllm.v1.sample.logits_processor import BatchUpdateBuilder, MoveDirectionality

    rng = random.Random(3)
    processor = guard_of(module, V1, tokenizer=tokenizer)
    processor.guard_by(settings)
    assert isinstance(processor, module.GuardV1)
    assert not processor.is_argmax_invariant()
    rule = engine_rule(settings, tokenizer)
    rows: list[Request | None] = []
    waiting: list[Request] = []
    num_over = 0
    for _ in range(1500):
        update = BatchUpdateBuilder()
        for index in range(len(rows)):
            if rng.random() < 0.05:
                request = rows[index]
                assert request is not None
                if rng.random() < 0.5:  # preempted: it comes back with a list of its own
                    request.output = list(request.output)
                    waiting.append(request)
                update.removed_append(index)
                rows[index] = None
        for _ in range(rng.choice([0, 0, 1, 2])):
            request = waiting.pop() if waiting and rng.random() < 0.5 else new_request(rng)
            index = update.pop_removed() if update.has_removed() else len(rows)
            if index == len(rows) and len(rows) == SLOTS:
                waiting.append(request)
                break
            rows[index : index + 1] = [request]
            update.added.append((index, request.params(), request.prompt, request.output))
        for empty in sorted(update.removed):  # vLLM closes the gaps from the end
            while rows and rows[-1] is None:
                rows.pop()
            if empty >= len(rows):
                break
            update.moved.append((len(rows) - 1, empty, MoveDirectionality.UNIDIRECTIONAL))
            rows[empty] = rows.pop()
        if len(rows) > 1 and rng.random() < 0.2:
            a, b = rng.sample(range(len(rows)), 2)
            rows[a], rows[b] = rows[b], rows[a]
            update.moved.append((a, b, MoveDirectionality.SWAP))
        processor.update_state(update.get_and_reset(len(rows)))
        present = [request for request in rows if request is not None]
        assert len(present) == len(rows)
        before = torch.randn(len(rows), VOCABULARY)
        num_over += check_forced(processor.apply(before.clone()), before, present, rule)
        for request in present:
            if rng.random() < 0.02 and request.output:
                del request.output[-1]  # vLLM takes tokens back that it could not keep
            elif rng.random() < 0.9:  # else a part of a prompt: no token
                request.output.append(next_token(request, rng))
    assert num_over > 300


class FakeRunner:
    """The V2 runner's buffers in host memory, and what it does to them in a step."""

    def __init__(self) -> None:
        self.tokens = torch.zeros(SLOTS, LONGEST, dtype=torch.int32)
        self.prompt_len = np.zeros(SLOTS, dtype=np.int32)
        self.prefill_len = np.zeros(SLOTS, dtype=np.int32)
        self.total_len = np.zeros(SLOTS, dtype=np.int32)

    def state(self) -> Any:
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcRequestState

        buffers: dict[str, Any] = {"all_token_ids": SimpleNamespace(gpu=self.tokens)}
        for name in ("prompt_len", "prefill_len", "total_len"):
            values = getattr(self, name)
            buffers[name] = SimpleNamespace(np=values, gpu=torch.from_numpy(values))
        return LogitsProcRequestState(torch.device("cpu"), SLOTS, VOCABULARY, **buffers)

    def enter(self, slot: int, request: Request) -> None:
        """Write the request's tokens; older ones stay behind them."""
        known = [*request.prompt, *request.output]
        self.tokens[slot, : len(known)] = torch.tensor(known)
        self.prompt_len[slot] = len(request.prompt)
        self.prefill_len[slot] = self.total_len[slot] = len(known)

    def append(self, slot: int, token: int) -> None:
        self.tokens[slot, self.total_len[slot]] = token
        self.total_len[slot] += 1


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SETTINGS, WITH_KEYS])
def test_v2_computes_on_its_buffers_what_the_guard_says_token_by_token(module, tokenizer, settings):
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

    rng = random.Random(4)
    runner = FakeRunner()
    processor = module.VllmRepeatGuard(config(tokenizer), runner.state())
    processor.guard_by(settings)
    assert isinstance(processor, module.GuardV2)
    rule = engine_rule(settings, tokenizer)
    slots: dict[int, Request] = {}
    computed: dict[int, int] = {}
    waiting: list[Request] = []
    num_over = 0
    num_resumed = 0
    for _ in range(1500):
        for slot in list(slots):
            if rng.random() < 0.05 or runner.total_len[slot] == LONGEST:
                request = slots.pop(slot)
                if rng.random() < 0.5 and runner.total_len[slot] < LONGEST:
                    waiting.append(request)
        for slot in rng.sample(range(SLOTS), 2):
            if slot not in slots:
                slots[slot] = waiting.pop() if waiting and rng.random() < 0.5 else new_request(rng)
                num_resumed += bool(slots[slot].output)
                computed[slot] = 0
                runner.enter(slot, slots[slot])
                is_guarded = processor.add_request(slot, slots[slot].params())
                assert is_guarded == (slots[slot].stop is not None)
        processor.apply_staged_writes()
        batch = rng.sample(sorted(slots), len(slots))  # rows are reordered in every step
        if not batch:
            continue
        # A prompt may be computed in parts; only its last token is followed by one of the model's.
        parts = []
        for slot in batch:
            length = int(runner.total_len[slot])
            is_whole = computed[slot] >= runner.prefill_len[slot] or rng.random() < 0.7
            parts.append(length if is_whole else rng.randint(1, length))
        mapping = torch.tensor(batch, dtype=torch.int32)
        last = torch.tensor(parts) - 1
        context = LogitsContext(
            expanded_idx_mapping=mapping,
            idx_mapping=mapping,
            idx_mapping_np=np.array(batch),
            expanded_local_pos=torch.zeros(len(batch), dtype=torch.int32),
            input_ids=runner.tokens[batch, last],
            pos=last,
            seq_lens_upper_bound_np=np.array([*parts, 0, 0], dtype=np.int32),
        )
        before = torch.randn(len(batch), VOCABULARY)
        logits = processor.apply(before.clone(), context)
        whole = [row for row, slot in enumerate(batch) if parts[row] == runner.total_len[slot]]
        requests = [slots[batch[row]] for row in whole]
        num_over += check_forced(logits[whole], before[whole], requests, rule)
        for row, slot in enumerate(batch):
            computed[slot] = parts[row]
            if row in whole:
                token = next_token(slots[slot], rng)
                slots[slot].output.append(token)
                runner.append(slot, token)
    assert num_over > 300
    assert num_resumed > 50


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"parallel_config": SimpleNamespace(enable_batch_sharded_sampling=True)}, "batch-sharded"),
    ],
)
def test_v2_refuses_by_name_what_it_cannot_follow(module, change, name):
    guard = guard_of(module, V2, **change)
    guard.guard_by(None)
    with pytest.raises(ValueError, match=f"V2 model runner with {name}"):
        guard.guard_by(SETTINGS)


def test_both_runners_accept_the_one_name(module):
    from vllm.v1.sample.logits_processor import _load_logitsprocs_by_fqcns
    from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

    for load in (_load_logitsprocs_by_fqcns, _load_v2_logitsprocs_by_fqcns):
        assert load([GUARD_PROCESSOR]) == [module.VllmRepeatGuard]


@pytest.mark.parametrize("version", [V1, V2])
def test_nothing_is_guarded_before_a_run_has_brought_its_rule_and_after_one_without_a_guard(
    module, version
):
    from vllm.v1.sample.logits_processor import BatchUpdateBuilder

    guard = guard_of(module, version)
    for settings in (None, SETTINGS, None):
        guard.guard_by(settings)
        assert guard.settings == settings
        repeats = Request(9, [1], [5] * 20)
        if version == V1:
            update = BatchUpdateBuilder()
            update.added.append((0, repeats.params(), repeats.prompt, repeats.output))
            guard.update_state(update.get_and_reset(1))
            is_guarded = bool(guard.apply(torch.zeros(1, VOCABULARY)).any())
        else:
            is_guarded = guard.add_request(0, repeats.params())
            guard.apply_staged_writes()
        assert is_guarded == (settings is not None)


def test_a_request_that_names_no_stop_token_is_ended_by_the_tokenizers_unless_it_ignores_it(module):
    from vllm import SamplingParams

    for options, expected in (
        ({}, 2),
        ({"ignore_eos": True}, None),
        ({"stop_token_ids": [4, 5]}, 4),
    ):
        params = SamplingParams(**options)
        params.update_from_generation_config({}, 2)
        assert module.stop_token(params) == expected


def worker_of(module: Any, version: str, *processors: Any) -> Any:
    worker = module.GuardedWorker()
    worker.use_v2_model_runner = version == V2
    if version == V2:
        sampler = SimpleNamespace(logits_processors=list(processors))
        worker.model_runner = SimpleNamespace(sampler=sampler)
    else:
        batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=list(processors)))
        worker.model_runner = SimpleNamespace(input_batch=batch)
    return worker


def guarded_by(worker: Any, settings: RepeatGuardSettings | None) -> dict[str, Any]:
    """Call the worker as an engine does."""
    method, argument = guard_call(settings)
    answer: dict[str, Any] = getattr(worker, method)(argument)
    return answer


@pytest.mark.parametrize("version", [V1, V2])
def test_an_engine_whose_every_worker_holds_the_guard_starts(module, version):
    worker = worker_of(module, version, object(), guard_of(module, version))
    assert worker.active_guard() == {"runner": version, "is_loaded": True, "settings": None}
    answers = [guarded_by(worker, SETTINGS)] * 2
    require_guard(answers, SETTINGS, "actor-0")
    with pytest.raises(RolloutError, match="'ngram_size': 2"):
        require_guard(answers, RepeatGuardSettings(5, 4, 3, 3, None), "actor-0")


@pytest.mark.parametrize("version", [V1, V2])
def test_a_rule_that_is_in_force_is_not_made_again(module, version, monkeypatch):
    """Its tokenizer takes seconds to load, and a stock server is told the rule in every sync."""
    rules: list[RepeatGuardSettings | None] = []

    def make_rule(settings: RepeatGuardSettings | None, tokenizer: str) -> Any:
        rules.append(settings)
        return repeat_rule(settings, lambda: None)

    monkeypatch.setattr(module, "engine_rule", make_rule)
    worker = worker_of(module, version, guard_of(module, version))
    other = replace(SETTINGS, ngram_size=SETTINGS.ngram_size + 1)
    for settings in (None, SETTINGS, SETTINGS, other, other, None, None):
        assert guarded_by(worker, settings)["settings"] == guard_call(settings)[1]
    assert rules == [SETTINGS, other, None]


@pytest.mark.parametrize("version", [V1, V2])
def test_an_engine_one_of_whose_workers_lacks_it_does_not_start_and_says_which_path_is_missing(
    module, version
):
    without = worker_of(module, version, object()).active_guard()
    assert without == {"runner": version, "is_loaded": False, "settings": None}
    with pytest.raises(RolloutError) as caught:
        require_guard([without | {"settings": asdict(SETTINGS)}, without], SETTINGS, "actor-0")
    message = str(caught.value)
    assert caught.value.phase == "start"
    assert re.search(rf"\b{version} .*worker 1 .*no repeat guard", message)
    assert GUARD_PROCESSOR in message
    assert "rollout_matching.repeat_terminate" in message
    assert ("VLLM_USE_V2_MODEL_RUNNER=0" in message) == (version == V2)


# The engine that asks its workers


class FakeLLM:
    """An `AsyncLLM` whose workers take a guard, or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return [{"runner": V2, "is_loaded": True, "settings": args[0]}]


def engine_over(llm: FakeLLM) -> Any:
    from engine_support import small_settings

    from rollout_actors.engine.vllm_engine import VllmEngine

    engine: Any = VllmEngine("server-3", small_settings(Path("model")))
    engine._llm = llm
    return engine


@pytest.mark.slow
def test_a_guard_that_the_workers_refuse_names_the_server_and_what_to_switch_off():
    from vllm.v1.engine.exceptions import EngineDeadError

    refusal = Exception(
        "the repeat guard cannot be active with speculative decoding; start the engine without it"
    )
    message = r"server-3: .*repeat_terminate.* with speculative decoding; start"
    with pytest.raises(RolloutError, match=message) as caught:
        asyncio.run(engine_over(FakeLLM(refusal)).guard_by(SETTINGS))
    assert caught.value.actor == "server-3"
    with pytest.raises(EngineDeadError):
        asyncio.run(engine_over(FakeLLM(EngineDeadError())).guard_by(SETTINGS))


def test_an_engine_answers_other_calls_while_its_rule_is_made(monkeypatch):
    """The tokenizer that it may need takes seconds to load."""
    from rollout_actors.engine import vllm_engine

    goes_on = threading.Event()

    def slow_rule(settings: RepeatGuardSettings | None, model_path: str) -> str:
        assert goes_on.wait(60.0), "its event loop is held"
        return "the rule"

    monkeypatch.setattr(vllm_engine, "engine_rule", slow_rule)

    async def guarded() -> Any:
        engine = engine_over(FakeLLM())
        asyncio.get_running_loop().call_later(0.05, goes_on.set)
        await engine.guard_by(SETTINGS)
        return engine._rule

    assert asyncio.run(guarded()) == "the rule"


@pytest.mark.slow
def test_vllm_v1_rollout_does_not_rely_on_request_time_logits_processors(module, demo_checkpoint):
    """The guard is an argument of the engine's start, which no request knows of."""
    from engine_support import small_settings

    from rollout_actors.engine.vllm_io import sampling_params
    from shared.rollouts import DecodeMode, DecodeSettings

    guarded = engine_arguments(small_settings(demo_checkpoint, repeat_guard=SETTINGS))
    free = engine_arguments(small_settings(demo_checkpoint, repeat_guard=None))
    assert guarded == free, "always loaded: the rule comes after the start"
    assert guarded["logits_processors"] == [GUARD_PROCESSOR]
    decode = DecodeSettings(
        DecodeMode.GREEDY, 0.0, 1.0, -1, 1.0, 40, 1, (1,), (), return_logprobs=True
    )
    params = sampling_params(decode, 7)
    assert (params.extra_args, params.repetition_detection) == (None, None)


# The rule


def test_the_rule_reads_keys_in_the_checkpoints_own_tokens_and_else_no_tokenizer(demo_checkpoint):
    assert repeat_rule(None, lambda: None) is None
    without_keys = repeat_rule(SETTINGS, lambda: pytest.fail("it takes seconds"))
    assert without_keys is not None and without_keys.settings == SETTINGS
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    text = '{"object_1": {"desc": "a"}, "object_2": {"desc": "b"}}'
    ids = tokenizer(text, add_special_tokens=False).input_ids
    rule = engine_rule(RepeatGuardSettings(0, 10**6, 10**6, 2, 1), str(demo_checkpoint))
    end = rule.first_repetition(ids)
    assert end is not None
    assert '"object_2":' in tokenizer.decode(ids[:end])
    assert '"object_2":' not in tokenizer.decode(ids[: end - 1])
