"use strict";
// The page: header, sections, filters. Text from records only ever becomes text nodes (see `make`).
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "triangle-down"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const FACETS = [["learner", "Learner"], ["w", "Waiting time w"], ["size", "Size"], ["replay", "Replay"],
  ["schedule", "Learning-rate schedule"], ["average", "Average of weights"]];
// kind of a panel -> function (panel, section) that returns an element and `update(visible)`
const KINDS = { points: drawPoints, lines: drawLines, grids: drawGrids, table: drawTable };
const updates = [];  // redraw everything, for another theme

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "circle", "path", "line"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function buildPage() {
  document.getElementById("about").textContent = data.about.join(" · ");
  const main = document.getElementById("main");
  if (data.sections.length > 1) main.append(sectionLinks());
  if (data.remarks.length) main.append(listOf(data.remarks, "summary remarks"));
  data.sections.forEach((section, index) => main.append(buildSection(section, index)));
  const dark = matchMedia("(prefers-color-scheme: dark)");
  setTheme(dark.matches);
  dark.addEventListener("change", () => setTheme(dark.matches));
  document.getElementById("theme").addEventListener("click", () => setTheme(!isDark()));
  let wasDark = false;
  addEventListener("beforeprint", () => { wasDark = isDark(); root.dataset.print = ""; setTheme(false); drawFigures(true); });
  addEventListener("afterprint", () => { delete root.dataset.print; setTheme(wasDark); });
}

const isDark = () => root.dataset.theme === "dark";

function setTheme(dark) {
  root.dataset.theme = dark ? "dark" : "light";
  document.getElementById("theme").setAttribute("aria-pressed", dark);
  for (const update of updates) update();
}

function sectionLinks() {
  const links = data.sections.map((section, index) =>
    make("li", {}, make("a", { href: `#section${index}` }, section.title)));
  return make("nav", { "aria-label": "Sections" }, make("ul", {}, ...links));
}

function listOf(texts, name) {
  return make("ul", { class: name }, ...texts.map((text) => make("li", {}, text)));
}

function buildSection(section, index) {
  const id = `section${index}`;
  const panels = section.panels.map((panel, place) => {
    const built = KINDS[panel.kind](panel, section);
    const heading = `${id}panel${place}`;
    const box = make("article", { class: "panel", "aria-labelledby": heading },
      make("h3", { id: heading }, panel.title));
    if (panel.caption) box.append(make("p", {}, panel.caption));
    box.append(...built.elements);
    return { box, update: built.update };
  });
  const update = (visible) => panels.forEach((panel) => panel.update(visible));
  const filters = buildFilters(section, update);
  return make("section", { id, "aria-labelledby": `${id}title` },
    make("h2", { id: `${id}title` }, section.title),
    listOf(section.summary, "summary"),
    make("div", { class: "layout" }, filters, make("div", {}, ...panels.map((panel) => panel.box))));
}

// Check boxes for the values of each facet; `update` gets an array: is configuration i shown?
function buildFilters(section, update) {
  const all = section.configurations;
  const hidden = Object.fromEntries(FACETS.map(([key]) => [key, new Set()]));
  const status = make("span", { class: "shown", role: "status" });
  const summary = make("summary", {}, "Filters and legend");
  const boxes = [];
  const refresh = () => {
    const visible = all.map((each) => FACETS.every(([key]) => !hidden[key].has(each[key])));
    const count = visible.filter(Boolean).length;
    status.textContent = `${count} of ${all.length} configuration${all.length === 1 ? "" : "s"} shown`;
    update(visible);
  };
  const groups = FACETS.filter(([key]) => key === "learner" || valuesOf(section, key).length > 1).map(([key, name]) =>
    make("fieldset", {}, make("legend", {}, name), make("div", { class: "chips" },
      ...valuesOf(section, key).map((value) => {
        const change = () => { hidden[key][box.checked ? "delete" : "add"](value); refresh(); };
        const box = make("input", { type: "checkbox", checked: true, "data-facet": key, value, onchange: change });
        boxes.push(box);
        return make("label", { class: "chip" }, box, swatch(section, key, value), make("span", {}, value === "" ? "not recorded" : String(value)));
      }))));
  const showAll = () => {
    for (const box of boxes) box.checked = true;
    for (const values of Object.values(hidden)) values.clear();
    refresh();
  };
  const wide = matchMedia("(min-width: 52rem)").matches;
  updates.push(refresh);
  return make("aside", { class: "filters", "aria-label": `Filters of ${section.title}` },
    make("details", { open: wide }, summary, ...groups, status,
      make("button", { type: "button", onclick: showAll }, "Show all")));
}

