"""Compiles the blocks of a model with torch.compile (`model.compile_blocks`), and checks them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from traceback import clear_frames
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from learner.model.attention import SEGMENT_ATTENTION, segment_attention
from learner.model.optimizer.adamw import local_part
from learner.model.parts import trained_parameters
from learner.model.ranks import Ranks, is_of_collective
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.model_families import HYBRID_MODEL_TYPES

LEAST_STEPS = 100
"""With `auto`, shorter runs do not wait for the compiler, which takes about a minute."""
LARGEST_DIFFERENCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""Limits of `check_compiled_blocks` by `model.dtype`."""

LossOfRow = Callable[[], torch.Tensor]
Forward = Callable[[LossOfRow], torch.Tensor]


def compiles_blocks(config: RunConfig, model: Any, device_type: str) -> bool:
    """Return whether the run compiles the blocks of `model` on this type of device.

    Raises ConfigError if `model.compile_blocks` is true for a model whose layers loop over
    segments, or whose blocks transformers does not name.
    """
    wanted = config.model.compile_blocks
    if wanted == "auto" and (
        device_type != "cuda"
        or config.model.why_not_compiled is not None
        or config.training.num_steps < LEAST_STEPS
    ):
        return False
    kind = model.config.model_type
    why = None
    if kind in HYBRID_MODEL_TYPES:
        why = (
            f"{config.model.path} is a {kind} model, whose linear attention loops over the segments"
            " of a row, so each row would compile again"
        )
    elif not any(_is_block(model, type(module)) for module in model.modules()):
        why = f"transformers names no blocks of {config.model.path}, a {kind} model"
    if wanted is True and why is not None:
        raise ConfigError(f"model.compile_blocks: {why}; set it to false")
    return wanted is not False and why is None


def _is_block(model: Any, kind: type[nn.Module]) -> bool:
    return kind.__name__ in (model._no_split_modules or ())


def compile_blocks(model: Any, *, backend: str = "inductor") -> None:
    """Compile the blocks of `model` and of its vision tower in place.

    All blocks of a class share their graphs, which serve rows of all lengths. Attention stays
    outside of the graphs: it depends on the lengths of the segments, which differ in each row.

    Args:
        backend: torch's name of the compiler.
    """
    AttentionInterface.register(SEGMENT_ATTENTION, _uncompiled_attention())
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for module in model.modules():
        block = type(module)
        if _is_block(model, block):
            if block not in classes:
                classes[block] = _compiled(block, backend)
            # Exchange the class instead of the attribute `forward`: copies of the model keep it.
            module.__class__ = classes[block]
            module.is_compiled = True


@cache
def _uncompiled_attention() -> Callable[..., Any]:
    # Always the same object: graphs are compiled again if the registered function differs.
    uncompiled: Callable[..., Any] = torch.compiler.disable(segment_attention)
    return uncompiled


def _compiled(kind: type[nn.Module], backend: str) -> type[nn.Module]:
    """Return a subclass of `kind` whose forward is compiled, unless its `is_compiled` is false."""
    compiled = torch.compile(kind.forward, dynamic=True, backend=backend)

    def forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        # With a cache (`generate`), each layer and each new token would compile again.
        is_eager = options.get("past_key_values") is not None or not self.is_compiled
        return (kind.forward if is_eager else compiled)(self, *arguments, **options)

    # FSDP2 (learner.model.sharding) finds blocks by this name.
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def has_compiled_blocks(model: nn.Module) -> bool:
    return any(getattr(module, "is_compiled", False) for module in model.modules())


def use_compiled_blocks(model: Any, *, use: bool) -> None:
    """Let the blocks that `compile_blocks` has compiled run as compiled, or as they were before."""
    for module in model.modules():
        if "is_compiled" in vars(module):
            module.is_compiled = use


def check_compiled_blocks(
    config: RunConfig, model: nn.Module, forward: Forward, ranks: Ranks, loss_of_row: LossOfRow
) -> str:
    """Compare a row's loss and gradients of compiled blocks with those of eager ones.

    With `auto`, blocks become eager again on all ranks if results differ on any, or if torch cannot
    compile them. Return one line about the outcome. Weights do not change, and no gradient stays.
    All ranks call it.

    Args:
        forward: calls a function that runs one forward of the model (`Parallel.forward`).
        loss_of_row: runs a forward of `model` and returns the same loss in each call.

    Raises:
        ConfigError: the results differ or torch cannot compile the blocks, and
            `model.compile_blocks` is true; or torch cannot compile those of a sharded model.
    """
    section = config.model
    use_compiled_blocks(model, use=False)
    eager = _loss_and_norms(model, forward, loss_of_row)
    use_compiled_blocks(model, use=True)
    failure: Exception | None = None
    difference = math.inf
    try:
        difference = _difference(eager, _loss_and_norms(model, forward, loss_of_row))
    except Exception as error:  # the compiler of a backward raises errors of any class
        if is_of_collective(error):
            raise
        clear_frames(error.__traceback__)  # they hold the activations of the row
        failure = error
    limit = LARGEST_DIFFERENCES[section.dtype]
    is_wrong = not difference <= limit  # also for NaN
    if failure is not None:
        # torch names its backend in the first line, and the error in the second.
        lines = " ".join(str(failure).split("\n")[:2])
        wrong = f"torch cannot compile the blocks of {section.path} ({lines})"
        # A forward or backward of shards that has ended early cannot be repeated.
        if config.learner.is_sharded:
            raise ConfigError(f"model.compile_blocks: {wrong}; set it to false") from failure
    elif is_wrong:
        wrong = (
            f"compiled blocks of {section.path} give other results than eager ones: a row's loss or"
            f" gradients differ by {difference:.1e} of their size (at most {limit:g} is rounding)"
        )
    else:
        wrong = (
            f"on another learner rank, compiled blocks of {section.path} give other results than"
            " eager ones or cannot be compiled"
        )
    if ranks.max(int(is_wrong)):
        if section.compile_blocks is True:
            raise ConfigError(f"model.compile_blocks: {wrong}; set it to false") from failure
        use_compiled_blocks(model, use=False)
        return f"blocks are not compiled: {wrong}"
    return f"compiled blocks equal eager ones within {difference:.1e} of a row's loss and gradients"


def _loss_and_norms(
    model: nn.Module, forward: Forward, loss_of_row: LossOfRow
) -> tuple[float, list[float]]:
    """Return a row's loss and the norm of each parameter's gradient, and drop the gradients.

    With shards, the gradients are this rank's rows.
    """
    parameters = [parameter for _, parameter in trained_parameters(model)]
    try:
        loss = forward(loss_of_row)
        loss.backward()
        norms = [
            0.0
            if parameter.grad is None
            else torch.linalg.vector_norm(local_part(parameter.grad), dtype=torch.float64).item()
            for parameter in parameters
        ]
        return loss.item(), norms
    finally:
        # Also if a backward ended early: else the first step would add its gradients to these.
        for parameter in parameters:
            parameter.grad = None


def _difference(eager: tuple[float, list[float]], compiled: tuple[float, list[float]]) -> float:
    """Return the relative difference of two results of `_loss_and_norms`.

    Of gradients it is the distance between the vectors of all parameters' gradient norms.
    """
    loss, norms = eager
    found, found_norms = compiled
    # A rank's rows may have no gradient, such as those of an adapter's zeros.
    of_gradients = math.dist(norms, found_norms) / (math.hypot(*norms) or 1.0)
    return abs(loss - found) / (abs(loss) or 1.0) + of_gradients
