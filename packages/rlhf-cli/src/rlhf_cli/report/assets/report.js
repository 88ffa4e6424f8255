"use strict";
// The other parts of the page: warnings, configuration and log; and which part is shown, which the address names.

PARTS.push({ name: "warnings", title: "Warnings", count: () => RUNS.reduce((sum, run) => sum + run.findings.length, 0), draw: drawWarnings });
PARTS.push({ name: "config", title: "Configuration", draw: drawConfig });
PARTS.push({ name: "log", title: "Log", count: () => RUNS.reduce((sum, run) => sum + run.num_log_lines, 0), draw: drawLog });

const LOOKED_AT = "held-out result against reward, held-out loss, values that are not finite, length, entropy, cut-off responses, the gap between "
  + "engine and trainer, clipping, KL, failed rewards, groups of equal rewards, repeated answers, and template markers in answers";

function drawWarnings(section) {
  const cards = RUNS.flatMap((run, at) => run.findings.map((finding) => warningCard(run, at, finding)));
  section.replaceChildren(...(cards.length ? cards : [el("p", { class: "strip good" }, "Nothing in these runs needs a look.")]),
    el("p", { class: "quiet" }, `What is looked at: ${LOOKED_AT}. A warning compares the last quarter of a curve with the first one. It is a reason to read rollouts, not a verdict.`));
}

function warningCard(run, at, finding) {
  const rollouts = finding.rollouts.map((id) => browser.items.find((item) => item.runAt === at && item.rollout.id === id && item.group.kind === "training")).filter(Boolean);
  return el("article", { class: "card" },
    el("h2", {}, RUNS.length > 1 ? [swatch(at), visible(run.name), ": "] : "", finding.title),
    el("p", {}, finding.text),
    el("p", { class: "quiet" },
      finding.steps ? `Steps ${fmt(finding.steps[0])} to ${fmt(finding.steps[1])}. ` : "",
      finding.metrics.length ? ["Curves: ", finding.metrics.filter((name) => run.curves[name]).map((name) => el("button", { type: "button", class: "link", onclick: () => enlarge(name) }, name))] : "",
      rollouts.length ? [" Rollouts: ", rollouts.map((item) => el("a", { href: linkTo(item) }, visible(item.rollout.id)))] : ""));
}

function drawConfig(section) {
  const rows = new Map();
  RUNS.forEach((run, at) => run.config.forEach(([part, name, value, origin]) => {
    const key = `${part}.${name}`;
    if (!rows.has(key)) rows.set(key, { part, name, cells: RUNS.map(() => null) });
    rows.get(key).cells[at] = { value, origin };
  }));
  const only = el("select", { "aria-label": "Which options", onchange: draw },
    RUNS.length > 1 ? el("option", { value: "differs" }, "options that differ") : "",
    el("option", { value: "set" }, "options that are not at their default"), el("option", { value: "all" }, "all options"));
  const find = el("input", { type: "search", placeholder: "Find an option", "aria-label": "Find an option", oninput: draw });
  const holder = el("div", { class: "scroll" });
  function draw() {
    const wanted = [...rows.values()].filter((row) => row.name.includes(find.value.toLowerCase()) && (only.value === "all"
      || (only.value === "set" ? row.cells.some((cell) => cell && cell.origin !== "default") : differs(row))));
    const head = el("tr", {}, el("th", {}, "Section"), el("th", {}, "Option"), RUNS.map((run, at) => el("th", {}, RUNS.length > 1 ? swatch(at) : "", visible(run.name))));
    holder.replaceChildren(wanted.length ? el("table", { class: "config" }, el("thead", {}, head), el("tbody", {}, wanted.map((row) => configRow(row, only.value !== "set"))))
      : el("p", { class: "quiet" }, "No options are like this."));
  }
  section.replaceChildren(el("div", { class: "bar" }, only, find), holder,
    el("p", { class: "quiet" }, "An empty cell stands for an option that is not in the run's config.toml: it is at its default, or the command does not have it."),
    ...[environments()].flat());
  draw();
}

// Return a table of versions and hardware, as the logs of the runs have them.
function environments() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.environment)))];
  if (!names.length) return el("p", { class: "quiet" }, "The log of the run does not say versions and hardware.");
  const rows = names.map((name) => {
    const values = RUNS.map((run) => run.environment[name] ?? "");
    return el("tr", { class: new Set(values).size > 1 ? "differs" : "" }, el("th", { scope: "row" }, visible(name)), values.map((value) => el("td", { class: "text" }, visible(value))));
  });
  return [el("h2", {}, "Versions and hardware"), el("div", { class: "scroll" }, el("table", { id: "environment" }, el("tbody", {}, rows)))];
}

