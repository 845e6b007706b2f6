"""`rollout_matching.pipeline`: the declared objective; no loss is implicit (decisions 2 and 37).

Every entry is written out in full. Only these keys have a default: the variants of
`policy_gradient`, its `advantage_epsilon`, `top_tokens`, and options beyond the specification
(decision 30). A new objective of this repository gets its settings and entry here, and a line in
`ObjectiveEntry`. An objective or a baseline of advantages in your own module needs no change here
(`ImportedEntry`, `AdvantageConfig.advantage_baseline`).
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from shared.config.base import Fraction01, Section, refusal
from shared.errors import ConfigError

EXAMPLE_PIPELINE = {
    "objective": [
        {
            "name": "token_ce",
            "enabled": True,
            "weight": 1.0,
            "channels": ["A", "B"],
            "config": {
                "desc_ce_weight": 1.0,
                "rollout_fn_desc_weight": 1.0,
                "rollout_matched_prefix_struct_weight": 1.0,
            },
        }
    ],
    "diagnostics": [],
}

EXAMPLE_POLICY_GRADIENT = {
    "name": "policy_gradient",
    "enabled": True,
    "weight": 1.0,
    "channels": ["B"],
    "config": {
        "clip_low": 0.2,
        "clip_high": 0.3,
        "ratio_cap": 2.0,
        "normalize": "step",
        "advantage_std": True,
    },
}
"""An entry for policy gradient, as messages and examples show it."""


class Channel(StrEnum):
    """What an optimizer step trains on: ground truth (A), or the model's own rollouts (B)."""

    A = "A"
    """The step trains on the ground truth, without rollouts."""
    B = "B"
    """The step trains on the model's own rollouts."""


class LearnsFrom(StrEnum):
    """What an objective compares the model's answer with."""

    GROUND_TRUTH = "ground truth"
    ADVANTAGES = "advantages"


class Reads(StrEnum):
    """The tokens of a training target that an objective's loss is computed for."""

    TEXT = "text"
    SLOTS = "slots"
    """Coordinate tokens whose correct bin is known."""
    SAMPLED = "sampled"
    """Tokens that an engine sampled and that have an advantage."""


def require_imported(name: str, form: str, remedy: str) -> str:
    """Return a name `module:name` unchanged. Raises a refusal that names the `form` otherwise."""
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise refusal(f"'{name}' is not {form}", remedy)
    return name


