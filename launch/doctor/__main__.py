"""Says what is wrong with a run, and what bounded its time.

    rollmatch doctor RUN

RUN is a run folder, of a run that has ended or still runs. `rollmatch doctor rules` prints the
rules. The exit status is 1 if there are findings, else 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import explained, read_words
from launch.doctor.learning import Doctor
from launch.doctor.rules import RULES
from launch.doctor.timing import read_times, verdict
from launch.run_folder.console import escaped, make_console
from launch.run_folder.saved_run import load_run
from shared.errors import ConfigError
from shared.run_files import read_steps


def main(arguments: Sequence[str] | None = None) -> None:
    words = read_words(__doc__, arguments)
    with explained(make_console(stderr=True)):
        if len(words) != 1:
            raise ConfigError("doctor: needs a run folder; write `rollmatch doctor RUN`")
        if words == ["rules"]:
            for rule in RULES:
                window = f"threshold {rule.threshold:g}, {rule.window} steps"
                print(f"{rule.name}\n  {rule.figure}, {window}\n  {rule.cause}\n  {rule.remedy}")
            return
        folder = Path(words[0])
        config = load_run(folder)
        doctor = Doctor.of_run(config, folder)
        times = read_times(folder, read_steps(folder / "metrics.jsonl"))
        placement = folder / "placement.json"
        devices = json.loads(placement.read_text())["devices"] if placement.exists() else ()
    for finding in doctor.findings:
        print(escaped(finding.describe()))
    if not doctor.findings:
        print("doctor    no rule is broken")
    if times:
        print(escaped(f"time      {verdict(config, devices, times)}"))
    sys.exit(int(bool(doctor.findings)))


if __name__ == "__main__":
    main()
