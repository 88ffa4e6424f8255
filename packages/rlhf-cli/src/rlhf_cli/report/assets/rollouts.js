"use strict";
// The rollout browser: a list that can be filtered and sorted, and one rollout, or two side by side, with every token.

const ROW_HEIGHT = 30;
const LOWEST = -5;  // nats: log-probs from here down have the strongest colour
const COLOURINGS = [
  ["logprob", "log-prob (engine)"], ["gap", "log-prob gap, trainer − engine"], ["log_ratio", "ratio to the old policy"], ["advantage", "advantage"],
  ["entropy", "entropy"], ["kl", "log-ratio to the reference (KL)"], ["reward", "reward of tokens"], ["version", "policy version"],
  ["source", "who wrote it, and the loss mask"], ["none", "nothing"],
];
// What the trainer computed: short name, unit, and the size from which on a colour is the strongest; null: the largest shown.
const VALUES = {
  gap: ["gap to the engine", "nats", 1], log_ratio: ["ratio", "", Math.log(2)], advantage: ["advantage", "", null],
  entropy: ["entropy", "nats", 3], kl: ["log-ratio to the reference", "nats", 2],
};
const COLUMNS = [
  ["step", "Step"], ["verdict", "Verdict"], ["reward", "Reward"], ["length", "Tokens"], ["gap", "Gap"], ["finish", "End"], ["text", "Response"],
];
const FAILED = new Set(["timeout", "crash"]);
const browser = { items: [], shown: [], byKey: new Map(), byPrompt: new Map(), sort: "step", down: false, key: null, other: null, colour: "logprob" };

PARTS.push({
  name: "rollouts",
  title: "Rollouts",
  count: () => RUNS.reduce((sum, run) => sum + run.files.reduce((all, file) => all + file.num_rollouts, 0), 0),
  draw: drawBrowser,
});

// Take groups of a run into the browser. Those that it has already stay.
function takeGroups(runAt, groups) {
  for (const group of groups) {
    const rewards = group.rollouts.map((rollout) => rollout.reward).filter((reward) => reward !== undefined);
    group.mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
    group.items = [];
    for (const rollout of group.rollouts) {
      const key = [runAt, group.kind, group.step, rollout.id].join("~");
      if (browser.byKey.has(key)) continue;
      const item = { key, runAt, group, rollout };
      browser.byKey.set(key, item);
      browser.items.push(item);
      group.items.push(item);
    }
    if (!group.items.length) continue;
    const prompt = group.prompt_id ?? group.prompt ?? "";
    browser.byPrompt.set(prompt, [...(browser.byPrompt.get(prompt) || []), group]);
  }
}

RUNS.forEach((run, at) => takeGroups(at, run.groups));

const linkTo = (item, other) => "#rollouts/" + encodeURIComponent(item.key) + (other ? "/" + encodeURIComponent(other.key) : "");
const verdictOf = (rollout) => rollout.verdict || "unscored";

function drawBrowser(section) {
  if (!browser.items.length) {
    section.replaceChildren(el("p", { class: "quiet" }, "There are no rollouts here. Online runs record them unless --record is false; ",
      "runs on fixed examples have none."), ...coverage());
    return;
  }
  const list = el("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Rollouts", id: "list" });
  const detail = el("div", { class: "detail", id: "detail" });
  browser.list = list;
  browser.rows = el("div", { class: "rows" });
  browser.detail = detail;
  browser.number = el("span", { class: "quiet", role: "status" });
  const head = el("div", { class: "row head" }, COLUMNS.map(([name, title]) =>
    el("button", { type: "button", class: `c-${name}`, "data-sort": name, onclick: () => sortBy(name) }, title)));
  browser.head = head;
  list.append(browser.rows);
  list.addEventListener("scroll", soon(drawRows));
  list.addEventListener("keydown", listKey);
  list.addEventListener("click", (event) => {
    const row = event.target.closest("[data-at]");
    if (row) open(browser.shown[Number(row.dataset.at)]);
  });
  section.replaceChildren(filters(), ...coverage(), el("div", { class: "browser" }, el("div", { class: "side" }, head, list), detail));
  addEventListener("resize", soon(drawRows));
  const kind = document.getElementById("f-kind");
  if (browser.items.some((item) => item.group.kind === "training")) kind.value = "training";
  const named = browser.byKey.get(browser.key);
  if (named) kind.value = named.group.kind;
  applyFilters();
  if (named) browser.list.scrollTop = Math.max(0, browser.shown.indexOf(named) - 3) * ROW_HEIGHT;
  if (named) drawDetail();
  else open(browser.shown[0] || browser.items[0], true);
}

