"""Measure the repeat guard's share of a vLLM engine's generation time.

`python -m benchmarks.repeat_guard [--sequences 256] [--tokens 128] [--rounds 3]`. One engine on
CPU, in this process. Every round generates the same sequences with and without the guard (requests
without a stop token are not guarded). Both must give the same tokens, because the thresholds are
never reached. This saves the guard no work. Its share is measured inside the guarded rounds,
because two rounds differ by more than the guard costs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from launch.tools.demo.model import make_demo_model
from rollout_actors.engine.settings import EngineSettings, engine_arguments, engine_environment
from rollout_actors.repeat_guard.rule import guard_call
from shared.prompts import DEFAULT_USER_PROMPT
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule
from shared.weight_sync.transports import Device, TransportKind

OUT_OF_REACH = 10**9


def settings(*, keys: bool) -> RepeatGuardSettings:
    return RepeatGuardSettings(OUT_OF_REACH, 32, 16, 4, 64 if keys else None)


def start_engine(folder: Path, sequences: int, guard: RepeatGuardSettings) -> tuple[Any, Any]:
    """Return a vLLM engine (`LLM`) with the repeat guard, and the guard's class.

    The class counts the guard's seconds (`spent_s`) and steps (`num_steps`).
    """
    engine = EngineSettings(
        str(folder),
        "float32",
        512,
        sequences,
        0,
        TransportKind.GLOO,
        Device.CPU,
        0.5,
        kv_cache_memory_bytes=1 << 30,
    )
    os.environ.update(engine_environment(engine))
    import torch
    from vllm import LLM

    from rollout_actors.repeat_guard.vllm import GuardV1

    torch.set_num_threads(1)

    class TimedGuard(GuardV1):
        spent_s = 0.0
        num_steps = 0

        def update_state(self, batch_update: Any) -> None:
            started = time.perf_counter()
            super().update_state(batch_update)
            TimedGuard.spent_s += time.perf_counter() - started

        def apply(self, logits: torch.Tensor) -> torch.Tensor:
            started = time.perf_counter()
            logits = super().apply(logits)
            TimedGuard.spent_s += time.perf_counter() - started
            TimedGuard.num_steps += 1
            return logits

    llm = LLM(**engine_arguments(engine) | {"logits_processors": [TimedGuard]})
    method, arguments = guard_call(guard)
    llm.collective_rpc(method, args=(arguments,))
    return llm, TimedGuard


def generate(
    llm: Any, sequences: int, tokens: int, stop: int, *, guarded: bool
) -> tuple[float, list[list[int]]]:
    """Generate sequences with the engine; return the seconds, and each sequence's tokens."""
    from vllm import SamplingParams, TokensPrompt

    params = [
        # The stop token is never sampled either, so all sequences have the same length.
        SamplingParams(
            temperature=1.0,
            seed=i,
            max_tokens=tokens,
            ignore_eos=True,
            stop_token_ids=[stop] if guarded else [],
            logit_bias={stop: -100.0},
            detokenize=False,
        )
        for i in range(sequences)
    ]
    prompts = [TokensPrompt(prompt_token_ids=[7 + i % 200, 8, 9]) for i in range(sequences)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keys", action="store_true", help="count object keys too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_demo_model(model, seed=17, prompt=DEFAULT_USER_PROMPT)
        llm, guard = start_engine(model, options.sequences, settings(keys=options.keys))
        stop = llm.get_tokenizer().convert_tokens_to_ids("<|im_end|>")
        generate(llm, options.sequences, 8, stop, guarded=True)
        for round_ in range(options.rounds):
            free_s, free = generate(llm, options.sequences, options.tokens, stop, guarded=False)
            guard.spent_s = 0.0
            guard.num_steps = 0
            guarded_s, guarded = generate(
                llm, options.sequences, options.tokens, stop, guarded=True
            )
            assert guarded == free
            print(
                f"round {round_}: {options.sequences} sequences of {options.tokens} tokens in"
                f" {guarded_s:.2f} s (unguarded {free_s:.2f} s); guard {guard.spent_s:.3f} s,"
                f" {guard.spent_s / guard.num_steps * 1e6:.0f} us of a step of"
                f" {guarded_s / guard.num_steps * 1e3:.1f} ms: {guard.spent_s / guarded_s:.2%}"
            )
        rule = RepeatRule(settings(keys=False))
        started = time.perf_counter()
        for token_ids in free:
            rule.first_repetition(token_ids)
        read_s = time.perf_counter() - started
        print(
            f"finding forced tokens in the answers, outside the engine: {read_s:.3f} s,"
            f" {read_s / guarded_s:.2%}"
        )


if __name__ == "__main__":
    main()
