// Charts of cells, of points by class, and of leads.

const RAMPS = { // from nothing to all, on light and on dark
  blue: [["#ffffff", "#0b3c6f"], ["#1d2024", "#a8d8ff"]],
  orange: [["#ffffff", "#8a3200"], ["#1d2024", "#ffc08a"]],
};
const shades = new Map();
function shade(share, ramp) { // the colour of a cell and of the text on it: black or white, whichever stands out more
  const level = Math.round(40 * Math.max(0, Math.min(1, share)));
  const key = `${ramp}${level}`;
  if (!shades.has(key)) {
    const made = RAMPS[ramp].map(([from, to]) => {
      const rgb = [1, 3, 5].map((i) => {
        const [a, b] = [from, to].map((hex) => parseInt(hex.slice(i, i + 2), 16));
        return Math.round(a + (b - a) * (0.06 + 0.94 * (level / 40)));
      });
      const [r, g, b] = rgb.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      const light = 0.2126 * r + 0.7152 * g + 0.0722 * b;
      return [`rgb(${rgb.join(" ")})`, light > 0.179 ? "#000000" : "#ffffff"];
    });
    shades.set(key, { fill: `light-dark(${made[0][0]}, ${made[1][0]})`, text: `light-dark(${made[0][1]}, ${made[1][1]})` });
  }
  return shades.get(key);
}

// spec: rows and columns (names), values (null: nothing there), most, format, tell(r, c), ramp, title, xTitle, yTitle,
// emphasis (rows in bold), rowHeight, unit (of the scale)
function heatMap(spec, width) {
  const { rows, columns, values, most, format = String, ramp = "blue", title = "", emphasis = [] } = spec;
  const top = (title ? 24 : 6) + 22; // and the scale
  const left = Math.min(highest(rows.map((name) => measure(name)), 20), 0.34 * width) + 18 + (spec.yTitle ? 18 : 0);
  const w = Math.min((width - left - 4) / columns.length, 96);
  const h = spec.rowHeight ?? (rows.length <= 30 ? 22 : Math.max(4, 620 / rows.length));
  const long = highest(columns.map((name) => measure(name, 11)), 0);
  const turned = long > w - 4;
  const step = Math.max(1, Math.ceil((turned ? 13 : long + 6) / w));
  const rowStep = Math.max(1, Math.ceil(12 / h));
  const below = (turned ? Math.min(long, 110) * 0.72 + 14 : 18) + (spec.xTitle ? 18 : 0);
  const height = top + h * rows.length + below;
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart" });
  if (title) node.append(label(left, 14, cut(title, width - left), { "font-weight": 600 }));

  const bar = top - 20; // the scale
  for (let i = 0; i <= 20; i++) node.append(svg("rect", { x: left + 6 * i, y: bar, width: 6.5, height: 9, style: `fill: ${shade(i / 20, ramp).fill}` }));
  node.append(label(left + 134, bar + 9, `${format(0)} to ${format(most)}${spec.unit ?? ""}`, { "font-size": 11 }));

  const fits = h >= 13 && highest(values.flatMap((row) => known(row).map((v) => measure(format(v), 10))), 0) <= w - 3;
  const gap = w > 8 && h > 8 ? 1 : 0;
  rows.forEach((name, r) => {
    if (r % rowStep === 0) node.append(label(left - 6, top + h * (r + 0.5) + 4, cut(name, left - 12 - (spec.yTitle ? 18 : 0)), { "text-anchor": "end", class: "tick y", "font-weight": emphasis.includes(r) ? 600 : null }));
    columns.forEach((_, c) => {
      const v = values[r][c];
      if (v === null || v === undefined) return;
      const { fill, text } = shade(most ? v / most : 0, ramp);
      node.append(svg("rect", { x: left + w * c, y: top + h * r, width: w - gap, height: h - gap, class: "cell", style: `fill: ${fill}` }));
      if (fits) node.append(svg("text", { x: left + w * (c + 0.5), y: top + h * (r + 0.5) + 3.5, "font-size": 10, "text-anchor": "middle", class: "value", style: `fill: ${text}` }, format(v)));
    });
  });
  const base = top + h * rows.length;
  columns.forEach((name, c) => {
    if (c % step) return;
    const x = left + w * (c + 0.5);
    const place = turned ? { "text-anchor": "end", transform: `translate(${x + 4} ${base + 12}) rotate(-45)` } : { x, y: base + 14, "text-anchor": "middle" };
    node.append(svg("text", { ...place, "font-size": 11, class: "tick x", style: `fill: ${INK}` }, cut(name, 110, 11)));
  });
  node.append(svg("rect", { x: left - 0.5, y: top - 0.5, width: w * columns.length, height: h * rows.length, style: "fill: none; stroke: var(--axis); stroke-width: 0.5" }));
  if (spec.xTitle) node.append(label(left + (w * columns.length) / 2, height - 5, spec.xTitle, { "text-anchor": "middle" }));
  if (spec.yTitle) node.append(label(0, 0, spec.yTitle, { "text-anchor": "middle", transform: `translate(12 ${top + (h * rows.length) / 2}) rotate(-90)` }));
  const cursor = svg("rect", { width: w, height: h, visibility: "hidden", style: `fill: none; stroke: ${INK}; stroke-width: 2` });
  node.append(cursor);
  return {
    node,
    count: rows.length * columns.length,
    columns: columns.length,
    locate(a, b) {
      const [c, r] = [Math.floor((a - left) / w), Math.floor((b - top) / h)];
      return c >= 0 && r >= 0 && c < columns.length && r < rows.length ? r * columns.length + c : null;
    },
    at(i) {
      const [r, c] = [Math.floor(i / columns.length), i % columns.length];
      return { x: left + w * (c + 1), y: top + h * r, title: "", lines: [[null, spec.tell(r, c)]] };
    },
    mark(i) {
      cursor.setAttribute("visibility", i === null ? "hidden" : "visible");
      if (i === null) return;
      cursor.setAttribute("x", left + w * (i % columns.length));
      cursor.setAttribute("y", top + h * Math.floor(i / columns.length));
    },
  };
}

