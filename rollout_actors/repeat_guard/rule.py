"""The rule of an engine's repeat guard, and the check that its workers use it. Without vllm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TypedDict

from rollout_actors.engine.settings import GUARD_PROCESSOR
from shared.errors import RolloutError
from shared.tokens.hf_codec import token_pieces
from shared.tokens.repeat_guard import RepeatGuardSettings, RepeatRule

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ActiveGuard(TypedDict):
    """A worker's report about its guard (`GuardedWorker.active_guard`)."""

    runner: str
    """vLLM's model runner: "V1" or "V2"."""
    is_loaded: bool
    """Whether its sampler really has a guard."""
    settings: dict[str, object] | None
    """Fields of `RepeatGuardSettings`; None: the guard is inactive."""


def repeat_rule(
    settings: RepeatGuardSettings | None, load_tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> RepeatRule | None:
    """Build the rule; None: no guard. Only the count of object keys needs the tokenizer."""
    if settings is None:
        return None
    if settings.max_object_keys is None:
        return RepeatRule(settings)
    pieces = token_pieces(load_tokenizer())
    return RepeatRule(
        settings, lambda token_id: pieces[token_id] if token_id < len(pieces) else b""
    )


def engine_rule(settings: RepeatGuardSettings | None, model_path: str) -> RepeatRule | None:
    """Build the rule for an engine of this checkpoint."""

    def load_tokenizer() -> PreTrainedTokenizerBase:
        # Imported here, because the import takes seconds. Every client of a server imports this
        # module, and most need no tokenizer.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path)

    return repeat_rule(settings, load_tokenizer)


def guard_call(settings: RepeatGuardSettings | None) -> tuple[str, dict[str, object] | None]:
    """Return name and argument of the workers' method that sets the rule (`GuardedWorker`)."""
    return "guard_by", None if settings is None else asdict(settings)


def require_guard(
    answers: Sequence[ActiveGuard], settings: RepeatGuardSettings | None, actor: str
) -> None:
    """Raise RolloutError(phase="start") unless every worker of an engine uses these settings.

    Args:
        answers: results of `guard_call`, one per worker.
    """
    asked = None if settings is None else asdict(settings)
    for rank, answer in enumerate(answers):
        if answer["settings"] == asked:
            continue
        held = (
            f"a repeat guard with {answer['settings']}" if answer["settings"] else "no repeat guard"
        )
        wanted = "but none is configured"
        if asked is not None:
            wanted = f"but rollout_matching.repeat_terminate requires {asked}"
        remedy = (
            f"set the engine argument logits_processors=['{GUARD_PROCESSOR}'] in an environment"
            " with this package installed"
        )
        if answer["runner"] != "V1":
            remedy += "; VLLM_USE_V2_MODEL_RUNNER=0 selects the V1 model runner"
        raise RolloutError(
            f"repeat guard: the {answer['runner']} model runner of worker {rank} has {held},"
            f" {wanted}; {remedy}",
            actor=actor,
            phase="start",
        )
