"""Parts of the model that are trained, and tolerances that follow the number type."""

from __future__ import annotations

import pytest

from shared.config.run import RunConfig
from shared.errors import ConfigError

PARTS = "training.parts"
FROZEN = {f"{PARTS}.{part}.frozen": True for part in ("vision_tower", "aligner", "language_model")}
VLLM_SYNC = "rollout_matching.vllm.sync"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (FROZEN, f"{PARTS}: all of them are frozen: nothing is left to train; unfreeze one"),
        (
            {f"{PARTS}.aligner": {"frozen": True, "learning_rate": 1e-5}},
            (
                f"{PARTS}.aligner.learning_rate: 1e-05, and the part is frozen; remove one of the"
                " two keys"
            ),
        ),
        (
            {f"{PARTS}.language_model.frozen": True, "model.adapter": {"kind": "lora"}},
            (
                f"{PARTS}.language_model.frozen: true, and model.adapter, all that is trained, is"
                " in it; unfreeze it, or remove model.adapter"
            ),
        ),
        (
            {f"{PARTS}.aligner.learning_rate": 0.0},
            f"{PARTS}.aligner.learning_rate: must be greater than 0, got 0.0",
        ),
        (
            {f"{PARTS}.vision": {}},
            f"{PARTS}.vision: is not a known key; did you mean 'vision_tower'?",
        ),
    ],
)
def test_parts_that_contradict_each_other_are_refused(load, changes, problem) -> None:
    with pytest.raises(ConfigError) as caught:
        load(changes)
    assert any(line.startswith(problem) for line in caught.value.problems), caught.value.problems


def test_frozen_parts_and_rates_of_their_own_are_accepted(load) -> None:
    parts = load(
        {f"{PARTS}.vision_tower.frozen": True, f"{PARTS}.aligner.learning_rate": 1e-5}
    ).training.parts
    assert (
        parts.vision_tower.frozen,
        parts.aligner.frozen,
        parts.aligner.learning_rate,
        parts.language_model.learning_rate,
    ) == (True, False, 1e-5, None)


def test_tolerances_follow_the_number_type_unless_they_are_written(load) -> None:
    def tolerances(run: RunConfig) -> tuple[float | None, float]:
        return run.canary_tolerance, run.logprob_tolerance

    assert tolerances(load({})) == (1e-4, 1e-4)
    assert tolerances(load({"model.dtype": "bfloat16"})) == (None, 1.0)
    written = {
        "model.dtype": "bfloat16",
        f"{VLLM_SYNC}.canary_tolerance": 0.25,
        "rollout_matching.logprob_tolerance": 2.0,
    }
    assert tolerances(load(written)) == (0.25, 2.0)