// Say which rollouts the page has, where it does not have all.
function coverage() {
  const notes = [];
  RUNS.forEach((run, at) => run.files.forEach((file) => {
    const held = browser.items.filter((item) => item.runAt === at && item.group.kind === file.kind).length;
    const parts = [];
    if (held < file.num_rollouts) parts.push(`the page has ${held.toLocaleString("en-US")} of ${count(file.num_rollouts, "rollout")}, in whole groups spread evenly over all steps`);
    if (file.num_damaged) parts.push(`${count(file.num_damaged, "line")} are damaged and left out`);
    if (file.is_cut) parts.push("the file ends within a record: it is being written, or was cut off or damaged");
    if (parts.length) notes.push(el("p", { class: "note" }, RUNS.length > 1 ? swatch(at) : "", `${visible(run.name)}, ${file.name}: ${parts.join("; ")}.`));
  }));
  return notes;
}

function filters() {
  const choice = (id, title, values, names) => el("label", {}, title + " ", el("select", { id, onchange: applyFilters },
    el("option", { value: "" }, "all"), values.map((value, at) => el("option", { value }, names ? names[at] : visible(value)))));
  const number = (id, title) => el("input", { id, type: "number", step: "any", placeholder: title, "aria-label": title, oninput: soon(applyFilters) });
  const distinct = (of) => [...new Set(browser.items.map(of))].sort();
  const runs = RUNS.map((_, at) => at);
  return el("div", { class: "bar", id: "filters" },
    el("input", { id: "f-text", type: "search", placeholder: "Search prompts and responses  ( / )", "aria-label": "Search prompts and responses", oninput: soon(applyFilters) }),
    RUNS.length > 1 ? choice("f-run", "Run", runs, RUNS.map((run) => visible(run.name))) : "",
    choice("f-kind", "Kind", distinct((item) => item.group.kind)),
    choice("f-verdict", "Verdict", distinct((item) => verdictOf(item.rollout))),
    choice("f-finish", "End", distinct((item) => item.rollout.finish)),
    el("span", { class: "range" }, "Step ", number("f-step0", "from"), number("f-step1", "to")),
    el("span", { class: "range" }, "Reward ", number("f-reward0", "from"), number("f-reward1", "to")),
    el("span", { class: "range" }, "Tokens ", number("f-length0", "from"), number("f-length1", "to")),
    el("span", { class: "range", title: "mean size of the gap between the log-probs of trainer and engine, nats" }, "Gap ", number("f-gap0", "from"), number("f-gap1", "to")),
    browser.number, DATA.served ? el("button", { type: "button", id: "all", onclick: searchAll }, "Search all recorded rollouts") : "");
}

// Have the server look for rollouts like the filters say in the files of all runs, also in those that the page lacks.
async function searchAll() {
  const wanted = readFilters();
  const finite = (value) => Number.isFinite(value) ? String(value) : "";
  const button = document.getElementById("all");
  button.disabled = true;
  let found = 0;
  try {
    for (let at = 0; at < RUNS.length; at++) {
      if (wanted.run && Number(wanted.run) !== at) continue;
      const query = new URLSearchParams({
        run: at, text: wanted.text, verdicts: wanted.verdict, finish_reasons: wanted.finish, ...(wanted.kind ? { kind: wanted.kind } : {}),
        first_step: finite(wanted.step[0]), last_step: finite(wanted.step[1]), min_reward: finite(wanted.reward[0]), max_reward: finite(wanted.reward[1]),
        min_tokens: finite(wanted.length[0]), max_tokens: finite(wanted.length[1]),
        min_gap: finite(wanted.gap[0]), max_gap: finite(wanted.gap[1]),
      });
      const answer = await ask("rollouts?" + query);
      Object.assign(RUNS[at].vocabulary, answer.vocabulary);
      takeGroups(at, answer.groups);
      found += answer.num_found;
    }
    applyFilters();
    browser.number.textContent += `; ${found.toLocaleString("en-US")} found in all files`;
  } catch (error) {
    browser.number.textContent = visible(error.message);
  }
  button.disabled = false;
}

