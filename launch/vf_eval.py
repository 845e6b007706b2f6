"""`vf-eval ENVIRONMENT -m MODEL [-b URL] [-n EXAMPLES] [-r ROLLOUTS] ...`: evaluate a model in an environment. `python -m launch.vf_eval` is the same.

Every finished rollout is written to `rollouts.jsonl` of the evaluation's folder at once; scores, the saved dataset and the pushed one are made of that file, so
that an evaluation that was resumed says what one that was not would have said.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tqdm.contrib.logging import logging_redirect_tqdm

from launch.command import EXPLAINED, end_on_signals, explained
from launch.eval_arguments import EvalOptions, read_options
from launch.eval_endpoint import checked_model, endpoint_of
from launch.eval_record import Evaluation, missing_places, new_folder, read_evaluation
from launch.eval_results import RolloutNotes, present, results_of, show_rollout
from launch.eval_summary import summary_tables
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.inputs import Examples
from rollout_actors.environments.loading import load_environment
from rollout_actors.environments.outputs import RESULTS
from rollout_actors.environments.results_file import NAME, FinishedRollout, ResultsFile, digest
from shared.errors import ConfigError, RecordError

Place = tuple[int, int]
"""The number of an example, and of a rollout among its."""


def main(arguments: Sequence[str] | None = None) -> None:
    console = Console(stderr=True, soft_wrap=True, emoji=False)
    with explained(console):
        options = read_options(sys.argv[1:] if arguments is None else arguments)
        _log(options.verbose)
        evaluation = Evaluation.of(options) if options.resume is None else read_evaluation(options.resume).resumed(options, options.resume)
        run = _Run(options, evaluation, _loaded(evaluation), console)
        with _kept(run), _cancelled_by_signals(), logging_redirect_tqdm():
            asyncio.run(run.evaluate())
        if status := run.report():
            sys.exit(status)


def _log(verbose: bool) -> None:
    """Warnings; verbose: what goes on, with the tracebacks of rollouts that fail, but not a line per request."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("rollout_actors").setLevel(logging.DEBUG if verbose else logging.WARNING)
    for name in ("httpx", "httpx2", "openai"):
        logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def _cancelled_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM cancel the rollouts, which clean up after themselves; `asyncio.run` raises KeyboardInterrupt then. A second one ends that too."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        end_on_signals()


@contextmanager
def _kept(run: _Run) -> Iterator[None]:
    """However it ends, what is there is said."""
    try:
        yield
    except (KeyboardInterrupt, *EXPLAINED):
        if run.folder is not None and run.finished:
            run.say(f"{len(run.finished)} finished rollouts are kept in {run.folder}; `vf-eval --resume {run.folder}` goes on")
        raise


def _loaded(evaluation: Evaluation) -> Environment:
    try:
        return load_environment(evaluation.environment, **evaluation.env_args)
    except (ConfigError, RecordError):
        raise
    except (ValueError, ImportError) as error:
        raise ConfigError(f"ENVIRONMENT: {error}") from error


