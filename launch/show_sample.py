"""`python -m launch.show_sample run=outputs/demo step=7 position=3 [out=page.html]`: one sample of
a run as a page of HTML.

Prompt, images with ground truth and predictions, the rollout and what was kept of it, the appended
text, and every token of the target coloured by what supervises it. Reads the run's `config.json`
and `rollouts/` (learner.rollout_logs.samples), the sample's images from `data.train`, and the
tokenizer of `model.path`; starts nothing. The same files give the same page.

Of a run of an environment (learner.rollout_logs.trajectories) it is one rollout: the dialogue, its
rewards, and its tokens coloured by their advantage.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt
from rich.console import Console

from launch.cli import explained, read_arguments
from launch.runtime.saved_run import load_run
from launch.sample_pages.detection import Canvas, SamplePage
from launch.sample_pages.rollout import RolloutPage, advantages
from learner.image_files import image_size
from learner.rollout_logs import samples as rollout_log
from learner.rollout_logs import trajectories as trajectory_log
from learner.rollout_logs.samples import RolloutRecord
from learner.rollout_logs.trajectories import TrajectoryRecord
from learner.rollout_logs.writer import step_path
from learner.samples import load_samples
from shared.config import RunConfig
from shared.config.base import ConfigPath, Section
from shared.config.pipeline import Channel, PolicyGradientEntry
from shared.errors import ConfigError, RecordError
from shared.prompts import detection_messages
from shared.records import ImageRef, Sample
from shared.tokens.hf_codec import HFTokenCodec, token_pieces


class ShowOptions(Section):
    run: Annotated[ConfigPath, Field(examples=["outputs/demo"])]
    """Folder of the run."""

    step: Annotated[PositiveInt, Field(examples=[7])]
    """Step, from 1, as the console and the name of its file in `rollouts` have it."""

    position: Annotated[NonNegativeInt, Field(examples=[3])]
    """The sample's, or the rollout's, place in the step, from 0."""

    out: ConfigPath | None = None
    """HTML file to write; without it `samples/step_..._position_....html` in the run's folder."""


RecordT = TypeVar("RecordT", RolloutRecord, TrajectoryRecord)


def show_sample(options: ShowOptions) -> Path:
    """Writes the page and returns its path.

    Raises:
        ConfigError: there is no such run, step or position; the data or the model are no longer
        those of the run; `out` cannot be written.
        RecordError: a line of the log is damaged or of another version; the data file or an image
        is gone, or has become unusable.
    """
    config = load_run(options.run)
    html = (
        _sample_page(options, config).html()
        if config.environment is None
        else _rollout_page(options, config).html()
    )
    out = (
        options.out
        or options.run / "samples" / f"step_{options.step:06d}_position_{options.position:03d}.html"
    )
    return _write(out, html)


def _sample_page(options: ShowOptions, config: RunConfig) -> SamplePage:
    line = _find_line(options, config, rollout_log.read_step)
    sample = _find_sample(config, line)
    tokenizer = _load_tokenizer(config)
    codec = _codec(config, tokenizer, line)
    messages = detection_messages(
        len(sample.images),
        system_prompt=config.data.system_prompt,
        user_prompt=config.data.user_prompt,
    )
    return SamplePage(
        run=f"{config.telemetry.name}, {options.run}",
        line=line,
        canvas=Canvas(tuple(map(_image_file, sample.images)), sample.width, sample.height),
        prompt=str(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ),
        objective=_objective(config, Channel(line["channel"])),
        notes=_notes(config, sample, line),
        codec=codec,
    )


def _rollout_page(options: ShowOptions, config: RunConfig) -> RolloutPage:
    line = _find_line(options, config, trajectory_log.read_step)
    return RolloutPage(
        run=f"{config.telemetry.name}, {options.run}",
        line=line,
        pieces=_pieces(config, line),
        objective=_objective(config, Channel.B),
        notes=_rollout_notes(config, line),
    )


