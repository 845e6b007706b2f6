"""The repeat guard for vLLM: a logits processor that ends answers that repeat themselves.

The engine argument `logits_processors=[GUARD_PROCESSOR]` loads it (`vllm serve
--logits-processors`); requests do not select it. It is inactive until `GuardedWorker.guard_by` has
set a run's rule, so one server can serve runs with different rules.

To end a sequence, the guard sets one logit higher than all others: the logit of the request's first
stop token, or of the tokenizer's stop token if the request has none. A request that has no stop
token and ignores the tokenizer's is not guarded, because no token would end it. The logits of other
sequences are unchanged.

vLLM's own `SamplingParams.repetition_detection` cannot replace it: it is set per request, supports
neither a minimum of tokens nor object keys, and appends no EOS.

Shape legend: R requests in the engine's slots, B rows of one step's logits, V vocabulary, W window
of tokens, S states of the key automaton.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from rollout_actors.repeat_guard.rule import ActiveGuard, engine_rule
from shared.tokens.repeat_guard import (
    START,
    RepeatGuard,
    RepeatGuardSettings,
    RepeatRule,
    token_steps,
)

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunnerV1

FORCED_LOGIT = 1e9
"""Logit of the stop token that ends a repeating answer. Its probability is then exactly 1 for any
temperature, penalty, top-k and top-p. The logit is finite, so that no NaN occurs.
"""


class VllmRepeatGuard(LogitsProcessorV1, LogitsProcessorV2):
    """The logits processor that vLLM loads as the repeat guard.

    Its constructor returns a `GuardV1` or `GuardV2`. Each of vLLM's two model runners requires its
    own base class.
    """

    def __new__(cls, vllm_config: VllmConfig, *arguments: Any) -> GuardV1 | GuardV2:
        # V1 passes a device and whether to pin memory, V2 the state of its requests.
        if isinstance(arguments[0], LogitsProcRequestState):
            return GuardV2(vllm_config, *arguments)
        return GuardV1(vllm_config, *arguments)


class GuardV1(LogitsProcessorV1):
    """The repeat guard for vLLM's V1 model runner (CPU, or `VLLM_USE_V2_MODEL_RUNNER=0`).

    It has one `RepeatGuard` per request, in host memory.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = vllm_config.model_config.tokenizer
        self.settings: RepeatGuardSettings | None = None
        """Settings of the active rule; None: the guard is inactive."""
        self._rule: RepeatRule | None = None
        self._rows: dict[int, _GuardedRequest] = {}
        """Guarded requests by their row in the batch."""

    def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Set when repeating answers to new requests are ended; None: never.

        Running requests keep the earlier settings.
        """
        self._rule = engine_rule(settings, self._tokenizer)
        self.settings = settings

    def is_argmax_invariant(self) -> bool:
        # It changes the most probable token. With True vLLM would omit it in greedy batches.
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Force the stop token in the rows of `logits`, [B, V], whose answers repeat themselves."""
        # Not in `update_state`: with asynchronous scheduling the last token is only known here.
        ended = [(index, row.stop) for index, row in self._rows.items() if row.is_over()]
        if ended:
            rows, stops = zip(*ended, strict=True)
            logits[list(rows), list(stops)] = FORCED_LOGIT
        return logits

    def _row(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> _GuardedRequest | None:
        # Also called after a preemption: then `output` begins with the tokens generated before it,
        # and the guard reads them again.
        stop = stop_token(params)
        if stop is None or self._rule is None:
            return None
        return _GuardedRequest(self._rule, stop, output)


class _GuardedRequest:
    """A guarded request. vLLM appends to `output` as it generates."""

    __slots__ = ("_guard", "_is_over", "_num_seen", "_output", "_rule", "stop")

    def __init__(self, rule: RepeatRule, stop: int, output: list[int]) -> None:
        self.stop = stop
        self._rule = rule
        self._output = output
        self._guard: RepeatGuard = rule.guard()
        self._num_seen = 0
        self._is_over = False

    def is_over(self) -> bool:
        if len(self._output) < self._num_seen:  # vLLM removed tokens
            self._guard = self._rule.guard()
            self._num_seen = 0
            self._is_over = False
        # Usually one token; several after a preemption.
        while self._num_seen < len(self._output):
            self._is_over = self._guard.push(self._output[self._num_seen])
            self._num_seen += 1
        return self._is_over


class GuardV2(LogitsProcessorV2):
    """The repeat guard for vLLM's V2 model runner (default on GPU), computed on the device.

    In this runner the host runs ahead of the device, so this class never waits for the device. It
    reads each row's last tokens again in every step, so repetitions need no state. Only the count
    of JSON keys has a state per slot. After a preemption the host sets that state from the tokens
    generated before the preemption.
    Not tested on a GPU; tests compare it with `RepeatGuard` on CPU tensors.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._tokenizer = vllm_config.model_config.tokenizer
        # Features that move rows in ways that this class cannot follow.
        self._cannot_follow = []
        if vllm_config.speculative_config is not None:
            self._cannot_follow.append("speculative decoding")
        if vllm_config.parallel_config.enable_batch_sharded_sampling:
            self._cannot_follow.append("batch-sharded sampling")
        self._requests = req_states
        self.settings: RepeatGuardSettings | None = None
        """Settings of the active rule; None: the guard is inactive."""
        num_slots = req_states.max_num_reqs
        self._stops_R = torch.full((num_slots,), -1, dtype=torch.int64, device=req_states.device)
        """Stop token of each slot's request; -1: not guarded."""
        self._entered: dict[int, int] = {}
        """Stop tokens of slots that got a new request since the last step."""
        self._window_W = torch.arange(0, device=req_states.device)
        self._keys: _DeviceKeys | None = None
        self._fewest_tokens = 0

    def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Set when repeating answers to new requests are ended; None: never.

        Repeating answers to requests that are already running are not ended any more.

        Raises ValueError if the engine moves rows in ways that the repeat guard cannot follow.
        """
        if settings is not None and self._cannot_follow:
            features = " and ".join(self._cannot_follow)
            raise ValueError(
                f"the repeat guard cannot be active in the V2 model runner with {features}; start"
                f" the engine without {features}, or set"
                " rollout_matching.repeat_terminate.enabled: false"
            )
        rule = engine_rule(settings, self._tokenizer)
        self.settings = settings
        self._keys = None
        self._entered = {}
        self._stops_R.fill_(-1)
        if settings is None or rule is None:
            return
        run = settings.max_consecutive_token_repeats
        whole = settings.ngram_size * settings.ngram_repeats
        self._window_W = torch.arange(max(run, whole), device=self._requests.device)
        self._fewest_tokens = max(settings.min_new_tokens, min(run, whole))
        if settings.max_object_keys is not None:
            self._keys = _DeviceKeys(rule, self._requests)
            self._fewest_tokens = 0  # every token must be read

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        if self.settings is None:
            return False
        stop = stop_token(sampling_params)
        self._entered[req_idx] = -1 if stop is None else stop
        return stop is not None

    def apply_staged_writes(self) -> None:
        if not self._entered:
            return
        device = self._stops_R.device
        slots = torch.tensor(list(self._entered), device=device)
        self._stops_R[slots] = torch.tensor(list(self._entered.values()), device=device)
        if self._keys is not None:
            self._keys.enter(list(self._entered))
        self._entered = {}

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Force the stop token in rows of `logits`, [B, V], whose answers repeat, in place."""
        settings = self.settings
        if settings is None:
            return logits
        prompt_lengths = self._requests.prompt_len.np[ctx.idx_mapping_np]
        # Launch no kernels while all responses are too short. (vLLM pads the lengths.)
        num_new = ctx.seq_lens_upper_bound_np[: len(prompt_lengths)] - prompt_lengths
        if num_new.max(initial=0) < self._fewest_tokens:
            return logits
        slots_B = ctx.expanded_idx_mapping.long()
        last_B = ctx.pos.long()
        stops_B = self._stops_R[slots_B]
        # 0 or less while the prompt is processed.
        num_new_B = last_B - self._requests.prompt_len.gpu[slots_B] + 1
        over_B = self._repeats(settings, slots_B, last_B, num_new_B)
        if self._keys is not None:
            over_B |= self._keys.exceeded(slots_B, ctx.input_ids.long(), num_new_B)
        over_B &= (stops_B >= 0) & (num_new_B >= max(settings.min_new_tokens, 1))
        stops_B1 = stops_B.clamp(min=0)[:, None]
        forced_B1 = torch.where(over_B[:, None], FORCED_LOGIT, logits.gather(1, stops_B1))
        return logits.scatter_(1, stops_B1, forced_B1)

    def _repeats(
        self,
        settings: RepeatGuardSettings,
        slots_B: torch.Tensor,
        last_B: torch.Tensor,
        num_new_B: torch.Tensor,
    ) -> torch.Tensor:
        """Return bool [B]: whether the last tokens of each row, up to `last_B`, repeat."""
        positions_BW = (last_B[:, None] - self._window_W).clamp(min=0)
        newest_first_BW = self._requests.all_token_ids.gpu[slots_B[:, None], positions_BW]
        run = settings.max_consecutive_token_repeats
        lag = settings.ngram_size
        whole = lag * settings.ngram_repeats
        same_B = (newest_first_BW[:, :run] == newest_first_BW[:, :1]).all(1)
        # n-grams repeat if each token equals the token n positions before it.
        periodic_B = (newest_first_BW[:, : whole - lag] == newest_first_BW[:, lag:whole]).all(1)
        return (same_B & (num_new_B >= run)) | (periodic_B & (num_new_B >= whole))


class _DeviceKeys:
    """The key automata (`ObjectKeys`) of all slots, computed with tables on the device."""

    def __init__(self, rule: RepeatRule, requests: LogitsProcRequestState) -> None:
        assert rule.object_keys is not None
        assert rule.settings.max_object_keys is not None
        self._keys = rule.object_keys
        self._max_keys = rule.settings.max_object_keys
        self._requests = requests
        pieces = [rule.object_keys.piece_bytes(token_id) for token_id in range(requests.vocab_size)]
        next_SV, found_SV = token_steps(pieces)
        self._next_SV = torch.from_numpy(next_SV).to(requests.device)
        self._found_SV = torch.from_numpy(found_SV).to(requests.device)
        zeros_R = torch.zeros(requests.max_num_reqs, dtype=torch.int64, device=requests.device)
        self._state_R = zeros_R + START
        self._num_keys_R = zeros_R.clone()
        self._num_read_R = zeros_R.clone()

    def enter(self, slots: list[int]) -> None:
        """Set the state of requests that begin, or that continue after a preemption."""
        device = self._state_R.device
        values_R3 = torch.tensor([self._so_far(slot) for slot in slots], device=device)
        slots_R = torch.tensor(slots, device=device)
        self._state_R[slots_R] = values_R3[:, 0]
        self._num_keys_R[slots_R] = values_R3[:, 1]
        self._num_read_R[slots_R] = values_R3[:, 2]

    def exceeded(
        self, slots_B: torch.Tensor, token_B: torch.Tensor, num_new_B: torch.Tensor
    ) -> torch.Tensor:
        """Read each row's last token. Return bool [B]: whether the row now has too many keys."""
        state_B = self._state_R[slots_B]
        num_read_B = self._num_read_R[slots_B]
        # False during the prompt, and for tokens that `enter` has already read.
        is_next_B = num_new_B == num_read_B + 1
        after_B = torch.where(is_next_B, self._next_SV[state_B, token_B].long(), state_B)
        num_found_B = torch.where(is_next_B, self._found_SV[state_B, token_B].long(), 0)
        num_keys_B = self._num_keys_R[slots_B] + num_found_B
        self._state_R[slots_B] = after_B
        self._num_keys_R[slots_B] = num_keys_B
        self._num_read_R[slots_B] = num_read_B + is_next_B
        return num_keys_B > self._max_keys

    def _so_far(self, slot: int) -> tuple[int, int, int]:
        """Return (state, number of keys, number of tokens read) of the request in this slot.

        All three are for the tokens generated before the request entered the slot.
        """
        start = int(self._requests.prompt_len.np[slot])
        end = int(self._requests.prefill_len.np[slot])
        state = START
        num_keys = 0
        # This waits for the device, but only after a preemption.
        if end > start:
            for token_id in self._requests.all_token_ids.gpu[slot, start:end].tolist():
                state, num_found = self._keys.step(state, token_id)
                num_keys += num_found
        return state, num_keys, end - start


def stop_token(params: SamplingParams) -> int | None:
    """Return the token that ends an answer: the request's first stop token, else the tokenizer's.

    Return None if the request has no stop token and ignores the tokenizer's.
    """
    if params.stop_token_ids:
        return params.stop_token_ids[0]
    return params.eos_token_id  # None if the request ignores it


class GuardedWorker:
    """Methods that this project adds to vLLM's worker, to set and report its repeat guard."""

    model_runner: GPUModelRunnerV1 | GPUModelRunnerV2
    use_v2_model_runner: bool

    def guard_by(self, settings: dict[str, Any] | None) -> ActiveGuard:
        """Set when repeating answers to new requests are ended. Return `active_guard()`.

        `settings`: fields of `RepeatGuardSettings`; None: repeating answers are not ended.
        """
        # An unchanged rule is not set again: a stock server receives it in every sync, and loading
        # a tokenizer takes seconds.
        asked = None if settings is None else RepeatGuardSettings(**settings)
        for guard in self._guards():
            if guard.settings != asked:
                guard.guard_by(asked)
        return self.active_guard()

    def active_guard(self) -> ActiveGuard:
        guards = self._guards()
        settings = guards[0].settings if guards else None
        return {
            "runner": "V2" if self.use_v2_model_runner else "V1",
            "is_loaded": bool(guards),
            "settings": None if settings is None else asdict(settings),
        }

    def _guards(self) -> list[GuardV1 | GuardV2]:
        runner = self.model_runner
        if self.use_v2_model_runner:
            processors = runner.sampler.logits_processors
        else:
            processors = runner.input_batch.logitsprocs.all
        return [processor for processor in processors if isinstance(processor, GuardV1 | GuardV2)]
