"""The configuration of a run, with all its sections."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from shared.config.algorithm import (
    ALGORITHMS,
    AlgorithmSpec,
    CustomSection,
    EnvironmentSection,
    Stage2ABSection,
)
from shared.config.base import Section
from shared.config.job import (
    ClusterSection,
    EvaluationSection,
    ResumeSection,
    TelemetrySection,
    TimeoutsSection,
)
from shared.config.model import DataSection, ModelSection
from shared.config.pipeline import Channel
from shared.config.rollout import EngineLocation, RolloutMatchingSection
from shared.config.secrets import masked
from shared.config.training import CheckpointSection, LearnerSection, TrainingSection
from shared.grounding.formats import answer_format
from shared.grounding.serialize import AnswerFormat
from shared.model_families import ModelPart
from shared.prompts import DEFAULT_USER_PROMPT, Prompts
from shared.records import DEFAULT_GEOMETRY, GeometryKind
from shared.tokens.fresh import FILE, FreshTokens

_CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": None}
"""Defaults of `canary_tolerance` by `model.dtype`, in nats; None: the key has no default.

bfloat16 rounds logits between 16 and 32, a usual range of trained models, to an eighth. So no bound
of the largest difference works there (`shared.weight_sync.canary`).
"""
_LOGPROB_TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}
"""Defaults of `rollout_matching.logprob_tolerance` by `model.dtype`, in nats.

