"""One sample of one step as a page of HTML that needs nothing beside itself (issue 3, "Seeing a
sample").
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from PIL import Image

from launch.sample_pages.html import (
    LegendRow,
    attribute,
    chip_row,
    count,
    document,
    header,
    inline,
    legend,
    marked_token,
    section,
    strength,
    token,
)
from learner.rollout_logs.samples import (
    GroundTruthEntry,
    ObjectEntry,
    ReadingEntry,
    RolloutEntry,
    RolloutRecord,
    TargetEntry,
)
from learner.targets import TokenRole
from shared.prompts import on_white
from shared.records import GeometryKind
from shared.tokens.vocabulary import NUM_BINS, TokenCodec

# Objects drawn over an image as inline SVG: sharp at any size, and the image's bytes are on the
# page once (issue 3, "Seeing a sample").


MATCH_COLOURS = (
    "#0072b2",
    "#00875a",
    "#a64ca6",
    "#b26b00",
    "#00838f",
    "#5b4fc7",
    "#6b7d00",
    "#8d5524",
    "#c2185b",
    "#2e5fa3",
)
"""Of pairs, in turn; none is close to the two below."""
UNMATCHED_PREDICTION = "#d62222"
UNMATCHED_TRUTH = "#1a1a1a"

_SHOWN_WIDTH = 480
"""About what a panel measures on the page, in CSS pixels: letters are sized for it, whatever the
image measures.
"""
_EMBEDDED = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
_ORIENTATION = 0x0112
"""EXIF: browsers turn an image by it, the training does not."""


@dataclass(frozen=True, slots=True)
class DrawnObject:
    """One object to draw."""

    kind: str
    bins: Sequence[int]
    """0..999: x1, y1, x2, y2, or x, y per vertex."""
    label: str
    """At its upper left corner; empty for none."""
    title: str
    """Shown under the pointer."""
    colour: str
    dashed: bool


@dataclass(frozen=True, slots=True)
class Canvas:
    """The images of a sample, all of one size in pixels."""

    images: tuple[bytes, ...]
    """Encoded files."""
    width: int
    height: int

    def definitions(self) -> str:
        """The images, once, for `panel` to use. Goes into the page before any panel."""
        images = "".join(
            f'<image id="image{i}" width="{self.width}" height="{self.height}"'
            f' preserveAspectRatio="none" href="{_data_uri(data)}"/>'
            for i, data in enumerate(self.images)
        )
        return (
            '<svg width="0" height="0" class="definitions"'
            f' aria-hidden="true"><defs>{images}</defs></svg>'
        )

    def panel(self, image: int, shapes: Sequence[DrawnObject], caption: str) -> str:
        drawn = "".join(self._draw(shape) for shape in shapes)
        small = ' class="pixels"' if self.width < _SHOWN_WIDTH else ""
        return (
            f'<figure><svg viewBox="0 0 {self.width} {self.height}" role="img"'
            f' aria-label="{attribute(caption)}"{small}>'
            "<use"
            f' href="#image{image}"/>{drawn}</svg><figcaption>{inline(caption)}</figcaption></figure>'
        )

    def _draw(self, shape: DrawnObject) -> str:
        points = _outline(shape, self.width, self.height)
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dash = ' stroke-dasharray="5 4"' if shape.dashed else ""
        # A white line underneath keeps every colour visible on any image.
        lines = (
            f'<polygon points="{path}" class="halo"/><polygon points="{path}"'
            f' stroke="{shape.colour}"{dash}/>'
        )
        return f"<g><title>{inline(shape.title)}</title>{lines}{self._label(shape, points)}</g>"

    def _label(self, shape: DrawnObject, points: Sequence[tuple[float, float]]) -> str:
        if not shape.label:
            return ""
        unit = self.width / _SHOWN_WIDTH
        left, top = min(x for x, _ in points), min(y for _, y in points)
        x, y = (
            min(left + 4 * unit, self.width - 10 * unit * len(shape.label)),
            min(max(top, 0) + 16 * unit, self.height - 4 * unit),
        )
        return (
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{14 * unit:.2f}"'
            f' stroke-width="{4 * unit:.2f}" fill="{shape.colour}">{inline(shape.label)}</text>'
        )


def _outline(shape: DrawnObject, width: int, height: int) -> list[tuple[float, float]]:
    """Vertices in pixels, at pixel centres: bin k of an axis of length W is pixel `k / 999 * (W -
    1)`.
    """
    bins = shape.bins
    if shape.kind == GeometryKind.BBOX:
        x1, y1, x2, y2 = bins
        bins = (x1, y1, x2, y1, x2, y2, x1, y2)
    last = NUM_BINS - 1
    return [
        (x / last * (width - 1) + 0.5, y / last * (height - 1) + 0.5)
        for x, y in zip(bins[::2], bins[1::2], strict=True)
    ]


def _data_uri(data: bytes) -> str:
    """The file as it is where every browser shows it as the training sees it; a PNG of its pixels
    otherwise.
    """
    with Image.open(io.BytesIO(data)) as image:
        if image.format in _EMBEDDED and _is_upright(image):
            return f"data:{_EMBEDDED[image.format]};base64,{base64.b64encode(data).decode()}"
        file = io.BytesIO()
        on_white(image).save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _is_upright(image: Image.Image) -> bool:
    try:
        return bool(image.getexif().get(_ORIENTATION, 1) == 1)
    # whatever Pillow's reading of damaged EXIF data runs into, which browsers may read otherwise
    except Exception:
        return False


# The tokens of a target, coloured by what supervises them and how much (issue 3, "Seeing a
# sample").
#
# The hue is the role, the strength of the colour is the token's weight in `token_ce`; coord slots
# show the token's bin and the bin it should be.


MEANINGS = {
    TokenRole.NEUTRAL: (
        "in the kept prefix, and not of a matched object (or the name of one): never supervised"
    ),
    TokenRole.STRUCTURE: "text of a ground-truth object, and the separators before it",
    TokenRole.DESC: "overlaps the name (desc) of a ground-truth object",
    TokenRole.MATCHED_STRUCTURE: (
        "in the kept prefix: a matched object's braces, keys and separators"
    ),
    TokenRole.COORD: "a supervised coord slot: the token's bin → the bin it should be",
    TokenRole.CLOSING: "the closing brace, or the end of the answer",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens with the same role and weight."""

    start: int
    stop: int
    role: TokenRole
    weight: float

    @property
    def tag(self) -> str:
        return self.role.name.lower()


