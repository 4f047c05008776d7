// Trajectories of a run: a list to filter, sort and page, and a group side by side, token by token.

import { clock, DASH, duration, h, renew, short, whole } from "../dom.js";
import { ask, runPath } from "../live.js";
import { makeHead } from "./run.js";

const COLUMNS = [["reward_total", "reward"], ["advantage", "advantage"], ["num_tokens", "tokens"], ["num_turns", "turns"], ["last_step", "step"], ["lag", "lag"], ["newest_version", "version"], ["seconds", "seconds"]];
const WORDS = [["outcome", "state"], ["stop_reason", "end"], ["data_source", "source"], ["generator_id", "generator"], ["finished_at", "made"], ["id", "id"]];
const TEXTS = [["prompt", "prompt"], ["answer", "answer"]];
const MAX_TOKENS = 3000;
const SIZE = 50;

export async function show(root, { feed, go, address }) {
  const updateHead = makeHead(root, feed), body = h("div", null), asked = new URLSearchParams(location.search);
  root.append(body);
  feed.addEventListener("view", updateHead);
  const page = root.parentElement, open = (changes) => {
    const next = new URLSearchParams(location.search);
    for (const [name, value] of Object.entries(changes)) if (value) next.set(name, value); else next.delete(name);
    const text = next.toString();
    go(`${address(feed.id, "trajectories")}${text ? `?${text}` : ""}`);
  };
  const shown = asked.get("group") ? new Group(body, feed, asked, open) : new List(body, feed, asked, open);
  const onKey = (event) => shown.onKey(event.detail);
  page.addEventListener("shortcut", onKey);
  await feed.want([]);
  updateHead();
  await shown.load();
  return () => { feed.removeEventListener("view", updateHead); page.removeEventListener("shortcut", onKey); };
}

// --- the list ----------------------------------------------------------------------------------------------------
class List {
  constructor(root, feed, asked, open) {
    Object.assign(this, { feed, open });
    this.where = asked.get("where") || "";
    this.sort = asked.get("sort") || "";
    this.descending = asked.get("descending") === "1" || !asked.get("sort");
    this.start = Number(asked.get("start") || 0);
    const search = h("input", { type: "search", value: this.where, "aria-label": "conditions", placeholder: "reward>=0.5 step<=40 outcome=retired text='the answer'", onchange: () => open({ where: search.value, start: "" }), class: "line" });
    this.count = h("span", { class: "muted" });
    this.previous = h("button", { onclick: () => this.turn(-1), title: "previous page (p)" }, "Previous");
    this.next = h("button", { onclick: () => this.turn(1), title: "next page (n)" }, "Next");
    this.names = h("p", { class: "muted hint" });
    this.body = h("div", null);
    root.append(h("div", { class: "tools" }, search, this.count, this.previous, this.next), this.names, this.body);
  }

  async load() {
    const words = new URLSearchParams({ where: this.where, sort: this.sort, descending: this.descending ? "1" : "0", start: this.start });
    this.body.replaceChildren(h("p", { class: "empty" }, "Reading …"));
    let found;
    try {
      found = await ask(runPath(this.feed.id, `/trajectories?${words}`));
    } catch (error) {
      this.body.replaceChildren(h("p", { class: "notice bad" }, error.message));
      return;
    }
    this.found = found;
    const last = Math.min(found.start + SIZE, found.num_rows);
    this.count.textContent = found.num_rows ? `${whole(found.start + 1)} to ${whole(last)} of ${whole(found.num_rows)}${found.num_rows === found.num_stored ? "" : `, ${whole(found.num_stored)} stored`}` : `0 of ${whole(found.num_stored)}`;
    this.previous.disabled = this.start === 0;
    this.next.disabled = last >= found.num_rows;
    this.names.textContent = `Conditions: ${found.conditions.join(", ")}, each with =; reward, tokens, version and step also with >= and <=.`;
    this.body.replaceChildren(...found.notes.map((note) => h("p", { class: "notice" }, note)), found.rows.length ? this.table(found) : h("p", { class: "empty" }, "No trajectory is like that."));
  }

