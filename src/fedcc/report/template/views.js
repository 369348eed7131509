// What is drawn of a scenario, each from the data of the page: {label, head, rows, draw(width)}, or null without data.

const state = { view: "final", data: "", hidden: new Set(), paper: true, empty: false, scene: "", tab: "curves", subject: "curve", a: "", b: "", find: "" };
const scenes = new Map(content.scenes.map((s) => [s.id, s]));
const scene = () => scenes.get(state.scene);
const runsOf = (row) => row.runs.map((i) => content.runs[i]);
const shown = (s) => s.rows.filter((r) => !state.hidden.has(r.method));
const percent = (v) => `${fixed(v)} %`;

function lookOf(s, row) { // variants of one method differ by hue, as methods do elsewhere
  const look = content.looks[row.method];
  const variants = s.rows.filter((r) => r.variant);
  return row.variant && variants.length > 1
    ? { colour: colourOf(content.palette[variants.indexOf(row) % content.palette.length]), strokes: "", width: 1.8 }
    : { ...look, colour: colourOf(look.colour) };
}

function average(lines) {
  const length = highest(lines.map((l) => l.length), 0);
  const columns = Array.from({ length }, (_, i) => known(lines.map((l) => l[i])));
  const each = (f) => columns.map((values) => (values.length ? f(values) : null));
  return { mean: each(mean), low: each((v) => lowest(v)), high: each((v) => highest(v)) };
}

const ends = (series) => `At the end ${series.filter((s) => !s.quiet).map((s) => `${s.name} ${percent(s.points.at(-1)[1])}`).join(", ")}.`;
const byEnd = (series) => series.sort((one, two) => two.points.at(-1)[1] - one.points.at(-1)[1]);
const wholeRounds = (asked, width) => {
  const step = Math.ceil(asked / (width < 600 ? 6 : 16));
  return Array.from({ length: asked }, (_, i) => i + 1).filter((t) => t % step === 0 && (step === 1 || t + step / 2 < asked + 1)).map((t) => [t, String(t)]);
};

function curveChart(lines, { asked, bands, height = 380 }) { // lines: {name, look, curves}
  const later = asked + Math.max(1, asked / 10); // a method may need more rounds than were asked for
  const series = [];
  const extra = [];
  for (const { name, look, curves } of lines) {
    const { mean: middle, low, high } = average(curves);
    const kept = middle.map((_, i) => i).filter((i) => middle[i] !== null && i < asked);
    const end = middle.findLastIndex((v) => v !== null);
    const beyond = end >= asked;
    const points = kept.map((i) => [i + 1, middle[i]]);
    const style = { colour: look.colour, strokes: look.strokes, width: look.width };
    const band = curves.length > 1 && (look.width > 2 || bands) ? kept.map((i) => [i + 1, low[i], high[i]]) : [];
    const title = name + (beyond ? ` (◆ after ${end + 1} rounds)` : "");
    const last = beyond ? [later, middle[end]] : null;
    if (points.length) series.push({ ...style, name: title, points, band, dots: points.length < 40, last: middle[end], tell: ([, v]) => `${name} ${percent(v)}` });
    if (last && points.length) extra.push({ ...style, name, strokes: "2 3", width: 1, points: [points.at(-1), last], dots: false, quiet: true, silent: true });
    if (last) extra.push({ ...style, name, points: [last], symbol: "diamond", quiet: points.length > 0, tell: ([, v]) => `${name} ${percent(v)} after ${end + 1} rounds` });
  }
  series.sort((one, two) => two.last - one.last);
  const ordered = [...series].sort((one, two) => one.width - two.width); // ours is drawn last
  const label = `At the end ${series.map((s) => `${s.name} ${percent(s.last)}`).join(", ")}.`;
  return {
    label,
    head: ["round", ...lines.map((l) => l.name)],
    rows: roundRows(lines.map((l) => average(l.curves).mean)),
    draw(width) {
      const ticks = wholeRounds(asked, width);
      const more = extra.some((s) => s.symbol) ? [[later, "later"]] : [];
      const legend = new Map(series.map((s, i) => [s.name, i]));
      return lineChart({
        height, legend: true,
        x: { title: "round", ticks: [...ticks, ...more], range: [Math.min(1, asked), more.length ? later : Math.max(asked, 2)], format: (v) => (v === later ? "later" : v) },
        y: { zero: true, format: (v) => `${Number(v.toFixed(2))} %` },
        series: [...extra, ...ordered].map((s) => ({ ...s, order: legend.get(s.name) })),
      }, width);
    },
  };
}