def _find_line(
    options: ShowOptions, config: RunConfig, read_step: Callable[[Path], list[RecordT]]
) -> RecordT:
    folder = options.run / "rollouts"
    path = step_path(folder, options.step)
    try:
        lines = read_step(path)
    except FileNotFoundError as error:
        steps = sorted(
            int(match[1])
            for file in folder.glob("step_*.jsonl")
            if (match := re.fullmatch(r"step_(\d+)\.jsonl", file.name))
        )
        if not steps:
            why = (
                "train with telemetry.rollouts: true"
                if not config.telemetry.rollouts
                else "it ended before its first step, or an older version ran it"
            )
            raise ConfigError(f"run: {options.run} has no rollouts; {why}") from error
        raise ConfigError(
            f"step: {options.run} has no step {options.step}; it has {_ranges(steps)}"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"step: {path} cannot be read ({error.strerror}); permit reading it, or show another"
            " step"
        ) from error
    found = next((line for line in lines if line["position"] == options.position), None)
    if found is None:
        positions = (
            _ranges(sorted(line["position"] for line in lines))
            or "none: the run ended in this step"
        )
        raise ConfigError(
            f"position: step {options.step} of {options.run} has no position {options.position}; it"
            f" has {positions}"
        )
    return found


def _find_sample(config: RunConfig, line: RolloutRecord) -> Sample:
    """With its images' bytes. Only they are read, whatever `data.check_images` says: one page needs
    no check of the whole file.
    """
    assert config.data.train is not None, "runs of environments have other pages"
    unchecked = config.model_copy(
        update={"data": config.data.model_copy(update={"check_images": False})}
    )
    found = next(
        (
            sample
            for sample in load_samples(unchecked, config.data.train)
            if sample.sample_id == line["sample_id"]
        ),
        None,
    )
    if found is None:
        raise ConfigError(
            f"data.train: {config.data.train} has no sample {line['sample_id']!r} any more; restore"
            " the file that the run learned from"
        )
    return found.with_image_data()


def _image_file(image: ImageRef) -> bytes:
    """The encoded bytes of an image that can be decoded. RecordError."""
    assert image.data is not None
    try:
        image_size(image.data)
    except ValueError as error:
        raise RecordError(
            f"{image.path} is not a readable image ({error})",
            field="images",
            remedy="restore the file",
        ) from error
    return image.data


def _load_tokenizer(config: RunConfig) -> Any:
    path = Path(config.model.path)
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.path: {path} holds no tokenizer (no tokenizer.json); restore the folder that"
            " the run began from"
        )
    from transformers import AutoTokenizer  # takes seconds

    try:
        return AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.path: the tokenizer of {path} cannot be loaded ({error}); restore the folder"
            " that the run began from"
        ) from error


def _codec(config: RunConfig, tokenizer: Any, line: RolloutRecord) -> HFTokenCodec:
    """ConfigError where the tokens of the log are not this tokenizer's."""
    problem = f"model.path: the tokenizer of {config.model.path} is not the one of the run"
    remedy = "restore the folder that the run began from"
    try:
        codec = HFTokenCodec(tokenizer)
    except ValueError as error:
        raise ConfigError(f"{problem} ({error}); {remedy}") from error
    rollout = line["rollout"]
    same_text = (
        rollout is None
        or b"".join(map(codec.piece_bytes, rollout["response_token_ids"])).decode(errors="replace")
        == rollout["text"]
    )
    if line["target"]["token_ids"][-1] != codec.eos_token_id or not same_text:
        raise ConfigError(f"{problem}: the log's tokens mean another text; {remedy}")
    return codec


