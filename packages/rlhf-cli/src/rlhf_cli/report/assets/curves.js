"use strict";
// Curves of all metrics: small charts in groups of the same prefix, with one cursor for all of them.

const MAIN = ["rollout/reward", "eval/accuracy", "eval/reward", "rollout/response_tokens", "policy/entropy", "kl/reference",
  "mismatch/logprob_gap_mean", "policy/clip_fraction", "sft/loss", "rm/loss", "preference/loss", "kto/loss", "prm/loss",
  "kd/loss", "rm/accuracy", "preference/accuracy", "eval/loss", "train/learning_rate"];
const HEIGHT = 150, LEFT = 46, RIGHT = 8, TOP = 6, BOTTOM = 18;
const view = { smooth: 0, log: false, find: "", cursor: null, hidden: new Set() };
let charts = [];  // those that are drawn

PARTS.push({ name: "curves", title: "Curves", draw: drawCurves });

function drawCurves(section) {
  const range = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smooth" });
  range.addEventListener("input", () => { view.smooth = Number(range.value); redraw(); });
  const log = el("input", { type: "checkbox", id: "logscale" });
  log.addEventListener("change", () => { view.log = log.checked; redraw(); });
  const find = el("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric" });
  const holder = el("div", {});
  find.addEventListener("input", () => { view.find = find.value.toLowerCase(); drawGroups(holder); });
  section.replaceChildren(
    findingsStrip(),
    el("div", { class: "bar" }, find,
      el("label", {}, "Smoothing ", range), el("label", {}, log, " Logarithmic"),
      el("span", { class: "quiet" }, "Move over a chart, or select it and use the arrow keys; Enter enlarges it.")),
    RUNS.some((run) => run.thinned) ? el("p", { class: "note" }, "Long curves are shown as means of neighbouring points.") : "",
    holder);
  drawGroups(holder);
  addEventListener("resize", soon(redraw));
}

function findingsStrip() {
  const found = RUNS.flatMap((run, at) => run.findings.map((finding) => ({ at, finding })));
  if (!found.length) return el("p", { class: "strip good" }, "No warnings: ", el("a", { href: "#warnings" }, "what is looked at"));
  const links = found.map(({ at, finding }) => el("a", { href: "#warnings" }, RUNS.length > 1 ? swatch(at) : "", finding.title));
  return el("p", { class: "strip bad" }, el("b", {}, count(found.length, "warning") + ": "), links.flatMap((link, i) => (i ? [", ", link] : [link])));
}

function drawGroups(holder) {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].sort();
  const wanted = names.filter((name) => name.toLowerCase().includes(view.find));
  const isCurve = (name) => RUNS.some((run) => run.curves[name] && run.curves[name][0].length > 1);
  const groups = new Map();
  const main = MAIN.filter((name) => wanted.includes(name) && isCurve(name));
  if (main.length && !view.find) groups.set("main", main);
  for (const name of wanted.filter(isCurve)) {
    const prefix = name.split("/")[0];
    groups.set(prefix, [...(groups.get(prefix) || []), name]);
  }
  charts = [];
  const blocks = [...groups].map(([title, members], at) => chartGroup(title, members, at < 1 || Boolean(view.find)));
  const single = wanted.filter((name) => !isCurve(name));
  if (single.length) blocks.push(singleValues(single));
  if (!blocks.length) blocks.push(el("p", { class: "quiet" }, names.length ? "No metric has this name." : "The run has no metrics yet."));
  holder.replaceChildren(...blocks);
  redraw();
}

function chartGroup(title, names, isOpen) {
  const grid = el("div", { class: "grid" });
  const block = el("details", { class: "group", open: isOpen }, el("summary", {}, title, el("span", { class: "quiet" }, ` ${names.length}`)), grid);
  const build = () => {
    if (!block.open || grid.childElementCount) return;
    for (const name of names) grid.append(chartOf(name, HEIGHT));
    redraw();
  };
  block.addEventListener("toggle", build);
  build();
  return block;
}

function chartOf(name, height) {
  const values = el("span", { class: "values" });
  const box = el("div", { class: "plot" });
  const figure = el("figure", { class: "chart", tabindex: 0, "aria-label": name },
    el("figcaption", {}, el("b", { title: DATA.meanings[name] }, name), values), box);
  const chart = { name, height, figure, values, box };
  charts.push(chart);
  figure.addEventListener("pointermove", (event) => moveCursor(stepAt(chart, event)));
  figure.addEventListener("pointerleave", () => moveCursor(null));
  figure.addEventListener("keydown", (event) => chartKey(chart, event));
  figure.addEventListener("dblclick", () => enlarge(name));
  return figure;
}