const roundRows = (curves) => Array.from({ length: highest(curves.map((c) => c.length), 0) }, (_, i) => [i + 1, ...curves.map((c) => (c[i] === null || c[i] === undefined ? null : Number(c[i].toFixed(4))))])
  .filter((row) => known(row.slice(1)).length);

function against(s, title, xOf, format) { // accuracy against something that adds up over the rounds
  const series = [];
  for (const row of shown(s)) {
    const runs = runsOf(row);
    const x = xOf(runs[0]);
    const { mean: middle } = average(runs.map((r) => r.curve));
    if (!x.length || !x.at(-1)) continue;
    const points = x.length === middle.length
      ? middle.map((v, i) => [x[i], v]).filter(([at, v]) => v !== null && at > 0)
      : [[x.at(-1), middle.at(-1)]];
    const { colour, strokes, width } = lookOf(s, row);
    if (points.length) series.push({ name: row.label, colour, strokes, width, points, dots: points.length < 40, tell: ([at, v]) => `${row.label} ${percent(v)} after ${format(at)}` });
  }
  if (!series.length) return null;
  byEnd(series);
  return {
    label: ends(series),
    head: ["method", title, "accuracy (%)"],
    rows: series.flatMap((s) => s.points.map(([at, v]) => [s.name, at, Number(v.toFixed(4))])),
    draw: (width) => lineChart({ height: 340, legend: true, x: { title, log: true, format }, y: { zero: true, format: (v) => `${v} %` }, series }, width),
  };
}

function table(title, rows, columns, values, corner) { // numbers of a chart of cells
  return { label: title, head: [corner, ...columns], rows: rows.map((name, r) => [name, ...values[r]]) };
}

