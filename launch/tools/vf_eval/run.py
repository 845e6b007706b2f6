"""One call of `vf-eval`: generates missing rollouts, and shows, saves and pushes results."""

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
    """One call of the command `vf-eval`, which evaluates a model in an environment."""

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
        """Finished rollouts by (example, rollout)."""

    @property
    def cleanup_timeout_s(self) -> float:
        return self._environment.cleanup_timeout_s

    async def evaluate(self) -> None:
        """Generate the evaluation's missing rollouts. If it fails, finished rollouts are kept.

        Raises ConfigError, RecordError, StorageError or UnreachableError if the evaluation cannot
        continue.
        """
        async with self._environment, AsyncExitStack() as stack:
            examples, names, digests = self._examples()
            message_type = self._environment.message_type
            sampling = check_sampling(self._evaluation.sampling_args, message_type)
            client = None
            if self.folder is None:
                # Connects before the folder is made, so that a missing endpoint leaves no folder.
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
                say(f"{total - len(missing)} of {total} rollouts are finished")
                # Without missing rollouts the endpoint is not needed.
                if missing:
                    client = await self._connect(stack)
            self._evaluation.write(self.folder)
            if client is not None and missing:
                await self._generate(client, sampling, examples, missing, digests, file)

    async def _connect(self, stack: AsyncExitStack) -> openai.AsyncOpenAI:
        """Check the endpoint, store the name of its model, and return a client."""
        evaluation = self._evaluation
        endpoint = find_endpoint(evaluation.base_url, evaluation.key_variable, os.environ)
        self._endpoint = endpoint
        client = await stack.enter_async_context(endpoint.client(self._options.headers))
        model = await find_model(client, endpoint, evaluation.model, self._environment.message_type)
        self._evaluation = replace(evaluation, model=model)
        return client

    def _examples(self) -> tuple[Examples, list[str], list[str]]:
        """Return the examples, and the name and the digest of each.

        `generate` groups rollouts by the names of their examples.
        """
        name = self._evaluation.environment
        try:
            examples = self._environment.get_eval_dataset()
            # The order does not depend on the number: an evaluation may be resumed with more.
            number = self._evaluation.num_examples
            examples = examples.first(len(examples) if number < 0 else number)
            # Rows are converted one by one, so that not all are in memory at once.
            rows = [(repr((row["task"], row["example_id"])), digest(row)) for row in examples]
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
        if not rows:
            raise ConfigError(
                f"{name}: its evaluation dataset is empty; give it rows (with -a, if its"
                " load_environment has an argument for them)"
            )
        self._num_examples = len(rows)
        if len(rows) < self._evaluation.num_examples:
            wanted = self._evaluation.num_examples
            say(
                f"-n: {name} has {len(rows)} examples to evaluate on, not {wanted}; all of them"
                " are used"
            )
        return examples, [name for name, _ in rows], [row_digest for _, row_digest in rows]

    def _check(self, file: ResultsFile, digests: Sequence[str]) -> None:
        """Raise ConfigError if a rollout in the file is of other data than the present rows.

        `digests` are the digests of the present rows.
        """
        if file.was_torn:
            say(
                f"the last line of {file.path} was incomplete and is removed; its rollout is"
                " repeated"
            )
        for rollout in file.rollouts.values():
            example = rollout.example
            if example < len(digests) and rollout.row != digests[example]:
                raise ConfigError(
                    f"--resume: example {example} has changed: the environment has other data, or"
                    f" {file.path} belongs to another evaluation; start a new evaluation without"
                    " --resume"
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
        """Generate the missing rollouts, and write each to the file when it is finished."""
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
            # Reported at the first rollout, so that a wrong name is noticed early.
            if absent and num_sound == 1:
                known = ", ".join(map(str, state))
                say(
                    f"-C: the first rollout has no {', '.join(absent)}; its state has {known}; the"
                    " dataset will lack this column unless another rollout has it"
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
            # A task that cannot write its rollout cancels the other tasks.
            error: Exception = group
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            raise error from group
        if num_failed:
            # Raises if the endpoint is gone, which is then why rollouts failed.
            assert self._endpoint is not None, "set by _connect"
            await list_models(client, self._endpoint)

    def report(self) -> int:
        """Print the evaluation's scores; save and push them on request. Returns the exit status."""
        assert self.folder is not None, "set by evaluate"
        evaluation = self._evaluation
        wall_s = time.perf_counter() - self._start_s
        # The file may hold more rollouts, from a larger evaluation.
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
            again = f"`vf-eval --resume {self.folder}` repeats them"
            say(f"{num_failed} of {len(rollouts)} rollouts failed; {again}")
        return 1 if num_failed == len(rollouts) else 0

    def _save(self, folder: Path, results: GenerateOutputs) -> None:
        """Write the dataset of the rollouts to the folder, and push it to the hub."""
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