@dataclass(frozen=True, slots=True)
class TokenView:
    """A target as the page shows it."""

    target: TargetEntry
    num_prefix: int
    """Tokens before the appended text; 0 in channel A."""
    codec: TokenCodec

    @property
    def runs(self) -> list[Run]:
        """Cut once more where the appended text begins."""
        whole = [
            Run(start, stop, TokenRole[role.upper()], weight)
            for start, stop, role, weight in self.target["supervision"]
        ]
        return [
            Run(start, stop, run.role, run.weight)
            for run in whole
            for start, stop in pairwise(
                sorted({run.start, run.stop, min(max(run.start, self.num_prefix), run.stop)})
            )
        ]

    def tokens(self) -> str:
        """Every token, in order; the appended text begins behind a mark."""
        target = self.target
        aims = dict(zip(target["coord_positions"], target["coord_targets"], strict=True))
        total, strongest = self._total_weight(), max((run.weight for run in self.runs), default=0.0)
        parts: list[str] = []
        for run in self.runs:
            if run.start == self.num_prefix and self.num_prefix:
                parts.append('<span class="seam" title="the kept prefix ends here">append</span>')
            content = "".join(
                self._token(position, run, aims, total) for position in range(run.start, run.stop)
            )
            parts.append(f'<span class="run {run.tag}"{_strength(run, strongest)}>{content}</span>')
        return "".join(parts)

    def legend(self) -> str:
        """A row for each role there is: its colour, how many tokens, which weights, what it
        means."""
        runs = self.runs
        strongest = max((run.weight for run in runs), default=0.0)
        rows = []
        for role in TokenRole:
            of_role = [run for run in runs if run.role is role]
            if not of_role:
                continue
            weights = sorted({run.weight for run in of_role})
            swatches = "".join(
                f'<span class="run {run.tag}"{_strength(run, strongest)}><i>{run.tag}</i></span>'
                for run in _one_per_weight(of_role)
            )
            count = sum(run.stop - run.start for run in of_role)
            shown = (
                "slots"
                if role is TokenRole.COORD
                else ", ".join(f"{weight:g}" for weight in weights)
            )
            rows.append(LegendRow(swatches, count, shown, MEANINGS[role]))
        return legend("role", "weight", rows)

    def _total_weight(self) -> float:
        return sum(run.weight * (run.stop - run.start) for run in self.runs)

    def _token(self, position: int, run: Run, aims: dict[int, float], total: float) -> str:
        token_id = self.target["token_ids"][position]
        facts = [f"token {position}", f"id {token_id}", run.tag]
        if position in aims:
            bin_, aim = self.codec.coord_bin(token_id), aims[position]
            facts += [f"bin {bin_}, should be {aim:g}", f"one of {len(aims)} slots"]
            return marked_token(facts, f"{bin_}<b>→{aim:.4g}</b>")
        facts.append(
            f"weight {run.weight:g}"
            + (f" ({run.weight / total:.2%} of the sample's text)" if run.weight else "")
        )
        return token(facts, self.codec.piece_bytes(token_id))


