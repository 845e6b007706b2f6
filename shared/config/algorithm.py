"""`custom`, `stage2_ab` and `environment`: the training algorithm, and what it trains on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from math import floor
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from shared.config.base import Fraction01, Section, refusal
from shared.config.pipeline import Channel, LearnsFrom, PipelineSection
from shared.config.rollout import HttpUrl
from shared.records import ALL_GEOMETRY, GeometryKind


class TrainerVariant(StrEnum):
    """A training algorithm, as `custom.trainer_variant` selects it."""

    STAGE1_SFT = "stage1_sft"
    """Supervised training on ground truth (channel A only)."""
    STAGE2_ROLLOUT_ALIGNED = "stage2_rollout_aligned"
    """Training on matched rollouts (channel B only); segments are carried from step to step."""
    STAGE2_TWO_CHANNEL = "stage2_two_channel"
    """Channel A or B in each step; all segments of a step are learned in that step."""
    TRAJECTORY_PG = "trajectory_pg"
    """Policy gradient on rollouts of environments."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """Properties of a training algorithm (`custom.trainer_variant`).

    Example: `ALGORITHMS[TrainerVariant.STAGE1_SFT].channels == (Channel.A,)`, so such a run has no
    rollouts.
    """

    channels: tuple[Channel, ...]
    """Channels that the algorithm's steps can have. If there are two, `stage2_ab.schedule` chooses
    one for each step."""
    learns_from: frozenset[LearnsFrom] = frozenset({LearnsFrom.GROUND_TRUTH})
    """What the losses of the algorithm compare answers with: ground truth, advantages, or both. A
    pipeline entry whose `learns_from` is not among them is an error."""
    uses_environment: bool = False
    """Whether an environment provides data and rollouts, instead of samples of `data.train`."""
    carries_segments: bool = False
    """Whether each micro-step trains one packed row, and other segments wait for later steps.

    See decision 7.
    """
    geometry: frozenset[GeometryKind] = ALL_GEOMETRY
    """Kinds of shapes (boxes, polygons, points) that the algorithm can learn."""

    @property
    def learns_rewards(self) -> bool:
        """Return whether the algorithm can learn from rewards in addition to ground truth."""
        return not self.uses_environment and LearnsFrom.ADVANTAGES in self.learns_from

    @property
    def uses_rollouts(self) -> bool:
        return Channel.B in self.channels

    @property
    def is_scheduled(self) -> bool:
        """Return whether `stage2_ab.schedule` chooses the channel of a step."""
        return len(self.channels) > 1


ALGORITHMS: dict[TrainerVariant, AlgorithmSpec] = {
    TrainerVariant.STAGE1_SFT: AlgorithmSpec((Channel.A,)),
    TrainerVariant.STAGE2_ROLLOUT_ALIGNED: AlgorithmSpec((Channel.B,), carries_segments=True),
    TrainerVariant.STAGE2_TWO_CHANNEL: AlgorithmSpec(
        (Channel.A, Channel.B),
        learns_from=frozenset(LearnsFrom),
        geometry=frozenset({GeometryKind.BBOX, GeometryKind.POINT}),
    ),
    TrainerVariant.TRAJECTORY_PG: AlgorithmSpec(
        (Channel.B,), learns_from=frozenset({LearnsFrom.ADVANTAGES}), uses_environment=True
    ),
}

_FORMER_NAMES = {
    "stage_1": TrainerVariant.STAGE1_SFT,
    "stage_2": TrainerVariant.STAGE2_ROLLOUT_ALIGNED,
    "rollout_matching_sft": TrainerVariant.STAGE2_ROLLOUT_ALIGNED,
    "stage2_ab": TrainerVariant.STAGE2_TWO_CHANNEL,
    "stage2_ab_training": TrainerVariant.STAGE2_TWO_CHANNEL,
}


def _not_renamed(value: object) -> object:
    if isinstance(value, str) and value in _FORMER_NAMES:
        raise refusal(f"'{value}' was renamed", f"write {_FORMER_NAMES[value]}")
    return value


class CustomSection(Section):
    trainer_variant: Annotated[
        TrainerVariant,
        Field(strict=False, examples=["stage2_two_channel"]),
        BeforeValidator(_not_renamed),
    ]
    """The algorithm: supervised on ground truth (stage1_sft), on matched rollouts
    (stage2_rollout_aligned), both by a schedule (stage2_two_channel), or policy gradient on an
    environment (trajectory_pg)."""
    object_field_order: Literal["desc_first", "geometry_first"] = "desc_first"
    """Whether each object in a ground-truth answer starts with its class name (`desc`) or with its
    geometry."""


class ScheduleSection(Section):
    b_ratio: Fraction01 = 1.0
    """Fraction of the steps after the warm-up that use channel B."""
    warmup_steps: NonNegativeInt = 0
    """Number of channel-A steps at the start, before `b_ratio` applies."""

    def channel(self, step: int) -> Channel:
        """Return the channel of a step, which counts from 0.

        After the warm-up it is B if `floor((s + 1) b) > floor(s b)`. `s` is the number of steps
        since the warm-up, and `b` is `b_ratio`.

        Example: `ScheduleSection(b_ratio=0.5, warmup_steps=2)` gives A A A B A B ...
        """
        since_warmup = step - self.warmup_steps
        if since_warmup < 0:
            return Channel.A
        is_b = self._floor_b(since_warmup + 1) > self._floor_b(since_warmup)
        return Channel.B if is_b else Channel.A

    def num_b_steps(self, num_steps: int) -> int:
        """Return the number of channel-B steps among the first `num_steps` steps of a run."""
        return self._floor_b(max(0, num_steps - self.warmup_steps))

    def _floor_b(self, s: int) -> int:
        # Exact: in floats 100 * 0.29 is less than 29. The limit of the denominator makes
        # 0.3333333333333333 exactly 1/3.
        return floor(s * Fraction(str(self.b_ratio)).limit_denominator(10**6))


class RewardSection(Section):
    iou: Fraction01 = 0.5
    """Least mask IoU with the ground truth at which an object counts as found."""
    by_name: bool = True
    """Count an object as found only if its name is right too."""


class ChannelBSection(Section):
    mode: Literal["step"] = "step"
    """How the size of a channel-B step is set; `step`, the only mode: by `rollouts_per_step`."""
    rollouts_per_step: PositiveInt | None = None
    """Number of rollouts of a channel-B step over all learner ranks, including rollouts that are
    not learned. They are called raw rollouts. null: as many as an update has samples
    (`training.effective_batch_size`), which is the only number that `stage2_rollout_aligned`
    accepts. Under `trajectory_pg` it must be a multiple of `environment.rollouts_per_example`."""
    rollouts_per_sample: PositiveInt = 1
    """Number of rollouts that are generated for each sample; they form a group. `policy_gradient`
    compares the rewards of a group, and needs at least 2. A group is not split over steps or
    learner ranks, so the rollouts of a step, and each rank's part of them, must be multiples of
    this number."""
    reward: RewardSection = RewardSection()
    """When an object counts as found in the reward of a rollout (F1 of its objects). Only used with
    `policy_gradient`."""
    enable_pipeline: bool = False
    """Generate round k + 1 while round k is learned. Needs engines on their own devices."""


class Stage2ABSection(Section):
    schedule: ScheduleSection = ScheduleSection()
    """Which steps use channel B; only used under `stage2_two_channel`."""
    channel_b: ChannelBSection = ChannelBSection()
    """How a channel-B step proceeds."""


class TeacherSection(Section):
    base_url: HttpUrl
    """URL of the teacher's server, a stock `vllm serve`, without `/v1`."""
    model: Annotated[str, Field(min_length=1, examples=["Qwen/Qwen3-8B"])]
    """The teacher's name on the server. The teacher must have the vocabulary of `model.path`."""
    weight: PositiveFloat = 1.0
    """Weight of the teacher in a sampled token's advantage. It multiplies the token's
    log-probability under the teacher minus the one under the learner, in nats."""
    reward_weight: NonNegativeFloat = 1.0
    """Weight of the rewards in a sampled token's advantage, next to the teacher's `weight`; 0: only
    the teacher. It multiplies the advantage that follows from the rewards, after `advantage_std`
    has divided it."""
    timeout_s: PositiveFloat = 240.0
    """Limit, in seconds, of two waits: until the server answers when the run starts, and until the
    server has scored a rollout."""
    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Environment variable with the server's bearer token; null: the server needs no token."""