function readFilters() {
  const value = (id) => document.getElementById(id)?.value ?? "";
  const bound = (id, otherwise) => value(id) === "" ? otherwise : Number(value(id));
  const range = (name) => [bound(`f-${name}0`, -Infinity), bound(`f-${name}1`, Infinity)];
  return {
    text: value("f-text").toLowerCase(), run: value("f-run"), kind: value("f-kind"), verdict: value("f-verdict"), finish: value("f-finish"),
    step: range("step"), reward: range("reward"), length: range("length"), gap: range("gap"),
  };
}

function isWanted(item, wanted) {
  const { group, rollout } = item;
  const within = (value, [low, high]) => (low === -Infinity && high === Infinity) || (value !== undefined && value >= low && value <= high);
  return (!wanted.run || item.runAt === Number(wanted.run)) && (!wanted.kind || group.kind === wanted.kind)
    && (!wanted.verdict || verdictOf(rollout) === wanted.verdict) && (!wanted.finish || rollout.finish === wanted.finish)
    && within(group.step, wanted.step) && within(rollout.reward, wanted.reward) && within(rollout.length, wanted.length) && within(rollout.gap, wanted.gap)
    && (!wanted.text || [rollout.text, group.prompt, group.label].some((text) => (text ?? "").toLowerCase().includes(wanted.text)));
}

const SORT_VALUES = {
  step: (item) => item.group.step, verdict: (item) => verdictOf(item.rollout), reward: (item) => item.rollout.reward,
  length: (item) => item.rollout.length, gap: (item) => item.rollout.gap, finish: (item) => item.rollout.finish, text: (item) => item.rollout.text,
};

function applyFilters() {
  const wanted = readFilters();
  const of = SORT_VALUES[browser.sort];
  const way = browser.down ? -1 : 1;
  const compare = (a, b) => {
    const [one, other] = [of(a), of(b)];
    if (one === other) return 0;
    if (one === undefined || other === undefined) return one === undefined ? 1 : -1;
    return one < other ? -way : way;
  };
  browser.shown = browser.items.filter((item) => isWanted(item, wanted)).sort(compare);
  browser.number.textContent = `${browser.shown.length.toLocaleString("en-US")} of ${count(browser.items.length, "rollout")}`;
  browser.rows.style.height = `${browser.shown.length * ROW_HEIGHT}px`;
  for (const button of browser.head.children) {
    const way = button.dataset.sort === browser.sort ? (browser.down ? "descending" : "ascending") : "none";
    button.setAttribute("aria-sort", way);
  }
  drawRows();
}

function sortBy(name) {
  browser.down = browser.sort === name ? !browser.down : ["reward", "length", "gap"].includes(name);
  browser.sort = name;
  browser.list.scrollTop = 0;
  applyFilters();
}

// Draw the rows that can be seen, and a few around them.
function drawRows() {
  if (!browser.list || !browser.list.clientHeight) return;
  const first = Math.max(0, Math.floor(browser.list.scrollTop / ROW_HEIGHT) - 5);
  const end = Math.min(browser.shown.length, first + Math.ceil(browser.list.clientHeight / ROW_HEIGHT) + 10);
  const rows = [];
  for (let at = first; at < end; at++) rows.push(rowOf(browser.shown[at], at));
  browser.rows.replaceChildren(...rows);
}

