"""One sample of a run as a page: what is on it, and what is said where it cannot be made (issue 3,
"Seeing a sample").
"""

import base64
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from config_support import configuration
from golden import assert_golden, page_text
from page_support import Page
from PIL import Image
from transformers import AutoTokenizer

from launch.inspect.sample_pages.detection import Canvas, ShapeStyle
from launch.inspect.show_sample import ShowOptions, main, show_sample
from learner.algorithms.matched_targets import ground_truth_target, parsed_target
from learner.data.samples import load_samples
from learner.rollout_logs.samples import sample_record
from learner.rollout_logs.writer import StepLog, step_path
from learner.targets import target_settings, text_weights
from shared.config.pipeline import Channel
from shared.errors import ConfigError, RecordError
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import serialize_objects
from shared.records import GroundTruthObject
from shared.rollouts import FinishReason, Rollout
from shared.schedule import StepPlan
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.vocabulary import coord_token

STEP = 7


def entry(number, desc, bins, key="bbox_2d"):
    tokens = ", ".join(f'"{coord_token(bin_)}"' for bin_ in bins)
    return f'"object_{number}": {{"desc": "{desc}", "{key}": [{tokens}]}}'


def shifted(truth: GroundTruthObject, by: int):
    return tuple(min(999, bin_ + by) for bin_ in truth.bins)


class Run:
    """A run's folder with one step of rollouts made by hand; position 0 has every kind of thing in
    it.
    """

    def __init__(self, folder, checkpoint, data, **changes):
        self.folder = folder
        self.config = configuration(checkpoint, data, folder, **changes)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(self.config.model_dump_json(indent=2))
        self.codec = HFTokenCodec(AutoTokenizer.from_pretrained(checkpoint))
        self.rules = target_settings(self.config)
        self.samples = load_samples(self.config, *self.config.data.sources("train"))
        self.scene = next(sample for sample in self.samples if len(sample.objects) == 4)

    def write(self, *texts, step=STEP, spoil=None):
        """Channel B; `spoil` may change what was parsed."""
        log = StepLog(self.folder / "rollouts")
        log.begin(step)
        plan = StepPlan(step - 1, Channel.B, len(texts), 0, False, False)
        for position, text in enumerate(texts):
            ids = tuple(self.codec.encode(text))
            what = (step, position, self.scene.sample_id, (1, 2), ids, None, None, None)
            how = (FinishReason.LENGTH, (), 5, "actor-1", 0, 99, 0.1)
            parsed = parse_rollout(ids, self.codec, geometry=self.rules.geometry)
            if spoil is not None:
                parsed = spoil(parsed)
            target = parsed_target(parsed, self.scene, self.codec, self.rules)
            log.write(self._record(plan, Rollout(*what, *how), target, position))
        log.close()

    def write_channel_a(self, step=1):
        log = StepLog(self.folder / "rollouts")
        log.begin(step)
        plan = StepPlan(step - 1, Channel.A, 1, 0, False, False)
        target = ground_truth_target(self.scene, self.codec, self.rules)
        log.write(self._record(plan, None, target, 0))
        log.close()

    def _record(self, plan, rollout, target, position):
        weights = text_weights(self.config.rollout_matching.pipeline, plan.channel).of(target)
        return sample_record(
            plan, position, self.scene, target, weights, self.codec, rollout=rollout
        )

    def everything(self):
        """A match with another name, a match, a false positive with a hostile name, three dropped
        entries, and a cut-off tail.
        """
        first, second = self.scene.objects[:2]
        entries = [
            entry(1, "<script>alert(1)</script>", shifted(first, 20)),
            entry(2, second.desc, shifted(second, 9)),
            entry(3, "\\u202egro\\u00dfe\\ud800 猫", (0, 0, 6, 6)),
            entry(4, "four", (1, 2, 3)),
            entry(5, "five", (1, 1, 9, 1, 9, 9), key="poly"),
            '"object_6": {"desc": "six"}',
        ]
        return "{" + ", ".join(entries) + ', "object_7": {"desc": "cut <off'

    def page(self, position=0, step=STEP):
        path = show_sample(ShowOptions(run=self.folder, step=step, position=position))
        return path, path.read_text()


