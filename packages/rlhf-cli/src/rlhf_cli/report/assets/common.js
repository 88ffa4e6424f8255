"use strict";
// What all parts of the page use. Text of models and files reaches the page only as text nodes and attributes.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const PARTS = [];  // of the page: {name, title, count, draw}

// Return an element. Properties that begin with "on" are listeners; `class`, `style` and others are attributes.
function el(tag, properties, ...children) {
  return fill(document.createElement(tag), properties, children);
}

function svg(tag, properties, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Characters that a browser obeys instead of showing them: controls, marks of direction, what has no width, and halves
// of pairs. Line breaks and tabs stay.
const OBEYED = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu;

function visible(text) {
  return String(text).replace(OBEYED, (found) => {
    const code = found.codePointAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

// Return a number as people read it: four digits, and powers of ten only for very large and small ones.
function fmt(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return visible(value);
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return String(Number(value.toPrecision(4)));
}

const count = (number, noun) => `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
const colorOf = (run) => `var(--run-${run % 6})`;
const last = (list) => list[list.length - 1];

function swatch(run) {
  return el("span", { class: "swatch", css: { background: colorOf(run) }, "aria-hidden": "true" });
}

// Call `action` at most once per frame of the screen.
function soon(action) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; action(); });
  };
}

// Let the keys ← and →, Home and End go through the parts of a box that can be selected, and `read` the one they reach.
function walk(box, selector, read) {
  let at = -1;
  box.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    const parts = [...box.querySelectorAll(selector)];
    if (way === undefined || !parts.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    parts[at]?.classList.remove("at");
    at = Math.min(parts.length - 1, Math.max(0, at + way));
    parts[at].classList.add("at");
    parts[at].scrollIntoView({ block: "nearest" });
    read(parts[at]);
  });
}
