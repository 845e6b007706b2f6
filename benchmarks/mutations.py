"""Mutation testing: put one fault at a time into the code, and check that the tests fail.

`python -m benchmarks.mutations`. Each mutant changes one place in a copy of the tree, and the tests
run in this copy. The working tree is not changed. Each stage runs on the mutants that survived the
stage before:

    own        the mutant's own tests, without engines, Ray and processes
    all        every unit test
    marked     the mutant's own tests with engines, Ray and processes (not the `long`)

Before each stage its tests must pass without a mutant. `--out` saves the results for one state of
the tree, and a later call continues from them. `--check` runs no tests and prints the mutants that
no longer fit the code. The mutants were written before any test was changed for them. Mutants stay
after a test is written for them, and new ones are welcome.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parent.parent
QUICK = "not engine and not ray and not processes"
MARKED = "(engine or ray or processes) and not long"
ABOUT_MUTANTS = "tests/benchmarks/test_mutations.py"
"""Fails with every mutant, so it is excluded."""
NOTHING_COLLECTED = 5
"""pytest's exit code if no test was collected, for example if all tests of a file are marked."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault in one place of the code."""

    name: str
    """What the fault does, in a few words."""
    path: str
    old: str
    """The text to replace. It occurs exactly once in the file and may span several lines."""
    new: str
    tests: tuple[str, ...]
    """Test files that should fail, the cheapest first."""

    def applied_to(self, text: str) -> str:
        """Return a file's text with the fault put in.

        Raises ValueError if `old` does not occur exactly once.
        """
        if text.count(self.old) != 1:
            times = text.count(self.old)
            raise ValueError(f"{self.name}: {self.old!r} is {times} times in {self.path}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Stage:
    """A set of tests that runs on the mutants that survived the stage before."""

    name: str
    marks: str
    limit_s: float
    """Time limit, in seconds, of the tests with one mutant.

    With `on_all_files` it is at least twice the time of the tests without a mutant. A mutant that
    exceeds it hangs, and counts as caught.
    """
    on_all_files: bool = False
    """Run all test files on all cores, instead of the mutant's own files."""

    def arguments(self, mutants: Sequence[Mutant]) -> list[str]:
        """Return pytest's arguments for the stage's tests of these mutants."""
        if self.on_all_files:
            return [
                "-m",
                self.marks,
                "-n",
                "auto",
                "--dist",
                "loadfile",
                f"--ignore={ABOUT_MUTANTS}",
            ]
        paths = dict.fromkeys(path for mutant in mutants for path in mutant.tests)
        return ["-m", self.marks, *paths]


STAGES = (
    Stage("own", QUICK, limit_s=240.0),
    Stage("all", QUICK, limit_s=900.0, on_all_files=True),
    Stage("marked", MARKED, limit_s=600.0),
)
SOUND_LIMIT_S = 2400.0
"""Time limit, in seconds, of the tests without a mutant that a stage runs first."""


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a mutant in the stages that have run."""

    verdict: str
    """`caught`, `survived`, or `invalid` if the tests could not be collected."""
    by: str
    """The first test that failed, or `timeout`; empty if no test failed."""
    stages: tuple[str, ...]
    """The stages that ran. The verdict is from the last one."""
    seconds: float
    of: tuple[str, ...]
    """The `identity` of the mutant that was tested. If it changes, the mutant runs again."""


INTAKE = (
    "tests/rollout_actors/weight_sync/test_receiver.py",
    "tests/rollout_actors/test_engine_sync.py",
)
CACHES = (*INTAKE, "tests/rollout_actors/backends/test_stock_server.py")

# fmt: off
MUTANTS = (
    # The learner.
    Mutant("carried-loss-divided-by-samples-drawn", "learner/learner.py",
        "if self._packing.carries:", "if False:", ("tests/learner/test_learner_carry.py",)),
    Mutant("carried-loss-divided-by-one-ranks-segments", "learner/learner.py",
        "self._ranks.sum(step.metrics.num_segments)", "step.metrics.num_segments",
        ("tests/learner/test_learner_carry.py", "tests/learner/test_learner_ranks.py")),
    Mutant("log-probabilities-at-temperature-1", "learner/step.py",
        "Normalizer(decode.temperature or 1.0, loaded", "Normalizer(1.0, loaded",
        ("tests/learner/algorithms/test_trajectories.py", "tests/learner/test_learner.py",
         "tests/learner/test_learner_staleness.py")),
    Mutant("log-probabilities-over-banned-tokens-too", "learner/step.py",
        "decode.temperature or 1.0, loaded.banned_token_ids)", "decode.temperature or 1.0)",
        ("tests/learner/test_learner.py", "tests/learner/algorithms/test_trajectories.py",
         "tests/learner/algorithms/test_trajectory_images.py")),
    Mutant("log-probabilities-of-older-weights-compared", "learner/step.py",
        "if segment.weight_version == version:", "if segment.weight_version is not None:",
        ("tests/learner/test_learner_staleness.py",)),
    Mutant("gradient-not-divided", "learner/model/optimizer/adamw.py",
        "torch._foreach_div_(reached, denominator)", "pass",
        ("tests/learner/model/test_optimizer.py",)),
    Mutant("run-ended-one-bad-gradient-early", "learner/model/optimizer/adamw.py",
        "if self.num_skipped > config.max_", "if self.num_skipped >= config.max_",
        ("tests/learner/model/test_optimizer.py",)),
    Mutant("bfloat16-gradients-of-rows-not-summed", "learner/model/optimizer/adamw.py",
        "sums[master].add_(gradient)", "sums[master] = gradient.float()",
        ("tests/learner/model/test_optimizer.py",)),
    Mutant("text-gate-at-closing-tokens", "learner/collate.py",
        "np.where(target.roles == TokenRole.CLOSING, np.float32(0), weights_L)", "weights_L",
        ("tests/learner/test_step.py",)),
    Mutant("segments-of-a-row-see-each-other", "learner/step.py",
        "attention_mask=None,", "attention_mask=torch.ones_like(inputs.input_ids),",
        ("tests/learner/test_step.py",)),
    Mutant("segment-as-long-as-a-row-refused", "learner/packing.py",
        "if length > capacity:", "if length >= capacity:", ("tests/learner/test_packing.py",)),
    Mutant("packing-window-not-begun-anew-in-a-step", "learner/packing.py",
        "self._num_added = 0\n        return [_row(", "return [_row(",
        ("tests/learner/test_packing_policy.py",)),
    Mutant("desc-of-matched-prediction-learned", "learner/algorithms/matched_targets.py",
        "self._roles[self._overlapping(prediction.desc_value)] = TokenRole.NEUTRAL",
        "self._roles[self._overlapping(prediction.desc_value)] = TokenRole.DESC",
        ("tests/learner/test_targets.py",)),
    Mutant("append-begins-with-a-number-that-is-taken", "learner/algorithms/matched_targets.py",
        "else kept.max_object_index + 1", "else kept.max_object_index",
        ("tests/learner/test_targets.py",)),
    Mutant("separator-behind-the-comma-taught", "shared/grounding/formats.py",
        "return len(before) - 1 if before", "return len(before) + 1 if before",
        ("tests/learner/test_target_options.py",)),
    Mutant("digits-behind-a-wrong-one-taught", "learner/algorithms/matched_targets.py",
        "self._roles[tokens.start : position] = TokenRole.DIGITS",
        "self._roles[tokens] = TokenRole.DIGITS",
        ("tests/learner/test_digit_targets.py",)),
    Mutant("number-beyond-the-picture-read", "shared/grounding/json_list.py",
        "int(written) > self._most(axis)", "int(written) > 9999",
        ("tests/shared/grounding/test_json_list.py",)),
    Mutant("sampled-token-compared-with-the-corrected-label", "learner/collate.py",
        "index(2 * compared_at),", "index(2 * compared_at + 1),",
        ("tests/learner/test_target_options.py",)),
    Mutant("forced-tokens-compared", "learner/algorithms/matched_targets.py",
        "min((target.reading.num_kept, *rollout.forced_positions))", "target.reading.num_kept",
        ("tests/learner/test_targets.py",)),
    Mutant("trade-off-of-ciou-has-a-gradient", "learner/objectives/coord_math.py",
        "with torch.no_grad():", "with torch.enable_grad():",
        ("tests/learner/objectives/test_coord_math.py",)),
    Mutant("ratio-not-truncated", "learner/objectives/policy_gradient.py",
        ".clamp(max=math.log(cap)).exp()", ".exp()",
        ("tests/learner/objectives/test_policy_gradient.py",)),
    Mutant("step-count-of-a-gpu-s-optimizer-resumed-on-the-host", "learner/model/optimizer/adamw.py",
        "state[kind] = moment.to(master.device)", "state[kind] = moment.cpu()", ("tests/learner/test_emulated_cuda.py",)),
    Mutant("host-waits-for-the-grids-of-images", "learner/collate.py",
        "pixel_values=to_device(inputs.pixel_values, device),",
        "pixel_values=to_device(inputs.pixel_values, device), image_grid_thw="
        "to_device(inputs.image_grid_thw, device),", ("tests/learner/test_emulated_cuda.py",)),
    Mutant("rollout-of-weights-yet-to-come-learned", "learner/checks.py",
        "<= one.weight_version <= version:", "<= one.weight_version:",
        ("tests/learner/test_checks.py",)),
    Mutant("excluded-objects-not-counted", "learner/step_metrics.py",
        'add("rollout/num_excluded", len(reading.excluded))', "pass",
        ("tests/learner/test_step_metrics.py",)),
    Mutant("gating-rejections-counted-as-rollouts", "learner/step_metrics.py",
        '"rollout/num_gating_rejections", reading.match.gating_rejections)',
        '"rollout/num_gating_rejections", 1)', ("tests/learner/test_step_metrics.py",)),
    Mutant("whole-answers-counted-as-cut-off", "learner/step_metrics.py",
        "float(parsed.truncated)", "float(not parsed.truncated)",
        ("tests/learner/test_step_metrics.py",)),
    Mutant("row-at-the-least-ratio-underfilled", "learner/step_metrics.py",
        "row.num_tokens < self._min_fill", "row.num_tokens <= self._min_fill",
        ("tests/learner/test_step_metrics.py",)),
    # The grounding core.
    Mutant("box-not-rounded-outwards", "shared/grounding/geometry.py",
        "_clamp(math.ceil(x2 * MAX_BIN / x_scale)),", "_clamp(math.floor(x2 * MAX_BIN / x_scale)),",
        ("tests/shared/grounding/test_geometry.py",)),
    Mutant("shape-of-16-pixels-by-exact-area", "shared/grounding/geometry.py",
        "< MIN_RASTER_PIXELS", "<= MIN_RASTER_PIXELS",
        ("tests/shared/grounding/test_geometry.py",)),
    Mutant("pair-at-the-gate-infeasible", "shared/grounding/matching.py",
        "feasible_PG = iou_PG >= maskiou_gate", "feasible_PG = iou_PG > maskiou_gate",
        ("tests/shared/grounding/test_matching.py",)),
    Mutant("least-overlapping-candidates-first", "shared/grounding/matching.py",
        "np.where(iou_PG > 0, -iou_PG, distance_PG)", "np.where(iou_PG > 0, iou_PG, distance_PG)",
        ("tests/shared/grounding/test_matching.py",)),
    Mutant("unmatched-prediction-at-the-other-cost", "shared/grounding/matching.py",
        "num_ground_truth:] = fp_cost", "num_ground_truth:] = fn_cost",
        ("tests/shared/grounding/test_matching.py",)),
    Mutant("replaced-token-counted-as-sampled", "shared/grounding/parsing.py",
        "response.ends[:last] + ends, last, cut\n", "response.ends[:last] + ends, last + 1, cut\n",
        ("tests/shared/grounding/test_parsing.py",)),
    Mutant("comma-behind-the-opening-brace", "shared/grounding/serialize.py",
        '", " if last == "}" and objects else ""', '", " if objects else ""',
        ("tests/shared/grounding/test_serialize.py",)),
    Mutant("edge-walked-twice-bounds-area", "shared/grounding/geometry.py",
        "if edge[1] != edge[3] and count % 2]", "if edge[1] != edge[3]]",
        ("tests/shared/grounding/test_geometry.py",)),
    Mutant("characters-taken-for-a-coord-token", "shared/grounding/validation.py",
        " or len(positions) != num_written", "",
        ("tests/shared/grounding/test_parsing.py",
         "tests/shared/grounding/test_parsing_reference.py")),
    # Weight sync.
    Mutant("last-buckets-checksum-not-compared", "rollout_actors/weight_sync/receiver.py",
        "zip(report.checksums, report.sent, strict=True)",
        "zip(report.checksums[:-1], report.sent[:-1], strict=True)", INTAKE),
    Mutant("parameter-that-was-not-loaded-not-reported", "rollout_actors/weight_sync/receiver.py",
        'names = [f"not loaded: {name}" for name in report.missing]\n', "names = []\n", INTAKE),
    Mutant("name-that-is-no-parameter-not-reported", "rollout_actors/weight_sync/receiver.py",
        "for name in report.unexpected]", "for name in ()]", INTAKE),
    Mutant("receipts-of-other-workers-not-read", "rollout_actors/weight_sync/receiver.py",
        "for report in reports:", "for report in reports[:1]:",
        ("tests/rollout_actors/weight_sync/test_receiver.py",)),
    Mutant("bucket-of-exactly-its-size-closed", "rollout_actors/weight_sync/worker.py",
        "if self._size > self._bucket_bytes:", "if self._size >= self._bucket_bytes:",
        ("tests/rollout_actors/weight_sync/test_worker.py", "tests/rollout_actors/test_engine_sync.py")),
    Mutant("refused-cache-reset-accepted", "rollout_actors/weight_sync/receiver.py",
        "if not await self._llm.reset_prefix_cache():",
        "if await self._llm.reset_prefix_cache() is None:", CACHES),
    Mutant("multimodal-cache-not-reset", "rollout_actors/weight_sync/receiver.py",
        "await self._llm.reset_mm_cache()", "pass", CACHES),
    Mutant("encoder-cache-not-reset", "rollout_actors/weight_sync/receiver.py",
        "await self._llm.reset_encoder_cache()", "pass", CACHES),
    Mutant("engines-phase-without-a-limit", "rollout_actors/weight_sync/receiver.py",
        "await asyncio.wait_for(work, limit.seconds + ENGINE_MARGIN_S)", "await work", INTAKE),
    Mutant("adapter-served-on-top-of-merged-weights", "rollout_actors/weight_sync/receiver.py",
        "await self.adapter.drop()", "pass", ("tests/rollout_actors/weight_sync/test_receiver.py",)),
    Mutant("group-under-another-key-not-joined", "rollout_actors/weight_sync/receiver.py",
        "if self._joined == group.key:", "if self._joined:", INTAKE),
    Mutant("other-canary-tokens-of-the-same-number-accepted", "shared/weight_sync/canary.py",
        "if tuple(expanded_token_ids) == self.expanded_token_ids:",
        "if len(expanded_token_ids) == len(self.expanded_token_ids):",
        ("tests/shared/weight_sync/test_canary.py",)),
    Mutant("canary-without-the-adapter-is-with-it", "learner/weight_sync/canary.py",
        "with without_adapter(self.loaded.model):", "with torch.no_grad():",
        ("tests/learner/model/test_adapters.py", "tests/learner/test_adapter_learner.py")),
    Mutant("ranks-do-not-meet-before-an-offer", "learner/weight_sync/publisher.py",
        "self.device.wait()\n            self.ranks.barrier()", "self.device.wait()",
        ("tests/learner/model/test_device.py",)),
    Mutant("ranks-do-not-meet-after-a-sync", "learner/weight_sync/publisher.py",
        'of_phase("sync_done"):\n            self.ranks.barrier()',
        'of_phase("sync_done"):\n            pass', ("tests/learner/model/test_device.py",)),
    Mutant("whole-sync-without-a-limit", "shared/weight_sync/phases.py",
        "wait(sides, timeout=limit.seconds, return_when", "wait(sides, return_when",
        ("tests/shared/weight_sync/test_phases.py",)),
    # Driver, pool, queue and servers.
    Mutant("server-of-newer-weights-answers", "rollout_actors/server/service.py",
        "version is not None and version != self.version",
        "version is not None and version > self.version",
        ("tests/rollout_actors/server/test_service.py",)),
    Mutant("answer-goes-out-though-weights-have-come", "rollout_actors/server/service.py",
        "if self._num_arrivals != arrivals:", "if False:",
        ("tests/rollout_actors/server/test_service.py",)),
    Mutant("held-out-outcomes-in-the-order-of-arrival", "launch/driver.py",
        "tuple(sorted(outcomes, key=lambda outcome: outcome.position))", "tuple(outcomes)",
        ("tests/launch/test_driver.py", "tests/launch/inspect/test_evaluate.py")),
    Mutant("engine-never-full", "launch/processes/rounds.py",
        "<= self._bounds[engine]\n", "< self._bounds[engine]\n",
        ("tests/launch/processes/test_round_queue.py",)),
    Mutant("first-engine-asked-again-at-the-end", "launch/processes/rounds.py",
        "if num_failed == len(self._waiting):", "if num_failed > len(self._waiting):",
        ("tests/launch/processes/test_round_queue.py",)),
    Mutant("parts-of-a-round-in-the-order-of-arrival", "launch/processes/rounds.py",
        "done.sort(key=lambda sent: sent.part.requests.start)", "pass",
        ("tests/launch/processes/test_round_queue.py", "tests/launch/processes/test_rollout_client.py")),
    Mutant("ties-to-the-higher-index", "shared/chunking.py",
        "(-(n * weights[i] % total), i)", "(-(n * weights[i] % total), -i)",
        ("tests/shared/test_chunking.py",)),
    Mutant("engine-stuck-behind-a-server-waited-for", "rollout_actors/backends/http.py",
        "if now is None or now != last:", "if True:",
        ("tests/rollout_actors/backends/test_http.py",)),
    # Environments.
    Mutant("failed-rollout-in-the-groups-mean", "rollout_actors/environments/rewards.py",
        'sound = [state for state in states if state.get("error") is None]', "sound = list(states)",
        ("tests/rollout_actors/environments/test_drawn_environments.py",)),
    Mutant("deviation-of-a-population", "learner/algorithms/advantages.py",
        "/ math.sqrt(len(rewards) - 1)", "/ math.sqrt(len(rewards))",
        ("tests/learner/algorithms/test_advantages.py",)),
    Mutant("merged-example-of-its-newest-weights",
        "rollout_actors/environments/training/examples.py",
        "weight_version=min(versions", "weight_version=max(versions",
        ("tests/rollout_actors/environments/training/test_examples.py",)),
    Mutant("turns-share-a-seed", "rollout_actors/environments/clients/conversation.py",
        "self.position, turn, self.path)", "self.position, 0, self.path)",
        ("tests/rollout_actors/environments/clients/test_engine.py",
         "tests/rollout_actors/environments/clients/test_engine_routing.py")),
    Mutant("bound-of-generation-not-kept", "rollout_actors/environments/generate.py",
        "self._generation = _bound(call.concurrency.generation)", "self._generation = None",
        ("tests/rollout_actors/environments/test_orchestration.py",)),
    Mutant("rows-of-a-group-keep-ids-that-collide", "rollout_actors/environments/group.py",
        '{**row, "example_id": index}', "{**row}",
        ("tests/rollout_actors/environments/test_group.py",)),
    Mutant("engine-may-answer-another-prompt", "rollout_actors/environments/clients/engine.py",
        "if not request.images and rollout.prompt_token_ids != request.prompt_token_ids:",
        "if False:",
        ("tests/rollout_actors/environments/clients/test_engine.py",)),
    # Configuration, schedule and seeds.
    Mutant("samples-of-a-step-share-a-seed", "learner/segments.py",
        "seed=request_seed(run_seed, step, position),", "seed=request_seed(run_seed, step, 0),",
        ("tests/learner/test_learner.py",)),
    Mutant("steps-share-seeds", "shared/seeds.py",
        "{run_seed}/{step}/{position}", "{run_seed}/{position}",
        ("tests/shared/test_seeds.py",
         "tests/rollout_actors/environments/clients/test_engine_routing.py",
         "tests/rollout_actors/environments/training/test_runner.py")),
    Mutant("epochs-share-an-order", "shared/dataset.py",
        "words = (self._seed, self.epoch, self._number)",
        "words = (self._seed, 0, self._number)",
        ("tests/shared/test_dataset.py",)),
    Mutant("one-warm-up-step-too-many", "shared/config/algorithm.py",
        "if since_warmup < 0:", "if since_warmup <= 0:", ("tests/shared/config/test_schedule.py",)),
    Mutant("engine-exactly-long-enough-refused", "shared/config/checks/engines.py",
        "longest < run.global_max_length", "longest <= run.global_max_length",
        ("tests/shared/config/test_cases.py", "tests/shared/config/test_scenarios.py")),
    Mutant("rollouts-by-transformers-unless-asked-otherwise", "shared/config/rollout.py",
        'Literal["vllm", "hf"] = "vllm"', 'Literal["vllm", "hf"] = "hf"',
        ("tests/shared/config/test_load.py",)),
    Mutant("beams-of-any-length-by-their-sum", "shared/config/rollout.py",
        "length_penalty: FiniteFloat = 1.0", "length_penalty: FiniteFloat = 0.0",
        ("tests/shared/config/test_cases.py",)),
    Mutant("server-given-up-early", "shared/config/rollout.py",
        "timeout_s: PositiveFloat = 240.0", "timeout_s: PositiveFloat = 24.0",
        ("tests/shared/config/test_load.py",)),
    Mutant("generation-with-a-limit-by-default", "shared/config/rollout.py",
        "infer_timeout_s: float | None = None", "infer_timeout_s: float | None = 240.0",
        ("tests/shared/config/test_load.py",)),
    Mutant("report-before-the-warm-up", "shared/schedule.py",
        "step > 0 and step % every == 0", "step % every == 0", ("tests/shared/test_schedule.py",)),
)
# fmt: on


def problems() -> list[str]:
    """Return a line for each mutant that does not fit the code, does not compile or lacks tests."""
    found = []
    names = [mutant.name for mutant in MUTANTS]
    for mutant in MUTANTS:
        try:
            compile(mutant.applied_to((ROOT / mutant.path).read_text()), mutant.path, "exec")
        except (OSError, SyntaxError, ValueError) as error:
            found.append(f"{mutant.name}: {error}")
        lost = [path for path in mutant.tests if not (ROOT / path).exists()]
        found += [f"{mutant.name}: no {path}" for path in lost]
        if names.count(mutant.name) > 1:
            found.append(f"{mutant.name}: is the name of several mutants")
    return found


def copy_tree(revision: str | None, folder: Path) -> None:
    """Copy the repository's files, or the files of a revision, into a folder.

    These are the files that git tracks or would add.
    """
    git = ["git", "-C", str(ROOT)]
    if revision is not None:
        archive = subprocess.run([*git, "archive", revision], stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)
        return
    listing = [*git, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, stdout=subprocess.PIPE, check=True, text=True).stdout
    for name in names.split("\0"):
        if name and (ROOT / name).is_file():  # git lists deleted files too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def run_tests(folder: Path, arguments: Sequence[str], limit_s: float) -> tuple[str, str]:
    """Run pytest in a copy of the repository; return a verdict and the test that decided it.

    PYTHONPATH puts the tree before the editable install, in pytest and in its child processes."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    variables = os.environ | {"PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as log:
        # In a new session, so that all processes that the tests leave can be killed.
        run = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = run.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "caught", "timeout"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()
        log.seek(0)
        lines = [line.rstrip() for line in log]
    if code in (0, NOTHING_COLLECTED):
        return "survived", ""
    bad = [line for line in lines if line.startswith(("FAILED tests", "ERROR tests"))]
    # A test id may contain blanks. The error follows after it.
    failed = [line.partition(" ")[2].partition(" - ")[0] for line in bad]
    # A file that cannot be collected is listed without a test, so the mutant is invalid.
    if code != 1 or not failed or "::" not in failed[0]:
        return "invalid", failed[0] if failed else "".join(lines[-1:])
    return "caught", failed[0]


def tested(
    mutant: Mutant | None, arguments: Sequence[str], limit_s: float, revision: str | None
) -> tuple[str, str]:
    """Run tests in a copy of the repository with the mutant (None: without a change).

    Return a verdict and the test that decided it.

    A failing test must fail again when it runs separately, else it is deselected. Some tests
    measure time and can fail on a busy machine.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        copy_tree(revision, folder)
        if mutant is not None:
            path = folder / mutant.path
            path.write_text(mutant.applied_to(path.read_text()))
        while True:
            verdict, by = run_tests(folder, arguments, limit_s)
            if "::" not in by or run_tests(folder, [by], limit_s)[0] == "caught":
                return verdict, by
            arguments = [*arguments, "--deselect", by]


def run_stage(stage: Stage, mutants: Sequence[Mutant], notes: Notes, options: Namespace) -> None:
    """Run a stage on the mutants that have survived so far and have not run in it.

    Ends the program if the stage's tests fail without a mutant.
    """
    todo = [mutant for mutant in mutants if notes.wants(mutant, stage)]
    if not todo:
        return
    began = time.monotonic()
    verdict, by = tested(None, stage.arguments(todo), SOUND_LIMIT_S, options.revision)
    sound_s = time.monotonic() - began
    if verdict != "survived":
        raise SystemExit(f"without a mutant, stage {stage.name} is {verdict} by {by}")
    limit_s = max(stage.limit_s, 2 * sound_s) if stage.on_all_files else stage.limit_s

    def tried(mutant: Mutant) -> None:
        started = time.monotonic()
        verdict, by = tested(mutant, stage.arguments([mutant]), limit_s, options.revision)
        notes.add(mutant, stage, verdict, by, time.monotonic() - started)

    with ThreadPoolExecutor(options.jobs) as threads:
        list(threads.map(tried, todo))


class Notes:
    """The results of the mutants so far, saved to a file if `path` is given."""

    def __init__(self, path: Path | None) -> None:
        """Read the results that an earlier call saved, for mutants that have not changed."""
        self._path = path
        self._lock = Lock()
        known = json.loads(path.read_text()) if path is not None and path.exists() else {}
        mutants = {mutant.name: mutant for mutant in MUTANTS}
        self.found: dict[str, Found] = {}
        for name, one in known.items():
            found = Found(**one | {"stages": tuple(one["stages"]), "of": tuple(one["of"])})
            if name in mutants and found.of == identity(mutants[name]):
                self.found[name] = found

    def wants(self, mutant: Mutant, stage: Stage) -> bool:
        """Return whether the mutant still has to run in the stage."""
        found = self.found.get(mutant.name)
        return found is None or (found.verdict == "survived" and stage.name not in found.stages)

    def add(self, mutant: Mutant, stage: Stage, verdict: str, by: str, seconds: float) -> None:
        """Store, print and save the result of a mutant in a stage."""
        with self._lock:
            before = self.found.get(mutant.name)
            stages, earlier_s = ((), 0.0) if before is None else (before.stages, before.seconds)
            stages, seconds = (*stages, stage.name), round(earlier_s + seconds, 1)
            self.found[mutant.name] = Found(verdict, by, stages, seconds, identity(mutant))
            print(self.row(mutant), flush=True)
            if self._path is not None:
                found = {name: asdict(one) for name, one in self.found.items()}
                self._path.write_text(json.dumps(found, indent=1))

    def row(self, mutant: Mutant) -> str:
        """Return a mutant's line in the table of results."""
        one = self.found[mutant.name]
        where = f"{one.verdict:8} {one.stages[-1]:6} {one.seconds:6.0f} s"
        return f"{mutant.name:50} {where}  {one.by}"


def identity(mutant: Mutant) -> tuple[str, ...]:
    """Return the fields of a mutant that make its result invalid when they change."""
    return (mutant.path, mutant.old, mutant.new, *mutant.tests)


def main() -> int:
    """Run the command line; return 1 if a mutant survived or was invalid."""
    names = [mutant.name for mutant in MUTANTS]
    stages = [stage.name for stage in STAGES]
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names)
    parser.add_argument("--stages", nargs="+", choices=stages, default=stages)
    parser.add_argument("--jobs", type=int, default=1, help="number of mutants in parallel")
    parser.add_argument("--revision", help="git revision to test instead of the working tree")
    parser.add_argument("--out", type=Path, help="JSON file that keeps the results")
    parser.add_argument("--check", action="store_true", help="only check that the mutants fit")
    options = parser.parse_args()
    if options.check:
        print("\n".join(problems()) or f"{len(MUTANTS)} mutants fit")
        return int(bool(problems()))
    mutants = [mutant for mutant in MUTANTS if mutant.name in options.only]
    notes = Notes(options.out)
    for stage in STAGES:
        if stage.name in options.stages:
            run_stage(stage, mutants, notes, options)
    tried = [mutant for mutant in mutants if mutant.name in notes.found]
    print("", *map(notes.row, tried), sep="\n")
    caught = sum(notes.found[mutant.name].verdict == "caught" for mutant in tried)
    print(f"\ncaught {caught} of {len(tried)}")
    return int(caught < len(tried))


if __name__ == "__main__":
    sys.exit(main())
