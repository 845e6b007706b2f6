"""Renders one detection sample of a training step as a self-contained HTML page."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup
from PIL import Image

from launch.inspect.sample_pages.html import (
    LegendRow,
    TokenCell,
    TokenRun,
    counted,
    inline,
    opacity_of,
    render,
    token_cell,
)
from learner.rollout_logs.samples import (
    LabelOverrideEntry,
    ReadingEntry,
    RolloutEntry,
    RolloutRecord,
    TargetEntry,
)
from learner.targets import TokenRole
from shared.prompts import EXIF_ORIENTATION, on_white, open_picture
from shared.records import GeometryKind
from shared.tokens.vocabulary import NUM_BINS, TokenCodec

# Colours of pairs, used in turn. They differ clearly from the two below.
# fmt: off
MATCH_COLOURS = (
    "#0072b2", "#00875a", "#a64ca6", "#b26b00", "#00838f",
    "#5b4fc7", "#6b7d00", "#8d5524", "#c2185b", "#2e5fa3",
)
# fmt: on
UNMATCHED_PREDICTION = "#d62222"
UNMATCHED_TRUTH = "#1a1a1a"

_SHOWN_WIDTH = 480
"""Approximate width of a panel on the page, in CSS pixels. It decides the size of letters."""
_CROSS_ARM = 8
"""Half the size of the cross that marks a point, in CSS pixels."""
_EMBEDDED = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}


class ShapeStyle(NamedTuple):
    label: str
    title: str
    """Text shown when the pointer is over the shape."""
    colour: str
    dashed: bool
    """Whether the outline is dashed: a ground-truth object that is appended, or a predicted one
    without a match."""


class DrawnShape(NamedTuple):
    """A detected or true object (box, polygon or point), drawn as inline SVG on its image."""

    points: str
    """The vertices in SVG's notation, in pixels of the image."""
    label_position: Markup
    """SVG attributes that put the label into the shape's upper left corner, within the image."""
    style: ShapeStyle


@dataclass(frozen=True, slots=True)
class Canvas:
    """The images of a sample, on which its page draws objects. All have one size in pixels."""

    images: tuple[bytes, ...]
    """Encoded image files."""
    width: int
    height: int

    @property
    def is_small(self) -> bool:
        return self.width < _SHOWN_WIDTH

    def uris(self) -> list[str]:
        """Return the images as data URIs, as training sees them.

        A file that browsers may show differently, or not at all, becomes a PNG. (Some browsers
        ignore the EXIF orientation of an image inside SVG.)
        """
        return [_data_uri(data) for data in self.images]

    def draw(self, kind: str, bins: Sequence[int], style: ShapeStyle) -> DrawnShape:
        """Draw an object as SVG.

        Bin k along a side of W pixels is the centre of pixel `k / 999 * (W - 1)`.

        `bins` are x1, y1, x2, y2 of a box; x, y per vertex; or x, y of a point (drawn as a cross).
        """
        if kind == GeometryKind.BBOX:
            x1, y1, x2, y2 = bins
            bins = (x1, y1, x2, y1, x2, y2, x1, y2)
        last = NUM_BINS - 1
        xs = [x / last * (self.width - 1) + 0.5 for x in bins[::2]]
        ys = [y / last * (self.height - 1) + 0.5 for y in bins[1::2]]
        unit = self.width / _SHOWN_WIDTH
        if kind == GeometryKind.POINT:
            (x,), (y,) = xs, ys
            arm = _CROSS_ARM * unit
            xs = [x - arm, x + arm, x, x, x, x]
            ys = [y, y, y, y - arm, y + arm, y]
        label_x = min(min(xs) + 4 * unit, self.width - 10 * unit * len(style.label))
        label_y = min(max(min(ys), 0) + 16 * unit, self.height - 4 * unit)
        return DrawnShape(
            points=" ".join(f"{x:.2f},{y:.2f}" for x, y in zip(xs, ys, strict=True)),
            label_position=Markup(
                f'x="{label_x:.2f}" y="{label_y:.2f}" font-size="{14 * unit:.2f}"'
                f' stroke-width="{4 * unit:.2f}"'
            ),
            style=style,
        )


def _data_uri(data: bytes) -> str:
    with open_picture(data) as image:
        mime = _EMBEDDED.get(image.format or "")
        if mime is None or not _is_upright(image):
            file = io.BytesIO()
            on_white(image).save(file, format="PNG")
            mime = "image/png"
            data = file.getvalue()
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def _is_upright(image: Image.Image) -> bool:
    try:
        return bool(image.getexif().get(EXIF_ORIENTATION, 1) == 1)
    # Damaged EXIF data can raise any error in Pillow, and browsers may read it differently.
    except Exception:
        return False


