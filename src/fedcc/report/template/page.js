"use strict";
(() => {
  const content = JSON.parse(document.getElementById("content").textContent);
  const $ = (id) => document.getElementById(id);
  const all = (selector, from = document) => [...from.querySelectorAll(selector)];
  const state = { view: "final", data: "", hidden: new Set(), subject: "curves" };

  // ---------------------------------------------------------------- tables

  function sort(table) {
    const body = table.tBodies[0];
    const head = table.querySelector("th[aria-sort]");
    const rows = [...body.rows];
    rows.forEach((row, i) => (row.dataset.place ??= i));
    const place = (row) => Number(row.dataset.place);
    if (!head) return body.append(...rows.sort((a, b) => place(a) - place(b)));
    const column = head.cellIndex;
    const sign = head.getAttribute("aria-sort") === "descending" ? -1 : 1;
    const value = (row) => {
      const cell = row.cells[column];
      if (column === 0) return cell.textContent.trim().toLowerCase();
      return state.view in cell.dataset ? Number(cell.dataset[state.view]) : null;
    };
    body.append(...rows.sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === null || y === null) return (x === null) - (y === null) || place(a) - place(b);
      return (x < y ? -sign : x > y ? sign : 0) || place(a) - place(b);
    }));
  }

  for (const table of all("table.sortable")) {
    for (const button of all("thead tr:last-child button", table)) {
      button.addEventListener("click", () => {
        const head = button.closest("th");
        const first = head.cellIndex === 0 ? "ascending" : "descending";
        const second = first === "ascending" ? "descending" : "ascending";
        const next = { [first]: second, [second]: null }[head.getAttribute("aria-sort")];
        all("th[aria-sort]", table).forEach((h) => h.removeAttribute("aria-sort"));
        if (next !== null) head.setAttribute("aria-sort", next ?? first);
        sort(table);
      });
    }
  }

  function apply() {
    document.body.dataset.view = state.view;
    for (const item of all("[data-data]")) item.hidden = state.data !== "" && item.dataset.data !== state.data;
    for (const section of all("section.table")) {
      section.hidden = state.data !== "" && !section.dataset.sets.split("\n").includes(state.data);
    }
    for (const row of all("tr[data-method]")) row.hidden = state.hidden.has(row.dataset.method);
    search();
    all("table.sortable").forEach(sort);
    listScenes();
  }

  function search() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const group of all(".groups > details")) {
      group.hidden =
        (state.data !== "" && group.dataset.data !== state.data) ||
        state.hidden.has(group.dataset.method) ||
        !words.every((word) => group.dataset.text.includes(word));
    }
  }

  const radios = (name, change) =>
    all(`input[name="${name}"]`).forEach((i) => i.addEventListener("change", () => change(i.value)));
  radios("view", (value) => { state.view = value; apply(); });
  radios("data", (value) => { state.data = value; apply(); });
  radios("subject", (value) => { state.subject = value; redraw(); });
  $("search").addEventListener("input", search);
  $("paper")?.addEventListener("change", (e) => (document.body.dataset.paper = e.target.checked ? "yes" : ""));
  $("methods").addEventListener("change", (e) => {
    if (e.target.checked) state.hidden.delete(e.target.value);
    else state.hidden.add(e.target.value);
    apply();
  });
  for (const button of all("#methods button")) {
    button.addEventListener("click", () => {
      for (const box of all("#methods input")) {
        box.checked = button.dataset.all !== "";
        if (box.checked) state.hidden.delete(box.value);
        else state.hidden.add(box.value);
      }
      apply();
    });
  }
  document.addEventListener("click", (e) => { if (!$("methods").contains(e.target)) $("methods").open = false; });
  document.addEventListener("keydown", (e) => {
    if (e.key !== "Escape" || !$("methods").open) return;
    $("methods").open = false;
    $("methods").querySelector("summary").focus();
  });

  function placeMenu() { // all of it on the screen: moved to the left, and scrolled inside, as far as needed
    const menu = $("methods");
    if (!menu.open) return;
    const panel = menu.querySelector("div");
    const edge = 8;
    const room = () => innerHeight - edge - panel.getBoundingClientRect().top;
    panel.style.left = panel.style.maxHeight = "";
    if (room() < 240) menu.scrollIntoView({ block: "start" });
    const { left, right } = panel.getBoundingClientRect();
    panel.style.left = `${Math.max(edge - left, Math.min(0, document.documentElement.clientWidth - edge - right))}px`;
    panel.style.maxHeight = `${room()}px`;
  }
  $("methods").addEventListener("toggle", placeMenu);
  addEventListener("resize", placeMenu);

  function reveal() {
    const target = location.hash.length > 1 && $(decodeURIComponent(location.hash.slice(1)));
    if (target && target.tagName === "DETAILS") {
      target.open = true;
      target.hidden = false;
      target.scrollIntoView({ block: "center" });
    }
  }
  addEventListener("hashchange", reveal);

  // ---------------------------------------------------------------- figures

  const config = { responsive: true, displayModeBar: false };
  let printing = false;
  const dark = () => !printing && (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const ink = () => getComputedStyle(document.body).color;
  const colour = (look) => look.colour[dark() ? 1 : 0];
  const narrow = () => !printing && innerWidth < 740;
  const tight = () => printing || narrow();

  function shade(i, number) { // a colour of as many: the palette, or a wheel of hues whose neighbours differ in shade
    if (number <= content.palette.length) return colour({ colour: content.palette[i] });
    return `hsl(${Math.round((360 * i) / number)} 65% ${(dark() ? [64, 82] : [36, 22])[i % 2]}%)`;
  }

  function layout(more = {}) {
    const grid = dark() ? "rgba(255,255,255,0.10)" : "rgba(0,0,0,0.08)";
    const axis = { gridcolor: grid, zeroline: false, linecolor: grid, automargin: true, ...more.axis };
    const axes = {};
    for (const name of Object.keys(more).filter((k) => /^[xy]axis/.test(k))) axes[name] = { ...axis, ...more[name] };
    const { axis: _, lines: __, label: ___, ...rest } = more;
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: ink() },
      margin: { l: 48, r: 12, t: 16, b: narrow() && more.legend ? 60 + 11 * Math.ceil((more.lines ?? 2)) : 44 },
      hoverlabel: { font: { family: "system-ui, sans-serif" }, namelength: -1 },
      ...rest, xaxis: { ...axis, ...more.xaxis }, yaxis: { ...axis, ...more.yaxis }, ...axes,
    };
  }

  const whole = (rounds) => (rounds > 8 ? { tickformat: "d" } : { tickformat: "d", dtick: 1 }); // ticks at rounds alone
  const legend = () => narrow()
    ? { orientation: "h", y: 0, yref: "container", yanchor: "bottom", x: 0, font: { size: 11 } }
    : { x: 1.01, y: 1, font: { size: 12 }, tracegroupgap: 2 };

  function average(lines) {
    const length = Math.max(...lines.map((l) => l.length));
    const rows = { mean: [], low: [], high: [] };
    for (let i = 0; i < length; i++) {
      const values = lines.map((l) => l[i]).filter((v) => v !== null && v !== undefined);
      rows.mean.push(values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
      rows.low.push(values.length ? Math.min(...values) : null);
      rows.high.push(values.length ? Math.max(...values) : null);
    }
    return rows;
  }

  const bytes = (n) => {
    const units = ["B", "kB", "MB", "GB", "TB"];
    const i = n > 0 ? Math.min(4, Math.floor(Math.log10(n) / 3)) : 0;
    return `${(n / 1000 ** i).toPrecision(3)} ${units[i]}`;
  };

  const byId = new Map(content.scenes.map((s) => [s.id, s]));
  const scene = () => byId.get($("scene").value);
  const shown = (s) => s.rows.filter((r) => !state.hidden.has(r.method));
  const note = (text) => `<span style="color:${getComputedStyle($("absent")).color}">${text}</span>`;

  function lookOf(s, row) { // variants of one method differ by hue, as methods do elsewhere
    const look = content.looks[row.method];
    const variants = s.rows.filter((r) => r.variant);
    return row.variant && variants.length > 1 ? { colour: content.palette[variants.indexOf(row) % content.palette.length], dash: "solid", width: 1.8 } : look;
  }

  const figures = {
    curves(s) {
      const rows = shown(s).filter((r) => r[state.subject].length);
      $("curves-note").textContent = state.subject === "curves"
        ? "Accuracy of the method's prediction on the global test set (%); mean over seeds, shaded from least to most."
        : "How often the targets that the server sends for public samples name the hidden label (%); a diagnostic.";
      if (!rows.length) return null;
      const traces = [];
      const asked = Math.max(...rows.map((r) => r.asked)); // a method may need more rounds: one marker at the end
      const later = "later";
      const order = [...rows].sort((a, b) => (content.looks[a.method].width) - (content.looks[b.method].width));
      for (const row of order) {
        const { mean, low, high } = average(row[state.subject]);
        const look = lookOf(s, row);
        const pick = (v) => v.filter((_, i) => mean[i] !== null && i < asked);
        const x = pick(mean.map((_, i) => i + 1));
        const end = mean.findLastIndex((v) => v !== null);
        const name = row.label + (end < asked ? "" : ` (◆ after ${end + 1} rounds)`);
        const c = colour(look);
        if (row[state.subject].length > 1 && (look.width > 2 || rows.length <= 6)) {
          traces.push({ x: [...x, ...[...x].reverse()], y: [...pick(high), ...pick(low).reverse()], fill: "toself", fillcolor: c, opacity: look.width > 2 ? 0.18 : 0.08, line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: row.label });
        }
        traces.push({ x, y: pick(mean), name, legendgroup: row.label, legendrank: rows.indexOf(row), mode: x.length < 40 ? "lines+markers" : "lines", line: { color: c, dash: look.dash, width: look.width }, marker: { size: look.width > 2 ? 6 : 4, color: c }, hovertemplate: "%{y:.1f}<extra>" + escape(row.label) + "</extra>" });
        if (end >= asked) {
          traces.push({ x: [...x.slice(-1), later], y: [...pick(mean).slice(-1), mean[end]], mode: "lines", line: { color: c, dash: "dot", width: 1 }, hoverinfo: "skip", showlegend: false, legendgroup: row.label });
          traces.push({ x: [later], y: [mean[end]], name, showlegend: false, legendgroup: row.label, mode: "markers", marker: { symbol: "diamond", size: 10, color: c }, hovertemplate: `%{y:.1f} after ${end + 1} rounds<extra>${escape(row.label)}</extra>` });
        }
      }
      const rounds = Array.from({ length: asked }, (_, i) => i + 1);
      const step = Math.ceil(asked / (narrow() ? 6 : 16));
      const ticks = rounds.filter((t) => t % step === 0 && (step === 1 || t + step / 2 < asked));
      const axis = traces.some((t) => t.x.includes(later))
        ? { type: "category", categoryorder: "array", categoryarray: [...rounds, later], tickvals: [...ticks, later], ticktext: [...ticks, later] }
        : whole(asked);
      return [traces, { hovermode: "x unified", legend: legend(), lines: rows.length, xaxis: { title: { text: "round" }, ...axis }, yaxis: { rangemode: "tozero", ticksuffix: " %" } }];
    },
    sent(s) {
      const traces = [];
      for (const row of shown(s)) {
        const sent = row.sent[0];
        if (!sent.length || sent[sent.length - 1] === 0) continue;
        const { mean } = average(row.curves);
        const whole = sent.length === mean.length;
        const kept = mean.map((_, i) => i).filter((i) => mean[i] !== null);
        const look = lookOf(s, row);
        const c = colour(look);
        traces.push({ x: whole ? kept.map((i) => sent[i]) : [sent[sent.length - 1]], y: whole ? kept.map((i) => mean[i]) : [mean[mean.length - 1]], text: (whole ? kept.map((i) => sent[i]) : [sent[0]]).map(bytes), name: row.label, showlegend: false, mode: whole ? "lines+markers" : "markers", line: { color: c, dash: look.dash, width: look.width }, marker: { color: c, size: whole ? 4 : 9 }, hovertemplate: "%{y:.1f} % after %{text}<extra>" + escape(row.label) + "</extra>" });
      }
      return traces.length ? [traces, { xaxis: { type: "log", title: { text: "bytes sent" }, exponentformat: "SI", dtick: 1 }, yaxis: { rangemode: "tozero", ticksuffix: " %" } }] : null;
    },
    partition(s) {
      fill($("seed"), s.partitions.map((p, i) => [i, `seed ${p.seed}`]));
      const part = s.partitions[Number($("seed").value) || 0];
      if (!part) return null;
      const z = part.counts.map((row) => row.map((n) => (n === 0 ? null : n)));
      const [clients, classes] = [z.length, z[0].length];
      const held = z.flat().filter((n) => n !== null);
      const most = Math.max(1, ...held);
      const room = { x: ($("scenario").clientWidth / (tight() ? 1 : 2) - 160) / classes, y: 250 / clients }; // of a cell
      const fits = room.x >= 2 + 5.6 * String(most).length && room.y >= 11;
      const label = `Private samples of ${clients} clients in ${classes} classes: 0, or ${Math.min(most, ...held)} to ${most} in ${held.length} of ${clients * classes} cells.`;
      return [[{ type: "heatmap", z, zmin: 0, zmax: most, texttemplate: fits ? "%{z}" : "", textfont: { size: 10 }, colorscale: "Viridis", reversescale: !dark(), xgap: classes > 40 ? 0 : 1, ygap: clients > 40 ? 0 : 1, colorbar: { thickness: 10, outlinewidth: 0 }, hovertemplate: "client %{y}, class %{x}: %{z}<extra></extra>" }],
        { label, xaxis: { title: { text: "class" }, showgrid: false, tickformat: "d", dtick: classes > 20 ? undefined : 1 }, yaxis: { title: { text: "client" }, autorange: "reversed", showgrid: false, tickformat: "d", dtick: clients > 20 ? undefined : 1 } }];
    },
    log(s) {
      const logs = s.logs;
      fill($("logged"), logs.map((l, i) => [i, `${l.label}, seed ${l.seed}`]));
      const log = logs[Number($("logged").value) || 0];
      if (!log) return null;
      const names = Object.keys(log.series);
      const traces = [];
      const more = { grid: { rows: narrow() ? names.length : 1, columns: narrow() ? 1 : names.length, pattern: "independent", xgap: printing ? 0.2 : 0.12, ygap: 0.3 }, annotations: [], showlegend: false };
      names.forEach((name, i) => {
        const end = i ? i + 1 : "";
        Object.entries(log.series[name]).forEach(([client, values], k, { length }) => traces.push({ x: values.map((_, t) => t + 1), y: values, xaxis: "x" + end, yaxis: "y" + end, mode: values.length === 1 ? "markers" : "lines", line: { color: shade(k, length), width: 1.4 }, marker: { color: shade(k, length) }, hovertemplate: `client ${escape(client)}, round %{x}: %{y}<extra></extra>` }));
        more["xaxis" + end] = { ...whole(Object.values(log.series[name])[0]?.length ?? 0), title: { text: "round", font: { size: 11 } } };
        more["yaxis" + end] = { rangemode: "tozero" };
        more.annotations.push({ text: escape(content.logged[name]), xref: `x${end} domain`, yref: `y${end} domain`, x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", showarrow: false });
      });
      more.margin = { l: 44, r: 12, t: 36, b: 44 };
      more.label = `${log.label}, seed ${log.seed}: ${names.map((name) => content.logged[name]).join(", ")} by round, ${Object.keys(log.series[names[0]]).length} clients.`;
      return [traces, more, narrow() ? 220 * names.length : 280];
    },
    confusion(s) {
      fill($("confused"), s.confusions.map((c, i) => [i, `${c.label}, seed ${c.seed}`]));
      const found = s.confusions[Number($("confused").value) || 0];
      if (!found) return null;
      const classes = found.rows.length;
      const z = found.rows.map((row) => { const all = row.reduce((a, b) => a + b, 0); return row.map((n) => (n === 0 ? null : (100 * n) / all)); });
      const share = z.map((row, c) => row[c] ?? 0);
      const cut = (name) => (name.length > 14 ? name.slice(0, 13) + "…" : name);
      const places = found.names.map((_, c) => c);
      const step = Math.ceil(classes / 30);
      const ticks = places.filter((c) => c % step === 0);
      const cell = ($("scenario").clientWidth - 220) / classes;
      const hover = found.rows.map((row, c) => row.map((n, d) => `${escape(found.names[c])} as ${escape(found.names[d])}: ${n}`));
      const label = `${found.label}, seed ${found.seed}: accuracy ${places.slice(0, 30).map((c) => `${found.names[c]} ${share[c].toFixed(1)} %`).join(", ")}.`;
      const axis = { showgrid: false, tickvals: ticks };
      return [[{ type: "heatmap", z, zmin: 0, zmax: 100, text: hover, texttemplate: cell >= 30 && classes <= 20 ? "%{z:.0f}" : "", textfont: { size: 10 }, colorscale: "Viridis", reversescale: !dark(), xgap: classes > 40 ? 0 : 1, ygap: classes > 40 ? 0 : 1, colorbar: { thickness: 10, outlinewidth: 0, ticksuffix: " %" }, hovertemplate: "%{text} (%{z:.1f} %)<extra></extra>" }],
        { label, xaxis: { ...axis, title: { text: "predicted" }, ticktext: ticks.map((c) => escape(cut(found.names[c]))) }, yaxis: { ...axis, autorange: "reversed", ticktext: ticks.map((c) => `${escape(cut(found.names[c]))} ${share[c].toFixed(0)} %`) } }, Math.max(280, Math.min(640, 90 + 22 * classes))];
    },
    margins(s) {
      let highest = 1;
      const traces = [];
      const lines = [];
      for (const a of compared(s).filter((a) => a.margins)) {
        const pick = a.margins.models.find((m) => m.name === "clients") ?? a.margins.models.find((m) => m.name === "global") ?? a.margins.models[0];
        if (!pick) continue;
        const c = colour(lookOf(s, s.rows.find((r) => r.label === a.label) ?? a));
        const e = a.margins.edges;
        const heights = [...pick.counts, pick.counts[pick.counts.length - 1]]; // an empty bin lies below the axis
        highest = Math.max(highest, ...heights);
        traces.push({ type: "scatter", mode: "lines", line: { shape: "hv", color: c, width: 1.6 }, fill: "tozeroy", fillcolor: c.startsWith("#") ? c + "22" : undefined, x: e, y: heights.map((n) => Math.max(n, 0.1)), text: heights, name: `${a.label}: mean ${pick.mean.toFixed(3)}`, hovertemplate: "%{text} at %{x:.2f}<extra>" + escape(a.label) + "</extra>" });
        lines.push({ type: "line", x0: pick.mean, x1: pick.mean, yref: "paper", y0: 0, y1: 1, line: { color: c, width: 1.4, dash: "dash" } });
      }
      const label = `Histograms of decision margins. ${traces.map((t) => t.name).join("; ")}.`;
      return traces.length ? [traces, { label, shapes: lines, legend: legend(), showlegend: true, xaxis: { title: { text: "margin" }, range: [-1, 1] }, yaxis: { type: "log", range: [Math.log10(0.7), Math.log10(1.5 * highest)], title: { text: "samples" }, exponentformat: "power", dtick: 1 } }] : null;
    },
    embeddings(s) {
      const panels = compared(s).filter((a) => a.embeddings).flatMap((a) => a.embeddings.panels.map((p) => ({ ...p, label: a.label, labels: a.embeddings.labels })));
      if (!panels.length) return null;
      const columns = narrow() ? Math.min(2, panels.length) : Math.min(4, panels.length);
      const rows = Math.ceil(panels.length / columns);
      const more = { grid: { rows, columns, pattern: "independent", xgap: 0.05, ygap: tight() ? 0.3 : 0.16 }, annotations: [], showlegend: false, margin: { l: 8, r: 8, t: tight() ? 48 : 30, b: 8 } };
      const traces = panels.map((p, i) => {
        const end = i ? i + 1 : "";
        const most = Math.max(...p.labels) + 1;
        more["xaxis" + end] = { visible: false };
        more["yaxis" + end] = { visible: false, scaleanchor: "x" + end };
        const who = p.client === null || p.client === undefined ? p.name : `${p.name} (client ${p.client})`;
        more.annotations.push({ text: `${escape(p.label)} ${escape(who)}` + (tight() ? "<br>" : "") + note(` purity ${p.purity.toFixed(2)}`), xref: `x${end} domain`, yref: `y${end} domain`, x: 0.5, y: 1.02, xanchor: "center", yanchor: "bottom", showarrow: false, font: { size: tight() ? 10.5 : 12 } });
        return { x: p.x, y: p.y, xaxis: "x" + end, yaxis: "y" + end, mode: "markers", type: "scatter", text: p.labels.map((l) => `class ${l}`), hovertemplate: "%{text}<extra></extra>", marker: { size: 4, opacity: 0.85, color: p.labels.map((l) => shade(l, most)) } };
      });
      more.label = `Points coloured by class. ${panels.map((p) => `${p.label} ${p.name}: purity ${p.purity.toFixed(2)}`).join("; ")}.`;
      return [traces, more, 30 + rows * (tight() ? 210 : 270)];
    },
  };

  function compared(s) { // two runs at a time: FedAvg and FedCC as in the paper, unless others are chosen
    const there = s.analyses;
    const choices = there.map((a, i) => [i, a.label]);
    const index = (method, otherwise) => Math.max(otherwise, there.findIndex((a) => a.method === method));
    const fresh = $("compared").dataset.scene !== s.id;
    [["one", index("fedavg", 0)], ["other", index("fedcc", Math.min(1, there.length - 1))]].forEach(([id, usual]) => {
      fill($(id), choices);
      if (fresh && there.length) $(id).value = usual;
    });
    $("compared").dataset.scene = s.id;
    $("compared").hidden = there.length < 3;
    return [...new Set([$("one").value, $("other").value])].map((i) => there[Number(i)]).filter(Boolean);
  }

  figures.example = (s) => {
    const box = $("example");
    const runs = s.analyses.filter((a) => a.example);
    fill($("example-of"), runs.map((a, i) => [i, `${a.label}, seed ${a.seed}`]));
    const run = runs[Number($("example-of").value) || 0];
    if (!run) return null;
    const e = run.example;
    box.replaceChildren();
    const left = document.createElement("div");
    const image = new Image();
    image.src = e.image;
    image.alt = `public image ${e.public}`;
    const said = document.createElement("p");
    said.textContent = `Public image ${e.public}` + (e.label === null ? "" : `; hidden label: ${e.classes[e.label]}`) + "." +
      (e.accuracy ? ` Over all public images the aggregate with “unknown” is right in ${e.accuracy.unknown.toFixed(1)} %, the plain mean in ${e.accuracy.plain.toFixed(1)} %.` : "");
    left.append(image, said);
    const plot = document.createElement("div");
    plot.className = "plot";
    box.append(left, plot);
    const weights = e.clients.reduce((sum, c) => sum + c.weight, 0) || 1;
    const share = (c) => Math.round((100 * c.weight) / weights);
    const names = [...e.clients.map((c) => narrow() ? `${c.client} (${share(c)} %)` : `client ${c.client}, trust ${share(c)} %`), "aggregate"];
    // of many classes those that somebody believes in
    const beliefs = [...e.clients.map((c) => c.plain), e.aggregates.unknown, e.aggregates.plain];
    const weight = e.classes.map((_, c) => Math.max(...beliefs.map((p) => p[c])) + (c === e.label ? 2 : 0));
    const kept = [...weight.keys()].sort((a, b) => weight[b] - weight[a]).slice(0, 16).sort((a, b) => a - b);
    const columns = [...kept.map((c) => e.classes[c]), "unknown"];
    const of = (p) => [...kept.map((c) => p[c]), p.length > e.classes.length ? p[e.classes.length] : null];
    const panel = (z, axis, hide) => ({ type: "heatmap", z, x: columns, y: names, xaxis: "x" + axis, yaxis: "y" + axis, zmin: 0, zmax: 1, showscale: hide && !narrow(), colorscale: dark() ? [[0, "#1d2024"], [0.5, "#9a4a0a"], [1, "#ffb37a"]] : [[0, "#ffffff"], [0.5, "#f0a868"], [1, "#b34700"]], xgap: 1, ygap: 1, colorbar: { thickness: 8, outlinewidth: 0, tickformat: ".0%" }, hovertemplate: "%{y}: %{x} %{z:.1%}<extra></extra>" });
    const z1 = [...e.clients.map((c) => of(c.unknown)), of(e.aggregates.unknown)];
    const z2 = [...e.clients.map((c) => of(c.plain)), of(e.aggregates.plain)];
    const titles = ["with “unknown”, weighted by trust", "without it, plain mean"];
    const more = { grid: { rows: narrow() ? 2 : 1, columns: narrow() ? 1 : 2, pattern: "independent", xgap: 0.06, ygap: 0.28 }, margin: { l: narrow() ? 70 : 110, r: 8, t: 30, b: 70 }, annotations: titles.map((text, i) => ({ text, xref: `x${i ? 2 : ""} domain`, yref: `y${i ? 2 : ""} domain`, x: 0, y: 1.02, xanchor: "left", yanchor: "bottom", showarrow: false })) };
    for (const end of ["", 2]) { // beside each other the two share the clients' names
      more["xaxis" + end] = { type: "category", showgrid: false, tickangle: -45, dtick: 1 };
      more["yaxis" + end] = { type: "category", autorange: "reversed", showgrid: false, showticklabels: end === "" || narrow(), dtick: names.length > 25 ? undefined : 1 };
    }
    const tall = Math.min(520, 110 + 20 * names.length);
    more.label = `Probabilities of ${e.clients.length} clients for public image ${e.public}, and their aggregate. ` +
      [["unknown", "with"], ["plain", "without"]].map(([side, how]) => `The aggregate ${how} “unknown” says ${best(e, e.aggregates[side])}.`).join(" ");
    return [[panel(z1, "", true), panel(z2, "2", false)], more, narrow() ? 2 * tall : tall];
  };

  const best = (e, p) => { // the class that a prediction names
    const most = Math.max(...p);
    return `${e.classes[p.indexOf(most)] ?? "unknown"} (${Math.round(100 * most)} %)`;
  };


  const escape = (text) => String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]).replace(/%\{/g, "% {");

  function fill(select, options) {
    const before = select.value;
    const same = options.length === select.options.length && options.every(([, text], i) => select.options[i].text === text);
    if (!same) {
      select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
      if (options.some(([value]) => String(value) === before)) select.value = before;
    }
    select.hidden = options.length < 2;
  }

  function ends(traces) { // each line's name and last value, for who cannot see them
    const last = new Map();
    for (const { name, y } of traces) if (name && y.length) last.set(name, y[y.length - 1]);
    return `At the end ${[...last].map(([name, value]) => `${name} ${value.toFixed(1)} %`).join(", ")}.`;
  }

  function make(name) {
    const s = scene();
    const made = s && figures[name](s);
    $(name).closest("figure").hidden = !made;
    return made;
  }

  function paint(name, made) {
    if (!made) return;
    const [traces, more, height] = made;
    const box = name === "example" ? $(name).lastElementChild : $(name);
    const caption = $(name).closest("figure").querySelector("b").textContent.replace(/[.,]$/, "");
    box.style.height = height ? `${height}px` : "";
    Plotly.react(box, traces, { ...layout(more), width: box.clientWidth, height: box.clientHeight }, config);
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${caption}, ${scene().title}. ${more.label ?? ends(traces)}`);
  }

  const draw = (name) => paint(name, make(name));
  const names = ["curves", "sent", "partition", "log", "confusion", "example", "margins", "embeddings"];
  let drawn = false;
  function redraw() {
    if (!drawn) return;
    const made = names.map(make); // which figures there are decides how wide each is
    names.forEach((name, i) => paint(name, made[i]));
    const s = scene();
    $("scene-title").textContent = s ? `: ${s.title} (${s.table})` : "";
    const absent = s ? [[s.partitions.length, "who holds what"], [s.logs.length, "what clients noted"], [s.analyses.length, "margins, features and an example (`fedcc analyse`)"]].filter(([n]) => !n).map(([, what]) => what) : [];
    $("absent").textContent = absent.length ? `Not in these records: ${absent.join("; ")}.` : "";
  }

  function listScenes() {
    const before = $("scene").value;
    const there = content.scenes.filter((s) => state.data === "" || s.data === state.data);
    const tables = new Map();
    for (const s of there) {
      if (!tables.has(s.table)) tables.set(s.table, Object.assign(document.createElement("optgroup"), { label: s.table }));
      tables.get(s.table).append(new Option(s.title, s.id));
    }
    $("scene").replaceChildren(...tables.values());
    const wanted = there.some((s) => s.id === before) ? before : there.some((s) => s.id === content.first) ? content.first : there[0]?.id;
    if (wanted) $("scene").value = wanted;
    $("scenario").hidden = !there.length;
    redraw();
  }

  $("scene").addEventListener("change", redraw);
  $("seed").addEventListener("change", () => draw("partition"));
  $("logged").addEventListener("change", () => draw("log"));
  $("confused").addEventListener("change", () => draw("confusion"));
  for (const id of ["one", "other"]) $(id).addEventListener("change", () => ["margins", "embeddings"].forEach(draw));
  $("example-of").addEventListener("change", () => draw("example"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth;
  addEventListener("resize", () => { if (narrow() !== width < 740) redraw(); width = innerWidth; });
  function forPaper(on) { // every figure, at the paper's width, on white
    if (on === printing) return;
    printing = on;
    document.documentElement.classList.toggle("printing", on);
    for (const box of all(".scroll")) { // tables that are too wide for the paper become smaller
      box.style.zoom = "";
      if (on) box.style.zoom = Math.min(1, 690 / Math.max(1, box.firstElementChild.offsetWidth));
    }
    drawn = true;
    redraw();
  }
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(matchMedia("print").matches));
  matchMedia("print").addEventListener("change", (e) => forPaper(e.matches));
  $("theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = dark() ? "light" : "dark";
    redraw();
  });

  apply();
  reveal();
  // figures are drawn when they come near: the tables are there at once
  new IntersectionObserver((entries, observer) => {
    if (!entries.some((e) => e.isIntersecting)) return;
    observer.disconnect();
    drawn = true;
    redraw();
  }, { rootMargin: "600px" }).observe($("scenario"));
})();
