"""One sample of a run as a page: what is on it, and what is said where it cannot be made (issue 3,
"Seeing a sample").
"""

import base64
import io
import json
import re
import shutil
from dataclasses import replace

import pytest
from config_support import configuration
from page_support import Page
from PIL import Image
from transformers import AutoTokenizer

from launch.sample_pages.detection import Canvas, ShapeStyle
from launch.show_sample import ShowOptions, main, show_sample
from learner.algorithms.matched_targets import ground_truth_target, parsed_target
from learner.data.samples import load_samples
from learner.rollout_logs.samples import RolloutLog
from learner.rollout_logs.writer import step_path
from learner.targets import TokenRole, target_settings, text_weights
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
        log = RolloutLog(self.folder / "rollouts", self.codec)
        log.begin(step, Channel.B)
        for position, text in enumerate(texts):
            ids = tuple(self.codec.encode(text))
            what = (step, position, self.scene.sample_id, (1, 2), ids, None, None, None)
            how = (FinishReason.LENGTH, (), 5, "actor-1", 0, 99, 0.1)
            parsed = parse_rollout(ids, self.codec, geometry=self.rules.geometry)
            if spoil is not None:
                parsed = spoil(parsed)
            target = parsed_target(parsed, self.scene, self.codec, self.rules)
            self._write(log, Rollout(*what, *how), target, Channel.B, position)
        log.close()

    def write_channel_a(self, step=1):
        log = RolloutLog(self.folder / "rollouts", self.codec)
        log.begin(step, Channel.A)
        target = ground_truth_target(self.scene, self.codec, self.rules)
        self._write(log, None, target, Channel.A, 0)
        log.close()

    def _write(self, log, rollout, target, channel, position):
        weights = text_weights(self.config.rollout_matching.pipeline, channel).of(target)
        log.write(rollout, self.scene, target, weights, position)

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
        "appended as object_7",
        "appended as object_8",
        "3 valid predictions for 4 ground-truth objects: 2 matched and supervised, 1 unmatched",
        "1 unmatched, 3 dropped; 2 appended",
        run.scene.sample_id,
        *("v5", "actor-1", "99", "length"),
    ):
        assert words in text


def test_pairs_share_colour_and_number_and_all_objects_are_drawn(everything):
    labels = set(re.findall(r">([GP][^<]*)</text>", everything))
    assert {"G0", "G1", "G2", "G3", "P0→G0", "P1→G1", "P2"} <= labels
    # A halo and a line each, on two panels: 4 ground truths, 3 predictions.
    assert everything.count("<polygon") == 2 * 7
    assert Page(everything).tags.count("figure") == 2
    for i in (0, 1):
        pair = (f"G{i}", f"P{i}→G{i}")
        colour, same = (re.search(rf'fill="(#\w+)">{label}<', everything)[1] for label in pair)
        assert colour == same
        assert f'style="color:{colour}">P{i}<' in everything
    # Unmatched on either side: 2 ground truths and 1 prediction.
    assert everything.count("stroke-dasharray") == 3


def test_the_kept_prefix_and_what_was_cut_are_the_whole_rollout(everything):
    cut = re.search(r'<span class="cut"[^>]*>(.*?)</span>', everything)[1]
    assert cut == ', "object_7": {"desc": "cut &lt;off'
    assert "Struck through" in everything


OTHERS = {"separator", "corrected_desc", "digits", "corrected_digits"}
"""Roles of options, and of coordinates in digits."""


