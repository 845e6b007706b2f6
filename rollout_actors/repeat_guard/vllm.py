"""The repeat guard inside vLLM, for both of its model runners: a logits processor that is loaded
when an engine starts, and never asked for by a request.

The engine argument `logits_processors=[GUARD_PROCESSOR]` loads it into every engine; `vllm serve`
takes it as `--logits-processors`. It guards nothing until `GuardedWorker.guard_by` has given it the
rule of a run. So a server needs no flag for the guard, and serves runs with different rules one
after the other. Where the class cannot be imported, the engine does not start.

A sequence that is to be ended gets one logit that outweighs all others, at its first stop token (at
the tokenizer's, where the request names none and does not ignore it; a request with neither is not
guarded, since nothing would end it). Its neighbours' logits are not touched.

vLLM's own `SamplingParams.repetition_detection` is no substitute: requests ask for it, it knows
neither a minimum of tokens nor keys, and it appends no EOS.

Shape legend: R requests in the engine's slots, B rows of one step's logits, V vocabulary, W window
of tokens, S states of the key automaton.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, process_dict_updates
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from rollout_actors.repeat_guard.rule import repeat_rule
from shared.tokens.repeat_guard import (
    START,
    RepeatGuard,
    RepeatGuardSettings,
    RepeatRule,
    token_steps,
)

FORCED_LOGIT = 1e9
"""Far above every logit there is, so that its probability is 1 to the last bit under any
temperature, penalty, top-k and top-p; and finite, so that nothing becomes NaN on the way."""


class VllmRepeatGuard(LogitsProcessorV1, LogitsProcessorV2):
    """One name for both model runners, which each accept their own subclasses alone: what either
    makes of it is the processor of that runner.
    """

    def __new__(cls, vllm_config: VllmConfig, *of_runner: Any) -> Any:
        # V1 passes a device and whether to pin memory, V2 the state of its requests.
        if isinstance(of_runner[0], LogitsProcRequestState):
            return GuardV2(vllm_config, *of_runner)
        return GuardV1(vllm_config, *of_runner)


class GuardV1(LogitsProcessorV1):
    """For the V1 model runner (CPU, and GPU with `VLLM_USE_V2_MODEL_RUNNER=0`): one `RepeatGuard`
    per request, on the host.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._tokenizer = vllm_config.model_config.tokenizer
        self._rule: RepeatRule | None = None
        self._rows: dict[int, _GuardedRequest] = {}
        """By the request's row in the batch; those of guarded requests alone."""

    @property
    def settings(self) -> RepeatGuardSettings | None:
        """The settings of the rule in force; None: nothing is guarded."""
        return None if self._rule is None else self._rule.settings

    def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Set the rule of the requests that begin from now on. Those under way keep theirs."""
        self._rule = _rule(settings, self._tokenizer)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self._rows, batch_update, self._row)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, V]. Here and not in `update_state`, because with asynchronous scheduling the last
        token is known only now.
        """
        ended = [(index, row.stop) for index, row in self._rows.items() if row.is_over()]
        if ended:
            rows, stops = zip(*ended, strict=True)
            logits[list(rows), list(stops)] = FORCED_LOGIT
        return logits

    def _row(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> _GuardedRequest | None:
        # Also after a preemption: `output` then begins with what was generated before it, and the
        # guard catches up.
        stop = stop_token(params)
        return (
            None
            if stop is None or self._rule is None
            else _GuardedRequest(self._rule, stop, output)
        )


class _GuardedRequest:
    """One request. vLLM appends to `output` as it generates."""

    __slots__ = ("_guard", "_is_over", "_num_seen", "_output", "_rule", "stop")

    def __init__(self, rule: RepeatRule, stop: int, output: list[int]) -> None:
        self.stop = stop
        self._rule = rule
        self._output = output
        self._guard: RepeatGuard = rule.guard()
        self._num_seen = 0
        self._is_over = False

    def is_over(self) -> bool:
        output, seen = self._output, self._num_seen
        number = len(output)
        if number == seen + 1:
            self._is_over = self._guard.push(output[seen])
        elif number != seen:
            if number < seen:  # vLLM took tokens back
                self._restart()
            for token_id in output[self._num_seen :]:
                self._is_over = self._guard.push(token_id)
        self._num_seen = number
        return self._is_over

    def _restart(self) -> None:
        self._guard = self._rule.guard()
        self._num_seen, self._is_over = 0, False


class GuardV2(LogitsProcessorV2):
    """For the V2 model runner (default on GPU), whose tokens are on the device while the host runs
    ahead of it: the same rule, computed there without waiting.

    The last tokens of every row are read anew in every step, so that nothing has to be kept for the
    repetitions. Only the key automaton has a state, by slot; after a preemption it is set on the
    host, from the tokens generated before it. Not run on a GPU; on CPU tensors it is compared with
    `RepeatGuard`.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._tokenizer = vllm_config.model_config.tokenizer
        self._cannot_follow = [
            name
            for name, is_on in (
                ("speculative decoding", vllm_config.speculative_config is not None),
                (
                    "batch-sharded sampling",
                    vllm_config.parallel_config.enable_batch_sharded_sampling,
                ),
            )
            if is_on
        ]
        """What moves rows in ways that this class cannot follow."""
        self._requests = req_states
        self._rule: RepeatRule | None = None
        self._stops_R = torch.full(
            (req_states.max_num_reqs,), -1, dtype=torch.int64, device=req_states.device
        )
        """The stop token of each slot's request; -1: not guarded."""
        self._entered: dict[int, int] = {}
        """Slots whose request entered since the last step, and their stop tokens."""
        self._window_W = torch.arange(0, device=req_states.device)
        self._keys: _DeviceKeys | None = None
        self._fewest_tokens = 0

    @property
    def settings(self) -> RepeatGuardSettings | None:
        """The settings of the rule in force; None: nothing is guarded."""
        return None if self._rule is None else self._rule.settings

    def guard_by(self, settings: RepeatGuardSettings | None) -> None:
        """Set the rule of the requests that begin from now on. Those under way are guarded no
        longer.

        Raises:
            ValueError: the engine moves rows in ways that the guard cannot follow.
        """
        if settings is not None and self._cannot_follow:
            name = " and ".join(self._cannot_follow)
            raise ValueError(
                f"the repeat guard cannot be active in the V2 model runner with {name}; switch off"
                " one of them"
            )
        self._rule, self._keys, self._entered = _rule(settings, self._tokenizer), None, {}
        self._stops_R.fill_(-1)
        if settings is None:
            return
        run, whole = (
            settings.max_consecutive_token_repeats,
            settings.ngram_size * settings.ngram_repeats,
        )
        self._window_W = torch.arange(max(run, whole), device=self._requests.device)
        self._fewest_tokens = max(settings.min_new_tokens, min(run, whole))
        if settings.max_object_keys is not None:
            assert self._rule is not None
            self._keys = _DeviceKeys(self._rule, self._requests)
            self._fewest_tokens = 0  # every token has to be read

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        if self._rule is None:
            return False
        stop = stop_token(sampling_params)
        self._entered[req_idx] = -1 if stop is None else stop
        return stop is not None

    def apply_staged_writes(self) -> None:
        if not self._entered:
            return
        slots = torch.tensor(list(self._entered), device=self._stops_R.device)
        self._stops_R[slots] = torch.tensor(
            list(self._entered.values()), device=self._stops_R.device
        )
        if self._keys is not None:
            self._keys.enter(list(self._entered))
        self._entered = {}

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """[B, V], in place."""
        settings = self.settings
        if settings is None:
            return logits
        prompt_lengths = self._requests.prompt_len.np[ctx.idx_mapping_np]
        # vLLM pads the lengths.
        if (ctx.seq_lens_upper_bound_np[: len(prompt_lengths)] - prompt_lengths).max(
            initial=0
        ) < self._fewest_tokens:
            return logits
        slots_B, last_B = ctx.expanded_idx_mapping.long(), ctx.pos.long()
        stops_B = self._stops_R[slots_B]
        # In a prompt nothing has been generated: 0 or less.
        num_new_B = last_B - self._requests.prompt_len.gpu[slots_B] + 1
        over_B = self._repeats(settings, slots_B, last_B, num_new_B)
        if self._keys is not None:
            over_B |= self._keys.exceeded(slots_B, ctx.input_ids.long(), num_new_B)
        over_B &= (stops_B >= 0) & (num_new_B >= max(settings.min_new_tokens, 1))
        at_B1 = stops_B.clamp(min=0)[:, None]
        logits.scatter_(
            1, at_B1, torch.where(over_B[:, None], FORCED_LOGIT, logits.gather(1, at_B1))
        )
        return logits

    def _repeats(
        self,
        s: RepeatGuardSettings,
        slots_B: torch.Tensor,
        last_B: torch.Tensor,
        num_new_B: torch.Tensor,
    ) -> torch.Tensor:
        """Whether the last tokens of each row are a repetition: bool [B]. `last_B` is the position
        of its last token.
        """
        positions_BW = (last_B[:, None] - self._window_W).clamp(min=0)
        newest_first_BW = self._requests.all_token_ids.gpu[slots_B[:, None], positions_BW]
        run, lag, whole = (
            s.max_consecutive_token_repeats,
            s.ngram_size,
            s.ngram_size * s.ngram_repeats,
        )
        same_B = (newest_first_BW[:, :run] == newest_first_BW[:, :1]).all(1) & (num_new_B >= run)
        periodic_B = (newest_first_BW[:, : whole - lag] == newest_first_BW[:, lag:whole]).all(1) & (
            num_new_B >= whole
        )
        return same_B | periodic_B


class _DeviceKeys:
    """`ObjectKeys` of every slot at once, by tables on the device."""

    def __init__(self, rule: RepeatRule, requests: LogitsProcRequestState) -> None:
        assert rule.object_keys is not None
        assert rule.settings.max_object_keys is not None
        self._keys = rule.object_keys
        self._max_keys = rule.settings.max_object_keys
        self._requests = requests
        next_SV, found_SV = token_steps(
            [rule.object_keys.piece_bytes(token_id) for token_id in range(requests.vocab_size)]
        )
        self._next_SV = torch.from_numpy(next_SV).to(requests.device)
        self._found_SV = torch.from_numpy(found_SV).to(requests.device)
        zeros_R = torch.zeros(requests.max_num_reqs, dtype=torch.int64, device=requests.device)
        self._state_R, self._num_keys_R, self._num_read_R = (
            zeros_R + START,
            zeros_R.clone(),
            zeros_R.clone(),
        )

    def enter(self, slots: list[int]) -> None:
        """Requests that begin, or go on after a preemption."""
        values = torch.tensor([self._so_far(slot) for slot in slots], device=self._state_R.device)
        at = torch.tensor(slots, device=self._state_R.device)
        self._state_R[at], self._num_keys_R[at], self._num_read_R[at] = values.unbind(1)

    def exceeded(
        self, slots_B: torch.Tensor, token_B: torch.Tensor, num_new_B: torch.Tensor
    ) -> torch.Tensor:
        """Reads each row's last token, where it is the next one of its request (in a prompt, or in
        what `enter` read, it is not). Bool [B].
        """
        state_B, num_read_B = self._state_R[slots_B], self._num_read_R[slots_B]
        is_next_B = num_new_B == num_read_B + 1
        after_B = torch.where(is_next_B, self._next_SV[state_B, token_B].long(), state_B)
        num_keys_B = self._num_keys_R[slots_B] + torch.where(
            is_next_B, self._found_SV[state_B, token_B].long(), 0
        )
        self._state_R[slots_B], self._num_keys_R[slots_B], self._num_read_R[slots_B] = (
            after_B,
            num_keys_B,
            num_read_B + is_next_B,
        )
        return num_keys_B > self._max_keys

    def _so_far(self, slot: int) -> tuple[int, int, int]:
        """(state, keys, tokens read) of what this slot's request had generated when it entered.
        Waits for the device, after a preemption alone.
        """
        start, end = (
            int(self._requests.prompt_len.np[slot]),
            int(self._requests.prefill_len.np[slot]),
        )
        state, num_keys = START, 0
        for token_id in (
            self._requests.all_token_ids.gpu[slot, start:end].tolist() if end > start else ()
        ):
            state, num_found = self._keys.step(state, token_id)
            num_keys += num_found
        return state, num_keys, end - start


def stop_token(params: SamplingParams) -> int | None:
    """What a request is ended with: its first stop token, else the tokenizer's."""
    if params.stop_token_ids:
        return params.stop_token_ids[0]
    return params.eos_token_id  # None where the request ignores it


def _rule(settings: RepeatGuardSettings | None, tokenizer: str) -> RepeatRule | None:
    return repeat_rule(settings, partial(AutoTokenizer.from_pretrained, tokenizer))


class GuardedWorker:
    """What a run asks of a worker about its guard. Part of the worker extension of every engine of
    a run.
    """

    model_runner: Any
    use_v2_model_runner: bool

    def guard_by(self, settings: dict[str, Any] | None) -> dict[str, Any]:
        """Set the rule of the requests that begin from now on; None: they are not guarded. Answers
        as `active_guard`.

        `settings`: the fields of `RepeatGuardSettings`. Where they are in force already nothing is
        done: a stock server is told them in every sync, and a tokenizer takes seconds to load.
        """
        asked = None if settings is None else RepeatGuardSettings(**settings)
        for guard in self._guards():
            if guard.settings != asked:
                guard.guard_by(asked)
        return self.active_guard()

    def active_guard(self) -> dict[str, Any]:
        """Return `runner`; `is_loaded`, whether its sampler really holds a guard; and the guard's
        `settings`, None where it guards nothing."""
        settings = [guard.settings for guard in self._guards()]
        in_force = None if not settings or settings[0] is None else asdict(settings[0])
        return {
            "runner": "V2" if self.use_v2_model_runner else "V1",
            "is_loaded": bool(settings),
            "settings": in_force,
        }

    def _guards(self) -> list[GuardV1 | GuardV2]:
        runner = self.model_runner
        processors = (
            runner.sampler.logits_processors
            if self.use_v2_model_runner
            else runner.input_batch.logitsprocs.all
        )
        return [processor for processor in processors if isinstance(processor, GuardV1 | GuardV2)]
