"use strict";
// The page of runs. Its address holds its state: #run=0&step=12&group=3&sort=reward&order=down&from=0.5&drop=...
// Texts of a run become text nodes, never HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view");
const tip = document.getElementById("tip");
const COLOURS = ["#256eeb", "#d65a0a", "#169650", "#8250dc", "#008ca0", "#dc326e", "#788c00", "#5c6675"];
const MAIN = ["loss/total", "rollout/reward", "rollout/match_rate", "val/f1", "val/reward", "rollout/no_signal_share",
  "rollout/length", "policy/entropy", "optim/grad_norm", "time/step_s"];
const HELD_OUT = { "rollout/reward": "val/reward", "rollout/match_rate": "val/f1" }; // drawn as circles on the first
const FIGURES = { position: "position", reward: "reward", spread: "spread of reward", match: "match rate", tokens: "length", dropped: "dropped" };

function make(space, tag, attributes, children) {
  const node = document.createElementNS(space, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null));
  return node;
}
const html = (tag, attributes = {}, ...children) => make("http://www.w3.org/1999/xhtml", tag, attributes, children);
const svg = (tag, attributes = {}, ...children) => make("http://www.w3.org/2000/svg", tag, attributes, children);
const chip = (name, value, kind = null) => html("li", { class: kind }, html("b", {}, name), ` ${value}`);
const button = (href, text) => html("a", { class: "button", href }, text);

function section(heading, note, ...children) {
  view.append(html("section", {}, html("h2", {}, heading), note ? html("p", { class: "soft" }, note) : null, ...children));
}

// A table. A head is a name, or a name with its column's class; rows are lists of cells.
function table(heads, rows, kind = null) {
  const columns = heads.map((head) => (Array.isArray(head) ? head : [head, null]));
  const row = (tag, cells) => html("tr", {}, cells.map((cell, i) => html(tag, { class: columns[i][1] }, cell ?? "")));
  const head = html("thead", {}, row("th", columns.map(([name]) => name)));
  return html("table", { class: kind }, head, html("tbody", {}, rows.map((cells) => row("td", cells))));
}

function short(value) {
  if (typeof value !== "number") return value ?? "";
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e6 || size < 1e-4)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
const spread = (values) => Math.sqrt(mean(values.map((one) => (one - mean(values)) ** 2)));
const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
const nearest = (values, to) => values.reduce((a, b) => (Math.abs(b - to) < Math.abs(a - to) ? b : a));
const metricOf = (name) => name.split(", channel ")[0];

const params = () => new URLSearchParams(location.hash.slice(1));
function address(changes, from = new URLSearchParams()) {
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === "") from.delete(name);
    else from.set(name, value);
  }
  return `#${from}`;
}

// Runs that differ only in their seed are one setting: one curve, the mean between the least and the largest.

const settings = [...new Set(data.runs.map((run) => run.setting))].map((first, index) => {
  const runs = data.runs.filter((run) => run.setting === first);
  const changed = data.changes.filter(([key]) => key !== "training.seed");
  const differs = changed.length > 3 ? "" : changed.map(([key, values]) => `${key.split(".").pop()} ${values[first]}`).join(", ");
  const seeds = runs.length > 1 ? ` (${runs.length} seeds)` : "";
  return { runs, name: (differs || runs[0].name) + seeds, colour: COLOURS[index % COLOURS.length] };
});
const swatch = (colour) => html("span", { class: "swatch", style: `background:${colour}` });
const named = (run) => [swatch(settings.find((one) => one.runs.includes(run)).colour), run.name];

function joined(curves) {
  curves = curves.filter((curve) => curve !== undefined);
  if (curves.length < 2) return curves[0] ?? null;
  const at = new Map();
  for (const curve of curves) curve.x.forEach((x, i) => at.set(x, [...(at.get(x) ?? []), curve.y[i]]));
  const x = [...at.keys()].sort((a, b) => a - b);
  const of = (combine) => x.map((one) => combine(at.get(one)));
  return { x, y: of(mean), low: of(least), high: of(largest) };
}

