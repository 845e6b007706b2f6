"""Every malformed rollout is data, shown in the run folder (issue 3, "Bad input"; spec: parse
failures are visible without crashing).
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_support import configuration
from edited_lines import append_edited
from rollout_support import make_rollout
from transformers import AutoTokenizer

from learner.algorithms.matched_targets import ground_truth_target, parsed_target, rollout_target
from learner.rollout_logs.samples import read_step, sample_record
from learner.rollout_logs.writer import StepLog, step_path
from learner.targets import TextWeights, TokenRole, target_settings
from shared.config.pipeline import Channel
from shared.errors import RecordError, StorageError
from shared.grounding.objects import DropReason
from shared.grounding.parsing import parse_rollout
from shared.records import GeometryKind, GroundTruthObject, Sample
from shared.rollouts import FinishReason
from shared.schedule import StepPlan
from shared.tokens.hf_codec import HFTokenCodec

SETTINGS = replace(
    target_settings(configuration(Path("model"), Path("data"), Path("run"))),
    geometry=frozenset({GeometryKind.BBOX}),
)
SEVEN = GroundTruthObject(GeometryKind.BBOX, (100, 100, 300, 300), "seven")
TWO = GroundTruthObject(GeometryKind.BBOX, (500, 500, 800, 900), "two")
SAMPLE = Sample("scene", (), 96, 96, (SEVEN, TWO))
WEIGHTS = TextWeights(desc=0.1, matched_structure=0.25)


@pytest.fixture(scope="module")
def codec(demo_checkpoint):
    return HFTokenCodec(AutoTokenizer.from_pretrained(demo_checkpoint))


def rollout_of(token_ids):
    return make_rollout(
        token_ids,
        step=7,
        position=3,
        prompt_token_ids=(1, 2, 3),
        finish_reason=FinishReason.LENGTH,
        forced_positions=(4,),
        weight_version=5,
        actor="actor-1",
        attempt=1,
        seed=99,
        generate_s=0.25,
    )


def box(*bins):
    return "[" + ", ".join(f'"<|coord_{b}|>"' for b in bins) + "]"


def entry(number, desc, bins, key="bbox_2d"):
    return f'"object_{number}": {{"desc": "{desc}", "{key}": {box(*bins)}}}'


def record(codec, target, rollout=None, position=0, step=7):
    plan = StepPlan(step - 1, Channel.A if rollout is None else Channel.B, 2, 0, False, False)
    weights_L = WEIGHTS.of(target)
    return sample_record(plan, position, SAMPLE, target, weights_L, codec, rollout=rollout)


def logged(folder, codec, cases, rank=0):
    """The lines of (rollout, target) pairs, in order, as the file has them."""
    log = StepLog(folder, rank=rank)
    log.begin(7)
    for position, (rollout, target) in enumerate(cases):
        log.write(record(codec, target, rollout, position))
    log.close()
    return read_step(step_path(folder, 7))


def logged_response(folder, codec, text):
    rollout = rollout_of(codec.encode(text))
    target = rollout_target(rollout, SAMPLE, codec, SETTINGS)
    (line,) = logged(folder, codec, [(rollout, target)])
    return line, rollout, target


FOUND = "{" + entry(1, "seven", SEVEN.bins) + "}"


@pytest.fixture
def truth(codec):
    return ground_truth_target(SAMPLE, codec, SETTINGS)


@pytest.mark.slow
def test_a_line_says_what_the_engine_answered_and_what_became_of_it(tmp_path, codec):
    entries = (
        entry(1, "six", (110, 90, 310, 290)),
        entry(4, "nine", (0, 0, 9, 9)),
        entry(5, "two", (1, 2, 3)),
    )
    kept = "{" + ", ".join(entries)
    line, rollout, target = logged_response(tmp_path, codec, kept + ', "object_6": {"de')
    reading, token_ids = line["reading"], line["target"]["token_ids"]
    found, num_kept = reading["objects"], reading["num_kept"]
    assert (line["step"], line["position"], line["channel"]) == (7, 0, "B")
    assert line["sample_id"] == "scene"
    assert line["ground_truth"] == [
        {"kind": "bbox_2d", "bins": [100, 100, 300, 300], "desc": "seven"},
        {"kind": "bbox_2d", "bins": [500, 500, 800, 900], "desc": "two"},
    ]
    assert line["rollout"] == {
        "weight_version": 5,
        "actor": "actor-1",
        "seed": 99,
        "attempt": 1,
        "finish_reason": "length",
        "num_prompt_tokens": 3,
        "response_token_ids": list(rollout.response_token_ids),
        "forced_positions": [4],
        "text": kept + ', "object_6": {"de',
    }
    prefix = b"".join(map(codec.piece_bytes, token_ids[: reading["num_prefix"]])).decode()
    assert prefix == kept[:-1], "`},` holds appended text"
    assert token_ids[:num_kept] == list(rollout.response_token_ids[:num_kept])
    assert [(one["key"], one["kind"], one["desc"], one["bins"]) for one in found] == [
        ("object_1", "bbox_2d", "six", [110, 90, 310, 290]),
        ("object_4", "bbox_2d", "nine", [0, 0, 9, 9]),
    ]
    for one in found:
        assert [codec.coord_bin(token_ids[at]) for at in one["coord_positions"]] == one["bins"]
        assert all(one["span"][0] <= at < one["span"][1] for at in one["coord_positions"])
    (pair,) = reading.pop("pairs")
    iou = target.reading.match.pairs[0].iou
    assert pair == {"prediction": 0, "ground_truth": 0, "supervised": True, "iou": iou}
    expected = {
        "prefix_text": kept,
        "num_kept_bytes": len(kept),
        "truncated": True,
        "fallback": False,
        "max_object_index": 5,
        "dropped": [{"key": "object_5", "reason": "wrong_arity"}],
        "excluded": [],
        "unmatched_predictions": [1],
        "appended": [1],
        "gating_rejections": target.reading.match.gating_rejections,
        "appended_text": ", " + entry(6, "two", TWO.bins) + "}",
    }
    assert {name: reading[name] for name in expected} == expected


def test_the_supervised_spans_cover_the_target_and_give_back_every_role_and_weight(tmp_path, codec):
    text = "{" + entry(1, "seven", SEVEN.bins) + ", " + entry(2, "x", (0, 0, 5, 5)) + "}"
    line, _, target = logged_response(tmp_path, codec, text)
    roles, weights = [], []
    for start, stop, role, weight in line["target"]["supervision"]:
        assert start == len(roles) < stop
        roles += [TokenRole[role.upper()]] * (stop - start)
        weights += [weight] * (stop - start)
    assert roles == target.roles.tolist()
    assert set(roles) == {role for role in TokenRole if role <= TokenRole.CLOSING}
    assert np.array_equal(np.array(weights, np.float32), WEIGHTS.of(target))
    assert 0.1 in weights  # not 0.10000000149011612
    assert line["target"]["coord_positions"] == list(target.coord_positions)
    assert line["target"]["coord_targets"] == [*SEVEN.bins, *TWO.bins]


def test_what_was_trimmed_and_which_name_is_taught_are_in_the_line(tmp_path, codec):
    options = replace(SETTINGS, trims_false_positives=True, corrects_names=True)
    false = (
        entry(2, "x", (0, 0, 5, 5)),
        '"object_3": {"desc": "two"}',
        entry(4, "y", (1, 1, 5, 5)),
    )
    text = "{" + ", ".join([entry(1, "eight", SEVEN.bins), *false]) + "}"
    rollout = rollout_of(codec.encode(text))
    target = rollout_target(rollout, SAMPLE, codec, options)
    (line,) = logged(tmp_path, codec, [(rollout, target)])
    reading = line["reading"]
    kept = "{" + entry(1, "eight", SEVEN.bins)
    # The objects are those of the whole answer; what was kept is less.
    assert [one["desc"] for one in reading["objects"]] == ["eight", "x", "y"]
    assert (reading["trimmed"], reading["num_trimmed_dropped"]) == ([1, 2], 1)
    assert (reading["prefix_text"], reading["num_kept_bytes"]) == (kept, len(kept))
    assert (reading["max_object_index"], reading["fallback"]) == (1, False)
    (override,) = line["target"]["label_overrides"]
    (own,) = target.label_overrides
    assert override == {"position": own.position, "token_id": own.token_id, "prediction": 0}
    taught = (own.position, own.position + 1, "corrected_desc", 0.0)
    assert taught in line["target"]["supervision"]
    # Without options, a line is that of earlier versions.
    line, _, _ = logged_response(tmp_path / "plain", codec, text)
    assert not {"trimmed", "num_trimmed_dropped"} & set(line["reading"])
    assert "label_overrides" not in line["target"]


def test_a_matched_object_that_cannot_be_supervised_is_named(tmp_path, codec):
    rollout = rollout_of(codec.encode(FOUND))
    parsed = parse_rollout(rollout.response_token_ids, codec)
    (found,) = parsed.objects
    turned = replace(found, coord_positions=found.coord_positions[::-1])
    target = parsed_target(replace(parsed, objects=(turned,)), SAMPLE, codec, SETTINGS)
    (line,) = logged(tmp_path, codec, [(rollout, target)])
    assert line["reading"]["excluded"] == [0]
    assert [pair["supervised"] for pair in line["reading"]["pairs"]] == [False]
    assert line["reading"]["appended"] == [0, 1]


DROPPED = {
    DropReason.MALFORMED: '{"desc": "a" "bbox_2d": ' + box(1, 1, 2, 2) + "}",
    DropReason.KEY_INVALID: '{"desc": "a", "label": "b", "bbox_2d": ' + box(1, 1, 2, 2) + "}",
    DropReason.UNKNOWN_GEOM: '{"desc": "a", "circle": ' + box(1, 1, 2, 2) + "}",
    DropReason.MISSING_DESC: '{"bbox_2d": ' + box(1, 1, 2, 2) + "}",
    DropReason.MISSING_GEOM: '{"desc": "a"}',
    DropReason.NON_COORD_TOKEN: '{"desc": "a", "bbox_2d": [1, 2, 3, 4]}',
    DropReason.WRONG_ARITY: '{"desc": "a", "bbox_2d": ' + box(1, 1, 2) + "}",
    DropReason.BBOX_INVALID: '{"desc": "a", "bbox_2d": ' + box(5, 1, 2, 2) + "}",
    DropReason.POLY_UNSUPPORTED: '{"desc": "a", "poly": ' + box(1, 1, 9, 1, 9, 9) + "}",
}


def test_parse_failures_are_visible_without_crashing(tmp_path, codec):
    entries = (f'"object_{n}": {value}' for n, value in enumerate(DROPPED.values(), 1))
    line, _, _ = logged_response(tmp_path / "reasons", codec, "{" + ", ".join(entries) + "}")
    assert set(DROPPED) == set(DropReason)
    assert [dropped["reason"] for dropped in line["reading"]["dropped"]] == list(DROPPED)
    assert line["reading"]["objects"] == []
    assert line["reading"]["appended"] == [0, 1]

    line, _, _ = logged_response(tmp_path / "prose", codec, "I see a seven.")
    assert (line["reading"]["fallback"], line["reading"]["prefix_text"]) == (True, "{")
    assert line["rollout"]["text"] == "I see a seven."


@pytest.mark.slow
def test_random_and_mutated_token_sequences_are_all_written(tmp_path, codec):
    rng = np.random.default_rng(5)
    text = "{" + entry(1, "sevän 猫", SEVEN.bins) + ", " + entry(2, "two", TWO.bins) + "}"
    sound = np.array(codec.encode(text))
    size = len(sound)
    vocabulary = codec.eos_token_id + 1200  # beyond the vocabulary too: embeddings are often padded
    cases = []
    for _ in range(150):
        random = rng.integers(0, vocabulary, int(rng.integers(0, 40)))
        mutated = np.where(rng.random(size) < 0.05, rng.integers(0, vocabulary, size), sound)
        for token_ids in (random, mutated[: int(rng.integers(1, size + 1))]):
            rollout = rollout_of(token_ids.tolist())
            cases.append((rollout, rollout_target(rollout, SAMPLE, codec, SETTINGS)))
    lines = logged(tmp_path, codec, cases)
    assert [line["position"] for line in lines] == list(range(300))
    for line, (rollout, target) in zip(lines, cases, strict=True):
        assert line["rollout"]["response_token_ids"] == list(rollout.response_token_ids)
        assert line["target"]["token_ids"] == list(target.token_ids)
        assert line["reading"]["prefix_text"] == target.reading.parsed.prefix_text
    assert sum(bool(line["reading"]["dropped"]) for line in lines) > 10
    assert sum("\ufffd" in line["rollout"]["text"] for line in lines) > 10


def test_what_was_written_is_there_before_the_step_ends_and_half_a_line_is_none(
    tmp_path, codec, truth
):
    log = StepLog(tmp_path / "rollouts")
    log.begin(2)
    log.write(record(codec, truth))
    path = step_path(tmp_path / "rollouts", 2)
    assert path.name == "step_000002.jsonl"
    assert len(read_step(path)) == 1
    log.begin(3)
    log.close()
    path.write_bytes(path.read_bytes() + b'{"step": 2, "posi')
    assert len(read_step(path)) == 1


def test_the_files_of_several_ranks_are_read_as_one_step_in_rank_order(tmp_path, codec, truth):
    for rank in (10, 2, 0, 1):
        log = StepLog(tmp_path, rank=rank)
        for step in (7, 8):
            log.begin(step)
            for position in (2 * rank, 2 * rank + 1):
                log.write(record(codec, truth, position=position, step=step))
        log.close()
    assert (tmp_path / "step_000007.rank10.jsonl").exists()
    lines = read_step(step_path(tmp_path, 7))
    assert [line["position"] for line in lines] == [0, 1, 2, 3, 4, 5, 20, 21]
    assert {line["step"] for line in lines} == {7}


@pytest.mark.parametrize("text", ["no json\n", "[]\n", json.dumps({"step": 1}) + "\n"])
def test_a_file_that_is_no_rollout_log_is_refused_by_line(tmp_path, text):
    path = tmp_path / "step_000001.jsonl"
    path.write_text(text)
    message = r"step_000001\.jsonl:1: .*; do not edit a run's log: restore the file"
    with pytest.raises(RecordError, match=message):
        read_step(path)


@pytest.mark.parametrize(
    ("where", "value", "field"),
    [
        ("position", "0", "position"),
        ("channel", "C", "channel"),
        ("more", 1, "more"),
        ("rollout.text", 5, "rollout.text"),
        ("rollout.response_token_ids", "12", "rollout.response_token_ids"),
        ("ground_truth.1.kind", "circle", "ground_truth[1].kind"),
        ("reading.objects.0", {"key": "object_1"}, "reading.objects[0].kind"),
        ("reading.objects.0.bins.2", 1000, "reading.objects[0].bins[2]"),
        ("reading.pairs.0.iou", None, "reading.pairs[0].iou"),
        ("reading.pairs.0.iou", float("nan"), "reading.pairs[0].iou"),
        ("target.token_ids", [], "target.token_ids"),
        ("target.supervision.0.2", "colour", "target.supervision[0][2]"),
    ],
)
def test_a_line_that_was_edited_is_refused_by_file_line_and_field(
    tmp_path, codec, where, value, field
):
    logged_response(tmp_path, codec, FOUND)
    path = step_path(tmp_path, 7)
    append_edited(path, where, value)
    message = rf"step_000007\.jsonl:2: {re.escape(field)}: .*; do not edit a run's log"
    with pytest.raises(RecordError, match=message):
        read_step(path)


def test_a_full_disk_is_an_error_with_the_path(tmp_path, codec, truth):
    log = StepLog(tmp_path)
    step_path(tmp_path, 1).symlink_to("/dev/full")
    log.begin(1)
    with pytest.raises(StorageError, match=r"step_000001\.jsonl.*No space left"):
        log.write(record(codec, truth))
    log.close()  # and raises no second time


def test_a_folder_that_cannot_be_made_and_a_file_that_cannot_be_opened_are_errors_with_the_path(
    tmp_path,
):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/rollouts"):
        StepLog(tmp_path / "file" / "rollouts")
    log = StepLog(tmp_path)
    step_path(tmp_path, 1).mkdir()
    with pytest.raises(StorageError, match=r"step_000001\.jsonl"):
        log.begin(1)
