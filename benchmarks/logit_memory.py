"""Measure peak memory of the logits pass of a long row, in chunks and all at once.

`python -m benchmarks.logit_memory` (some minutes on two cores) runs forward and backward of the
head with every loss. The row has 12,000 positions (8,000 text and 4,000 coord slots), all compared
with an engine's log-probabilities, over a vocabulary of 152,000 with a small hidden size. Each case
runs in a separate process. It reports how much the pass raises the peak resident set, in MB and in
float32 copies of a chunk's logits. A last case also compares each position's 20 most probable
tokens with a reference (`reference_kl`, `estimator: top`). All logits at once are measured on a
shorter row and extrapolated. First, all chunk sizes must agree in losses and gradients.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from learner.collate import ComparedTokens, ModelInputs, PackedRow
from learner.objectives.base import (
    BoxSupervision,
    ChannelObjectives,
    CoordSupervision,
    LearnedSupervision,
    ReferenceValues,
    RowValues,
    Supervision,
    TextSupervision,
)
from learner.objectives.coord_math import Normalizer, coord_mass, gate_of_leak
from learner.objectives.reference_kl import ReferenceKL
from learner.objectives.registry import build_objectives
from learner.step import LogitsPass
from shared.config.pipeline import Channel, PipelineSection, ReferenceKLConfig
from shared.config.training import LOGIT_CHUNK
from shared.tokens.vocabulary import NUM_BINS

BANNED = (1, 2, 3, 4)
FIRST_COORD = 10
NUM_TOP = 20
CHANNELS = {"enabled": True, "weight": 1.0, "channels": ["A", "B"]}
COORD_REG = {
    "coord_ce_weight": 1.0,
    "soft_ce_weight": 1.0,
    "w1_weight": 1.0,
    "coord_gate_weight": 1.0,
    "text_gate_weight": 1.0,
    "temperature": 1.0,
    "target_sigma": 2.0,
    "target_truncate": 16,
}
PIPELINE = PipelineSection.model_validate(
    {
        "objective": [
            {
                "name": "token_ce",
                **CHANNELS,
                "config": {
                    "desc_ce_weight": 1.0,
                    "rollout_fn_desc_weight": 1.0,
                    "rollout_matched_prefix_struct_weight": 1.0,
                },
            },
            {"name": "coord_reg", **CHANNELS, "config": COORD_REG},
            {
                "name": "bbox_geo",
                **CHANNELS,
                "config": {"smoothl1_weight": 1.0, "ciou_weight": 1.0},
            },
        ],
        "diagnostics": [{"name": "coord_diag", **CHANNELS, "config": {}}],
    }
)


def make_row(num_positions: int, vocabulary: int) -> PackedRow:
    """Return a packed row that needs the logits of every position.

    Two text tokens and one coordinate slot alternate.
    """
    draw = torch.Generator().manual_seed(0)
    at = torch.arange(num_positions)
    text_at = at[at % 3 != 2]
    coord_at = at[at % 3 == 2]
    coord_at = coord_at[: len(coord_at) // 4 * 4]
    bins = torch.randint(0, NUM_BINS, (len(coord_at),), generator=draw)
    token_ids = torch.randint(FIRST_COORD + NUM_BINS, vocabulary, (num_positions,), generator=draw)
    token_ids[coord_at] = FIRST_COORD + bins

    def equal(count: int) -> torch.Tensor:
        return torch.full((count,), 1.0 / count)

    return PackedRow(
        (),
        ModelInputs(token_ids[None], at[None], torch.empty(0), torch.empty(0)),
        at,
        token_ids,
        Supervision(
            TextSupervision(text_at, equal(len(text_at)), equal(len(text_at))),
            CoordSupervision(coord_at, bins.float(), equal(len(coord_at))),
            BoxSupervision(torch.arange(len(coord_at)).view(-1, 4), equal(len(coord_at) // 4)),
        ),
        ComparedTokens(at, torch.zeros(num_positions)),
    )


def plain_values(
    logits_NV: torch.Tensor, row: PackedRow, coord_ids_C: torch.Tensor, banned: tuple[int, ...]
) -> RowValues:
    """Compute what the losses need of a row in the simple way: from all logits at once.

    The temperature is 1.
    """
    text_at = row.supervision.text.at
    coord_at = row.supervision.coord.at
    coord_logits_SC = logits_NV[coord_at][:, coord_ids_C]
    gate_S = torch.logsumexp(logits_NV[coord_at], -1) - torch.logsumexp(coord_logits_SC, -1)
    text_leak_X = torch.logsumexp(logits_NV[text_at], -1) - torch.logsumexp(
        logits_NV[text_at][:, coord_ids_C], -1
    )
    with torch.no_grad():
        allowed_NV = logits_NV.index_fill(
            1, torch.tensor(banned, dtype=torch.long, device=logits_NV.device), -torch.inf
        )
        sampled_N = torch.log_softmax(allowed_NV, -1).gather(1, row.token_ids_N[:, None])[:, 0]
    return RowValues(
        F.cross_entropy(logits_NV[text_at], row.token_ids_N[text_at], reduction="none"),
        gate_of_leak(text_leak_X),
        coord_logits_SC,
        gate_S,
        coord_mass(gate_S),
        sampled_N[row.compared.at],
    )


def loss_of(values: RowValues, row: PackedRow, objectives: ChannelObjectives) -> torch.Tensor:
    return torch.stack(
        [objective(values, row.supervision).loss for objective in objectives.objectives]
    ).sum()


class Case:
    """A logits pass to measure: a head, hidden states and a packed row.

    `chunk` is the number of positions whose logits exist at the same time; None: all.
    """

    def __init__(
        self,
        num_positions: int,
        vocabulary: int,
        hidden: int,
        chunk: int | None,
        *,
        has_top: bool = False,
    ) -> None:
        """Make random values; `has_top`: also compare a reference's most probable tokens."""
        torch.manual_seed(0)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)
        self.hidden_ND = torch.randn(num_positions, hidden, requires_grad=True)
        self.row = make_row(num_positions, vocabulary)
        self.objectives = build_objectives(
            PIPELINE, Channel.B, torch.arange(FIRST_COORD, FIRST_COORD + NUM_BINS)
        )
        self._chunk = chunk
        self._reference: ReferenceValues | None = None
        if has_top:
            config = ReferenceKLConfig(estimator="top", top_tokens=NUM_TOP)
            top = (*self.objectives.objectives, ReferenceKL(1.0, config))
            self.objectives = replace(self.objectives, objectives=top)
            at = torch.arange(num_positions)
            ones = torch.ones(num_positions)
            learned = LearnedSupervision(at, -ones, ones, ones / num_positions, at, num_positions)
            supervision = self.row.supervision._replace(learned=learned)
            self.row = replace(self.row, supervision=supervision)
            top_ids_MT = (at[:, None] + torch.arange(NUM_TOP)) % NUM_TOP + FIRST_COORD
            top_logprobs_MJ = torch.full((num_positions, NUM_TOP + 1), -math.log(NUM_TOP + 1))
            self._reference = ReferenceValues(-ones, top_ids_MT, top_logprobs_MJ)

    def backward(self) -> float:
        if self._chunk is None:
            values = plain_values(
                self.head(self.hidden_ND).float(), self.row, self.objectives.coord_ids_C, BANNED
            )
        else:
            values = LogitsPass(
                self.head,
                self.objectives.coord_ids_C,
                self.objectives.needs,
                Normalizer(1.0, BANNED),
                self._chunk,
            )(self.hidden_ND, self.row, self._reference)
        loss = loss_of(values, self.row, self.objectives)
        loss.backward()
        return loss.item()


