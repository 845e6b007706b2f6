"""Writes the page of one or more runs, or serves it.

    rollmatch view RUN [RUN ...] [step=N] [out=FILE] [port=N]

RUN is the folder of a run, which may still go on, or of a sweep: then the page has all its trials.
The page is one file, with curves, findings, faults, held-out reports, differences of the
configurations, and the newest rollouts; `step=N` has the rollouts of step N instead. With `port=N`
the page is served at http://127.0.0.1:N, where every step and sample of the runs can be opened, and
reloading shows new steps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import parse_qsl, urlsplit

from pydantic import Field, NonNegativeInt, PositiveInt

from launch.cli import EXPLAINED, explained, read_arguments, read_words
from launch.run_folder.console import escaped, make_console
from launch.run_folder.saved_run import load_run
from shared.config.base import ConfigPath, Section
from shared.errors import ConfigError

if TYPE_CHECKING:
    from shared.config import RunConfig

_HTML = "text/html; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"


class ViewOptions(Section):
    step: PositiveInt | None = None
    """Step whose rollouts the page contains, from 1; null: the newest steps."""
    out: ConfigPath | None = None
    """HTML file to write; null: `report.html` in the folder, of several `compared.html` in the
    first."""
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port on this machine to serve the page at, instead of writing it."""


class Query(Section):
    """The query of a request for the rows of a step, or for a sample's page."""

    run: NonNegativeInt = 0
    """Number of the run on the page, from 0."""
    step: PositiveInt
    """Step, from 1."""
    position: NonNegativeInt = 0
    """Position of the sample in the step, from 0."""


def runs_of(paths: Sequence[Path]) -> dict[Path, RunConfig]:
    """Return the runs that the paths name, by folder; a sweep's folder stands for all its trials.

    Raises ConfigError if a folder holds no run.
    """
    runs: list[Path] = []
    for path in paths:
        trials = [file.parent for file in path.glob("trial_*/config.json")]
        # By number: trial_10 comes after trial_2.
        trials.sort(key=lambda trial: (len(trial.name), trial.name))
        runs += trials if trials and not (path / "config.json").exists() else [path]
    return {run: load_run(run) for run in runs}


def server_of(runs: Mapping[Path, RunConfig], port: int) -> ThreadingHTTPServer:
    """Return a server of the runs' page on loopback at `port`; 0: any free port.

    Raises ConfigError if the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A page of another origin must not read a run by a name that resolves to 127.0.0.1.
            if urlsplit(f"//{self.headers['Host']}").hostname not in ("127.0.0.1", "localhost"):
                self._send(HTTPStatus.FORBIDDEN, _TEXT, b"ask for 127.0.0.1 or localhost")
                return
            url = urlsplit(self.path)
            try:
                words = [f"{name}={value}" for name, value in parse_qsl(url.query)]
                self._send(HTTPStatus.OK, *_answer(runs, url.path, words))
            except EXPLAINED as error:
                text = str(error).encode(errors="replace")
                self._send(HTTPStatus.NOT_FOUND, _TEXT, text)

        def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *words: object) -> None:
            """Print nothing for each request."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ConfigError(
            f"port: {port} cannot be used ({error.strerror}); take another"
        ) from error


def _answer(runs: Mapping[Path, RunConfig], path: str, words: Sequence[str]) -> tuple[str, bytes]:
    """Return the content type and the content of a request's answer.

    `words`: the query as `key=value`. Raises OSError, ConfigError and RecordError.
    """
    from launch.inspect.show_sample import ShowOptions, show_sample
    from launch.reports.run_page import as_json, page, step_rows

    if path == "/":
        return _HTML, page(runs, Path.cwd(), served=True).encode()
    file = re.fullmatch(r"/(\d+)/(evaluations/\w+/(?:report\.html|pictures/[\w-]+\.png))", path)
    if file is not None and int(file[1]) < len(runs):
        kind = "image/png" if path.endswith(".png") else _HTML
        return kind, (list(runs)[int(file[1])] / file[2]).read_bytes()
    if path not in ("/rows", "/sample"):
        raise ConfigError(f"{path}: is not a page of this server; open /")
    query = read_arguments(Query, words)
    if query.run >= len(runs):
        raise ConfigError(f"run: is {query.run}, and the page has {len(runs)} runs, from 0")
    run = list(runs)[query.run]
    if path == "/rows":
        return "application/json", as_json(step_rows(run, query.step, runs[run])).encode()
    options = ShowOptions(run=run, step=query.step, position=query.position)
    return _HTML, show_sample(options).read_bytes()


def main(arguments: Sequence[str] | None = None) -> None:
    words = read_words(__doc__, arguments)
    from launch.reports.run_page import COMPARED, PAGE, write_page  # after `--help`

    with explained(make_console(stderr=True)):
        keys = tuple(f"{key}=" for key in ViewOptions.model_fields)
        options = read_arguments(ViewOptions, [word for word in words if word.startswith(keys)])
        paths = [Path(word) for word in words if not word.startswith(keys)]
        runs = runs_of(paths)
        if not paths:
            raise ConfigError("view: needs a run folder; write `rollmatch view RUN [RUN ...]`")
        if options.port is not None and (options.step is not None or options.out is not None):
            raise ConfigError("port: serves every step and writes no file; remove step and out")
        if options.port is None:
            path = options.out or paths[0] / (PAGE if len(paths) == 1 else COMPARED)
            write_page(runs, path, options.step)
            print(escaped(str(path)))
            return
        with server_of(runs, options.port) as server:
            print(f"http://127.0.0.1:{server.server_port}  (Ctrl-C ends it)", flush=True)
            server.serve_forever()


if __name__ == "__main__":
    main()