  table(found) {
    const head = ([name, title], isNumber) => h("th", { scope: "col", class: isNumber ? "num" : null, "aria-sort": name === this.sort ? (this.descending ? "descending" : "ascending") : null },
      found.columns.includes(name) ? h("button", { class: "sort", onclick: () => this.sortBy(name) }, title, name === this.sort ? (this.descending ? " ↓" : " ↑") : "") : title);
    const cell = (row, name) => (name === "version" || name === "newest_version" ? (row.oldest_version === row.newest_version ? whole(row.newest_version) : `${row.oldest_version}–${row.newest_version}`) : short(row[name]));
    const word = (row, name) => (name === "finished_at" ? clock(row[name]) : row[name] || DASH);
    const line = (row) => h("tr", { "data-to": row.group_id, tabindex: 0, onclick: () => this.enter(row), onkeydown: (event) => event.key === "Enter" && this.enter(row) },
      h("td", null, h("i", { class: `dot ${row.reward_status !== "ok" ? "bad" : row.is_correct ? "good" : ""}`, title: row.reward_status !== "ok" ? `reward: ${row.reward_status}` : row.is_correct ? "correct" : "" })),
      TEXTS.map(([name]) => h("td", { class: "nowrap" }, row[name])), COLUMNS.map(([name]) => h("td", { class: "num" }, cell(row, name))), WORDS.map(([name]) => h("td", { class: "nowrap" }, word(row, name))));
    return h("div", { class: "scroll" }, h("table", null, h("thead", null, h("tr", null, h("th", null), TEXTS.map((column) => head(column, false)), COLUMNS.map((column) => head(column, true)), WORDS.map((column) => head(column, false)))), h("tbody", null, found.rows.map(line))));
  }

  /** Largest first, then smallest first, then newest first. */
  sortBy(name) {
    const again = name === this.sort;
    this.open({ sort: again && !this.descending ? "" : name, descending: again ? "" : "1", start: "" });
  }

  turn(by) {
    const start = this.start + by * SIZE;
    if (start >= 0 && this.found && start < this.found.num_rows) this.open({ start: start ? String(start) : "" });
  }

  enter(row) {
    this.open({ group: row.group_id, member: row.id });
  }

  onKey(key) {
    if (key === "n") this.turn(1);
    if (key === "p") this.turn(-1);
  }
}

// --- a group -----------------------------------------------------------------------------------------------------
class Group {
  constructor(root, feed, asked, open) {
    Object.assign(this, { feed, open, id: asked.get("group"), member: asked.get("member"), by: asked.get("by") || "advantage" });
    this.tools = h("div", { class: "tools" });
    this.members = h("div", { class: "members" });
    root.append(this.tools, this.members);
  }

