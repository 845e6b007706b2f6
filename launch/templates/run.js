"use strict";
// The page of runs. Its state is the fragment of its address: #run=0&step=12&group=3&sort=reward&order=down&from=0.5&drop=...
// Texts of a run become text nodes, never HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view");
const tip = document.getElementById("tip");
const COLOURS = ["#256eeb", "#d65a0a", "#169650", "#8250dc", "#008ca0", "#dc326e", "#788c00", "#5c6675"];
const MAIN = ["loss/total", "rollout/reward", "rollout/match_rate", "val/f1", "val/reward", "rollout/no_signal_share", "rollout/length", "policy/entropy", "optim/grad_norm", "time/step_s"];
const HELD_OUT = { "rollout/reward": "val/reward", "rollout/match_rate": "val/f1" };
const PARTS = ["generation", "learning", "sync", "straggler", "data", "ranks", "driver"];
const MAX_ROWS = 400;
const metricOf = (name) => name.split(", channel ")[0];

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
const section = (heading, note, ...children) => html("section", {}, html("h2", {}, heading), note ? html("p", { class: "soft" }, note) : null, ...children);
const chip = (name, value, kind = null) => html("li", { class: kind }, html("b", {}, name), ` ${value}`);

function short(value) {
  if (value === undefined || value === null) return "";
  if (typeof value === "string") return value;
  if (value !== 0 && (Math.abs(value) >= 1e6 || Math.abs(value) < 1e-3)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}
const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
const spread = (values) => Math.sqrt(mean(values.map((one) => (one - mean(values)) ** 2)));
const duration = (seconds) => seconds < 120 ? `${seconds.toFixed(0)} s` : seconds < 7200 ? `${(seconds / 60).toFixed(0)} min` : `${(seconds / 3600).toFixed(1)} h`;

// The address

const params = () => new URLSearchParams(location.hash.slice(1));
function address(changes, from = new URLSearchParams()) {
  for (const [name, value] of Object.entries(changes)) value === null || value === "" ? from.delete(name) : from.set(name, value);
  return `#${from}`;
}

// Settings: runs that differ in more than their seed

const settings = [...new Set(data.runs.map((run) => run.setting))].map((number, index) => {
  const runs = data.runs.filter((run) => run.setting === number);
  const first = data.runs.indexOf(runs[0]);
  const changed = data.changes.filter(([key, values]) => key !== "training.seed" && new Set(values).size > 1);
  const differs = changed.slice(0, 3).map(([key, values]) => `${key.split(".").pop()} ${values[first]}`).join(", ");
  const name = [differs || runs[0].name, runs.length > 1 ? `(${runs.length} seeds)` : ""].join(" ");
  return { runs, name, colour: COLOURS[index % COLOURS.length] };
});

// Several seeds become one curve: their mean, between the least and the largest.
function joined(curves) {
  curves = curves.filter((curve) => curve !== undefined);
  if (curves.length < 2) return curves[0] ?? null;
  const at = new Map();
  for (const curve of curves) curve.x.forEach((x, i) => at.set(x, [...(at.get(x) ?? []), curve.y[i]]));
  const x = [...at.keys()].sort((a, b) => a - b);
  const of = (combine) => x.map((one) => combine(at.get(one)));
  return { x, y: of(mean), low: of((values) => Math.min(...values)), high: of((values) => Math.max(...values)) };
}

// Charts

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

function chart(name) {
  const lines = settings.map(({ runs, colour, name: label }) => ({ colour, label, curve: joined(runs.map((run) => run.curves[name] ?? run.heldOut[name])), points: name in HELD_OUT ? joined(runs.map((run) => run.heldOut[HELD_OUT[name]])) : null })).filter((line) => line.curve !== null);
  const [width, height, left, right, top, bottom] = [460, 200, 50, 18, 8, 36];
  const drawn = lines.flatMap((line) => [line.curve, line.points]).filter((curve) => curve !== null);
  const values = drawn.flatMap((curve) => [...curve.y, ...(curve.low ?? []), ...(curve.high ?? [])]);
  let [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  if (low >= 0 && low < 0.35 * high) low = 0;
  else low -= 0.05 * (high - low);
  high += 0.05 * (high - low);
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const steps = drawn.flatMap((curve) => curve.x);
  const [first, last] = [Math.min(...steps, 1), Math.max(...steps, 2)];
  const X = (step) => left + (step - first) / (last - first) * (width - left - right);
  const Y = (value) => height - bottom - (value - low) / (high - low) * (height - top - bottom);
  const path = (x, y) => x.map((step, i) => `${i ? "L" : "M"}${X(step).toFixed(1)} ${Y(y[i]).toFixed(1)}`).join("");
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name} by step` });
  for (const value of ticks(low, high, 6)) picture.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: Y(value), y2: Y(value) }), svg("text", { x: left - 6, y: Y(value) + 4, "text-anchor": "end" }, short(value)));
  for (const step of ticks(first, last, 6).filter(Number.isInteger)) picture.append(svg("text", { x: X(step), y: height - bottom + 15, "text-anchor": "middle" }, String(step)));
  picture.append(svg("text", { x: (left + width - right) / 2, y: height - 3, "text-anchor": "middle" }, "step"));
  for (const { colour, curve, points } of lines) {
    const isHeldOut = name.startsWith("val/");
    if (curve.low && !isHeldOut) picture.append(svg("path", { class: "band", fill: colour, style: "fill:" + colour, d: path(curve.x, curve.high) + path(curve.x.toReversed(), curve.low.toReversed()).replace("M", "L") + "Z" }));
    picture.append(svg("path", { stroke: colour, d: path(curve.x, curve.y) }));
    for (const marks of [isHeldOut ? curve : null, curve.x.length === 1 ? curve : null, points]) {
      marks?.x.forEach((step, i) => {
        if (marks.low) picture.append(svg("path", { stroke: colour, d: `M${X(step)} ${Y(marks.low[i])}V${Y(marks.high[i])}` }));
        picture.append(svg("circle", { cx: X(step), cy: Y(marks.y[i]), r: 3.6, fill: marks === points ? "#fff" : colour, stroke: colour, "stroke-width": 1.8 }));
      });
    }
  }
  if (MAIN.includes(metricOf(name))) for (const run of data.runs) for (const one of run.findings) picture.append(svg("path", { class: "finding", style: "fill:#d65a0a", d: `M${X(one.step)} ${height - bottom}l-4 7h8z` }, svg("title", {}, `step ${one.step}: ${one.rule}`)));
  const cursor = picture.appendChild(svg("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" }));
  const known = [...new Set(lines.flatMap((line) => [...line.curve.x, ...(line.points?.x ?? [])]))];
  const nearest = (event) => {
    const box = picture.getBoundingClientRect();
    const step = first + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (last - first);
    return known.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a);
  };
  picture.addEventListener("mousemove", (event) => {
    const step = nearest(event);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, X(step));
    cursor.setAttribute("visibility", "visible");
    const texts = lines.flatMap(({ label, curve, points }) => [[curve, ""], [points, " held-out"]].filter(([one]) => one?.x.includes(step)).map(([one, kind]) => {
      const i = one.x.indexOf(step);
      const range = one.low ? ` (${short(one.low[i])} to ${short(one.high[i])})` : "";
      return html("div", {}, `${lines.length > 1 ? label : ""}${kind} ${short(one.y[i])}${range}`.trim());
    }));
    tip.replaceChildren(html("b", {}, data.width > 1 && !name.startsWith("val/") ? `steps ${step - data.width + 1} to ${step}` : `step ${step}`), ...texts);
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  picture.addEventListener("mouseleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  picture.addEventListener("click", (event) => {
    const logged = data.runs[0].logged;
    const step = nearest(event);
    if (logged.length) location.hash = address({ run: 0, step: logged.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a) });
  });
  const note = name in HELD_OUT && lines.some((line) => line.points) ? `circles: held-out ${HELD_OUT[name]}` : "";
  const meaning = data.meanings[metricOf(name)] ?? "";
  return html("figure", {}, html("figcaption", { title: meaning }, name, html("span", { class: "soft" }, note || meaning)), picture);
}
const charts = (names) => html("div", { class: "charts" }, names.map(chart));

// The overview

function overview() {
  const names = [...new Set(data.runs.flatMap((run) => [...Object.keys(run.curves), ...Object.keys(run.heldOut)]))];
  const over = Object.entries(HELD_OUT).filter(([metric]) => names.includes(metric)).map(([, own]) => own);
  const main = MAIN.filter((metric) => !over.includes(metric)).flatMap((metric) => names.filter((name) => metricOf(name) === metric));
  const families = Map.groupBy(names.filter((name) => !main.includes(name)), (name) => name.split("/")[0]);
  const several = data.runs.length > 1;
  const colourOf = (run) => html("span", { class: "swatch", style: `background:${settings.find((one) => one.runs.includes(run)).colour}` });
  const of = (run) => several ? html("td", { class: "short" }, colourOf(run), run.name) : null;
  view.append(section(several ? "Runs" : "Run", "", html("table", {}, html("thead", {}, html("tr", {}, ["run", "folder", "seed", "steps", "time", "last held-out", "findings"].map((name) => html("th", {}, name)))), html("tbody", {}, data.runs.map((run) => html("tr", {},
    html("td", { class: "short" }, colourOf(run), run.name), html("td", { class: "long" }, run.folder), html("td", {}, run.seed), html("td", { class: "short" }, `${run.lastStep} of ${run.numSteps}`), html("td", { class: "short" }, duration(run.seconds)),
    html("td", {}, run.reports.length ? `${run.headline} ${short(run.reports.at(-1).score) || "none"}` : "none"), html("td", {}, run.findings.length)))))));
  const findings = data.runs.flatMap((run) => run.findings.map((one) => html("tr", {}, of(run), html("td", { class: "number" }, one.step), html("td", {}, html("b", {}, one.rule)), html("td", { class: "long" }, one.text))));
  view.append(section("Findings", "What the doctor says. Orange marks below the curves show their steps.", findings.length ? html("table", {}, html("thead", {}, html("tr", {}, several ? html("th", {}, "run") : null, html("th", { class: "number" }, "step"), html("th", {}, "rule"), html("th", {}, "figure, cause, what to do"))), html("tbody", {}, findings)) : html("p", {}, "No rule is broken.")));
  if (main.length) view.append(section("Curves", data.width > 1 ? `Means of ${data.width} steps, with the least and the largest value of the steps or seeds. Click for a step.` : "Click for a step. Several seeds: mean, least and largest.", html("div", { class: "key" }, settings.map((one) => html("span", {}, html("span", { class: "swatch", style: `background:${one.colour}` }), one.name))), charts(main),
    [...families].map(([family, own]) => {
      const details = html("details", { toggle: () => { if (details.open && details.children.length === 1) details.append(charts(own)); } }, html("summary", {}, `${family} (${own.length})`));
      return details;
    })));
  else view.append(section("Curves", "", html("p", {}, "No step has ended yet.")));
  view.append(section("Time", "Which part bounded how many steps, and the last verdict.", data.runs.map((run) => html("div", {}, several ? html("h3", {}, colourOf(run), run.name) : null,
    html("div", { class: "bounds" }, run.bounds.map(([part, count]) => html("div", { style: `flex:${count};background:${COLOURS.at(PARTS.indexOf(part))}`, title: `${part}: ${count} steps` }, `${part} ${count}`))), html("p", {}, run.verdict ?? "No verdict yet: it is made every 20 steps and at the end.")))));
  const steps = [...new Set(data.runs.flatMap((run) => run.reports.map((report) => report.step)))].sort((a, b) => a - b);
  if (steps.length) view.append(section("Held-out reports", "", html("table", { class: "narrow" }, html("thead", {}, html("tr", {}, html("th", {}, "after step"), data.runs.map((run) => html("th", {}, several ? `${run.name}: ` : "", run.headline ?? "none")))), html("tbody", {}, steps.map((step) => html("tr", {}, html("td", {}, step), data.runs.map((run) => {
    const report = run.reports.find((one) => one.step === step);
    const score = report ? short(report.score) || "no score" : "";
    return html("td", {}, report?.page ? html("a", { href: `${run.link}/${report.page}` }, score) : score);
  })))))));
  const faults = data.runs.flatMap((run) => run.faults.map((one) => html("tr", {}, of(run), html("td", { class: "long" }, one))));
  view.append(section("Faults and repairs", "", faults.length ? html("table", {}, html("tbody", {}, faults)) : html("p", {}, "None.")));
  if (several) view.append(section("Configuration differences", "Keys that affect results.", data.changes.length ? html("table", {}, html("thead", {}, html("tr", {}, html("th", {}, "key"), data.runs.map((run) => html("th", {}, colourOf(run), run.name)))), html("tbody", {}, data.changes.map(([key, values]) => html("tr", {}, html("td", {}, key), values.map((value) => html("td", { class: "long" }, value)))))) : html("p", {}, "None.")));
  view.append(section("Steps", "Rollouts of a step, its groups and samples.", data.runs.map((run, number) => html("div", { class: "controls" }, html("span", {}, colourOf(run), run.name), run.logged.length ? stepInput(number, run.logged.at(-1)) : html("span", {}, "no rollouts are logged (telemetry.rollouts)"),
    Object.keys(data.rollouts[number]).slice(-12).map((step) => html("a", { class: "button", href: address({ run: number, step }) }, `step ${step}`))))));
}

function stepInput(run, step) {
  const go = (event) => { location.hash = address({ run, step: event.target.value }); };
  return html("label", {}, "step", html("input", { type: "number", name: "step", min: 1, value: step, change: go }));
}

// Steps and groups

async function rowsOf(run, step) {
  const known = data.rollouts[run];
  if (!(step in known) && data.served) {
    const answer = await fetch(`rows?run=${run}&step=${step}`);
    if (!answer.ok) return { problem: await answer.text() };
    known[step] = await answer.json();
  }
  return known[step] ?? { problem: `This file has no rollouts of step ${step}. Write one that has, or serve all steps:`, commands: [`rollmatch view ${data.runs[run].folder} step=${step}`, `rollmatch view ${data.runs[run].folder} port=8321`] };
}

function groupsOf(rows) {
  return [...Map.groupBy(rows, (row) => row.group)].map(([number, siblings]) => {
    const of = (key) => siblings.map((row) => row[key]).filter((value) => value !== undefined);
    const average = (key) => of(key).length ? mean(of(key)) : undefined;
    const dropped = of("dropped").flatMap((text) => text.split(", "));
    return { number, rows: siblings, name: siblings[0].name, source: siblings[0].source, position: siblings[0].position, reward: average("reward"), spread: siblings.length > 1 && of("reward").length ? spread(of("reward")) : undefined, match: average("match"), tokens: average("tokens"), dropped: of("match").length ? dropped.length : undefined, reasons: dropped, ends: of("end") };
  });
}

const FIGURES = { position: "position", reward: "reward", spread: "spread of reward", match: "match rate", tokens: "length", dropped: "dropped" };

function counts(values) {
  const number = new Map();
  for (const value of values) number.set(value, (number.get(value) ?? 0) + 1);
  return [...number].sort((a, b) => b[1] - a[1]).map(([value, count]) => count > 1 ? `${value} ${count}` : value).join(", ");
}

function dots(group, low, high) {
  const x = (value) => 6 + 108 * (high > low ? (value - low) / (high - low) : 0.5);
  return svg("svg", { class: "dots", width: 120, height: 16 }, svg("line", { x1: 6, x2: 114, y1: 8, y2: 8 }), group.rows.filter((row) => row.reward !== undefined).map((row) => svg("circle", { cx: x(row.reward), cy: 8, r: 4 }, svg("title", {}, `position ${row.position}: ${short(row.reward)}`))));
}

function samplePage(run, step, row) {
  const two = (number, digits) => String(number).padStart(digits, "0");
  const file = `step_${two(step, 6)}_position_${two(row.position, 3)}.html`;
  if (data.served) return html("a", { href: `sample?run=${run}&step=${step}&position=${row.position}` }, "sample page");
  if (data.runs[run].samples.includes(file)) return html("a", { href: `${data.runs[run].link}/samples/${file}` }, "sample page");
  return html("code", { title: "makes the page of this sample" }, `rollmatch show-sample run=${data.runs[run].folder} step=${step} position=${row.position}`);
}

function stepView(run, step, rows, state) {
  const groups = groupsOf(rows);
  const figures = Object.keys(FIGURES).filter((key) => groups.some((group) => group[key] !== undefined));
  const sort = figures.includes(state.get("sort")) ? state.get("sort") : "position";
  const limit = (name, otherwise) => state.get(name) === null ? otherwise : Number(state.get(name));
  const [from, to] = [limit("from", -Infinity), limit("to", Infinity)];
  const has = (name, values) => state.get(name) === null || values.includes(state.get(name));
  const text = (state.get("text") ?? "").toLowerCase();
  const isOpen = from === -Infinity && to === Infinity;
  const kept = groups.filter((group) => (isOpen || (group[sort] >= from && group[sort] <= to)) && has("drop", group.reasons) && has("source", [group.source]) && has("end", group.ends) && (text === "" || group.rows.some((row) => `${row.name} ${row.answer ?? ""}`.toLowerCase().includes(text))));
  const sign = state.get("order") === "down" ? -1 : 1;
  kept.sort((a, b) => a[sort] === undefined || b[sort] === undefined ? (a[sort] === undefined) - (b[sort] === undefined) : sign * (a[sort] - b[sort]) || a.position - b.position);
  const change = (name) => (event) => { location.hash = address({ [name]: event.target.value }, params()); };
  const choice = (name, label, values, none) => html("label", {}, label, html("select", { name, change: change(name) }, none === null ? null : html("option", { value: "" }, none), values.map(([value, shown]) => html("option", { value, selected: value === (state.get(name) ?? (name === "sort" ? sort : null)) }, shown))));
  const distinct = (values) => [...new Set(values.filter((value) => value !== undefined))].sort().map((value) => [value, value]);
  const among = (name, label, values) => values.length > 1 || state.has(name) ? choice(name, label, values, "any") : null;
  const number = (name, label) => html("label", {}, label, html("input", { type: "number", step: "any", name, value: state.get(name), change: change(name) }));
  view.append(html("div", { class: "controls" },
    choice("sort", "sort by", figures.map((key) => [key, FIGURES[key]]), null), choice("order", "order", [["down", "largest first"]], "smallest first"), number("from", `${FIGURES[sort]} from`), number("to", "to"),
    among("drop", "dropped for", distinct(groups.flatMap((group) => group.reasons))), among("source", "source", distinct(groups.map((group) => group.source))), among("end", "ended by", distinct(groups.flatMap((group) => group.ends))),
    html("label", {}, "name or answer contains", html("input", { name: "text", value: state.get("text"), change: change("text") }))));
  const rewards = rows.map((row) => row.reward).filter((value) => value !== undefined);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const isGrouped = groups.some((group) => group.rows.length > 1);
  const columns = [
    ["position", (group) => group.position, true], ["sample", (group) => group.name, true], ["source", (group) => group.source, groups.some((group) => group.source)], ["rollouts", (group) => group.rows.length, isGrouped],
    ["reward", (group) => short(group.reward), figures.includes("reward")], ["spread", (group) => short(group.spread), figures.includes("spread")], ["", (group) => dots(group, low, high), figures.includes("spread")],
    ["match rate", (group) => short(group.match), figures.includes("match")], ["length", (group) => short(group.tokens), figures.includes("tokens")], ["dropped", (group) => counts(group.reasons), figures.includes("dropped")],
    ["end", (group) => counts(group.ends), groups.some((group) => group.ends.length)], [isGrouped ? "first answer" : "answer", (group) => (group.rows[0].answer ?? "").slice(0, 90), rows.some((row) => row.answer)],
  ].filter(([, , isShown]) => isShown);
  const kind = (name) => ["position", "rollouts", "reward", "spread", "match rate", "length"].includes(name) ? "number" : ["answer", "first answer", "dropped"].includes(name) ? "long" : "short";
  view.append(section(`${kept.length} of ${groups.length} ${isGrouped ? "groups" : "samples"}`, kept.length > MAX_ROWS ? `The first ${MAX_ROWS} are shown.` : "", html("table", { class: "groups" }, html("thead", {}, html("tr", {}, columns.map(([name]) => html("th", { class: kind(name) }, name)))),
    html("tbody", {}, kept.slice(0, MAX_ROWS).map((group) => {
      const href = address({ group: group.number }, params());
      return html("tr", { class: "link", click: () => { location.hash = href; } }, columns.map(([name, cell]) => html("td", { class: kind(name) }, name === "sample" ? html("a", { href }, cell(group)) : cell(group))));
    })))));
}

function groupView(run, step, rows) {
  const largest = Math.max(...rows.map((row) => Math.abs(row.advantage ?? 0)), 1e-9);
  const shared = ["name", "source", "truth", "prompt"].filter((key) => rows[0][key] !== undefined);
  view.append(section(rows.length > 1 ? `${rows.length} rollouts of ${rows[0].name}` : rows[0].name, "", shared.slice(1).map((key) => [html("h3", {}, key), html("div", { class: "text" }, rows[0][key])])));
  view.append(section("Side by side", rows.some((row) => row.advantage !== undefined) ? "The bar is the advantage: blue to the right becomes likelier, orange to the left less likely." : "", html("div", { class: "siblings" }, rows.map((row) => {
    const share = 50 * Math.abs(row.advantage ?? 0) / largest;
    const bar = `width:${share}%;left:${row.advantage < 0 ? 50 - share : 50}%;background:${row.advantage < 0 ? COLOURS[1] : COLOURS[0]}`;
    const facts = ["reward", "advantage", "match", "matched", "appended", "tokens", "turns", "end", "parts", "found", "dropped"].filter((key) => row[key] !== undefined);
    return html("article", {}, html("h3", {}, `position ${row.position}`), row.advantage === undefined ? null : html("div", { class: "advantage" }, html("div", { style: bar })),
      html("ul", { class: "chips" }, facts.map((key) => chip(FIGURES[key] ?? key, short(row[key]), key === "dropped" ? "warn" : null)), row.error === undefined ? null : chip("error", row.error, "warn")),
      html("div", { class: "text" }, row.answer ?? "No answer: supervised on the ground truth."), html("p", { class: "note" }, samplePage(run, step, row)));
  }))));
}

async function show() {
  const state = params();
  tip.hidden = true;
  if (!state.has("step")) { view.replaceChildren(); overview(); return; }
  const [run, step] = [Number(state.get("run") ?? 0), Number(state.get("step"))];
  const rows = await rowsOf(run, step);
  const logged = data.runs[run].logged;
  const at = (number) => address({ run, step: number });
  const before = logged.findLast((one) => one < step);
  const after = logged.find((one) => one > step);
  const isGroup = state.has("group") && !rows.problem;
  view.replaceChildren(html("div", { class: "controls" }, html("a", { class: "button", href: "#" }, "overview"), before ? html("a", { class: "button", href: at(before) }, `step ${before}`) : null, stepInput(run, step), after ? html("a", { class: "button", href: at(after) }, `step ${after}`) : null, isGroup ? html("a", { class: "button", href: address({ group: null }, params()) }, "all of the step") : null),
    html("h2", {}, `${data.runs[run].name}, step ${step}${isGroup ? `, group ${state.get("group")}` : ""}`));
  if (rows.problem) { view.append(html("p", {}, rows.problem), ...(rows.commands ?? []).map((one) => html("p", {}, html("code", {}, one)))); return; }
  if (data.width === 1) view.append(html("ul", { class: "chips" }, Object.entries(data.runs[run].curves).filter(([name, curve]) => MAIN.includes(metricOf(name)) && curve.x.includes(step)).map(([name, curve]) => chip(name, short(curve.y[curve.x.indexOf(step)])))));
  if (isGroup) groupView(run, step, rows.filter((row) => row.group === Number(state.get("group"))));
  else stepView(run, step, rows, state);
}

addEventListener("hashchange", show);
show();