@dataclass(frozen=True, slots=True)
class SamplePage:
    """The content of a detection sample's HTML page."""

    run: str
    line: RolloutRecord
    canvas: Canvas
    prompt: str
    """Output of the chat template, with one placeholder per image."""
    objective: tuple[str, ...]
    """The enabled loss modules of the sample's channel, with their weights."""
    notes: tuple[str, ...]
    """Remarks for the reader of the page."""
    codec: TokenCodec

    def html(self) -> str:
        line = self.line
        reading = line["reading"]
        target = line["target"]
        prediction_colours, truth_colours = _colours(line)
        answer = None
        if line["rollout"] is not None and reading is not None:
            answer = _answer(line["rollout"], reading, target["token_ids"], self.codec)
        pairs = [] if reading is None else reading["pairs"]
        trimmed = _trimmed(reading)
        return render(
            "sample.html",
            heading=f"Step {line['step']}, position {line['position']}",
            run=self.run,
            notes=self.notes,
            line=line,
            reading=reading,
            canvas=self.canvas,
            prompt=self.prompt,
            truths=self._truths(truth_colours),
            predictions=self._predictions(prediction_colours),
            pairs={pair["prediction"]: pair for pair in pairs},
            trimmed=trimmed,
            taught_names=_taught_names(target, self.codec),
            prediction_colours=prediction_colours,
            truth_colours=truth_colours,
            unmatched_prediction=UNMATCHED_PREDICTION,
            answer=answer,
            objective="; ".join(self.objective) or "none: nothing is learned in this channel",
            legend_rows=_legend_rows(target),
            runs=_token_runs(target, 0 if reading is None else reading["num_prefix"], self.codec),
        )

    def _truths(self, colours: Sequence[str]) -> list[DrawnShape]:
        reading = self.line["reading"]
        appended = [] if reading is None else reading["appended"]
        shapes = []
        for i, truth in enumerate(self.line["ground_truth"]):
            title = f"G{i} {truth['desc']}"
            style = ShapeStyle(f"G{i}", title, colours[i], dashed=i in appended)
            shapes.append(self.canvas.draw(truth["kind"], truth["bins"], style))
        return shapes

    def _predictions(self, colours: Sequence[str]) -> list[DrawnShape]:
        reading = self.line["reading"]
        if reading is None:
            return []
        matches = {pair["prediction"]: pair["ground_truth"] for pair in reading["pairs"]}
        shapes = []
        for i, found in enumerate(reading["objects"]):
            label = f"P{i}→G{matches[i]}" if i in matches else f"P{i}"
            title = f"P{i} {found['key']}: {found['desc']}"
            style = ShapeStyle(label, title, colours[i], dashed=i not in matches)
            shapes.append(self.canvas.draw(found["kind"], found["bins"], style))
        return shapes


def _colours(line: RolloutRecord) -> tuple[list[str], list[str]]:
    """Return the colour of every prediction and of every ground truth: a pair shares one."""
    reading = line["reading"]
    num_truths = len(line["ground_truth"])
    colours = itertools.cycle(MATCH_COLOURS)
    if reading is None:
        return [], [next(colours) for _ in range(num_truths)]
    predictions = [UNMATCHED_PREDICTION] * len(reading["objects"])
    truths = [UNMATCHED_TRUTH] * num_truths
    for pair, colour in zip(reading["pairs"], colours, strict=False):
        predictions[pair["prediction"]] = colour
        truths[pair["ground_truth"]] = colour
    return predictions, truths


class _Answer(NamedTuple):
    kept: str
    cut: str
    """Struck through on the page."""
    note: str


def _answer(
    rollout: RolloutEntry, reading: ReadingEntry, target_ids: Sequence[int], codec: TokenCodec
) -> _Answer:
    response = b"".join(map(codec.piece_bytes, rollout["response_token_ids"]))
    kept = response[: reading["num_kept_bytes"]]
    cut = response[reading["num_kept_bytes"] :]
    note = f"Kept: {counted(reading['num_kept'], 'token')}. Struck through: cut off."
    trimmed = _trimmed(reading)
    if not reading["num_kept_bytes"]:
        note = "No sampled token was kept: the target is the appended text."
    elif b"".join(map(codec.piece_bytes, target_ids[: reading["num_kept"]])) != kept:
        note += " The kept text after those tokens is encoded together with the appended text."
    if num_trimmed := len(trimmed.predictions) + trimmed.num_dropped:
        where = "After the last match" if reading["num_kept_bytes"] else "Without a match"
        number = "1 entry was" if num_trimmed == 1 else f"{num_trimmed} entries were"
        note += f" {where} {number} cut off (trim_trailing_false_positives)."
    if rollout["forced_positions"]:
        positions = ", ".join(map(str, rollout["forced_positions"]))
        note += f" Positions set by the repeat guard, not sampled: {positions}."
    return _Answer(kept.decode(errors="replace"), cut.decode(errors="replace"), note)


