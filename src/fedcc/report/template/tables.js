// Tables: sorting, filters, the menu of methods, and files.

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

function tableFile(table) { // what is shown of it
  const visible = (cells) => [...cells].filter((cell) => !cell.hidden);
  const text = (cell) => cell.innerText.trim().replace(/\s+/g, " ");
  const heads = visible(table.tHead.rows[table.tHead.rows.length - 1].cells);
  const head = heads.map((cell) => [cell.dataset.data, cell.dataset.skew, cell.dataset.skew && cell.title ? "" : text(cell)].filter(Boolean).join(" "));
  const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden).map((row) => visible(row.cells).map(text));
  return csv(head, rows);
}

for (const table of all("table[data-name]")) {
  const box = table.closest(".scroll");
  const name = table.dataset.name;
  box.after(el("p", { class: "tools" }, el("button", { type: "button", "aria-label": `${box.getAttribute("aria-label")}: save as CSV`, title: "save what is shown as CSV", click: () => save(tableFile(table), `${slug(name)}.csv`, "text/csv") }, "CSV")));
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

function filterTables() {
  document.body.dataset.view = state.view;
  document.body.dataset.paper = state.paper ? "yes" : "";
  const otherData = (item) => state.data !== "" && item.dataset.data !== undefined && item.dataset.data !== state.data;
  const folded = (item) => !state.empty && item.dataset.empty !== undefined;
  for (const item of all("[data-data]:not(.groups > details)")) item.hidden = otherData(item) || folded(item);
  for (const table of all("table.sortable")) { // a heading spans the columns below it that are shown
    const [groups, ...lower] = table.tHead.rows;
    const columns = [...lower.at(-1).cells];
    for (const group of all("th[colspan]", groups)) {
      const span = columns.filter((cell) => cell.dataset.data === group.dataset.data && !cell.hidden).length;
      group.hidden = !span;
      if (span) group.colSpan = span;
    }
  }
  for (const section of all("[data-sets]")) section.hidden = state.data !== "" && !section.dataset.sets.split("\n").includes(state.data);
  for (const row of all("tr[data-method]")) row.hidden = state.hidden.has(row.dataset.method) || folded(row);
  all("table.sortable").forEach(sort);
  search();
}

function search() {
  const words = state.find.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = all(".groups > details");
  for (const group of groups) {
    group.hidden =
      (state.data !== "" && group.dataset.data !== state.data) ||
      state.hidden.has(group.dataset.method) ||
      !words.every((word) => group.dataset.text.includes(word));
  }
  const left = groups.filter((group) => !group.hidden).length;
  $("found").textContent = left < groups.length ? `${left} of ${groups.length}` : "";
}

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
document.addEventListener("click", (e) => { if (!$("methods").contains(e.target)) $("methods").open = false; });
document.addEventListener("keydown", (e) => {
  if (e.key !== "Escape" || !$("methods").open) return;
  $("methods").open = false;
  $("methods").querySelector("summary").focus();
});