@pytest.fixture(scope="module")
def run(tmp_path_factory, demo_checkpoint, demo_data):
    run = Run(tmp_path_factory.mktemp("runs") / "demo", demo_checkpoint, demo_data)
    run.write(run.everything(), "no json at all", serialize_objects(run.scene.objects))
    run.write_channel_a()
    return run


@pytest.mark.slow
def test_the_page_lies_in_the_runs_folder_and_its_path_is_printed(run, capsys):
    main([f"run={run.folder}", f"step={STEP}", "position=2"])
    path = run.folder / "samples" / "step_000007_position_002.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_text().startswith("<!doctype html>")


def assert_page(run, name, **where):
    """It is sound HTML that needs nothing beside itself, without what a model wrote as markup."""
    _, html = run.page(**where)
    page = Page(html)
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"""(src|href)="(?!data:|#)""", html)
    # What would rearrange the text, or cannot be encoded, is shown by its code point.
    assert "\u202e" not in html
    folders = {run.folder: "RUN", run.config.data.train.parent: "DATA"}
    folders[Path(run.config.model.path)] = "MODEL"
    assert_golden(f"sample_{name}.html", page_text(html, folders))


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("everything", {}),
        ("fallback", {"position": 1}),
        ("channel_a", {"step": 1}),
    ],
)
def test_the_page_of_a_sample_is_the_one_of_the_file(run, name, where):
    assert_page(run, name, **where)


def test_what_options_beyond_the_specification_did_is_on_the_page(
    tmp_path, demo_checkpoint, demo_data
):
    config = {
        "rollout_matching__trim_trailing_false_positives": True,
        "rollout_matching__supervise_separators": True,
        "rollout_matching__maskiou_gate_schedule": {"start": 0.1, "steps": 40},
        "stage2_ab__schedule__warmup_steps": 2,
    }
    run = Run(tmp_path / "run", demo_checkpoint, demo_data, **config)
    run.rules = replace(run.rules, corrects_names=True)
    run.write(run.everything())
    assert_page(run, "options")


def test_an_excluded_match_is_marked(run):
    def backwards(parsed):
        (found,) = parsed.objects
        found = replace(found, coord_positions=found.coord_positions[::-1])
        return replace(parsed, objects=(found,))

    run.write(serialize_objects(run.scene.objects[:1]), step=30, spoil=backwards)
    assert_page(run, "excluded", step=30)


def test_the_same_sample_gives_the_same_bytes_also_elsewhere(run, tmp_path):
    path, html = run.page()
    path.unlink()
    assert run.page() == (path, html)
    out = tmp_path / "new" / "page.html"
    assert show_sample(ShowOptions(run=run.folder, step=STEP, position=0, out=out)) == out
    assert out.read_text() == html


@pytest.mark.parametrize(
    ("step", "position", "message"),
    [
        (8, 0, r"step: .* has no step 8; it has 1, 7"),
        (STEP, 3, r"position: step 7 of .* has no position 3; it has 0-2"),
    ],
)
def test_no_such_step_or_position_says_which_there_are(run, step, position, message):
    with pytest.raises(ConfigError, match=message):
        show_sample(ShowOptions(run=run.folder, step=step, position=position))


@pytest.fixture
def copied(tmp_path, demo_checkpoint, demo_data):
    """A run over a copy of the data that a test may damage."""
    shutil.copytree(demo_data, tmp_path / "data")
    run = Run(tmp_path / "run", demo_checkpoint, tmp_path / "data")
    run.write("{}")
    return run


