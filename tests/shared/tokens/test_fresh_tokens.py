"""The record of fresh tokens in a checkpoint's folder."""

from __future__ import annotations

import pytest

from shared.errors import ConfigError
from shared.tokens.fresh import FILE, FreshTokens


def test_fresh_tokens_are_read_as_they_were_saved_and_there_may_be_none(tmp_path) -> None:
    assert FreshTokens.of(tmp_path) is None
    FreshTokens(0, 1).save(tmp_path)
    assert FreshTokens.of(tmp_path) == FreshTokens(0, 1)


@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        ('{"first_id": -1, "count": 1000}', "first_id: Input should be greater than or equal to 0"),
        ('{"first_id": 3, "count": 0}', "count: Input should be greater than 0"),
        ('{"first_id": "3", "count": 1}', "first_id: Input should be a valid integer"),
        ('{"first_id": 3.0, "count": 1}', "first_id: Input should be a valid integer"),
        ('{"first_id": true, "count": 1}', "first_id: Input should be a valid integer"),
        ('{"first_id": 3}', "count: Field required"),
        ('{"first_id": 3, "count": 1, "ids": []}', "ids: Unexpected"),
        ("3", "Input should be an object"),
    ],
)
def test_a_damaged_record_of_fresh_tokens_names_file_and_field(tmp_path, written, wrong) -> None:
    (tmp_path / FILE).write_text(written)
    with pytest.raises(ConfigError) as caught:
        FreshTokens.of(tmp_path)
    assert str(caught.value).startswith(f"model.path: {tmp_path}/{FILE} cannot be read ({wrong}")
