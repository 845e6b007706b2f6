"""Checks the rules of the doctor while a run writes its metrics, or afterwards in its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launch.doctor.figures import History, Line
from launch.doctor.rules import RULES
from shared.config import RunConfig
from shared.run_files import damaged_line, read_steps

FINDINGS = "doctor.jsonl"
"""File in the run's folder with a line for each finding and each verdict on time."""
VERDICT = "time"
"""The `rule` of a verdict's line. Its `value` is the number of steps."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that a run has broken. Each rule is reported once.

    Example: `Finding("no matches", 12, 0.02, "match rate 0.02 (threshold 0.05, 4 steps): ...")`.
    """

    rule: str
    step: int
    """Step whose figures showed it, from 1."""
    value: float
    """Value of the rule's figure."""
    text: str
    """Figure, cause, what to do, and a page of the documentation."""

    def describe(self) -> str:
        return f"doctor    step {self.step}, {self.rule}: {self.text}"


class Doctor:
    """Checks all rules whenever a run has new figures."""

    def __init__(self, config: RunConfig) -> None:
        self._history = History(config)
        self.findings: list[Finding] = []

    @classmethod
    def of_run(cls, config: RunConfig, folder: Path) -> Doctor:
        """Return the doctor of the run in `folder`, with all findings from its files so far.

        Raises OSError, and RecordError for a damaged line.
        """
        doctor = cls(config)
        reports = read_steps(folder / "evaluations.jsonl")
        for line in read_steps(folder / "metrics.jsonl"):
            while reports and reports[0]["step"] < line["step"]:
                doctor.report(reports.pop(0), folder)
            doctor.step(line)
        for report in reports:
            doctor.report(report, folder)
        return doctor

    def step(self, line: Line) -> list[Finding]:
        """Add a line of metrics.jsonl, and return the findings that are new."""
        self._history.add(line)
        return self._check()

    def report(self, line: Line, folder: Path) -> list[Finding]:
        """Add a line of evaluations.jsonl, and return the findings that are new.

        The F1 of classes is read from the report in the run's `folder`, if it is there.
        """
        self._history.reports.append(line)
        file = folder / "evaluations" / f"step_{line['step']:06d}" / "report.json"
        if file.exists():
            classes = json.loads(file.read_text()).get("classes", ())
            f1s = {one["name"]: (one["f1"], one["num_ground_truth"]) for one in classes}
            self._history.classes.append(
                {name: (f1, count) for name, (f1, count) in f1s.items() if f1 is not None}
            )
        return self._check()

    def _check(self) -> list[Finding]:
        history = self._history
        reported = {finding.rule for finding in self.findings}
        step = history.steps[-1]["step"] if history.steps else 0
        found = []
        for rule in RULES:
            if rule.name in reported or reported & set(rule.explained_by):
                continue
            value = rule.judge(history, rule)
            if value is None:
                continue
            reported.add(rule.name)
            over = "" if rule.window == 1 else f" over {rule.window}"
            text = (
                f"{rule.figure} {value:.3g} (threshold {rule.threshold:g}{over}): {rule.cause};"
                f" {rule.remedy} (docs/{rule.page})"
            )
            found.append(Finding(rule.name, step, value, text))
        self.findings += found
        return found


def lines_of(findings: Sequence[Finding]) -> str:
    """Return the findings as lines of `doctor.jsonl`."""
    return "".join(json.dumps(asdict(finding)) + "\n" for finding in findings)


def read_findings(folder: Path) -> list[Finding]:
    """Return the findings and verdicts in a run's `doctor.jsonl`; none without the file.

    Raises OSError, and RecordError for a damaged line.
    """
    path = folder / FINDINGS
    found = []
    for number, line in enumerate(read_steps(path), 1):
        try:
            found.append(Finding(**line))
        except TypeError as error:
            raise damaged_line(path, number, "is not a finding") from error
    return found