function chartKey(chart, event) {
  const steps = chart.steps || [];
  const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (way && steps.length) {
    const at = view.cursor === null ? (way > 0 ? -1 : steps.length) : steps.findIndex((step) => step >= view.cursor);
    moveCursor(steps[Math.min(steps.length - 1, Math.max(0, at + way))]);
  } else if (event.key === "Enter" && chart.height === HEIGHT) enlarge(chart.name);
  else if (event.key === "Escape") moveCursor(null);
  else return;
  event.preventDefault();
}

function enlarge(name) {
  const before = document.activeElement;
  const dialog = el("dialog", { class: "large" });
  const close = el("button", { type: "button", onclick: () => dialog.close() }, "Close");
  dialog.append(chartOf(name, Math.max(240, Math.min(560, innerHeight - 180))), close);
  dialog.addEventListener("close", () => {
    charts = charts.filter((chart) => !dialog.contains(chart.figure));
    dialog.remove();
    if (before) before.focus();
  });
  document.body.append(dialog);
  dialog.showModal();
  redraw();
}

function singleValues(names) {
  const rows = names.map((name) => el("tr", {}, el("th", { scope: "row" }, name),
    RUNS.map((run) => el("td", {}, run.curves[name] ? fmt(last(run.curves[name][1])) : "–"))));
  const head = RUNS.length > 1 ? el("tr", {}, el("th", {}, ""), RUNS.map((run, at) => el("th", {}, swatch(at), visible(run.name)))) : "";
  return el("details", { class: "group", open: Boolean(view.find) }, el("summary", {}, "single values", el("span", { class: "quiet" }, ` ${names.length}`)),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows))));
}

// Means that forget: each value counts `smooth` times as much as the next one. The first ones are not pulled to zero.
function smoothed(values, smooth) {
  if (!smooth) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = smooth * sum + (1 - smooth) * value;
    weight = smooth * weight + (1 - smooth);
    return sum / weight;
  });
}

function redraw() {
  for (const chart of charts) if (chart.figure.isConnected) drawChart(chart);
}

