"""One sample of one step as a page of HTML that needs nothing beside itself (issue 3, "Seeing a sample")."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.html_text import attribute, inline
from launch.sample_overlay import MATCH_COLOURS, UNMATCHED_PREDICTION, UNMATCHED_TRUTH, Canvas, Shape
from launch.sample_parts import chip_row, count, document, header, section
from launch.sample_tokens import TokenView
from learner.rollout_line import GroundTruthEntry, ObjectEntry, ReadingEntry, RolloutEntry, RolloutLine
from shared.tokens.vocabulary import TokenCodec


@dataclass(frozen=True, slots=True)
class SamplePage:
    """What the page shows."""

    run: str
    line: RolloutLine
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
        sections = [_header(self), _pictures(self), _objects(line), section("Prompt", f'<div class="text">{inline(self.prompt)}</div>')]
        if line["rollout"] is not None and reading is not None:
            sections.append(_answer(line["rollout"], reading, line["target"]["token_ids"], self.codec))
            sections.append(section("Appended text", f'<div class="text">{inline(reading["appended_text"])}</div>'))
        sections.append(_target(self))
        return document(_heading(line), self.run, sections, definitions=self.canvas.definitions())


def _heading(line: RolloutLine) -> str:
    return f"Step {line['step']}, position {line['position']}"


def _header(page: SamplePage) -> str:
    line = page.line
    facts = {"channel": line["channel"], "sample": line["sample_id"]}
    if line["rollout"] is not None:
        rollout = line["rollout"]
        facts |= {"weights": f"v{rollout['weight_version']}", "actor": rollout["actor"], "seed": str(rollout["seed"]), "attempt": str(rollout["attempt"])}
        sizes = {"prompt tokens": rollout["num_prompt_tokens"], "response tokens": len(rollout["response_token_ids"])}
        facts |= {name: str(size) for name, size in sizes.items()} | {"finish": rollout["finish_reason"]}
    warnings = [] if line["reading"] is None else _warnings(line["reading"])
    return header(_heading(line), page.run, _summary(line), [chip_row(facts, warnings)], page.notes)


def _warnings(reading: ReadingEntry) -> list[str]:
    found = {
        "truncated: the response ended before its object closed": reading["truncated"],
        "fallback: nothing of the response could be kept": reading["fallback"],
        f"{len(reading['dropped'])} dropped": len(reading["dropped"]),
        f"{len(reading['excluded'])} matched but excluded": len(reading["excluded"]),
        f"{reading['gating_rejections']} candidate pairs under the gate": reading["gating_rejections"],
    }
    return [warning for warning, holds in found.items() if holds]


def _summary(line: RolloutLine) -> str:
    reading, num_truths = line["reading"], len(line["ground_truth"])
    if reading is None:
        return f"Teacher-forced on the ground truth: {count(num_truths, 'object')}, {count(len(line['target']['token_ids']), 'target token')}."
    supervised = sum(pair["supervised"] for pair in reading["pairs"])
    return (
        f"{count(len(reading['objects']), 'valid prediction')} for {count(num_truths, 'ground-truth object')}: {supervised} matched and supervised, "
        f"{len(reading['unmatched_predictions'])} unmatched, {len(reading['dropped'])} dropped; {len(reading['appended'])} appended to the kept prefix."
    )


# Pictures: one colour per pair, whatever draws it


def _pictures(page: SamplePage) -> str:
    line, panels = page.line, []
    truths = list(_truth_shapes(line))
    for image in range(len(page.canvas.images)):
        of = f" (image {image})" if len(page.canvas.images) > 1 else ""
        panels.append(page.canvas.panel(image, truths, f"Ground truth{of}. Dashed: no supervised match, appended." if line["reading"] else f"Ground truth{of}"))
        if line["reading"] is not None:
            shapes = list(_prediction_shapes(line["reading"]))
            panels.append(page.canvas.panel(image, shapes, f"Predictions{of} in the colour of their match. Dashed: unmatched."))
    note = "P and G number predictions and ground truths as the log does." if line["reading"] else ""
    return section("Picture", f'<div class="panels">{"".join(panels)}</div>', note)


def _pair_colours(reading: ReadingEntry) -> list[str]:
    """[pair]"""
    return [MATCH_COLOURS[i % len(MATCH_COLOURS)] for i in range(len(reading["pairs"]))]


def _prediction_colours(reading: ReadingEntry) -> dict[int, str]:
    """Of every prediction."""
    pairs = zip(reading["pairs"], _pair_colours(reading), strict=True)
    return dict.fromkeys(range(len(reading["objects"])), UNMATCHED_PREDICTION) | {pair["prediction"]: colour for pair, colour in pairs}


def _truth_colours(line: RolloutLine) -> dict[int, str]:
    """Of every ground truth."""
    colours = dict.fromkeys(range(len(line["ground_truth"])), UNMATCHED_TRUTH)
    reading = line["reading"]
    if reading is None:
        return {i: MATCH_COLOURS[i % len(MATCH_COLOURS)] for i in colours}
    return colours | {pair["ground_truth"]: colour for pair, colour in zip(reading["pairs"], _pair_colours(reading), strict=True)}


def _truth_shapes(line: RolloutLine) -> Iterator[Shape]:
    colours, appended = _truth_colours(line), [] if line["reading"] is None else line["reading"]["appended"]
    for i, truth in enumerate(line["ground_truth"]):
        yield Shape(truth["kind"], truth["bins"], f"G{i}", f"G{i} {truth['desc']}", colours[i], dashed=i in appended)


def _prediction_shapes(reading: ReadingEntry) -> Iterator[Shape]:
    colours, matches = _prediction_colours(reading), {pair["prediction"]: pair["ground_truth"] for pair in reading["pairs"]}
    for i, object_ in enumerate(reading["objects"]):
        label = f"P{i}→G{matches[i]}" if i in matches else f"P{i}"
        yield Shape(object_["kind"], object_["bins"], label, f"P{i} {object_['key']}: {object_['desc']}", colours[i], dashed=i not in matches)


# Objects: what was predicted, what is there, and what became of it


def _objects(line: RolloutLine) -> str:
    reading = line["reading"]
    if reading is None:
        head = '<tr><th colspan="2">ground truth</th><th>what happens</th></tr>'
        rows = list(_taught_rows(line))
    else:
        head = '<tr><th colspan="2">prediction</th><th colspan="2">ground truth</th><th>maskIoU</th><th>what happens</th></tr>'
        rows = [*_prediction_rows(line, reading), *_dropped_rows(reading), *_appended_rows(line, reading)]
    if not rows:
        return section("Objects", '<p class="soft">There is no object, and none was predicted.</p>')
    return section("Objects", f'<table class="objects"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>')


def _row(prediction: str, truth: str, iou: str, outcome: str) -> str:
    return f"<tr>{prediction or _NOTHING}{truth or _NOTHING}<td>{iou}</td><td>{inline(outcome)}</td></tr>"


_NOTHING = "<td></td><td></td>"


def _cells(label: str, colour: str, content: str) -> str:
    return f'<td class="mark"><span style="color:{colour}">{label}</span></td><td>{content}</td>'


def _prediction_rows(line: RolloutLine, reading: ReadingEntry) -> Iterator[str]:
    pairs, colours = {pair["prediction"]: pair for pair in reading["pairs"]}, _prediction_colours(reading)
    for i, object_ in enumerate(reading["objects"]):
        prediction = _cells(f"P{i}", colours[i], _predicted(object_))
        if i not in pairs:
            yield _row(prediction, "", "", "unmatched: neutral, it is neither taught nor punished")
            continue
        pair = pairs[i]
        truth = line["ground_truth"][pair["ground_truth"]]
        name = "" if truth["desc"] == object_["desc"] else "; the name differs, which matching ignores"
        supervised = f"matched: its coord slots are moved to G{pair['ground_truth']}{name}"
        outcome = supervised if pair["supervised"] else "excluded: its coord slots cannot be supervised; its ground truth is appended"
        yield _row(prediction, _cells(f"G{pair['ground_truth']}", colours[i], _true(truth)), f"{pair['iou']:.3f}", outcome)


def _dropped_rows(reading: ReadingEntry) -> Iterator[str]:
    for dropped in reading["dropped"]:
        yield _row(_cells("–", UNMATCHED_PREDICTION, inline(dropped["key"])), "", "", f"dropped: {dropped['reason']}")


def _appended_rows(line: RolloutLine, reading: ReadingEntry) -> Iterator[str]:
    colours = _truth_colours(line)
    first = 1 if reading["max_object_index"] is None else reading["max_object_index"] + 1
    for number, i in enumerate(reading["appended"], first):
        yield _row("", _cells(f"G{i}", colours[i], _true(line["ground_truth"][i])), "", f"appended as object_{number}")


def _taught_rows(line: RolloutLine) -> Iterator[str]:
    colours = _truth_colours(line)
    for i, truth in enumerate(line["ground_truth"]):
        yield f"<tr>{_cells(f'G{i}', colours[i], _true(truth))}<td>taught as object_{i + 1}</td></tr>"


def _predicted(object_: ObjectEntry) -> str:
    return f'{inline(object_["desc"])} <span class="soft">{inline(object_["key"])}</span>{_bins(object_["kind"], object_["bins"])}'


def _true(truth: GroundTruthEntry) -> str:
    return f"{inline(truth['desc'])}{_bins(truth['kind'], truth['bins'])}"


def _bins(kind: str, bins: Sequence[int]) -> str:
    return f'<span class="bins">{inline(kind)} {", ".join(map(str, bins))}</span>'


# Texts


def _answer(rollout: RolloutEntry, reading: ReadingEntry, target_ids: Sequence[int], codec: TokenCodec) -> str:
    """Shows the response; what was cut off is struck through."""
    response = _bytes(rollout["response_token_ids"], codec)
    kept, cut = response[: reading["num_kept_bytes"]], response[reading["num_kept_bytes"] :]
    content = f"<span>{inline(kept.decode(errors='replace'))}</span>"
    if cut:
        content += f'<span class="cut" title="{attribute("not kept")}">{inline(cut.decode(errors="replace"))}</span>'
    note = f"Kept: {count(reading['num_kept'], 'token')}. Struck through: cut off."
    if reading["fallback"]:
        note = "Nothing was kept: the whole target is ours."
    elif _bytes(target_ids[: reading["num_kept"]], codec) != kept:
        note += " The kept text behind those tokens is encoded together with what is appended."
    if rollout["forced_positions"]:
        note += f" Set by the repeat guard, not sampled: positions {', '.join(map(str, rollout['forced_positions']))}."
    return section("Rollout", f'<div class="text">{content}</div>', note)


def _bytes(token_ids: Sequence[int], codec: TokenCodec) -> bytes:
    return b"".join(map(codec.piece_bytes, token_ids))


def _target(page: SamplePage) -> str:
    reading = page.line["reading"]
    view = TokenView(page.line["target"], 0 if reading is None else reading["num_prefix"], page.codec)
    modules = "; ".join(page.objective) or "none: nothing is learned in this channel"
    note = f"Objective of channel {page.line['channel']}: {modules}. The stronger the colour, the larger the weight; point at a token for its numbers."
    heading = f"Target: {count(len(page.line['target']['token_ids']), 'token')} and what supervises them"
    return section(heading, f'{view.legend()}<div class="text tokens">{view.tokens()}</div>', note)