def _pieces(config: RunConfig, line: TrajectoryRecord) -> dict[int, bytes]:
    """The text of every token of the line's examples. ConfigError where one is not of this
    model."""
    token_ids = sorted(
        {token_id for example in line["examples"] for token_id in example["token_ids"]}
    )
    if not token_ids:
        return {}
    tokenizer = _load_tokenizer(config)
    size = max(len(tokenizer), _embeddings(config))
    if token_ids[-1] >= size:
        told = (
            f"model.path: {config.model.path} has no token {token_ids[-1]}, which the log has, but"
            f" {size} of them"
        )
        raise ConfigError(f"{told}; restore the folder that the run began from")
    try:
        table = token_pieces(tokenizer)
    except ValueError:
        # Not a byte-level tokenizer: then a token's text is what it is by itself.
        return {
            token_id: tokenizer.decode([token_id], clean_up_tokenization_spaces=False).encode()
            for token_id in token_ids
        }
    return {token_id: table[token_id] if token_id < len(table) else b"" for token_id in token_ids}


def _embeddings(config: RunConfig) -> int:
    """How many the model has: often more than its tokenizer has tokens, and the engine may sample
    those without a text.
    """
    from transformers import AutoConfig

    try:
        return int(AutoConfig.from_pretrained(config.model.path).get_text_config().vocab_size)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.path: {config.model.path} cannot be read ({error}); restore the folder that the"
            " run began from"
        ) from error


def _objective(config: RunConfig, channel: Channel) -> tuple[str, ...]:
    """The active modules, each with its weight and the settings that are not 0 or null."""
    described = []
    for entry in config.rollout_matching.pipeline.active(channel):
        settings = ", ".join(
            f"{key} {value if isinstance(value, str) else f'{value:g}'}"
            for key, value in entry.config.model_dump().items()
            if value
        )
        described.append(
            f"{entry.name} × {entry.weight:g} ({settings})"
            if settings
            else f"{entry.name} × {entry.weight:g}"
        )
    return tuple(described)


def _notes(config: RunConfig, sample: Sample, line: RolloutRecord) -> tuple[str, ...]:
    used = [(truth["kind"], tuple(truth["bins"]), truth["desc"]) for truth in line["ground_truth"]]
    notes = []
    if [(object_.kind, object_.bins, object_.desc) for object_ in sample.objects] != used:
        notes.append(
            f"{config.data.train} has changed since the run: the ground truth here is the run's,"
            " the images are today's."
        )
    if not any(
        entry.name == "token_ce"
        for entry in config.rollout_matching.pipeline.active(Channel(line["channel"]))
    ):
        notes.append(
            "token_ce is not active in this channel: text weights only say where text_gate applies."
        )
    return tuple(notes)


def _rollout_notes(config: RunConfig, line: TrajectoryRecord) -> tuple[str, ...]:
    assert config.environment is not None, "runs of samples have other pages"
    notes = []
    if any(
        isinstance(entry, PolicyGradientEntry) and entry.config.advantage_std
        for entry in config.rollout_matching.pipeline.active(Channel.B)
    ):
        notes.append(
            "Advantages are those of the log: advantage_std divides them by the standard deviation"
            " of their group's rewards before they are learned."
        )
    given = [advantage for example in line["examples"] for advantage in advantages(example)]
    if config.environment.drop_equal_groups and given and not any(given):
        notes.append(
            "Its advantages are 0: where all rollouts of its row have the same reward,"
            " drop_equal_groups leaves them out of the step."
        )
    return tuple(notes)


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers, neighbours joined: `0-17, 20`."""
    breaks = [0, *(i for i, (a, b) in enumerate(pairwise(numbers), 1) if b > a + 1), len(numbers)]
    runs = [numbers[start:stop] for start, stop in pairwise(breaks) if start < stop]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _write(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    except OSError as error:
        raise ConfigError(
            f"out: cannot write {path} ({error.strerror}); choose another file with out="
        ) from error
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(Console(stderr=True, soft_wrap=True)):
        print(
            show_sample(
                read_arguments(ShowOptions, sys.argv[1:] if arguments is None else arguments)
            )
        )


if __name__ == "__main__":
    main()
