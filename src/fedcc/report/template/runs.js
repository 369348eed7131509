// The runs behind the numbers: how each was made, its files and its record; and two of them beside each other.

const grouped = Map.groupBy ? Map.groupBy(content.runs, (run) => run.group) : content.runs.reduce((m, run) => m.set(run.group, [...(m.get(run.group) ?? []), run]), new Map());

function uploads(run) {
  const names = Object.keys(run.uploads);
  if (!names.length) return [];
  const clients = Object.keys(run.uploads[names[0]]);
  const head = el("tr", {}, ...["client", ...names].map((name) => el("th", { scope: "col" }, name)));
  const rows = clients.map((k) => el("tr", {}, el("th", { scope: "row" }, k), ...names.map((name) => el("td", {}, fixed(run.uploads[name][k], 2)))));
  return [el("details", { class: "uploads" }, el("summary", {}, "What each client's last upload says"),
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Uploads" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows))))];
}

function describe(run) {
  const { device, precision, engine, commit } = run.machine;
  const facts = [`final ${run.final.toFixed(2)}`, `best ${run.best.toFixed(2)} in round ${run.bestRound}`];
  if (run.seconds !== null) facts.push(`${Math.round(run.seconds).toLocaleString("en")} s${device ? ` on ${device}` : ""}`);
  if (run.images.length) facts.push(`${unit(run.images.at(-1))} images trained on, ${unit(run.predicted)} predicted${run.afterwards ? " (counted afterwards)" : ""}`);
  facts.push(...[precision, engine].filter(Boolean), ...Object.entries(run.metrics).map(([name, value]) => `${name} ${Number(value.toPrecision(4))}`));
  const links = run.files.flatMap(([name, href], i) => [i ? ", " : "", el("a", { href }, name)]);
  const compare = (side) => el("button", { type: "button", class: "link", click: () => compareWith(side, run) }, `run ${side.toUpperCase()}`);
  return el("div", { class: "run" },
    el("p", {}, el("b", {}, `seed ${run.seed}`), ` ${facts.join(", ")}`),
    el("p", { class: "soft" }, [...Object.entries(run.versions).map(([name, version]) => `${name} ${version}`), `commit ${commit ?? "unknown"}`].join(", ")),
    el("p", {}, `${run.name}: `, ...links, run.place ? " · " : "",
      run.place ? el("button", { type: "button", class: "link", click: async () => { await unpacking; save(recordBytes(run), `${slug(run.name)}.json`, "application/json"); } }, "save the record") : null,
      " · compare as ", compare("a"), " or ", compare("b")),
    el("pre", { tabindex: 0 }, run.command),
    ...run.warnings.map((text) => el("p", {}, el("b", {}, "Warning "), text)),
    ...uploads(run));
}

for (const group of all(".groups > details")) {
  group.addEventListener("toggle", () => {
    if (group.open && group.childElementCount === 1) group.append(...(grouped.get(group.id) ?? []).map(describe));
  });
}
$("save-records").addEventListener("click", () => save(decoded("archive"), "records.tar.gz", "application/gzip"));

// ---------------------------------------------------------------- two runs

const byName = new Map(content.runs.map((run) => [run.name, run]));

function listRuns() {
  for (const side of ["a", "b"]) {
    const tables = new Map();
    for (const run of content.runs) {
      if (!tables.has(run.table)) tables.set(run.table, el("optgroup", { label: run.table }));
      tables.get(run.table).append(new Option(run.title, run.name));
    }
    $(`run-${side}`).replaceChildren(...tables.values());
    $(`run-${side}`).addEventListener("change", (e) => { state[side] = e.target.value; comparePair(); remember(); });
  }
}

function usualPair() { // of the scenario on show: FedCC and the best of the others
  const s = scene();
  if (!s) return [content.runs[0], content.runs[0]];
  const runs = s.rows.map((row) => runsOf(row)[0]);
  const ours = runs.find((run) => run.method === "fedcc") ?? runs[0];
  const others = runs.filter((run) => run !== ours).sort((one, two) => two.final - one.final);
  return [ours, others[0] ?? ours];
}

function pair() {
  const usual = usualPair();
  return [byName.get(state.a) ?? usual[0], byName.get(state.b) ?? usual[1]];
}

function comparePair() {
  const [a, b] = pair();
  if (!a) return show("pair", null);
  $("run-a").value = a.name;
  $("run-b").value = b.name;
  const colours = [{ colour: colourOf(content.looks.fedcc.colour), strokes: "", width: 2.4 }, { colour: colourOf(content.palette[0]), strokes: "7 4", width: 2.4 }];
  const lines = [a, b].map((run, i) => ({ name: `${"AB"[i]}: ${run.title}`, look: colours[i], curves: [run.curve] }));
  show("pair", curveChart(lines, { asked: Math.max(a.asked, b.asked), bands: false, height: 320 }));
  const facts = (run) => ({
    method: run.method, seed: run.seed, "final accuracy": fixed(run.final, 2), "best accuracy": `${fixed(run.best, 2)} in round ${run.bestRound}`,
    "bytes sent": run.sent.length ? unit(run.sent.at(-1), ["B", "kB", "MB", "GB", "TB"]) : "–", "images trained on": run.images.length ? unit(run.images.at(-1)) : "–",
    seconds: run.seconds === null ? "–" : fixed(run.seconds), ...run.settings, ...run.machine, ...run.versions,
  });
  const [one, two] = [facts(a), facts(b)];
  const names = Object.keys({ ...one, ...two }).filter((name) => String(one[name] ?? "–") !== String(two[name] ?? "–"));
  const row = (kind, cells) => el("tr", {}, ...cells.map((text, i) => el(kind === "th" || !i ? "th" : "td", { scope: kind === "th" ? "col" : i ? null : "row" }, String(text))));
  $("differences").replaceChildren(el("thead", {}, row("th", ["", "run A", "run B"])),
    el("tbody", {}, ...(names.length ? names.map((name) => row("td", [name, one[name] ?? "–", two[name] ?? "–"])) : [row("td", ["nothing", "", ""])])));
}

function compareWith(side, run) {
  state[side] = run.name;
  openTab("compare");
  comparePair();
  remember();
  $("scenario").scrollIntoView();
}
