"""`custom`, `stage2_ab` and `environment`: which algorithm a run trains with, and on what."""

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
from shared.config.pipeline import Channel, LearnsFrom
from shared.config.rollout import HttpUrl
from shared.records import ALL_GEOMETRY, GeometryKind


class TrainerVariant(StrEnum):
    """The legal values of `custom.trainer_variant`."""

    STAGE1_SFT = "stage1_sft"
    """Teacher-forced on ground truth (channel A only)."""
    STAGE2_ROLLOUT_ALIGNED = "stage2_rollout_aligned"
    """On the model's own rollouts, segments carried from step to step."""
    STAGE2_TWO_CHANNEL = "stage2_two_channel"
    """Channel A or channel B at each step, every step learned to completion."""
    TRAJECTORY_PG = "trajectory_pg"
    """Policy gradient on environments."""


@dataclass(frozen=True, slots=True)
class AlgorithmSpec:
    """The facts about one algorithm that the rest of the system asks for.

    Example: `ALGORITHMS[TrainerVariant.STAGE1_SFT].channels == (Channel.A,)`, so a run of it has
    no rollouts.
    """

    channels: tuple[Channel, ...]
    """Channels that its steps may be of. With both, `stage2_ab.schedule` decides."""
    learns_from: frozenset[LearnsFrom] = frozenset({LearnsFrom.GROUND_TRUTH})
    """What its answers are compared with. Entries that learn from anything else are refused."""
    uses_environment: bool = False
    """An environment has its data and plays its rollouts, in place of samples of `data.train`."""
    carries_segments: bool = False
    """One row per micro-step; leftover segments wait for later steps (decision 7)."""
    geometry: frozenset[GeometryKind] = ALL_GEOMETRY
    """Kinds of shapes that it can learn."""

    @property
    def learns_rewards(self) -> bool:
        """Tell whether it can learn the rollouts of a sample by their rewards too."""
        return not self.uses_environment and LearnsFrom.ADVANTAGES in self.learns_from

    @property
    def uses_rollouts(self) -> bool:
        """Tell whether training asks for rollouts."""
        return Channel.B in self.channels

    @property
    def is_scheduled(self) -> bool:
        """Tell whether `stage2_ab.schedule` decides which channel a step is of."""
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
    """The training loop."""
    object_field_order: Literal["desc_first", "geometry_first"] = "desc_first"
    """Order of the fields of each serialised ground-truth object."""


class ScheduleSection(Section):
    b_ratio: Fraction01 = 1.0
    """Share of the steps after the warm-up that are channel B."""
    warmup_steps: NonNegativeInt = 0
    """Channel-A steps before the ratio applies."""

    def channel(self, step: int) -> Channel:
        """Return the channel of a step (from 0).

        It is B where `floor((s + 1) b) > floor(s b)`, with `s` counting steps after the warm-up.

        Example: `ScheduleSection(b_ratio=0.5, warmup_steps=2)` gives A A A B A B ...
        """
        since_warmup = step - self.warmup_steps
        if since_warmup < 0:
            return Channel.A
        is_b = self._floor_b(since_warmup + 1) > self._floor_b(since_warmup)
        return Channel.B if is_b else Channel.A

    def num_b_steps(self, num_steps: int) -> int:
        """Count the channel-B steps among the first `num_steps`."""
        return self._floor_b(max(0, num_steps - self.warmup_steps))

    def _floor_b(self, s: int) -> int:
        # Exact, for the ratio as it is written (in floats 100 * 0.29 is less than 29) or meant: the
        # digits of 1 / 3 end, a third does not.
        return floor(s * Fraction(str(self.b_ratio)).limit_denominator(10**6))


class RewardSection(Section):
    iou: Fraction01 = 0.5
    """Least mask IoU of an object that counts as found."""
    by_name: bool = True
    """It must have the right name too."""


class ChannelBSection(Section):
    mode: Literal["step"] = "step"
    """A step is budgeted in raw rollouts, learned to completion, and updates once. The only mode.
    """
    rollouts_per_step: PositiveInt | None = None
    """Raw rollouts per update over all learner ranks; null: the effective batch size, the only one
    that `stage2_rollout_aligned` takes. Under `trajectory_pg` a multiple of
    `environment.rollouts_per_example`."""
    rollouts_per_sample: PositiveInt = 1
    """Rollouts of each drawn sample, adjacent; `policy_gradient` compares them and needs at least
    2. Steps, and the learner ranks' parts of them, have whole groups."""
    reward: RewardSection = RewardSection()
    """What counts as found in the reward of a rollout, the F1 of its objects; no effect but with
    `policy_gradient`."""
    enable_pipeline: bool = False
    """Generate round k + 1 while round k is learned. Needs rollouts on dedicated devices."""


class Stage2ABSection(Section):
    schedule: ScheduleSection = ScheduleSection()
    """Which steps are channel B; no effect but under `stage2_two_channel`."""
    channel_b: ChannelBSection = ChannelBSection()
    """How a channel-B step is made."""


