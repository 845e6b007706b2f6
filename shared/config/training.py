"""`training`, `learner` and `checkpoint`: how a model is trained, by whom, and what is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shared.config.base import Fraction01, LearningRate, Section, WholeGPUs, refusal
from shared.model_families import ModelPart


class LearnerSection(Section):
    """The ranks that train, and the resources that Ray reserves for each."""

    world_size: PositiveInt = 1
    """Learner ranks."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """Each rank holds all of the model (ddp), or a part (fsdp: FSDP2). No effect with one rank."""
    gpus: WholeGPUs | None = None
    """Whole GPUs that Ray reserves for each rank; null: 1 where the cluster has GPUs, else 0."""
    cpus: NonNegativeFloat | None = None
    """CPU cores that Ray reserves for each rank; null: 1."""
    cpu_threads: PositiveInt | None = None
    """Threads of torch in each rank; null: as many as the process may use cores. The number decides
    the order of float sums, and is recorded in the run's folder."""

    @property
    def is_sharded(self) -> bool:
        """Tell whether every rank holds only a part of the model's parameters."""
        return self.world_size > 1 and self.parallel == "fsdp"


class CheckpointSection(Section):
    """The checkpoints that are saved and kept."""

    save_final: bool = True
    """Save the trained model at the end, as an ordinary checkpoint in the run's folder."""
    save_steps: PositiveInt | None = None
    """Save after every this many updates too; null: not."""
    save_minutes: PositiveFloat | None = 15.0
    """Save after an update, too, when the newest checkpoint, or the start, is this old; null:
    not."""
    keep_last: PositiveInt = 2
    """Checkpoints of `save_steps` and `save_minutes` that are kept, the newest."""
    keep_best: NonNegativeInt = 0
    """Checkpoints that are kept for their held-out F1 (at the first of `evaluation.iou_thresholds`)
    or, of environments, mean reward, the best; one is considered at every report."""
    full: bool = True
    """Save with the weights what a resumed run needs (float32 masters, optimizer, buffers): of a
    bfloat16 model seven times as much."""
    background: bool = True
    """Copy what a periodic or best checkpoint holds to host memory and write it while the run goes
    on; false, or where the memory is too little: the run waits until it is written."""
    save_on_interrupt: bool = True
    """Save the last finished update when a signal (Ctrl-C, SIGTERM, SIGHUP) or a failed rollout or
    sync ends the run."""


class PartSection(Section):
    frozen: bool = False
    """Keep the part as the checkpoint has it."""
    learning_rate: LearningRate | None = None
    """Peak learning rate of the part; null: `training.learning_rate`."""
    adapted: bool | None = None
    """With `model.adapter`: adapt those of the part's linear layers that `target_modules` names, or
    none of them; null: those of the language model alone."""

    @model_validator(mode="after")
    def _rate_has_effect(self) -> PartSection:
        if self.frozen and self.learning_rate is not None:
            wrong = f"{self.learning_rate:g}, and the part is frozen"
            raise refusal(wrong, "remove one of the two keys", "learning_rate")
        return self


class PartsSection(Section):
    vision_tower: PartSection = PartSection()
    """The vision encoder up to its mergers."""
    aligner: PartSection = PartSection()
    """The mergers, which turn patches into the language model's embeddings."""
    language_model: PartSection = PartSection()
    """The language model, with its embeddings and head."""

    @model_validator(mode="after")
    def _something_is_trained(self) -> PartsSection:
        if all(section.frozen for _, section in self.items()):
            raise refusal("all of them are frozen: nothing is left to train", "unfreeze one")
        return self

    def items(self) -> Iterator[tuple[ModelPart, PartSection]]:
        """Yield every part with its section."""
        yield ModelPart.VISION_TOWER, self.vision_tower
        yield ModelPart.ALIGNER, self.aligner
        yield ModelPart.LANGUAGE_MODEL, self.language_model

    @property
    def adapted(self) -> tuple[ModelPart, ...]:
        """The parts that an adapter is put into, if the run has one."""
        unset = {part: part is ModelPart.LANGUAGE_MODEL for part in ModelPart}
        return tuple(
            part
            for part, section in self.items()
            if (unset[part] if section.adapted is None else section.adapted)
        )


