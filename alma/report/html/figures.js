"use strict";
// Figures, by Plotly. Each is drawn when it comes near the window, and has its data as a table below.
const plots = [];
// Named, as Plotly's own choice of buttons includes one that sends the data to its server.
const BUTTONS = [["toImage"], ["zoom2d", "pan2d", "resetScale2d"]];
const CONFIG = { displaylogo: false, responsive: true, modeBarButtons: BUTTONS };
const MARKED = 30;  // most points of a curve with markers
const LABELLED = 8;  // most curves with labels at their ends

// A box for a figure; `draw` is called once it is seen, and by `redraw` from then on.
function plotBox(label, draw) {
  const plot = { element: make("div", { class: "plot", role: "img", "aria-label": label }), draw, seen: false };
  plots.push(plot);
  return plot;
}

const redraw = (plot) => plot.seen && plot.draw();

function drawFigures(all = false) {
  const show = (plot) => { if (!plot.seen) { plot.seen = true; plot.draw(); } };
  if (all) return plots.forEach(show);
  const observer = new IntersectionObserver((entries) => entries.filter((each) => each.isIntersecting).forEach((each) => {
    observer.unobserve(each.target);
    show(plots.find((plot) => plot.element === each.target));
  }), { rootMargin: "300px" });
  plots.forEach((plot) => observer.observe(plot.element));
}

// Plotly reads text as markup, so text from records is escaped; long text is wrapped.
function plain(text, width = 58) {
  const lines = [""];
  for (const word of String(text).split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length > width) lines.push("");
    lines[lines.length - 1] += (lines.at(-1) && " ") + word;
  }
  const escaped = (line) => line.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  return lines.map(escaped).join("<br>");
}

function layoutOf(x, y, right = 16) {
  const coarse = matchMedia("(pointer: coarse)").matches;  // a finger scrolls the page
  return {
    paper_bgcolor: css("--paper"), plot_bgcolor: css("--paper"), showlegend: false, hovermode: "closest",
    dragmode: coarse ? false : "zoom", margin: { l: 56, r: right, t: 32, b: 48 }, xaxis: x, yaxis: y, hoverdistance: 30,
    font: { family: css("--text"), size: 13, color: css("--ink") },
    hoverlabel: { bgcolor: css("--raised"), bordercolor: css("--soft"), font: { color: css("--ink"), size: 13 }, align: "left" },
  };
}

// An axis over the values, with some room around them.
function axisOf(title, values, log, room = 0.04) {
  const shown = values.filter((value) => value !== null && isFinite(value) && (!log || value > 0));
  const scaled = shown.map((value) => (log ? Math.log10(value) : value));
  const low = scaled.reduce((a, b) => Math.min(a, b), Infinity), high = scaled.reduce((a, b) => Math.max(a, b), -Infinity);
  const edge = (high - low || Math.abs(high) || 1) * room;
  const most = shown.reduce((a, b) => Math.max(a, b), 0);
  return {
    title: { text: plain(title), standoff: 8 }, type: log ? "log" : "linear", automargin: true, zeroline: false,
    range: shown.length ? [low - edge, high + edge] : [0, 1], gridcolor: css("--grid"), linecolor: css("--line"),
    tickformat: most >= 1e5 ? "~s" : ",~r", ...(log && { dtick: high - low < (innerWidth < 600 ? 1.2 : 2.5) ? "D2" : 1 }),
  };
}

const spans = (values) => {
  const known = values.filter((value) => value > 0);
  return known.length === values.filter((value) => value !== null).length && Math.max(...known) > 10 * Math.min(...known);
};

function about(section, index) {
  const each = section.configurations[index];
  const size = each.size === "" ? "" : `, size ${each.size}`;
  const extras = (dotted(each) ? `, schedule ${each.schedule}` : "") + (ringed(each) ? `, average of weights ${each.average}` : "");
  const progress = each.finished ? "" : `, not finished (t = ${each.progress} of ${each.megabatches})`;
  return `<b>${plain(each.label)}</b><br>` + plain(`learner ${each.learner}, waiting time ${each.w}${size}, ` +
    `replay ${each.replay}${extras}${progress}`) + `<br>${plain(`${each.seeds.length === 1 ? "seed" : "seeds"} ${each.seeds.join(", ")}`)}`;
}

