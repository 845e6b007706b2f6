"""Writes one sample of a run as an HTML page.

    rollmatch show-sample run=outputs/demo step=7 position=3 [out=page.html]

The page shows the prompt, the images with ground truth and predictions, and the rollout with its
kept and appended parts. The target's tokens are coloured by their supervision. For an environment
it shows the dialogue, the rewards, and tokens coloured by advantage. Reads `config.json` and
`rollouts/` of the run, `data.train`, and the tokenizer of `model.path`. The same files give the
same page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from pydantic import Field, NonNegativeInt, PositiveInt

from launch.cli import explained, read_arguments
from launch.inspect.sample_pages.detection import Canvas, SamplePage
from launch.inspect.sample_pages.rollout import RolloutPage, advantages
from launch.run_folder.console import escaped, make_console
from launch.run_folder.saved_run import load_run
from learner.data.augment import Augmentation
from learner.data.samples import image_size, load_samples
from learner.rollout_logs import samples as rollout_log
from learner.rollout_logs import trajectories as trajectory_log
from learner.rollout_logs.samples import RolloutRecord
from learner.rollout_logs.trajectories import TrajectoryRecord
from learner.rollout_logs.writer import logged_steps, step_path
from shared.config import RunConfig
from shared.config.algorithm import EnvironmentSection
from shared.config.base import ConfigPath, Section
from shared.config.model import DataSection
from shared.config.pipeline import Channel, PipelineSection
from shared.errors import ConfigError, RecordError
from shared.grounding.serialize import AnswerFormat
from shared.prompts import detection_messages
from shared.records import ImageRef, Sample
from shared.tokens.hf_codec import HFTokenCodec, token_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_RESTORE_MODEL = "restore the folder that the run started from"


class ShowOptions(Section):
    run: Annotated[ConfigPath, Field(examples=["outputs/demo"])]
    """Folder of the run."""
    step: Annotated[PositiveInt, Field(examples=[7])]
    """Step, from 1, as on the console and in the file names of `rollouts`."""
    position: Annotated[NonNegativeInt, Field(examples=[3])]
    """Position of the sample or rollout in the step, from 0."""
    out: ConfigPath | None = None
    """HTML file to write; null: `samples/step_..._position_....html` in the run folder."""


RecordT = TypeVar("RecordT", RolloutRecord, TrajectoryRecord)


def show_sample(options: ShowOptions) -> Path:
    """Write the HTML page of one sample of a run, and return its path.

    Raises:
        ConfigError: run, step or position does not exist, data or model has changed, or `out`
            cannot be written.
        RecordError: a line of the log is damaged or has another version, or data or images are
            damaged.
    """
    config = load_run(options.run)
    if not config.algorithm.uses_environment:
        html = _sample_page(options, config).html()
    else:
        html = _rollout_page(options, config).html()
    name = f"step_{options.step:06d}_position_{options.position:03d}.html"
    path = options.out or options.run / "samples" / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(html.encode())
    except OSError as error:
        unwritten = f"cannot write {path} ({error.strerror})"
        raise ConfigError(f"out: {unwritten}; choose another file with out=") from error
    return path


def _sample_page(options: ShowOptions, config: RunConfig) -> SamplePage:
    line = _find_line(options, rollout_log.read_step)
    sample = _find_sample(config, line)
    model = Path(config.model.path)
    tokenizer = _load_tokenizer(model)
    codec = _require_same_tokens(model, config.answer_format, tokenizer, line)
    messages = detection_messages(len(sample.images), *config.prompts.texts(sample))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return SamplePage(
        run=f"{config.telemetry.name}, {options.run}",
        line=line,
        canvas=Canvas(tuple(map(_image_file, sample.images)), sample.width, sample.height),
        prompt=str(prompt),
        objective=_objective(config.rollout_matching.pipeline, Channel(line["channel"])),
        notes=_notes(config, sample, line),
        codec=codec,
    )


def _rollout_page(options: ShowOptions, config: RunConfig) -> RolloutPage:
    assert config.environment is not None, "runs without an environment use _sample_page"
    line = _find_line(options, trajectory_log.read_step)
    return RolloutPage(
        run=f"{config.telemetry.name}, {options.run}",
        line=line,
        pieces=_pieces(Path(config.model.path), line),
        objective=_objective(config.rollout_matching.pipeline, Channel.B),
        notes=_rollout_notes(config.environment, config.rollout_matching.pipeline, line),
    )


def _find_line(options: ShowOptions, read_step: Callable[[Path], list[RecordT]]) -> RecordT:
    folder = options.run / "rollouts"
    path = step_path(folder, options.step)
    try:
        lines = read_step(path)
    except FileNotFoundError as error:
        if not (steps := logged_steps(folder)):
            why = "train at least one step with telemetry.rollouts: true"
            raise ConfigError(f"run: {options.run} has no rollouts; {why}") from error
        problem = f"has no step {options.step}; it has {_ranges(steps)}"
        raise ConfigError(f"step: {options.run} {problem}") from error
    except OSError as error:
        unread = f"{path} cannot be read ({error.strerror})"
        raise ConfigError(f"step: {unread}; permit reading it, or choose another step") from error
    for line in lines:
        if line["position"] == options.position:
            return line
    positions = _ranges(sorted(line["position"] for line in lines))
    raise ConfigError(
        f"position: step {options.step} of {options.run} has no position {options.position}; it"
        f" has {positions or 'none: the run ended in this step'}"
    )


def _find_sample(config: RunConfig, line: RolloutRecord) -> Sample:
    """Return the sample of a log line with its image bytes, augmented as in the run."""
    # Checking all images of the file is not needed for one page.
    data = config.data.model_copy(update={"check_images": False})
    unchecked = config.model_copy(update={"data": data})
    for source in config.data.sources("train"):
        for sample in load_samples(unchecked, source):
            if sample.sample_id == line["sample_id"]:
                if "augmentation" not in line:
                    return sample.with_image_data()
                return Augmentation(**line["augmentation"]).applied(sample)
    raise ConfigError(
        f"data.train: {_train_files(config.data)} has no sample {line['sample_id']!r} any more;"
        " restore the data of the run"
    )


def _train_files(data: DataSection) -> str:
    return ", ".join(str(source.path) for source in data.sources("train"))


def _image_file(image: ImageRef) -> bytes:
    """Return the encoded bytes of an image. Raises RecordError if it cannot be decoded."""
    assert image.data is not None
    try:
        image_size(image.data)
    except ValueError as error:
        problem = f"{image.path} is not a readable image ({error})"
        raise RecordError(problem, field="images", remedy="restore the file") from error
    return image.data


def _load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    if not (path / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.path: {path} holds no tokenizer (no tokenizer.json); {_RESTORE_MODEL}"
        )
    from transformers import AutoTokenizer  # takes seconds

    try:
        return AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model.path: the tokenizer of {path} cannot be loaded ({error}); {_RESTORE_MODEL}"
        ) from error


def _require_same_tokens(
    model: Path,
    answer_format: AnswerFormat,
    tokenizer: PreTrainedTokenizerBase,
    line: RolloutRecord,
) -> HFTokenCodec:
    """Return the tokenizer's codec.

    Raises ConfigError if the tokenizer is not the one of the run: with it, the tokens in the log do
    not decode to the text in the log.
    """
    problem = f"model.path: the tokenizer of {model} is not the one of the run"
    try:
        codec = HFTokenCodec(
            tokenizer,
            coord_tokens=answer_format.coord_tokens,
            markup_tokens=answer_format.markup_tokens,
        )
    except ValueError as error:
        raise ConfigError(f"{problem} ({error}); {_RESTORE_MODEL}") from error
    is_same = line["target"]["token_ids"][-1] == codec.eos_token_id
    if (rollout := line["rollout"]) is not None:
        pieces = b"".join(map(codec.piece_bytes, rollout["response_token_ids"]))
        is_same = is_same and pieces.decode(errors="replace") == rollout["text"]
    if not is_same:
        raise ConfigError(f"{problem}: the log's tokens decode to another text; {_RESTORE_MODEL}")
    return codec


def _pieces(path: Path, line: TrajectoryRecord) -> dict[int, bytes]:
    """Return the UTF-8 bytes of each token of the examples, by id; empty for an id without text.

    Raises ConfigError if the model's files cannot be read, or if the model lacks a token.
    """
    examples = line["examples"]
    token_ids = sorted({token_id for example in examples for token_id in example["token_ids"]})
    if not token_ids:
        return {}
    tokenizer = _load_tokenizer(path)
    from transformers import AutoConfig

    try:
        # Models often have more rows than the tokenizer; engines may sample those without text.
        num_rows = int(AutoConfig.from_pretrained(path).get_text_config().vocab_size)
    except (ValueError, OSError) as error:
        unread = f"{path} cannot be read ({error})"
        raise ConfigError(f"model.path: {unread}; {_RESTORE_MODEL}") from error
    size = max(len(tokenizer), num_rows)
    if token_ids[-1] >= size:
        unknown = f"{path} has {size} tokens, but the log contains token {token_ids[-1]}"
        raise ConfigError(f"model.path: {unknown}; {_RESTORE_MODEL}")
    try:
        table = token_pieces(tokenizer)
    except ValueError:
        # The tokenizer is not byte-level: decode each token separately.
        return {
            token_id: tokenizer.decode([token_id], clean_up_tokenization_spaces=False).encode()
            for token_id in token_ids
        }
    return {token_id: table[token_id] if token_id < len(table) else b"" for token_id in token_ids}


def _objective(pipeline: PipelineSection, channel: Channel) -> tuple[str, ...]:
    """Describe the active loss modules by their weights and their non-empty settings."""
    described = []
    for entry in pipeline.active(channel):
        settings = [
            f"{key} {f'{value:g}' if isinstance(value, (int, float)) else value}"
            for key, value in dict(entry.config).items()
            if value
        ]
        text = f"{entry.name} × {entry.weight:g}"
        described.append(f"{text} ({', '.join(settings)})" if settings else text)
    return tuple(described)


def _notes(config: RunConfig, sample: Sample, line: RolloutRecord) -> tuple[str, ...]:
    used = [(truth["kind"], tuple(truth["bins"]), truth["desc"]) for truth in line["ground_truth"]]
    notes = []
    if [(object_.kind, object_.bins, object_.desc) for object_ in sample.objects] != used:
        notes.append(
            f"{_train_files(config.data)} has changed since the run. The page shows the ground"
            " truth of the run and the images of today."
        )
    if config.rollout_matching.maskiou_gate_schedule is not None and line["channel"] == Channel.B:
        gate = config.maskiou_gate(line["step"] - 1)
        notes.append(f"Pairs below mask IoU {gate:.4g} cannot match (maskiou_gate_schedule).")
    active = config.rollout_matching.pipeline.active(Channel(line["channel"]))
    if not any(entry.name == "token_ce" for entry in active):
        notes.append(
            "token_ce is not active in this channel: text weights only show where text_gate"
            " applies."
        )
    return tuple(notes)


def _rollout_notes(
    section: EnvironmentSection, pipeline: PipelineSection, line: TrajectoryRecord
) -> tuple[str, ...]:
    changes = []
    for _, config in pipeline.policy_gradients():
        changes += ["advantage_std"] if config.advantage_std else []
        changes += [] if config.advantage_baseline == "mean" else [config.advantage_baseline]
    if section.teacher is not None:
        changes.append("the teacher's log-probabilities")
    notes = []
    # By token, whether the learner computed the advantage from the group's rewards; None: all.
    marks = [example.get("token_is_relative") for example in line["examples"]]
    if marks and all(one is not None and not any(one) for one in marks):
        notes.append("The environment set the advantages shown. The learner used them unchanged.")
    elif changes:
        names = ", ".join(changes)
        notes.append(
            f"The advantages shown are rewards minus their mean. The learner also applied {names}."
        )
    if section.drop_truncated:
        notes.append("If the rollout is truncated, it is not trained (drop_truncated).")
    values = [value for example in line["examples"] for value in advantages(example)]
    if (section.drops_equal(pipeline) or section.refill_rounds) and values and not any(values):
        notes.append(
            "The advantages are 0, because the rewards of the group are equal. The step leaves the"
            " group out (drop_equal_groups) or takes another row (refill_rounds)."
        )
    return tuple(notes)


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges: `0-17, 20`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def main(arguments: Sequence[str] | None = None) -> None:
    with explained(make_console(stderr=True)):
        options = read_arguments(ShowOptions, arguments)
        print(escaped(str(show_sample(options))))


if __name__ == "__main__":
    main()
