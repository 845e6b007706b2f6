"""The repeat guard's rule (which repeating answers an engine ends), and the check that each worker
of the engine uses it. This module does not import vllm.
"""

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
    """A vLLM worker's report about its repeat guard (`GuardedWorker.active_guard`)."""

    runner: str
    """The worker's model runner: "V1" or "V2"."""
    is_loaded: bool
    """Whether the worker has loaded the repeat guard."""
    settings: dict[str, object] | None
    """Fields of the guard's `RepeatGuardSettings`; None: the guard ends no answers."""


def repeat_rule(
    settings: RepeatGuardSettings | None, load_tokenizer: Callable[[], PreTrainedTokenizerBase]
) -> RepeatRule | None:
    """Build the rule that says which repeating answers are ended; None: no answers are ended.

    `load_tokenizer` is called only if the settings limit the number of JSON keys in an answer.
    """
    if settings is None:
        return None
    if settings.max_object_keys is None:
        return RepeatRule(settings)
    pieces = token_pieces(load_tokenizer())
    return RepeatRule(
        settings, lambda token_id: pieces[token_id] if token_id < len(pieces) else b""
    )


def engine_rule(settings: RepeatGuardSettings | None, model_path: str) -> RepeatRule | None:
    """Build the rule that says which repeating answers an engine of this checkpoint ends.

    Return None if `settings` is None, so that no answer is ended.
    """

    def load_tokenizer() -> PreTrainedTokenizerBase:
        # Imported here, because the import takes seconds. Every client of a server imports this
        # module, and most need no tokenizer.
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_path)

    return repeat_rule(settings, load_tokenizer)


def guard_call(settings: RepeatGuardSettings | None) -> tuple[str, dict[str, object] | None]:
    """Return name and argument of the call that sets the repeat guard's rule in vLLM's workers.

    The called method is one of `GuardedWorker`.
    """
    return "guard_by", None if settings is None else asdict(settings)


def require_guard(
    answers: Sequence[ActiveGuard], settings: RepeatGuardSettings | None, actor: str
) -> None:
    """Raise RolloutError unless the repeat guard of every worker of an engine has these settings.

    `answers`: results of the call that `guard_call` describes, one per worker.
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
            f"start the engine with the argument logits_processors=['{GUARD_PROCESSOR}'] where the"
            " package rollmatch is installed"
        )
        if answer["runner"] != "V1":
            remedy += "; VLLM_USE_V2_MODEL_RUNNER=0 selects the V1 model runner"
        raise RolloutError(
            f"repeat guard: the {answer['runner']} model runner of worker {rank} has {held},"
            f" {wanted}; {remedy}",
            actor=actor,
            phase="start",
        )
