"""`rollouts/step_000123.jsonl`: what became of every sample of a step, a line of JSON for each (issue 3, "Bad input"; `telemetry.rollouts`).

Lines are in the order of positions, and a line is there as soon as its target is made. `RolloutLine` (learner.rollout_line) is the format: everything about the
engine's answer is under `rollout`, everything the parser and the matching made of it under `reading` (both null in a channel-A step), and what
the sample trains on under `target`. Files and ranks: `learner.step_log`. The step's positions are in rank order. Nodes need not share a disk: then each has
the files of its ranks, and `read_step` shows those that lie beside rank 0's.

    jq -c 'select(.reading.dropped != []) | [.position, .reading.dropped]' step_000123.jsonl
    pandas.json_normalize([json.loads(line) for line in open("step_000123.jsonl")])

Shape legend: L target tokens, S coord slots.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from learner.rollout_line import ReadingEntry, RolloutEntry, RolloutLine, TargetEntry, checked_line
from learner.step_log import StepLog, read_lines
from learner.targets import Reading, Target, TokenRole
from shared.config.pipeline import Channel
from shared.records import Sample
from shared.rollouts import Rollout
from shared.tokens.vocabulary import TokenCodec


class RolloutLog:
    """Of the rollouts of samples, which were parsed and matched."""

    def __init__(self, folder: Path, codec: TokenCodec, *, rank: int = 0) -> None:
        """Makes `folder` where it is missing. Raises StorageError."""
        self._codec = codec
        self._step, self._channel = 0, Channel.A
        self._lines = StepLog(folder, rank=rank)

    def begin(self, step: int, channel: Channel) -> None:
        """The lines that follow are of this step. Raises StorageError."""
        self._step, self._channel = step, channel
        self._lines.begin(step)

    def write(self, rollout: Rollout | None, sample: Sample, target: Target, weights_L: np.ndarray, position: int) -> None:
        """One sample; `rollout` is None exactly in channel A. `weights_L`: float32 [L], `TextWeights.of(target.roles)`. Raises StorageError."""
        assert (rollout is None) == (target.reading is None), "a reading is of a rollout"
        line: RolloutLine = {
            "step": self._step,
            "position": position,
            "channel": self._channel,
            "sample_id": sample.sample_id,
            "ground_truth": [{"kind": truth.kind, "bins": truth.bins, "desc": truth.desc} for truth in sample.objects],
            "rollout": None if rollout is None else _rollout_entry(rollout, self._codec),
            "reading": None if target.reading is None else _reading_entry(target.reading, self._codec),
            "target": _target_entry(target, weights_L),
        }
        self._lines.write(line)

    def close(self) -> None:
        self._lines.close()


def read_step(path: Path) -> list[RolloutLine]:
    """`learner.step_log.read_lines` of a file of `RolloutLog`. Raises OSError, and RecordError with file and line for a line that this version did not
    write."""
    return read_lines(path, checked_line)


def _rollout_entry(rollout: Rollout, codec: TokenCodec) -> RolloutEntry:
    return {
        "weight_version": rollout.weight_version,
        "actor": rollout.actor,
        "seed": rollout.seed,
        "attempt": rollout.attempt,
        "finish_reason": rollout.finish_reason,
        "num_prompt_tokens": len(rollout.prompt_token_ids),
        "response_token_ids": rollout.response_token_ids,
        "forced_positions": rollout.forced_positions,
        "text": b"".join(map(codec.piece_bytes, rollout.response_token_ids)).decode(errors="replace"),
    }


def _reading_entry(reading: Reading, codec: TokenCodec) -> ReadingEntry:
    parsed, match = reading.parsed, reading.match
    excluded = [pair.prediction for pair in reading.excluded]
    return {
        "prefix_text": parsed.prefix_text,
        "num_kept_bytes": 0 if parsed.fallback else sum(len(codec.piece_bytes(token_id)) for token_id in parsed.prefix_token_ids),
        "num_kept": reading.num_kept,
        "num_prefix": reading.num_prefix,
        "truncated": parsed.truncated,
        "fallback": parsed.fallback,
        "max_object_index": parsed.max_object_index,
        "objects": [
            {
                "key": object_.key,
                "kind": object_.kind,
                "desc": object_.desc,
                "bins": object_.bins,
                "span": object_.span,
                "coord_positions": object_.coord_positions,
            }
            for object_ in parsed.objects
        ],
        "dropped": [{"key": dropped.key, "reason": dropped.reason} for dropped in parsed.dropped],
        "pairs": [
            {"prediction": pair.prediction, "ground_truth": pair.ground_truth, "iou": pair.iou, "supervised": pair.prediction not in excluded}
            for pair in match.pairs
        ],
        "excluded": excluded,
        "unmatched_predictions": match.unmatched_predictions,
        "gating_rejections": match.gating_rejections,
        "appended": reading.appended,
        "appended_text": reading.appended_text,
    }


def _target_entry(target: Target, weights_L: np.ndarray) -> TargetEntry:
    assert weights_L.shape == target.roles.shape
    changes = np.flatnonzero((np.diff(target.roles.astype(np.int16)) != 0) | (np.diff(weights_L) != 0)) + 1
    starts = [0, *changes.tolist()]
    stops = [*starts[1:], len(target.token_ids)]
    return {
        "token_ids": target.token_ids,
        "supervision": [
            # By way of text, so that a weight of 0.1 reads 0.1 and not as float32 holds it.
            (start, stop, TokenRole(target.roles[start]).name.lower(), float(str(weights_L[start])))
            for start, stop in zip(starts, stops, strict=True)
        ],
        "coord_positions": target.coord_positions,
        "coord_targets": target.coord_targets,
    }
