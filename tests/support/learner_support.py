"""What tests of the learner share: a configuration over the demo's checkpoint and data, and rollouts nobody had to generate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from learner.learner import Learner
from learner.segments import PromptEncoder
from shared.config import RunConfig, load_config
from shared.records import Sample
from shared.rollouts import FinishReason, Rollout, RolloutRequest

MINIMAL = Path(__file__).parents[1] / "data" / "minimal_config.yaml"


def mapping(checkpoint: Path, data: Path, run_dir: Path, **changes: Any) -> dict[str, Any]:
    """The minimal configuration over these folders; `changes` name keys by dotted path with `__` for the dot."""
    values = yaml.safe_load(MINIMAL.read_text())
    values["model"]["path"] = str(checkpoint)
    values["data"] = {"train": str(data / "train.jsonl"), "val": str(data / "val.jsonl")}
    values["telemetry"] = {"run_dir": str(run_dir), "timeline": True}
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[key] = value
    return values


def configuration(checkpoint: Path, data: Path, run_dir: Path, **changes: Any) -> RunConfig:
    return load_config(mapping(checkpoint, data, run_dir, **changes))


def make_learner(config: RunConfig) -> Learner:
    return Learner(config, receiver_ranks=1, transport="rollmatch_gloo", device=torch.device("cpu"))


def scripted_rollouts(
    requests: Sequence[RolloutRequest], samples: Sequence[Sample], encoder: PromptEncoder, responses: Sequence[Sequence[int]], *, version: int = 0
) -> list[Rollout]:
    """Rollouts with these responses, as an engine would report them but for the log-probabilities."""
    return [
        Rollout(
            step=request.step,
            position=request.position,
            sample_id=request.sample_id,
            prompt_token_ids=encoder.encode(sample).token_ids,
            response_token_ids=tuple(response),
            stop_token_id=None,
            logprobs=None,
            stop_token_logprob=None,
            finish_reason=FinishReason.LENGTH,
            forced_positions=(),
            weight_version=version,
            actor="scripted",
            attempt=0,
            seed=request.seed,
            generate_s=0.0,
        )
        for request, sample, response in zip(requests, samples, responses, strict=True)
    ]