function rowOf(item, at) {
  const { group, rollout } = item;
  const isOpen = item.key === browser.key || item.key === browser.other;
  return el("div", { class: "row", role: "option", "data-at": at, "aria-selected": String(isOpen), css: { top: `${at * ROW_HEIGHT}px` } },
    el("span", { class: "c-step" }, RUNS.length > 1 ? swatch(item.runAt) : "", fmt(group.step), group.kind === "training" ? "" : el("i", { title: "held-out" }, "h")),
    el("span", { class: "c-verdict" }, verdictMark(rollout)), el("span", { class: "c-reward" }, fmt(rollout.reward)),
    el("span", { class: "c-length" }, fmt(rollout.length)), el("span", { class: "c-gap" }, fmt(rollout.gap)), el("span", { class: "c-finish" }, visible(rollout.finish)),
    el("span", { class: "c-text" }, visible(rollout.text.slice(0, 160).replace(/\s+/g, " "))));
}

function verdictMark(rollout) {
  const verdict = verdictOf(rollout);
  const kind = verdict === "ok" ? "ok" : FAILED.has(verdict) ? "failed" : verdict === "unscored" || verdict === "abstained" ? "none" : "wrong";
  return el("span", { class: `verdict ${kind}` }, visible(verdict));
}

function listKey(event) {
  const at = browser.shown.findIndex((item) => item.key === browser.key);
  const page = Math.max(1, Math.floor(browser.list.clientHeight / ROW_HEIGHT) - 1);
  const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  const way = moves[event.key];
  if (way === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  const next = Math.min(browser.shown.length - 1, Math.max(0, at + way));
  if (browser.shown[next]) open(browser.shown[next]);
  const top = next * ROW_HEIGHT, box = browser.list;
  if (top < box.scrollTop) box.scrollTop = top;
  if (top + ROW_HEIGHT > box.scrollTop + box.clientHeight) box.scrollTop = top + ROW_HEIGHT - box.clientHeight;
}

// Show a rollout, and keep its address in that of the page. `quietly` leaves the address as it is.
function open(item, quietly) {
  if (!item) return;
  const other = browser.other && browser.byKey.get(browser.other);
  browser.key = item.key;
  if (!quietly) history.replaceState(null, "", linkTo(item, other));
  drawRows();
  drawDetail();
}

// Show what an address names; return whether the page has it.
function openKeys(key, otherKey) {
  const item = browser.byKey.get(key);
  browser.other = otherKey && browser.byKey.has(otherKey) ? otherKey : null;
  if (item) open(item, true);
  return Boolean(item);
}

function drawDetail() {
  const item = browser.byKey.get(browser.key);
  if (!browser.detail || !item) return;
  const other = browser.other ? browser.byKey.get(browser.other) : null;
  const shared = other && other.group === item.group;
  const columns = other && other !== item ? [other, item] : [item];
  if (browser.colour in VALUES) browser.most = mostOf(browser.colour, columns);
  browser.detail.replaceChildren(
    shared || !other ? promptOf(item) : "",
    colourBar(columns),
    el("div", { class: columns.length > 1 ? "pair" : "" }, columns.map((each) => el("article", {},
      columns.length > 1 && !shared ? promptOf(each) : "", membersOf(each), factsOf(each), imagesOf(each.rollout.images), tokensOf(each)))),
    el("p", { class: "reading", id: "reading", role: "status" }, "Point at a token, or select the tokens and use the arrow keys, to read values."));
}

function imagesOf(images) {
  return (images ?? []).map(({ path, src }) => el("img", { src, alt: visible(path), title: visible(path) }));
}

function promptOf(item) {
  const { group } = item;
  const prompt = group.prompt ?? "";
  const same = (browser.byPrompt.get(group.prompt_id ?? prompt) || []).filter((each) => each !== group);
  const body = el("pre", { class: "text" }, visible(prompt));
  return el("section", { class: "prompt" },
    el("h2", {}, RUNS.length > 1 ? [swatch(item.runAt), visible(RUNS[item.runAt].name), ", "] : "", `${group.kind}, step ${fmt(group.step)}`,
      el("span", { class: "quiet" }, [` ${visible(group.id)}`, group.kept === false ? ", not trained" : ""].join(""))),
    prompt.length > 1200 ? el("details", {}, el("summary", {}, `Prompt, ${count(prompt.length, "character")}`), body) : body,
    imagesOf(group.images),
    el("p", { class: "quiet" }, group.label === undefined ? "" : ["Label ", el("b", { class: "text" }, visible(group.label).slice(-300)), " · "],
      "Prompt ", visible(group.prompt_id ?? "without id"), group.source ? ` of ${visible(group.source)}` : ""),
    same.length ? el("label", { class: "same" }, `The same prompt elsewhere (${same.length}) `, el("select", {
      onchange: (event) => { browser.other = item.key; open(same[Number(event.target.value)].items[0]); },
    }, el("option", {}, "compare with …"), same.slice(0, 500).map((each, at) => el("option", { value: at },
      `${RUNS.length > 1 ? visible(RUNS[each.items[0].runAt].name) + ", " : ""}${each.kind}, step ${each.step}, mean reward ${fmt(each.mean)}`)))) : "");
}

function membersOf(item) {
  const { group } = item;
  return el("div", { class: "members", role: "group", "aria-label": "Rollouts of the group" },
    el("span", { class: "quiet" }, `Group of ${group.items.length}, mean reward ${fmt(group.mean)}`),
    group.items.map((each, at) => el("button", {
      type: "button", "aria-pressed": String(each === item), class: `member ${verdictMark(each.rollout).className}`,
      title: `${verdictOf(each.rollout)}, ${each.rollout.length} tokens`,
      onclick: () => { if (browser.other === item.key) browser.other = each.key; else browser.key = each.key; open(browser.byKey.get(browser.key)); },
    }, `${at + 1}: ${fmt(each.rollout.reward)}`)));
}

function factsOf(item) {
  const { group, rollout } = item;
  const versions = [...new Set(rollout.spans.filter((span) => span[0] === "policy").map((span) => span[2]))];
  const list = (values) => values.map((value) => fmt(value)).join(", ");
  const facts = [
    ["Verdict", verdictMark(rollout)], ["Reward", fmt(rollout.reward)],
    ["Above the group's mean", rollout.reward === undefined || group.mean === null ? null : fmt(Number((rollout.reward - group.mean).toPrecision(6)))],
    ["Score", rollout.score === rollout.reward ? null : fmt(rollout.score)],
    ["Length", count(rollout.length, "token")], ["Mean gap to the engine", rollout.gap === undefined ? null : `${fmt(rollout.gap)} nats`], ["Ended by", visible(rollout.finish)],
    ["Policy version", versions.length > 1 ? `${versions[0]} to ${last(versions)}` : fmt(versions[0])],
    ["Reward by source", rollout.source_rewards && list(rollout.source_rewards)], ["Reward by turn", rollout.turn_rewards && list(rollout.turn_rewards)],
    ...Object.entries(rollout.extra || {}).map(([name, value]) => [visible(name), fmt(value)]),
    ["Detail", rollout.detail && visible(rollout.detail)], ["Id", visible(rollout.id)],
  ];
  const isPinned = browser.other === item.key;
  return el("div", { class: "facts" },
    facts.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) =>
      el("span", {}, el("small", {}, name), el("span", { class: "text" }, value))),
    el("span", { class: "actions" },
      el("a", { href: linkTo(item), title: "the address of this rollout" }, "Link"),
      el("button", { type: "button", "aria-pressed": String(isPinned), onclick: () => {
        browser.other = isPinned ? null : item.key;
        open(item);
      } }, isPinned ? "Stop comparing" : "Keep, and compare")));
}

