"""The image files that a data file names: each is read and decoded once, and what was found is kept for the next start.

An image is known again by its path, size and times of change. Only sound images are kept: what is wrong with one is found, and told, by whoever loads its row.
`python -m learner.image_files` is one process of the pool: it answers every line of its input with one of its output.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import PIL
from PIL import Image

from shared.pictures import on_white
from shared.records import ImageFacts, image_facts

_LOGGER = logging.getLogger(__name__)

ALONE_S = 1.0
"""Decoding begins in this process, and what it finishes in this time is not kept: starting others, and a file, would cost as much."""
TOGETHER = 16
"""Images that a process is asked for at a time, so that it seldom waits to be asked."""
STALL_S = 120.0
"""Longest wait for the next images of the pool, whose rest is then left to this process."""
_FORMAT = ["2", PIL.__version__]
"""Version of the kept facts. Change it together with what `image_size` refuses, which Pillow has a part in."""

Report = Callable[[int, int], None]
"""A function of the number of images checked so far, and of all."""
Fingerprint = tuple[int, int, int]
"""Size in bytes, and when contents and inode last changed, in nanoseconds: whoever copies a file can set the first time, and not the second."""


def image_size(data: bytes) -> tuple[int, int]:
    """(width, height) in pixels of an encoded image, decoded to its end: a header tells nothing about a truncated file. ValueError with the reason."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return on_white(image).size
    except Exception as error:
        # All of them: on damaged files Pillow's decoders raise whatever their parsing runs into (OSError, SyntaxError, struct.error, EOFError, ...).
        raise ValueError(str(error) or type(error).__name__) from error


def known_images(data_file: Path, names: set[str], report: Report | None = None) -> dict[str, ImageFacts]:
    """Facts of the sound images among `names`, which are paths relative to `data_file` as its rows write them.

    They are decoded by as many processes as this one has processors, unless all are done within `ALONE_S` or have not changed since they were last
    decoded. `report` is called for every image after `ALONE_S`.
    """
    root, kept_in = data_file.parent, _kept_in(data_file)
    prints = {name: found for name in sorted(names) if (found := _fingerprint(root / name)) is not None}
    kept = _read(kept_in)
    known = {name: kept[name][1] for name, found in prints.items() if name in kept and kept[name][0] == found}
    left = [name for name in prints if name not in known]
    started_s = time.monotonic()
    while left and time.monotonic() - started_s < ALONE_S:
        name = left.pop()
        if (facts := image_facts(root / name, image_size)) is not None:
            known[name] = facts
    if not left:
        return known
    for done, (name, facts) in enumerate(_in_processes(root, left), len(prints) - len(left) + 1):
        if facts is not None:
            known[name] = facts
        if report is not None:
            report(done, len(prints))
    _write(kept_in, {name: (prints[name], facts) for name, facts in known.items()})
    return known


def _fingerprint(path: Path) -> Fingerprint | None:
    """None where there is no such file."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a path with a null character
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _in_processes(root: Path, names: list[str]) -> Iterator[tuple[str, ImageFacts | None]]:
    """Yield each name whose image a process has decoded, as they are done: fewer than `names` where a process ends or hangs over one."""
    waiting = iter(names)
    lock = threading.Lock()
    answers: queue.SimpleQueue[tuple[str, ImageFacts | None] | None] = queue.SimpleQueue()

    def ask(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as questions:
                while True:
                    with lock:
                        asked = list(islice(waiting, TOGETHER))
                    if not asked:
                        break
                    print(json.dumps([str(root / name) for name in asked]), file=questions, flush=True)
                    for name, found in zip(asked, json.loads(process.stdout.readline()), strict=True):
                        answers.put((name, None if found is None else ImageFacts(*found)))
        except (OSError, ValueError):  # the process has ended; what it was asked is asked again by whoever loads the row
            pass
        finally:
            answers.put(None)

    # They find the project where this process does. They end when their input does, also where this process is killed.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as ends:
        num_asking, num_answered = min(len(os.sched_getaffinity(0)), len(names)), 0
        for _ in range(num_asking):
            command = [sys.executable, "-m", "learner.image_files"]
            process = ends.enter_context(subprocess.Popen(command, env=environment, start_new_session=True, **pipes))
            thread = threading.Thread(target=ask, args=(process,), name="decode-images", daemon=True)
            ends.callback(thread.join)
            ends.callback(process.kill)
            thread.start()
        while num_asking:
            try:
                answer = answers.get(timeout=STALL_S)
            except queue.Empty:
                break
            if answer is None:
                num_asking -= 1
            else:
                num_answered += 1
                yield answer
        if num_answered < len(names):
            _LOGGER.warning("processes that decode images have ended or hung; %d images are decoded one by one", len(names) - num_answered)


def _kept_in(data_file: Path) -> Path:
    """Return the file that keeps the facts of a data file's images: one for each, so that none grows beyond its data."""
    home = Path("~").expanduser() if "HOME" in os.environ else Path(tempfile.gettempdir())
    folder = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return Path(folder) / "rollmatch/images" / f"{hashlib.sha256(str(data_file.absolute()).encode()).hexdigest()[:16]}.json"


def _read(path: Path) -> dict[str, tuple[Fingerprint, ImageFacts]]:
    """Read what is kept; empty where nothing can be read."""
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != _FORMAT:
            return {}
        return {name: ((size, mtime_ns, ctime_ns), ImageFacts(*facts)) for name, (size, mtime_ns, ctime_ns, *facts) in content["images"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _write(path: Path, images: Mapping[str, tuple[Fingerprint, ImageFacts]]) -> None:
    """Replace what is kept, at once: several processes may read and write it."""
    rows = {name: (*found, facts.sha256, facts.width, facts.height) for name, (found, facts) in images.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            json.dump({"format": _FORMAT, "images": rows}, file)
        Path(file.name).replace(path)
    except OSError as error:
        _LOGGER.warning("the next start decodes all images again: cannot write %s: %s", path, error.strerror)


def _main() -> None:
    for line in sys.stdin:
        found = [image_facts(Path(path), image_size) for path in json.loads(line)]
        print(json.dumps([facts and (facts.sha256, facts.width, facts.height) for facts in found]), flush=True)


if __name__ == "__main__":
    _main()