def test_every_token_shows_what_supervises_it_and_how_much(run, everything):
    page = Page(everything)
    first_id = run.codec.encode(run.everything())[0]
    tooltips = [title for title in page.titles if re.match(r"token \d+ · id \d+ · ", title)]
    assert [int(title.split(" ")[1]) for title in tooltips] == list(range(len(tooltips)))
    assert f"token 0 · id {first_id} · neutral · weight 0" in tooltips[0]
    roles = {title.split(" · ")[2] for title in tooltips}
    assert roles == {role.name.lower() for role in TokenRole} - OTHERS
    # The slots of the first match: the token's bin and the ground truth's.
    first = run.scene.objects[0]
    for has, should in zip(shifted(first, 20), first.bins, strict=True):
        assert f"{has}<b>→{should}</b>" in everything
        slot = f"bin {has}, should be {should} · one of 16 slots"
        assert any(slot in title for title in tooltips)
    shares = [re.search(r"\((.*)% of the sample", title) for title in tooltips]
    total = sum(float(share[1]) for share in shares if share)
    assert total == pytest.approx(100, abs=0.5)
    assert "append" in page.texts["seam"]
    assert [role for role in roles if role not in page.texts["legend"]] == []
    assert "Objective of channel B: token_ce × 1" in everything
    assert "coord_reg × 1 (soft_ce_weight 1" in everything


@pytest.mark.parametrize(
    ("position", "words"),
    [
        pytest.param(
            1,
            [
                "fallback",
                'class="cut"',
                "no json at all",
                "0 valid predictions for 4 ground-truth objects",
            ],
            id="a fallback, of which nothing was kept",
        ),
        pytest.param(
            2,
            ["4 matched and supervised, 0 unmatched, 0 dropped; 0 appended"],
            id="a perfect rollout, with nothing appended",
        ),
    ],
)
def test_the_page_counts_what_was_kept_and_appended_of(run, position, words):
    _, html = run.page(position=position)
    Page(html)
    assert [one for one in words if one not in html] == []


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
    run.write(run.everything(), "{" + entry(1, "x", (0, 0, 6, 6)) + "}")
    html = run.page()[1]
    page = Page(html)
    text = re.sub(r"<[^>]*>", " ", html)
    for words in (
        "4 cut off behind the last match",
        "Behind the last match 4 entries were cut off (trim_trailing_false_positives).",
        "unmatched: cut off, behind the last match",
        "dropped: missing_geom; cut off, behind the last match",
        "appended as object_3",
        "the name differs, which matching ignores, and is taught from “",
        "Pairs under mask IoU 0.12 could not match (maskiou_gate_schedule).",
    ):
        assert words in text, words
    cut = re.search(r'<span class="cut"[^>]*>(.*?)</span>', html)[1]
    assert cut.startswith(', "object_3"')
    roles = [title.split(" · ")[2] for title in page.titles if title.startswith("token ")]
    assert roles.count("separator") == 2
    assert roles.count("corrected_desc") == 1
    (taught,) = (title for title in page.titles if " · corrected_desc · " in title)
    assert re.search(r" · taught is id \d+ · ", taught)
    nothing_kept = re.sub(r"<[^>]*>", " ", run.page(position=1)[1])
    assert "Nothing was kept: the whole target is ours. Without a match 1 entry was" in nothing_kept
    assert "fallback:" not in nothing_kept


def test_a_step_of_channel_a_is_shown_without_a_rollout(run):
    _, html = run.page(step=1)
    assert Page(html).tags.count("figure") == 1
    assert "taught as object_4" in html
    assert "Rollout" not in html
    assert 'class="seam"' not in html


def test_an_excluded_match_is_marked(run):
    def backwards(parsed):
        (found,) = parsed.objects
        found = replace(found, coord_positions=found.coord_positions[::-1])
        return replace(parsed, objects=(found,))

    run.write(serialize_objects(run.scene.objects[:1]), step=30, spoil=backwards)
    _, html = run.page(step=30)
    Page(html)
    assert "excluded: its coord slots cannot be supervised" in html
    assert "1 matched but excluded" in html
    assert "appended as object_2" in html


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


def test_a_line_of_another_shape_ends_the_command_without_a_traceback(copied, capsys):
    path = step_path(copied.folder / "rollouts", STEP)
    line = json.loads(path.read_text())
    del line["reading"]["pairs"]
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(SystemExit) as caught:
        main([f"run={copied.folder}", f"step={STEP}", "position=0"])
    assert caught.value.code == 2
    message = (
        f"{path}:1: reading.pairs: field required; a run's log is not to be edited: restore the"
        " file, or check out the version that ran it"
    )
    assert message in capsys.readouterr().err


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