@pytest.mark.slow
def test_data_that_changed_since_the_run_are_told_of(copied):
    train = copied.config.data.train
    text = train.read_text()
    train.write_text(text.replace('"desc": "', '"desc": "new '))
    assert "has changed since the run" in copied.page()[1]
    train.write_text(text.splitlines()[-1])
    with pytest.raises(ConfigError, match=r"data\.train: .*no sample 'train:\d+'"):
        copied.page()
    train.unlink()
    with pytest.raises(RecordError, match=r"train\.jsonl"):
        copied.page()


@pytest.mark.slow
def test_an_image_that_is_gone_or_damaged_is_told_of(copied):
    (image,) = copied.scene.images
    image.path.write_bytes(image.path.read_bytes()[:60])
    with pytest.raises(RecordError, match="not a readable image"):
        copied.page()
    image.path.unlink()
    with pytest.raises(RecordError, match="cannot read"):
        copied.page()


def test_a_run_without_rollouts_says_why(tmp_path, demo_checkpoint, demo_data):
    run = Run(tmp_path / "run", demo_checkpoint, demo_data, telemetry__rollouts=False)
    with pytest.raises(ConfigError, match=r"has no rollouts; .* telemetry\.rollouts: true"):
        run.page()


def test_a_line_of_another_shape_ends_the_command_without_a_traceback(copied, capsys):
    path = step_path(copied.folder / "rollouts", STEP)
    line = json.loads(path.read_text())
    del line["reading"]["pairs"]
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit) as caught:
        main([f"run={copied.folder}", f"step={STEP}", "position=0"])
    assert caught.value.code == 2
    message = (
        f"{path}:1: reading.pairs: field required; do not edit a run's log: restore the"
        " file, or check out the version that wrote it"
    )
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_died_while_writing_still_shows_its_whole_lines(copied):
    path = step_path(copied.folder / "rollouts", STEP)
    path.write_bytes(path.read_bytes() + b'{"step": 7')
    Page(copied.page()[1])
    path.write_bytes(b'{"step": 7')
    with pytest.raises(ConfigError, match=rf"position: step {STEP} .*none"):
        copied.page()


# The picture


def encoded(image_format, size=(64, 32), orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"exif": exif} if image_format == "JPEG" else {}
    file = io.BytesIO()
    Image.new("RGB", size, "teal").save(file, format=image_format, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("image_format", "orientation", "mime"),
    [
        ("PNG", 1, "image/png"),
        ("JPEG", 1, "image/jpeg"),
        ("WEBP", 1, "image/webp"),
        ("BMP", 1, "image/png"),
        ("JPEG", 6, "image/png"),  # upright, as it is learned; browsers differ inside SVG
    ],
)
def test_an_image_that_browsers_cannot_show_becomes_a_png(image_format, orientation, mime):
    (uri,) = Canvas((encoded(image_format, orientation=orientation),), 64, 32).uris()
    start, _, content = uri.partition(",")
    assert start == f"data:{mime};base64"
    shown = Image.open(io.BytesIO(base64.b64decode(content)))
    assert shown.size == ((64, 32) if orientation == 1 else (32, 64))
    assert 0x0112 not in shown.getexif() or orientation == 1


@pytest.mark.parametrize(
    ("kind", "bins", "points"),
    [
        ("bbox_2d", (0, 0, 999, 999), "0.50,0.50 63.50,0.50 63.50,31.50 0.50,31.50"),
        ("poly", (0, 999, 999, 999, 500, 0), "0.50,31.50 63.50,31.50 32.03,0.50"),
        # A cross, whose arms are in proportion to the image.
        (
            "point_2d",
            (0, 999),
            "-0.57,31.50 1.57,31.50 0.50,31.50 0.50,30.43 0.50,32.57 0.50,31.50",
        ),
    ],
)
def test_shapes_lie_at_the_pixels_their_bins_mean(kind, bins, points):
    style = ShapeStyle("", "", "#123456", dashed=False)
    assert Canvas((encoded("PNG"),), 64, 32).draw(kind, bins, style).points == points
