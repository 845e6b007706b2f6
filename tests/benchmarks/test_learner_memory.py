"""The estimate of a learner's memory lies within a tenth of what torch's allocator gives out."""

import pytest

from benchmarks.learner_memory import (
    CHECKPOINTING,
    HALF,
    LORA,
    SHARDED,
    Case,
    Sizes,
    make_checkpoint,
    run_case,
)

SMALL = Sizes(
    hidden=128,
    layers=3,
    intermediate=384,
    heads=2,
    kv_heads=1,
    head_dim=64,
    vocabulary=2_500,
    vision_hidden=64,
    vision_intermediate=256,
    tokens=768,
    segment=128,
    image=6,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), SMALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({}, id="full"),
        pytest.param(HALF | CHECKPOINTING, id="bfloat16, recomputed"),
        pytest.param({"model.adapter": LORA, "model.attention": "eager"}, id="lora, eager"),
        pytest.param(SHARDED | HALF | CHECKPOINTING, id="two shards in bfloat16, recomputed"),
    ],
)
def test_the_estimate_is_within_a_tenth_of_the_peak(folder, keys):
    estimate, peak = run_case(folder, Case(keys=keys), SMALL)
    assert estimate.total == pytest.approx(peak, rel=0.1), estimate.describe()
