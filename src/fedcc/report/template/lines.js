// Charts of lines and points. A chart is a drawing with values that can be pointed at: `locate` finds the value at a
// place, `at` describes it, `mark` shows it.

const FONT = 12;

function label(x, y, text, attributes = {}) {
  return svg("text", { x, y, "font-size": FONT, style: `fill: ${INK}`, ...attributes }, text);
}

const scale = (low, high, from, to, log) => {
  const t = log ? Math.log10 : (v) => v;
  const span = t(high) - t(low) || 1;
  return (v) => from + ((t(v) - t(low)) / span) * (to - from);
};

function roundTicks(low, high, number) { // at multiples of 1, 2 or 5 times a power of ten
  const least = (high - low) / Math.max(1, number) || 1;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = power * [1, 2, 5, 10].find((m) => m * power >= least * 0.999);
  const count = Math.floor(high / step + 1e-9) - Math.ceil(low / step - 1e-9) + 1;
  return Array.from({ length: count }, (_, i) => Number(((Math.ceil(low / step - 1e-9) + i) * step).toPrecision(12)));
}

function logTicks(low, high, number) {
  const decades = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) decades.push(p);
  const factors = high / low < 10 ** (number / 3) ? [1, 2, 5] : [1];
  const ticks = decades.flatMap((p) => factors.map((f) => f * 10 ** p)).filter((v) => v >= low * 0.999 && v <= high * 1.001);
  return ticks.filter((_, i) => i % Math.ceil(ticks.length / Math.max(2, number)) === 0);
}

function extent(values, { log = false, zero = false, range = null }, room) {
  if (range) return range;
  let [low, high] = [lowest(values), highest(values)];
  if (log) return low === high ? [low / 2, high * 2] : [low / 1.15, high * 1.15];
  if (zero) low = Math.min(0, low);
  if (low === high) [low, high] = zero ? [0, high || 1] : [low - 0.5, high + 0.5];
  return [low, high + (room ? (high - low) * 0.04 : 0)];
}

