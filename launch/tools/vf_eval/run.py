"""One call of `vf-eval`: rolls out what an evaluation lacks, and shows, saves and pushes it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import openai
from rich.text import Text

from launch.cli import EXPLAINED
from launch.run_folder.console import escaped, make_console
from launch.tools.vf_eval.arguments import OUTPUT, EvalOptions, check_sampling
from launch.tools.vf_eval.endpoint import Endpoint, find_endpoint, find_model, list_models, say
from launch.tools.vf_eval.record import EvaluationSettings, missing_rollouts, new_folder
from launch.tools.vf_eval.results_file import NAME, FinishedRollout, ResultsFile
from launch.tools.vf_eval.summary import results_of, show_rollout, summary_tables
from rollout_actors.environments.datasets import (
    RESULTS,
    Examples,
    GenerateOutputs,
    digest,
    has_field,
    push_dataset,
)
from rollout_actors.environments.environment import Environment
from rollout_actors.environments.types import State
from shared.errors import ConfigError


class EvalRun:
    """One call of the command."""

    def __init__(
        self, options: EvalOptions, evaluation: EvaluationSettings, environment: Environment
    ) -> None:
        self._options = options
        self._evaluation = evaluation
        self._environment = environment
        self._start_s = time.perf_counter()
        self._date = datetime.now().astimezone().isoformat(timespec="seconds")
        self._num_examples = 0
        self._endpoint: Endpoint | None = None
        self.folder: Path | None = options.resume
        self.finished: dict[tuple[int, int], FinishedRollout] = {}
        """By the numbers of the example and of the rollout among its."""

    @property
    def cleanup_timeout_s(self) -> float:
        return self._environment.cleanup_timeout_s

    async def evaluate(self) -> None:
        """Roll out what is missing; what is done by then is kept.

        Raises:
            ConfigError, RecordError, StorageError, UnreachableError: the evaluation cannot go on.
        """
        async with self._environment, AsyncExitStack() as stack:
            examples, names, digests = self._examples()
            message_type = self._environment.message_type
            sampling = check_sampling(self._evaluation.sampling_args, message_type)
            client = None
            if self.folder is None:
                # Before the folder is made: an endpoint that is not there leaves none behind.
                client = await self._connect(stack)
                self.folder = new_folder(self._options.output or OUTPUT, self._evaluation)
            file = stack.enter_context(ResultsFile(self.folder))
            self.finished = file.rollouts
            self._check(file, digests)
            missing = missing_rollouts(
                file.rollouts,
                names,
                self._evaluation.rollouts_per_example,
                by_example=self._environment.rubric.compares_rollouts,
            )
            if self._options.resume is not None:
                total = len(names) * self._evaluation.rollouts_per_example
                say(f"{total - len(missing)} of {total} rollouts are there")
                # Where nothing is missing, the endpoint may be gone.
                if missing:
                    client = await self._connect(stack)
            self._evaluation.write(self.folder)
            if client is not None and missing:
                await self._generate(client, sampling, examples, missing, digests, file)

    async def _connect(self, stack: AsyncExitStack) -> openai.AsyncOpenAI:
        """Return a client of the endpoint, which has answered; the model is known from then on."""
        evaluation = self._evaluation
        endpoint = find_endpoint(evaluation.base_url, evaluation.key_variable, os.environ)
        self._endpoint = endpoint
        client = await stack.enter_async_context(endpoint.client(self._options.headers))
        model = await find_model(client, endpoint, evaluation.model, self._environment.message_type)
        self._evaluation = replace(evaluation, model=model)
        return client

    def _examples(self) -> tuple[Examples, list[str], list[str]]:
        """Return the examples, the names that `generate` groups them by, and digests of rows."""
        name = self._evaluation.environment
        try:
            examples = self._environment.get_eval_dataset()
            # In one order, however many are asked for: an evaluation may be resumed for more.
            number = self._evaluation.num_examples
            examples = examples.first(len(examples) if number < 0 else number)
            # Rows become inputs as they are read: they need not all be in memory at once.
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
            wanted = self._evaluation.num_examples
            say(
                f"-n: {name} has {len(rows)} examples to evaluate on, not {wanted}; it is evaluated"
                " on these"
            )
        return examples, [name for name, _ in rows], [row_digest for _, row_digest in rows]

    def _check(self, file: ResultsFile, digests: Sequence[str]) -> None:
        """Raise ConfigError where the rollouts in the file are of other data."""
        if file.was_torn:
            say(
                f"the last line of {file.path} was cut off and is removed; its rollout is made"
                " again"
            )
        for rollout in file.rollouts.values():
            example = rollout.example
            if example < len(digests) and rollout.row != digests[example]:
                raise ConfigError(
                    f"--resume: example {example} is not what it was: the environment's data have"
                    f" changed, or {file.path} is another"
                    " evaluation's; start a new evaluation without --resume"
                )

    async def _generate(
        self,
        client: openai.AsyncOpenAI,
        sampling: dict[str, object],
        examples: Examples,
        missing: Sequence[tuple[int, int]],
        digests: Sequence[str],
        file: ResultsFile,
    ) -> None:
        """Make the missing rollouts, and write each into the file as it comes."""
        options = self._options
        columns = self._evaluation.state_columns
        num_failed = 0
        num_sound = 0

        def write(index: int, state: State) -> None:
            nonlocal num_failed, num_sound
            example, number = missing[index]
            rollout = FinishedRollout.from_state(
                state, example=example, rollout=number, row=digests[example], state_columns=columns
            )
            file.append(rollout)
            if rollout.error is not None:
                num_failed += 1
                return
            num_sound += 1
            absent = [path for path in columns if not has_field(path, [state])]
            # At the first, and not when all are done: a wrong name is better known early.
            if absent and num_sound == 1:
                known = ", ".join(map(str, state))
                say(
                    f"-C: the first rollout has no {', '.join(absent)}; its state has {known}; the"
                    " dataset will lack it unless another rollout has it"
                )

        try:
            await self._environment.generate(
                examples.select([example for example, _ in missing]),
                client,
                str(self._evaluation.model),
                sampling,
                max_concurrent=options.max_concurrent,
                max_concurrent_generation=options.max_concurrent_generation,
                max_concurrent_scoring=options.max_concurrent_scoring,
                interleave_scoring=options.interleave_scoring,
                on_rollout=write,
                rollout_timeout_s=options.rollout_timeout_s,
                scoring_timeout_s=options.scoring_timeout_s,
            )
        except ExceptionGroup as group:
            # Of several tasks, one that cannot write its rollout ends the others.
            error: Exception = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise error from group
        if num_failed:
            # Raises where the endpoint has gone, which is what the rollouts failed of then.
            assert self._endpoint is not None, "the client is one of it"
            await list_models(client, self._endpoint)

    def report(self) -> int:
        """Show the scores, save and push them if that is asked for; return the exit status."""
        assert self.folder is not None, "it was evaluated"
        evaluation = self._evaluation
        wall_s = time.perf_counter() - self._start_s
        # There may be more rollouts, of an evaluation that was larger.
        rollouts = [
            self.finished[example, rollout]
            for example in range(self._num_examples)
            for rollout in range(evaluation.rollouts_per_example)
        ]
        results = results_of(
            rollouts, evaluation, self._environment, wall_s=wall_s, date=self._date
        )
        console = make_console()
        if self._options.verbose:
            show_rollout(rollouts[0].state, console)
        console.print(Text(f"{evaluation.environment}, {evaluation.model}", style="bold"))
        solved_at = self._options.solved_at
        for table in summary_tables(rollouts, results.metadata, solved_at=solved_at):
            console.print(table, highlight=False)
        print(escaped(f"rollouts   {self.folder / NAME}"))
        if self._options.save or self._options.push:
            self._save(self.folder, results)
        num_failed = results.metadata.num_errors
        if num_failed:
            again = f"`vf-eval --resume {self.folder}` makes them again"
            say(f"{num_failed} of {len(rollouts)} rollouts failed; {again}")
        return 1 if num_failed == len(rollouts) else 0

    def _save(self, folder: Path, results: GenerateOutputs) -> None:
        """Make the dataset of the rollouts, in the folder and on the hub."""
        wanted = self._evaluation.state_columns
        columns = [path for path in wanted if has_field(path, results.state)]
        dataset = self._environment.make_dataset(results, state_columns=columns)
        if self._options.save:
            results.save(folder, dataset)
            print(escaped(f"dataset    {folder / RESULTS}"))
        if self._options.push:
            name = self._options.dataset_name or f"{self._environment.name}-results"
            try:
                push_dataset(dataset, name)
            except EXPLAINED:
                say(f"the rollouts are kept; `vf-eval --resume {folder} -H -D {name}` only pushes")
                raise
            print(f"pushed     {name}")