def _strength(run: Run, strongest: float) -> str:
    """None for an unsupervised run."""
    if run.role is TokenRole.COORD:
        return ' style="--a:0.45"'
    return strength(run.weight / strongest) if run.weight else ""


def _one_per_weight(runs: Sequence[Run]) -> list[Run]:
    return list({run.weight: run for run in sorted(runs, key=lambda run: run.weight)}.values())


@dataclass(frozen=True, slots=True)
class SamplePage:
    """What the page shows."""

    run: str
    line: RolloutRecord
    canvas: Canvas
    prompt: str
    """As the chat template writes it, one placeholder per image."""
    objective: tuple[str, ...]
    """The active modules of the sample's channel, with their weights."""
    notes: tuple[str, ...]
    """What the reader should know of the page itself."""
    codec: TokenCodec

    def html(self) -> str:
        line = self.line
        reading = line["reading"]
        sections = [
            _header(self),
            _pictures(self),
            _objects(line),
            section("Prompt", f'<div class="text">{inline(self.prompt)}</div>'),
        ]
        if line["rollout"] is not None and reading is not None:
            sections.append(
                _answer(line["rollout"], reading, line["target"]["token_ids"], self.codec)
            )
            sections.append(
                section(
                    "Appended text", f'<div class="text">{inline(reading["appended_text"])}</div>'
                )
            )
        sections.append(_target(self))
        return document(_heading(line), self.run, sections, definitions=self.canvas.definitions())


def _heading(line: RolloutRecord) -> str:
    return f"Step {line['step']}, position {line['position']}"


def _header(page: SamplePage) -> str:
    line = page.line
    facts = {"channel": line["channel"], "sample": line["sample_id"]}
    if line["rollout"] is not None:
        rollout = line["rollout"]
        facts |= {
            "weights": f"v{rollout['weight_version']}",
            "actor": rollout["actor"],
            "seed": str(rollout["seed"]),
            "attempt": str(rollout["attempt"]),
        }
        sizes = {
            "prompt tokens": rollout["num_prompt_tokens"],
            "response tokens": len(rollout["response_token_ids"]),
        }
        facts |= {name: str(size) for name, size in sizes.items()} | {
            "finish": rollout["finish_reason"]
        }
    warnings = [] if line["reading"] is None else _warnings(line["reading"])
    return header(_heading(line), page.run, _summary(line), [chip_row(facts, warnings)], page.notes)


def _warnings(reading: ReadingEntry) -> list[str]:
    found = {
        "truncated: the response ended before its object closed": reading["truncated"],
        "fallback: nothing of the response could be kept": reading["fallback"],
        f"{len(reading['dropped'])} dropped": len(reading["dropped"]),
        f"{len(reading['excluded'])} matched but excluded": len(reading["excluded"]),
        f"{reading['gating_rejections']} candidate pairs under the gate": reading[
            "gating_rejections"
        ],
    }
    return [warning for warning, holds in found.items() if holds]


def _summary(line: RolloutRecord) -> str:
    reading, num_truths = line["reading"], len(line["ground_truth"])
    if reading is None:
        return (
            f"Teacher-forced on the ground truth: {count(num_truths, 'object')},"
            f" {count(len(line['target']['token_ids']), 'target token')}."
        )
    supervised = sum(pair["supervised"] for pair in reading["pairs"])
    return (
        f"{count(len(reading['objects']), 'valid prediction')} for"
        f" {count(num_truths, 'ground-truth object')}: {supervised} matched and supervised,"
        f" {len(reading['unmatched_predictions'])} unmatched, {len(reading['dropped'])} dropped;"
        f" {len(reading['appended'])} appended to the kept prefix."
    )


# Pictures: one colour per pair, whatever draws it


