"""A checkpoint's folder: checks that it is valid, and the small files that every save copies.

This module does not import torch or transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from shared.errors import ConfigError
from shared.model_families import IN_OTHER_FORMS

_ANOTHER_MODEL = (
    "set model.path to a folder that save_pretrained wrote, or make a small one: `rollmatch demo"
    " model` (outputs/demo/model), `rollmatch demo language-model` (outputs/demo/lm)"
)
_JSON_OBJECTS = ("config.json", "generation_config.json", "tokenizer_config.json")


def open_as_folder(*files: Path) -> None:
    """Give files that were just written the read and write permissions of their folder.

    Packages that write to a temporary name first (safetensors, tempfile) permit access only to the
    owner, whatever the umask is.
    """
    for file in files:
        file.chmod(file.parent.stat().st_mode & 0o666)


def checkpoint_problems(
    folder: Path, *, key: str = "model.path", remedy: str = _ANOTHER_MODEL
) -> tuple[str, ...]:
    """Return the reasons why `folder` is not a valid checkpoint; empty if it is one.

    `key` is the configuration key that names the folder. Each reason begins with this key. `remedy`
    says how to get a valid checkpoint, if there is none at this path.
    """
    if (folder / "adapter_config.json").is_file():
        # transformers would load the base model named in it and ignore the folder's weights.
        problem = (
            f"{key}: {folder} holds an adapter (adapter_config.json); merge it into its base model"
            " and give that folder, or remove the file if the folder's weights are already merged"
        )
        return (problem,)
    if (folder / "config.json").is_file():
        text = (folder / "config.json").read_text(encoding="utf-8")
        # Checked before transformers asks on the terminal whether it may run the model's code.
        other_forms = tuple(
            f"{key}: {folder} is a {kind} model, which {form}"
            for kind, form in IN_OTHER_FORMS.items()
            if re.search(rf'"model_type": *"{kind}"', text)
        )
        return other_forms or tuple(
            f"{key}: {folder / name} is not a JSON object; download or copy it again"
            for name in _JSON_OBJECTS
            if (folder / name).is_file() and not _is_json_object(folder / name)
        )
    if (named := hub_id(folder)) is not None:
        repo, _, revision = named.partition("@")
        name = repo.partition("/")[2]
        at_revision = f" --revision {revision}" if revision else ""
        download = f".venv/bin/hf download {repo}{at_revision} --local-dir models/{name}"
        problem = (
            f"{key}: there is no folder {named}, and this command does not download models; if"
            f" {named} is a model of a hub, download it (`{download}`) and set"
            f" {key}=models/{name}, else {remedy}"
        )
        return (problem,)
    return (f"{key}: {folder} holds no checkpoint (no config.json); {remedy}",)


def no_chat_template(folder: Path, *, key: str = "model.path") -> str:
    """Return the message that the checkpoint in `folder` has no chat template."""
    return (
        f"{key}: {folder} has no chat template (no chat_template.jinja, and no chat_template in"
        " tokenizer_config.json), but prompts are made with it; choose the Instruct or chat"
        " version of the model, or copy that version's chat_template.jinja into the folder"
    )


def _is_json_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
    except ValueError:
        return False


def end_token_ids(folder: Path, num_tokens: int, special_ids: Collection[int]) -> set[int]:
    """Return the token ids that end an answer, from `generation_config.json` and `config.json`.

    Each file may name one id or several (`"eos_token_id": [2, 0]`). If an engine ignored one of
    them, it would continue sampling, and the learner would train on the surplus text. Stock engines
    read `config.json` only if `generation_config.json` names no id, and so does this function. If
    both name ids, the ids of `config.json` count only if they are control tokens: that file may
    contain the default id of the model family, which can be an ordinary word of this tokenizer.

    Args:
        num_tokens: size of the vocabulary; every id is below it.
        special_ids: ids of the tokenizer's control tokens.

    Raises:
        ConfigError: a value is not a token id of the vocabulary.
    """
    named = _eos_ids(folder / "generation_config.json")
    file = folder / ("generation_config.json" if named else "config.json")
    others = _eos_ids(folder / "config.json")
    for value in named or others:
        if type(value) is not int or not 0 <= value < num_tokens:
            raise ConfigError(
                f"model.path: {file} has eos_token_id {value!r}, which is not an id of its"
                f" tokenizer of {num_tokens} tokens; correct the file"
            )
    return {*(named or others), *(value for value in others if value in special_ids)}


def _eos_ids(file: Path) -> list[Any]:
    """Return all values of `eos_token_id` in a JSON file, also in its section `text_config`.

    The list is empty if the file is missing.
    """
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found: list[Any] = []
    for section in (content, content.get("text_config") or {}):
        named = section.get("eos_token_id")
        found += named if isinstance(named, list) else [] if named is None else [named]
    return found


def hub_id(folder: Path) -> str | None:
    """Return `OWNER/NAME` or `OWNER/NAME@REVISION` if `folder` is the id of a model on the hub.

    Return None if it is a path.
    """
    below = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    # If a folder OWNER exists, the path probably means a folder.
    is_hub_id = (
        not below.is_absolute()
        and len(below.parts) == 2
        and ".." not in below.parts
        and not folder.parent.exists()
    )
    return below.as_posix() if is_hub_id else None


CONFIG = "config.json"
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "processor_config.json",
    "*preprocessor_config.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*.py",
)


@dataclass(frozen=True, slots=True)
class BaseFiles:
    """The configuration, tokenizer and processor files of a run's initial checkpoint, read once.

    Every save writes them as they were read, even if the folder has changed since. The functions of
    transformers that save such files are not used.
    """

    config_text: str
    """The text of `config.json`, which is valid JSON."""
    files: Mapping[str, bytes]
    """The files of tokenizer, processor and generation, by their path in the folder."""

    @classmethod
    def read(cls, folder: Path) -> BaseFiles:
        """Read the small files of the checkpoint in `folder`.

        Raises OSError, and ValueError if `config.json` is not JSON.
        """
        paths = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
        names = sorted(path.relative_to(folder).as_posix() for path in paths if path.is_file())
        copied = [name for name in names if any(fnmatch(name, one) for one in _COPIED)]
        text = (folder / CONFIG).read_text(encoding="utf-8")
        json.loads(text)
        return cls(text, {name: (folder / name).read_bytes() for name in copied})

    def write(
        self, folder: Path, *, dtype: str, has_head: bool, text_config: Mapping[str, Any]
    ) -> None:
        """Write all files into `folder`, unchanged except for some keys of `config.json`.

        Args:
            dtype: number type of the weights.
            has_head: whether the weights contain a head, which is then not tied to the embedding.
            text_config: values to set in the language model's section.

        Raises OSError.
        """
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        before = json.loads(self.config_text)
        untied = {"tie_word_embeddings": False} if has_head else {}
        values = {"dtype": dtype, "torch_dtype": dtype, **untied, **text_config}
        config = {**_with_values(before, values), **untied}
        if not {"dtype", "torch_dtype"} & config.keys():
            config["dtype"] = dtype
        section = config.get("text_config", config)
        section |= {**text_config, **_older_rope(section)}
        text = self.config_text
        if config != before:
            text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (folder / CONFIG).write_text(text, encoding="utf-8")


def _with_values(section: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section of config.json with new values for its existing keys, recursively."""
    return {
        key: _with_values(value, values)
        if key.endswith("_config") and isinstance(value, dict)
        else values.get(key, value)
        for key, value in section.items()
    }