function cloud({ title, note, x, y, labels }, size) { // points coloured by class
  const node = svg("svg", { viewBox: `0 0 ${size} ${size + 40}`, width: size, height: size + 40, class: "chart cloud" });
  node.append(label(4, 14, cut(title, size - 8), { "font-weight": 600 }), label(4, 30, note, { "font-size": 11 }));
  const span = Math.max(highest(x), highest(y), 1);
  const place = (v) => (6 + (v / span) * (size - 12)).toFixed(1);
  const classes = highest(labels, 0) + 1;
  const paths = Array.from({ length: classes }, () => "");
  labels.forEach((c, i) => (paths[c] += `M${place(x[i])} ${(40 + size - Number(place(y[i]))).toFixed(1)}h0`));
  paths.forEach((d, c) => d && node.append(svg("path", { d, class: "points", "stroke-linecap": "round", style: `stroke: ${paletteColour(c, classes)}; stroke-width: 4; fill: none` })));
  node.append(svg("rect", { x: 0.5, y: 36, width: size - 1, height: size + 3, style: "fill: none; stroke: var(--grid)" }));
  return { node, count: 1, columns: 1, locate: () => null, at: () => ({ x: size / 2, y: 40, title, lines: [[null, note]] }), mark() {} };
}

// rows: {title, value, rival, points, note, printed}
function leadChart(rows, width) {
  const narrow = width < 560;
  const left = narrow ? 8 : Math.min(highest(rows.map((r) => measure(r.title)), 60), 0.34 * width) + 12;
  const words = (r) => `${signed(r.points)} over ${r.rival}${r.note && !narrow ? ` (${r.note})` : ""}`;
  const paper = (r) => (r.printed ? `paper ${signed(r.printed.points)}` : "");
  const right = narrow ? 8 : highest(rows.map((r) => 1.1 * measure(words(r)) + measure(paper(r))), 80) + 36;
  const line = narrow ? 44 : 26;
  const top = 6;
  const height = top + rows.length * line + 36;
  const px = scale(0, 100, left + 6, width - right - 6);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart" });
  for (const v of px(100) - px(0) < 260 ? [0, 50, 100] : [0, 20, 40, 60, 80, 100]) {
    node.append(svg("line", { x1: px(v), x2: px(v), y1: top, y2: height - 34, style: "stroke: var(--grid)" }));
    node.append(label(px(v), height - 18, `${v} %`, { "text-anchor": "middle", class: "tick x", "font-size": 11 }));
  }
  const us = colourOf(content.looks.fedcc.colour);
  rows.forEach((r, i) => {
    const y = top + line * (i + 0.5) + (narrow ? 8 : 0);
    const theirs = Math.max(0, Math.min(100, r.value - r.points));
    const ahead = r.points >= 0;
    if (narrow) {
      node.append(label(left, y - 12, cut(`${r.title}: ${words(r)}`, width - 12)));
    } else {
      node.append(label(left - 10, y + 4, cut(r.title, left - 12), { "text-anchor": "end" }));
      node.append(label(width - right + 14, y + 4, words(r), { "font-weight": ahead ? 600 : 400, class: "lead" }));
      if (r.printed) node.append(label(width - 4, y + 4, paper(r), { "text-anchor": "end", style: "fill: var(--soft)" }));
    }
    node.append(svg("line", { x1: px(theirs), x2: px(r.value), y1: y, y2: y, style: `stroke: ${ahead ? us : "var(--axis)"}; stroke-width: 4` }));
    node.append(svg("circle", { cx: px(theirs), cy: y, r: 5, style: "fill: var(--card); stroke: var(--axis); stroke-width: 2" }));
    node.append(svg("circle", { cx: px(r.value), cy: y, r: 6, style: `fill: ${us}` }));
  });
  const key = svg("g", {}, svg("circle", { cx: left + 12, cy: height - 5, r: 5, style: `fill: ${us}` }), label(left + 22, height - 1, "FedCC", { "font-size": 11 }),
    svg("circle", { cx: left + 76, cy: height - 5, r: 4.5, style: "fill: var(--card); stroke: var(--axis); stroke-width: 2" }), label(left + 86, height - 1, "its nearest rival", { "font-size": 11 }));
  node.append(key);
  const cursor = svg("rect", { x: 1, width: width - 2, height: line - 2, rx: 4, visibility: "hidden", style: "fill: none; stroke: var(--axis)" });
  node.append(cursor);
  return {
    node,
    count: rows.length,
    columns: 1,
    locate: (a, b) => (b >= top && b < top + line * rows.length ? Math.floor((b - top) / line) : null),
    at(i) {
      const r = rows[i];
      const lines = [[us, `FedCC ${fixed(r.value)} %`], ["var(--axis)", `${r.rival} ${fixed(r.value - r.points)} % (nearest of ${r.rivals})`]];
      if (r.printed) lines.push([null, `the paper: ${signed(r.printed.points)} over ${r.printed.rival}`]);
      return { x: px(r.value), y: top + line * i, title: r.title, lines };
    },
    mark(i) {
      cursor.setAttribute("visibility", i === null ? "hidden" : "visible");
      if (i !== null) cursor.setAttribute("y", top + line * i + 1);
    },
  };
}