def _pictures(page: SamplePage) -> str:
    line, panels = page.line, []
    truths = list(_truth_shapes(line))
    for image in range(len(page.canvas.images)):
        of = f" (image {image})" if len(page.canvas.images) > 1 else ""
        panels.append(
            page.canvas.panel(
                image,
                truths,
                (
                    f"Ground truth{of}. Dashed: no supervised match, appended."
                    if line["reading"]
                    else f"Ground truth{of}"
                ),
            )
        )
        if line["reading"] is not None:
            shapes = list(_prediction_shapes(line["reading"]))
            panels.append(
                page.canvas.panel(
                    image,
                    shapes,
                    f"Predictions{of} in the colour of their match. Dashed: unmatched.",
                )
            )
    note = (
        "P and G number predictions and ground truths as the log does." if line["reading"] else ""
    )
    return section("Picture", f'<div class="panels">{"".join(panels)}</div>', note)


def _pair_colours(reading: ReadingEntry) -> list[str]:
    """[pair]"""
    return [MATCH_COLOURS[i % len(MATCH_COLOURS)] for i in range(len(reading["pairs"]))]


def _prediction_colours(reading: ReadingEntry) -> dict[int, str]:
    """Of every prediction."""
    pairs = zip(reading["pairs"], _pair_colours(reading), strict=True)
    return dict.fromkeys(range(len(reading["objects"])), UNMATCHED_PREDICTION) | {
        pair["prediction"]: colour for pair, colour in pairs
    }


def _truth_colours(line: RolloutRecord) -> dict[int, str]:
    """Of every ground truth."""
    colours = dict.fromkeys(range(len(line["ground_truth"])), UNMATCHED_TRUTH)
    reading = line["reading"]
    if reading is None:
        return {i: MATCH_COLOURS[i % len(MATCH_COLOURS)] for i in colours}
    return colours | {
        pair["ground_truth"]: colour
        for pair, colour in zip(reading["pairs"], _pair_colours(reading), strict=True)
    }


def _truth_shapes(line: RolloutRecord) -> Iterator[DrawnObject]:
    colours, appended = (
        _truth_colours(line),
        ([] if line["reading"] is None else line["reading"]["appended"]),
    )
    for i, truth in enumerate(line["ground_truth"]):
        yield DrawnObject(
            truth["kind"],
            truth["bins"],
            f"G{i}",
            f"G{i} {truth['desc']}",
            colours[i],
            dashed=i in appended,
        )


def _prediction_shapes(reading: ReadingEntry) -> Iterator[DrawnObject]:
    colours, matches = (
        _prediction_colours(reading),
        {pair["prediction"]: pair["ground_truth"] for pair in reading["pairs"]},
    )
    for i, object_ in enumerate(reading["objects"]):
        label = f"P{i}→G{matches[i]}" if i in matches else f"P{i}"
        yield DrawnObject(
            object_["kind"],
            object_["bins"],
            label,
            f"P{i} {object_['key']}: {object_['desc']}",
            colours[i],
            dashed=i not in matches,
        )


# Objects: what was predicted, what is there, and what became of it


def _objects(line: RolloutRecord) -> str:
    reading = line["reading"]
    if reading is None:
        head = '<tr><th colspan="2">ground truth</th><th>what happens</th></tr>'
        rows = list(_taught_rows(line))
    else:
        head = (
            '<tr><th colspan="2">prediction</th><th colspan="2">ground'
            " truth</th><th>maskIoU</th><th>what happens</th></tr>"
        )
        rows = [
            *_prediction_rows(line, reading),
            *_dropped_rows(reading),
            *_appended_rows(line, reading),
        ]
    if not rows:
        return section("Objects", '<p class="soft">There is no object, and none was predicted.</p>')
    return section(
        "Objects",
        f'<table class="objects"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>',
    )


def _row(prediction: str, truth: str, iou: str, outcome: str) -> str:
    return f"<tr>{prediction or _NOTHING}{truth or _NOTHING}<td>{iou}</td><td>{inline(outcome)}</td></tr>"


_NOTHING = "<td></td><td></td>"


def _cells(label: str, colour: str, content: str) -> str:
    return f'<td class="mark"><span style="color:{colour}">{label}</span></td><td>{content}</td>'