def peak_bytes(work: Callable[[], object]) -> int:
    """Return by how many bytes calling `work` raises the process's peak memory. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status_bytes("VmRSS")
    work()
    return _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "every Linux process has this line"
    return int(found[1]) * 1024


def measure(
    num_positions: int, vocabulary: int, hidden: int, chunk: int | None, *, has_top: bool = False
) -> tuple[int, float]:
    """Return the peak bytes and the seconds of a case, measured in a separate process."""
    arguments = [
        str(value)
        for value in (
            "--positions",
            num_positions,
            "--vocabulary",
            vocabulary,
            "--hidden",
            hidden,
            "--case",
            chunk or 0,
        )
    ]
    if has_top:
        arguments.append("--top")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.logit_memory", *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    peak, seconds = done.stdout.split()
    return int(peak), float(seconds)


def run_case(
    num_positions: int, vocabulary: int, hidden: int, chunk: int | None, *, has_top: bool
) -> None:
    Case(
        24, 2000, hidden, chunk, has_top=has_top
    ).backward()  # so torch's first-use memory is not counted
    case = Case(num_positions, vocabulary, hidden, chunk, has_top=has_top)
    started = time.perf_counter()
    print(peak_bytes(case.backward), time.perf_counter() - started)


def check(chunks: list[int]) -> None:
    """Check that losses and gradients of all chunk sizes agree on a short row."""
    plain = Case(100, 3000, 16, None)
    loss = plain.backward()
    for chunk in [7, *chunks]:
        case = Case(100, 3000, 16, chunk)
        assert abs(case.backward() - loss) <= 1e-5 * loss
        for ours, obvious in (
            (case.head.weight.grad, plain.head.weight.grad),
            (case.hidden_ND.grad, plain.hidden_ND.grad),
        ):
            assert ours is not None
            torch.testing.assert_close(ours, obvious, rtol=1e-4, atol=1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=12_000)
    parser.add_argument("--vocabulary", type=int, default=152_000)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument(
        "--chunks", type=int, nargs="+", default=[LOGIT_CHUNK // 2, LOGIT_CHUNK, 2 * LOGIT_CHUNK]
    )
    parser.add_argument(
        "--plain-positions",
        type=int,
        default=1000,
        help="length of the row for all logits at once",
    )
    parser.add_argument(
        "--case",
        type=int,
        help="measure this chunk (0: all at once) in this process, and print bytes and seconds",
    )
    parser.add_argument("--top", action="store_true", help="in that case, with top tokens too")
    arguments = parser.parse_args()
    size = arguments.vocabulary, arguments.hidden
    if arguments.case is not None:
        run_case(arguments.positions, *size, arguments.case or None, has_top=arguments.top)
        return
    check(arguments.chunks)
    print(
        f"{arguments.positions} positions, a vocabulary of {size[0]}, hidden size {size[1]},"
        f" float32 on CPU; the default chunk is {LOGIT_CHUNK}"
    )
    print(f"{'positions':>10} {'chunk':>8} {'peak MB':>9} {'copies':>7} {'s':>7}")
    for chunk, has_top in [*((chunk, False) for chunk in arguments.chunks), (LOGIT_CHUNK, True)]:
        peak, seconds = measure(arguments.positions, *size, chunk, has_top=has_top)
        print(
            f"{arguments.positions:10} {chunk:8} {peak / 1e6:9.0f}"
            f" {peak / (4 * chunk * size[0]):7.2f} {seconds:7.1f}{'  with top' * has_top}"
        )
    peak, seconds = measure(arguments.plain_positions, *size, None)
    copies = peak / (4 * arguments.plain_positions * size[0])
    print(
        f"{arguments.plain_positions:10} {'all':>8} {peak / 1e6:9.0f} {copies:7.2f} {seconds:7.1f}"
    )
    print(
        f"{arguments.positions:10} {'all':>8}"
        f" {copies * 4 * arguments.positions * size[0] / 1e6:9.0f} {copies:7.2f}  (computed)"
    )


if __name__ == "__main__":
    main()
