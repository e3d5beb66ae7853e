"use strict";
const EVERY = 5000;
const PAUSE = 1000;
const PLURALS = { summary: "summaries", criterion: "criteria", entity: "entities", work: "works" };
const MOST_EVENTS = 50;
const MOST_ROWS = 200;
const one = (name) => document.getElementById(name);
let token = sessionStorage.getItem("token") || "";
let shown = "";
let last = 0;

// The link that `serve` prints carries the token behind the #, which browsers never send. It goes out of sight at once.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return;
  token = given;
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname + location.search);
}

class Refused extends Error {}

async function ask(path, more = {}, how = {}) {
  const headers = token ? { authorization: `Bearer ${token}`, ...more } : more;
  const answer = await fetch(path, { headers, ...how });
  if (answer.status === 401 || answer.status === 403) throw new Refused();
  return answer;
}

const json = async (path) => (await ask(path)).json();

function ago(moment) {
  const seconds = Math.max(0, (Date.now() - new Date(moment)) / 1000);
  const [count, unit] = seconds < 90 ? [seconds, "s"] : seconds < 5400 ? [seconds / 60, "min"]
    : seconds < 129600 ? [seconds / 3600, "h"] : [seconds / 86400, "days"];
  return `${Math.round(count)} ${unit} ago`;
}

function size(bytes) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) { bytes /= 1000; unit += 1; }
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}

// Names come from sandboxes: they are only ever set as text.
function row(...cells) {
  const line = document.createElement("tr");
  for (const [content, style = ""] of cells) {
    const cell = line.insertCell();
    cell.className = style;
    if (content) cell.append(typeof content === "string" ? breakable(content) : content);
  }
  return line;
}

// Paths and ids are broken after a sign, never within a word.
function breakable(text) {
  const whole = document.createElement("span");
  for (const part of text.split(/(?<=[/:~_.]|\w-)(?=\w)/)) whole.append(part, document.createElement("wbr"));
  return whole;
}

function lines(...texts) {
  const whole = document.createElement("div");
  for (const text of texts.filter(Boolean)) {
    const line = document.createElement("p");
    line.append(breakable(text));
    whole.append(line);
  }
  return whole;
}

// A narrow screen shows no heads of columns: each cell brings its own.
function put(table, rows) {
  const heads = [...table.querySelectorAll("th")].map((head) => head.textContent);
  for (const line of rows) [...line.cells].forEach((cell, place) => { cell.dataset.label = heads[place]; });
  return rows;
}

function fill(section, rows) {
  const place = one(section);
  place.querySelector("tbody").replaceChildren(...put(place, rows));
  const none = place.querySelector(".none");
  if (none) none.hidden = rows.length > 0;
  place.hidden = rows.length === 0 && !none;
}

function link(text, act) {
  const button = document.createElement("button");
  button.className = "link";
  button.append(breakable(text));
  button.onclick = act;
  return button;
}

async function health() {
  const answer = await fetch("readyz");
  const { status, version, checks } = await answer.json();
  const wrong = Object.entries(checks).filter(([, said]) => said !== "ok").map(([name, said]) => `${name}: ${said}`);
  one("health").textContent = [version, answer.ok ? "ready" : `not ready: ${wrong.join("; ")}`].join(" · ");
  one("health").className = answer.ok ? "good" : "bad";
}