function colourBar(items) {
  const lacks = (name) => name in VALUES && !items.some((item) => valuesOf(item.rollout)[name]);
  const select = el("select", { id: "colour", onchange: (event) => { browser.colour = event.target.value; drawDetail(); } },
    COLOURINGS.map(([name, title]) => el("option", { value: name, selected: name === browser.colour, disabled: lacks(name) }, title)));
  const missing = Object.keys(VALUES).filter(lacks).map((name) => VALUES[name][0]);
  return el("div", { class: "bar colours" }, el("label", {}, "Tokens coloured by ", select), legendOf(items),
    missing.length ? el("small", {}, `Not recorded for these tokens: ${missing.join(", ")}.`) : "");
}

// Return what the trainer computed for the policy's tokens of a rollout: columns of numbers by name.
function valuesOf(rollout) {
  rollout.columns ??= Object.fromEntries(Object.entries(rollout.values || {}).map(([name, packed]) =>
    [name, typeof packed === "number" ? Array(rollout.length).fill(packed) : halves(packed)]));
  return rollout.columns;
}

// Return the numbers of a text in Base64, which are float16, little-endian.
function halves(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  return Array.from({ length: bytes.length / 2 }, (_, at) => {
    const bits = view.getUint16(2 * at, true), exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent === 31) return fraction ? NaN : bits >> 15 ? -Infinity : Infinity;
    return (bits >> 15 ? -1 : 1) * (exponent ? (1024 + fraction) * 2 ** (exponent - 25) : fraction * 2 ** -24);
  });
}

