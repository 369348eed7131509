// A figure: its chart, what a pointer or the keys read from it, its numbers as a table, and its files.

const drawings = new Map(); // by the id of their box: {label, head, rows, draw(width), chart}
let printing = false;
const said = $("main").appendChild(el("p", { class: "unseen", role: "status" })); // for screen readers

const MOST_ROWS = 400; // of a table of numbers on the page; its file has all
const PAPER_WIDTH = 650; // fits A4 and Letter

function numbers({ head, rows }) {
  const shown = rows.slice(0, MOST_ROWS);
  const cells = (row) => row.map((v, i) => el(i ? "td" : "th", i ? {} : { scope: "row" }, typeof v === "number" ? String(v) : (v ?? "–")));
  const table = el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { scope: "col" }, name)))),
    el("tbody", {}, ...shown.map((row) => el("tr", {}, ...cells(row)))));
  const more = rows.length > shown.length ? el("p", { class: "soft" }, `${rows.length - shown.length} more rows are in the CSV file.`) : null;
  return [el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers" }, table), ...(more ? [more] : [])];
}

function standalone(node) { // a copy that needs no style sheet
  const copy = node.cloneNode(true);
  const copies = [copy, ...all("*", copy)];
  [node, ...all("*", node)].forEach((original, i) => {
    const style = getComputedStyle(original);
    const kept = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity"].map((name) => `${name}:${style.getPropertyValue(name)}`);
    copies[i].setAttribute("style", kept.join(";"));
    for (const name of ["class", "data-name"]) copies[i].removeAttribute(name);
  });
  const [width, height] = ["width", "height"].map((name) => node.getAttribute(name));
  const back = getComputedStyle(node.closest("figure")).backgroundColor;
  copy.prepend(svg("rect", { width, height, style: `fill:${back}` }));
  copy.setAttribute("font-family", "system-ui, sans-serif");
  return { width, height, text: new XMLSerializer().serializeToString(copy) };
}

function savePicture(id, name, kind) {
  const { width, height, text } = standalone(drawings.get(id).chart.node);
  if (kind === "svg") return save(text, `${name}.svg`, "image/svg+xml");
  const image = new Image();
  image.onload = () => {
    const canvas = el("canvas", { width: 2 * width, height: 2 * height });
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((data) => save(data, `${name}.png`, "image/png"), "image/png");
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

function point(box, i, aloud = false) { // shows the value with this number, or none
  const { chart } = drawings.get(box.id);
  const tip = box.querySelector(".tip");
  box.dataset.at = i ?? "";
  chart.mark(i);
  tip.hidden = i === null;
  if (i === null) return;
  const { x, y, title, lines } = chart.at(i);
  const swatch = (colour) => el("i", { style: colour ? `background: ${colour}` : null });
  tip.replaceChildren(...(title ? [el("b", {}, title)] : []), ...lines.map(([colour, text]) => el("span", {}, ...(colour ? [swatch(colour)] : []), text)));
  const ratio = box.clientWidth / Number(chart.node.getAttribute("width"));
  const room = box.clientWidth - tip.offsetWidth;
  const beside = x * ratio + 14 <= room ? x * ratio + 14 : x * ratio - tip.offsetWidth - 14;
  tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
  tip.style.top = `${y * ratio}px`;
  if (aloud) said.textContent = [title, ...lines.map(([, text]) => text)].filter(Boolean).join(", ");
}

function equip(figure) { // once: buttons, the keys and the pointer
  const id = figure.dataset.chart;
  const box = $(id);
  const caption = figure.querySelector("b").textContent.replace(/[.,]$/, "");
  const name = () => slug(`${id === "leads" || id === "pair" ? "" : state.scene} ${caption}`);
  const button = (text, what, run) => el("button", { type: "button", "aria-label": `${caption}: ${what}`, title: what, click: run }, text);
  figure.querySelector("figcaption").append(el("span", { class: "tools" },
    button("SVG", "save as SVG", () => savePicture(id, name(), "svg")),
    button("PNG", "save as PNG", () => savePicture(id, name(), "png")),
    button("CSV", "save the numbers as CSV", () => save(csv(drawings.get(id).head, drawings.get(id).rows), `${name()}.csv`, "text/csv"))));
  const table = el("details", { class: "numbers" }, el("summary", {}, "Numbers", el("span", { class: "unseen" }, ` of ${caption}`)), el("div"));
  table.addEventListener("toggle", () => { if (table.open && drawings.has(id)) table.lastElementChild.replaceChildren(...numbers(drawings.get(id))); });
  figure.append(table);
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.addEventListener("pointermove", (e) => {
    const { chart } = drawings.get(id) ?? {};
    if (!chart) return;
    const { left, top, width } = chart.node.getBoundingClientRect();
    const ratio = Number(chart.node.getAttribute("width")) / width;
    point(box, chart.locate((e.clientX - left) * ratio, (e.clientY - top) * ratio));
  });
  box.addEventListener("pointerleave", () => drawings.has(id) && point(box, null));
  box.addEventListener("blur", () => drawings.has(id) && point(box, null));
  box.addEventListener("keydown", (e) => {
    const { chart } = drawings.get(id) ?? {};
    if (!chart) return;
    const now = box.dataset.at === "" || box.dataset.at === undefined ? null : Number(box.dataset.at);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: chart.columns, ArrowUp: -chart.columns };
    let next;
    if (e.key === "Escape") next = null;
    else if (e.key === "Home") next = 0;
    else if (e.key === "End") next = chart.count - 1;
    else if (e.key in steps) next = now === null ? 0 : now + steps[e.key];
    else return;
    e.preventDefault();
    if (next === null || (next >= 0 && next < chart.count)) point(box, next, true);
  });
}

function paint(id) {
  const made = drawings.get(id);
  const box = $(id);
  const width = printing ? PAPER_WIDTH : Math.floor(box.clientWidth);
  if (!made || !width) return;
  const figure = box.closest("figure");
  const caption = figure.querySelector("b").textContent.replace(/[.,]$/, "");
  made.chart = made.draw(width);
  made.drawn = width;
  made.chart.node.setAttribute("role", "img");
  made.chart.node.setAttribute("aria-label", `${caption}${made.where ? `, ${made.where}` : ""}. ${made.label}`);
  box.setAttribute("aria-label", `${caption}: the arrow keys read its values`);
  box.dataset.at = "";
  box.replaceChildren(made.chart.node, el("div", { class: "tip", hidden: "" }));
  const table = figure.querySelector(".numbers");
  if (table.open) table.lastElementChild.replaceChildren(...numbers(made));
}

function show(id, made, where = "") { // a figure without data is hidden
  $(id).closest("figure").hidden = !made;
  if (made) drawings.set(id, { ...made, where });
  else drawings.delete(id);
  paint(id);
}

function repaint() { // those whose room has changed
  for (const [id, { drawn }] of drawings) if (printing || drawn !== Math.floor($(id).clientWidth)) paint(id);
}