function drawChart(chart) {
  const width = Math.max(160, chart.box.clientWidth);
  const lines = RUNS.map((run, at) => ({ at, curve: run.curves[chart.name] })).filter((line) => line.curve && !view.hidden.has(line.at));
  const shown = lines.map(({ at, curve }) => ({ at, steps: curve[0], raw: curve[1], values: smoothed(curve[1], view.smooth) }));
  const isShown = (value) => value !== null && (!view.log || value > 0);
  const all = shown.flatMap((line) => line.raw).filter(isShown);
  chart.steps = [...new Set(shown.flatMap((line) => line.steps))].sort((a, b) => a - b);
  chart.shown = shown;
  const bounds = { x0: chart.steps[0] ?? 0, x1: last(chart.steps) ?? 1 };
  if (bounds.x0 === bounds.x1) bounds.x1 += 1;
  const [low, high, ticks] = axis(all, view.log);
  const toY = (value) => view.log ? Math.log10(value) : value;
  chart.x = (step) => LEFT + (step - bounds.x0) / (bounds.x1 - bounds.x0) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (toY(value) - low) / (high - low)) * (chart.height - TOP - BOTTOM);
  const picture = svg("svg", { width, height: chart.height, "aria-hidden": "true" });
  for (const tick of ticks) {
    const at = y(tick);
    picture.append(svg("line", { class: "tick", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
      svg("text", { x: LEFT - 5, y: at + 3.5, "text-anchor": "end" }, fmt(tick)));
  }
  const xs = niceTicks(bounds.x0, bounds.x1, Math.max(2, Math.floor(width / 110))).filter(Number.isInteger);
  for (const step of xs) picture.append(svg("text", { x: chart.x(step), y: chart.height - 4, "text-anchor": "middle" }, fmt(step)));
  drawMarks(picture, chart, bounds);
  for (const line of shown) {
    const path = (values) => pathOf(line.steps, values, chart.x, y, isShown);
    if (view.smooth) picture.append(svg("path", { class: "raw", d: path(line.raw), css: { stroke: colorOf(line.at) } }));
    picture.append(svg("path", { class: "line", d: path(line.values), css: { stroke: colorOf(line.at) } }));
  }
  chart.rule = svg("line", { class: "rule", y1: TOP, y2: chart.height - BOTTOM, visibility: "hidden" });
  picture.append(chart.rule);
  chart.box.replaceChildren(picture);
  showCursor(chart);
}

// Shade the steps of warnings that this metric shows, and mark the steps after which the log has notices or errors.
function drawMarks(picture, chart, bounds) {
  const inside = (step) => Math.min(bounds.x1, Math.max(bounds.x0, step));
  RUNS.forEach((run, at) => {
    if (view.hidden.has(at)) return;
    for (const finding of run.findings) {
      if (!finding.steps || !finding.metrics.includes(chart.name)) continue;
      const from = chart.x(inside(finding.steps[0])), to = chart.x(inside(finding.steps[1]));
      picture.prepend(svg("rect", { class: "band", x: from, width: Math.max(2, to - from), y: TOP, height: chart.height - TOP - BOTTOM },
        svg("title", {}, finding.title)));
    }
    for (const [step, lines] of Map.groupBy(run.log, ([step]) => step)) {
      const kinds = lines.map(([, line]) => kindOf(line));
      const kind = ["error", "warning", "notice"].find((each) => kinds.includes(each));
      const text = lines.slice(0, 5).map(([, line]) => visible(line).slice(0, 300)).join("\n") + (lines.length > 5 ? `\nand ${lines.length - 5} more` : "");
      const x = chart.x(inside(step)), y = chart.height - BOTTOM;
      picture.append(svg("path", { class: `mark ${kind}`, d: `M${x - 4} ${y}h8l-4 -7z` }, svg("title", {}, `after ${step}: ${text}`)));
    }
  });
}

function kindOf(line) {
  const said = /^(notice|warning|error): /.exec(line);
  return said ? said[1] : /warning/i.test(line) ? "warning" : "error";
}

function pathOf(steps, values, x, y, isShown) {
  let path = "", isOpen = false;
  values.forEach((value, at) => {
    if (!isShown(value)) { isOpen = false; return; }
    const alone = !isOpen && !(at + 1 < values.length && isShown(values[at + 1]));
    path += `${isOpen ? "L" : "M"}${x(steps[at]).toFixed(1)} ${y(value).toFixed(1)}${alone ? "h0.01" : ""}`;
    isOpen = true;
  });
  return path;
}

// Return the bounds of an axis, of logarithms if `log`, and the values of its ticks.
function axis(values, log) {
  if (!values.length) return [0, 1, []];
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    const at = log ? Math.log10(value) : value;
    low = Math.min(low, at);
    high = Math.max(high, at);
  }
  if (low === high) {
    const around = log ? 0.5 : Math.abs(low) * 0.1 || 1;
    low -= around;
    high += around;
  }
  if (!log) return [low - (high - low) * 0.04, high + (high - low) * 0.04, niceTicks(low, high, 4)];
  const powers = niceTicks(Math.floor(low), Math.ceil(high), 4).filter(Number.isInteger).map((power) => 10 ** power);
  return [low - 0.05, high + 0.05, powers.filter((value) => Math.log10(value) >= low - 0.05 && Math.log10(value) <= high + 0.05)];
}

function niceTicks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / size - 1e-9); at * size <= high + size * 1e-9; at++) ticks.push(Number((at * size).toPrecision(12)));
  return ticks;
}

function stepAt(chart, event) {
  if (!chart.steps || !chart.steps.length) return null;
  const at = event.clientX - chart.box.getBoundingClientRect().left;
  return chart.steps.reduce((best, step) => Math.abs(chart.x(step) - at) < Math.abs(chart.x(best) - at) ? step : best);
}

const showCursors = soon(() => { for (const chart of charts) if (chart.figure.isConnected) showCursor(chart); });

function moveCursor(step) {
  if (view.cursor === step) return;
  view.cursor = step;
  showCursors();
}

function showCursor(chart) {
  if (!chart.rule) return;
  const step = view.cursor;
  const isIn = step !== null && chart.steps.length && step >= chart.steps[0] && step <= last(chart.steps);
  chart.rule.setAttribute("visibility", isIn ? "visible" : "hidden");
  if (isIn) for (const side of ["x1", "x2"]) chart.rule.setAttribute(side, chart.x(step));
  const cells = chart.shown.map((line) => {
    const at = isIn ? line.steps.findLastIndex((each) => each <= step) : line.steps.length - 1;
    return el("span", { class: "value", title: visible(RUNS[line.at].name) }, RUNS.length > 1 ? swatch(line.at) : "", fmt(at < 0 ? null : line.values[at]));
  });
  chart.values.replaceChildren(...(isIn ? [el("span", { class: "quiet" }, `at ${fmt(step)}`)] : []), ...cells);
}