// Return the size of a value from which on its colour is the strongest.
function mostOf(name, items) {
  const sizes = () => items.flatMap((item) => valuesOf(item.rollout)[name] || []).filter(Number.isFinite).map(Math.abs);
  return VALUES[name][2] ?? (sizes().reduce((most, size) => Math.max(most, size), 0) || 1);
}

const shownValue = (name, value) => Number.isNaN(value) ? "none, left out of the loss" : fmt(name === "log_ratio" ? Math.exp(value) : value);

function legendOf(items) {
  const box = (css, text) => el("span", { class: "key" }, el("i", { css: { background: css } }), text);
  if (browser.colour === "logprob") return el("span", { class: "legend" }, [0, -1, -2, -3, -4, -5].map((value) => box(heat(value / LOWEST), value === LOWEST ? `≤ ${value}` : `${value}`)), "nats");
  if (browser.colour === "version") {
    const versions = new Set(items.flatMap((item) => item.rollout.spans.filter((span) => span[0] === "policy").map((span) => span[2])));
    return el("span", { class: "legend" }, [...versions].map((version) => box(versionColour(version), `version ${version}`)));
  }
  if (browser.colour in VALUES) {
    const shares = browser.colour === "entropy" ? [0, 0.25, 0.5, 0.75, 1] : [-1, -0.5, 0, 0.5, 1];
    const sign = (share) => VALUES[browser.colour][2] === null || Math.abs(share) < 1 ? "" : share < 0 ? "≤ " : "≥ ";
    return el("span", { class: "legend" }, shares.map((share) => box(signed(share), sign(share) + shownValue(browser.colour, share * browser.most))), VALUES[browser.colour][1]);
  }
  if (browser.colour === "source") return el("span", { class: "legend" }, box("var(--policy)", "policy: trained"), box("var(--bad-soft)", "policy: left out of the loss"), box("var(--environment)", "environment: not trained"), box("var(--prompt)", "prompt"));
  if (browser.colour === "reward") {
    const any = items.some((item) => item.rollout.token_rewards);
    return el("span", { class: "legend" }, any ? [box("var(--bad-soft)", "below 0"), box("var(--good-soft)", "above 0")] : "these rollouts have no rewards of single tokens");
  }
  return "";
}

const heat = (share) => share > 0.004 ? `color-mix(in oklab, var(--heat) ${Math.round(100 * Math.min(1, share))}%, transparent)` : "transparent";
const signed = (share) => share < 0 ? heat(-share).replace("--heat", "--run-0") : heat(share);
const versionColour = (version) => `color-mix(in oklab, var(--run-${version % 6}) 30%, transparent)`;

