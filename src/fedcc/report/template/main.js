// The state of the page, which its address holds, and what changes it.

const TABS = {
  curves: ["curves", "log"],
  cost: ["images", "sent", "seconds"],
  classes: ["by-class", "confusion", "by-client"],
  known: ["partition", "known"],
  models: ["example", "margins", "embeddings"],
  compare: [],
};
const NOTES = {
  curve: "Accuracy of the method's prediction on the global test set (%); mean over seeds, shaded from least to most.",
  targets: "How often the targets that the server sends for public samples name the hidden label (%); a diagnostic.",
};
const USUAL = { view: "final", data: "", paper: true, empty: false, scene: content.first ?? "", tab: "curves", subject: "curve", a: "", b: "", find: "" };
const curvesNote = $("curves-figure").querySelector("b").nextSibling;

function drawTab(tab) {
  const s = scene();
  if (tab === "compare") comparePair();
  for (const name of TABS[tab]) show(name, s ? views[name](s) : null, s?.title);
}

function redraw() {
  const s = scene();
  show("leads", views.leads());
  curvesNote.textContent = ` ${NOTES[state.subject]} `;
  for (const tab of printing ? Object.keys(TABS) : [state.tab]) drawTab(tab);
  $("scene-title").textContent = s ? `: ${s.title} (${s.table})` : "";
  const some = (name) => s.rows.some((row) => runsOf(row).some((run) => run[name].length));
  const absent = !s ? [] : {
    curves: [[s.logs.length, "what clients noted"]],
    cost: [[some("images"), "images processed"], [some("sent"), "bytes sent"]],
    classes: [[s.confusions.length, "confusion matrices"], [s.clients.length, "accuracies of clients"]],
    known: [[s.partitions.length, "who holds what"], [s.known.length, "who knew what (methods with the output “unknown”)"]],
    models: [[s.analyses.length, "margins, features and an example, which fedcc analyse computes"]],
    compare: [],
  }[state.tab].filter(([there]) => !there).map(([, what]) => what);
  $("absent").textContent = absent.length ? `Not in these records: ${absent.join("; ")}.` : "";
}

function openTab(tab) {
  state.tab = tab;
  for (const button of all("[role=tab]")) {
    const chosen = button.dataset.tab === tab;
    button.setAttribute("aria-selected", chosen);
    button.tabIndex = chosen ? 0 : -1;
    $(button.getAttribute("aria-controls")).hidden = !chosen && !printing;
  }
}

function listScenes() {
  const there = content.scenes.filter((s) => state.data === "" || s.data === state.data);
  const tables = new Map();
  for (const s of there) {
    if (!tables.has(s.table)) tables.set(s.table, el("optgroup", { label: s.table }));
    tables.get(s.table).append(new Option(s.title, s.id));
  }
  $("scene").replaceChildren(...tables.values());
  if (!there.some((s) => s.id === state.scene)) state.scene = (there.find((s) => s.id === content.first) ?? there[0])?.id ?? "";
  $("scene").value = state.scene;
  $("scenario").hidden = !there.length;
}

function apply() { // the whole state, to the controls and to the page
  for (const name of ["view", "data", "subject"]) all(`input[name="${name}"]`).forEach((input) => (input.checked = input.value === state[name]));
  for (const name of ["paper", "empty"]) if ($(name)) $(name).checked = state[name];
  for (const box of all("#methods input")) box.checked = !state.hidden.has(box.value);
  $("search").value = state.find;
  filterTables();
  listScenes();
  openTab(state.tab);
  redraw();
}

// ---------------------------------------------------------------- the address: #PLACE&NAME=VALUE...

let place = "";
function remember() {
  const words = Object.keys(USUAL).filter((name) => state[name] !== USUAL[name])
    .map((name) => `${name}=${encodeURIComponent(typeof state[name] === "boolean" ? Number(state[name]) : state[name])}`);
  if (state.hidden.size) words.push(`hide=${[...state.hidden].map(encodeURIComponent).join(",")}`);
  const hash = [place && encodeURIComponent(place), ...words].filter(Boolean).join("&");
  history.replaceState(null, "", hash ? `#${hash}` : location.pathname + location.search);
}

