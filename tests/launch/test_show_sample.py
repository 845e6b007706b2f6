"""One sample of a run as a page: what is on it, and what is said where it cannot be made (issue 3,
"Seeing a sample").
"""

import io
import json
import re
from dataclasses import replace

import pytest
from config_support import configuration
from page_support import Page
from PIL import Image
from transformers import AutoTokenizer

from launch.sample_pages.detection import Canvas, ShapeStyle
from launch.show_sample import ShowOptions, main, show_sample
from learner.rollout_logs.samples import RolloutLog
from learner.rollout_logs.writer import step_path
from learner.samples import load_samples
from learner.targets import (
    TokenRole,
    ground_truth_target,
    parsed_target,
    target_settings,
    text_weights,
)
from shared.config.pipeline import Channel
from shared.errors import ConfigError, RecordError
from shared.grounding.parsing import parse_rollout
from shared.grounding.serialize import serialize_objects
from shared.records import GroundTruthObject
from shared.rollouts import FinishReason, Rollout
from shared.tokens.hf_codec import HFTokenCodec
from shared.tokens.vocabulary import coord_token

STEP = 7


def entry(number, desc, bins, key="bbox_2d"):
    return (
        f'"object_{number}": {{"desc": "{desc}", "{key}": ['
        + ", ".join(f'"{coord_token(b)}"' for b in bins)
        + "]}"
    )


def shifted(truth: GroundTruthObject, by: int):
    return tuple(min(999, b + by) for b in truth.bins)


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
        self.samples = load_samples(self.config, self.config.data.train)
        self.scene = next(sample for sample in self.samples if len(sample.objects) == 4)

    def write(self, *texts, step=STEP, spoil=None):
        """Channel B; `spoil` may change what was parsed."""
        log = RolloutLog(self.folder / "rollouts", self.codec)
        log.begin(step, Channel.B)
        for position, text in enumerate(texts):
            token_ids = tuple(self.codec.encode(text))
            rollout = Rollout(
                step,
                position,
                self.scene.sample_id,
                (1, 2),
                token_ids,
                None,
                None,
                None,
                FinishReason.LENGTH,
                (),
                5,
                "actor-1",
                0,
                99,
                0.1,
            )
            parsed = parse_rollout(token_ids, self.codec, geometry=self.rules.geometry)
            target = parsed_target(
                parsed if spoil is None else spoil(parsed), self.scene, self.codec, self.rules
            )
            self._write(log, rollout, target, Channel.B, position)
        log.close()

    def write_channel_a(self, step=1):
        log = RolloutLog(self.folder / "rollouts", self.codec)
        log.begin(step, Channel.A)
        self._write(
            log, None, ground_truth_target(self.scene, self.codec, self.rules), Channel.A, 0
        )
        log.close()

    def _write(self, log, rollout, target, channel, position):
        log.write(
            rollout,
            self.scene,
            target,
            text_weights(self.config.rollout_matching.pipeline, channel).of(target.roles),
            position,
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


@pytest.fixture(scope="module")
def everything(run):
    return run.page()[1]


@pytest.mark.slow
def test_the_page_lies_in_the_runs_folder_and_its_path_is_printed(run, capsys):
    main([f"run={run.folder}", f"step={STEP}", "position=2"])
    path = run.folder / "samples" / "step_000007_position_002.html"
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_text().startswith("<!doctype html>")


def test_the_page_is_sound_html_that_needs_nothing_beside_itself(everything):
    page = Page(everything)
    assert "script" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"""(src|href)="(?!data:|#)""", everything)
    assert "http" not in everything


def test_what_a_model_wrote_is_escaped(everything):
    assert "<script" not in everything
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in everything
    assert "cut &lt;off" in everything
    # What would rearrange the text, or cannot be encoded, is shown by its code point.
    assert "\u202e" not in everything
    assert "\\u202e" in everything
    assert "\\ud800" in everything


