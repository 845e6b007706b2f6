"""The file with the bearer token of a rollout server on this machine, readable only by its user.

The server writes it at its start and removes it at its end::

    ~/.cache/rollmatch/servers/HOST-127.0.0.1-8000.token
"""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from shared.config.rollout import is_loopback
from shared.errors import ConfigError


def token_folder() -> Path:
    """Return the path of this user's folder for the token files of rollout servers."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "rollmatch" / "servers"


def token_file(address: str, port: int) -> Path:
    """Return the path of the token file of a rollout server at this address.

    The file's name contains the host name, because machines may share a home folder.
    """
    return token_folder() / f"{socket.gethostname()}-{address}-{port}.token"


def write_token(file: Path) -> str:
    """Write a new bearer token to a file that only the user can read, and return the token.

    Raises ConfigError.
    """
    folder = file.parent
    remedy = "set XDG_CACHE_HOME to your own folder, or token_env to a variable with a token"
    token = secrets.token_urlsafe(32)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another user could have created it, or a link to another folder, to read the token.
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(f"token: {folder} is a link or belongs to another user; {remedy}")
        folder.chmod(0o700)
        # NamedTemporaryFile creates the file with mode 0600.
        with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as part:
            part.write(token)
        # Renamed when it is complete, so that clients read either the old or the new token.
        Path(part.name).replace(file)
    except OSError as error:
        raise ConfigError(f"token: cannot write {file} ({error.strerror}); {remedy}") from error
    return token


def remove_token(file: Path, token: str) -> None:
    """Delete the token file, unless it contains the token of a later server at this address."""
    with suppress(OSError):
        if file.read_text(encoding="ascii") == token:
            file.unlink()


def find_token(url: str) -> str | None:
    """Return the bearer token of this user's rollout server at this URL.

    Return None if no token file exists for it on this machine.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not is_loopback(host):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for address in ("127.0.0.1", "::1") if host == "localhost" else (host,):
        try:
            return token_file(address, port).read_text(encoding="ascii")
        except OSError:  # no file, or not readable by this user
            continue
    return None
