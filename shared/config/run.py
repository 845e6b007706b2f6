"""The whole configuration of a run."""

from __future__ import annotations

from typing import Annotated, Any

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
from shared.config.rollout import RolloutMatchingSection
from shared.config.secrets import masked
from shared.config.training import CheckpointSection, LearnerSection, TrainingSection
from shared.grounding.formats import answer_format
from shared.grounding.serialize import AnswerFormat
from shared.prompts import DEFAULT_USER_PROMPT, Prompts
from shared.records import DEFAULT_GEOMETRY, GeometryKind

_CANARY_TOLERANCE = {"float32": 1e-4, "bfloat16": None}
"""In nats. bfloat16 rounds logits between 16 and 32, where those of trained models lie, to an
eighth: no largest difference is bounded there (`shared.weight_sync.canary`)."""
_LOGPROB_TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}
"""In nats. The demo's trained model in bfloat16 on CPU differs by 0.11 at most over 2,000 sampled
tokens (1e-5 in float32); a run compares millions, of deeper models."""


class RunConfig(Section):
    """One run, validated. Only `shared.config.load_config` makes one: it compares sections too.

    Example: with `learner.world_size: 2`, `per_device_train_batch_size: 4` and
    `effective_batch_size: 32` a step has 4 accumulation steps of 8 samples.
    """

    model: ModelSection
    """The checkpoint that is trained and served."""
    data: DataSection = DataSection()
    """Training and validation samples; under `trajectory_pg` the environment has them."""
    global_max_length: Annotated[PositiveInt, Field(examples=[2048])]
    """Longest prompt + target of a sample, or prompt + answer of a call, and the capacity of a
    packed row, in tokens."""
    training: TrainingSection
    """Batch, optimizer, schedule and packing."""
    custom: CustomSection
    """Which training loop runs."""
    rollout_matching: RolloutMatchingSection
    """Rollouts, matching and objective."""
    environment: EnvironmentSection | None = None
    """What trajectories are of, under `trajectory_pg`; null under the other variants."""
    stage2_ab: Stage2ABSection = Stage2ABSection()
    """Which channel a step runs."""
    learner: LearnerSection = LearnerSection()
    """The ranks that train."""
    cluster: ClusterSection = ClusterSection()
    """The Ray cluster."""
    timeouts: TimeoutsSection = TimeoutsSection()
    """The longest each kind of wait may take."""
    evaluation: EvaluationSection = EvaluationSection()
    """The held-out report."""
    telemetry: TelemetrySection = TelemetrySection()
    """What the run writes down."""
    checkpoint: CheckpointSection = CheckpointSection()
    """What is kept of the weights."""
    resume: ResumeSection = ResumeSection()
    """The run that this one goes on with."""

    @model_serializer(mode="wrap", when_used="json")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # JSON is what files, loggers and comparisons get of a configuration.
        return dict(masked(handler(self)))

    @property
    def algorithm(self) -> AlgorithmSpec:
        """The facts about the run's `custom.trainer_variant`."""
        return ALGORITHMS[self.custom.trainer_variant]

    @property
    def geometry(self) -> frozenset[GeometryKind]:
        """Kinds of shapes that are taught and read (decision 8)."""
        kinds = self.rollout_matching.geometry
        if kinds is None:
            return self.algorithm.geometry & self.answer_format.geometry & DEFAULT_GEOMETRY
        return frozenset(kinds)

    @property
    def user_prompt(self) -> str:
        """`data.user_prompt`; its default asks for what `data.answer_format` is."""
        written = self.data.user_prompt
        return self.answer_format.user_prompt if written == DEFAULT_USER_PROMPT else written

    @property
    def prompts(self) -> Prompts:
        """The questions that samples are asked."""
        templates = self.data.prompts or (self.user_prompt,)
        return Prompts(templates, self.data.system_prompt, self.training.seed)

    @property
    def answer_format(self) -> AnswerFormat:
        """The format in which the model writes its objects."""
        return answer_format(self.data.answer_format, self.custom.object_field_order)

    @property
    def canary_tolerance(self) -> float | None:
        """Largest canary difference in nats, as written or by the number type.

        None in bfloat16, where the noise is measured instead.
        """
        written = self.rollout_matching.vllm.sync.canary_tolerance
        return written or _CANARY_TOLERANCE[self.model.dtype]

    @property
    def logprob_tolerance(self) -> float:
        """`rollout_matching.logprob_tolerance` as written, or by the number type."""
        return self.rollout_matching.logprob_tolerance or _LOGPROB_TOLERANCE[self.model.dtype]

    def channel(self, step: int) -> Channel:
        """Return the channel of a step (from 0)."""
        if self.algorithm.is_scheduled:
            return self.stage2_ab.schedule.channel(step)
        return self.algorithm.channels[0]
