// All runs, newest first.

import { clock, DASH, duration, fixed, h, link, percent, table, whole } from "../dom.js";
import { ask } from "../live.js";
import { PHASES } from "./run.js";

export async function show(root, { go, address }) {
  const chosen = new Set(), list = h("div", null);
  const button = h("button", { disabled: true, onclick: () => go(`/compare?runs=${[...chosen].map(encodeURIComponent).join(",")}`) }, "Compare");
  root.append(h("div", { class: "head" }, h("h1", null, "Runs"), h("span", { class: "grow" }), button), list);

  function choose(id, isChosen) {
    if (isChosen) chosen.add(id); else chosen.delete(id);
    button.disabled = chosen.size < 1;
    button.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
  }

  async function refresh() {
    const runs = await ask("/api/runs");
    const text = JSON.stringify(runs);
    if (text === list.shown) return;
    list.shown = text;
    if (!runs.length) { list.replaceChildren(h("p", { class: "empty" }, "No run yet: it will appear here once `slipstream run` has begun one.")); return; }
    const columns = [{ name: "" }, { name: "run" }, { name: "state" }, { name: "mode" }, { name: "step", class: "num" }, { name: "" }, { name: "reward", class: "num" },
      { name: "held-out accuracy" }, { name: "training", class: "num" }, { name: "newest step", class: "num" }];
    list.replaceChildren(table(columns, runs.map((run) => ({ row: { "data-to": address(run.id) }, cells: row(run) }))));
  }

  function row(run) {
    const done = run.max_steps ? run.step / run.max_steps : 0;
    const accuracies = Object.entries(run.accuracies).map(([name, value]) => `${fixed(value)} ${name}`).join("  ");
    return [h("input", { type: "checkbox", "aria-label": `compare ${run.id}`, checked: chosen.has(run.id), onchange: (event) => choose(run.id, event.target.checked) }),
      link(address(run.id), null, run.id), [h("i", { class: `dot ${PHASES[run.phase]}` }), " ", run.phase], h("span", { class: "muted" }, run.mode || DASH),
      `${whole(run.step)} / ${whole(run.max_steps)}`, h("span", { class: "meter", title: percent(done) }, h("i", { css: { width: percent(done).replace(" ", "") } })),
      fixed(run.reward), accuracies || DASH, duration(run.time_s), run.changed_at ? clock(run.changed_at) : DASH];
  }

  list.addEventListener("click", (event) => {
    const target = event.target.closest("tr[data-to]");
    if (target && !event.target.closest("a, input")) go(target.dataset.to);
  });
  await refresh();
  const timer = setInterval(() => document.hidden || refresh().catch(() => {}), 3000);
  return () => clearInterval(timer);
}
