"""Downloads models of the Hugging Face hub once, then finds them in this machine's cache."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from learner.model.checkpoint_folder import hub_id
from shared.config.model import ModelSection
from shared.errors import ConfigError

FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
"""Files of a model that a run reads. The same weights in other formats are left out."""


def fetched_model(model: ModelSection, show: Callable[[str], None]) -> ModelSection:
    """Return the section with a local folder as `path`; the model of a hub id is downloaded.

    `path` is a hub id if it is `OWNER/NAME` or `OWNER/NAME@REVISION` and the working directory has
    no folder OWNER. `show` prints a console line. Raises the ConfigErrors of `fetch_model`.
    """
    named = hub_id(Path(model.path))
    return model if named is None else model.model_copy(update={"path": fetch_model(named, show)})


def fetch_model(named: str, show: Callable[[str], None], *, key: str = "model.path") -> str:
    """Return the folder of a model of the hub; download it if it is not in the cache.

    `named` is the model's id, the value of `key`. `show` prints a console line.

    Raises ConfigError if the model is unknown or needs a login, the hub cannot be reached, the disk
    has too little space, or the download fails.
    """
    # Imported here, because commands with a folder do not need it.
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    repo, _, revision = named.partition("@")
    files = list(FILES)
    try:
        folder = snapshot_download(
            repo, revision=revision or None, allow_patterns=files, local_files_only=True
        )
        if _is_whole(Path(folder)):
            show(f"model     {repo} at revision {Path(folder).name}, in {folder}")
            return folder
    except HFValidationError as error:
        raise ConfigError(
            f"{key}: there is no folder {named}, and it is not a valid id of a model of the hub"
            f" ({error}); correct it"
        ) from error
    except LocalEntryNotFoundError:
        pass
    cache = Path(constants.HF_HUB_CACHE)
    at_revision = f" --revision {revision}" if revision else ""
    by_hand = f"hf download {repo}{at_revision}"
    try:
        info = HfApi().model_info(repo, revision=revision or None, files_metadata=True)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise ConfigError(
            f"{key}: {named} is neither a folder here nor a model that the hub shows you"
            f" ({type(error).__name__}); correct it, or log in with `hf auth login` if it is"
            " private"
        ) from error
    except (HTTPError, OSError) as error:
        raise ConfigError(
            f"{key}: {named} is not a folder here, it is not complete in {cache}, and the hub"
            f" cannot be reached ({type(error).__name__}: {error}); fetch it with `{by_hand}` on a"
            f" machine with a network, and copy that cache here (HF_HOME), or set {key} to a folder"
        ) from error
    wanted = [one for one in info.siblings or () if any(fnmatch(one.rfilename, f) for f in files)]
    # An interrupted download is continued: its files are named after their content.
    blobs = cache / f"models--{repo.replace('/', '--')}" / "blobs"
    contents = [one.lfs.sha256 if one.lfs else one.blob_id for one in wanted]
    here = [path for content in set(contents) for path in blobs.glob(f"{content}*")]
    num_bytes = sum(one.size or 0 for one in wanted) - sum(path.stat().st_size for path in here)
    cache.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache).free
    facts = f"{num_bytes / 1e9:.2f} GB, {free / 1e9:.1f} GB free in {cache}"
    if num_bytes > free:
        raise ConfigError(
            f"{key}: {named} needs {facts}; free space, or set HF_HOME to a folder on a larger disk"
        )
    show(f"model     fetching {repo} at revision {info.sha}: {facts}")
    try:
        # Not by `info.sha`: offline, the cache could then not resolve the revision's name. On a
        # terminal the package shows bars of its own.
        began_s = time.monotonic()
        folder = snapshot_download(repo, revision=revision or None, allow_patterns=files)
        show(f"model     fetched in {time.monotonic() - began_s:.0f} s, to {folder}")
        return folder
    except GatedRepoError as error:
        raise ConfigError(
            f"{key}: {repo} has terms that you have to accept on its page first; then log in"
            " with `hf auth login`"
        ) from error
    except (HTTPError, OSError) as error:
        raise ConfigError(
            f"{key}: fetching {named} failed with {type(error).__name__}: {error}; give the"
            f" command again, which continues the download, or fetch it with `{by_hand}`"
        ) from error


def _is_whole(folder: Path) -> bool:
    """Return whether a cached model has all files that it needs.

    Another program may have downloaded only some of them.
    """
    weights = [path.name for path in folder.glob("*.safetensors")]
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weights = list(json.loads(index.read_text())["weight_map"].values())
    names = ("config.json", "tokenizer_config.json", *weights)
    return bool(weights) and all((folder / name).exists() for name in names)
