"""`key=value` arguments, read as a section."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from launch.cli import read_arguments
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError


class Options(Section):
    name: Annotated[str, Field(min_length=1)] | None = None
    title: str = "none"
    folder: ConfigPath | None = None
    count: int | None = 1
    sure: bool = False


@pytest.mark.parametrize("text", ["5", "true", "1e3", "[a", "a=b", " x ", "2026-11-21", "~"])
def test_text_and_paths_are_taken_as_they_are_written(text):
    options = read_arguments(Options, [f"name={text}", f"title={text}", f"folder={text}"])
    assert (options.name, options.title, options.folder) == (text, text, Path(text))


def test_null_is_nothing_where_nothing_is_allowed_and_a_word_elsewhere():
    options = read_arguments(Options, ["name=null", "title=null", "folder=null", "count=null"])
    assert (options.name, options.title, options.folder, options.count) == (
        None,
        "null",
        None,
        None,
    )


def test_other_values_are_yaml_scalars():
    options = read_arguments(Options, ["count=5", "sure=true"])
    assert (options.count, options.sure) == (5, True)
    with pytest.raises(ConfigError, match="count: must be an integer, got the text 'many'"):
        read_arguments(Options, ["count=many"])


def test_no_text_is_no_null():
    with pytest.raises(ConfigError, match="name: must not be empty"):
        read_arguments(Options, ["name="])