class _Trimmed(NamedTuple):
    """The entries that were cut off after the last supervised object."""

    predictions: Sequence[int] = ()
    num_dropped: int = 0
    """Number of dropped entries that were cut off too: the last ones in `reading.dropped`."""


def _trimmed(reading: ReadingEntry | None) -> _Trimmed:
    if reading is None or "trimmed" not in reading:
        return _Trimmed()
    return _Trimmed(reading["trimmed"], reading["num_trimmed_dropped"])


def _overrides(target: TargetEntry) -> Sequence[LabelOverrideEntry]:
    """Return the label overrides of a target; empty if the log line has none."""
    if "label_overrides" in target:
        return target["label_overrides"]
    return ()


def _taught_names(target: TargetEntry, codec: TokenCodec) -> dict[int, str]:
    """Return, by index of the prediction, the text of the token that is taught to correct its name.

    The token replaces the first wrong one. Only names of matched objects are corrected.
    """
    of_names = {
        position
        for start, stop, role, _ in target["supervision"]
        if role == TokenRole.CORRECTED_DESC.name.lower()
        for position in range(start, stop)
    }
    return {
        one["prediction"]: codec.piece_bytes(one["token_id"]).decode(errors="replace")
        for one in _overrides(target)
        if one["position"] in of_names
    }


def _opacity(role: str, weight: float, target: TargetEntry) -> float | None:
    if role == TokenRole.COORD.name.lower():
        return 0.45
    strongest = max(weight for *_, weight in target["supervision"])
    return opacity_of(weight / strongest) if weight else None


def _legend_rows(target: TargetEntry) -> list[LegendRow]:
    """Return a row per role in the target, with colours, number of tokens and weights."""
    rows = []
    for role in TokenRole:
        tag = role.name.lower()
        of_role = [run for run in target["supervision"] if run[2] == tag]
        if not of_role:
            continue
        weights = sorted({weight for *_, weight in of_role})
        opacities = [_opacity(tag, weight, target) for weight in weights]
        num_tokens = sum(stop - start for start, stop, *_ in of_role)
        figures = ", ".join(f"{weight:g}" for weight in weights)
        if role is TokenRole.COORD:
            figures = "slots"
        rows.append(LegendRow(tag, opacities, num_tokens, figures))
    return rows


def _token_runs(target: TargetEntry, num_prefix: int, codec: TokenCodec) -> list[TokenRun]:
    """Return the target's tokens in stretches of equal supervision.

    A stretch is also split after the first `num_prefix` tokens, the kept prefix of the answer.
    """
    aims = dict(zip(target["coord_positions"], target["coord_targets"], strict=True))
    labels = {one["position"]: one["token_id"] for one in _overrides(target)}
    total = sum(weight * (stop - start) for start, stop, _, weight in target["supervision"])
    runs = []
    for first, last, role, weight in target["supervision"]:
        share = f" ({weight / total:.2%} of the sample's text)" if weight else ""
        for start, stop in itertools.pairwise(
            sorted({first, last, min(max(first, num_prefix), last)})
        ):
            tokens = []
            for position in range(start, stop):
                token_id = target["token_ids"][position]
                facts = [f"token {position}", f"id {token_id}", role]
                if position not in aims:
                    facts.append(f"weight {weight:g}{share}")
                    cell = token_cell(facts, codec.piece_bytes(token_id))
                    if position in labels:
                        label = labels[position]
                        taught = token_cell([f"taught is id {label}"], codec.piece_bytes(label))
                        arrow = Markup("{}<b>→{}</b>").format(
                            inline(cell.content), inline(taught.content)
                        )
                        cell = TokenCell([*cell.facts, *taught.facts], arrow)
                    tokens.append(cell)
                    continue
                bin = codec.coord_bin(token_id)
                aim = aims[position]
                facts += [f"bin {bin}, should be {aim:g}", f"one of {len(aims)} slots"]
                tokens.append(TokenCell(facts, Markup(f"{bin}<b>→{aim:.4g}</b>")))
            opacity = _opacity(role, weight, target)
            runs.append(TokenRun(role, opacity, tokens, begins_appended=start == num_prefix > 0))
    return runs
