"""Several ranks train an adapter as one rank does, whole or sharded, and write the same checkpoint (DESIGN 9)."""

import pytest
import rank_jobs
import safetensors.torch
import torch

from learner.place import LearnerPlace, ReceiverGroup

pytestmark = pytest.mark.processes

ALONE = LearnerPlace("rollmatch_gloo", (ReceiverGroup(1),))
STEPS, CHUNK = 2, 4


@pytest.mark.parametrize(("kind", "parallel"), [("dora", "ddp"), ("lora", "fsdp"), ("dora", "fsdp")])
def test_two_ranks_train_and_save_the_adapter_that_one_rank_does(two_ranks, rank_config, tmp_path, kind, parallel):
    adapter = {"model__adapter": {"kind": kind, "rank": 4, "alpha": 8.0}, "training__learning_rate": 1e-2}
    alone = rank_jobs.learn(ALONE, None, rank_config(**adapter), STEPS, CHUNK, tmp_path / "alone")
    config = rank_config(**adapter, learner__world_size=2, learner__parallel=parallel)
    ranks = two_ranks.run(rank_jobs.learn, config, STEPS, CHUNK // 2, tmp_path / "ranks")
    start = rank_jobs.learn(ALONE, None, rank_config(**adapter), 0, CHUNK)
    assert ranks[0].weights.keys() == alone.weights.keys()
    assert any((weight - start.weights[name]).abs().max() > 1e-3 for name, weight in alone.weights.items())
    for name, weight in alone.weights.items():
        torch.testing.assert_close(ranks[0].weights[name], weight, rtol=0, atol=1e-5)
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        one, several = (safetensors.torch.load_file(tmp_path / who / file) for who in ("alone", "ranks"))
        assert one.keys() == several.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(several[name], tensor, rtol=0, atol=1e-5)
