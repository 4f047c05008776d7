// Elements and numbers. Text from a run enters the page as text nodes only, never as markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "css") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(4).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const h = (tag, properties, ...children) => fill(document.createElement(tag), properties, children);
export const svg = (tag, properties, ...children) => fill(document.createElementNS(SVG, tag), properties, children);

/** Internal link: followed without loading the page again. */
export const link = (to, properties, ...children) => h("a", { href: to, ...properties }, ...children);

export function table(columns, rows, properties) {
  const head = columns.map((column) => h("th", { class: column.class, scope: "col", title: column.title }, column.name));
  const body = rows.map((cells) =>
    h("tr", cells.row || null, (cells.cells || cells).map((cell, index) => h("td", { class: columns[index].class }, cell))));
  return h("div", { class: "scroll" }, h("table", properties, h("thead", null, h("tr", null, head)), h("tbody", null, body)));
}

/** Replace the children only when `key` differs from the last one, so that a selection of text survives. */
export function renew(element, key, make) {
  const text = JSON.stringify(key);
  if (element.shownKey === text) return;
  element.shownKey = text;
  element.replaceChildren(...[make()].flat(3).filter(Boolean));
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// --- numbers -----------------------------------------------------------------------------------------------------
export const DASH = "–";
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export const whole = (value) => (isNumber(value) ? Math.round(value).toLocaleString("en-US") : DASH);
export const fixed = (value, digits = 3) => (isNumber(value) ? value.toFixed(digits) : DASH);
export const percent = (value, digits = 0) => (isNumber(value) ? `${(100 * value).toFixed(digits)} %` : DASH);

/** As many digits as tell values of any size apart. */
export function short(value) {
  if (!isNumber(value)) return DASH;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
  if (size >= 1000) return whole(value);
  if (Number.isInteger(value)) return String(value);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
}

export function duration(seconds) {
  if (!isNumber(seconds)) return DASH;
  if (seconds < 0.95) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function bytes(value) {
  if (!isNumber(value)) return DASH;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let index = 0;
  while (value >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
  return `${value.toFixed(value < 10 && index ? 1 : 0)} ${units[index]}`;
}

export function clock(seconds) {
  const date = new Date(1000 * seconds);
  const time = date.toTimeString().slice(0, 8);
  return date.toDateString() === new Date().toDateString() ? time : `${date.toISOString().slice(0, 10)} ${time}`;
}

export const plain = (value) => (typeof value === "string" ? value : JSON.stringify(value));