async function look() {
  await health();
  const { store, memories, may_change } = await json("v1/memories");
  const { attachments, missing, noticed } = await json("v1/attachments");
  one("store").replaceChildren(breakable(store));
  fill("memories", memories.map((memory) => row(
    [link(memory.memory, () => choose(memory.memory))],
    memory.problem ? [memory.problem, "bad"] : [memory.created ? ago(memory.created) : "none became the head"],
    [memory.pending ? `${memory.snapshots} (${memory.pending} pending)` : String(memory.snapshots), "number"], [memory.files.toLocaleString("en"), "number"], [size(memory.bytes), "number"],
  )));
  fill("attached", missing.map((one) => row(
    [one.memory], [one.on], ["missing", "bad"], ["", "whole"], [""], [lines(`since ${ago(one.since)}`, one.problem), "bad"],
  )).concat(attachments.map((attached) => row(
    [attached.memory], [attached.sandbox], [attached.state, { open: attached.problem ? "bad" : "good", lost: "bad" }[attached.state]],
    [attached.saved ? ago(attached.saved) : "not yet", "whole"], [attached.conversation],
    attached.problem ? [lines(attached.problem, attached.hint, attached.note), "bad"] : [attached.note],
  ))).concat(noticed.map((one) => row(
    [one.memory], [one.sandbox], [one.state, { failed: "bad", refused: "bad" }[one.state]], ["", "whole"], [""],
    [lines(one.problem, one.hint), one.state === "reader" ? "" : "bad"],
  ))));
  await waiting(memories, may_change);
  await snapshots();
}

// The rows are made again only when others wait: somebody may be writing a reason in one.
let waits = "";
async function waiting(memories, may) {
  const rows = [];
  const ids = [may];
  for (const memory of memories.filter((memory) => memory.pending)) {
    const answer = await ask(`v1/memories/${encodeURIComponent(memory.memory)}/snapshots`);
    const found = answer.ok ? (await answer.json()).snapshots : [];
    for (const snapshot of found.filter((snapshot) => snapshot.standing === "pending").slice(0, MOST_ROWS)) {
      ids.push(memory.memory, snapshot.snapshot);
      rows.push(row(
        [memory.memory], [link(snapshot.snapshot, () => { choose(memory.memory); inspect(memory.memory, snapshot.snapshot, true); })],
        [ago(snapshot.created), "whole"], [snapshot.conversation || snapshot.sandbox, "faint"],
        [block(snapshot.pending), "faint"], [may ? decision(memory.memory, snapshot.snapshot) : ""],
      ));
    }
  }
  if (waits === ids.join("\n")) return;
  waits = ids.join("\n");
  fill("waiting", rows);
}

function decision(memory, snapshot) {
  const form = document.createElement("form");
  const because = document.createElement("input");
  because.placeholder = "why";
  because.maxLength = 500;
  because.setAttribute("aria-label", `Why ${snapshot} is accepted or declined`);
  form.append(because);
  for (const [word, path] of [["Accept", "acceptances"], ["Decline", "declines"]]) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = word;
    button.onclick = () => decide(memory, path, { snapshot, because: because.value }, form);
    form.append(button);
  }
  form.onsubmit = (event) => event.preventDefault();
  return form;
}

async function decide(memory, path, body, form) {
  for (const part of form.elements) part.disabled = true;
  const answer = await ask(`v1/memories/${encodeURIComponent(memory)}/${path}`, { "content-type": "application/json" }, { method: "POST", body: JSON.stringify(body) });
  const said = await answer.json();
  one("decided").textContent = answer.ok ? `${body.snapshot} of ${memory}: ${path === "declines" ? "declined" : "accepted"}.` : said.detail;
  one("decided").className = answer.ok ? "none" : "bad";
  waits = "";
  await refresh();
}

// What is shown of a snapshot stays only as long as its memory is.
let inspected = 0;
function choose(memory) {
  if (memory !== shown) {
    inspected += 1;
    for (const section of ["changes", "says", "files"]) one(section).hidden = true;
  }
  shown = memory;
  refresh();
}

