import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from launch.tools.demo.__main__ import main
from launch.tools.demo.crowded import Placed
from launch.tools.demo.crowded_model import NOTHING, TOKENS, dense_labels

SCAN = np.zeros((8, 8), dtype=np.uint8)


def test_a_token_is_labelled_with_the_digit_that_its_middle_lies_on():
    # Middles of tokens are at 8, 24, 40, ...
    six = Placed(SCAN, "six", left=16, top=32, size=32)
    labels = dense_labels([six, Placed(SCAN, "", left=64, top=64, size=16)])
    digit = labels.digit.reshape(TOKENS, TOKENS)
    assert {(int(y), int(x)) for y, x in np.argwhere(digit == 6)} == {
        (2, 1),
        (2, 2),
        (3, 1),
        (3, 2),
    }
    assert (digit == NOTHING).sum() == TOKENS * TOKENS - 4
    edges = labels.edges.reshape(TOKENS, TOKENS, 4)
    assert edges[2, 1] * 48 == pytest.approx([8, 8, 24, 24])
    assert edges[3, 2] * 48 == pytest.approx([24, 24, 8, 8])


def test_where_two_digits_overlap_a_token_is_of_the_nearer_one():
    left = Placed(SCAN, "one", left=0, top=0, size=32)
    right = Placed(SCAN, "two", left=16, top=0, size=48)
    for scene in ([left, right], [right, left]):
        digit = dense_labels(scene).digit.reshape(TOKENS, TOKENS)
        # Both lie on the middle (24, 8): 11 pixels from that of "one", 22 from that of "two".
        assert digit[0, :4].tolist() == [1, 1, 2, 2]


def test_the_tower_alone_is_taught_and_the_same_arguments_give_the_same_weights(tmp_path, capsys):
    def weights(name, steps):
        arguments = ["--out", str(tmp_path / name), "--tower-steps", str(steps)]
        main(["crowded-model", *arguments])
        return AutoModelForImageTextToText.from_pretrained(tmp_path / name).state_dict()

    random, taught, again = weights("random", 0), weights("taught", 2), weights("again", 2)
    assert "tower     2/2  names right under " in capsys.readouterr().out
    changed = {name for name in random if not torch.equal(random[name], taught[name])}
    assert changed
    assert all(name.startswith("model.visual.") for name in changed)
    assert all(torch.equal(taught[name], again[name]) for name in taught)
