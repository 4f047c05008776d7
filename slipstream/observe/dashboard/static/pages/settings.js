// The settings of a run, with the origin of each value, and how they differ from another run's.

import { h, plain, renew, table } from "../dom.js";
import { askOnce, runPath } from "../live.js";
import { makeHead } from "./run.js";

const VIEWS = [["all", "all"], ["chosen", "not default"], ["differs", "different"]];

export async function show(root, { feed, runIds }) {
  const updateHead = makeHead(root, feed), body = h("div", null), count = h("span", { class: "muted" });
  const own = await askOnce(runPath(feed.id, "/settings"));
  let view = "all", other = null;
  const search = h("input", { type: "search", placeholder: "filter keys, values, meanings", "aria-label": "filter", oninput: draw });
  const beside = h("select", { "aria-label": "compare with", onchange: choose }, h("option", { value: "" }, "compare with …"),
    runIds.filter((id) => id !== feed.id).map((id) => h("option", { value: id }, id)));
  const choice = h("span", { class: "choice", role: "group", "aria-label": "which" });
  root.append(h("div", { class: "tools" }, search, choice, beside, count), body);

  async function choose() {
    // Those of a run that was deleted meanwhile, or that cannot be read, differ in everything.
    const found = beside.value ? await askOnce(runPath(beside.value, "/settings")).catch(() => []) : null;
    other = found && new Map(found.map((row) => [row.key, row]));
    view = other ? "differs" : view === "differs" ? "all" : view;
    draw();
  }

  function draw() {
    renew(choice, [view, Boolean(other)], () => VIEWS.filter(([name]) => other || name !== "differs").map(([name, text]) =>
      h("button", { "aria-pressed": String(name === view), onclick: () => { view = name; draw(); } }, text)));
    const known = new Set(own.map((row) => row.key));
    const rows = [...own, ...(other ? [...other.values()].filter((row) => !known.has(row.key)).map((row) => ({ ...row, isMissing: true })) : [])];
    const text = search.value.toLowerCase();
    const found = rows.map((row) => ({ ...row, shown: row.isMissing ? "–" : plain(row.value), beside: other ? (other.has(row.key) ? plain(other.get(row.key).value) : "–") : "" }))
      .filter((row) => (view === "differs" ? row.shown !== row.beside : view !== "chosen" || !["default", ""].includes(row.origin)))
      .filter((row) => `${row.key} ${row.shown} ${row.beside} ${row.origin} ${row.meaning}`.toLowerCase().includes(text));
    count.textContent = `${found.length} of ${rows.length}`;
    const columns = [{ name: "setting", class: "key" }, { name: feed.id, class: "cell" }, ...(other ? [{ name: beside.value, class: "cell" }] : []), { name: "from" }, { name: "meaning", class: "wide soft" }];
    body.replaceChildren(table(columns, found.map((row) => [row.key, mark(row, row.shown, row.beside), ...(other ? [row.beside] : []), origin(row.origin), row.meaning])));
  }

  const mark = (row, value, another) => (other && value !== another ? h("b", null, value) : value);
  const origin = (text) => h("span", { class: text.startsWith("command line") ? "nowrap warn" : "muted nowrap", title: text },
    text.startsWith("command line") ? "command line" : text.replace("configs/presets/", "") || "not recorded");

  feed.addEventListener("view", updateHead);
  await feed.want([]);
  updateHead();
  draw();
  return () => feed.removeEventListener("view", updateHead);
}
