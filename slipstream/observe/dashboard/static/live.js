// What the server knows: one-off questions, and RunFeed, a run that is followed.

export class Refused extends Error {}

async function answer(response) {
  if (response.ok) return response.json();
  throw new Refused((await response.text()).trim() || `${response.status} ${response.statusText}`);
}

/** Kept by enter.js, for the pages of this port alone. */
const key = () => localStorage.getItem("slipstream-key") || "";

export const ask = async (path) => answer(await fetch(path, { headers: { "x-slipstream-key": key() } }));
export const runPath = (id, rest = "") => `/api/runs/${encodeURIComponent(id)}${rest}`;

export async function act(path, body) {
  const headers = { "content-type": "application/json", "x-slipstream-key": key() };
  return answer(await fetch(path, { method: "POST", headers, body: JSON.stringify(body) }));
}

const asked = new Map();
/** Ask once for what does not change while the page is open. */
export function askOnce(path) {
  if (!asked.has(path)) {
    const found = ask(path);
    found.catch(() => asked.delete(path));
    asked.set(path, found);
  }
  return asked.get(path);
}

const ALWAYS = ["step", "time_s"];

/** Events: rows, view, events, state. */
export class RunFeed extends EventTarget {
  constructor(id) {
    super();
    this.id = id;
    this.view = null;
    this.events = [];
    this.columns = {};
    this.length = 0;
    this.keys = [];
    this.state = "connecting";
    this.wanted = new Set(ALWAYS);
    this.onVisible = () => (document.hidden ? this.pause() : this.resume());
    document.addEventListener("visibilitychange", this.onVisible);
  }

  /** Have the columns of these keys from now on. */
  async want(keys) {
    const isMissing = keys.some((key) => !this.wanted.has(key));
    for (const key of keys) this.wanted.add(key);
    if (isMissing || !this.position) await this.load();
    else await this.loading;
    if (!this.stream) this.connect();
  }

  /** Read the columns anew. One question at a time; what is wanted meanwhile is asked for before this ends. */
  load() {
    this.isStale = true;
    this.loading ||= this.loadAll().finally(() => { this.loading = null; });
    return this.loading;
  }

  async loadAll() {
    while (this.isStale) {
      this.isStale = false;
      await this.fetchColumns();
    }
    this.dispatchEvent(new Event("rows"));
  }

  async fetchColumns() {
    const keys = [...this.wanted].map(encodeURIComponent).join(",");
    const found = await ask(runPath(this.id, `/series?keys=${keys}`));
    this.position = found.position;
    this.length = found.length;
    this.keys = found.keys;
    const empty = () => new Array(found.length).fill(null);
    this.columns = Object.fromEntries([...this.wanted].map((key) => [key, found.columns[key] || empty()]));
  }

  connect() {
    if (this.isClosed || document.hidden) return;
    const stream = new EventSource(runPath(this.id, `/stream?after=${this.position}&key=${key()}`));
    this.stream = stream;
    stream.onopen = () => this.setState("open");
    stream.onerror = () => this.setState(stream.readyState === EventSource.CLOSED ? "closed" : "connecting");
    stream.addEventListener("reset", () => this.load());
    stream.addEventListener("rows", (event) => this.append(event));
    stream.addEventListener("view", (event) => {
      this.view = JSON.parse(event.data);
      this.viewedAt = performance.now();
      this.dispatchEvent(new Event("view"));
    });
    stream.addEventListener("events", (event) => {
      this.events = JSON.parse(event.data);
      this.dispatchEvent(new Event("events"));
    });
  }

  append(event) {
    const { first, rows } = JSON.parse(event.data);
    this.position = event.lastEventId;
    if (first > this.length) { this.load(); return; }
    const fresh = rows.slice(this.length - first);
    for (const row of fresh) {
      for (const [key, column] of Object.entries(this.columns)) column.push(typeof row[key] === "number" ? row[key] : null);
      this.length += 1;
    }
    const known = new Set(this.keys);
    const added = fresh.flatMap((row) => Object.keys(row).filter((key) => typeof row[key] === "number" && !known.has(key)));
    if (added.length) this.keys = [...new Set([...this.keys, ...added])].sort();
    if (fresh.length) this.dispatchEvent(new Event("rows"));
  }

  /** A hidden tab holds no connection: a browser has only six to one server, over all tabs. */
  pause() {
    this.stream?.close();
    this.stream = null;
  }

  resume() {
    if (!this.stream && this.position) this.connect();
  }

  setState(state) {
    this.state = state;
    this.dispatchEvent(new Event("state"));
  }

  last(key, back = 0) {
    const column = this.columns[key] || [];
    for (let index = column.length - 1 - back; index >= 0; index -= 1) if (column[index] !== null) return column[index];
    return null;
  }

  close() {
    this.isClosed = true;
    document.removeEventListener("visibilitychange", this.onVisible);
    this.pause();
  }
}