const differs = (row) => new Set(row.cells.map((cell) => JSON.stringify(cell && cell.value))).size > 1;

function configRow(row, showsAll) {
  return el("tr", { class: RUNS.length > 1 && differs(row) ? "differs" : "" }, el("td", { class: "quiet" }, visible(row.part)), el("th", { scope: "row" }, visible(row.name)),
    row.cells.map((cell) => el("td", {}, cell ? [el("code", { class: "text" }, visible(typeof cell.value === "string" ? cell.value : JSON.stringify(cell.value))),
      cell.origin && showsAll ? el("span", { class: `origin ${cell.origin}` }, cell.origin) : ""] : "")));
}

function drawLog(section) {
  section.replaceChildren(...RUNS.map((run, at) => el("article", {},
    el("h2", {}, RUNS.length > 1 ? swatch(at) : "", visible(run.folder)),
    run.num_damaged ? el("p", { class: "note" }, `${count(run.num_damaged, "line")} of metrics.jsonl are damaged and left out.`) : "",
    el("p", { class: "quiet" }, run.num_log_lines ? `Notices, warnings and errors in log.txt: ${run.num_log_lines}${run.num_log_lines > run.log.length ? `, the last ${run.log.length}` : ""}. Each has the step that had ended before; the curves show them there.` : "log.txt has no notice, warning or error."),
    run.log.length ? el("pre", { class: "text log" }, run.log.map(([step, line]) => `${step}: ${visible(line)}`).join("\n")) : "")));
}

// Following runs, where a server answers

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

async function followRuns() {
  try {
    const news = await ask("news");
    const names = () => RUNS.map((run) => Object.keys(run.curves).join()).join();
    const before = names();
    news.runs.forEach((run, at) => Object.assign(RUNS[at], run));
    drawTop();
    for (const name of ["warnings", "log"]) drawn.delete(name);
    if (names() !== before) drawn.delete("curves");
    redraw();
    show(location.hash.slice(1).split("/")[0]);
    document.body.classList.remove("lost");
  } catch (error) {
    document.body.classList.add("lost");  // the server has ended; the page stays as it is
  }
  setTimeout(followRuns, 5000);
}

// Which part of the page is shown

const drawn = new Set();

function show(name) {
  const part = PARTS.find((each) => each.name === name) || PARTS[0];
  for (const each of PARTS) document.getElementById(`part-${each.name}`).hidden = each !== part;
  const tabs = document.getElementById("tabs");
  for (const tab of tabs.children) tab.setAttribute("aria-selected", String(tab.dataset.part === part.name));
  const [box, tab] = [tabs, tabs.querySelector("[aria-selected=true]")].map((each) => each.getBoundingClientRect());
  tabs.scrollLeft += Math.min(tab.left - box.left, 0) + Math.max(tab.right - box.right, 0);
  if (!drawn.has(part.name)) {
    drawn.add(part.name);
    part.draw(document.getElementById(`part-${part.name}`));
  }
  if (part.name === "curves") redraw();
  if (part.name === "rollouts") drawRows();
}

function follow() {
  const [name, ...keys] = location.hash.slice(1).split("/").map(decodeURIComponent);
  if (name === "rollouts" && keys[0]) openKeys(keys[0], keys[1]);
  show(name);
}

function drawTop() {
  document.title = `rlhf report: ${RUNS.map((run) => visible(run.name)).join(", ")}`;
  document.getElementById("runs").replaceChildren(...RUNS.map((run, at) => {
    const text = [swatch(at), el("b", {}, visible(run.name)), el("span", { class: "quiet" }, ` ${run.command || "run"}, ${run.last_step} ${run.command === "ppo" ? "steps" : "updates"}`)];
    if (RUNS.length < 2) return el("span", { class: "run", title: visible(run.folder) }, text);
    return el("button", { type: "button", class: "run", title: `${visible(run.folder)}: show or hide its curves`, "aria-pressed": "true", onclick: (event) => {
      if (!view.hidden.delete(at)) view.hidden.add(at);
      event.currentTarget.setAttribute("aria-pressed", String(!view.hidden.has(at)));
      redraw();
    } }, text);
  }));
  document.getElementById("tabs").replaceChildren(...PARTS.map((part) => {
    const number = part.count ? part.count() : 0;
    return el("a", { role: "tab", href: `#${part.name}`, "data-part": part.name }, part.title, number ? el("span", { class: "number" }, number.toLocaleString("en-US")) : "");
  }));
}

addEventListener("hashchange", follow);
addEventListener("keydown", (event) => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  const box = document.querySelector("main > section:not([hidden]) input[type=search]");
  if (box) { event.preventDefault(); box.focus(); }
});
drawTop();
follow();
if (DATA.served) setTimeout(followRuns, 5000);
