"""Writes a checkpoint folder from a GGUF file, with the weights in floating point.

    rollmatch import-gguf file=models/SmolLM2.Q4_1.gguf out=models/SmolLM2

`transformers` reads the file with the package `gguf` (`pip install --no-deps gguf`). The folder has
the weights as the file's numbers give them; what quantization lost stays lost.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from launch.cli import explained, read_arguments
from launch.run_folder.console import escaped, make_console
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError

if TYPE_CHECKING:
    import torch

MAGIC = b"GGUF"
"""The first bytes of a GGUF file."""


class ImportGgufOptions(Section):
    file: Annotated[ConfigPath, Field(examples=["/models/SmolLM2-135M-Instruct.Q4_1.gguf"])]
    """The GGUF file."""
    out: Annotated[ConfigPath, Field(examples=["/models/SmolLM2-135M-Instruct"])]
    """Folder of the checkpoint, new or empty."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type in which weights are stored."""


def import_gguf(file: Path, out: Path, *, dtype: torch.dtype) -> str:
    """Write weights, configuration and tokenizer to the folder `out`; return a line about it.

    Raises ConfigError if `gguf` is missing, `file` is not a GGUF file, transformers cannot convert
    its architecture or its tokenizer, or its vocabulary has another size than the weights.
    """
    if find_spec("gguf") is None:
        raise ConfigError(
            "file: the package gguf, with which transformers reads GGUF files, is not installed;"
            " run `pip install --no-deps gguf==0.19.0`"
        )
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"file: {file} cannot be read ({error.strerror})") from error
    if magic != MAGIC:
        raise ConfigError(f"file: {file} is not a GGUF file: it begins with {magic!r}")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"out: {out} is not empty; choose another folder, or remove it")
    from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds
    from transformers.utils import logging

    logging.disable_progress_bar()
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"file: transformers cannot convert {file} ({error}); use the checkpoint from which it"
            " was made"
        ) from error
    rows = model.get_input_embeddings().num_embeddings
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    num_tokens = len(content["model"]["vocab"])
    if num_tokens > rows:
        raise ConfigError(
            f"file: {file} has {num_tokens:,} tokens but embeddings of {rows:,}; use the checkpoint"
            " from which it was made"
        )
    # The weights are no longer quantized. transformers would refuse to save them as such.
    model.hf_quantizer = None
    del model.config.quantization_config
    # transformers adds an `<|endoftext|>` to a vocabulary without one, after the last embedding.
    content["added_tokens"] = [one for one in content["added_tokens"] if one["id"] < rows]
    out.parent.mkdir(parents=True, exist_ok=True)
    # Renamed at the end, so that an interrupted call leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-unfinished-", dir=out.parent) as parent:
        folder = Path(parent) / out.name
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
        folder.rename(out)
    return (
        f"saved     {out}: {model.config.model_type}, {model.num_parameters():,} parameters in"
        f" {str(dtype).removeprefix('torch.')}, {num_tokens:,} tokens"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        options = read_arguments(ImportGgufOptions, arguments)
        import torch

        dtype = getattr(torch, options.dtype)
        print(escaped(import_gguf(options.file, options.out, dtype=dtype)))


if __name__ == "__main__":
    main()