  async load() {
    const found = await ask(runPath(this.feed.id, `/groups/${encodeURIComponent(this.id)}`));
    const names = [...new Set(found.flatMap((each) => Object.keys(each.numbers)))];
    if (!names.includes(this.by)) this.by = names[0] ?? "";
    this.found = found;
    const back = h("button", { onclick: () => this.leave() }, "← All trajectories");
    const choice = h("span", { class: "choice", role: "group", "aria-label": "color of the tokens" }, ["", ...names].map((name) =>
      h("button", { "aria-pressed": String(name === this.by), onclick: () => { this.by = name; this.draw(); choice.querySelectorAll("button").forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.name === name))); }, "data-name": name }, name || "plain")));
    this.legend = h("span", { class: "legend muted" });
    this.tools.replaceChildren(back, h("b", null, `group ${this.id}`), h("span", { class: "muted" }, `prompt ${found[0].row.prompt_uid} of ${found[0].row.data_source} · ${whole(found.length)} members`), h("span", { class: "grow" }), h("span", { class: "muted" }, "tokens by"), choice, this.legend);
    this.draw();
    this.members.querySelector(".member.chosen")?.scrollIntoView({ inline: "center", block: "nearest" });
  }

  draw() {
    const values = this.found.flatMap((each) => each.numbers[this.by] || []).filter((value) => value !== null);
    const low = values.reduce((least, value) => Math.min(least, value), Infinity), high = values.reduce((most, value) => Math.max(most, value), -Infinity);
    this.scale = { low, high, size: Math.max(Math.abs(low), Math.abs(high)) || 1, isSigned: low < 0 && high > 0 };
    renew(this.legend, [this.by, low, high], () => (values.length ? [h("i", { class: "swatch", css: { background: this.color(low) || "transparent" } }), short(low), " to ", h("i", { class: "swatch", css: { background: this.color(high) || "transparent" } }), short(high)] : ""));
    this.members.replaceChildren(...this.found.map((each) => this.drawMember(each)));
  }

  /** Two hues where values have two signs, one where they have not; nothing at 0. */
  color(value) {
    if (value === null || value === undefined || !this.by) return null;
    const share = Math.round(62 * Math.min(1, Math.abs(value) / this.scale.size));
    const hue = this.scale.isSigned ? (value < 0 ? "--orange" : "--blue") : this.by === "advantage" && value < 0 ? "--orange" : this.by === "lag" ? "--violet" : "--blue";
    return share ? `color-mix(in srgb, var(${hue}) ${share}%, transparent)` : null;
  }

  drawMember(each) {
    const { row } = each, uses = each.uses.map((use) => `step ${whole(use.step)}${use.version === null ? "" : `, learner at version ${whole(use.version)}, lag ${whole(use.lag)}`}`);
    const spans = [...new Set(each.versions.filter((version) => version >= 0))];
    const parts = Object.entries(each.reward.parts).map(([name, value]) => `${name} ${short(value)}`).join(", ");
    const facts = [["reward", `${short(row.reward_total)}${parts ? ` (${parts})` : ""}${row.reward_status === "ok" ? "" : `, ${row.reward_status}`}`], ["advantage", short(row.advantage)], ["trained on", uses.join("; ") || `not: ${row.outcome}${row.reason ? `, ${row.reason}` : ""}`],
      ["sampled by", `${row.generator_id}, version ${spans.join(", ")}`], ["tokens", `${whole(row.num_tokens)}, ended by ${row.stop_reason}`], ["made in", `${duration(row.seconds)}, temperature ${short(each.sampling.temperature)}`]];
    const metrics = Object.entries(each.metrics).map(([name, value]) => `${name} ${short(value)}`).join(", ");
    return h("article", { class: `member ${row.id === this.member ? "chosen" : ""}` },
      h("h2", null, h("i", { class: `dot ${row.reward_status !== "ok" ? "bad" : row.is_correct ? "good" : ""}` }), ` ${row.index} `, h("span", { class: "muted mono" }, row.id)),
      h("dl", { class: "facts" }, [...facts, ...(metrics ? [["agent", metrics]] : [])].map(([name, value]) => [h("dt", null, name), h("dd", null, value)])),
      each.messages.map((message) => this.drawMessage(each, message)));
  }

  drawMessage(each, message) {
    const title = [message.role, message.is_model && ` · ${whole(message.num_tokens)} tokens`, message.reward === null ? null : ` · reward ${short(message.reward)}`];
    const content = message.is_model ? this.drawTokens(each, message) : message.text || each.token_ids.slice(message.first_token, message.first_token + message.num_tokens).join(" ");
    return h("div", { class: `message ${message.is_model ? "model" : ""}` }, h("h3", null, title), h("div", { class: "tokens" }, content), message.calls.map((call) => h("pre", { class: "call" }, call)));
  }

  drawTokens(each, message, all = false) {
    const end = message.first_token + message.num_tokens, last = all ? end : Math.min(end, message.first_token + MAX_TOKENS), drawn = [];
    for (let index = message.first_token; index < last; index += 1) {
      const value = each.numbers[this.by]?.[index], known = Object.entries(each.numbers).filter(([, values]) => values[index] !== null).map(([name, values]) => `${name} ${short(values[index])}`);
      drawn.push(h("span", { title: `token ${each.token_ids[index]}, version ${each.versions[index]}\n${known.join("\n")}`, css: { background: this.color(value) || "" } }, each.texts.length ? each.texts[index] : `${each.token_ids[index]} `));
    }
    if (last < end) {
      const more = h("button", { onclick: () => more.parentElement.replaceChildren(...this.drawTokens(each, message, true)) }, `${whole(end - last)} more tokens`);
      drawn.push(more);
    }
    return drawn;
  }

  leave() {
    this.open({ group: "", member: "", by: "" });
  }

  onKey(key) {
    if (key === "Escape") this.leave();
  }
}