// spec: height, title, legend, x and y: {title, log, zero, range, format, ticks: [[value, text]]},
// series: {name, colour, strokes, width, points: [[x, y]], band: [[x, low, high]], dots, symbol, quiet, filled, tell}
// verticals: [{x, colour}]
function lineChart(spec, width) {
  const series = spec.series.filter((s) => s.points.length);
  const { x, y, height = 330, title = "" } = spec;
  const named = spec.legend ? series.filter((s) => !s.quiet).sort((one, two) => (one.order ?? 0) - (two.order ?? 0)) : [];
  const beside = width >= 640;
  const nameWidth = Math.min(highest(named.map((s) => (s.width > 2 ? 1.1 : 1) * measure(s.name)), 0), beside ? 0.32 * width : width - 60);
  const right = beside && named.length ? nameWidth + 46 : 14;
  const formatX = x.format ?? String;
  const formatY = y.format ?? String;
  const xs = series.flatMap((s) => s.points.map((p) => p[0]));
  const ys = series.flatMap((s) => [...s.points.map((p) => p[1]), ...(s.band ?? []).flatMap((b) => [b[1], b[2]])]);
  const [x0, x1] = extent(xs, x);
  const [y0, y1] = extent(ys, y, true);
  const top = title ? 26 : 10;
  const yTicks = (y.log ? logTicks(y0, y1, 6) : roundTicks(y0, y1, 5)).map((v) => [v, formatY(v)]);
  const left = 12 + highest(yTicks.map(([, text]) => measure(text)), 10) + (y.title ? 18 : 0);
  const bottom = x.title ? 42 : 26;
  const px = scale(x0, x1, left + 6, width - right - 6, x.log);
  const py = scale(y0, y1, height - bottom, top, y.log);
  const number = Math.max(2, Math.floor((width - left - right) / 62));
  const xTicks = x.ticks ?? (x.log ? logTicks(x0, x1, number) : roundTicks(x0, x1, Math.min(number, 15))).map((v) => [v, formatX(v)]);

  const rows = []; // of the legend, below a narrow chart
  if (!beside) {
    for (const s of named) {
      const room = Math.min(measure(s.name), nameWidth) + 50;
      if (!rows.length || rows.at(-1).used + room > width) rows.push({ used: 0, items: [] });
      rows.at(-1).items.push([s, rows.at(-1).used]);
      rows.at(-1).used += room;
    }
  }
  const total = beside ? Math.max(height, top + named.length * 19 + 6) : height + rows.length * 20 + (rows.length ? 6 : 0);
  const node = svg("svg", { viewBox: `0 0 ${width} ${total}`, width, height: total, class: "chart" });
  if (title) node.append(label(left, 14, cut(title, width - left - 8), { "font-weight": 600 }));
  for (const [v, text] of yTicks) {
    node.append(svg("line", { x1: left, x2: width - right, y1: py(v), y2: py(v), style: "stroke: var(--grid)" }));
    node.append(label(left - 6, py(v) + 4, text, { "text-anchor": "end", class: "tick y" }));
  }
  for (const [v, text] of xTicks) {
    node.append(svg("line", { x1: px(v), x2: px(v), y1: height - bottom, y2: height - bottom + 4, style: "stroke: var(--axis)" }));
    node.append(label(px(v), height - bottom + 17, text, { "text-anchor": "middle", class: "tick x" }));
  }
  node.append(svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, style: "stroke: var(--axis)" }));
  if (x.title) node.append(label((left + width - right) / 2, height - 6, x.title, { "text-anchor": "middle" }));
  if (y.title) node.append(label(0, 0, y.title, { "text-anchor": "middle", transform: `translate(12 ${(top + height - bottom) / 2}) rotate(-90)` }));

  const path = (points) => points.map(([a, b], i) => `${i ? "L" : "M"}${px(a).toFixed(1)} ${py(b).toFixed(1)}`).join("");
  for (const s of series) {
    if (s.band?.length) {
      const around = [...s.band.map(([a, low]) => [a, low]), ...[...s.band].reverse().map(([a, , high]) => [a, high])];
      node.append(svg("path", { d: path(around) + "Z", class: "band", style: `fill: ${s.colour}; opacity: ${s.width > 2 ? 0.18 : 0.1}` }));
    }
    if (s.filled) {
      const ends = [[s.points.at(-1)[0], y0], [s.points[0][0], y0]];
      node.append(svg("path", { d: path([...s.points, ...ends]) + "Z", style: `fill: ${s.colour}; opacity: 0.13` }));
    }
  }
  for (const { x: v, colour } of spec.verticals ?? []) {
    node.append(svg("line", { x1: px(v), x2: px(v), y1: top, y2: height - bottom, "stroke-dasharray": "6 4", style: `stroke: ${colour}; stroke-width: 1.5` }));
  }
  for (const s of series) {
    const style = `stroke: ${s.colour}; stroke-width: ${s.width ?? 1.6}; fill: none`;
    const lines = s.symbol === "diamond" ? [] : [svg("path", { d: path(s.points), class: "line", "data-name": s.name, "stroke-dasharray": s.strokes || null, "stroke-linejoin": "round", style })];
    const dots = s.dots === false ? [] : s.points.map(([a, b]) => {
      const alone = s.points.length === 1; // a line's dashes become a ring
      const size = s.symbol === "diamond" ? 6 : alone ? 5 : (s.width ?? 1.6) > 2 ? 3.2 : 2.3;
      return s.symbol === "diamond"
        ? svg("path", { d: `M${px(a)} ${py(b) - size}l${size} ${size}l${-size} ${size}l${-size} ${-size}Z`, class: "diamond", "data-name": s.name, style: `fill: ${s.colour}` })
        : svg("circle", { cx: px(a).toFixed(1), cy: py(b).toFixed(1), r: size, class: "dot", style: alone && s.strokes ? `fill: var(--card); stroke: ${s.colour}; stroke-width: 2.5` : `fill: ${s.colour}` });
    });
    node.append(...lines, ...dots);
  }
  const entry = (s, ex, ey) => svg("g", { class: "legend" },
    s.points.length > 1 || s.line
      ? svg("line", { x1: ex, x2: ex + 26, y1: ey - 4, y2: ey - 4, "stroke-dasharray": s.strokes || null, style: `stroke: ${s.colour}; stroke-width: ${s.width ?? 1.6}` })
      : svg("circle", { cx: ex + 13, cy: ey - 4, r: 5, style: s.strokes ? `fill: var(--card); stroke: ${s.colour}; stroke-width: 2.5` : `fill: ${s.colour}` }),
    label(ex + 32, ey, cut(s.name, s.width > 2 ? nameWidth / 1.1 : nameWidth), s.width > 2 ? { "font-weight": 600 } : {}));
  if (beside) named.forEach((s, i) => node.append(entry(s, width - right + 12, top + 12 + 19 * i)));
  rows.forEach(({ items }, i) => items.forEach(([s, ex]) => node.append(entry(s, ex + 2, height + 14 + 20 * i))));

  const stops = [...new Set(series.filter((s) => !s.silent).flatMap((s) => s.points.map((p) => p[0])))].sort((a, b) => a - b);
  const cursor = svg("line", { y1: top, y2: height - bottom, visibility: "hidden", style: "stroke: var(--axis); stroke-dasharray: 2 3" });
  node.append(cursor);
  return {
    node,
    count: stops.length,
    columns: stops.length,
    locate(a, b) {
      if (a < left - 8 || a > width - right + 8 || b > height || !stops.length) return null;
      return stops.reduce((found, v, i) => (Math.abs(px(v) - a) < Math.abs(px(stops[found]) - a) ? i : found), 0);
    },
    at(i) {
      const v = stops[i];
      const there = series.filter((s) => !s.silent).flatMap((s) => s.points.filter((p) => p[0] === v).map((p) => [s, p]));
      there.sort((one, two) => two[1][1] - one[1][1]);
      const lines = there.slice(0, 24).map(([s, p]) => [s.colour, s.tell ? s.tell(p) : `${s.name} ${formatY(p[1])}`]);
      return { x: px(v), y: top, title: `${x.title ?? ""} ${formatX(v)}`.trim(), lines };
    },
    mark(i) {
      cursor.setAttribute("visibility", i === null ? "hidden" : "visible");
      if (i !== null) for (const end of ["x1", "x2"]) cursor.setAttribute(end, px(stops[i]));
    },
  };
}

