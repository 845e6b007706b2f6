"""Writes the `tokenizer.json` that Rex-Omni checkpoints need and lack.

    rollmatch rex-omni model=models/Rex-Omni

Rex-Omni renames the last 1,000 tokens of Qwen's vocabulary to `<0>` to `<999>`, but only in
`tokenizer_config.json`. The tokenizers of transformers 5, which vLLM also uses, do not rename
tokens of the vocabulary. Without an error, they give `<0>` another id and shift all tokens after
it. The written file has the new names in the vocabulary. No other file changes.
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
    """Folder of the checkpoint, to which the file is written."""


def write_tokenizer(folder: Path) -> str:
    """Write the corrected `tokenizer.json` into a checkpoint's folder; return a line about it.

    Raises ConfigError if the file exists, a source file is missing or damaged, or the written
    tokenizer has other ids than `tokenizer_config.json`.
    """
    remedy = "give the folder of a downloaded Rex-Omni checkpoint"
    problems = list(checkpoint_problems(folder, key="model", remedy=remedy))
    if not problems and (folder / FILE).exists():
        problems = [f"model: {folder} already has a {FILE}; use the folder as model.path"]
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
    # Text of a renamed token is encoded as its parts.
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
            f"model: the {FILE} of {folder} would change the ids of {moved[0]} and"
            f" {len(moved) - 1} other tokens, and is not written; {remedy}"
        )
    return f"saved     {folder / FILE}: {len(renamed):,} tokens of the vocabulary renamed"


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        given = sys.argv[1:] if arguments is None else arguments
        print(escaped(write_tokenizer(read_arguments(RexOmniOptions, given).model)))


if __name__ == "__main__":
    main()