class TeacherSection(Section):
    base_url: HttpUrl
    """Prefix of the routes of its server, a stock `vllm serve`, without `/v1`."""
    model: Annotated[str, Field(min_length=1, examples=["Qwen/Qwen3-8B"])]
    """Name under which it is served. Its vocabulary must be that of `model.path`."""
    weight: PositiveFloat = 1.0
    """Factor of a sampled token's log-probability under the teacher less that of the learner, both
    in nats, in its advantage."""
    reward_weight: NonNegativeFloat = 1.0
    """Factor of what the reward gives, `advantage_std` included, in the same advantage; 0: the
    teacher alone."""
    timeout_s: PositiveFloat = 240.0
    """Until it answers at the start of the run, and until it has scored the tokens of a rollout."""
    token_env: Annotated[str, Field(min_length=1)] | None = None
    """Name of the environment variable with its server's bearer token; null: it asks for none."""


class EnvironmentSection(Section):
    id: Annotated[str, Field(min_length=1, examples=["guess_number"])]
    """An example environment, an installed one, a module, the path of a `.py` file, or one of
    another library: `gym:NAME`, `openenv:URL`, `verifiers:NAME`."""
    args: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Arguments of its `load_environment`."""
    rollouts_per_example: Annotated[int, Field(ge=2)] = 8
    """Rollouts of each drawn example: the group whose mean reward is taken off the reward of each.
    Steps, and the learner ranks' parts of them, have whole groups."""
    drop_equal_groups: bool = False
    """Learn nothing from groups whose rewards are all equal, with advantages of 0, and count
    them (`rollout/num_left_out`). The step's loss is divided by its raw rollouts all the same."""
    refill_rounds: NonNegativeInt = 0
    """Most times in a step that groups without signal (equal rewards, or fewer than two rollouts
    that did not fail) are replaced by rollouts of further examples; 0: they stay. What is left
    without signal after so many rounds stays."""
    drop_truncated: bool = False
    """Learn nothing from truncated rollouts, and count them (`rollout/num_masked`): an answer was
    cut by length, as at `rollout_matching.max_new_tokens`, or there was no room for the next
    prompt. Their rewards stay in the means of their groups."""
    num_eval_examples: NonNegativeInt | None = None
    """Rows of the environment's evaluation data that held-out reports take; null: all; 0: no
    reports."""
    max_images_per_prompt: NonNegativeInt = 0
    """Most images that one call shows the model, all turns counted; 0: none, and engines make no
    room. They come in messages (`image_url` with a data URL)."""
    num_actors: PositiveInt = 1
    """Processes that share a round's examples, at most `rollout_matching.decode_batch_size`. With
    engines in the learner (`hf`, `vllm.mode: colocate`) there are none: the environment is there
    too."""
    cpus_per_actor: NonNegativeFloat = 0.0
    """CPU cores that Ray reserves for each of them; 0: they run on the driver's node."""
    max_concurrent_scoring: PositiveInt | None = None
    """Most rollouts that an actor scores at a time, for rubrics that ask services; null: no bound.
    """
    rollout_timeout_s: PositiveFloat | None = None
    """A rollout that is not done after this has failed, as one whose tool raised; waits for an
    engine count. null: one that hangs ends the run after 2 x `timeouts.generate_s`. Losses repeat
    to the bit only where no rollout is cut off."""
    scoring_timeout_s: PositiveFloat | None = None
    """A call of a reward function that is not done after this has failed
    (`rollout/num_reward_errors`). null: after `rollout_timeout_s`. Waits for a thread are in
    neither limit."""
    system_prompt: Annotated[str, Field(min_length=1)] | None = None
    """System message in front of every row's prompt. Refused if the environment, or its first row,
    has one; a later row with its own keeps it. null: as the environment has it."""
    chat_template_args: dict[str, Any] = {}  # noqa: RUF012 (pydantic copies it)
    """Further arguments of the chat template, such as `{enable_thinking: false}` of a Qwen3."""
    tool_call_parser: str | None = None
    """vLLM's name of the parser of tool calls; null: the one that the checkpoint's tokenizer names,
    without which environments have no tools. It is looked up when environments start."""
    teacher: TeacherSection | None = None
    """A model that is served elsewhere, towards which every sampled token is taught by its
    probability there (on-policy distillation); null: none."""

    @model_validator(mode="after")
    def _suits_its_teacher(self) -> EnvironmentSection:
        equal = "groups of equal rewards are learned from environment.teacher"
        for key, is_set, wrong in (
            ("max_images_per_prompt", self.max_images_per_prompt > 0, "the teacher sees no images"),
            ("drop_equal_groups", self.drop_equal_groups, equal),
            ("refill_rounds", self.refill_rounds > 0, equal),
        ):
            if self.teacher is not None and is_set:
                raise refusal(wrong, "remove the key, or environment.teacher", key)
        return self
