"""Every shipped experiment and backend composes and loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from launch.cli import as_schema_overrides
from launch.processes.batch_algebra import batch_algebra
from launch.tools.demo.once import DEMO_FOLDERS
from shared.config import RunConfig, load_config
from shared.config.algorithm import TrainerVariant
from shared.config.derive import remarks
from shared.config.explain import sections_in
from shared.schedule import RunSchedule

CONF = Path(__file__).parents[2] / "conf"
EXPERIMENTS = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
BACKENDS = sorted(path.stem for path in (CONF / "backend").glob("*.yaml"))
PAGES = [CONF.parent / "README.md", *sorted((CONF.parent / "docs").rglob("*.md"))]
# Of a reader: an experiment that the page's earlier steps have made, any name.
THEIR_OWN = re.compile(r"--config-dir \S+ \+experiment=\w+|\+experiment=NAME")
# What README and docs start runs with.
COMMANDS = sorted(
    {
        found
        for page in PAGES
        for found in re.findall(
            r"\+experiment=\w+(?: [\w.]+=[^\s\"`]+)*", THEIR_OWN.sub("", page.read_text())
        )
    }
)
MAIN = "+experiment=stage2_3v1"
# Written out where a file is about them, or where an experiment takes back what the one it builds
# on has set.
CHOICES = {
    "environment.rollouts_per_example",
    "rollout_matching.rollout_backend",
    "rollout_matching.vllm.enforce_eager",
    "rollout_matching.vllm.kv_cache_memory_bytes",
    "rollout_matching.vllm.mode",
    "rollout_matching.vllm.server.kind",
    "stage2_ab.channel_b.enable_pipeline",
    "custom.object_field_order",
    "rollout_matching.trim_trailing_false_positives",
}


def composed(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("train", overrides=list(overrides)), resolve=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


@cache
def loaded(*overrides: str) -> RunConfig:
    return load_config(composed(*overrides))


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_shipped_experiment_loads_and_repeats_no_default_of_the_schema(experiment):
    written = composed(f"+experiment={experiment}")
    run = load_config(written)
    # What servers, or a cluster without GPUs, answer when they are asked for their devices.
    asked = (1, 1, 1)
    if run.training.num_epochs is not None:  # its data decide the number of steps
        length = {"max_steps": 1, "num_epochs": None}
        run = run.model_copy(update={"training": run.training.model_copy(update=length)})
    assert batch_algebra(run, run.engine_devices or asked).describe()
    assert set(repeated(RunConfig.model_fields, written)) <= CHOICES


def repeated(fields: Any, values: dict[str, Any], above: str = "") -> Iterator[str]:
    """Yield the keys whose values are defaults; arguments of an environment have none."""
    for key, value in values.items():
        field = fields[key]
        if isinstance(value, dict) and sections_in(field.annotation):
            (section,) = sections_in(field.annotation)
            yield from repeated(section.model_fields, value, f"{above}{key}.")
        elif not field.is_required() and field.default == value:
            yield f"{above}{key}"


@pytest.mark.slow
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_folders_that_a_shipped_experiment_needs_are_made_on_the_way(experiment):
    run = loaded(f"+experiment={experiment}")
    files = [source.path for split in ("train", "val") for source in run.data.sources(split)]
    if run.environment is not None:
        files += [Path(text) for text in run.environment.args.values() if isinstance(text, str)]
    needed = {Path(run.model.path), *(file.parent for file in files)}
    made = {folder.parent if folder.name == "checkpoint" else folder for folder in needed}
    of_a_user = {folder for folder in made if folder.is_absolute()}
    assert made - of_a_user <= DEMO_FOLDERS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experiment", "model"),
    [*((one, "qwen3_vl_4b") for one in EXPERIMENTS), ("stage2_3v1_4b", "qwen2_5_vl_3b")],
)
def test_a_real_model_loads_with_every_experiment_and_keeps_its_own_learning_rates(
    experiment, model
):
    run = loaded(f"+experiment={experiment}", f"model={model}")
    assert (run.model.dtype, run.model.gradient_checkpointing) == ("bfloat16", True)
    assert (run.canary_tolerance, run.logprob_tolerance) == (None, 1.0)
    training = run.training
    parts = (training.parts.vision_tower, training.parts.aligner, training.parts.language_model)
    assert [part.learning_rate for part in parts] == [1e-6, 1e-5, 1e-5]
    assert not any(part.frozen for part in parts)
    assert (training.max_grad_norm, training.adam_beta2) == (1.0, 0.95)
    assert training.max_nonfinite_updates == 3
    assert (run.checkpoint.keep_last, run.checkpoint.keep_best) == (2, 1)


@pytest.mark.slow
def test_the_real_run_is_the_main_job_with_another_model_and_other_sizes():
    main = loaded(MAIN)
    real = loaded("+experiment=stage2_3v1_4b")
    assert real.model == loaded(MAIN, "model=qwen3_vl_4b").model
    assert real.custom.trainer_variant is main.custom.trainer_variant
    names = [entry.name for entry in main.rollout_matching.pipeline.objective]
    assert [entry.name for entry in real.rollout_matching.pipeline.objective] == names
    assert batch_algebra(real).round_sizes == (64, 64)
    schedule = real.training.lr_schedule, real.training.min_lr_ratio
    assert schedule == ("cosine", 0.1)
    vllm = real.rollout_matching.vllm
    sizes = (vllm.enforce_eager, vllm.kv_cache_memory_bytes)
    assert sizes == (False, None), "sizes of the demo are taken back"


def test_the_main_job_is_three_actors_one_learner_and_a_round_of_16():
    run = loaded(MAIN)
    algebra = batch_algebra(run)
    assert algebra.engine_devices == (1, 1, 1)
    assert (algebra.learner_world_size, algebra.round_sizes) == (1, (16,))
    assert run.stage2_ab.channel_b.enable_pipeline
    assert run.training.packing
    assert run.telemetry.name == "run"
    assert run.telemetry.run_dir.is_relative_to("outputs")


@pytest.mark.slow
def test_the_control_goes_on_from_the_demos_start_as_the_demo_does_but_without_rollouts():
    demo = loaded(MAIN)
    control = loaded("+experiment=control")
    assert batch_algebra(demo).b_steps == demo.training.max_steps // 2
    assert batch_algebra(control).b_steps == 0
    assert control.training.max_steps > demo.training.max_steps
    assert (control.model, control.data, control.custom.object_field_order) == (
        demo.model,
        demo.data,
        demo.custom.object_field_order,
    )
    pipeline = demo.rollout_matching.pipeline.model_dump()
    pipeline["objective"][0]["config"]["matched_desc_weight"] = 0.0  # of rollouts alone
    assert control.rollout_matching.pipeline.model_dump() == pipeline
    learned = demo.training.model_dump() | {"max_steps": control.training.max_steps}
    assert control.training.model_dump() == learned


@pytest.mark.slow
def test_trajectories_are_learned_on_the_engines_of_the_main_job_and_from_no_samples():
    main = loaded(MAIN)
    run = loaded("+experiment=env_3v1")
    assert run.custom.trainer_variant is TrainerVariant.TRAJECTORY_PG
    assert (run.rollout_matching.vllm, run.learner) == (main.rollout_matching.vllm, main.learner)
    assert (run.data.train, run.data.val) == (None, None)
    assert RunSchedule(run).evaluates_before(0), "what the reward rises from"
    assert remarks(run) == ()


def numbers(line: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", line)]


def test_the_batch_algebra_of_trajectories_counts_examples():
    step, in_round, rows = batch_algebra(loaded("+experiment=env_3v1")).describe()[1:]
    assert step.startswith("channel-B step ") and "32 examples x 8 rollouts" in step
    assert numbers(step) == [256, 32, 8, 2, 128, 128, 256]
    assert in_round.startswith("round ") and in_round.endswith(" 43+43+42 | 43+42+43")
    assert numbers(in_round)[:4] == [144, 3, 1, 48]
    assert rows.startswith("rows ") and numbers(rows) == [512, 8]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_serves_environments_and_has_the_queue_where_it_can(backend):
    run = loaded("+experiment=env_3v1", f"backend={backend}")
    assert run.environment is not None
    is_beside = backend in ("colocate", "hf")
    assert run.stage2_ab.channel_b.enable_pipeline is not is_beside


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_readme_loads(command):
    first_trial = [override.split(",")[0] for override in command.split()]
    training = loaded(*as_schema_overrides(first_trial)).training
    assert training.max_steps or training.num_epochs


@pytest.mark.slow
def test_the_readme_s_own_model_is_trained_with_the_sizes_of_a_real_run():
    commands = [one for one in COMMANDS if "stage2_3v1_4b" in one and "/models/" in one]
    assert commands
    for command in commands:
        run = loaded(*as_schema_overrides(command.split()))
        assert run.model.dtype == "bfloat16"
        assert run.rollout_matching.vllm.kv_cache_memory_bytes is None
        assert run.training.parts.language_model.learning_rate == 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_shipped_backend_takes_the_place_of_the_actors(backend):
    matching = loaded(MAIN, f"backend={backend}").rollout_matching
    modes = {
        "actors": "actors",
        "colocate": "colocate",
        "hf": "colocate",
        "server": "server",
        "stock_server": "server",
    }
    assert matching.vllm.mode == modes[backend]
    assert matching.rollout_backend == ("hf" if backend == "hf" else "vllm")


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology", ["stage2_colocate", "stage2_hf", "stage2_server", "stage2_2learners"]
)
def test_a_topology_is_the_main_job_on_other_devices(topology):
    """It learns the same, in the same steps."""
    main = loaded(MAIN)
    other = loaded(f"+experiment={topology}")
    for section in ("model", "data", "custom", "training", "global_max_length", "evaluation"):
        assert getattr(other, section) == getattr(main, section)
    assert other.rollout_matching.pipeline == main.rollout_matching.pipeline
    assert list(RunSchedule(other).plans()) == list(RunSchedule(main).plans())


def test_hydra_leaves_the_warnings_of_the_run_alone():
    with initialize_config_dir(str(CONF), version_base="1.3"):
        hydra = compose("train", return_hydra_config=True).hydra
    assert (hydra.job_logging.root, hydra.hydra_logging.root) == (None, None)


def test_the_other_variant_is_chosen_on_the_command_line_and_has_no_schedule():
    other = [
        "custom.trainer_variant=stage2_rollout_aligned",
        "training.effective_batch_size=16",
        "++training.per_device_train_batch_size=8",
    ]
    algebra = batch_algebra(loaded(MAIN, *other))
    assert (algebra.raw_rollouts_per_step, algebra.gradient_accumulation_steps) == (16, 2)
    assert algebra.b_steps == algebra.updates
