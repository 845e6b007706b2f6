"""What the checks before a run find: lines to print, and problems that would stop the run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from launch.checks.data import DataFacts
from shared.errors import ConfigError, RecordError

T = TypeVar("T")


@dataclass(slots=True)
class PreflightReport:
    """The findings of a preflight check: lines to print, and problems that would stop the run."""

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    facts: DataFacts | None = None
    """Facts about the run's data; None if the data are invalid or the checkpoint is incomplete."""

    def attempt(self, make: Callable[[], T]) -> T | None:
        """Return the result of `make`; None if it raises ConfigError or RecordError.

        Such an error is recorded as problems.
        """
        try:
            return make()
        except ConfigError as error:
            self.problems += error.problems
        except RecordError as error:
            self.problems.append(str(error))
        return None

    def collect(self, problems: Iterable[str]) -> None:
        """Record the problems that a check yields.

        If the check raises ConfigError or RecordError, only this error is recorded.
        """
        self.problems += self.attempt(lambda: list(problems)) or ()
