// What happened: the newest events of the run's store, as roles recorded them.

import { clock, duration, h, renew, table } from "../dom.js";
import { makeHead } from "./run.js";

const BAD = /\b(died|killed|healthy is|silent|evicted|lapsed|refused|failed|error|cannot|abandon|dead end)\b/i;

export async function show(root, { feed }) {
  const updateHead = makeHead(root, feed), body = h("div", null);
  const search = h("input", { type: "search", placeholder: "filter", "aria-label": "filter", oninput: draw });
  const role = h("select", { "aria-label": "role", onchange: draw });
  root.append(h("div", { class: "tools" }, role, search), body);

  function draw() {
    const roles = [...new Set(feed.events.map((event) => event.role))].sort();
    renew(role, roles, () => [h("option", { value: "" }, "all roles"), roles.map((name) => h("option", { value: name }, name))]);
    const text = search.value.toLowerCase();
    const found = feed.events.filter((event) => (!role.value || event.role === role.value) && event.text.toLowerCase().includes(text)).reverse();
    const columns = [{ name: "time", class: "nowrap" }, { name: "ago", class: "num ago" }, { name: "role", class: "nowrap" }, { name: "event", class: "wide" }];
    const minutes = feed.view?.is_live ? Math.floor(Date.now() / 10000) : 0;
    renew(body, [found, minutes], () => {
      if (!feed.events.length) return h("p", { class: "empty" }, feed.view?.problem ? "The events are in the store, which does not answer." : "Nothing happened that had to be recorded.");
      if (!found.length) return h("p", { class: "empty" }, "No event is like that.");
      return table(columns, found.map((event) => [clock(event.at), h("span", { class: "muted" }, duration(Math.max(0, Date.now() / 1000 - event.at))), event.role,
        h("span", { class: BAD.test(event.text) ? "bad" : "" }, event.text)]));
    });
  }
  const update = () => { updateHead(); draw(); };
  for (const name of ["view", "events"]) feed.addEventListener(name, update);
  await feed.want([]);
  update();
  return () => { for (const name of ["view", "events"]) feed.removeEventListener(name, update); };
}