def test_every_object_and_every_reason_is_listed(run, everything):
    text = re.sub(r"<[^>]*>", " ", everything)
    for words in (
        "the name differs",
        "unmatched: neutral",
        "dropped: wrong_arity",
        "dropped: poly_unsupported",
        "dropped: missing_geom",
        "truncated",
    ):
        assert words in text
    for number in (7, 8):
        assert f"appended as object_{number}" in text
    assert (
        "3 valid predictions for 4 ground-truth objects: 2 matched and supervised, 1 unmatched, 3"
        " dropped; 2 appended" in text
    )
    assert run.scene.sample_id in text
    for fact in ("v5", "actor-1", "99", "length"):
        assert fact in text


def test_pairs_share_colour_and_number_and_all_objects_are_drawn(run, everything):
    page = Page(everything)
    assert {"G0", "G1", "G2", "G3", "P0→G0", "P1→G1", "P2"} <= set(
        re.findall(r">([GP][^<]*)</text>", everything)
    )
    # A halo and a line each, on two panels: 4 ground truths, 3 predictions.
    assert everything.count("<polygon") == 2 * 7
    assert page.tags.count("figure") == 2
    for i in (0, 1):
        colours = {
            re.search(rf'fill="(#\w+)">{label}<', everything)[1]
            for label in (f"G{i}", f"P{i}→G{i}")
        }
        assert len(colours) == 1
        assert f'style="color:{colours.pop()}">P{i}<' in everything
    # Unmatched on either side: 2 ground truths and 1 prediction.
    assert everything.count("stroke-dasharray") == 3


def test_the_kept_prefix_and_what_was_cut_are_the_whole_rollout(run, everything):
    cut = re.search(r'<span class="cut"[^>]*>(.*?)</span>', everything)[1]
    assert cut == ', "object_7": {"desc": "cut &lt;off'
    assert "Struck through" in everything


def test_every_token_shows_what_supervises_it_and_how_much(run, everything):
    page = Page(everything)
    token_ids = run.codec.encode(run.everything())
    tooltips = [title for title in page.titles if re.match(r"token \d+ · id \d+ · ", title)]
    assert [int(title.split(" ")[1]) for title in tooltips] == list(range(len(tooltips)))
    assert f"token 0 · id {token_ids[0]} · neutral · weight 0" in tooltips[0]
    roles = {title.split(" · ")[2] for title in tooltips}
    assert roles == {role.name.lower() for role in TokenRole}
    # The slots of the first match: the token's bin and the ground truth's.
    first = run.scene.objects[0]
    for has, should in zip(shifted(first, 20), first.bins, strict=True):
        assert f"{has}<b>→{should}</b>" in everything
        assert any(
            f"bin {has}, should be {should} · one of 16 slots" in title for title in tooltips
        )
    shares = [
        float(match[1])
        for title in tooltips
        if (match := re.search(r"\((.*)% of the sample", title))
    ]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert "append" in page.texts["seam"]


def test_the_legend_explains_the_roles_there_are_and_the_objective_is_named(everything):
    legend = Page(everything).texts["legend"]
    for role in TokenRole:
        assert role.name.lower() in legend
    assert "Objective of channel B: token_ce × 1" in everything
    assert "coord_reg × 1 (soft_ce_weight 1" in everything


def test_a_fallback_says_that_nothing_was_kept(run):
    _, html = run.page(position=1)
    Page(html)
    assert "fallback" in html
    assert 'class="cut"' in html
    assert "no json at all" in html
    assert "0 valid predictions for 4 ground-truth objects" in html


def test_a_perfect_rollout_has_nothing_appended(run):
    _, html = run.page(position=2)
    Page(html)
    assert "4 matched and supervised, 0 unmatched, 0 dropped; 0 appended" in html


def test_a_step_of_channel_a_is_shown_without_a_rollout(run):
    _, html = run.page(step=1)
    page = Page(html)
    assert page.tags.count("figure") == 1
    assert "taught as object_4" in html
    assert "Rollout" not in html
    assert 'class="seam"' not in html


def test_an_excluded_match_is_marked(run):
    def backwards(parsed):
        return replace(
            parsed,
            objects=tuple(
                replace(one, coord_positions=one.coord_positions[::-1]) for one in parsed.objects
            ),
        )

    run.write(serialize_objects(run.scene.objects[:1]), step=30, spoil=backwards)
    _, html = run.page(step=30)
    Page(html)
    assert "excluded: its coord slots cannot be supervised" in html
    assert "1 matched but excluded" in html
    assert "appended as object_2" in html


