"""Compare the seconds of an update with TRL's GRPOTrainer, on the same model and questions.

`python -m benchmarks.against_trl --trl /path/to/venv/bin/python [--model outputs/demo/smollm]
[--questions 4] [--rollouts 8] [--updates 8] [--rounds 2] [--actors 2]`. That interpreter has
`trl==1.16.0`, with the versions of torch and transformers that this project has.

Both train the environment `sums` in float32 with two threads, the same rate, temperature, length
limit, group size and number of rollouts, without a reference model; TRL generates with
transformers, the job with `--actors` vLLM actors of one thread each. The job computes the prompt of
a group once per row (`training.share_prompts`), TRL once per rollout. Both draw from the same
training questions, in another order. They take turns in processes. Medians leave out the
first `WARM_UP` updates of a process. Checked: the mean reward rises in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM_UP = 2
RATE, MAX_NEW_TOKENS, THREADS = 1e-5, 12, 2
LIMIT_S = 3600.0
"""Of one process."""
PARTS = ("generate", "learn", "sync", "step")


def of_job(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train with the job; return the seconds of each part by update, and the mean rewards."""
    subprocess.run(
        [
            *(sys.executable, "-m", "launch.train", "+experiment=agent_sums"),
            f"model.path={options.model}",
            f"telemetry.run_dir={folder}",
            f"training.max_steps={options.updates}",
            f"training.effective_batch_size={options.questions * options.rollouts}",
            f"training.learning_rate={RATE}",
            "training.lr_warmup_steps=0",
            "training.eval_steps=null",
            f"environment.rollouts_per_example={options.rollouts}",
            f"rollout_matching.max_new_tokens={MAX_NEW_TOKENS}",
            f"learner.cpu_threads={THREADS}",
            f"rollout_matching.vllm.actors.num_actors={options.actors}",
            "checkpoint.save_final=false",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {part: [step[f"time/{part}_s"] for step in steps] for part in PARTS} | {
        "reward": [step["rollout/reward"] for step in steps]
    }


def of_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Do the same with TRL; called in its interpreter."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from rollout_actors.environments.examples.sums import correct, load_environment

    torch.set_num_threads(THREADS)
    environment = load_environment()
    # TRL reads the column `prompt`, and passes the others to the reward function.
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in environment.get_dataset()]
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def _generate(self, *arguments: Any, **keywords: Any) -> Any:
            begun = time.perf_counter()
            made = super()._generate(*arguments, **keywords)
            seconds["generate"].append(time.perf_counter() - begun)
            return made

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds["step"].append(time.perf_counter() - self.begun)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(options.model),
            reward_funcs=lambda completions, answer, **_: [
                correct(one, right) for one, right in zip(completions, answer, strict=True)
            ],
            train_dataset=Dataset.from_list(rows),
            args=GRPOConfig(
                output_dir=folder,
                per_device_train_batch_size=options.questions * options.rollouts,
                num_generations=options.rollouts,
                max_completion_length=MAX_NEW_TOKENS,
                max_steps=options.updates,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                temperature=1.0,
                beta=0.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                logging_steps=1,
            ),
            callbacks=[Clock()],
        )
        trainer.train()
    seconds["learn"] = [
        step - made for step, made in zip(seconds["step"], seconds["generate"], strict=True)
    ]
    seconds["sync"] = [0.0] * options.updates
    logged = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    return {**seconds, "reward": logged}


def in_trl(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run `of_trl` in TRL's interpreter."""
    out = folder / "trl.json"
    subprocess.run(
        [
            *(options.trl, __file__, "--side", "trl", "--out", str(out), "--model", options.model),
            *("--questions", str(options.questions), "--rollouts", str(options.rollouts)),
            *("--updates", str(options.updates)),
        ],
        check=True,
        env=os.environ
        | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": str(THREADS)},
        stdout=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl", help="the Python interpreter that has trl")
    parser.add_argument("--model", default="outputs/demo/smollm", help="default: %(default)s")
    numbers = {"questions": 4, "rollouts": 8, "updates": 8, "rounds": 2, "actors": 2}
    for name, number in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=number, help="default: %(default)s")
    parser.add_argument("--side", choices=["trl"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side == "trl":
        options.out.write_text(json.dumps(of_trl(options)))
        return
    if options.trl is None:
        parser.error("--trl: name an interpreter that has trl==1.16.0")
    if options.updates <= WARM_UP:
        parser.error(f"--updates: must be above {WARM_UP}, the updates that are left out")
    found: dict[str, list[dict[str, Any]]] = {"rollmatch": [], "trl": []}
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found["rollmatch"].append(of_job(options, Path(folder, "run")))
            found["trl"].append(in_trl(options, Path(folder)))
        for side in found:
            one = found[side][-1]
            times = "  ".join(
                f"{part} {statistics.median(one[part][WARM_UP:]):6.2f} s" for part in PARTS
            )
            rewards = " ".join(f"{reward:.2f}" for reward in one["reward"])
            print(f"round {number + 1}  {side:9}  {times}  rewards {rewards}", flush=True)
    for part in PARTS:
        ours, theirs = (
            statistics.median(second for one in found[side] for second in one[part][WARM_UP:])
            for side in found
        )
        if theirs:
            print(f"{part:8}  {ours:6.2f} s / {theirs:6.2f} s = {ours / theirs:.2f}")
    half = options.updates // 2
    for side, rounds in found.items():
        first, last = (
            statistics.fmean(reward for one in rounds for reward in one["reward"][part])
            for part in (slice(half), slice(half, None))
        )
        if last <= first:
            sys.exit(f"{side}: the mean reward did not rise ({first:.3f}, then {last:.3f})")


if __name__ == "__main__":
    main()