function tokensOf(item) {
  const { group, rollout } = item;
  const vocabulary = RUNS[item.runAt].vocabulary;
  const rewards = new Map(rollout.token_rewards || []);
  const blocks = [];
  const columns = Object.entries(valuesOf(rollout));
  let at = 0, turn = 0, block = null, before = null, number = -1;  // the last: of the policy's tokens
  for (const [source, size, version] of rollout.spans) {
    if (at >= rollout.shared) {
      if (source !== before || !block) {
        if (source === "policy") turn += 1;
        block = el("div", { class: `tokens ${source}` });
        blocks.push(el("div", { class: "turn" }, el("small", {}, source === "policy" ? `policy, turn ${turn}` : source), block));
      }
      for (let place = at; place < at + size; place++) block.append(tokenOf(place, source, version));
    }
    before = source;
    at += size;
  }
  function tokenOf(place, source, version) {
    const id = rollout.tokens[place - rollout.shared], logprob = rollout.logprobs[place - rollout.shared];
    const text = id in vocabulary ? vocabulary[id] : `⟨${id}⟩`;
    const isOwn = source === "policy";
    if (isOwn) number += 1;
    const own = isOwn ? Object.fromEntries(columns.map(([name, column]) => [name, column[number]])) : {};
    const values = [`token ${id}`, JSON.stringify(visible(text)), `place ${place}`, source];
    if (isOwn) values.push(`log-prob ${logprob === null ? "not finite" : fmt(logprob)}`, `probability ${logprob === null ? "–" : fmt(Math.exp(logprob))}`, `version ${version}`);
    if (rewards.has(place)) values.push(`reward ${fmt(rewards.get(place))}`);
    for (const [name, value] of Object.entries(own)) values.push(`${VALUES[name][0]} ${shownValue(name, value)}`);
    const token = el("span", { class: "t", css: { background: colourOf(isOwn, source, logprob, version, rewards.get(place), own) } }, shownToken(text));
    token.values = values.join(" · ");
    return token;
  }
  blocks.forEach(markCalls);
  const read = (token) => { document.getElementById("reading").textContent = token.values; };
  const box = el("div", { class: "response", tabindex: 0, role: "group", "aria-label": "Tokens: the arrow keys read their values" }, blocks);
  box.addEventListener("pointerover", (event) => { if (event.target.values) read(event.target); });
  walk(box, ".t", read);
  const plain = el("details", {}, el("summary", {}, "As plain text"), el("pre", { class: "text" }, visible(rollout.text)));
  return [box, plain];
}

// Calls of tools, as the agents of this project read them; see agents/tools/tool_calls.py.
const CALLS = /<tool_call>[^]*?(?:<\/tool_call>|$)|(?:<\|python_tag\|>|\[TOOL_CALLS\])[^]*/g;

// Underline the tokens of a policy's turn that call a tool.
function markCalls(turn) {
  const [title, block] = turn.children;
  if (!block.classList.contains("policy")) return;
  let text = "";
  const tokens = [...block.children], ends = tokens.map((token) => (text += token.textContent).length);
  const calls = [...text.matchAll(CALLS)];
  for (const call of calls) tokens.forEach((token, at) =>
    token.classList.toggle("call", token.classList.contains("call") || (ends[at] > call.index && (ends[at - 1] ?? 0) < call.index + call[0].length)));
  if (calls.length) title.append(`, ${count(calls.length, "tool call")}`);
}

const shownToken = (text) => visible(text).replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t");

function colourOf(isOwn, source, logprob, version, reward, own) {
  if (browser.colour === "source" && Number.isNaN(own.log_ratio)) return "var(--bad-soft)";
  if (browser.colour === "source") return `var(--${source === "policy" || source === "prompt" ? source : "environment"})`;
  if (browser.colour === "reward") return reward ? (reward > 0 ? "var(--good-soft)" : "var(--bad-soft)") : "transparent";
  if (!isOwn || browser.colour === "none") return "transparent";
  if (browser.colour === "version") return versionColour(version);
  if (browser.colour in VALUES) return Number.isFinite(own[browser.colour]) ? signed(own[browser.colour] / browser.most) : "transparent";
  return logprob === null ? "var(--bad-soft)" : heat(logprob / LOWEST);
}
