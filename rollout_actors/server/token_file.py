"""The token file of a server on this machine, which only processes of its user can read.

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
    """Return the path of the user's folder for token files."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(cache) / "rollmatch" / "servers"


def token_file(address: str, port: int) -> Path:
    """Return the token file of a server. Its name has the host: machines may share a home."""
    return token_folder() / f"{socket.gethostname()}-{address}-{port}.token"


def write_token(file: Path) -> str:
    """Write a new token that only the user can read, and return it. Raises ConfigError."""
    folder = file.parent
    remedy = "set XDG_CACHE_HOME to your own folder, or token_env to a variable with a token"
    token = secrets.token_urlsafe(32)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another user could have created it, or a link to another folder, to read the token.
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            raise ConfigError(f"token: {folder} is a link or another user's; {remedy}")
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
    """Remove the file unless a later server at this address has written its own."""
    with suppress(OSError):
        if file.read_text(encoding="ascii") == token:
            file.unlink()


def find_token(url: str) -> str | None:
    """Return the token of the user's server at a URL of this machine, or None without a file."""
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
