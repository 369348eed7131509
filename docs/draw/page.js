// The page: a canvas to draw on, examples for those who use a keyboard, and what every client says.
"use strict";
(() => {
  const { model } = fedcc, networks = fedcc.networks(model), LIAR = 3;
  const root = document.getElementById("draw");
  const make = (tag, properties = {}, ...children) => {
    const element = Object.assign(document.createElement(tag), properties);
    element.append(...children);
    return element;
  };
  const percent = (value) => `${(100 * value).toFixed(0)} %`;
  const listed = (names) => names.join(" and ");

  // The drawing
  const SIZE = 280, canvas = make("canvas", { width: SIZE, height: SIZE, className: "paper" });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Where you draw; the buttons below show digits without a mouse");
  const preview = make("canvas", { width: 8, height: 8, className: "seen" });
  preview.setAttribute("role", "img");
  let strokes = [], example = null, drawing = false, waiting = false;
  const turns = model.examples.map(() => 0);

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) * SIZE) / box.width, ((event.clientY - box.top) * SIZE) / box.height];
  };
  canvas.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    canvas.setPointerCapture(event.pointerId);
    if (example) strokes = [];
    example = null;
    drawing = true;
    strokes.push([place(event)]);
    soon();
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drawing) return;
    for (const one of event.getCoalescedEvents?.() ?? []) strokes[strokes.length - 1].push(place(one));
    strokes[strokes.length - 1].push(place(event));
    soon();
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => (drawing = false));

  const clear = make("button", { type: "button", textContent: "Clear" });
  clear.addEventListener("click", () => {
    strokes = [];
    example = null;
    soon();
  });
  const examples = model.examples.map((images, digit) => {
    const button = make("button", { type: "button", textContent: model.classes[digit] });
    button.setAttribute("aria-label", `Show a ${model.classes[digit]} of the data set`);
    button.addEventListener("click", () => {
      strokes = [];
      example = images[turns[digit]++ % images.length];
      soon();
    });
    return button;
  });

  // The switches
  const lie = make("input", { type: "checkbox", id: "draw-lie" });
  const guard = make("input", { type: "checkbox", id: "draw-guard" });
  for (const box of [lie, guard]) box.addEventListener("change", () => soon());

  // The answers
  const status = make("p", { className: "answer" });
  status.setAttribute("role", "status");
  const forced = make("p", { className: "forced" });
  const cell = (name) => make("td", { className: name });
  const row = (title, className = "") => {
    const head = make("th", { scope: "row" }, ...title);
    const votes = [...model.classes].map(() => cell("vote"));
    const unknown = cell("unknown"), trust = cell("trust");
    return { line: make("tr", { className }, head, ...votes, unknown, trust), votes: [...votes, unknown], trust };
  };
  const rows = model.clients.map((seen, k) => row([make("b", {}, `${k}`), make("small", {}, ` knows ${listed(seen)}`)]));
  const total = row(["all"], "total");
  const column = (text, label = text) => {
    const head = make("th", { scope: "col" }, text);
    head.title = label;
    return head;
  };
  const heads = [...model.classes].map((name) => column(name, `the class ${name}`));
  const table = make("table", { className: "votes" },
    make("caption", {}, "Votes in percent, by client"),
    make("thead", {}, make("tr", {}, column("client"), ...heads, column("?", "unknown"), column("trust"))),
    make("tbody", {}, ...rows.map((r) => r.line), total.line));

  const fill = (cells, values, best) => values.forEach((value, c) => {
    cells[c].textContent = value === null ? "" : value < 0.005 ? "·" : (100 * value).toFixed(0);
    cells[c].style.setProperty("--share", value ?? 0);
    cells[c].classList.toggle("best", c === best);
  });
  const shareOf = (element, value) => {
    element.textContent = value === null ? "" : percent(value);
    element.style.setProperty("--share", value ?? 0);
  };

  const paint = (image) => {
    const pen = canvas.getContext("2d"), small = preview.getContext("2d");
    pen.clearRect(0, 0, SIZE, SIZE);
    Object.assign(pen, { lineWidth: 18, lineCap: "round", lineJoin: "round" });
    pen.strokeStyle = pen.fillStyle = getComputedStyle(canvas).color;
    const block = SIZE / 8;
    if (example) example.forEach((count, i) => {
      pen.globalAlpha = count / 16;
      pen.fillRect((i % 8) * block, Math.floor(i / 8) * block, block + 0.5, block + 0.5);
    });
    pen.globalAlpha = 1;
    for (const [first, ...rest] of strokes) {
      pen.beginPath();
      pen.moveTo(...first);
      for (const point of rest.length ? rest : [first]) pen.lineTo(...point);
      pen.stroke();
    }
    small.clearRect(0, 0, 8, 8);
    small.fillStyle = pen.fillStyle;
    (image ?? []).forEach((count, i) => {
      small.globalAlpha = count / 16;
      small.fillRect(i % 8, Math.floor(i / 8), 1, 1);
    });
    preview.setAttribute("aria-label", image ? "The drawing as 8x8 pixels, as the clients see it" : "Nothing drawn yet");
  };

  const show = () => {
    waiting = false;
    const image = example ?? fedcc.counts(strokes);
    paint(image);
    clear.disabled = !image;
    rows[LIAR].line.classList.toggle("liar", lie.checked);
    if (!image) {
      status.textContent = "Draw a digit, or press a number below the canvas.";
      forced.textContent = "";
      for (const r of [...rows, total]) {
        fill(r.votes, r.votes.map(() => null));
        shareOf(r.trust, null);
      }
      fedcc.shown = null;
      return;
    }
    const found = fedcc.ask(networks, model, image, { liar: lie.checked ? LIAR : -1, guard: guard.checked });
    found.votes.forEach((vote, k) => {
      fill(rows[k].votes, vote, fedcc.best(vote));
      shareOf(rows[k].trust, found.trust[k]);
    });
    const classes = found.answer.slice(0, -1), best = fedcc.best(classes), most = fedcc.best(found.trust);
    fill(total.votes, found.answer, best);
    shareOf(total.trust, 1);
    status.replaceChildren(
      "The federation says ", make("strong", {}, model.classes[best]),
      ` (${percent(classes[best] / fedcc.sum(classes))}). Client ${most}, which knows ${listed(model.clients[most])}, `
      + `has the most trust: ${percent(found.trust[most])}.`);
    const mean = fedcc.best(found.forced);
    forced.textContent = `If nobody could say “unknown”, their mean would say ${model.classes[mean]} `
      + `(${percent(found.forced[mean])}).`;
    fedcc.shown = { image, ...found };
  };
  const soon = () => {
    if (!waiting) requestAnimationFrame(show);
    waiting = true;
  };

  root.append(
    make("div", { className: "draw-left" },
      canvas,
      make("div", { className: "buttons" }, clear, make("span", { className: "as-seen" }, "seen as ", preview)),
      make("div", { className: "buttons digits", role: "group", ariaLabel: "Digits of the data set" }, ...examples)),
    make("div", { className: "draw-right" },
      status, forced, table,
      make("p", { className: "switches" },
        make("label", {}, lie, ` Client ${LIAR} lies: it always votes ${model.classes[0]} with certainty`),
        make("label", {}, guard, " The server guards the votes (", make("code", {}, "guard_votes"), ")"))));
  document.querySelectorAll("[data-draw]").forEach((element) => {
    element.textContent = String(model[element.dataset.draw]);
  });
  new MutationObserver(soon).observe(document.body, { attributes: true, attributeFilter: ["data-md-color-scheme"] });
  show();
  root.dataset.ready = "";
})();
