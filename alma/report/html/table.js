"use strict";
// Tables: sorted by the buttons in their headers, filtered by configuration.

function drawTable(panel) {
  const body = make("tbody");
  const words = panel.header.map((_, column) => column === 0 || isText(panel.rows, column));
  const rows = panel.rows.map((cells, i) => ({ cells, of: panel.of[i], element: tableRow(cells, words) }));
  body.append(...rows.map((row) => row.element));
  const headers = panel.header.map((name, column) => {
    const sort = () => sortBy(column);
    return make("th", { scope: "col", "aria-sort": "none", class: words[column] && "words" },
      make("button", { type: "button", onclick: sort }, name));
  });
  const sortBy = (column) => {
    const up = headers[column].getAttribute("aria-sort") !== "ascending";
    headers.forEach((header, i) => header.setAttribute("aria-sort", i !== column ? "none" : up ? "ascending" : "descending"));
    rows.sort((a, b) => compareCells(a.cells[column], b.cells[column], up));
    body.append(...rows.map((row) => row.element));
  };
  const elements = [scrolling(panel.title, make("table", {}, make("thead", {}, make("tr", {}, ...headers)), body))];
  if (panel.header.length === 1 && panel.rows.length === 1) elements.pop();  // the facts say it all
  if (panel.note) elements.push(make("p", { class: "note" }, panel.note));
  if (panel.facts) elements.push(factsOf(panel));
  return { elements, update: (visible) => rows.forEach((row) => { row.element.hidden = !visible[row.of]; }) };
}

const scrolling = (name, table) => make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, table);

function tableRow(cells, words) {
  return make("tr", {}, ...cells.map((cell, column) => column
    ? make("td", { class: words[column] && "words" }, cell)
    : make("th", { scope: "row" }, cell)));
}

function factsOf(panel) {
  const items = Object.entries(panel.facts).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]);
  return make("details", { class: "more" }, make("summary", {}, panel.facts_title), make("dl", {}, ...items));
}

const UNITS = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };

// The number that a cell starts with, such as 436M, 1,017 or 20.00 ±7.07; NaN for other cells.
function cellNumber(text) {
  const found = /^([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)([kMGT]?)(?=$|\s|->)/i.exec(text);
  return found ? parseFloat(found[1].replaceAll(",", "")) * (UNITS[found[2]] || 1) : text === "inf" ? Infinity : NaN;
}

const isText = (rows, column) =>
  rows.some((cells) => cells[column] && !["*", "yes", "no"].includes(cells[column]) && isNaN(cellNumber(cells[column])));

// Numbers before texts, empty cells last in both directions.
function compareCells(one, other, up) {
  const empty = (text) => text === "" || text === "*";
  if (empty(one) || empty(other)) return empty(one) - empty(other);
  const [a, b] = [cellNumber(one), cellNumber(other)];
  if (isNaN(a) !== isNaN(b)) return isNaN(a) - isNaN(b);
  const order = isNaN(a) ? one.localeCompare(other, "en", { numeric: true }) : a - b || 0;
  return up ? order : -order;
}