class _Run:
    """One call of the command."""

    def __init__(self, options: EvalOptions, evaluation: Evaluation, environment: Environment, console: Console) -> None:
        self._options, self._evaluation, self._environment, self._console = options, evaluation, environment, console
        self._began_s, self._date = time.perf_counter(), datetime.now().astimezone().isoformat(timespec="seconds")
        self._num_examples = 0
        self.folder: Path | None = options.resume
        self.finished: dict[Place, FinishedRollout] = {}

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    async def evaluate(self) -> None:
        """Make what is missing. Raises ConfigError, RecordError, StorageError and UnreachableError; what is done by then is kept."""
        async with self._environment, AsyncExitStack() as stack:
            examples, names, digests = self._examples()
            client = None
            if self.folder is None:
                client = await self._client(stack)
                self.folder = new_folder(self._options.output, self._evaluation)
            with ResultsFile(self.folder) as file:
                self.finished = file.rollouts
                self._check(file, digests)
                self._evaluation.write(self.folder)
                by_example = self._environment.rubric.compares_rollouts
                places = missing_places(file.rollouts, names, self._evaluation.rollouts_per_example, by_example=by_example)
                if self._options.resume is not None:
                    total = len(names) * self._evaluation.rollouts_per_example
                    self.say(f"{total - len(places)} of {total} rollouts are there")
                if places:
                    # Where nothing is missing, the endpoint may be gone.
                    client = client or await self._client(stack)
                    notes = RolloutNotes(file, places, digests, self._evaluation.state_columns, self.say)
                    await self._generate(client, examples.select([example for example, _ in places]), notes)

    async def _client(self, stack: AsyncExitStack) -> Any:
        """Of the endpoint, which has answered; the evaluation's model is known then."""
        endpoint = endpoint_of(self._evaluation.base_url, self._evaluation.key_variable, os.environ)
        client = await stack.enter_async_context(endpoint.client())
        model = await checked_model(client, endpoint, self._evaluation.model, self._environment.message_type)
        self._evaluation = replace(self._evaluation, model=model)
        return client

    def _examples(self) -> tuple[Examples, list[str], list[str]]:
        """Those to evaluate on, the names that `generate` groups them by, and their rows' digests."""
        name = self._evaluation.environment
        try:
            examples = self._environment.get_eval_dataset(self._evaluation.num_examples)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
        rows = [(repr((row["task"], row["example_id"])), digest(row)) for row in examples]
        if not rows:
            raise ConfigError(f"{name}: its dataset to evaluate on is empty; give it rows (with -a, where its load_environment has an argument for them)")
        self._num_examples = len(rows)
        return examples, [row_name for row_name, _ in rows], [row_digest for _, row_digest in rows]

    def _check(self, file: ResultsFile, digests: Sequence[str]) -> None:
        """ConfigError where what is there is of other data."""
        if file.was_torn:
            self.say(f"the last line of {file.path} was cut off and is removed; its rollout is made again")
        for one in file.rollouts.values():
            if one.example < len(digests) and one.row != digests[one.example]:
                changed = f"example {one.example} (id {one.example_id!r}) is not what it was when it was rolled out"
                raise ConfigError(f"--resume: {changed}: the environment's data have changed; start a new evaluation without --resume")

    async def _generate(self, client: Any, inputs: Examples, notes: RolloutNotes) -> None:
        options, sampling = self._options, self._evaluation.sampling_args
        if self._environment.message_type == "completion" and sampling.get("logprobs") is True:
            sampling = {**sampling, "logprobs": 1}  # there it is their number
        try:
            await self._environment.generate(
                inputs,
                client,
                str(self._evaluation.model),
                sampling,
                max_concurrent=options.max_concurrent,
                max_concurrent_generation=options.max_concurrent_generation,
                max_concurrent_scoring=options.max_concurrent_scoring,
                interleave_scoring=options.interleave_scoring,
                on_rollout=notes.write,
            )
        except ExceptionGroup as group:
            raise _first(group) from group

    def report(self) -> int:
        """Show the scores; save and push where that is asked for. The exit status."""
        assert self.folder is not None, "it was evaluated"
        evaluation, wall_s = self._evaluation, time.perf_counter() - self._began_s
        # More may be there: of an evaluation that was larger.
        asked = [(example, rollout) for example in range(self._num_examples) for rollout in range(evaluation.rollouts_per_example)]
        rollouts = [self.finished[place] for place in asked]
        out = Console(soft_wrap=True, emoji=False)
        if self._options.verbose:
            show_rollout(rollouts[0], out)
        out.print(Text(f"{evaluation.environment}, {evaluation.model}", style="bold"))
        for table in summary_tables(rollouts, solved_at=self._options.solved_at, wall_s=wall_s):
            out.print(table, highlight=False)
        print(f"rollouts   {self.folder / NAME}")
        self._keep(rollouts, wall_s)
        failed = sum(one.error is not None for one in rollouts)
        if failed:
            self.say(f"{failed} of {len(rollouts)} rollouts failed; `vf-eval --resume {self.folder}` makes them again")
        return 1 if failed == len(rollouts) else 0

    def _keep(self, rollouts: Sequence[FinishedRollout], wall_s: float) -> None:
        """As a dataset: in the folder, and on the hub."""
        assert self.folder is not None, "as above"
        results = results_of(rollouts, self._evaluation, self._environment, wall_s=wall_s, date=self._date)
        columns = [path for path in self._evaluation.state_columns if present(path, results.state)]
        if len(columns) < len(self._evaluation.state_columns):
            self.say(f"-C: no rollout has {', '.join(sorted(set(self._evaluation.state_columns) - set(columns)))}; a dataset goes without")
        if self._options.save:
            results.save(self.folder, self._environment.make_dataset(results, state_columns=columns))
            print(f"dataset    {self.folder / RESULTS}")
        if self._options.push:
            name = self._options.dataset_name or f"{self._environment.name}-results"
            try:
                self._environment.make_dataset(results, state_columns=columns, push_to_hf_hub=True, hub_name=name)
            except EXPLAINED:
                self.say(f"the rollouts are kept; `vf-eval --resume {self.folder} -H -D {name}` only pushes")
                raise
            print(f"pushed     {name}")


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """What went wrong, of the tasks that ended with it."""
    one = group.exceptions[0]
    return _first(one) if isinstance(one, ExceptionGroup) else one


if __name__ == "__main__":
    main()