def imported(name: str, path: str) -> Any:
    """Return the class or function `module:name` of the user's own module.

    Only the learner and preflight call it, because the user's module may import torch.

    Raises ConfigError if the module is not found, or has no such name. The message begins with
    `path`. Errors inside the module are raised unchanged.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # If another module is missing, the user's module imports it.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{path}: module {module_name} not found; start the run in the folder that contains"
            " it, or install it"
        ) from error
    if attribute not in vars(module):
        raise ConfigError(f"{path}: {module_name} has no {attribute}; define it there")
    return vars(module)[attribute]


def _each_once(channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
    if not channels:
        remedy = "name A, B or both; to switch an entry off set enabled: false"
        raise refusal("must not be empty", remedy)
    if len(set(channels)) < len(channels):
        raise refusal(f"names a channel twice: [{', '.join(channels)}]", "name each channel once")
    return channels


def _require_samples(channels: tuple[Channel, ...], key: str | None = None) -> None:
    if channels != (Channel.B,):
        raise refusal(
            f"must be [B], got [{', '.join(channels)}]: this objective learns tokens that the"
            " model sampled, and only channel B has them",
            "write [B]",
            key,
        )


Channels = Annotated[
    tuple[Annotated[Channel, Field(strict=False)], ...],
    Field(strict=False),
    AfterValidator(_each_once),
]


class PipelineEntry(Section):
    """Base class of the pipeline's entries: objectives (losses) and diagnostics (metrics).

    It has the keys that every entry has in addition to `name` and `config`.
    """

    learns_from: ClassVar[LearnsFrom | None] = LearnsFrom.GROUND_TRUTH
    """What the loss compares the model's answers with: the ground truth, or advantages from
    rewards. A training algorithm rejects an entry that needs what it does not learn from
    (`AlgorithmSpec.learns_from`). None: the entry suits every algorithm."""
    reads: ClassVar[Reads | None] = Reads.TEXT
    """The tokens that the loss is computed for: text, coordinate slots, or sampled tokens. None:
    the class does not declare them."""
    needs_reference: ClassVar[bool] = False
    """Whether the loss compares the learner with the reference: the model as it was at the run's
    start."""

    enabled: bool
    """false: the entry is ignored."""
    weight: NonNegativeFloat
    """Weight of this entry's loss in the loss of the step."""
    channels: Channels
    """The channels whose steps use the entry. Must be [B] if the entry learns sampled tokens."""

    @field_validator("channels")
    @classmethod
    def _has_samples(cls, channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
        if cls.reads is Reads.SAMPLED:
            _require_samples(channels)
        return channels

    @property
    def teaches(self) -> bool:
        """Return whether the entry's loss can differ from 0 with these weights."""
        return self.weight > 0

    @property
    def advantage_section(self) -> tuple[str, AdvantageConfig] | None:
        """How advantages are computed, with the key of this section; None: no policy gradient."""
        return None


class TokenCEConfig(Section):
    desc_ce_weight: NonNegativeFloat
    """Channel A: weight of the tokens of class names (`desc`), relative to 1 for other text. Other
    text is keys, quotes, brackets and separators (structure tokens) and coordinates in digits, but
    no coordinate tokens."""
    rollout_fn_desc_weight: NonNegativeFloat
    """Channel B: weight of class names (`desc`) of ground-truth objects that the rollout missed.
    Missed objects are appended to the rollout and learned; the rest of their text has weight 1."""
    rollout_matched_prefix_struct_weight: NonNegativeFloat
    """Channel B: weight of the structure tokens (keys, quotes, brackets) of the rollout's matched
    objects. Their class names and coordinates do not belong to them. The structure tokens of missed
    objects, which are appended, have weight 1."""
    matched_desc_weight: NonNegativeFloat = 0.0
    """Channel B: weight of a loss that corrects wrong class names (`desc`) of matched objects.
    Beyond the specification. The ground truth's name is taught at the first token where the sampled
    name differs. 0: names of matched objects are not taught."""
    fp_end_weight: NonNegativeFloat = 1.0
    """Channel B: weight of the answer's end if the rollout has objects without a match. Beyond the
    specification. The end is the closing brace of the whole answer and EOS; it has weight 1 if all
    objects are matched. Objects that `trim_trailing_false_positives` cuts off do not count."""
    label_smoothing: Fraction01 = 0.0
    """Share of each text token's target that is spread evenly over the whole vocabulary, coordinate
    tokens included, as in torch's `cross_entropy`. Beyond the specification. 0: the target is the
    token alone."""


class TokenCEEntry(PipelineEntry):
    """Entry for the cross-entropy loss of text tokens, without coordinate tokens."""

    name: Literal["token_ce"]
    """Name of the objective: cross-entropy of text tokens, which are all but coordinate tokens."""
    config: TokenCEConfig
    """Settings of the objective `token_ce`."""


class CoordRegConfig(Section):
    coord_ce_weight: NonNegativeFloat
    """Weight of the cross-entropy within the coordinate tokens."""
    soft_ce_weight: NonNegativeFloat
    """Weight of the cross-entropy with the soft target, a distribution around the true bin."""
    w1_weight: NonNegativeFloat
    """Weight of the Wasserstein-1 distance to the soft target, as a fraction of the axis."""
    coord_gate_weight: NonNegativeFloat
    """Weight of a loss, in nats, that punishes probability of other tokens where a coordinate token
    belongs. The loss is -log p, and p is the total probability of all coordinate tokens."""
    text_gate_weight: NonNegativeFloat
    """Weight of a loss, in nats, that punishes probability of coordinate tokens where text belongs.
    The loss is -log(1 - p), and p is the total probability of all coordinate tokens. The loss is
    computed at tokens that `token_ce` learns, without closing brackets and EOS."""
    temperature: PositiveFloat
    """Divisor of the logits in `soft_ce`, `w1` and both gates."""
    target_sigma: PositiveFloat
    """Standard deviation of the soft target, in bins."""
    target_truncate: NonNegativeInt | None
    """The soft target is 0 more than this many bins from its centre; null: no limit."""


class CoordRegEntry(PipelineEntry):
    """Entry for the losses of coordinate tokens: cross-entropy, soft target, distance, gates."""

    reads = Reads.SLOTS
    name: Literal["coord_reg"]
    """Name of the objective: losses that teach the right coordinate tokens."""
    config: CoordRegConfig
    """Settings of the objective `coord_reg`."""

    @property
    def teaches(self) -> bool:
        terms = [value for name, value in self.config if name.endswith("_weight")]
        return super().teaches and max(terms) > 0


class BboxGeoConfig(Section):
    smoothl1_weight: NonNegativeFloat
    """Weight of the smooth-L1 distance of predicted and target box, with coordinates in [0, 1]. A
    predicted coordinate is the mean of all bins, weighted by their probabilities."""
    ciou_weight: NonNegativeFloat
    """Weight of `1 - CIoU` of predicted and target box. A predicted coordinate is the mean of all
    bins, weighted by their probabilities. CIoU is IoU minus penalties for distant centres and
    different aspect ratios."""


class BboxGeoEntry(PipelineEntry):
    """Entry for the losses of whole boxes, whose coordinates are decoded as expected values."""

    reads = Reads.SLOTS
    name: Literal["bbox_geo"]
    """Name of the objective: losses of whole boxes, by smooth-L1 distance and CIoU."""
    config: BboxGeoConfig
    """Settings of the objective `bbox_geo`."""

    @property
    def teaches(self) -> bool:
        return super().teaches and max(self.config.smoothl1_weight, self.config.ciou_weight) > 0


def _not_by_segment(normalize: object) -> object:
    if normalize == "segment":
        raise refusal(
            "'segment' was removed: it depended on which model calls had been merged",
            "use step (each model call counts equally), or rollout (each rollout counts equally)",
        )
    return normalize


def _baseline(name: str) -> str:
    if name in ("mean", "leave_one_out"):
        return name
    return require_imported(
        name,
        "mean, leave_one_out or module:function",
        "write one of them; a function of your own for example as mine.advantages:less_median",
    )


class AdvantageConfig(Section):
    """How a policy gradient computes the advantage and the weight of each sampled token."""

    normalize: Annotated[
        Literal["step", "rollout", "constant", "batch"], BeforeValidator(_not_by_segment)
    ]
    """Divisor of a sampled token's loss: the number of sampled tokens of its model call (`step`) or
    of its rollout (`rollout`), or `rollout_matching.max_new_tokens` (`constant`). The sum over the
    step is then divided by the step's rollouts. `batch`: only divide the sum by the number of all
    sampled tokens of the step."""
    advantage_std: bool
    """Divide the advantage (reward minus the group's mean) by the standard deviation of the group's
    rewards plus `advantage_epsilon`."""
    advantage_epsilon: NonNegativeFloat = 1e-4
    """Added to the standard deviation of a group's rewards when `advantage_std` divides by it. In
    units of the reward. It keeps advantages small if rewards hardly differ. No effect without
    `advantage_std`. The default is the same as in TRL's GRPO."""
    advantage_baseline: Annotated[str, AfterValidator(_baseline)] = "mean"
    """How a rollout's advantage follows from the rewards of its group. mean: its reward minus their
    mean; leave_one_out: minus the mean of the other rollouts' rewards; `module:function`: your own
    function of the reward and the group's rewards."""

    @model_validator(mode="after")
    def _is_unbiased(self) -> Self:
        if self.advantage_baseline == "leave_one_out" and self.advantage_std:
            wrong = "leave_one_out is unbiased, but advantage_std: true adds a bias again"
            remedy = "set advantage_std: false, or advantage_baseline: mean"
            raise refusal(wrong, remedy, "advantage_baseline")
        return self


class PolicyGradientConfig(AdvantageConfig):
    clip_low: Fraction01
    """Tokens with a negative advantage are learned until their probability ratio is this much below
    1. The ratio is the learner's probability of the token divided by the engine's. The clip range
    begins at `1 - clip_low`; `clip` says what it does."""
    clip_high: NonNegativeFloat
    """Tokens with a positive advantage are learned until their probability ratio is this much above
    1. The ratio is the learner's probability of the token divided by the engine's. The clip range
    ends at `1 + clip_high`; `clip` says what it does."""
    ratio_cap: Annotated[float, Field(gt=1.0)]
    """Upper bound of a token's ratio: the learner's probability of the token divided by the
    engine's. The bound holds for the value of the loss and for the factor of the gradient."""
    ratio_level: Literal["token", "call", "call_mean"] = "token"
    """How a sampled token's ratio (its probability by the learner divided by the engine's) is
    computed. token: from this token alone; call: the product of the ratios of all sampled tokens of
    its model call; call_mean: their geometric mean."""
    clip: Literal["ppo", "dual", "cispo", "none"] = "ppo"
    """What happens to tokens whose probability ratio is outside the clip range (`clip_low`,
    `clip_high`). The ratio is the learner's probability of a sampled token divided by the engine's.
    ppo: tokens whose ratio left the range in the direction of their advantage are not learned;
    dual: nor are tokens with a negative advantage whose ratio is above `ratio_cap`; cispo: all are
    learned, with their ratio clamped to the range; none: there is no range."""
    above_cap: Literal["truncate", "mask"] = "truncate"
    """truncate: a ratio above `ratio_cap` counts as `ratio_cap`; mask: its token is not learned."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> Self:
        if self.clip == "dual" and self.above_cap == "mask":
            wrong = "mask has no effect with clip: dual, which already stops tokens above ratio_cap"
            raise refusal(wrong, "set above_cap: truncate, or clip: ppo", "above_cap")
        least = 1 + self.clip_high
        if self.clip == "cispo" and self.ratio_cap < least:
            wrong = f"{self.ratio_cap:g} is below 1 + clip_high, the upper bound of clip: cispo"
            remedy = f"set {least:g} or more, or lower clip_high"
            raise refusal(wrong, remedy, "ratio_cap")
        return self


class PolicyGradientEntry(PipelineEntry):
    """Entry for the policy-gradient loss of sampled tokens."""

    learns_from = LearnsFrom.ADVANTAGES
    reads = Reads.SAMPLED
    name: Literal["policy_gradient"]
    """Name of the objective: policy gradient on sampled tokens, weighted by their advantages."""
    config: PolicyGradientConfig
    """Settings of the objective `policy_gradient`."""

    @property
    def advantage_section(self) -> tuple[str, AdvantageConfig]:
        return "config", self.config


class ReferenceKLConfig(Section):
    estimator: Literal["k3", "top"]
    """How the divergence at a token is computed. k3: estimated from the sampled token; top: summed
    over the reference's most probable tokens, with all others as one token."""
    top_tokens: PositiveInt | None = None
    """Number of tokens that `estimator: top` sums over; required by it, and an error with `k3`."""

    @model_validator(mode="after")
    def _counts_what_it_sums(self) -> ReferenceKLConfig:
        if (self.estimator == "top") != (self.top_tokens is not None):
            wrong = "is required by estimator: top, and has no effect with k3"
            raise refusal(
                wrong,
                "write a number such as 20 for estimator: top; remove the key for k3",
                "top_tokens",
            )
        return self


class ReferenceKLEntry(PipelineEntry):
    """Entry for the KL divergence of the learner from the model at the start of the run.

    It is computed at the tokens that `policy_gradient` learns, with the same weights.
    """

    learns_from = LearnsFrom.ADVANTAGES
    reads = Reads.SAMPLED
    needs_reference = True
    name: Literal["reference_kl"]
    """Name of the objective: KL divergence of the learner from the model at the run's start."""
    config: ReferenceKLConfig
    """Settings of the objective `reference_kl`."""


class CoordDiagConfig(Section):
    """The settings of `coord_diag`. It has none: write an empty mapping."""


class CoordDiagEntry(PipelineEntry):
    """Entry for the metrics of coordinate tokens, which has no loss.

    They are the error of the expected bin, the top-5 accuracy, and the probability of coordinates.
    """

    reads = Reads.SLOTS
    name: Literal["coord_diag"]
    """Name of the diagnostic: metrics of coordinate tokens, without a loss."""
    weight: NonNegativeFloat
    """No effect, since a diagnostic has no loss. Required like every key of an entry."""
    config: Annotated[CoordDiagConfig, Field(examples=[{}])]
    """No settings: write {}."""


IMPORTED = "module:Class"
"""The form of the name of an objective from the user's own module, also in lists of names."""


def _module_and_class(name: str) -> str:
    remedy = "write the module, a colon and the class, for example mine.focal_text:FocalText"
    return require_imported(name, IMPORTED, remedy)


class ImportedEntry(PipelineEntry):
    """Entry for an objective class of the user's own (docs/how_to/change_the_algorithm.md)."""

    learns_from = None
    reads = None
    name: Annotated[str, AfterValidator(_module_and_class)]
    """Name of your own objective class, as `module:Class`. `module` is a Python module, which is
    also searched for in the working directory."""
    advantages: AdvantageConfig | None = None
    """The class replaces `policy_gradient`: these keys, which `policy_gradient` has too, decide the
    advantages and weights of the sampled tokens that it learns. null: the class does not."""
    config: dict[str, Any]
    """The settings of the class. Its `Config` checks them when the class is imported, which needs
    torch."""

    @property
    def advantage_section(self) -> tuple[str, AdvantageConfig] | None:
        return None if self.advantages is None else ("advantages", self.advantages)

    @model_validator(mode="after")
    def _learns_samples(self) -> Self:
        if self.advantages is not None:
            _require_samples(self.channels, "channels")
        return self


def _kind(entry: object) -> str | None:
    """Return the tag of an entry's class; None for an entry without a name."""
    if isinstance(entry, PipelineEntry):
        entry = dict(entry)
    if not isinstance(entry, Mapping):
        return "token_ce"  # its validation reports that an entry must be a mapping
    if "name" not in entry:
        return None
    name = str(entry["name"])
    return IMPORTED if ":" in name else name


ObjectiveEntry = (
    Annotated[TokenCEEntry, Tag("token_ce")]
    | Annotated[CoordRegEntry, Tag("coord_reg")]
    | Annotated[BboxGeoEntry, Tag("bbox_geo")]
    | Annotated[PolicyGradientEntry, Tag("policy_gradient")]
    | Annotated[ReferenceKLEntry, Tag("reference_kl")]
    | Annotated[ImportedEntry, Tag(IMPORTED)]
)
"""An entry of `pipeline.objective`; the tag of each alternative is the objective's name."""


def _no_diagnostic(entry: object) -> object:
    if isinstance(entry, Mapping) and entry.get("name") == "coord_diag":
        raise refusal(
            "'coord_diag' is a diagnostic, not an objective",
            "move the entry to rollout_matching.pipeline.diagnostics",
            key="name",
        )
    return entry


def _no_objective(entry: object) -> object:
    names = [tag.tag for _, tag in map(get_args, get_args(ObjectiveEntry))]
    if isinstance(entry, Mapping) and _kind(entry) in names:
        raise refusal(
            f"'{entry['name']}' is an objective module, which has no effect as a diagnostic",
            "move the entry to rollout_matching.pipeline.objective",
            key="name",
        )
    return entry


class PipelineSection(Section):
    objective: Annotated[
        tuple[
            Annotated[ObjectiveEntry, Discriminator(_kind), BeforeValidator(_no_diagnostic)], ...
        ],
        Field(strict=False),
    ]
    """The objectives. Their losses, multiplied by their weights, are summed."""
    diagnostics: Annotated[
        tuple[Annotated[CoordDiagEntry, BeforeValidator(_no_objective)], ...], Field(strict=False)
    ]
    """Modules that are logged and have no loss."""

    @model_validator(mode="after")
    def _once_per_channel(self) -> PipelineSection:
        taken: dict[tuple[str, Channel], str] = {}
        for path, entry in self.enabled():
            for channel in entry.channels:
                first = taken.setdefault((entry.name, channel), path)
                if first != path:
                    raise refusal(
                        f"'{entry.name}' is already active on channel {channel}: {first}",
                        "remove or disable one of the two entries, or give each its own channel",
                        f"{path.rpartition('.')[2]}.name",
                    )
        for path, _ in itertools.islice(self.policy_gradients(), 1, None):
            raise refusal(
                "is a second policy gradient, and only one can decide the advantages",
                "remove or disable one of the two entries",
                path.removeprefix("rollout_matching.pipeline."),
            )
        return self

    def enabled(self) -> Iterator[tuple[str, ObjectiveEntry | CoordDiagEntry]]:
        """Yield each enabled objective or diagnostic, with its path in the configuration."""
        lists = (("objective", self.objective), ("diagnostics", self.diagnostics))
        for key, entries in lists:
            for index, entry in enumerate(entries):
                if entry.enabled:
                    yield f"rollout_matching.pipeline.{key}[{index}]", entry

    def active(self, channel: Channel) -> tuple[ObjectiveEntry, ...]:
        """Return the objectives whose losses are summed in the steps of this channel."""
        entries = self.objective
        return tuple(entry for entry in entries if entry.enabled and channel in entry.channels)

    def active_diagnostics(self, channel: Channel) -> tuple[CoordDiagEntry, ...]:
        """Return the diagnostics that are logged in the steps of this channel."""
        entries = self.diagnostics
        return tuple(entry for entry in entries if entry.enabled and channel in entry.channels)

    def policy_gradients(self) -> Iterator[tuple[str, AdvantageConfig]]:
        """Yield how the enabled policy gradient computes advantages, with the settings' path."""
        for path, entry in self.enabled():
            if entry.advantage_section is not None:
                key, section = entry.advantage_section
                yield f"{path}.{key}", section

    @property
    def policy_gradient(self) -> AdvantageConfig | None:
        """How advantages are computed: by `policy_gradient`, or by an imported policy gradient.

        None without either.
        """
        return next((config for _, config in self.policy_gradients()), None)

    @property
    def learns_only_advantages(self) -> bool:
        """True if `policy_gradient` is the only loss of rollouts.

        A token with the advantage 0 then has no gradient. An imported objective may give it one.
        """
        return all(isinstance(entry, PolicyGradientEntry) for entry in self.active(Channel.B))

    @property
    def divides_by_tokens(self) -> bool:
        """True if a step's loss is divided by the number of sampled tokens, not of rollouts."""
        config = self.policy_gradient
        return config is not None and config.normalize == "batch"

    @property
    def needs_reference(self) -> bool:
        """Return whether an objective needs the model that the run started from, as a reference."""
        return any(entry.needs_reference for entry in self.active(Channel.B))

    @property
    def num_reference_top(self) -> int:
        """How many of the reference model's most probable tokens are read at each sampled token.

        0: only the probability of the sampled token is read.
        """
        entries = self.active(Channel.B)
        found = (entry.config for entry in entries if isinstance(entry, ReferenceKLEntry))
        return max((config.top_tokens or 0 for config in found), default=0)
