"""Compare a row on an FSDP2-sharded model (world size 1) with the same row on the whole model.

Loss, gradient and the tensors of a weight sync must agree, in float32 and in bfloat16 with float32
shards. A second forward and backward must agree too, because the root module releases its weights
after each.
"""

from __future__ import annotations

import copy
from datetime import timedelta

import torch

from benchmarks.gpu.probe import largest_difference, options
from benchmarks.learner_step import make_model, make_segment
from benchmarks.logit_memory import FIRST_COORD, PIPELINE
from learner.collate import collate
from learner.model.checkpoint import CheckpointWeights
from learner.model.ranks import (
    LearnerDevice,
    Ranks,
    RankTopology,
    Rendezvous,
    open_group,
)
from learner.model.sharding import ShardedModel
from learner.objectives.coord_math import Normalizer
from learner.objectives.registry import build_objectives
from learner.step import train_row
from learner.targets import TextWeights
from shared.config.pipeline import Channel
from shared.tokens.vocabulary import NUM_BINS
from shared.weight_sync.transports import Device, TransportKind

GRADIENT_OF = "model.language_model.norm.weight"
TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (1e-3, 2e-2)}
"""Of the loss, relative to it, and of the gradient, relative to its largest value."""


def compare(device: torch.device, dtype: torch.dtype, length: int) -> None:
    """Compare the two models, which compute in `dtype`, on a row of segments of `length` tokens."""
    whole = make_model("small", torch.device("cpu"), torch.float32)
    vocabulary = whole.config.text_config.vocab_size
    segments = [make_segment(number, length, vocabulary) for number in range(4)]
    rope = whole.model.get_rope_index
    row = collate(segments, text_weights=TextWeights(1.0, 1.0), rope_index=rope).to(device)
    coord_ids = torch.arange(FIRST_COORD, FIRST_COORD + NUM_BINS, device=device)
    objectives = build_objectives(PIPELINE, Channel.B, coord_ids)

    parts = copy.deepcopy(whole)
    meeting = Rendezvous("127.0.0.1")
    here = {"device": Device(device.type), "rendezvous": meeting.endpoint}
    topology = RankTopology(TransportKind.GLOO, (), **here)  # nothing is sent
    group = open_group(topology, meeting.store, timedelta(seconds=60))
    ranks = Ranks(0, 1, group, LearnerDevice(device), timeout_s=60.0)
    ranks.shards = ranks
    source = CheckpointWeights(parts)
    sharded = ShardedModel(parts, source, ranks, device=device, dtype=dtype)
    whole.to(device)
    # Not the buffers: the frequencies of rotary embeddings stay float32, as in a loaded model.
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(dtype)

    expected = train_row(whole, row, objectives, Normalizer())
    gradient = whole.get_parameter(GRADIENT_OF).grad
    assert gradient is not None
    of_loss, of_gradient = TOLERANCES[dtype]
    for attempt in ("first", "second"):
        parts.zero_grad(set_to_none=True)
        result = train_row(parts, row, objectives, Normalizer(), run=sharded.forward)
        found = parts.get_parameter(GRADIENT_OF).grad
        assert found is not None
        difference = largest_difference(found.full_tensor(), gradient)  # type: ignore[attr-defined]
        relative = difference / gradient.abs().max().item()
        print(f"{dtype}, {attempt}: loss {result.loss:.6f}, of the whole model {expected.loss:.6f}")
        print(f"{dtype}, {attempt}: largest difference of the gradient {relative:.1e}, relative")
        assert abs(result.loss - expected.loss) <= of_loss * abs(expected.loss)
        assert relative <= of_gradient
    weights = dict(CheckpointWeights(whole).tensors())
    sent = dict(sharded.weights.tensors())
    assert weights.keys() == sent.keys()
    assert all(torch.equal(weights[name], sent[name]) for name in weights)
    print(f"{dtype}: a sync would send the same {len(sent)} tensors")


def main() -> None:
    arguments = options(__doc__)
    for dtype in TOLERANCES:
        compare(arguments.device, dtype, 150 if arguments.toy else 1500)


if __name__ == "__main__":
    main()
