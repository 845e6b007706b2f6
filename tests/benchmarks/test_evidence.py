import json

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir

from benchmarks import evidence
from benchmarks.evidence import ARMS, FIGURES, counts_of, f1_named, interval, is_flat, pipeline
from launch.cli import as_mapping, as_schema_overrides
from shared.config import load_config
from shared.records import GeometryKind, GroundTruthObject, Sample


@pytest.mark.parametrize(
    ("curve", "flat"),
    [
        ([0.5, 0.6, 0.602, 0.604, 0.603], True),
        ([0.5, 0.6, 0.602, 0.605, 0.603], False),
        ([0.6, 0.5, 0.5], False),
        ([0.6, 0.5, 0.5, 0.5], True),
    ],
)
def test_a_curve_is_flat_after_three_reports_without_a_gain(curve, flat):
    assert is_flat(curve) is flat


def test_the_figures_of_a_picture():
    def box(name, *bins):
        return {"kind": "bbox_2d", "bins": bins, "desc": name, "score": 1.0}

    truth = [("six", (0, 0, 100, 100)), ("two", (500, 500, 600, 600)), ("one", (900, 0, 999, 99))]
    objects = tuple(GroundTruthObject(GeometryKind.BBOX, bins, name) for name, bins in truth)
    sample = Sample("a", (), 160, 160, objects)
    found = [
        box("six", 0, 0, 100, 100),
        box("six", 2, 0, 100, 100),  # the same one again
        box("nine", 500, 500, 600, 600),  # named wrongly
        box("one", 900, 0, 965, 99),  # IoU 0.66
        box("one", 300, 300, 310, 310),  # nothing is there
    ]
    counts = dict(zip(FIGURES, counts_of(0, sample, found), strict=True))
    assert counts == {
        "ground_truth": 3,
        "found": 5,
        "any50": 3,
        "named50": 2,
        "any75": 2,
        "named75": 1,
        "doubled": 1,
    }


def test_the_interval_of_a_difference_is_paired():
    rng = np.random.default_rng(0)
    worse = np.zeros((3, 50, len(FIGURES)), dtype=int)
    worse[:, :, :2] = 10
    worse[:, :, FIGURES.index("named50")] = rng.integers(2, 8, size=(3, 50))
    better = worse.copy()
    better[:, :, FIGURES.index("named50")] += 1
    assert f1_named(better) - f1_named(worse) == pytest.approx(0.1)
    assert interval(better, worse, rng) == pytest.approx((0.1, 0.1))
    low, high = interval(worse, None, rng)
    assert low < f1_named(worse) < high


@pytest.mark.parametrize("name", ARMS)
def test_the_configuration_of_every_arm_is_sound(name, tmp_path):
    conf = tmp_path / "conf" / "objective" / f"{name}.yaml"
    conf.parent.mkdir(parents=True)
    text = yaml.safe_dump(pipeline(ARMS[name]))
    conf.write_text("# @package rollout_matching.pipeline\n" + text)
    search = f"hydra.searchpath=[{tmp_path / 'conf'}]"
    overrides = as_schema_overrides(list(ARMS[name].overrides))
    arguments = ["+experiment=crowded_on", search, f"objective={name}", *overrides]
    with initialize_config_dir(str(evidence.ROOT / "conf"), version_base="1.3"):
        config = load_config(as_mapping(compose("train", overrides=arguments)))
    learned = [entry.name for entry in config.rollout_matching.pipeline.objective if entry.weight]
    assert ("policy_gradient" in learned) == ARMS[name].rewards
    assert ("coord_reg" in learned) == ARMS[name].targets


def test_results_become_a_table_with_the_difference_from_supervision(tmp_path, monkeypatch):
    monkeypatch.setattr(evidence, "RESULTS", tmp_path)
    for arm, named in (("sft", 5), ("b_50", 6)):
        for seed in (1, 2):
            facts = {
                "arm": arm,
                "seed": seed,
                "start": "same",
                "updates": 60,
                "wall_s": 100.0,
                "ap": 0.4,
                "ap50": 0.7,
                "valid_object_rate": 1.0,
                "num_truncated": 0,
                "pictures": [[10, 10, 8, named, 7, 4, 1]] * 4,
            }
            (tmp_path / f"{arm}_{seed}.json").write_text(json.dumps(facts))
    header, _, sft, mixed = evidence.table(tmp_path)
    assert header.startswith("| arm | seeds | updates |")
    below = "-0.100 (-0.100 to -0.100)"
    assert (
        f"| **0.500** | 0.500 to 0.500 | - | {below} | 0.800 | 0.400 | 0.400 | 0.700 | 0.00 |"
        in sft
    )
    assert "| **0.600** | 0.600 to 0.600 | +0.100 (+0.100 to +0.100) | - |" in mixed

    facts = json.loads((tmp_path / "sft_1.json").read_text())
    (tmp_path / "sft_1.json").write_text(json.dumps(facts | {"start": "another"}))
    with pytest.raises(SystemExit, match="results of 2 starts"):
        evidence.table(tmp_path)
