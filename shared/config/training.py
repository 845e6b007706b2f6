"""`training`, `learner` and `checkpoint`: training, learner ranks, and saved checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shared.config.base import MISSING, Fraction01, LearningRate, Section, WholeGPUs, refusal
from shared.model_families import ModelPart

LOGIT_CHUNK = 512
"""Number of token positions whose logits over the whole vocabulary are in memory at once.

In bfloat16, with 152,000 token ids, these logits and the tensors of their backward take 0.70 GB.
"""


class LearnerSection(Section):
    """The learner ranks, and the resources that Ray reserves for each."""

    world_size: PositiveInt = 1
    """Number of learner ranks (processes that train together)."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """ddp: each rank holds the whole model; fsdp: a shard (FSDP2). No effect with one rank."""
    shard_size: Annotated[int | None, Field(ge=2)] = None
    """With fsdp: number of ranks that hold one copy of the model together, on one node. The copies
    learn different rows, and sum their gradients once per update. It divides `world_size`. null:
    all ranks hold one copy, also over several nodes."""
    gpus: WholeGPUs | None = None
    """Number of GPUs that Ray reserves for each rank; null: 1 if the cluster has GPUs, else 0."""
    cpus: NonNegativeFloat | None = None
    """Number of CPU cores that Ray reserves for each rank; null: 1."""
    cpu_threads: PositiveInt | None = None
    """Number of torch threads in each rank. null, on CPU: the machine's cores divided over ranks,
    without a core for each engine process that generates while the learner learns (only with
    several rounds a step, or `max_staleness`). null, on GPUs or a cluster at an address: one for
    each core of the node. The number changes the order of float sums, so set it to repeat a run
    exactly on another machine. A resumed run keeps its number."""

    @property
    def is_sharded(self) -> bool:
        """Return whether each rank holds only a shard of the model."""
        return self.world_size > 1 and self.parallel == "fsdp"

    @property
    def num_shards(self) -> int:
        """Return the number of ranks that hold one copy of the model together.

        Example: 1 with ddp; with fsdp and 16 ranks 16, or 8 with `shard_size: 8`.
        """
        return (self.shard_size or self.world_size) if self.is_sharded else 1

    @model_validator(mode="after")
    def _shards_fit(self) -> LearnerSection:
        size = self.shard_size
        if size is None:
            return self
        if self.parallel != "fsdp":
            wrong = f"{size} has no effect with parallel: {self.parallel}"
            raise refusal(wrong, "set parallel: fsdp, or remove the key", "shard_size")
        if self.world_size % size:
            wrong = f"{size} does not divide world_size {self.world_size} into whole copies"
            raise refusal(wrong, "set a divisor of world_size, or null", "shard_size")
        return self


class CheckpointSection(Section):
    """When checkpoints are saved, and which are kept."""

    save_final: bool = True
    """Save the trained model at the end, as an ordinary checkpoint in the run folder."""
    save_steps: PositiveInt | None = None
    """Save a checkpoint after every this many steps; null: do not save by steps."""
    save_minutes: PositiveFloat | None = 15.0
    """Save a checkpoint after an update if the newest checkpoint (or the start) is this many
    minutes old; null: do not save by time."""
    keep_last: PositiveInt = 2
    """Number of the newest checkpoints of `save_steps` and `save_minutes` that are kept."""
    keep_best: NonNegativeInt = 0
    """Number of checkpoints kept for the best held-out F1 (at the first of
    `evaluation.iou_thresholds`) or the best mean reward of an environment. Each held-out report may
    add one."""
    full: bool = True
    """Save also what a resumed run needs, not only the model: float32 master weights, optimizer,
    buffers. false: the run cannot be resumed. With true, checkpoints of a bfloat16 model are seven
    times as large."""
    background: bool = True
    """Copy periodic and best checkpoints to host memory and write them while the run continues.
    false, or too little memory: the run waits until they are written."""
    save_on_interrupt: bool = True
    """Save the last finished update when a signal (Ctrl-C, SIGTERM, SIGHUP) or a failed rollout or
    sync ends the run."""


class PartSection(Section):
    frozen: bool = False
    """Do not train the weights of this part of the model."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of this part of the model; null: `training.learning_rate`."""
    adapted: bool | None = None
    """Whether this part of the model gets an adapter, if `model.adapter` is set. Then its layers
    that `model.adapter.target_modules` names are adapted. null: true only for the language
    model."""

    @model_validator(mode="after")
    def _rate_has_effect(self) -> PartSection:
        if self.frozen and self.learning_rate is not None:
            wrong = f"{self.learning_rate:g} has no effect, because the part is frozen"
            raise refusal(wrong, "remove the key, or set frozen: false", "learning_rate")
        return self


