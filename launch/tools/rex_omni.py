"""Writes the `tokenizer.json` that a Rex-Omni checkpoint needs and does not come with.

    rollmatch rex-omni model=models/Rex-Omni

Rex-Omni has the last 1,000 tokens of Qwen's vocabulary renamed to `<0>` to `<999>`, and its
checkpoint says so in `tokenizer_config.json` alone. The tokenizers of transformers 5, and with them
vLLM's, do not rename a token of the vocabulary for it: they give `<0>` another id and move every
token behind it, without a word. The file written here has them renamed in the vocabulary itself.
Nothing else in the folder changes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from launch.cli import explained, read_arguments
from launch.run_folder.console import escaped, make_console
from learner.model.checkpoint_folder import checkpoint_problems
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError

FILE = "tokenizer.json"
SOURCES = ("vocab.json", "merges.txt", "tokenizer_config.json")


class RexOmniOptions(Section):
    model: Annotated[ConfigPath, Field(examples=["/models/Rex-Omni"])]
    """Folder of the checkpoint, which gets the file."""


def write_tokenizer(folder: Path) -> str:
    """Write the file and return a line about it.

    Raises:
        ConfigError: there is one, a file that it is made of is missing or damaged, or the tokenizer
            that is read back gives a token another id than `tokenizer_config.json` does.
    """
    remedy = "give the folder of a downloaded Rex-Omni checkpoint"
    problems = list(checkpoint_problems(folder, key="model", remedy=remedy))
    if not problems and (folder / FILE).exists():
        problems = [f"model: {folder} has a {FILE} already; use it as model.path"]
    absent = [name for name in SOURCES if not (folder / name).is_file()]
    if not problems and absent:
        problems = [f"model: {folder} has no {' and no '.join(absent)}; {remedy}"]
    if problems:
        raise ConfigError(problems)
    try:
        vocabulary = json.loads((folder / "vocab.json").read_text())
        lines = (folder / "merges.txt").read_text().splitlines()
        merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#v")]
        config = json.loads((folder / "tokenizer_config.json").read_text())
        added = {int(token_id): token for token_id, token in config["added_tokens_decoder"].items()}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        problem = f"model: the tokenizer of {folder} cannot be read ({error!r}); {remedy}"
        raise ConfigError(problem) from error
    from transformers import AutoTokenizer, Qwen2Tokenizer  # takes seconds

    renamed = {token for token, token_id in vocabulary.items() if token_id in added}
    vocabulary = {
        added[token_id]["content"] if token_id in added else token: token_id
        for token, token_id in vocabulary.items()
    }
    # Text that was written in a renamed token is written in its parts.
    kept = [pair for pair in merges if not renamed & {*pair, "".join(pair)}]
    whole = Qwen2Tokenizer(vocab=vocabulary, merges=kept).backend_tokenizer.to_str()
    content: dict[str, Any] = json.loads(whole)
    content["added_tokens"] = [{"id": one, **added[one]} for one in sorted(added)]
    (folder / FILE).write_text(json.dumps(content, ensure_ascii=False))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    moved = [
        token["content"]
        for token_id, token in added.items()
        if tokenizer.convert_tokens_to_ids(token["content"]) != token_id
    ]
    if moved:
        (folder / FILE).unlink()
        raise ConfigError(
            f"model: {folder} cannot have a {FILE} in which {moved[0]} and"
            f" {len(moved) - 1} others keep their ids; {remedy}"
        )
    return f"saved     {folder / FILE}: {len(renamed):,} tokens of the vocabulary renamed"


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        given = sys.argv[1:] if arguments is None else arguments
        print(escaped(write_tokenizer(read_arguments(RexOmniOptions, given).model)))


if __name__ == "__main__":
    main()