// The different values of a facet; numbers ascending, texts in the order of the configurations.
function valuesOf(section, key) {
  const values = [...new Set(section.configurations.map((each) => each[key]))];
  return values.every((value) => value !== "" && isFinite(value)) ? values.sort((a, b) => a - b) : values;
}

// How figures mark a configuration: colour for the learner, symbol and dash for w, size for size, open for replay,
// a dot inside for a schedule over all stages, a ring for an average of weights.
function lookOf(section, index) {
  const each = section.configurations[index];
  const wait = valuesOf(section, "w").indexOf(each.w);
  const size = Math.min(3, valuesOf(section, "size").indexOf(each.size));
  return {
    colour: readable(data.colours[each.learner], 3),
    symbol: SYMBOLS[wait % SYMBOLS.length] + (each.replay === "no" ? "" : "-open") + (dotted(each) ? "-dot" : ""),
    ring: ringed(each) ? "--ink" : dotted(each) ? "--paper" : null,  // also the colour of the dot
    dash: DASHES[wait % DASHES.length],
    marker: 8 + 3 * size,
    width: 1.6 + 0.6 * size,
  };
}

const dotted = (configuration) => configuration.schedule !== "each stage";
const ringed = (configuration) => configuration.average !== "none";

// A small picture of how figures show a value.
function swatch(section, key, value) {
  const index = section.configurations.findIndex((each) => each[key] === value);
  const rank = valuesOf(section, key).indexOf(value);
  const shapes = [];
  if (key === "learner") {
    const colour = data.colours[value];
    shapes.push(make("circle", { cx: 11, cy: 8, r: 6, fill: colour, "data-learner": value }));
  } else if (key === "w") {
    const dash = ["", "6 3", "2 2", "6 2 2 2", "9 3", "9 2 2 2"][rank % DASHES.length];
    const path = ["M11 3a5 5 0 1 0 .01 0", "M6 3h10v10h-10z", "M11 2l6 6l-6 6l-6-6z", "M11 3l6 10h-12z",
      "M9 3h4v3h3v4h-3v3h-4v-3h-3v-4h3z", "M11 13l6-10h-12z"][rank % SYMBOLS.length];
    shapes.push(make("line", { x1: 0, x2: 22, y1: 8, y2: 8, stroke: "currentColor", "stroke-dasharray": dash }));
    shapes.push(make("path", { d: path, fill: "currentColor" }));
  } else if (key === "size") {
    shapes.push(make("circle", { cx: 11, cy: 8, r: 3 + 1.4 * Math.min(3, rank), fill: "currentColor" }));
  } else if (key === "schedule" || key === "average") {
    const ring = key === "average" && ringed(section.configurations[index]);
    const dot = key === "schedule" && dotted(section.configurations[index]);
    shapes.push(make("circle", { cx: 11, cy: 8, r: 5, fill: css("--soft"), ...(ring && { stroke: "currentColor", "stroke-width": 2 }) }));
    if (dot) shapes.push(make("circle", { cx: 11, cy: 8, r: 1.5, fill: css("--paper") }));
  } else {
    const fill = section.configurations[index].replay === "no" ? "currentColor" : "none";
    shapes.push(make("circle", { cx: 11, cy: 8, r: 5, fill, stroke: "currentColor", "stroke-width": 2 }));
  }
  return make("svg", { width: 22, height: 16, "aria-hidden": "true" }, ...shapes);
}

// The colour, mixed with the ink until its contrast with the page is at least `ratio`.
function readable(colour, ratio) {
  const paper = channels(css("--paper")), ink = channels(css("--ink"));
  let mixed = channels(colour);
  for (let part = 0; part <= 1 && contrast(mixed, paper) < ratio; part += 0.05)
    mixed = channels(colour).map((value, i) => value + part * (ink[i] - value));
  return `rgb(${mixed.map(Math.round).join(",")})`;
}

const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

function contrast(one, other) {
  const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}

function luminance(rgb) {
  const linear = rgb.map((value) => value / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

// A number as in the tables of `alma report`.
function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e5) return value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });
  if (size >= 1000) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  return size >= 0.1 || !value ? value.toFixed(2) : String(Number(value.toPrecision(2)));
}

const spread = (mean, deviation) => number(mean) + (deviation ? ` ±${number(deviation)}` : "");