In bfloat16 on CPU, engine and learner of the demo's trained model differ by at most 0.11 over 2,000
sampled tokens (float32: 1e-5). A run compares millions of tokens, of deeper models.
"""


class RowRule(StrEnum):
    """How the segments of a step are put into rows (decision 7).

    A segment is a prompt with its target. A row is the input of one forward pass.
    """

    SEGMENT = "segment"
    """Each segment is a row of its own, without packing."""
    STEP = "step"
    """Several segments are packed into a row; all segments of a step are learned in that step."""
    CARRY = "carry"
    """One row is packed per micro-step; the other segments wait for later rows or steps."""


class RunConfig(Section):
    """The validated configuration of a run, which only `shared.config.load_config` creates.

    Example: with `learner.world_size: 2`, `per_device_train_batch_size: 4` and
    `effective_batch_size: 32` a step has 4 accumulation steps of 8 samples.
    """

    model: ModelSection
    """The model that is trained and served."""
    data: DataSection = DataSection()
    """Training and held-out samples; under `trajectory_pg` the environment has its own data."""
    global_max_length: Annotated[PositiveInt, Field(examples=[2048])]
    """Maximum tokens of prompt + target (of environments: prompt + answer of a model call), and of
    a packed row. Raise it if a sample does not fit; longer rows need more memory."""
    training: TrainingSection
    """Batch sizes, optimizer, schedules and packing."""
    custom: CustomSection
    """The training algorithm."""
    rollout_matching: RolloutMatchingSection
    """Generation of rollouts, matching with the ground truth, and the objective."""
    environment: EnvironmentSection | None = None
    """The environment of `trajectory_pg`, which requires it; null under the other variants."""
    stage2_ab: Stage2ABSection = Stage2ABSection()
    """Which steps use channel A or B, and how a channel-B step proceeds."""
    learner: LearnerSection = LearnerSection()
    """The learner ranks and their resources."""
    cluster: ClusterSection = ClusterSection()
    """The Ray cluster."""
    timeouts: TimeoutsSection = TimeoutsSection()
    """Time limits of the waits of a run."""
    evaluation: EvaluationSection = EvaluationSection()
    """Settings of the reports on the held-out set."""
    telemetry: TelemetrySection = TelemetrySection()
    """The run folder, its files, and the loggers."""
    checkpoint: CheckpointSection = CheckpointSection()
    """When checkpoints are saved, and which are kept."""
    resume: ResumeSection = ResumeSection()
    """The run that this run continues."""

    @model_serializer(mode="wrap", when_used="json")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        # Files, loggers and comparisons receive the configuration as JSON.
        return dict(masked(handler(self)))

    @property
    def algorithm(self) -> AlgorithmSpec:
        """The properties of the run's training algorithm (`custom.trainer_variant`)."""
        return ALGORITHMS[self.custom.trainer_variant]

    @property
    def geometry(self) -> frozenset[GeometryKind]:
        """Kinds of shapes (boxes, polygons, points) that are taught and parsed (decision 8)."""
        kinds = self.rollout_matching.geometry
        if kinds is None:
            return self.algorithm.geometry & self.answer_format.geometry & DEFAULT_GEOMETRY
        return frozenset(kinds)

    @property
    def user_prompt(self) -> str:
        """The user message: `data.user_prompt`, or else the default of `data.answer_format`."""
        written = self.data.user_prompt
        return self.answer_format.user_prompt if written == DEFAULT_USER_PROMPT else written

    @property
    def prompts(self) -> Prompts:
        """The prompts of the run, which give each sample its prompt."""
        templates = self.data.prompts or (self.user_prompt,)
        return Prompts(templates, self.data.system_prompt, self.training.seed)

    @property
    def answer_format(self) -> AnswerFormat:
        """The text format of the model's answers (`data.answer_format`)."""
        return answer_format(self.data.answer_format, self.custom.object_field_order)

    @property
    def canary_tolerance(self) -> float | None:
        """Largest allowed difference of a canary log-probability after a weight sync, in nats.

        The key `canary_tolerance`, or its default for `model.dtype`. None in bfloat16, where the
        sync compares with measured noise instead.
        """
        written = self.rollout_matching.vllm.sync.canary_tolerance
        return written or _CANARY_TOLERANCE[self.model.dtype]

    @property
    def logprob_tolerance(self) -> float:
        """Largest allowed difference of log-probabilities between engine and learner, in nats.

        `rollout_matching.logprob_tolerance`, or its default for `model.dtype`.
        """
        return self.rollout_matching.logprob_tolerance or _LOGPROB_TOLERANCE[self.model.dtype]

    def channel(self, step: int) -> Channel:
        """Return the channel of a step, which counts from 0."""
        if self.algorithm.is_scheduled:
            return self.stage2_ab.schedule.channel(step)
        return self.algorithm.channels[0]

    @property
    def used_channels(self) -> tuple[Channel, ...]:
        """The channels of the run's steps. A short run may not reach all of them."""
        if not self.algorithm.is_scheduled:
            return self.algorithm.channels
        schedule = self.stage2_ab.schedule
        is_used = {
            Channel.A: schedule.b_ratio < 1 or schedule.warmup_steps > 0,
            Channel.B: schedule.b_ratio > 0,
        }
        return tuple(channel for channel in self.algorithm.channels if is_used[channel])

    @property
    def num_b_steps(self) -> int:
        """The number of the run's channel-B steps."""
        if self.algorithm.is_scheduled:
            return self.stage2_ab.schedule.num_b_steps(self.training.num_steps)
        return self.training.num_steps if self.algorithm.uses_rollouts else 0

    @property
    def warmup_steps(self) -> int:
        """The number of channel-A steps at the start, before `b_ratio` of the schedule applies."""
        if not self.algorithm.is_scheduled:
            return 0
        return min(self.stage2_ab.schedule.warmup_steps, self.training.num_steps)

    def maskiou_gate(self, step: int) -> float:
        """Return the least mask IoU at which objects are matched in a step, which counts from 0.

        Example: with `maskiou_gate: 0.3` and the schedule `{start: 0.1, steps: 100}`, after 20
        steps of warm-up, it is 0.1 up to step 20, 0.2 at step 70, and 0.3 from step 120 on.
        """
        gate = self.rollout_matching.maskiou_gate
        schedule = self.rollout_matching.maskiou_gate_schedule
        since_warmup = max(0, step - self.warmup_steps)
        if schedule is None or since_warmup >= schedule.steps:
            return gate
        return schedule.start + (gate - schedule.start) * since_warmup / schedule.steps

    @property
    def row_rule(self) -> RowRule:
        """Rule by which the run puts segments into rows."""
        if not self.training.packing:
            return RowRule.SEGMENT
        return RowRule.CARRY if self.algorithm.carries_segments else RowRule.STEP

    @property
    def accumulation_steps(self) -> int:
        """Number of micro-steps (batches of gradient accumulation) per update."""
        training = self.training
        if training.gradient_accumulation_steps is not None:
            return training.gradient_accumulation_steps
        if training.effective_batch_size is None:
            return 1
        return self.needed_accumulation_steps(training.effective_batch_size)

    def needed_accumulation_steps(self, num_samples: int) -> int:
        """Return how many micro-steps all ranks together need for `num_samples` samples.

        Example: 33 samples need 5 micro-steps of 2 ranks with 4 samples each.
        """
        return -(-num_samples // self._samples_per_micro_step)

    @property
    def _samples_per_micro_step(self) -> int:
        return self.training.per_device_train_batch_size * self.learner.world_size

    @property
    def effective_batch_size(self) -> int:
        """Samples per update over all learner ranks: micro-steps x ranks x samples of each."""
        return self._samples_per_micro_step * self.accumulation_steps

    @property
    def raw_rollouts_per_step(self) -> int:
        """Rollouts per channel-B step over all learner ranks; 0 if the run has no rollouts."""
        if not self.algorithm.uses_rollouts:
            return 0
        return self.stage2_ab.channel_b.rollouts_per_step or self.effective_batch_size

    @property
    def group_size(self) -> int:
        """Number of rollouts that must stay together when steps are split into rounds and ranks.

        These are the rollouts of one row, whose rewards are compared with each other.
        """
        return 1 if self.environment is None else self.environment.rollouts_per_example

    @property
    def has_held_out(self) -> bool:
        """Return whether the run has held-out samples, or held-out rows of an environment."""
        if self.environment is None:
            return self.data.val is not None
        return self.environment.num_eval_examples != 0

    @property
    def engine_devices(self) -> tuple[int, ...] | None:
        """The number of devices of each engine, in the order in which engines get requests.

        None if only the servers, or the cluster, know the numbers.

        Example: three actors with `tensor_parallel_size: 2` are `(2, 2, 2)`.
        """
        vllm = self.rollout_matching.vllm
        backend = self.rollout_matching.backend
        match backend.location:
            case EngineLocation.SERVERS:
                return None
            case EngineLocation.ACTORS:
                return (vllm.actors.tensor_parallel_size,) * vllm.actors.num_actors
            case EngineLocation.RANKS:
                size = vllm.tensor_parallel_size if backend.uses_vllm else 1
                return None if size is None else (size,) * self.learner.world_size

    @property
    def adapted_parts(self) -> tuple[ModelPart, ...]:
        """The parts of the model that the run's adapter adapts; empty without an adapter."""
        return () if self.model.adapter is None else self.training.parts.adapted

    @property
    def adapts_vision(self) -> bool:
        """Return whether the run's adapter adapts layers of the vision tower or the aligner.

        Such an adapter is sent as full weights: vLLM's support for it is experimental, and its
        results have not been compared with the learner's here.
        """
        return any(part is not ModelPart.LANGUAGE_MODEL for part in self.adapted_parts)

    @property
    def tokens_beside_adapter(self) -> FreshTokens | None:
        """The checkpoint's newly added tokens, whose embeddings are trained next to the adapter.

        None if there are no such tokens or no adapter. vLLM accepts no adapter with rows of
        embeddings, so runs with such tokens send full weights.
        """
        if ModelPart.LANGUAGE_MODEL not in self.adapted_parts:
            return None
        return FreshTokens.of(Path(self.model.path))

    @property
    def sync_mode(self) -> Literal["full", "adapter"]:
        """What a weight sync sends: `sync.mode`, with `auto` resolved.

        `auto` becomes `adapter` if the engines can receive the run's adapter, else `full`.
        """
        mode = self.rollout_matching.vllm.sync.mode
        if mode != "auto":
            return mode
        return "adapter" if self.why_full_sync is None else "full"

    @property
    def why_full_sync(self) -> str | None:
        """Why a sync must send full weights, not only the adapter; None if an adapter suffices."""
        adapter = self.model.adapter
        if adapter is None:
            return "the learner trains no adapter (model.adapter)"
        if adapter.kind == "dora":
            return "vLLM serves DoRA only merged (model.adapter.kind)"
        if not self.rollout_matching.vllm.enable_lora:
            return "the engines serve no adapter (rollout_matching.vllm.enable_lora: false)"
        merged = (
            "which engines serve only merged, so they do not need enable_lora; set"
            " rollout_matching.vllm.enable_lora: false"
        )
        if self.adapts_vision:
            where = "the vision tower or the aligner too (training.parts)"
            return f"the adapter is in {where}, {merged}"
        if self.model.is_quantized:
            return f"the adapter is for 4-bit weights (model.adapter.quantize), {merged}"
        if (tokens := self.tokens_beside_adapter) is not None:
            return (
                "vLLM takes no adapter with embeddings, and this one has the fresh embeddings of"
                f" {tokens.count:,} tokens in {self.model.path} ({FILE})"
            )
        return None

    @property
    def may_send_full(self) -> bool:
        """Return whether some sync may send full weights.

        Every sync does, or the syncs after a failed adapter sync do.
        """
        return self.sync_mode == "full" or self.rollout_matching.vllm.sync.fallback_to_full
