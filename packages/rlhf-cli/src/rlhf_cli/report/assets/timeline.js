"use strict";
// The picture of what processes did and waited for: a row per track, of the whole run or of one of its steps.

if (RUNS.some((run) => run.timeline)) PARTS.push({ name: "timeline", title: "Timeline", draw: drawTimeline });

const ROW = 15, NAMED = 190;

function drawTimeline(section) {
  const draws = [];
  section.replaceChildren(...RUNS.filter((run) => run.timeline).map((run) => {
    const { tracks, words, bars, left_out: leftOut, file } = run.timeline;
    const end = Math.max(1, ...bars.map((bar) => bar[1] + bar[2]));
    const steps = bars.filter(([track]) => tracks[track].join() === "controller,steps").sort((one, other) => one[1] - other[1]);
    const holder = el("div", { class: "plot" });
    const shown = el("p", { class: "quiet", "aria-live": "polite" }, "Point at a bar, or select the picture and use the arrow keys.");
    const pick = el("select", { "aria-label": "Part of the run", onchange: draw }, el("option", { value: "" }, "whole run"),
      steps.map((step, at) => el("option", { value: at }, words[step[3]])));
    function draw() {
      const [from, to] = pick.value === "" ? [0, end] : [steps[pick.value][1], steps[pick.value][1] + Math.max(steps[pick.value][2], 1)];
      const width = Math.max(holder.clientWidth || section.clientWidth, 300), scale = (width - NAMED) / (to - from);
      const seen = bars.filter((bar) => bar[1] < to && bar[1] + bar[2] > from && bar[2] * scale >= 0.3);
      const depths = tracks.map((_, track) => seen.reduce((most, bar) => bar[0] === track ? Math.max(most, bar[5] + 1) : most, 0));
      const tops = depths.map((_, at) => depths.slice(0, at).reduce((sum, depth) => sum + (depth ? depth * ROW + 5 : 0), 20));
      const height = 24 + depths.reduce((sum, depth) => sum + (depth ? depth * ROW + 5 : 0), 0);
      const seconds = (micros) => `${fmt(micros / 1e6)} s`;
      holder.replaceChildren(svg("svg", { width, height, role: "img", tabindex: 0, "aria-label": `Timeline of ${visible(run.name)}` },
        [0, 0.25, 0.5, 0.75].map((part) => [svg("line", { class: "tick", x1: NAMED + part * (width - NAMED), x2: NAMED + part * (width - NAMED), y1: 14, y2: height }),
          svg("text", { x: NAMED + part * (width - NAMED) + 3, y: 11 }, seconds(from + part * (to - from)))]),
        tracks.map(([process, thread], at) => depths[at] ? svg("text", { x: 0, y: tops[at] + 11 }, clipped(`${process} · ${thread}`, 32), svg("title", {}, visible(`${process}, ${thread}`))) : ""),
        seen.map(([track, begin, micros, name, text, depth]) => {
          const left = Math.max(begin, from), wide = Math.max((Math.min(begin + micros, to) - left) * scale, 0.5);
          const said = visible([words[name], seconds(micros), words[text]].filter(Boolean).join(", "));
          return svg("g", { onpointerenter: () => { shown.textContent = said; } },
            svg("rect", { x: NAMED + (left - from) * scale, y: tops[track] + depth * ROW, width: wide, height: ROW - 2, rx: 2, css: { fill: words[name] === "wait" ? "var(--hover)" : colorOf(hue(words[name])) } }),
            wide > 40 ? svg("text", { class: words[name] === "wait" ? "" : "in", x: NAMED + (left - from) * scale + 3, y: tops[track] + depth * ROW + 10 }, clipped(words[name], Math.floor(wide / 6.5))) : "",
            svg("title", {}, said));
        })));
      walk(holder.firstChild, "g", (bar) => { shown.textContent = bar.querySelector("title").textContent; });
    }
    draws.push(draw);
    return el("article", {}, el("h2", {}, RUNS.length > 1 ? swatch(RUNS.indexOf(run)) : "", visible(run.folder)),
      el("div", { class: "bar" }, pick, el("span", { class: "quiet" }, `${visible(file)}: Perfetto (ui.perfetto.dev) shows all of it, and each prompt.`,
        leftOut ? ` The ${count(leftOut, "shortest bar")} ${leftOut === 1 ? "is" : "are"} not here.` : "")), holder, shown);
  }));
  const drawAll = () => draws.forEach((draw) => draw());
  drawAll();
  new ResizeObserver(soon(drawAll)).observe(section);
}

const clipped = (text, size) => visible(text.length > size ? `${text.slice(0, Math.max(size - 1, 1))}…` : text);

// The same colour for the same kind of work in all rows: numbers in a name do not count.
function hue(name) {
  return [...name.replace(/\d+/g, "")].reduce((sum, letter) => (sum * 31 + letter.codePointAt(0)) % 997, 7);
}