function recall() {
  const decode = (text) => { try { return decodeURIComponent(text); } catch { return ""; } };
  const words = location.hash.slice(1).split("&").filter(Boolean);
  const values = new Map(words.filter((w) => w.includes("=")).map((w) => [w.slice(0, w.indexOf("=")), w.slice(w.indexOf("=") + 1)]));
  place = decode(words.find((w) => !w.includes("=")) ?? "");
  if (values.size || !words.length) {
    Object.assign(state, USUAL);
    for (const [name, text] of values) {
      if (name in USUAL) state[name] = typeof USUAL[name] === "boolean" ? text === "1" : decode(text);
    }
    state.hidden = new Set((values.get("hide") ?? "").split(",").map(decode).filter((m) => m in content.looks));
    const valid = { view: ["final", "best"], tab: Object.keys(TABS), subject: Object.keys(NOTES), data: ["", ...content.scenes.map((s) => s.data)], scene: [...scenes.keys()] };
    for (const [name, choices] of Object.entries(valid)) if (!choices.includes(state[name])) state[name] = USUAL[name];
  }
}

function reveal() { // what the address names, with all that it lies in
  const target = place && $(place);
  if (!target) return;
  for (let box = target; box; box = box.parentElement) {
    if (box.tagName === "DETAILS") box.open = true;
    if (box.hidden && box.tagName === "DETAILS") box.hidden = false;
  }
  target.scrollIntoView({ block: target.matches(".groups > details") ? "center" : "start" });
}

addEventListener("hashchange", () => {
  recall();
  apply();
  reveal();
  remember();
});

// ---------------------------------------------------------------- controls

const change = (name, value) => { state[name] = value; apply(); remember(); };
for (const name of ["view", "data", "subject"]) {
  all(`input[name="${name}"]`).forEach((input) => input.addEventListener("change", () => change(name, input.value)));
}
for (const name of ["paper", "empty"]) $(name)?.addEventListener("change", (e) => change(name, e.target.checked));
$("empty-switch").hidden = !all("table [data-empty]").length;
$("search").addEventListener("input", (e) => { state.find = e.target.value; search(); remember(); });
$("scene").addEventListener("change", (e) => change("scene", e.target.value));
$("methods").addEventListener("change", (e) => {
  state.hidden[e.target.checked ? "delete" : "add"](e.target.value);
  apply();
  remember();
});
for (const button of all("#methods button")) {
  button.addEventListener("click", () => {
    state.hidden = new Set(button.dataset.all ? [] : all("#methods input").map((box) => box.value));
    apply();
    remember();
  });
}
for (const button of all("[role=tab]")) {
  button.addEventListener("click", () => change("tab", button.dataset.tab));
  button.addEventListener("keydown", (e) => {
    const tabs = all("[role=tab]");
    const to = { ArrowRight: tabs.indexOf(button) + 1, ArrowLeft: tabs.indexOf(button) - 1, Home: 0, End: tabs.length - 1 }[e.key];
    if (to === undefined) return;
    e.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    next.click();
    next.focus();
  });
}
for (const [id, names] of Object.entries({ seed: ["partition"], knowing: ["known"], logged: ["log"], confused: ["confusion"], tested: ["by-client"], one: ["margins", "embeddings"], other: ["margins", "embeddings"], "example-of": ["example"] })) {
  $(id).addEventListener("change", () => names.forEach((name) => show(name, views[name](scene()), scene().title)));
}
addEventListener("resize", repaint);

function forPaper(on) { // every figure, at the paper's width, on white
  if (on === printing) return;
  printing = on;
  document.documentElement.classList.toggle("printing", on);
  for (const box of all(".scroll")) { // tables that are too wide for the paper become smaller
    box.style.zoom = "";
    if (on && box.firstElementChild.offsetWidth) box.style.zoom = Math.min(1, 690 / box.firstElementChild.offsetWidth);
  }
  openTab(state.tab);
  redraw();
}
addEventListener("beforeprint", () => forPaper(true));
addEventListener("afterprint", () => forPaper(matchMedia("print").matches));
matchMedia("print").addEventListener("change", (e) => forPaper(e.matches));
$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = dark ? "light" : "dark"; // colours follow by themselves
});

all("figure[data-chart]").forEach(equip);
listRuns();
recall();
apply();
reveal();
await unpacking;
if (state.tab === "classes" && scene()) drawTab("classes");
document.documentElement.dataset.ready = "yes";