function choice(name, options, change) {
  const select = make("select", { onchange: change }, ...options.map((each, i) => make("option", { value: i }, each)));
  return { select, element: make("label", {}, name, select), hidden: options.length < 2 };
}

function toggle(name, checked, change) {
  const box = make("input", { type: "checkbox", checked, onchange: change });
  return { box, element: make("label", { class: "chip" }, box, make("span", {}, name)) };
}

const controlsOf = (...items) => make("div", { class: "controls" }, ...items.filter((each) => !each.hidden).map((each) => each.element));

// The data of a figure as a table, built whenever it is open.
function dataTable(title, build) {
  const holder = make("div");
  const refresh = () => {
    if (!details.open) return;
    const { header, rows } = build();
    const built = drawTable({ title: `${title}: data`, header, rows, of: rows.map((_, i) => i) });
    holder.replaceChildren(...built.elements);
  };
  const details = make("details", { class: "more", ontoggle: refresh }, make("summary", {}, "Data as a table"), holder);
  return { details, refresh };
}

function figureOf(panel, controls, boxes, table) {
  return [controls, make("figure", { "aria-label": panel.title }, ...boxes, table.details)];
}

function react(plot, traces, layout) {
  const { clientWidth: width, clientHeight: height } = plot.element;
  const printed = "print" in root.dataset, resized = `${width} ${height}` !== plot.size;
  plot.size = `${width} ${height}`;
  if (printed) Object.assign(layout, { width, height });  // Plotly.Plots.resize waits: too late for a sheet
  if (!traces.length) layout.annotations = [{ text: "No values to show", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
  Plotly.react(plot.element, traces, layout, CONFIG);
  if (resized && !printed) Plotly.Plots.resize(plot.element);
}

// One measure against another: `x` and `y` list measures with a mean, a deviation and seeds per configuration.
function drawPoints(panel, section) {
  let visible = section.configurations.map(() => true);
  const xs = choice("x axis", panel.x.map((each) => each.name), () => changed(true));
  const ys = choice("y axis", panel.y.map((each) => each.name), () => changed(true));
  const logX = toggle("log x", false, () => changed()), logY = toggle("log y", false, () => changed());
  const both = () => [panel.x[xs.select.value], panel.y[ys.select.value]];
  const shown = () => visible.map((_, i) => i).filter((i) => visible[i] && both().every((each) => each && each.mean[i] !== null));
  const scales = () => [logX, logY].forEach(({ box }, i) => { box.checked = spans(shown().map((c) => both()[i].mean[c])); });
  const changed = (measures = false) => { if (measures) scales(); redraw(plot); table.refresh(); };
  const plot = plotBox(`${panel.title}: a point per configuration. Its data follow as a table.`, () => {
    const [x, y] = both();
    const named = plot.element.clientWidth > 480 ? 30 : 14;  // characters of a label
    const traces = x && y && shown().length ? pointTraces(section, x, y, shown(), named) : [];
    const reach = (each) => (x && y ? shown().flatMap((i) => [each.mean[i], ...each.seeds[i]]) : []);
    react(plot, traces, layoutOf(axisOf(x ? x.name : "", reach(x), logX.box.checked, 0.06),
      axisOf(y ? y.name : "", reach(y), logY.box.checked, 0.1)));
  });
  const table = dataTable(panel.title, () => {
    const measures = [...panel.x, ...panel.y];
    const rows = visible.map((_, i) => i).filter((i) => visible[i]).map((i) =>
      [section.configurations[i].label, ...measures.map((each) => spread(each.mean[i], each.deviation[i]))]);
    return { header: ["configuration", ...measures.map((each) => each.name)], rows };
  });
  if (panel.y.length) scales();
  const update = (now) => { if (now) visible = now; changed(); };
  return { elements: figureOf(panel, controlsOf(ys, xs, logX, logY), [plot.element], table), update };
}

function pointTraces(section, x, y, shown, named) {
  const looks = shown.map((i) => lookOf(section, i));
  const text = (i, xValue, yValue, what) =>
    `${about(section, i)}${what}<br>${plain(y.name)}: ${yValue}<br>${plain(x.name)}: ${xValue}`;
  const seeds = shown.flatMap((i, at) => (x.seeds[i].length < 2 ? [] : x.seeds[i].map((value, k) => ({
    x: value, y: y.seeds[i][k], colour: looks[at].colour,
    text: text(i, number(value), number(y.seeds[i][k]), `<br>this dot: seed ${plain(section.configurations[i].seeds[k])}`),
  }))));
  const front = nonDominated(shown.filter((i) => section.configurations[i].finished), x.mean, y.mean);
  return [
    { x: front.map((i) => x.mean[i]), y: front.map((i) => y.mean[i]), mode: "lines", hoverinfo: "skip", name: "front",
      line: { color: css("--soft"), width: 1.5, dash: "dash", shape: "hv" } },
    { x: seeds.map((each) => each.x), y: seeds.map((each) => each.y), mode: "markers", name: "seeds", hoverinfo: "text",
      hovertext: seeds.map((each) => each.text), marker: { size: 5, opacity: 0.55, color: seeds.map((each) => each.colour) } },
    { x: shown.map((i) => x.mean[i]), y: shown.map((i) => y.mean[i]), mode: "markers+text", name: "configurations",
      hoverinfo: "text",
      // Below a point of the front there is no other point.
      text: shown.map((i) => (front.length <= LABELLED && front.includes(i) ? plain(cut(section, i, named), 99) : "")),
      textposition: shown.map((i) => (i === front[0] ? "bottom right" : i === front.at(-1) ? "bottom left" : "bottom center")), textfont: { size: 12, color: css("--ink") },
      hovertext: shown.map((i) => text(i, spread(x.mean[i], x.deviation[i]), spread(y.mean[i], y.deviation[i]), "")),
      error_y: { array: shown.map((i) => y.deviation[i] || 0), thickness: 1.2, width: 0, color: css("--soft") },
      marker: { size: looks.map((each) => each.marker), symbol: looks.map((each) => each.symbol), color: looks.map((each) => each.colour),
        opacity: shown.map((i) => (section.configurations[i].finished ? 1 : 0.35)), line: { width: looks.map((each) => (each.ring ? 2 : 1)), color: looks.map((each) => (each.ring ? css(each.ring) : each.colour)) } } },
  ];
}

// The configurations that no other one matches in x and beats in y, ascending in x.
function nonDominated(shown, x, y) {
  let least = Infinity;
  return [...shown].sort((a, b) => x[a] - x[b] || y[a] - y[b]).filter((i) => y[i] < least && (least = y[i], true));
}

// Curves over mega-batches, held between stages; with `panel.points` curves through points, around the axes' zeros.
function drawLines(panel, section) {
  let visible = section.configurations.map(() => true);
  const measures = choice("show", panel.measures.map((each) => each.name), () => changed(true));
  const facets = FACETS.filter(([key]) => { const count = valuesOf(section, key).length; return count > 1 && count <= 9; });
  const split = choice("figures", ["one for all", ...facets.map(([, name]) => `by ${name.toLowerCase()}`)], () => changed());
  const log = toggle("log axis", false, () => changed()), bands = toggle("spread over seeds", true, () => changed());
  const untrained = toggle("untrained model", false, () => changed());
  log.hidden = untrained.hidden = panel.points;
  bands.hidden = !panel.measures.some((each) => each.lines.some((line) => line.deviation));
  const measure = () => panel.measures[measures.select.value];
  const lines = () => measure().lines.filter((line) => visible[line.c]);
  const values = () => lines().flatMap((line) => line.y.slice(untrained.box.checked ? 0 : line.untrained));
  const scale = () => { log.box.checked = !panel.points && spans(values()); };
  const changed = (other = false) => { if (other) scale(); redraw(plot); table.refresh(); };
  const plot = plotBox(`${panel.title}: a curve per configuration. Its data follow as a table.`, () => {
    const y = axisOf(measure().name, values(), log.box.checked, 0.05);
    const x = panel.points ? pointsAxis(panel, y) : streamAxis(panel, section);
    const draw = panel.points ? pointedTraces : lineTraces;
    const traces = (some) => some.flatMap((line) => draw(section, measure(), line, bands.box.checked));
    if (+split.select.value) return smallMultiples(plot, groupsOf(section, facets[split.select.value - 1], lines()), traces, x, y);
    plot.element.style.height = "";
    const named = lines().length <= LABELLED && plot.element.clientWidth > 620;
    const layout = layoutOf(x, y, named ? Math.min(230, 20 + 7 * Math.max(0, ...lines().map((line) => cut(section, line.c).length))) : 16);
    const end = (line) => (panel.points ? x.range[1] : line.until + tailOf(section));
    if (named) layout.annotations = endLabels(section, lines(), y, plot.element.clientHeight - 80, end);
    react(plot, traces(lines()), layout);
  });
  const table = dataTable(panel.title, () => (panel.points ? pointsTable : linesTable)(section, lines()));
  scale();
  if (lines().length > LABELLED && facets.length && facets[0][0] === "learner") split.select.value = 1;
  const update = (now) => { if (now) visible = now; changed(); };
  return { elements: figureOf(panel, controlsOf(measures, split, log, bands, untrained), [plot.element], table), update };
}

// The curves by the value of a facet: [[name, lines], ...].
function groupsOf(section, [key, name], lines) {
  return valuesOf(section, key).map((value) => [
    key === "learner" ? String(value) : `${name} ${value}`,
    lines.filter((line) => section.configurations[line.c][key] === value),
  ]).filter(([, some]) => some.length);
}

// A grid of figures with the same axes; `traces` draws the curves of a group.
function smallMultiples(plot, groups, traces, x, y) {
  const columns = Math.min(groups.length, 3, Math.max(1, Math.floor(plot.element.clientWidth / 290)));
  const rows = Math.ceil(groups.length / columns), gap = 0.24 / rows, height = (1 - gap * (rows - 1)) / rows;
  plot.element.style.height = `${rows * 15 + 4}rem`;
  const layout = { ...layoutOf({}, {}), annotations: [] }, all = [];
  groups.forEach(([name, some], i) => {
    const id = i ? i + 1 : "", column = i % columns, row = Math.floor(i / columns);
    const left = column / columns + (column ? 0.02 : 0), right = (column + 1) / columns - (column < columns - 1 ? 0.02 : 0);
    const top = 1 - row * (height + gap);
    const below = i + columns < groups.length;
    layout[`xaxis${id}`] = { ...x, domain: [left, right], anchor: `y${id}`, ...(below && { title: {} }) };
    layout[`yaxis${id}`] = { ...y, domain: [Math.max(0, top - height), top], anchor: `x${id}`, ...(column && { title: {}, showticklabels: false }) };
    layout.annotations.push({ text: `<b>${plain(name, 40)}</b>`, xref: "paper", yref: "paper", x: (left + right) / 2, y: top,
      xanchor: "center", yanchor: "bottom", showarrow: false });
    all.push(...traces(some).map((trace) => ({ ...trace, xaxis: `x${id}`, yaxis: `y${id}` })));
  });
  react(plot, all, layout);
}

function streamAxis(panel, section) {
  const last = section.configurations[0].megabatches;
  return { ...axisOf(panel.x, [0, last], false, 0), range: [0, last + tailOf(section)], ...(last <= 10 && { dtick: 1 }) };
}

// The x axis of `panel.points`; both axes show their zeros.
function pointsAxis(panel, y) {
  const zeros = { zeroline: true, zerolinecolor: css("--soft"), zerolinewidth: 1 };
  const values = panel.measures.flatMap((each) => each.lines.flatMap((line) => line.t));
  Object.assign(y, zeros);
  return { ...axisOf(panel.x, values, false), ...zeros, ...(values.every((value) => Math.abs(value) < 8) && { dtick: 1 }) };
}

function pointedTraces(section, { name }, line, bands) {
  const look = lookOf(section, line.c);
  const hovers = line.t.map((x, i) => `${about(section, line.c)}<br>age ${x}<br>${plain(name)}: ${spread(line.y[i], line.deviation?.[i])}`);
  const traces = [{ x: line.t, y: line.y, mode: "lines+markers", hoverinfo: "text", hovertext: hovers, meta: line.c,
    name: section.configurations[line.c].label, line: { color: look.colour, width: look.width, dash: look.dash },
    marker: { symbol: look.symbol, size: 6, color: look.colour } }];
  if (bands && line.deviation) traces.unshift(...[1, -1].map((sign) => ({
    x: line.t, y: line.y.map((y, i) => y + sign * line.deviation[i]), mode: "lines", hoverinfo: "skip",
    line: { width: 0, color: look.colour }, ...(sign < 0 && { fill: "tonexty", fillcolor: faint(look.colour) }) })));
  return traces;
}

const faint = (colour) => colour.replace("rgb", "rgba").replace(")", ",.16)");

function lineTraces(section, measure, line, bands) {
  const { name, lines } = measure, count = lines.length;
  const look = lookOf(section, line.c);
  const hovers = line.t.map((t, i) => {
    const until = line.thinned ? t : (line.t[i + 1] ?? line.until + 1) - 1;
    const when = `t = ${t}${until > t ? ` to ${until}` : ""}${i < line.untrained ? ", untrained" : ""}`;
    return `${about(section, line.c)}<br>${when}<br>${plain(name)}: ${spread(line.y[i], line.deviation?.[i])}`;
  });
  const end = line.until + tailOf(section);
  const part = (values, from, to, end) => [...values.slice(from, to), ...(to > from ? [end] : [])];
  const start = line.t[line.untrained] ?? end, k = line.untrained;
  const piece = (from, to, end, extra) => ({
    x: part(line.t, from, to, end), y: part(line.y, from, to, line.y[to - 1]), hoverinfo: "text",
    hovertext: part(hovers, from, to, hovers[to - 1]), name: section.configurations[line.c].label, meta: line.c, ...extra,
  });
  const thin = count > 40 ? 0.6 : 1, marked = lines.every((each) => each.t.length <= MARKED);
  const traces = [piece(k, line.t.length, end, {
    mode: marked ? "lines+markers" : "lines", opacity: count > 40 ? 0.75 : 1,
    line: { shape: "hv", color: look.colour, width: look.width * thin, dash: look.dash },
    marker: { symbol: look.symbol, size: [...line.t.slice(k).map(() => 6), 0], color: look.colour, line: { width: 0 } },
  })];
  if (k) traces.push(piece(0, k, start, { mode: "lines", opacity: 0.4, line: { shape: "hv", color: look.colour, width: 1.2, dash: "dot" } }));
  if (bands && line.deviation) {
    const edge = (sign, extra) => piece(k, line.t.length, end, {
      y: part(line.y.map((y, i) => Math.max(y + sign * line.deviation[i], 0.05 * y)), k, line.t.length,
        Math.max(line.y.at(-1) + sign * line.deviation.at(-1), 0.05 * line.y.at(-1))),
      mode: "lines", hoverinfo: "skip", line: { shape: "hv", width: 0, color: look.colour }, ...extra });
    traces.unshift(edge(1, {}), edge(-1, { fill: "tonexty", fillcolor: faint(look.colour) }));
  }
  return traces.filter((trace) => trace.x.length);
}

// How far the last value is held, so that it can be seen.
const tailOf = (section) => Math.max(0.5, 0.015 * section.configurations[0].megabatches);

const cut = (section, index, most = 30) => {
  const { label } = section.configurations[index];
  return label.length > most ? `${label.slice(0, most - 1)}…` : label;
};

// Labels at the ends of the curves, pushed apart; `height` is that of the axis in pixels, `end` gives the x of a line.
function endLabels(section, lines, axis, height, end) {
  const at = (value) => (axis.type === "log" ? Math.log10(value) : value);
  const [low, high] = axis.range;
  const labels = lines.filter((line) => line.y.length && line.y.at(-1) !== null && line.untrained < line.t.length)
    .map((line) => ({ line, y: at(line.y.at(-1)), place: ((at(line.y.at(-1)) - low) / (high - low)) * height }))
    .sort((a, b) => a.place - b.place);
  let floor = -Infinity;
  for (const label of labels) { label.moved = Math.max(label.place, floor + 15); floor = label.moved; }
  const over = Math.max(0, floor - height);
  return labels.map(({ line, y, place, moved }) => ({
    text: plain(cut(section, line.c), 99), x: end(line), y, yshift: moved - over - place, xanchor: "left", xshift: 5, showarrow: false, bgcolor: css("--paper"), borderpad: 0,
    font: { color: readable(data.colours[section.configurations[line.c].learner], 4.5), size: 12 },
  }));
}

function linesTable(section, lines) {
  const last = section.configurations[0].megabatches, columns = Math.min(20, last);
  const times = [...new Set([0, ...Array.from({ length: columns }, (_, i) => Math.round(((i + 1) * last) / columns))])];
  const rows = lines.map((line) => [section.configurations[line.c].label, ...times.map((t) => {
    const at = line.t.findLastIndex((each) => each <= t);
    return at < 0 || t > line.until ? "" : spread(line.y[at], line.deviation?.[at]);
  })]);
  return { header: ["configuration", ...times.map((t) => `t=${t}`)], rows };
}

function pointsTable(section, lines) {
  const places = [...new Set(lines.flatMap((line) => line.t))].sort((a, b) => a - b);
  const rows = lines.map((line) => [section.configurations[line.c].label, ...places.map((x) => {
    const at = line.t.indexOf(x);
    return at < 0 ? "" : spread(line.y[at], line.deviation?.[at]);
  })]);
  return { header: ["configuration", ...places.map((x) => `age=${x}`)], rows };
}

// Matrices, two or more maps side by side; a list chooses the configuration.
function drawGrids(panel, section) {
  let visible = section.configurations.map(() => true);
  const select = make("select", { onchange: () => changed() });
  const fill = () => {
    const chosen = select.value;
    const options = panel.grids.flatMap((grid, i) => (visible[grid.c] ? [make("option", { value: i }, grid.name)] : []));
    select.replaceChildren(...options);
    if (options.some((option) => option.value === chosen)) select.value = chosen;
  };
  const grid = () => panel.grids[select.value];
  const changed = () => { names.forEach((_, i) => redraw(boxes[i])); table.refresh(); };
  const names = Object.keys(panel.grids[0].maps);
  const boxes = names.map((name) => {
    const plot = plotBox(`${panel.title}: ${name}. Its data follow as a table.`, () => {
      const layout = layoutOf({ title: { text: plain(panel.x) }, type: "category", showgrid: false },
        { title: { text: plain(panel.y) }, type: "category", autorange: "reversed", automargin: true, showgrid: false });
      layout.title = { text: plain(name), font: { size: 14 } };
      layout.margin.t = 60;
      if (panel.diagonal && grid()) layout.shapes = grid().maps[name].map((_, i) => ({
        type: "rect", x0: i - 0.5, x1: i + 0.5, y0: i - 0.5, y1: i + 0.5, line: { color: css("--ink"), width: 1.5 } }));
      react(plot, grid() ? [heatmap(panel, grid(), name)] : [], layout);
    });
    return plot;
  });
  const table = dataTable(panel.title, () => {
    const rows = !grid() ? [] : Object.entries(grid().maps).flatMap(([name, values]) =>
      values.map((row, i) => [`${name}, ${panel.y} ${i + 1}`, ...row.map((value) => (value === null ? "" : number(value)))]));
    return { header: ["", ...(grid() ? grid().x.map((at) => `${panel.column}=${at}`) : [])], rows };
  });
  fill();
  const control = { element: make("label", {}, "of", select) };
  const update = (now) => { if (now) visible = now; fill(); changed(); };
  return { elements: figureOf(panel, controlsOf(control), [make("div", { class: "maps" }, ...boxes.map((box) => box.element))], table), update };
}

function heatmap(panel, grid, name) {
  const values = grid.maps[name];
  const hovers = values.map((row, i) => row.map((value, j) =>
    `${plain(grid.name)}<br>${panel.column} = ${plain(String(grid.x[j]))}, ${plain(panel.y)} ${i + 1}<br>${plain(name)}: ${number(value)}`));
  return {
    type: "heatmap", z: values, x: grid.x.map((at) => plain(String(at), 99)), y: values.map((_, i) => String(i + 1)), hoverinfo: "text", hovertext: hovers,
    xgap: 1, ygap: 1, textfont: { color: css("--ink") }, colorscale: [[0, css("--raised")], [1, css("--scale")]], colorbar: { thickness: 10, outlinewidth: 0 },
    hoverongaps: false, ...(panel.range && { zmin: panel.range[0], zmax: panel.range[1] }), ...(grid.x.length <= 8 && { text: values.map((row) => row.map((value) => (value === null ? "" : number(value)))), texttemplate: "%{text}" }),
  };
}
