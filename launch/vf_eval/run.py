"""One call of `vf-eval`: what is missing of an evaluation is rolled out, and shown, saved and
pushed.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from tqdm import tqdm

from launch.cli import EXPLAINED
from launch.vf_eval.arguments import OUTPUT, EvalOptions, sampling_of
from launch.vf_eval.endpoint import Endpoint, check_there, checked_model, endpoint_of, watch
from launch.vf_eval.record import EvaluationSettings, missing_places, new_folder, read_evaluation
from launch.vf_eval.results_file import NAME, FinishedRollout, ResultsFile
from launch.vf_eval.summary import RolloutNotes, results_of, show_rollout, summary_tables
from rollout_actors.environments.datasets import RESULTS, Examples, digest, has_field
from rollout_actors.environments.environment import Environment
from shared.errors import ConfigError

Place = tuple[int, int]
"""The number of an example, and of a rollout among its."""


class EvalRun:
    """One call of the command."""

    def __init__(
        self, options: EvalOptions, evaluation: EvaluationSettings, environment: Environment
    ) -> None:
        self._options, self._evaluation, self._environment = options, evaluation, environment
        self._began_s, self._date = (
            time.perf_counter(),
            datetime.now().astimezone().isoformat(timespec="seconds"),
        )
        self._num_examples = 0
        self._endpoint: Endpoint | None = None
        self.folder: Path | None = options.resume
        self.finished: dict[Place, FinishedRollout] = {}

    @property
    def cleanup_timeout_s(self) -> float:
        return self._environment.cleanup_timeout_s

    def say(self, text: str) -> None:
        """Above a progress bar, where there is one."""
        tqdm.write(text, file=sys.stderr)

    async def evaluate(self) -> None:
        """Make what is missing. Raises ConfigError, RecordError, StorageError and UnreachableError;
        what is done by then is kept.
        """
        async with self._environment, AsyncExitStack() as stack:
            examples, names, digests = self._examples()
            sampling = sampling_of(self._evaluation.sampling_args, self._environment.message_type)
            client = None
            if self.folder is None:
                client = await self._client(stack)
                self.folder = new_folder(self._options.output or OUTPUT, self._evaluation)
            with ResultsFile(self.folder) as file:
                self.finished = file.rollouts
                self._check(file, digests)
                by_example = self._environment.rubric.compares_rollouts
                places = missing_places(
                    file.rollouts,
                    names,
                    self._evaluation.rollouts_per_example,
                    by_example=by_example,
                )
                if self._options.resume is not None:
                    total = len(names) * self._evaluation.rollouts_per_example
                    self.say(f"{total - len(places)} of {total} rollouts are there")
                # Where nothing is missing, the endpoint may be gone.
                if places and client is None:
                    client = await self._client(stack)
                self._noted().write(self.folder)
                if places:
                    notes = RolloutNotes(
                        file, places, digests, self._evaluation.state_columns, self.say
                    )
                    await self._generate(
                        client, sampling, examples.select([example for example, _ in places]), notes
                    )

    def _noted(self) -> EvaluationSettings:
        """What the folder is of. Asking for less of what is there, and of what is still missing,
        makes it no smaller.
        """
        return (
            self._evaluation
            if self._options.resume is None
            else self._evaluation.no_smaller_than(read_evaluation(self._options.resume))
        )

    async def _client(self, stack: AsyncExitStack) -> Any:
        """Of the endpoint, which has answered; the evaluation's model is known then."""
        self._endpoint = endpoint = endpoint_of(
            self._evaluation.base_url, self._evaluation.key_variable, os.environ
        )
        client = await stack.enter_async_context(endpoint.client())
        model = await checked_model(
            client, endpoint, self._evaluation.model, self._environment.message_type
        )
        self._evaluation = replace(self._evaluation, model=model)
        return client

    def _examples(self) -> tuple[Examples, list[str], list[str]]:
        """Those to evaluate on, the names that `generate` groups them by, and their rows'
        digests."""
        name = self._evaluation.environment
        try:
            examples = self._environment.get_eval_dataset(self._evaluation.num_examples)
            # Rows become inputs as they are read.
            rows = [(repr((row["task"], row["example_id"])), digest(row)) for row in examples]
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
        if not rows:
            raise ConfigError(
                f"{name}: its dataset to evaluate on is empty; give it rows (with -a, where its"
                " load_environment has an argument for them)"
            )
        self._num_examples = len(rows)
        if len(rows) < self._evaluation.num_examples:
            self.say(
                f"-n: {name} has {len(rows)} examples to evaluate on, not"
                f" {self._evaluation.num_examples}; it is evaluated on these"
            )
        return examples, [row_name for row_name, _ in rows], [row_digest for _, row_digest in rows]

    def _check(self, file: ResultsFile, digests: Sequence[str]) -> None:
        """ConfigError where what is there is of other data."""
        if file.was_torn:
            self.say(
                f"the last line of {file.path} was cut off and is removed; its rollout is made"
                " again"
            )
        for one in file.rollouts.values():
            if one.example < len(digests) and one.row != digests[one.example]:
                changed = (
                    f"example {one.example} (id {one.example_id!r}) is not what it was when it was"
                    " rolled out"
                )
                why = f"the environment's data have changed, or {file.path} is another evaluation's"
                raise ConfigError(
                    f"--resume: {changed}: {why}; start a new evaluation without --resume"
                )

    async def _generate(
        self, client: Any, sampling: dict[str, Any], inputs: Examples, notes: RolloutNotes
    ) -> None:
        options, endpoint = self._options, self._endpoint
        assert endpoint is not None, "it has given the client"
        try:
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(watch(client, endpoint))
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
                    rollout_timeout_s=options.rollout_timeout_s,
                    scoring_timeout_s=options.scoring_timeout_s,
                )
                watching.cancel()
        except ExceptionGroup as group:
            raise _first(group) from group
        if notes.num_failed:
            # All that was under way may have failed before the watch was sure.
            await check_there(client, endpoint)

    def report(self) -> int:
        """Show the scores; save and push where that is asked for. The exit status."""
        assert self.folder is not None, "it was evaluated"
        evaluation, wall_s = self._evaluation, time.perf_counter() - self._began_s
        # More may be there: of an evaluation that was larger.
        asked = [
            (example, rollout)
            for example in range(self._num_examples)
            for rollout in range(evaluation.rollouts_per_example)
        ]
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
            self.say(
                f"{failed} of {len(rollouts)} rollouts failed; `vf-eval --resume {self.folder}`"
                " makes them again"
            )
        return 1 if failed == len(rollouts) else 0

    def _keep(self, rollouts: Sequence[FinishedRollout], wall_s: float) -> None:
        """As a dataset: in the folder, and on the hub."""
        assert self.folder is not None, "as above"
        results = results_of(
            rollouts, self._evaluation, self._environment, wall_s=wall_s, date=self._date
        )
        columns = [
            path for path in self._evaluation.state_columns if has_field(path, results.state)
        ]
        if len(columns) < len(self._evaluation.state_columns):
            self.say(
                "-C: no rollout has"
                f" {', '.join(sorted(set(self._evaluation.state_columns) - set(columns)))}; a"
                " dataset goes without"
            )
        if self._options.save:
            results.save(
                self.folder, self._environment.make_dataset(results, state_columns=columns)
            )
            print(f"dataset    {self.folder / RESULTS}")
        if self._options.push:
            name = self._options.dataset_name or f"{self._environment.name}-results"
            try:
                self._environment.make_dataset(
                    results, state_columns=columns, push_to_hf_hub=True, hub_name=name
                )
            except EXPLAINED:
                self.say(
                    f"the rollouts are kept; `vf-eval --resume {self.folder} -H -D {name}` only"
                    " pushes"
                )
                raise
            print(f"pushed     {name}")


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """What went wrong, of the tasks that ended with it."""
    one = group.exceptions[0]
    return _first(one) if isinstance(one, ExceptionGroup) else one