def _prediction_rows(line: RolloutRecord, reading: ReadingEntry) -> Iterator[str]:
    pairs, colours = (
        {pair["prediction"]: pair for pair in reading["pairs"]},
        _prediction_colours(reading),
    )
    for i, object_ in enumerate(reading["objects"]):
        prediction = _cells(f"P{i}", colours[i], _predicted(object_))
        if i not in pairs:
            yield _row(prediction, "", "", "unmatched: neutral, it is neither taught nor punished")
            continue
        pair = pairs[i]
        truth = line["ground_truth"][pair["ground_truth"]]
        name = (
            "" if truth["desc"] == object_["desc"] else "; the name differs, which matching ignores"
        )
        supervised = f"matched: its coord slots are moved to G{pair['ground_truth']}{name}"
        outcome = (
            supervised
            if pair["supervised"]
            else "excluded: its coord slots cannot be supervised; its ground truth is appended"
        )
        yield _row(
            prediction,
            _cells(f"G{pair['ground_truth']}", colours[i], _true(truth)),
            f"{pair['iou']:.3f}",
            outcome,
        )


def _dropped_rows(reading: ReadingEntry) -> Iterator[str]:
    for dropped in reading["dropped"]:
        yield _row(
            _cells("–", UNMATCHED_PREDICTION, inline(dropped["key"])),
            "",
            "",
            f"dropped: {dropped['reason']}",
        )


def _appended_rows(line: RolloutRecord, reading: ReadingEntry) -> Iterator[str]:
    colours = _truth_colours(line)
    first = 1 if reading["max_object_index"] is None else reading["max_object_index"] + 1
    for number, i in enumerate(reading["appended"], first):
        yield _row(
            "",
            _cells(f"G{i}", colours[i], _true(line["ground_truth"][i])),
            "",
            f"appended as object_{number}",
        )


def _taught_rows(line: RolloutRecord) -> Iterator[str]:
    colours = _truth_colours(line)
    for i, truth in enumerate(line["ground_truth"]):
        yield (
            f"<tr>{_cells(f'G{i}', colours[i], _true(truth))}<td>taught as object_{i + 1}</td></tr>"
        )


def _predicted(object_: ObjectEntry) -> str:
    return (
        f"{inline(object_['desc'])} <span"
        f' class="soft">{inline(object_["key"])}</span>{_bins(object_["kind"], object_["bins"])}'
    )


def _true(truth: GroundTruthEntry) -> str:
    return f"{inline(truth['desc'])}{_bins(truth['kind'], truth['bins'])}"


def _bins(kind: str, bins: Sequence[int]) -> str:
    return f'<span class="bins">{inline(kind)} {", ".join(map(str, bins))}</span>'


# Texts


def _answer(
    rollout: RolloutEntry, reading: ReadingEntry, target_ids: Sequence[int], codec: TokenCodec
) -> str:
    """Shows the response; what was cut off is struck through."""
    response = _bytes(rollout["response_token_ids"], codec)
    kept, cut = response[: reading["num_kept_bytes"]], response[reading["num_kept_bytes"] :]
    content = f"<span>{inline(kept.decode(errors='replace'))}</span>"
    if cut:
        content += (
            '<span class="cut"'
            f' title="{attribute("not kept")}">{inline(cut.decode(errors="replace"))}</span>'
        )
    note = f"Kept: {count(reading['num_kept'], 'token')}. Struck through: cut off."
    if reading["fallback"]:
        note = "Nothing was kept: the whole target is ours."
    elif _bytes(target_ids[: reading["num_kept"]], codec) != kept:
        note += " The kept text behind those tokens is encoded together with what is appended."
    if rollout["forced_positions"]:
        note += (
            " Set by the repeat guard, not sampled: positions"
            f" {', '.join(map(str, rollout['forced_positions']))}."
        )
    return section("Rollout", f'<div class="text">{content}</div>', note)


def _bytes(token_ids: Sequence[int], codec: TokenCodec) -> bytes:
    return b"".join(map(codec.piece_bytes, token_ids))


def _target(page: SamplePage) -> str:
    reading = page.line["reading"]
    view = TokenView(
        page.line["target"], 0 if reading is None else reading["num_prefix"], page.codec
    )
    modules = "; ".join(page.objective) or "none: nothing is learned in this channel"
    note = (
        f"Objective of channel {page.line['channel']}: {modules}. The stronger the colour, the"
        " larger the weight; point at a token for its numbers."
    )
    heading = (
        f"Target: {count(len(page.line['target']['token_ids']), 'token')} and what supervises them"
    )
    return section(heading, f'{view.legend()}<div class="text tokens">{view.tokens()}</div>', note)