class EnvironmentSection(Section):
    id: Annotated[str, Field(min_length=1, examples=["guess_number"])]
    """The environment: an example environment, an installed package, a module, a `.py` file, or one
    of another library: `gym:NAME`, `openenv:URL`, `verifiers:NAME`."""
    args: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Arguments for the environment's `load_environment`."""
    rollouts_per_example: Annotated[int, Field(ge=2)] = 8
    """Number of rollouts of each example; they form a group, whose rewards are compared. The
    group's mean reward is subtracted from each reward. A group is not split over steps or learner
    ranks, so the rollouts of a step, and each rank's part of them, must be multiples of this
    number."""
    drop_equal_groups: bool | None = None
    """Do not learn the rollouts of an example (a group) if their rewards are all equal. These
    rollouts have the advantage 0. They are counted in `rollout/num_left_out`, and the step's loss
    is still divided as if they were learned. null: true if `policy_gradient` is the only objective
    and there is no teacher, because their gradient is then 0. A step without any other group
    changes no weights: AdamW's moments do not either."""
    refill_rounds: NonNegativeInt = 0
    """How many times per step examples that teach nothing are replaced by other examples. These are
    examples whose rollouts all have the same reward, and examples with fewer than two rollouts
    without error. Examples that still teach nothing after the last replacement stay in the step. 0:
    never."""
    drop_truncated: bool = False
    """Do not learn truncated rollouts. Count them as `rollout/num_masked`. A rollout is truncated
    if an answer was cut by length (such as `rollout_matching.max_new_tokens`), or if the next
    prompt had no room. The rewards of truncated rollouts still count in the means of their
    groups."""
    num_eval_examples: NonNegativeInt | None = None
    """Number of rows of the environment's evaluation data in held-out reports; null: all; 0: none.
    """
    max_images_per_prompt: NonNegativeInt = 0
    """Maximum number of images in the prompt of a model call, over all turns. Messages carry images
    as `image_url` with a data URL. 0: no images, and engines reserve no memory for them."""
    num_actors: PositiveInt = 1
    """Processes that share a round's examples, at most `rollout_matching.decode_batch_size`. Raise
    it if the environment's own code is slow. No effect with engines in the learner (`hf`,
    `vllm.mode: colocate`), where the environment runs too."""
    cpus_per_actor: NonNegativeFloat = 0.0
    """CPU cores that Ray reserves for each environment actor (`num_actors`). 0: none, and all
    environment actors run on the driver's node."""
    max_concurrent_scoring: PositiveInt | None = None
    """Maximum number of rollouts whose rewards one environment actor computes at the same time;
    null: no limit. Set it if reward functions call a service that takes few requests at once."""
    rollout_timeout_s: PositiveFloat | None = None
    """Seconds after which an unfinished rollout fails, including its waits for engines. null: a
    rollout that hangs ends the run after 2 x `timeouts.generate_s`. Results repeat exactly only if
    no rollout times out."""
    scoring_timeout_s: PositiveFloat | None = None
    """Seconds after which a call of a reward function fails; null: `rollout_timeout_s`. Failed
    calls are counted in `rollout/num_reward_errors`. Time in which a function waits for a free
    thread does not count here, nor in `rollout_timeout_s`."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message that is put before the prompt of each of the environment's rows. It is an
    error if the environment or its first row already has a system message. A later row that has a
    system message keeps that message. null: only the environment's own messages."""
    chat_template_args: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Additional arguments of the chat template, such as `{enable_thinking: false}` for Qwen3."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser for tool calls, checked when environments start. null: the one
    named by the checkpoint's tokenizer; if it names none, environments have no tools."""
    teacher: TeacherSection | None = None
    """A model on a server that scores every sampled token. The learner is trained towards its
    log-probabilities (on-policy distillation). null: no teacher."""

    @model_validator(mode="after")
    def _suits_its_teacher(self) -> EnvironmentSection:
        equal = "has no effect: groups with equal rewards learn from environment.teacher"
        for key, is_set, wrong in (
            ("max_images_per_prompt", self.max_images_per_prompt > 0, "the teacher gets no images"),
            ("drop_equal_groups", self.drop_equal_groups is True, equal),
            ("refill_rounds", self.refill_rounds > 0, equal),
        ):
            if self.teacher is not None and is_set:
                raise refusal(wrong, "remove the key, or environment.teacher", key)
        return self

    def drops_equal(self, pipeline: PipelineSection) -> bool:
        """Return whether groups with equal rewards are left out (`drop_equal_groups`)."""
        if self.drop_equal_groups is not None:
            return self.drop_equal_groups
        return self.teacher is None and pipeline.learns_only_advantages