function panels(charts, width, gap = 16) { // charts in rows, as many beside each other as fit
  const positions = [];
  let [x, y, tallest] = [0, 0, 0];
  for (const chart of charts) {
    const w = Number(chart.node.getAttribute("width"));
    if (x && x + w > width + 1) [x, y, tallest] = [0, y + tallest + gap, 0];
    positions.push([x, y]);
    tallest = Math.max(tallest, Number(chart.node.getAttribute("height")));
    x += w + gap;
  }
  const height = y + tallest;
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "chart" });
  charts.forEach((chart, i) => {
    chart.node.setAttribute("x", positions[i][0]);
    chart.node.setAttribute("y", positions[i][1]);
    node.append(chart.node);
  });
  const starts = charts.map((_, i) => charts.slice(0, i).reduce((sum, c) => sum + c.count, 0));
  const which = (i) => starts.findLastIndex((start) => i >= start);
  return {
    node,
    count: starts.at(-1) + charts.at(-1).count,
    columns: charts[0].columns,
    locate(a, b) {
      for (const [i, chart] of charts.entries()) {
        const [x, y] = positions[i];
        const inside = a >= x && b >= y && a <= x + Number(chart.node.getAttribute("width")) && b <= y + Number(chart.node.getAttribute("height"));
        const found = inside ? chart.locate(a - x, b - y) : null;
        if (found !== null) return starts[i] + found;
      }
      return null;
    },
    at(i) {
      const k = which(i);
      const found = charts[k].at(i - starts[k]);
      return { ...found, x: found.x + positions[k][0], y: found.y + positions[k][1] };
    },
    mark(i) { charts.forEach((chart, k) => chart.mark(i !== null && which(i) === k ? i - starts[k] : null)); },
  };
}