// Charts

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function chart(name) {
  const isHeldOut = name.startsWith("val/");
  const lines = settings.map(({ runs, colour, name: label }) => ({
    colour,
    label,
    curve: joined(runs.map((run) => (isHeldOut ? run.heldOut : run.curves)[name])),
    points: name in HELD_OUT ? joined(runs.map((run) => run.heldOut[HELD_OUT[name]])) : null,
  })).filter((line) => line.curve !== null);
  const drawn = lines.flatMap((line) => [line.curve, line.points]).filter((curve) => curve !== null);
  const values = drawn.flatMap((curve) => [...curve.y, ...(curve.low ?? []), ...(curve.high ?? [])]);
  let [low, high] = [least(values), largest(values)];
  const margin = 0.05 * (high - low) || Math.abs(low) / 2 || 1;
  low = low >= 0 && low < 0.35 * high ? 0 : low - margin;
  high += margin;
  const steps = drawn.flatMap((curve) => curve.x);
  const [first, last] = [least([1, ...steps]), largest([2, ...steps])];

  const [width, height, left, right, top, bottom] = [460, 204, 50, 18, 8, 40];
  const X = (step) => left + ((step - first) / (last - first)) * (width - left - right);
  const Y = (value) => height - bottom - ((value - low) / (high - low)) * (height - top - bottom);
  const path = (x, y) => x.map((step, i) => `${i ? "L" : "M"}${X(step).toFixed(1)} ${Y(y[i]).toFixed(1)}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} by step` });
  const text = (x, y, anchor, shown) => picture.append(svg("text", { x, y, "text-anchor": anchor }, shown));
  for (const value of ticks(low, high, 6)) {
    picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(value), y2: Y(value) }));
    text(left - 6, Y(value) + 4, "end", short(value));
  }
  for (const step of ticks(first, last, 6).filter(Number.isInteger)) text(X(step), height - bottom + 19, "middle", step);
  text((left + width - right) / 2, height - 3, "middle", "step");
  for (const { colour, curve, points } of lines) {
    if (curve.low && !isHeldOut) {
      const back = path(curve.x.toReversed(), curve.low.toReversed()).replace("M", "L");
      picture.append(svg("path", { class: "band", style: `fill:${colour}`, d: `${path(curve.x, curve.high)}${back}Z` }));
    }
    picture.append(svg("path", { stroke: colour, d: path(curve.x, curve.y) }));
    for (const marks of [points, isHeldOut || curve.x.length === 1 ? curve : null]) {
      marks?.x.forEach((step, i) => {
        const bar = marks.low ? `M${X(step)} ${Y(marks.low[i])}V${Y(marks.high[i])}` : "";
        const fill = marks === points ? "#fff" : colour;
        picture.append(svg("path", { stroke: colour, d: bar }));
        picture.append(svg("circle", { cx: X(step), cy: Y(marks.y[i]), r: 3.6, fill, stroke: colour, "stroke-width": 1.8 }));
      });
    }
  }
  for (const { runs, colour } of MAIN.includes(metricOf(name)) ? settings : []) {
    for (const one of runs.flatMap((run) => run.findings)) {
      const title = svg("title", {}, `step ${one.step}: ${one.rule}`);
      picture.append(svg("path", { style: `fill:${colour}`, d: `M${X(one.step)} ${height - bottom}l-4 7h8z` }, title));
    }
  }

  const cursor = picture.appendChild(svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" }));
  const under = (event) => {
    const box = picture.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * width;
    return nearest(steps, first + ((x - left) / (width - left - right)) * (last - first));
  };
  picture.addEventListener("mousemove", (event) => {
    const step = under(event);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, X(step));
    cursor.setAttribute("visibility", "visible");
    const texts = lines.flatMap(({ label, curve, points }) => [[curve, ""], [points, "held-out "]].map(([one, kind]) => {
      const i = one ? one.x.indexOf(step) : -1;
      if (i < 0) return null;
      const range = one.low ? ` (${short(one.low[i])} to ${short(one.high[i])})` : "";
      return html("div", {}, `${lines.length > 1 ? `${label}: ` : ""}${kind}${short(one.y[i])}${range}`);
    })).filter((one) => one !== null);
    const isMean = data.width > 1 && !isHeldOut;
    tip.replaceChildren(html("b", {}, isMean ? `steps ${step - data.width + 1} to ${step}` : `step ${step}`), ...texts);
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  picture.addEventListener("mouseleave", () => {
    tip.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  });
  picture.addEventListener("click", (event) => {
    const run = data.runs.findIndex((one) => one.logged.length);
    if (run >= 0) location.hash = address({ run, step: nearest(data.runs[run].logged, under(event)) });
  });
  const meaning = data.meanings[metricOf(name)] ?? "";
  const note = lines.some((line) => line.points) ? `circles: held-out ${HELD_OUT[name]}` : meaning;
  return html("figure", {}, html("figcaption", { title: meaning }, name, html("span", { class: "soft" }, note)), picture);
}

function curves() {
  const names = [...new Set(data.runs.flatMap((run) => [...Object.keys(run.curves), ...Object.keys(run.heldOut)]))];
  const over = Object.keys(HELD_OUT).filter((metric) => names.includes(metric)).map((metric) => HELD_OUT[metric]);
  const main = MAIN.filter((metric) => !over.includes(metric)).flatMap((metric) => names.filter((name) => metricOf(name) === metric));
  const key = html("div", { class: "key" }, settings.map((one) => html("span", {}, swatch(one.colour), one.name)));
  const charts = (own) => html("div", { class: "charts" }, own.map(chart));
  const families = Map.groupBy(names.filter((name) => !main.includes(name)), (name) => name.split("/")[0]);
  const folded = [...families].map(([family, own]) => {
    const details = html("details", {}, html("summary", {}, `${family} (${own.length})`));
    details.addEventListener("toggle", () => details.append(charts(own)), { once: true });
    return details;
  });
  const means = [data.width > 1 ? `${data.width} steps` : null, settings.length < data.runs.length ? "several seeds" : null];
  const of = means.filter((one) => one !== null).join(" and ");
  const note = of ? `Means of ${of}, and their least and largest values.` : "";
  if (names.length === 0) section("Curves", "No step has ended yet.");
  else section("Curves", `${note} Click for a step.`, key, charts(main), folded);
}

// The overview

function overview() {
  const several = data.runs.length > 1;
  const runColumn = several ? [["run", "short"]] : [];
  const of = (run) => (several ? [named(run)] : []);
  const heads = [["run", "short"], ["folder", "long"], "seed", ["steps", "short"], ["minutes", "short"], "last held-out", "findings"];
  section(several ? "Runs" : "Run", "", table(heads, data.runs.map((run) => [named(run), run.folder, run.seed, `${run.lastStep} of ${run.numSteps}`,
    short(run.seconds / 60), run.reports.length ? `${run.headline} ${short(run.reports.at(-1).score) || "none"}` : "none", run.findings.length])));

  const findings = data.runs.flatMap((run) => run.findings.map((one) => [...of(run), one.step, html("b", {}, one.rule), one.text]));
  const columns = [...runColumn, ["step", "number"], "rule", ["figure, cause, what to do", "long"]];
  if (findings.length) section("Findings", "What the doctor says. Triangles below the curves mark their steps.", table(columns, findings));
  else section("Findings", "The doctor has found no broken rule.");
  curves();
  const times = data.runs.map((run) => [...of(run), run.bounds.map(([part, count]) => `${part} ${count}`).join(", "),
    run.verdict ?? "None yet: it is made every 20 steps and at the end."]);
  section("Time", "", table([...runColumn, "bounded how many steps", ["last verdict", "long"]], times));
  const steps = [...new Set(data.runs.flatMap((run) => run.reports.map((report) => report.step)))].sort((a, b) => a - b);
  const held = ["after step", ...data.runs.map((run) => `${several ? `${run.name}: ` : ""}${run.headline ?? "none"}`)];
  if (steps.length) section("Held-out reports", "", table(held, steps.map((step) => [step, ...data.runs.map((run) => {
    const report = run.reports.find((one) => one.step === step);
    const score = report && (short(report.score) || "no score");
    return report?.page ? html("a", { href: `${run.link}/${report.page}` }, score) : score;
  })]), "narrow"));
  const faults = data.runs.flatMap((run) => run.faults.map((one) => [...of(run), one]));
  section("Faults and repairs", faults.length ? "" : "None.", faults.length ? table([...runColumn, ["", "long"]], faults) : null);
  const changes = data.changes.map(([key, values]) => [key, ...values]);
  const changed = table(["key", ...data.runs.map((run) => [named(run), "long"])], changes);
  if (several) section("Configuration differences", changes.length ? "Keys that affect results." : "None.", changes.length ? changed : null);
  section("Steps", "Rollouts of a step, its groups and samples.", data.runs.map((run, number) => html("div", { class: "controls" },
    html("span", {}, named(run)),
    run.logged.length ? stepInput(number, run.logged.at(-1)) : html("span", {}, "no rollouts are logged (telemetry.rollouts)"),
    Object.keys(data.rollouts[number]).slice(-12).map((step) => button(address({ run: number, step }), `step ${step}`)))));
}

function stepInput(run, step) {
  const change = (event) => { location.hash = address({ run, step: event.target.value }); };
  return html("label", {}, "step", html("input", { type: "number", name: "step", min: 1, value: step, change }));
}

// Steps and groups

async function rowsOf(run, step) {
  const known = data.rollouts[run];
  if (!(step in known) && data.served) {
    const answer = await fetch(`rows?run=${run}&step=${step}`);
    if (!answer.ok) return { problem: await answer.text(), commands: [] };
    known[step] = await answer.json();
  }
  const command = `rollmatch view ${data.runs[run].folder}`;
  const problem = `This file has no rollouts of step ${step}. Write one that has, or serve all steps:`;
  return known[step] ?? { problem, commands: [`${command} step=${step}`, `${command} port=8321`] };
}

function groupsOf(rows) {
  return [...Map.groupBy(rows, (row) => row.group)].map(([number, siblings]) => {
    const of = (key) => siblings.map((row) => row[key]).filter((value) => value !== undefined);
    const average = (key) => (of(key).length ? mean(of(key)) : undefined);
    const reasons = of("dropped").flatMap((text) => text.split(", "));
    const { name, source, position } = siblings[0];
    return {
      number, name, source, position, reasons, rows: siblings, ends: of("end"),
      reward: average("reward"), match: average("match"), tokens: average("tokens"),
      spread: of("reward").length > 1 ? spread(of("reward")) : undefined,
      dropped: of("match").length ? reasons.length : undefined,
    };
  });
}

function counted(values) {
  const groups = [...Map.groupBy(values, (value) => value)].sort((a, b) => b[1].length - a[1].length);
  return groups.map(([value, own]) => (own.length > 1 ? `${value} ${own.length}` : value)).join(", ");
}

function controls(groups, figures, sort, state) {
  const change = (event) => { location.hash = address({ [event.target.name]: event.target.value }, params()); };
  const input = (name, label, type = "text") => (
    html("label", {}, label, html("input", { name, type, step: "any", value: state.get(name), change })));
  const choice = (name, label, options, chosen) => html("label", {}, label, html("select", { name, change },
    options.map(([value, shown]) => html("option", { value, selected: value === chosen }, shown))));
  const among = (name, label, values) => {
    const options = [...new Set(values.filter((value) => value !== undefined))].sort().map((value) => [value, value]);
    return options.length > 1 || state.has(name) ? choice(name, label, [["", "any"], ...options], state.get(name)) : null;
  };
  view.append(html("div", { class: "controls" },
    choice("sort", "sort by", figures.map((key) => [key, FIGURES[key]]), sort),
    choice("order", "order", [["", "smallest first"], ["down", "largest first"]], state.get("order")),
    input("from", `${FIGURES[sort]} from`, "number"), input("to", "to", "number"),
    among("drop", "dropped for", groups.flatMap((group) => group.reasons)), among("source", "source", groups.map((group) => group.source)),
    among("end", "ended by", groups.flatMap((group) => group.ends)), input("text", "name or answer contains")));
}

function stepView(rows, state) {
  const groups = groupsOf(rows);
  const figures = Object.keys(FIGURES).filter((key) => groups.some((group) => group[key] !== undefined));
  const sort = figures.includes(state.get("sort")) ? state.get("sort") : "position";
  controls(groups, figures, sort, state);

  const has = (name, values) => !state.has(name) || values.includes(state.get(name));
  const text = (state.get("text") ?? "").toLowerCase();
  const kept = groups.filter((group) => has("drop", group.reasons) && has("source", [group.source]) && has("end", group.ends)
    && (!state.has("from") || group[sort] >= Number(state.get("from"))) && (!state.has("to") || group[sort] <= Number(state.get("to")))
    && group.rows.some((row) => `${row.name} ${row.answer ?? ""}`.toLowerCase().includes(text)));
  const sign = state.get("order") === "down" ? -1 : 1;
  const key = (group) => (group[sort] === undefined ? Infinity : sign * group[sort]); // groups without the figure come last
  kept.sort((a, b) => (key(a) === key(b) ? a.position - b.position : key(a) - key(b)));

  const isGrouped = groups.some((group) => group.rows.length > 1);
  const link = (group) => html("a", { href: address({ group: group.number }, params()) }, group.name);
  const columns = [
    ["position", "number", (group) => group.position, true],
    ["sample", "short", link, true],
    ["source", "short", (group) => group.source, groups.some((group) => group.source)],
    ["rollouts", "number", (group) => group.rows.length, isGrouped],
    ["reward", "number", (group) => short(group.reward), figures.includes("reward")],
    ["spread", "number", (group) => short(group.spread), figures.includes("spread")],
    ["match rate", "number", (group) => short(group.match), figures.includes("match")],
    ["length", "number", (group) => short(group.tokens), figures.includes("tokens")],
    ["dropped", "long", (group) => counted(group.reasons), figures.includes("dropped")],
    ["end", "short", (group) => counted(group.ends), groups.some((group) => group.ends.length)],
    [isGrouped ? "first answer" : "answer", "long", (group) => (group.rows[0].answer ?? "").slice(0, 90), rows.some((row) => row.answer)],
    ["ground truth", "long", (group) => group.rows[0].truth, !rows.some((row) => row.answer) && rows.some((row) => row.truth)],
  ].filter(([, , , isShown]) => isShown);
  const cells = kept.map((group) => columns.map(([, , cell]) => cell(group)));
  section(`${kept.length} of ${groups.length} ${isGrouped ? "groups" : "samples"}`, "", table(columns, cells, "groups"));
}

function samplePage(run, step, row) {
  const { samples, link, folder } = data.runs[run];
  const file = `step_${String(step).padStart(6, "0")}_position_${String(row.position).padStart(3, "0")}.html`;
  if (data.served) return html("a", { href: `sample?run=${run}&step=${step}&position=${row.position}` }, "sample page");
  if (samples.includes(file)) return html("a", { href: `${link}/samples/${file}` }, "sample page");
  return html("code", {}, `rollmatch show-sample run=${folder} step=${step} position=${row.position}`);
}

function groupView(run, step, rows) {
  const strongest = largest(rows.map((row) => Math.abs(row.advantage ?? 0))) || 1;
  const common = ["source", "truth", "prompt"].filter((key) => rows[0][key] !== undefined);
  section(rows.length > 1 ? `${rows.length} rollouts of ${rows[0].name}` : rows[0].name, "",
    common.map((key) => [html("h3", {}, key), html("div", { class: "text" }, rows[0][key])]));
  const facts = ["reward", "advantage", "match", "matched", "appended", "tokens", "turns", "end", "parts", "found", "dropped", "error"];
  const note = "The bar is the advantage: blue to the right becomes likelier, orange to the left less likely.";
  section("Side by side", rows.some((row) => row.advantage !== undefined) ? note : "", html("div", { class: "siblings" }, rows.map((row) => {
    const share = (50 * Math.abs(row.advantage)) / strongest;
    const bar = `width:${share}%;left:${row.advantage < 0 ? 50 - share : 50}%;background:${COLOURS[row.advantage < 0 ? 1 : 0]}`;
    const chips = facts.filter((key) => row[key] !== undefined).map((key) => (
      chip(FIGURES[key] ?? key, short(row[key]), ["dropped", "error"].includes(key) ? "warn" : null)));
    return html("article", {}, html("h3", {}, `position ${row.position}`),
      row.advantage === undefined ? null : html("div", { class: "advantage" }, html("div", { style: bar })),
      html("ul", { class: "chips" }, chips), html("div", { class: "text" }, row.answer ?? "No answer: supervised on the ground truth."),
      html("p", { class: "note" }, samplePage(run, step, row)));
  })));
}

async function show() {
  const state = params();
  tip.hidden = true;
  const [run, step] = [Number(state.get("run") ?? 0), Number(state.get("step") ?? NaN)];
  if (!(run in data.runs) || !Number.isInteger(step)) {
    view.replaceChildren();
    overview();
    return;
  }
  const asked = location.hash;
  const rows = await rowsOf(run, step);
  if (location.hash !== asked) return; // a later address was shown while the server answered
  const { name, logged, curves: own } = data.runs[run];
  const to = (number) => (number === undefined ? null : button(address({ run, step: number }), `step ${number}`));
  const siblings = rows.problem ? [] : rows.filter((row) => state.has("group") && row.group === Number(state.get("group")));
  const isGroup = siblings.length > 0;
  view.replaceChildren(
    html("div", { class: "controls" }, button("#", "overview"), to(logged.findLast((one) => one < step)), stepInput(run, step),
      to(logged.find((one) => one > step)), isGroup ? button(address({ group: null }, params()), "all of the step") : null),
    html("h2", {}, `${name}, step ${step}${isGroup ? `, group ${state.get("group")}` : ""}`));
  if (rows.problem) {
    view.append(html("p", {}, rows.problem), ...rows.commands.map((one) => html("p", {}, html("code", {}, one))));
    return;
  }
  const figures = Object.entries(own).filter(([metric, curve]) => MAIN.includes(metricOf(metric)) && curve.x.includes(step));
  if (data.width === 1) view.append(html("ul", { class: "chips" }, figures.map(([metric, { x, y }]) => chip(metric, short(y[x.indexOf(step)])))));
  if (isGroup) groupView(run, step, siblings);
  else stepView(rows, state);
}

addEventListener("hashchange", show);
show();