class PartsSection(Section):
    vision_tower: PartSection = PartSection()
    """The vision encoder, without its mergers."""
    aligner: PartSection = PartSection()
    """The mergers between vision encoder and language model: they turn patches into embeddings."""
    language_model: PartSection = PartSection()
    """The language model, with its embeddings and head."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> PartsSection:
        if all(section.frozen for _, section in self.items()):
            raise refusal("all parts are frozen, so nothing is trained", "unfreeze one")
        return self

    def items(self) -> Iterator[tuple[ModelPart, PartSection]]:
        yield ModelPart.VISION_TOWER, self.vision_tower
        yield ModelPart.ALIGNER, self.aligner
        yield ModelPart.LANGUAGE_MODEL, self.language_model

    @property
    def adapted(self) -> tuple[ModelPart, ...]:
        """The parts of the model that get an adapter, if the run trains an adapter."""
        unset = {part: part is ModelPart.LANGUAGE_MODEL for part in ModelPart}
        return tuple(
            part
            for part, section in self.items()
            if (unset[part] if section.adapted is None else section.adapted)
        )


class TrainingSection(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32, examples=[17])]
    """Seed of the run: data order, prompts, augmentation, new adapters and every rollout."""
    num_epochs: PositiveInt | None = None
    """Gives the length of the run in place of `max_steps`: the run draws every training row this
    many times. The number of steps is computed at the start, rounded up, and recorded as
    `max_steps`."""
    max_steps: Annotated[PositiveInt | None, Field(examples=[100], validate_default=True)] = None
    """Number of steps of the run, if `num_epochs` is not set. Each has one optimizer update, or
    `updates_per_batch`."""
    updates_per_batch: PositiveInt = 1
    """Number of optimizer updates per step on the same rollouts, between generation and sync. Each
    learns all rows once. Only under `trajectory_pg`. Schedules, weight versions and checkpoints
    count steps, so all updates of a step have the same learning rate."""
    per_device_train_batch_size: PositiveInt = 1
    """Samples of each learner rank per micro-step, one of the `gradient_accumulation_steps` of an
    update. Under `stage2_rollout_aligned`: rollouts that enter the carry buffer before each packed
    row."""
    per_device_eval_batch_size: PositiveInt = 1
    """No effect in this version, because evaluation does not run the learner's model."""
    effective_batch_size: PositiveInt | None = None
    """Samples (of environments: rollouts) per update over all learner ranks. It sets the number of
    accumulation steps, rounded up, so an update may have more samples."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-steps per update; null: as many as `effective_batch_size` needs, or 1."""
    eval_steps: PositiveInt | None = None
    """Evaluate after every this many steps, on `data.val` or the environment's held-out examples.
    A report is always made at the end of the run. null: only then, and as `eval_on_start`
    says."""
    eval_on_start: bool = True
    """Also evaluate at the end of the channel-A warm-up (without one: before the first step).
    false: training starts sooner, but no report says how good the model was before."""
    optimizer: Literal["adamw_torch", "adamw_bnb_8bit", "adamw_offload", "adamw_offload_all"] = (
        "adamw_torch"
    )
    """adamw_torch: float32 moments and master weights on the model's device. adamw_bnb_8bit: 8-bit
    moments in blocks of 256 values (bitsandbytes; 32 bits for embeddings and tensors under 4,096
    values); saves 6 bytes per trained value. adamw_offload: moments and master weights in host
    memory; saves 12 bytes (8 with a float32 model), but updates are slower. adamw_offload_all:
    gradients too, which every row moves; saves 4 bytes more, but rows are slower. Only adamw_torch
    supports `learner.parallel: fsdp`."""
    learning_rate: Annotated[LearningRate, Field(examples=[0.001])]
    """Peak learning rate of AdamW, at most 1."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW, applied to matrices only, not to norms and biases."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay rate of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay rate of AdamW's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the square root of AdamW's second moment."""
    lr_warmup_steps: NonNegativeInt = 0
    """Number of steps over which the learning rate rises linearly to its peak."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up; cosine and linear fall to the minimum at `max_steps`."""
    min_lr_ratio: Fraction01 = 0.0
    """Minimum of a falling learning rate, as a fraction of `learning_rate`."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Clip the gradient of an update to this L2 norm; null: no clipping."""
    max_nonfinite_updates: NonNegativeInt = 0
    """How many successive updates may be skipped because the gradient is not finite; one more stops
    the run. A skipped update leaves weights and optimizer unchanged, is counted, and ends its step.
    """
    parts: PartsSection = PartsSection()
    """Which parts of the model are trained, and their learning rates."""
    packing: bool = True
    """Pack several segments into one row, for speed; false: one segment per row."""
    packing_buffer: PositiveInt = 256
    """Maximum number of segments (prompts with targets) that wait to be packed into a row. It must
    be at least the number of samples of a step. Under `stage2_rollout_aligned`: at least those of a
    micro-step (`per_device_train_batch_size`), and a full buffer stops the run. Under
    `trajectory_pg` a full buffer is made into a row."""
    packing_min_fill_ratio: Fraction01 = 0.7
    """Rows filled less than this fraction of `global_max_length` are counted and logged."""
    packing_drop_last: bool = True
    """Drop the segments left in the carry buffer at the end of the run. Only for
    `stage2_rollout_aligned`, which requires true with packing."""
    packing_window: PositiveInt = 8
    """Number of rollouts (of environments: segments) after which full packed rows are built and
    learned. Rollouts are taken in index order. Segments that fill no row wait for the next rows of
    the step. No effect under `stage2_rollout_aligned`, which builds one row per micro-step."""
    share_prompts: bool = False
    """Compute equal prompts, with their images, once per packed row instead of once per rollout.
    Losses and gradients stay equal up to rounding. Needs several rollouts per prompt,
    `model.attention: auto`, and a model without states or masks of its own. Rows then hold more
    rollouts. Each has its own copy of the prompt's keys and values while a layer computes
    attention, and until the backward without `model.gradient_checkpointing`. Preflight counts them
    as for answers of one token. Not run on a GPU."""
    deterministic: bool = False
    """Compute with kernels that repeat to the bit on a GPU: torch's deterministic algorithms in the
    learner, vLLM's batch-invariant kernels in the engines that the run starts (servers need
    `VLLM_BATCH_INVARIANT=1`). Engines and the backward of attention are slower then, and the
    backward needs more memory. GPUs must have compute capability 8.0 or higher. If torch or vLLM
    has no such kernel for the model, the run ends with an error that names the operation. No effect
    on CPU, where runs repeat anyway. Not run on a GPU."""

    @property
    def offloads_optimizer(self) -> bool:
        """True if master weights and moments are in host memory, whatever the model's device."""
        return self.optimizer in ("adamw_offload", "adamw_offload_all")

    @field_validator("max_steps")
    @classmethod
    def _has_one_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        if "num_epochs" not in info.data:
            return value  # an invalid number of epochs is reported by itself
        epochs = info.data["num_epochs"]
        if value is None and epochs is None:
            raise refusal(MISSING, "add it, for example `max_steps: 100`, or set num_epochs")
        if value is not None and epochs is not None:
            wrong = f"{value} contradicts training.num_epochs, which is {epochs}"
            raise refusal(wrong, "remove one of the two keys, or set it to null")
        return value

    @property
    def num_steps(self) -> int:
        """The number of steps of the run.

        With `num_epochs` it is known after `launch.checks.data.with_num_steps`.
        """
        assert self.max_steps is not None, "num_epochs is not yet converted to steps"
        return self.max_steps