def test_the_same_sample_gives_the_same_bytes(run):
    path, html = run.page()
    path.unlink()
    assert run.page() == (path, html)


def test_a_page_may_be_written_elsewhere(run, tmp_path):
    out = tmp_path / "new" / "page.html"
    assert show_sample(ShowOptions(run=run.folder, step=STEP, position=0, out=out)) == out
    assert out.read_text() == run.page()[1]


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


def test_no_such_run_is_said_with_a_remedy(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([f"run={tmp_path}", "step=1", "position=0"])
    assert "holds no run (no config.json); give the folder" in capsys.readouterr().err


def test_a_misspelt_argument_gets_the_right_name(capsys):
    with pytest.raises(SystemExit):
        main(["run=x", "step=1", "postion=0"])
    assert "did you mean 'position'?" in capsys.readouterr().err


@pytest.fixture
def copied(tmp_path, demo_checkpoint, demo_data):
    """A run over a copy of the data that a test may damage."""
    import shutil

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
    with pytest.raises(ConfigError, match=r"has no sample 'train:\d+' any more; restore"):
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
    with pytest.raises(ConfigError, match=r"has no rollouts; train with telemetry\.rollouts: true"):
        run.page()


def test_a_damaged_log_is_an_error_with_its_line(copied):
    path = step_path(copied.folder / "rollouts", STEP)
    path.write_text(path.read_text() + "{}\n")
    with pytest.raises(
        RecordError,
        match=r"step_000007\.jsonl:2: step: field required; a run's log is not to be edited",
    ):
        copied.page()


def test_a_line_of_another_shape_ends_the_command_without_a_traceback(copied, capsys):
    path = step_path(copied.folder / "rollouts", STEP)
    line = json.loads(path.read_text())
    del line["reading"]["pairs"]
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit) as caught:
        main([f"run={copied.folder}", f"step={STEP}", "position=0"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert (
        f"{path}:1: reading.pairs: field required; a run's log is not to be edited: restore the"
        " file, or check out the version that ran it" in said
    )


@pytest.mark.slow
def test_a_run_that_died_while_writing_still_shows_its_whole_lines(copied):
    path = step_path(copied.folder / "rollouts", STEP)
    path.write_bytes(path.read_bytes() + b'{"step": 7')
    Page(copied.page()[1])
    path.write_bytes(b'{"step": 7')
    with pytest.raises(ConfigError, match="it has none: the run ended in this step"):
        copied.page()


# The picture


def encoded(image_format, size=(64, 32), orientation=1):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.new("RGB", size, "teal").save(
        file, format=image_format, **({"exif": exif} if image_format == "JPEG" else {})
    )
    return file.getvalue()


@pytest.mark.parametrize(
    ("image_format", "mime"),
    [("PNG", "image/png"), ("JPEG", "image/jpeg"), ("WEBP", "image/webp"), ("BMP", "image/png")],
)
def test_an_image_that_browsers_cannot_show_becomes_a_png(image_format, mime):
    (uri,) = Canvas((encoded(image_format),), 64, 32).uris()
    assert uri.startswith(f"data:{mime};base64,")


def test_an_image_that_browsers_would_turn_is_embedded_as_training_sees_it():
    (uri,) = Canvas((encoded("JPEG", orientation=6),), 64, 32).uris()
    assert uri.startswith("data:image/png;base64,")


def test_shapes_lie_at_the_pixels_their_bins_mean():
    canvas = Canvas((encoded("PNG"),), 64, 32)
    style = ShapeStyle("", "", "#123456", dashed=False)
    box, polygon = (
        canvas.draw(kind, bins, style).points
        for kind, bins in (("bbox_2d", (0, 0, 999, 999)), ("poly", (0, 999, 999, 999, 500, 0)))
    )
    assert box == "0.50,0.50 63.50,0.50 63.50,31.50 0.50,31.50"
    assert polygon == "0.50,31.50 63.50,31.50 32.03,0.50"
