"""The optimizer: AdamW on float32 master weights, with gradients summed over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from learner.model.parts import part_settings, trained_parameters
from learner.model.ranks import Ranks
from shared.config.training import TrainingSection
from shared.errors import ConfigError, LearnerError
from shared.model_families import ModelPart

if TYPE_CHECKING:
    from learner.model.optimizer.adamw_8bit import AdamW8bit

CPU = torch.device("cpu")


class MasterWeights:
    """Float32 copies of the trained parameters (master weights), which the optimizer updates.

    A float32 parameter is its own master, unless masters are kept on another device.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        kept_on: torch.device | None = None,
        *,
        sums_there: bool = False,
    ) -> None:
        """Create the masters. From now on, gradients of rows are summed in float32.

        Args:
            kept_on: the device of the masters; None: each on its parameter's device.
            sums_there: sum gradients on the masters' device, so that each row moves them; else they
                are summed on their parameters' device, and only an update moves them.
        """
        # bfloat16 has 8 significant bits: adding an update below 1/512 of a weight does not change
        # it, and small gradients of rows are lost in a sum. So after each backward, a parameter's
        # gradient is added to a sum in float32, and then dropped.
        self.masters: list[torch.Tensor] = []
        """The master weight of each parameter, in the order of the constructor's `parameters`."""
        self._copies: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._kept_on = kept_on
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        """The sum of the rows' gradients, by master; not of parameters that are their own master.
        """
        self._received: dict[torch.Tensor, torch.Tensor] = {}
        """Memory for the gradients of masters that are kept on another device, by master."""
        self._sum_devices: list[torch.device] = []
        for parameter in parameters:
            if parameter.dtype is torch.float32 and kept_on is None:
                master: torch.Tensor = parameter
            else:
                device = kept_on or parameter.device
                copy = parameter.detach().to(device, torch.float32, copy=True)
                master = _pinned(copy, parameter)
                self._copies.append((parameter, master))
            summed_on = master.device if sums_there else parameter.device
            if master is not parameter:
                add = _adder(self._sums, master, summed_on)
                parameter.register_post_accumulate_grad_hook(add)
            self.masters.append(master)
            self._sum_devices.append(summed_on)

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the sum of the rows' gradients for each master; None if it has had none."""
        return [self._sums.get(master, master.grad) for master in self.masters]

    def zeros(self, index: int) -> torch.Tensor:
        """Return zeros in the place of the gradient of a master without one."""
        return torch.zeros_like(self.masters[index], device=self._sum_devices[index])

    def set_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Give each master its gradient, which is moved to the master's device."""
        for master, gradient in zip(self.masters, gradients, strict=True):
            if gradient is not None and gradient.device != master.device:
                if master not in self._received:
                    self._received[master] = _pinned(torch.empty_like(master), gradient)
                gradient = self._received[master].copy_(gradient)
            master.grad = gradient

    def drop_gradients(self) -> None:
        """Drop the sums and the masters' gradients, after an update."""
        self._sums.clear()
        for master in self.masters:
            master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model's parameters, rounded to the parameters' number type."""
        if self._copies:
            parameters, masters = zip(*self._copies, strict=True)
            torch._foreach_copy_(parameters, masters)

    def move_to(self, device: torch.device) -> None:
        """Move the sums of gradients to a device, and masters that no `kept_on` keeps on another.

        A float32 parameter that is its own master is not moved, nor is its gradient.
        """
        for master, gradient in self._sums.items():
            self._sums[master] = gradient.to(device)
        if self._kept_on is None:
            for _, master in self._copies:
                master.data = master.data.to(device)


def _adder(
    sums: dict[torch.Tensor, torch.Tensor], master: torch.Tensor, device: torch.device
) -> Callable[[torch.Tensor], None]:
    """Return a hook that adds a parameter's gradient to the sum of its master, on `device`."""

    def add(parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None, "the hook runs after a gradient was accumulated"
        # A blocking copy: afterwards the gradient's GPU memory can be freed.
        gradient = gradient.to(device)
        if master in sums:
            sums[master].add_(gradient)
        else:
            sums[master] = gradient.float()
        # Otherwise the next row's gradient would be added to this one in bfloat16.
        parameter.grad = None

    return add


def _pinned(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the tensor, in pinned memory if it is on the host and `other`, its copy, on a GPU."""
    is_away = other.is_cuda and tensor.device.type == "cpu"
    return tensor.pin_memory() if is_away else tensor


class InPlaceEmbedding(nn.Embedding):
    """An embedding whose backward adds the gradients of a row's tokens to `weight.grad` in place.

    torch's own backward allocates a gradient of the whole vocabulary for each row, and adds it.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not (torch.is_grad_enabled() and self.weight.requires_grad):
            return super().forward(input)
        # The weight is not part of the graph, so another input requires the gradient. `weight.grad`
        # then already has the gradient of a tied head, which comes first in the backward.
        anchor = torch.zeros((), requires_grad=True)
        found: torch.Tensor = _LookUp.apply(anchor, input, self)
        return found


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,  # noqa: ARG004
        ids: torch.Tensor,
        embedding: nn.Embedding,
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.embedding = embedding
        return F.embedding(ids, embedding.weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.embedding.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        if (padding := ctx.embedding.padding_idx) is not None:
            gradient = gradient.masked_fill((ids == padding)[..., None], 0.0)
        # First the sum over the row, as torch computes it, but only of the tokens that occur.
        found, places = ids.unique(return_inverse=True)
        dense = torch.ops.aten.embedding_dense_backward
        weight.grad.index_add_(0, found, dense(gradient, places, len(found), -1, False))
        return None, None, None


def _add_in_place(model: nn.Module, masters: Iterable[torch.Tensor]) -> None:
    """Turn embeddings on the CPU into `InPlaceEmbedding`s if their weights are among `masters`."""
    own = {
        id(master)
        for master in masters
        # On a GPU, the host would wait for the number of different tokens.
        if master.device.type == "cpu" and not isinstance(master, DTensor)
    }
    for module in model.modules():
        if type(module) is nn.Embedding and id(module.weight) in own:
            # As for `PatchProjection`: copies of the model keep the class.
            module.__class__ = InPlaceEmbedding


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The metrics of one optimizer update.

    Example: the first of three updates that were not finite gives `UpdateResult(nan, 1e-5, {}, 1)`.
    """

    grad_norm: float
    """Norm of the gradient before it is clipped. Not finite if the update was skipped."""
    learning_rate: float
    """Learning rate of the parts of the model that have no separate rate."""
    part_learning_rates: dict[ModelPart, float]
    """Learning rates of the trained parts of the model that have a separate rate."""
    num_skipped_in_a_row: int = 0
    """Number of consecutive skipped updates, up to and including this one."""

    @property
    def skipped(self) -> bool:
        """True if the gradient was not finite, so that the weights were not changed."""
        return self.num_skipped_in_a_row > 0


def update_metrics(updates: Sequence[UpdateResult]) -> dict[str, float]:
    """Return the metrics of a step's optimizer updates by name, such as the gradient norm.

    Norms that are not finite are left out.
    """
    last = updates[-1]
    metrics = {"optim/learning_rate": last.learning_rate}
    for part, rate in last.part_learning_rates.items():
        metrics[f"optim/learning_rate.{part}"] = rate
    if norms := [update.grad_norm for update in updates if not update.skipped]:
        metrics["optim/grad_norm"] = fmean(norms)
    metrics["optim/num_skipped"] = float(sum(update.skipped for update in updates))
    metrics["optim/num_skipped_in_a_row"] = float(last.num_skipped_in_a_row)
    return metrics


@dataclass(frozen=True, slots=True)
class _ParameterGroup:
    """The key of one of AdamW's parameter groups, whose parameters have equal settings."""

    part: ModelPart
    decays: bool
    """Whether weight decay applies. Pulling norms and biases towards zero does not regularize."""
    is_embedding: bool = False
    """Whether the moments keep 32 bits although the optimizer stores other moments in 8 bits."""


class Optimizer:
    """The learner's optimizer: AdamW with a learning-rate schedule, on master weights.

    Each rank updates its own shards of DTensors (FSDP2). `training.optimizer` chooses the device
    and the bits of the moments. Other values of this key than the default were not tested on a GPU.
    """

    def __init__(self, model: nn.Module, config: TrainingSection, ranks: Ranks) -> None:
        self._ranks = ranks
        self._config = config
        # A step says nothing about the gradients of tokens that it does not contain, so an
        # embedding's moments keep 32 bits, as in Hugging Face's Trainer.
        embeddings = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding) and config.optimizer == "adamw_bnb_8bit"
        }
        trained = [
            (_ParameterGroup(part, parameter.ndim > 1, id(parameter) in embeddings), parameter)
            for part, parameter in trained_parameters(model)
        ]
        self._names = [
            name for name, parameter in model.named_parameters() if parameter.requires_grad
        ]
        self.is_offloaded = config.offloads_optimizer
        """Whether master weights and moments are always in host memory. Float32 parameters then
        have a separate master too."""
        self.weights = MasterWeights(
            (parameter for _, parameter in trained),
            CPU if self.is_offloaded else None,
            sums_there=config.optimizer == "adamw_offload_all",
        )
        _add_in_place(model, self.masters)
        groups: dict[_ParameterGroup, list[torch.Tensor]] = {}
        for (group, _), master in zip(trained, self.masters, strict=True):
            groups.setdefault(group, []).append(master)
        self._groups = list(groups)
        of_groups = [
            {"params": masters, "weight_decay": config.weight_decay if group.decays else 0.0}
            for group, masters in groups.items()
        ]
        arguments: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_epsilon,
        }
        self.optimizer: torch.optim.AdamW | AdamW8bit
        if config.optimizer == "adamw_bnb_8bit":
            # Imported only if a run uses it: bitsandbytes is an optional dependency.
            from learner.model.optimizer.adamw_8bit import AdamW8bit

            for values, group in zip(of_groups, groups, strict=True):
                values["optim_bits"] = 32 if group.is_embedding else 8
            self.optimizer = AdamW8bit(of_groups, **arguments)
        else:
            # Fused: one kernel, without temporary copies of the weights.
            self.optimizer = torch.optim.AdamW(of_groups, **arguments, fused=True)
        self.num_skipped = 0
        """Number of consecutive skipped updates, up to the last update."""

    @property
    def masters(self) -> list[torch.Tensor]:
        """The float32 tensors that the optimizer updates: trained parameters or their masters."""
        return self.weights.masters

    def update(self, step: int, denominator: int) -> UpdateResult:
        """Update the weights with the gradients of all ranks, then drop the gradients.

        The gradients are summed over the ranks, divided by `denominator` and clipped. If the
        gradient is not finite, the update is skipped: weights and moments do not change. All ranks
        have the same sum and decide alike. Raises LearnerError after more than
        `training.max_nonfinite_updates` consecutive skipped updates.

        Args:
            step: step number, from 0, for the learning-rate schedule.
            denominator: number of samples (or segments, or tokens) of the step on all ranks.
        """
        config = self._config
        gradients = self._gradients()
        reached = [local_part(gradient) for gradient in gradients if gradient is not None]
        if reached:
            self._ranks.sum_gradients(reached)
            torch._foreach_div_(reached, denominator)
        norm = nn.utils.get_total_norm(one for one in gradients if one is not None)
        if isinstance(norm, DTensor):
            # Each rank has only a part of the norm; `full_tensor` is a collective.
            norm = norm.full_tensor()
        grad_norm = float(norm)
        part_rates = {}
        for group, arguments in zip(self._groups, self.optimizer.param_groups, strict=True):
            peak = part_settings(group.part, config.parts).learning_rate
            rate = learning_rate_at(step, config, peak or config.learning_rate)
            arguments["lr"] = rate
            if peak is not None:
                part_rates[group.part] = rate
        finite = math.isfinite(grad_norm)
        if finite:
            if config.max_grad_norm is not None and reached:
                # As `nn.utils.clip_grad_norm_` computes it, before the gradients are moved.
                factor = (config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
                torch._foreach_mul_(reached, factor)
            self.weights.set_gradients(gradients)
            self.optimizer.step()
            self.weights.publish()
        self.weights.drop_gradients()
        self.num_skipped = 0 if finite else self.num_skipped + 1
        if self.num_skipped > config.max_nonfinite_updates:
            raise LearnerError(self._nonfinite_message(step, grad_norm), phase="update")
        return UpdateResult(
            grad_norm,
            learning_rate_at(step, config, config.learning_rate),
            {part: part_rates[part] for part in ModelPart if part in part_rates},
            self.num_skipped,
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's master weights and moments by name, to be saved in a checkpoint.

        Example: `model.norm.weight/master`, `model.norm.weight/exp_avg`, `.../exp_avg_sq`,
        `.../step`. A parameter without any gradient so far has no moments.
        """
        tensors = {}
        for name, master in zip(self._names, self.masters, strict=True):
            values = {"master": master, **self._moments(master)}
            for kind, value in values.items():
                tensors[f"{name}/{kind}"] = local_part(value).detach().contiguous()
        return tensors

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restore master weights, moments and parameters from `tensors` of a checkpoint.

        Raises ConfigError if the tensors belong to other parameters or another optimizer.
        """
        saved: dict[str, dict[str, torch.Tensor]] = {}
        for key, value in tensors.items():
            name, _, kind = key.rpartition("/")
            saved.setdefault(name, {})[kind] = value
        parts = {n: local_part(master) for n, master in zip(self._names, self.masters, strict=True)}
        here = {name: list(part.shape) for name, part in parts.items()}
        there = {
            name: list(values["master"].shape)
            for name, values in saved.items()
            if "master" in values
        }
        if differing := [name for name in here | there if here.get(name) != there.get(name)]:
            name = differing[0]
            raise ConfigError(
                f"resume.run: {name} has the shape {here.get(name, 'none')} on this rank, but"
                f" {there.get(name, 'none')} in the checkpoint; resume with the same model, trained"
                " parts and number of learner ranks"
            )
        for (name, part), master in zip(parts.items(), self.masters, strict=True):
            values = saved[name]
            part.copy_(values.pop("master"))
            if not values:
                continue
            if ("exp_avg" in values) != isinstance(self.optimizer, torch.optim.AdamW):
                raise ConfigError(
                    f"resume.run: the checkpoint has other moments of {name} ({', '.join(values)})"
                    f" than training.optimizer: {self._config.optimizer}; resume with the run's"
                    " optimizer (adamw_torch and adamw_offload have the same moments)"
                )
            if not isinstance(self.optimizer, torch.optim.AdamW):
                self.optimizer.restore_state(master, values)
            else:
                state = self.optimizer.state[master]
                for kind, moment in values.items():
                    if kind == "step":
                        # The fused kernel reads it on the master's device.
                        state[kind] = moment.to(master.device)
                    else:
                        state[kind] = torch.zeros_like(master)
                        local_part(state[kind]).copy_(moment)
        self.weights.publish()

    def move_to(self, device: torch.device) -> None:
        """Move moments, master weights and their gradients to a device.

        The caller moves them back before the next row is trained. Masters and moments of
        `adamw_offload` stay in host memory.
        """
        self.weights.move_to(device)
        if self.is_offloaded:
            return
        for state in self.optimizer.state.values():
            for name, value in state.items():
                # AdamW expects the step count on its original device.
                if name != "step":
                    state[name] = value.to(device)

    def _moments(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(self.optimizer, torch.optim.AdamW):
            moments: dict[str, torch.Tensor] = self.optimizer.state.get(master, {})
            return moments
        return self.optimizer.saved_state(master)

    def _gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient of each master, or None if it has no gradient on any rank."""
        gradients = self.weights.gradients()
        reached = self._ranks.any_of([gradient is not None for gradient in gradients])
        for index, is_reached in enumerate(reached):
            # If only other ranks have this gradient, this rank adds zeros: all ranks must sum lists
            # of the same shapes.
            if is_reached and gradients[index] is None:
                gradients[index] = self.weights.zeros(index)
        return gradients

    def _nonfinite_message(self, step: int, grad_norm: float) -> str:
        allowed = self._config.max_nonfinite_updates
        before = f", and the {self.num_skipped - 1} updates before were not finite either"
        return (
            f"step {step + 1}: the gradient norm is {grad_norm}{before if allowed else ''}"
            f" (training.max_nonfinite_updates: {allowed}); lower training.learning_rate, raise"
            " training.lr_warmup_steps, check the step's data, or raise"
            " training.max_nonfinite_updates"
        )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor (without a copy), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor. If this rank holds a shard of it, this is a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def learning_rate_at(step: int, config: TrainingSection, peak: float) -> float:
    """Return the learning rate of a step: linear warm-up to `peak`, then the configured schedule.

    The schedule ends at `min_lr_ratio` of the peak at `max_steps`.

    Example: with peak 1.0 and `lr_warmup_steps` 4, steps 0 to 3 have 0.25, 0.5, 0.75 and 1.0.
    """
    if step < config.lr_warmup_steps:
        return peak * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return peak
    progress = (step - config.lr_warmup_steps) / max(1, config.num_steps - config.lr_warmup_steps)
    if config.lr_schedule == "linear":
        decay = 1.0 - progress
    else:
        decay = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * decay)
