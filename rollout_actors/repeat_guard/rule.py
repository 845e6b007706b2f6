"""The repeat guard without vllm: its rule, for whoever guards or receives what was guarded, and
whether an engine's workers hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rollout_actors.engine.settings import GUARD_PROCESSOR
from shared.errors import RolloutError
from shared.tokens.hf_codec import token_pieces
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule


def repeat_rule(
    settings: RepeatGuardSettings | None, load_tokenizer: Callable[[], Any]
) -> RepeatRule | None:
    """None where there is no guard. The tokenizer is asked for only where keys are counted."""
    if settings is None:
        return None
    if settings.max_object_keys is None:
        return RepeatRule(settings)
    pieces = token_pieces(load_tokenizer())
    return RepeatRule(
        settings, lambda token_id: pieces[token_id] if token_id < len(pieces) else b""
    )


def engine_rule(settings: RepeatGuardSettings | None, model_path: str) -> RepeatRule | None:
    """Return the rule of an engine of this checkpoint; None where it guards nothing."""

    def load_tokenizer() -> Any:
        # Here and not above: every client of a server imports this module, and most need no
        # tokenizer, whose import takes seconds.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path)

    return repeat_rule(settings, load_tokenizer)


def guard_call(settings: RepeatGuardSettings | None) -> tuple[str, dict[str, Any] | None]:
    """Return the method of every worker (`GuardedWorker`) that sets an engine's rule, and its
    argument."""
    return "guard_by", None if settings is None else asdict(settings)


def require_guard(
    answers: list[dict[str, Any]], settings: RepeatGuardSettings | None, actor: str
) -> None:
    """Raises RolloutError(phase="start") unless every worker of an engine guards by these settings,
    or not at all.

    `answers`: of `guard_call`, one per worker.
    """
    asked = None if settings is None else asdict(settings)
    for rank, answer in enumerate(answers):
        if answer["settings"] == asked:
            continue
        held = (
            "no repeat guard"
            if answer["settings"] is None
            else f"a repeat guard with {answer['settings']}"
        )
        wanted = (
            "none is configured"
            if asked is None
            else f"rollout_matching.repeat_terminate asks for {asked}"
        )
        raise RolloutError(
            f"the {answer['runner']} model runner of worker {rank} holds {held}, and {wanted}; it"
            f" is loaded by the engine argument logits_processors=['{GUARD_PROCESSOR}'] in an"
            " environment with this package installed"
            + (
                ""
                if answer["runner"] == "V1"
                else "; VLLM_USE_V2_MODEL_RUNNER=0 goes back to the V1 model runner"
            ),
            actor=actor,
            phase="start",
        )