async function snapshots() {
  if (!shown) return;
  const answer = await ask(`v1/memories/${encodeURIComponent(shown)}/snapshots`);
  const rows = answer.ok ? (await answer.json()).snapshots : [];
  one("of").replaceChildren(breakable(shown));
  fill("snapshots", rows.map((snapshot) => row(
    [link(snapshot.snapshot, () => inspect(shown, snapshot.snapshot, snapshot.standing === "pending"))], [snapshot.standing, { head: "good", damaged: "bad", rejected: "bad", pending: "bad", declined: "bad" }[snapshot.standing]],
    snapshot.created ? [ago(snapshot.created), "whole"] : [snapshot.problem, "bad"], [snapshot.label || snapshot.conversation || snapshot.sandbox, "faint"],
    [counted(snapshot.changes), "faint"], [snapshot.files.toLocaleString("en"), "number"], [size(snapshot.bytes), "number"],
  )));
}

function counted(changes) {
  if (!changes) return "unknown";
  const parts = Object.entries(changes).flatMap(([kind, { added, changed, removed }]) =>
    [["+", added, ""], ["", changed, " changed"], ["-", removed, ""]].filter(([, number]) => number).map(
      ([sign, number, after]) => `${sign}${number.toLocaleString("en")} ${number === 1 ? kind : PLURALS[kind] || `${kind}s`}${after}`));
  return parts.join(", ") || "nothing that it says";
}

// What could not be told, in its own words: nothing is shown as if there were nothing.
async function complaint(answer, told) {
  if (answer.ok) return [...(told.problems || []), ...(told.more ? [`${told.more.toLocaleString("en")} more are not shown.`] : [])];
  const { detail, hint } = await answer.json().catch(() => ({ detail: `The service answered ${answer.status}.` }));
  return [[detail, hint].filter(Boolean).join(" ")];
}

// What accepting a snapshot would change: it is compared with the present head, if there is one.
async function compare(base, name, waits) {
  const plain = `${base}/diff?to=${name}&limit=${MOST_ROWS}`;
  if (!waits) return ask(plain);
  const answer = await ask(`${plain}&from=latest`);
  return answer.status === 404 ? ask(plain) : answer;
}

// A snapshot never changes: what it says is asked for once, when somebody opens it.
async function inspect(memory, snapshot, waits) {
  const mine = inspected += 1;
  const base = `v1/memories/${encodeURIComponent(memory)}`;
  const name = encodeURIComponent(snapshot);
  const [difference, said, whole] = await Promise.all([
    compare(base, name, waits), ask(`${base}/snapshots/${name}/records?limit=${MOST_ROWS}`),
    ask(`${base}/snapshots/${name}`),
  ]);
  if (mine !== inspected) return;
  const compared = difference.ok ? await difference.json() : { records: [], files: [] };
  const { records: changes, files: others } = compared;
  const untold = await complaint(difference, compared);
  if (compared.next) untold.push(`These are the first ${MOST_ROWS}: ${counted(compared.counts)}.`);
  one("untold").replaceChildren(lines(...untold));
  one("how").textContent = waits ? "What would change with" : "What changed with";
  one("with").replaceChildren(breakable(snapshot));
  const style = { added: "good", removed: "bad" };
  fill("changes", [
    ...changes.map((record) => row([record.change, style[record.change]], [record.kind], [record.title], [difflines(record), "faint"])),
    ...others.map((file) => row([file.change, style[file.change]], ["file"], [file.path], [difflines(file), "faint"])),
  ]);
  const read = said.ok ? await said.json() : { records: [], next: null };
  const { records, next } = read;
  one("unread").replaceChildren(lines(...await complaint(said, read)));
  one("more").textContent = next ? `the first ${MOST_ROWS}` : "";
  fill("says", records.map((record) => row([record.kind], [record.title], [record.path, "faint"], [record.at ? ago(record.at) : "", "faint"])));
  const entries = whole.ok ? (await whole.json()).entries.filter((entry) => entry.type === "file") : [];
  fill("files", entries.slice(0, MOST_ROWS).map((entry) => row([entry.path], [size(entry.size), "number"])));
  one("changes").scrollIntoView();
}

function difflines(record) {
  return block(record.diff.length ? record.diff.join("\n") : record.text || "");
}

function block(text) {
  if (!text) return "";
  const whole = document.createElement("pre");
  whole.textContent = text.length > 2000 ? `${text.slice(0, 2000)}…` : text;
  return whole;
}

