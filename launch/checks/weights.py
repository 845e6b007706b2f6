"""Compares the tensors in a checkpoint's files with the tensors that its model needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from launch.checks.model_shape import read_headers, weight_files
from learner.model.checkpoint_folder import listed
from shared.errors import ConfigError
from shared.model_families import find_part

if TYPE_CHECKING:
    import torch


def weight_warnings(
    folder: Path, *, key: str = "model.path", for_engines: bool = False
) -> list[str]:
    """Return warnings about a checkpoint whose files hold all of its model's weights.

    The warnings are about tensors in the files that the model does not have, about a head that
    differs from the embedding although `config.json` ties the two, and about tokens without a row
    in the embedding.

    Raises:
        ConfigError: the errors of `load_complete`, or tensors of an unknown model type. With
            `for_engines`, also tensors that vLLM refuses, or a missing embedding.
    """
    from learner.model.weights import load_complete  # takes seconds

    names = read_headers(folder, key=key)
    with _quiet():
        model, surplus = load_complete(folder, key=key, device_map={"": "meta"})
    if not any(map(find_part, names)):
        raise ConfigError(
            f"{key}: {folder} holds {next(iter(names))}, which is not a tensor name of a"
            " supported model type; load the model in transformers and save it again with"
            " save_pretrained"
        )
    warnings = []
    if surplus:
        found = f"{key}: the files of {folder} hold {listed(surplus)} that its model does not have"
        if for_engines:
            raise ConfigError(
                f"{found}; vLLM does not start with such tensors. To remove them, load the model in"
                " transformers and save it again with save_pretrained"
            )
        warnings.append(f"{found}; they are ignored, and the run does not save them")
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    # On the meta device transformers does not tie two tensors that are both in the files.
    is_tied = "lm_head.weight" in model.get_expanded_tied_weights_keys(all_submodels=True)
    if for_engines and is_tied and not any(name.endswith("embed_tokens.weight") for name in names):
        raise ConfigError(
            f"{key}: the files of {folder} hold no embedding, only the head that is tied to it,"
            " which vLLM cannot read; load the model in transformers and save it again with"
            " save_pretrained"
        )
    if is_tied and head is not embedding and _differ(folder):
        warnings.append(
            f"{key}: config.json of {folder} ties the head to the embedding (tie_word_embeddings:"
            " true), but its files hold a different lm_head.weight. Learner and engines use this"
            " lm_head.weight, and saved checkpoints have tie_word_embeddings: false. If the"
            " embedding is meant, as transformers 4 reads such files, remove lm_head.weight from"
            " the files"
        )
    if beyond := _tokens_from(folder, len(embedding), key):
        warnings.append(
            f"{key}: the tokenizer of {folder} has {len(beyond)} tokens beyond the {len(embedding)}"
            f" rows of the embedding (first: {beyond[0]}); a prompt with one of them ends the run."
            " If you added them, resize the embedding too (resize_token_embeddings)"
        )
    return warnings


def _tokens_from(folder: Path, first_id: int, key: str) -> list[str]:
    """Return the added tokens of the tokenizer whose ids are `first_id` or larger."""
    file = folder / "tokenizer.json"
    try:
        written = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{key}: {file} is not JSON ({error}); fetch or copy it again") from error
    added = written.get("added_tokens", ())
    return [token["content"] for token in added if token["id"] >= first_id]


def _differ(folder: Path) -> bool:
    """Return whether the head and the embedding in the files differ."""
    import torch
    from safetensors import safe_open

    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                end = name.rpartition(".weight")[0].rpartition(".")[2]
                if end in ("lm_head", "embed_tokens"):
                    found[end] = file.get_tensor(name)
    return len(found) == 2 and not torch.equal(found["lm_head"], found["embed_tokens"])


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing progress bars, and tables of missing or surplus tensors."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    shows_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shows_bars:
            logging.enable_progress_bar()
