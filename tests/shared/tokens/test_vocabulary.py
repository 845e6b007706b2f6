import pytest

from shared.tokens.vocabulary import COORD_TOKENS, NUM_BINS, coord_token, parse_coord_token


def test_there_is_one_coord_token_for_each_of_1000_bins() -> None:
    assert NUM_BINS == len(set(COORD_TOKENS)) == 1000
    assert [parse_coord_token(token) for token in COORD_TOKENS] == list(range(1000))
    assert coord_token(7) == "<|coord_7|>"


@pytest.mark.parametrize("bin", [-1, 1000])
def test_a_bin_outside_the_range_has_no_token(bin: int) -> None:
    with pytest.raises(ValueError, match=r"0\.\.999"):
        coord_token(bin)


@pytest.mark.parametrize("bin", ["1000", "07", "", "７"])
def test_only_exact_coord_tokens_are_read(bin: str) -> None:
    assert parse_coord_token(f"<|coord_{bin}|>") is None


@pytest.mark.parametrize("text", [" <|coord_7|>", "<|coord_7|>\n", "7", ""])
def test_only_a_coord_token_alone_is_read(text: str) -> None:
    assert parse_coord_token(text) is None