// What a restore left as it was, saved first or set aside.
function spared(details) {
  const words = [];
  if (details.kept) words.push("left as it is");
  if (details.saved_first) words.push(`saved first: ${details.saved_first}`);
  if (details.set_aside) words.push(`set aside: ${details.set_aside.files} files in ${details.set_aside.path}`);
  return words;
}

function happened(event) {
  const bad = /failed|lost|rejected|diverged|pending|incomplete|unsaved|unfinished/.test(event.type);
  const why = event.details.error || event.details.reason;
  const said = why
    ? lines(why.message, why.hint || event.details.hint, ...spared(event.details))
    : lines(event.details.snapshot, ...spared(event.details));
  const line = row([new Date(event.at).toLocaleTimeString("en-GB"), "whole"], [event.type, bad ? "bad" : ""], [event.memory], [event.sandbox], [said, "faint"]);
  const body = one("events").querySelector("tbody");
  body.prepend(...put(one("events"), [line]));
  one("events").querySelector(".none").hidden = true;
  while (body.rows.length > MOST_EVENTS) body.deleteRow(-1);
}

// Not EventSource: it cannot send a token.
async function listen() {
  let rest = "";
  const reader = (await ask("v1/events", { "last-event-id": String(last) })).body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").find((text) => text.startsWith("data: "));
      if (!data) continue;
      const event = JSON.parse(data.slice(6));
      last = event.number;
      happened(event);
      refresh();
    }
  }
}

// Whether there is anything to search in does not change while a service lives: asked once.
let searchable;
async function searching() {
  if (searchable !== undefined) return;
  searchable = (await ask("v1/search?q=memory&limit=1")).status !== 409;
  one("search").hidden = !searchable;
}

function marked(snippet) {
  const line = document.createElement("span");
  snippet.split("**").forEach((part, place) => {
    const piece = document.createElement(place % 2 ? "mark" : "span");
    piece.textContent = part;
    line.append(piece);
  });
  return line;
}

async function find() {
  const answer = await ask(`v1/search?q=${encodeURIComponent(one("words").value)}`);
  const said = await answer.json();
  const hits = answer.ok ? said.hits : [];
  const table = one("search").querySelector("table");
  table.hidden = hits.length === 0;
  table.querySelector("tbody").replaceChildren(...put(table, hits.map((hit) => row(
    [hit.memory], [hit.kind], [hit.title], [marked(hit.snippet), "faint"], [hit.at ? ago(hit.at) : "", "faint"],
  ))));
  const behind = answer.ok && said.behind.length ? `Newer than what was searched: ${said.behind.join(", ")}.` : "";
  one("found").textContent = !answer.ok ? said.detail : hits.length ? behind : "Nothing found.";
  one("found").className = answer.ok ? "none" : "bad";
}

let busy = false;
async function refresh() {
  if (busy) return;
  busy = true;
  try {
    await look();
    await searching();
    one("login").hidden = true;
    one("events").hidden = false;
  } catch (problem) {
    if (problem instanceof Refused) {
      one("refused").hidden = !token;
      one("login").hidden = false;
    } else {
      one("health").textContent = "no answer";
      one("health").className = "bad";
    }
  } finally {
    busy = false;
  }
}

async function follow() {
  for (;;) {
    try { await listen(); } catch { /* it is asked again below */ }
    await new Promise((wake) => setTimeout(wake, PAUSE));
  }
}

one("login").onsubmit = (event) => {
  event.preventDefault();
  token = one("token").value;
  sessionStorage.setItem("token", token);
  refresh();
};
one("search").querySelector("form").onsubmit = (event) => {
  event.preventDefault();
  find().catch(() => { one("found").textContent = "no answer"; });
};
takeToken();
onhashchange = () => { takeToken(); refresh(); };
refresh();
follow();
setInterval(refresh, EVERY);
