// What each metric means: docs/metrics.md as a page that charts and warnings lead to.

import { h, table } from "../dom.js";
import { askOnce } from "../live.js";

export async function show(root) {
  const meanings = await askOnce("/api/meanings"), body = h("div", null);
  const search = h("input", { type: "search", placeholder: "filter", "aria-label": "filter", oninput: draw });
  root.append(h("div", { class: "head" }, h("h1", null, "Metrics"), h("span", { class: "grow" }), search), body);

  function draw() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = meanings.filter((each) => words.every((word) => `${each.key} ${each.meaning}`.toLowerCase().includes(word)));
    const sections = [...new Set(found.map((each) => each.section))];
    const columns = [{ name: "key", class: "key" }, { name: "meaning", class: "wide" }, { name: "unit" }, { name: "healthy" }];
    body.replaceChildren(...sections.map((section) => h("section", null, h("h2", null, section), table(columns, found.filter((each) => each.section === section).map((each) =>
      ({ row: { id: each.key, class: matches(each.key, wanted()) ? "chosen" : null }, cells: [each.key, each.meaning, each.unit, each.healthy] }))))));
    body.querySelector("tr.chosen")?.scrollIntoView({ block: "center" });
  }
  draw();
  window.addEventListener("hashchange", draw);
  return () => window.removeEventListener("hashchange", draw);
}

const wanted = () => decodeURIComponent(location.hash.slice(1));

/** Whether a documented key, in which <...> stands for any text, is the wanted one. */
function matches(key, name) {
  if (!name) return false;
  const part = name.replace(/^learner\/by_lag\/[^/]+\//, "learner/");
  const pattern = key.split(/<[^>]*>/).map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join(".+");
  return key === name || key === part || (key.includes("<") && !key.includes("<name>") && new RegExp(`^${pattern}$`).test(name)) || (/^eval\/(accuracy|reward)_/.test(name) && key === name.replace(/_[^_]+$/, "_sampled"));
}
