"""`rollout_matching.pipeline`: the declared objective, which is all there is (decisions 2 and 37).

Every entry is written out in full: no key has a default but the variants of `policy_gradient`, its
`advantage_epsilon`, `top_tokens`, and the options beyond the specification (decision 30). A new
objective of this repository has its settings and its entry here, with what it learns from, and a
line in `ObjectiveEntry`; one of your own modules needs nothing here (`ImportedEntry`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Any, ClassVar, Literal, get_args

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
"""The module whose settings decide the advantages."""


class Channel(StrEnum):
    """The kind of a step."""

    A = "A"
    """Teacher-forced on ground truth."""
    B = "B"
    """On the model's own rollout."""


class LearnsFrom(StrEnum):
    """What a module compares the model's answer with."""

    GROUND_TRUTH = "ground truth"
    ADVANTAGES = "advantages"


class Reads(StrEnum):
    """The positions of a target that a module reads."""

    TEXT = "text"
    SLOTS = "slots"
    """Coord slots, each of which is one token."""
    SAMPLED = "sampled"
    """Sampled tokens that have an advantage."""


def _each_once(channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
    if not channels:
        remedy = "name A, B or both; to switch an entry off set enabled: false"
        raise refusal("must not be empty", remedy)
    if len(set(channels)) < len(channels):
        raise refusal(f"names a channel twice: [{', '.join(channels)}]", "name each channel once")
    return channels


Channels = Annotated[
    tuple[Annotated[Channel, Field(strict=False)], ...],
    Field(strict=False),
    AfterValidator(_each_once),
]


class PipelineEntry(Section):
    """The keys that every entry has in addition to `name` and `config`, and what it declares."""

    learns_from: ClassVar[LearnsFrom | None] = LearnsFrom.GROUND_TRUTH
    """Algorithms without it refuse the entry; None: no algorithm does."""
    reads: ClassVar[Reads | None] = Reads.TEXT
    """None: not declared."""
    needs_reference: ClassVar[bool] = False
    """Whether it compares the learner with the model that the run started with."""

    enabled: bool
    """False: as if the entry were absent."""
    weight: NonNegativeFloat
    """Factor of the module's loss in the step's loss."""
    channels: Channels
    """The channels in whose steps the module takes part; [B] if it reads sampled tokens."""

    @field_validator("channels")
    @classmethod
    def _has_samples(cls, channels: tuple[Channel, ...]) -> tuple[Channel, ...]:
        if cls.reads is Reads.SAMPLED and channels != (Channel.B,):
            raise refusal(
                f"must be [B], got [{', '.join(channels)}]: only what the model sampled itself has"
                " a policy gradient",
                "write [B]",
            )
        return channels

    @property
    def teaches(self) -> bool:
        """Tell whether its loss can be other than 0."""
        return self.weight > 0


class TokenCEConfig(Section):
    desc_ce_weight: NonNegativeFloat
    """Channel A: weight of the tokens of `desc` values, where structure has weight 1."""
    rollout_fn_desc_weight: NonNegativeFloat
    """Channel B: weight of the tokens of `desc` values of appended objects."""
    rollout_matched_prefix_struct_weight: NonNegativeFloat
    """Channel B: weight of the structure of matched objects in the rollout's prefix."""
    matched_desc_weight: NonNegativeFloat = 0.0
    """Channel B, beyond the specification: weight of the token at which the name of a matched
    object first differs from its ground truth's, where the ground truth's is taught."""
    fp_end_weight: NonNegativeFloat = 1.0
    """Channel B, beyond the specification: weight of the closing brace and EOS where the kept
    rollout holds unmatched predictions."""


class TokenCEEntry(PipelineEntry):
    """Cross-entropy over text tokens outside the coord vocabulary."""

    name: Literal["token_ce"]
    """The module."""
    config: TokenCEConfig
    """The module's settings."""


class CoordRegConfig(Section):
    coord_ce_weight: NonNegativeFloat
    """Weight of the cross-entropy within the coord vocabulary."""
    soft_ce_weight: NonNegativeFloat
    """Weight of the cross-entropy against the soft target."""
    w1_weight: NonNegativeFloat
    """Weight of the Wasserstein-1 distance to the soft target, in [0, 1]."""
    coord_gate_weight: NonNegativeFloat
    """Weight of the probability that leaks out of the coord vocabulary at coord slots, in nats."""
    text_gate_weight: NonNegativeFloat
    """Weight of the probability of coord tokens at text positions that a `token_ce` weighs, in
    nats."""
    temperature: PositiveFloat
    """Divides the logits of `soft_ce`, `w1` and both gates."""
    target_sigma: PositiveFloat
    """Width of the soft target, in bins."""
    target_truncate: NonNegativeInt | None
    """The soft target is zero further than this many bins from its centre; null: nowhere."""


class CoordRegEntry(PipelineEntry):
    """Coordinate terms over supervised coord slots."""

    reads = Reads.SLOTS
    name: Literal["coord_reg"]
    """The module."""
    config: CoordRegConfig
    """The module's settings."""

    @property
    def teaches(self) -> bool:
        terms = [value for name, value in self.config if name.endswith("_weight")]
        return super().teaches and max(terms) > 0


class BboxGeoConfig(Section):
    smoothl1_weight: NonNegativeFloat
    """Weight of the smooth-L1 distance of the decoded box, with coordinates in [0, 1]."""
    ciou_weight: NonNegativeFloat
    """Weight of `1 - CIoU` of the decoded box."""


class BboxGeoEntry(PipelineEntry):
    """Terms over boxes decoded by expectation."""

    reads = Reads.SLOTS
    name: Literal["bbox_geo"]
    """The module."""
    config: BboxGeoConfig
    """The module's settings."""

    @property
    def teaches(self) -> bool:
        return super().teaches and max(self.config.smoothl1_weight, self.config.ciou_weight) > 0


def _not_by_segment(normalize: object) -> object:
    if normalize == "segment":
        raise refusal(
            "'segment' was removed: it depended on which calls of the model had been merged",
            "use step, where each call is an example, or rollout, where each rollout weighs 1",
        )
    return normalize


class PolicyGradientConfig(Section):
    clip_low: Fraction01
    """A sampled token with a negative advantage is learned while its ratio is at least 1 minus
    this. The ratio is of the learner's probability to the engine's."""
    clip_high: NonNegativeFloat
    """One with a positive advantage while its ratio is at most 1 plus this."""
    ratio_cap: Annotated[float, Field(gt=1.0)]
    """A ratio above this counts as this: in the loss, and as the factor of the gradient."""
    normalize: Annotated[
        Literal["step", "rollout", "constant", "batch"], BeforeValidator(_not_by_segment)
    ]
    """Divisor of a sampled token's term: the sampled tokens of its call of the model (`step`),
    those of its rollout (`rollout`), or `rollout_matching.max_new_tokens` (`constant`). The step's
    sum is then divided by its rollouts. `batch`: by all sampled tokens of the step instead, and by
    nothing before."""
    advantage_std: bool
    """Divide the advantage, the reward minus its group's mean, by the standard deviation of the
    group's rewards plus `advantage_epsilon`."""
    advantage_epsilon: NonNegativeFloat = 1e-4
    """Keeps rewards that hardly differ from being told apart as sharply as others. In units of the
    rewards; no effect without `advantage_std`. The default is that of TRL's GRPO."""
    advantage_baseline: Literal["mean", "leave_one_out"] = "mean"
    """What is taken off a reward: the mean of its group, or that of the group's other rollouts."""
    ratio_level: Literal["token", "call", "call_mean"] = "token"
    """Whose ratio a sampled token has: its own (`token`), the product of those of all sampled
    tokens of its call of the model (`call`), or the geometric mean of these (`call_mean`)."""
    clip: Literal["ppo", "dual", "cispo", "none"] = "ppo"
    """What the clip range does: tokens beyond it on their advantage's side are not learned (`ppo`);
    nor those above `ratio_cap` that are worse than the others (`dual`); all are learned, and their
    factor stays within the range (`cispo`); there is no range (`none`)."""
    above_cap: Literal["truncate", "mask"] = "truncate"
    """What becomes of a ratio above `ratio_cap`: it counts as `ratio_cap`, or its token is left
    out."""

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> PolicyGradientConfig:
        if self.advantage_baseline == "leave_one_out" and self.advantage_std:
            wrong = "leave_one_out is there to have no bias, which advantage_std: true brings back"
            remedy = "set advantage_std: false, or advantage_baseline: mean"
            raise refusal(wrong, remedy, "advantage_baseline")
        if self.clip == "dual" and self.above_cap == "mask":
            wrong = "mask has no effect under clip: dual, which stops what is above ratio_cap"
            raise refusal(wrong, "set above_cap: truncate, or clip: ppo", "above_cap")
        least = 1 + self.clip_high
        if self.clip == "cispo" and self.ratio_cap < least:
            wrong = f"{self.ratio_cap:g} is below 1 + clip_high, where clip: cispo ends the factors"
            remedy = f"set {least:g} or more, or lower clip_high"
            raise refusal(wrong, remedy, "ratio_cap")
        return self


class PolicyGradientEntry(PipelineEntry):
    """Policy gradient over the tokens that the model sampled, of trajectories of environments."""

    learns_from = LearnsFrom.ADVANTAGES
    reads = Reads.SAMPLED
    name: Literal["policy_gradient"]
    """The module."""
    config: PolicyGradientConfig
    """The module's settings."""


class ReferenceKLConfig(Section):
    estimator: Literal["k3", "top"]
    """How a token's divergence is measured: from the token that was sampled (`k3`), or summed over
    the tokens that are most probable to the reference, with all others as one (`top`)."""
    top_tokens: PositiveInt | None = None
    """Tokens that `top` sums over; required there, and refused with `k3`."""

    @model_validator(mode="after")
    def _counts_what_it_sums(self) -> ReferenceKLConfig:
        if (self.estimator == "top") != (self.top_tokens is not None):
            wrong = "is a number under estimator: top, and has no effect under k3"
            raise refusal(wrong, "write one such as 20, or change the estimator", "top_tokens")
        return self


class ReferenceKLEntry(PipelineEntry):
    """Divergence of the learner's policy from the one that the run started with, over the tokens
    of `policy_gradient` and with their weights."""

    learns_from = LearnsFrom.ADVANTAGES
    reads = Reads.SAMPLED
    needs_reference = True
    name: Literal["reference_kl"]
    """The module."""
    config: ReferenceKLConfig
    """The module's settings."""


class CoordDiagConfig(Section):
    """No settings: the mapping is written out, and empty."""


class CoordDiagEntry(PipelineEntry):
    """Expected-bin error, top-5 accuracy and coord mass at supervised coord slots."""

    reads = Reads.SLOTS
    name: Literal["coord_diag"]
    """The module."""
    weight: NonNegativeFloat
    """No effect, since a diagnostic has no loss; written out like every key of an entry."""
    config: Annotated[CoordDiagConfig, Field(examples=[{}])]
    """The module's settings: none."""


IMPORTED = "module:Class"
"""The form of an imported objective's name, and what its entry is called where kinds are listed."""


def _module_and_class(name: str) -> str:
    module, _, class_name = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), class_name)):
        remedy = "write the module, a colon and the class, for example mine.focal_text:FocalText"
        raise refusal(f"'{name}' is not {IMPORTED}", remedy)
    return name


