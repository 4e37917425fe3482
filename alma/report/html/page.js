"use strict";
// Figures are made in Python and drawn by Plotly when they come near the window.
const observer = new IntersectionObserver((entries) => entries.filter((each) => each.isIntersecting).forEach(({ target }) => {
  observer.unobserve(target);
  Plotly.newPlot(target, JSON.parse(target.nextElementSibling.textContent));
}), { rootMargin: "300px" });
document.querySelectorAll(".plot").forEach((plot) => observer.observe(plot));

// Tables are sorted by the buttons in their headers.
document.querySelectorAll("th").forEach((header) => header.addEventListener("click", () => {
  const body = header.closest("table").tBodies[0], column = header.cellIndex;
  const up = header.ariaSort !== "ascending";
  header.parentNode.querySelectorAll("th").forEach((each) => { each.ariaSort = "none"; });
  header.ariaSort = up ? "ascending" : "descending";
  body.append(...[...body.rows].sort((a, b) => compare(a.cells[column].textContent, b.cells[column].textContent, up)));
}));

const UNITS = { k: 1e3, M: 1e6, G: 1e9, T: 1e12 };

// The number that a cell starts with, such as 436M, 1,017 or 20.00 ±7.07; NaN for other cells.
function numberOf(text) {
  const found = /^([-+]?[\d,]*\.?\d+(?:e[-+]?\d+)?)([kMGT]?)(?=$|\s|->|x$)/i.exec(text);
  return found ? parseFloat(found[1].replaceAll(",", "")) * (UNITS[found[2]] || 1) : text === "inf" ? Infinity : NaN;
}

// Numbers before texts, empty cells last in both directions.
function compare(one, other, up) {
  const empty = (text) => text === "" || text === "*";
  if (empty(one) || empty(other)) return empty(one) - empty(other);
  const [a, b] = [numberOf(one), numberOf(other)];
  if (isNaN(a) !== isNaN(b)) return isNaN(a) - isNaN(b);
  const order = isNaN(a) ? one.localeCompare(other, "en", { numeric: true }) : a - b || 0;
  return up ? order : -order;
}