const views = {
  leads() {
    const rows = content.leads.filter((l) => (state.data === "" || l.data === state.data) && l.margins[state.view]).map((l) => ({ ...l, ...l.margins[state.view] }));
    if (!rows.length) return null;
    return {
      label: rows.map((r) => `${r.title}: FedCC ${percent(r.value)}, ${signed(r.points)} points over ${r.rival}`).join("; ") + ".",
      head: ["scenario", "FedCC (%)", "nearest rival", "lead (points)", "over", "the paper's nearest rival", "the paper's lead (points)"],
      rows: rows.map((r) => [r.title, r.value, r.rival, r.points, r.note || "all seeds", r.printed?.rival ?? null, state.view === "final" ? (r.printed?.points ?? null) : null]),
      draw: (width) => leadChart(rows.map((r) => ({ ...r, printed: state.view === "final" ? r.printed : null })), width),
    };
  },
  curves(s) {
    const lines = shown(s).map((row) => ({ name: row.label, look: lookOf(s, row), curves: runsOf(row).map((r) => r[state.subject]).filter((c) => c.length) })).filter((l) => l.curves.length);
    if (!lines.length) return null;
    return curveChart(lines, { asked: highest(shown(s).flatMap((row) => runsOf(row).map((r) => r.asked)), 1), bands: lines.length <= 6 });
  },
  log(s) {
    const log = s.logs[fill($("logged"), s.logs.map((l, i) => [i, `${l.label}, seed ${l.seed}`]))];
    if (!log) return null;
    const names = Object.keys(log.series);
    const clients = Object.keys(log.series[names[0]]);
    const lines = names.flatMap((name) => Object.entries(log.series[name]).map(([client, values]) => [name, client, values]));
    return {
      label: `${log.label}, seed ${log.seed}: ${names.map((name) => content.logged[name]).join(", ")} by round, ${clients.length} clients.`,
      head: ["noted", "client", "round", "value"],
      rows: lines.flatMap(([name, client, values]) => values.map((v, i) => [content.logged[name], client, i + 1, v])),
      draw(width) {
        const each = width < 600 ? width : Math.floor((width - 16 * (names.length - 1)) / names.length);
        return panels(names.map((name) => {
          const series = Object.entries(log.series[name]).map(([client, values], k, list) => ({ name: `client ${client}`, colour: paletteColour(k, list.length), width: 1.4, points: values.map((v, i) => [i + 1, v]).filter(([, v]) => v !== null), dots: values.length === 1 }));
          const rounds = highest(Object.values(log.series[name]).map((v) => v.length), 1);
          return lineChart({ height: 230, title: content.logged[name], x: { title: "round", ticks: wholeRounds(rounds, 400), range: [1, Math.max(2, rounds)] }, y: { zero: true, format: (v) => String(Number(v.toFixed(3))) }, series }, each);
        }), width);
      },
    };
  },
  images: (s) => against(s, "images trained on", (run) => run.images, unit),
  sent: (s) => against(s, "bytes sent", (run) => run.sent, (v) => unit(v, ["B", "kB", "MB", "GB", "TB"])),
  seconds: (s) => against(s, "seconds", (run) => (run.seconds === null ? [] : [run.seconds]), (v) => unit(v, ["s", "ks"])),
  "by-class"(s) {
    const found = s.confusions.filter((c) => !state.hidden.has(c.method) && c.right.length === s.confusions[0].right.length);
    if (!found.length) return null;
    const [values, names, classes] = [found.map((c) => c.right), found.map((c) => c.label), found[0].names];
    const span = (row) => `from ${percent(lowest(known(row)))} to ${percent(highest(known(row)))}`;
    return {
      ...table(`Accuracy of ${names.length} methods on ${classes.length} classes: ${names.slice(0, 20).map((name, r) => `${name} ${span(values[r])}`).join(", ")}.`, names, classes, values, "method"),
      draw: (width) => heatMap({ rows: names, columns: classes, values, most: 100, format: (v) => fixed(v, 0), unit: " %", xTitle: "class", emphasis: found.flatMap((c, r) => (c.method === "fedcc" ? [r] : [])), tell: (r, c) => `${names[r]}, class ${classes[c]}: ${percent(values[r][c])}` }, width),
    };
  },
  confusion(s) {
    const found = s.confusions[fill($("confused"), s.confusions.map((c, i) => [i, `${c.label}, seed ${c.seed}`]))];
    const rows = found && matrix(found);
    if (!rows) return null;
    const { names } = found;
    const values = rows.map((row) => { const sum = row.reduce((a, b) => a + b, 0); return row.map((n) => (n ? Number(((100 * n) / sum).toFixed(2)) : null)); });
    const right = names.map((name, c) => `${name} ${percent(values[c][c] ?? 0)}`);
    return {
      ...table(`${found.label}, seed ${found.seed}: accuracy ${right.slice(0, 30).join(", ")}.`, names, names, rows, "label, then predicted as"),
      draw: (width) => heatMap({ rows: names, columns: names, values, most: 100, format: (v) => fixed(v, 0), unit: " %", xTitle: "predicted", yTitle: "label", tell: (r, c) => `${names[r]} as ${names[c]}: ${rows[r][c]} samples, ${percent(values[r][c] ?? 0)}` }, width),
    };
  },
  "by-client"(s) {
    const listed = s.clients.filter((c) => !state.hidden.has(c.method));
    const tests = Object.keys(content.tests).filter((test) => listed.some((c) => c.tests[test]));
    const test = tests[fill($("tested"), tests.map((name, i) => [i, content.tests[name]]))];
    const found = listed.filter((c) => c.tests[test]);
    if (!found.length) return null;
    const clients = [...new Set(found.flatMap((c) => Object.keys(c.tests[test])))].sort((a, b) => a - b);
    const values = found.map((c) => clients.map((k) => c.tests[test][k] ?? null));
    const names = found.map((c) => c.label);
    return {
      ...table(`Accuracy of ${clients.length} clients' own models, test data ${content.tests[test]}: ${names.map((name, r) => `${name} ${percent(mean(known(values[r])))} on average`).join(", ")}.`, names, clients.map((k) => `client ${k}`), values, "method"),
      draw: (width) => heatMap({ rows: names, columns: clients, values, most: 100, format: (v) => fixed(v, 0), unit: " %", xTitle: "client", emphasis: found.flatMap((c, r) => (c.method === "fedcc" ? [r] : [])), tell: (r, c) => `${names[r]}, client ${clients[c]}: ${percent(values[r][c])}` }, width),
    };
  },
  partition(s) {
    const part = s.partitions[fill($("seed"), s.partitions.map((p, i) => [i, `seed ${p.seed}`]))];
    if (!part) return null;
    const values = part.counts.map((row) => row.map((n) => n || null));
    const [clients, classes] = [values.map((_, k) => String(k)), values[0].map((_, c) => String(c))];
    const held = known(values.flat());
    const most = highest(held, 1);
    return {
      ...table(`Private samples of ${clients.length} clients in ${classes.length} classes: 0, or ${lowest(held, most)} to ${most} in ${held.length} of ${clients.length * classes.length} cells.`, clients, classes, part.counts, "client, then class"),
      draw: (width) => heatMap({ rows: clients, columns: classes, values, most, xTitle: "class", yTitle: "client", unit: " samples", tell: (r, c) => `client ${r}, class ${c}: ${part.counts[r][c]} samples` }, width),
    };
  },
  known(s) {
    const found = s.known[fill($("knowing"), s.known.map((k, i) => [i, `${k.label}, seed ${k.seed}`]))];
    if (!found) return null;
    const values = found.rows.map((row) => row.map((v) => (v === null ? null : Number((100 * v).toFixed(1)))));
    return {
      ...table(`${found.label}, seed ${found.seed}: what ${found.clients.length} clients know of ${found.names.length} classes, ${percent(mean(known(values.flat())))} on average.`, found.clients, found.names, values, "client, then class"),
      draw: (width) => heatMap({ rows: found.clients, columns: found.names, values, most: 100, ramp: "orange", format: (v) => fixed(v, 0), unit: " %", xTitle: "class", yTitle: "client", tell: (r, c) => `client ${found.clients[r]}, class ${found.names[c]}: ${percent(values[r][c])} known` }, width),
    };
  },
  margins(s) {
    const series = [];
    for (const a of compared(s).filter((a) => a.margins)) {
      const pick = a.margins.models.find((m) => m.name === "clients") ?? a.margins.models.find((m) => m.name === "global") ?? a.margins.models[0];
      if (!pick) continue;
      const { colour } = lookOf(s, s.rows.find((r) => r.label === a.label) ?? a);
      const edges = a.margins.edges;
      const points = pick.counts.flatMap((n, i) => [[edges[i], Math.max(n, 0.7)], [edges[i + 1], Math.max(n, 0.7)]]); // an empty bin lies on the axis
      series.push({ name: `${a.label}: mean ${fixed(pick.mean, 3)}`, colour, width: 1.8, points, dots: false, filled: true, mean: pick.mean, counts: pick.counts, edges, tell: ([, n]) => `${a.label}: ${n < 1 ? 0 : n} samples` });
    }
    return series.length ? {
      label: `Histograms of decision margins. ${series.map((t) => t.name).join("; ")}.`,
      head: ["method", "from", "to", "samples"],
      rows: series.flatMap((t) => t.counts.map((n, i) => [t.name, t.edges[i], t.edges[i + 1], n])),
      draw: (width) => lineChart({ height: 320, legend: true, x: { title: "margin", range: [-1, 1], format: (v) => fixed(v, 2) }, y: { title: "samples", log: true, range: [0.7, 1.5 * highest(series.flatMap((t) => t.counts), 1)], format: (v) => unit(v) }, series, verticals: series.map((t) => ({ x: t.mean, colour: t.colour })) }, width),
    } : null;
  },
  embeddings(s) {
    const found = compared(s).filter((a) => a.embeddings).flatMap((a) => a.embeddings.panels.map((p) => ({ ...p, label: a.label, labels: a.embeddings.labels })));
    if (!found.length) return null;
    const title = (p) => `${p.label} ${p.name}` + (p.client === null || p.client === undefined ? "" : ` (client ${p.client})`);
    return {
      label: `Points coloured by class. ${found.map((p) => `${p.label} ${p.name}: purity ${p.purity.toFixed(2)}`).join("; ")}.`,
      head: ["panel", "class", "x", "y"],
      rows: found.flatMap((p) => p.x.map((_, i) => [title(p), p.labels[i], p.x[i], p.y[i]])),
      draw(width) {
        const columns = Math.min(found.length, width < 600 ? 2 : 4);
        const size = Math.floor((width - 16 * (columns - 1)) / columns);
        return panels(found.map((p) => cloud({ ...p, title: title(p), note: `purity ${p.purity.toFixed(2)}` }, Math.min(size, 380))), width);
      },
    };
  },
  example(s) {
    const runs = s.analyses.filter((a) => a.example);
    const run = runs[fill($("example-of"), runs.map((a, i) => [i, `${a.label}, seed ${a.seed}`]))];
    if (!run) return null;
    const e = run.example;
    const said = `Public image ${e.public}` + (e.label === null ? "" : `; hidden label: ${e.classes[e.label]}`) + "." +
      (e.accuracy ? ` Over all public images the aggregate with “unknown” is right in ${percent(e.accuracy.unknown)}, the plain mean in ${percent(e.accuracy.plain)}.` : "");
    $("example-image").replaceChildren(el("img", { src: e.image, alt: `public image ${e.public}` }), el("p", {}, said));
    const weights = e.clients.reduce((sum, c) => sum + c.weight, 0) || 1;
    const names = [...e.clients.map((c) => `client ${c.client}, trust ${Math.round((100 * c.weight) / weights)} %`), "aggregate"];
    const beliefs = [...e.clients.map((c) => c.plain), e.aggregates.unknown, e.aggregates.plain];
    const weight = e.classes.map((_, c) => highest(beliefs.map((p) => p[c])) + (c === e.label ? 2 : 0));
    const kept = [...weight.keys()].sort((a, b) => weight[b] - weight[a]).slice(0, 16).sort((a, b) => a - b); // of many classes
    const of = (p) => [...kept.map((c) => 100 * p[c]), p.length > e.classes.length ? 100 * p[e.classes.length] : null];
    const columns = [...kept.map((c) => e.classes[c]), "unknown"];
    const sides = [["unknown", "with “unknown”, weighted by trust"], ["plain", "without it, plain mean"]]
      .map(([side, title]) => ({ side, title, values: [...e.clients.map((c) => of(c[side])), of(e.aggregates[side])] }));
    const best = (p) => { const most = highest(p); return `${e.classes[p.indexOf(most)] ?? "unknown"} (${Math.round(100 * most)} %)`; };
    return {
      label: `Probabilities of ${e.clients.length} clients for public image ${e.public}, and their aggregate. The aggregate with “unknown” says ${best(e.aggregates.unknown)}. The aggregate without “unknown” says ${best(e.aggregates.plain)}.`,
      head: ["reading", "who", ...columns],
      rows: sides.flatMap(({ title, values }) => values.map((row, r) => [title, names[r], ...row.map((v) => (v === null ? null : Number(v.toFixed(2))))])),
      draw(width) {
        const two = width >= 620;
        const each = two ? Math.floor((width - 16) / 2) : width;
        return panels(sides.map(({ title, values }, i) => heatMap({ title, rows: two && i ? names.map(() => "") : names, columns, values, most: 100, ramp: "orange", format: (v) => fixed(v, 0), unit: " %", tell: (r, c) => `${names[r]}: ${columns[c]} ${values[r][c] === null ? "–" : percent(values[r][c])}` }, each)), width);
      },
    };
  },
};

function matrix({ run, right }) { // of a run's own record, once the archive is unpacked
  const { place } = content.runs[run];
  if (!records || !place) return null;
  const rows = JSON.parse(new TextDecoder().decode(recordBytes(content.runs[run]))).confusion;
  const square = Array.isArray(rows) && rows.length === right.length && rows.every((row) => Array.isArray(row) && row.length === right.length && row.every(Number.isInteger));
  return square ? rows : null;
}

function compared(s) { // two runs at a time: FedAvg and FedCC as in the paper, unless others are chosen
  const there = s.analyses;
  const index = (method, otherwise) => { const i = there.findIndex((a) => a.method === method); return i < 0 ? otherwise : i; };
  const fresh = $("compared").dataset.scene !== s.id;
  [["one", index("fedavg", 0)], ["other", index("fedcc", Math.min(1, there.length - 1))]].forEach(([id, usual]) => {
    fill($(id), there.map((a, i) => [i, a.label]));
    if (fresh && there.length) $(id).value = usual;
  });
  $("compared").dataset.scene = s.id;
  $("compared").hidden = there.length < 3;
  return [...new Set([$("one").value, $("other").value])].map((i) => there[Number(i)]).filter(Boolean);
}