class ImportedEntry(PipelineEntry):
    """An objective of one of your own modules: docs/objectives.md."""

    learns_from = None
    reads = None
    name: Annotated[str, AfterValidator(_module_and_class)]
    """The class, as `module:Class`; Python looks for the module in the working directory too."""
    config: dict[str, Any]
    """The class's settings, checked by its `Config` when it is imported, since that imports
    torch."""


def _kind(entry: object) -> str | None:
    """Return the tag of an entry's class; None without a name."""
    if isinstance(entry, PipelineEntry):
        entry = dict(entry)
    if not isinstance(entry, Mapping):
        return "token_ce"  # whose class says that an entry is a mapping
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
"""The entry of an objective; the tag is its name."""


def _no_diagnostic(entry: object) -> object:
    if isinstance(entry, Mapping) and entry.get("name") == "coord_diag":
        raise refusal(
            "'coord_diag' is a diagnostic, which nothing is learned from",
            "move the entry to rollout_matching.pipeline.diagnostics",
            key="name",
        )
    return entry


def _no_objective(entry: object) -> object:
    names = [tag.tag for _, tag in map(get_args, get_args(ObjectiveEntry))]
    if isinstance(entry, Mapping) and _kind(entry) in names:
        raise refusal(
            f"'{entry['name']}' is an objective module, and would not be learned from here",
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
    """The modules whose weighted losses are summed."""
    diagnostics: Annotated[
        tuple[Annotated[CoordDiagEntry, BeforeValidator(_no_objective)], ...], Field(strict=False)
    ]
    """Modules that are logged and not learned from."""

    @model_validator(mode="after")
    def _once_per_channel(self) -> PipelineSection:
        taken: dict[tuple[str, Channel], str] = {}
        for path, entry in self.enabled():
            for channel in entry.channels:
                first = taken.setdefault((entry.name, channel), path)
                if first != path:
                    raise refusal(
                        f"'{entry.name}' is active on channel {channel} already, by {first}",
                        "remove or disable one of the two entries, or give each its own channel",
                        f"{path.rpartition('.')[2]}.name",
                    )
        return self

    def enabled(self) -> Iterator[tuple[str, ObjectiveEntry | CoordDiagEntry]]:
        """Yield every enabled entry with its path in the configuration."""
        lists = (("objective", self.objective), ("diagnostics", self.diagnostics))
        for key, entries in lists:
            for index, entry in enumerate(entries):
                if entry.enabled:
                    yield f"rollout_matching.pipeline.{key}[{index}]", entry

    def active(self, channel: Channel) -> tuple[ObjectiveEntry, ...]:
        """Return the enabled entries of the objective for a step of this channel."""
        entries = self.objective
        return tuple(entry for entry in entries if entry.enabled and channel in entry.channels)

    def active_diagnostics(self, channel: Channel) -> tuple[CoordDiagEntry, ...]:
        """Return the enabled diagnostics for a step of this channel."""
        entries = self.diagnostics
        return tuple(entry for entry in entries if entry.enabled and channel in entry.channels)

    @property
    def policy_gradient(self) -> PolicyGradientConfig | None:
        """The settings of the policy gradient that channel B learns; None without one."""
        entries = self.active(Channel.B)
        found = (entry.config for entry in entries if isinstance(entry, PolicyGradientEntry))
        return next(found, None)

    @property
    def divides_by_tokens(self) -> bool:
        """Whether a step's loss is divided by its sampled tokens instead of its rollouts."""
        config = self.policy_gradient
        return config is not None and config.normalize == "batch"

    @property
    def needs_reference(self) -> bool:
        """Whether a run has to load the model that it started with a second time."""
        return any(entry.needs_reference for entry in self.active(Channel.B))

    @property
    def num_reference_top(self) -> int:
        """Tokens of the reference that are read at each sampled token; 0: the sampled one only."""
        entries = self.active(Channel.B)
        found = (entry.config for entry in entries if isinstance(entry, ReferenceKLEntry))
        return max((config.top_tokens or 0 for config in found), default=0)
