// Elements, data and small sums. Text of records becomes text nodes and attributes only, never markup.

const $ = (id) => document.getElementById(id);
const all = (selector, from = document) => [...from.querySelectorAll(selector)];

function build(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => build(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => build(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

const decoded = (id) => Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
async function inflated(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}
const content = JSON.parse(new TextDecoder().decode(await inflated(decoded("content"))));
let records = null; // the archive of all records, unpacked in the background
const unpacking = inflated(decoded("archive")).then((bytes) => (records = bytes));
const recordBytes = (run) => records.slice(run.place[0], run.place[0] + run.place[1]);

function save(data, name, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([data], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const slug = (text) => text.toLowerCase().replace(/[^a-z0-9.]+/g, "-").replace(/^[-.]+|[-.]+$/g, "").slice(0, 80) || "file";
function csv(head, rows) {
  const cell = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text; // not a formula
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  };
  return [head, ...rows].map((row) => row.map(cell).join(",") + "\r\n").join("");
}

const colourOf = ([light, dark]) => `light-dark(${light}, ${dark})`;
const INK = "var(--ink)";
function paletteColour(i, number) { // a colour of as many: the palette, or a wheel of hues whose neighbours differ in shade
  if (number <= content.palette.length) return colourOf(content.palette[i]);
  const hue = Math.round((360 * i) / number);
  return `light-dark(hsl(${hue} 65% ${[36, 22][i % 2]}%), hsl(${hue} 65% ${[64, 82][i % 2]}%))`;
}

const pen = document.createElement("canvas").getContext("2d");
function measure(text, size = 12) {
  pen.font = `${size}px system-ui, sans-serif`;
  return pen.measureText(text).width;
}
function cut(text, width, size = 12) {
  if (measure(text, size) <= width) return text;
  let end = text.length;
  while (end > 1 && measure(text.slice(0, end) + "…", size) > width) end -= 1;
  return text.slice(0, end) + "…";
}

const known = (values) => values.filter((v) => v !== null && v !== undefined);
const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
const highest = (values, least = -Infinity) => values.reduce((a, b) => Math.max(a, b), least); // any number of values
const lowest = (values, most = Infinity) => values.reduce((a, b) => Math.min(a, b), most);
const fixed = (value, digits = 1) => (value === null || value === undefined ? "–" : value.toFixed(digits).replace("-", "−"));
const signed = (value) => (value >= 0 ? "+" : "") + fixed(value);
function unit(number, units = ["", "k", "M", "G", "T", "P"], gap = " ") {
  const i = number > 0 ? Math.max(0, Math.min(units.length - 1, Math.floor(Math.log10(number) / 3 + 1e-9))) : 0;
  return `${Number((number / 1000 ** i).toPrecision(3))}${gap}${units[i]}`.trim();
}

function fill(select, options) { // keeps the choice if it is still there; one option is no choice
  const before = select.value;
  const same = options.length === select.options.length && options.every(([, text], i) => select.options[i].text === text);
  if (!same) {
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
    if (options.some(([value]) => String(value) === before)) select.value = before;
  }
  select.hidden = options.length < 2;
  return Number(select.value) || 0;
}