class TrainingSection(Section):
    seed: Annotated[int, Field(ge=0, lt=2**32, examples=[17])]
    """The run's seed: data order, initial state and, through `request_seed`, every rollout."""
    max_steps: Annotated[PositiveInt, Field(examples=[100])]
    """Steps of the run, each of one optimizer update, or of `updates_per_batch`."""
    updates_per_batch: PositiveInt = 1
    """Optimizer updates that a step takes of its rollouts, between generation and sync: all of its
    rows are learned once for each. Only under `trajectory_pg`. Schedules, weight versions and
    checkpoints count steps, so the updates of a step have one learning rate."""
    per_device_train_batch_size: PositiveInt = 1
    """Samples per learner rank and micro-step. Under `stage2_rollout_aligned` the raw rollouts that
    enter the carry buffer before each row."""
    per_device_eval_batch_size: PositiveInt = 1
    """No effect in this version: an evaluation has no forward of the learner."""
    effective_batch_size: PositiveInt | None = None
    """Samples, or rollouts of environments, per update wanted over all learner ranks; the
    accumulation steps follow from it, rounded up. So an update may take more than asked."""
    gradient_accumulation_steps: PositiveInt | None = None
    """Micro-steps per update; null: as `effective_batch_size` needs, or 1."""
    eval_steps: PositiveInt | None = None
    """Evaluate after every this many updates, on `data.val` or the environment's held-out examples;
    null: only where the warm-up of channel A ends and at the end of the run, where reports are made
    in any case."""
    optimizer: Literal["adamw_torch", "adamw_bnb_8bit", "adamw_offload"] = "adamw_torch"
    """adamw_torch: moments and float32 masters where the model is. adamw_bnb_8bit: moments of 8
    bits, by blocks of 256 values (bitsandbytes; embeddings and tensors under 4,096 values keep 32):
    6 bytes less for each trained value. adamw_offload: gradients, moments and masters in host
    memory: 16 bytes less, or 12 of a float32 model, and updates at the speed of the CPU and of the
    way there. The last two not with `learner.parallel: fsdp`."""
    learning_rate: Annotated[LearningRate, Field(examples=[0.001])]
    """Peak learning rate of AdamW, at most 1."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay of AdamW, of matrices alone; norms and biases do not decay."""
    adam_beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """Decay of AdamW's second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """Added to the root of AdamW's second moment."""
    lr_warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Course of the learning rate after its warm-up, down to the floor at `max_steps`."""
    min_lr_ratio: Fraction01 = 0.0
    """Floor of the schedule as a fraction of `learning_rate`."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest L2 norm of the gradient of one update; null: no clipping."""
    max_nonfinite_updates: NonNegativeInt = 0
    """Updates in a row that may be skipped, and are counted, for a gradient that is not finite; one
    more stops the run. A skipped update leaves weights and optimizer as they are, and is the last
    of its step."""
    parts: PartsSection = PartsSection()
    """What is trained, and how fast."""
    packing: bool = True
    """Put several segments into one forward; false: one segment per row."""
    packing_buffer: PositiveInt = 256
    """Most segments waiting for a row; at least the samples of a step, under
    `stage2_rollout_aligned` of a micro-step, where a buffer that leftovers would overflow stops the
    run. Under `trajectory_pg` a full buffer gives a row."""
    packing_min_fill_ratio: Fraction01 = 0.7
    """A row filled less than this fraction of `global_max_length` is counted and logged."""
    packing_drop_last: bool = True
    """Segments left in the carry buffer of `stage2_rollout_aligned` at the run's end are dropped;
    under packing it must be true there."""
    packing_window: PositiveInt = 8
    """Rows are taken after every this many rollouts (of environments: segments), in index order. No
    effect under `stage2_rollout_aligned`, which takes one row per micro-step."""