def _older_rope(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys from which transformers 4 reads the rotary embedding's parameters."""
    # It ignores `rope_parameters` and silently uses a base of 10,000.
    rope = section.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    older = {"rope_theta": rope["rope_theta"]}
    return older if scaling == {"rope_type": "default"} else {**older, "rope_scaling": scaling}


_LISTED = 5


def weight_problems(
    folder: Path,
    key: str,
    missing: Sequence[str],
    surplus: Sequence[str],
    shapes: Sequence[tuple[str, Sequence[int], Sequence[int]]],
) -> Iterator[str]:
    """Yield messages about tensors that differ between a checkpoint's files and its model.

    Args:
        key: the configuration key that names `folder`.
        missing: tensors that only the model has.
        surplus: tensors that only the files have.
        shapes: name, shape in the files and shape in the model of tensors whose shapes differ.
    """
    unmerged = [name for name in surplus if _UNMERGED.search(name)]
    if missing:
        also = f", and hold {listed(surplus)} that the model does not have" if surplus else ""
        yield (
            f"{key}: the files of {folder} lack {listed(missing)} of the model{also}; the missing"
            f" tensors would be random numbers. {_COMPLETE}"
        )
    elif unmerged:
        yield (
            f"{key}: the files of {folder} hold {listed(unmerged)} of an adapter that is not"
            " merged and would be ignored; merge it (peft's merge_and_unload) and save again"
        )
    if shapes:
        name, has, needed = shapes[0]
        yield (
            f"{key}: the files of {folder} hold {listed([one[0] for one in shapes])} in another"
            f" shape than config.json describes ({name}: {list(has)} in the files, {list(needed)}"
            " in the model); use config.json and weights of the same model"
        )


_UNMERGED = re.compile(r"\.lora_|\.base_layer\.|\.modules_to_save\.|\.trainable_tokens_")
_COMPLETE = (
    "Give a complete checkpoint with the config.json of its weights: an adapter merged (peft's"
    " merge_and_unload), names without a wrapper's prefix, and tie_word_embeddings: true if the"
    " model's head is its embedding"
)


def listed(names: Sequence[str]) -> str:
    """Describe a list of tensors by number and first names: `1 tensor (lm_head.weight)`."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} tensor{plural} ({', '.join(names[:_LISTED])}{more})"
