// The console: a chat that outlives its connection, and the cluster as the gateway sees it.
// A chat's request carries an Idempotency-Key, and every event an id: what is kept of them in sessionStorage is
// enough to go on after a reload, a lost network or a lost gateway, with nothing missing and nothing twice.

import { watchModels } from "./models.js";

const $ = (id) => document.getElementById(id);
const BACKGROUND = 60; // seconds that an answer goes on while this page is away
const SHOWN = 20; // generations
const ATTEMPTS = 20; // at going on with a stream
const STORE = "ryzanstein.chat";

// --- asking the gateway -------------------------------------------------------------------------

class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more = {}) {
  const key = $("key").value.trim();
  return key ? { authorization: `Bearer ${key}`, ...more } : more;
}

/** The answer, or a Refusal with the gateway's own words. */
async function call(path, options = {}) {
  const answer = await fetch(path, { cache: "no-store", ...options, headers: headers(options.headers) });
  if (answer.ok) return answer;
  let words = `The gateway answered with status ${answer.status}.`;
  try {
    words = (await answer.json()).error.message;
  } catch {
    // not in our shape: a proxy's page, perhaps
  }
  if (answer.status === 401) words += " Enter a key in the field above.";
  throw new Refusal(answer.status, words);
}

/** Server-sent events of a body, as {data, id}; an event that is cut off does not count. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const event = { data: "", id: null };
      for (const line of part.split("\n")) {
        if (line.startsWith("data: ")) event.data += line.slice(6);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
      }
      if (event.data) yield event;
    }
  }
}

const pause = (milliseconds) => new Promise((resume) => setTimeout(resume, milliseconds));

/** crypto.randomUUID is for secure contexts alone. */
function random() {
  return [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// --- the conversation ---------------------------------------------------------------------------

const chat = restored() ?? { session: random(), messages: [], running: null };
let connection = null; // of what is read now
let saving = 0;

function restored() {
  try {
    return JSON.parse(sessionStorage.getItem(STORE));
  } catch {
    return null;
  }
}

function save() {
  clearTimeout(saving);
  saving = 0;
  sessionStorage.setItem(STORE, JSON.stringify(chat));
}

function saveSoon() {
  saving ||= setTimeout(save, 250);
}

function show(message) {
  const item = document.createElement("li");
  item.dataset.role = message.role;
  item.textContent = message.content;
  $("transcript").append(item);
  toEnd();
  return item;
}

/** Whether the reader is at the end of the conversation, and has not scrolled back in it. */
function atEnd() {
  const box = $("transcript");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 48;
}

function toEnd() {
  $("transcript").scrollTop = $("transcript").scrollHeight;
}

function settle() {
  const busy = chat.running !== null;
  $("send").disabled = busy;
  $("stop").disabled = !busy;
}

function fail(words) {
  $("error").textContent = words;
  $("error").hidden = !words;
}

function body(messages) {
  const system = $("system").value.trim();
  const request = {
    model: $("model").value,
    stream: true,
    stream_options: { include_usage: true },
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
  };
  if ($("temperature").value !== "") request.temperature = Number($("temperature").value);
  if ($("limit").value !== "") request.max_tokens = Number($("limit").value);
  return request;
}

function send() {
  const text = $("prompt").value.trim();
  if (!text || chat.running) return;
  $("prompt").value = "";
  const message = { role: "user", content: text };
  chat.messages.push(message);
  show(message);
  chat.running = { key: random(), body: body(chat.messages), id: null, last: null, text: "" };
  save();
  follow();
}

/** The stream of `running` from where it was left: by the generation's id, else by the request and its key. */
function open(running, signal) {
  const after = running.last === null ? {} : { "last-event-id": running.last };
  if (running.id) return call(`v1/generations/${running.id}/stream`, { headers: after, signal });
  return call("v1/chat/completions", {
    method: "POST",
    signal,
    body: JSON.stringify(running.body),
    headers: {
      "content-type": "application/json",
      "idempotency-key": running.key,
      "x-ryzanstein-background": String(BACKGROUND),
      "x-session-id": chat.session,
    },
  });
}

/** Reads until the end, going on behind the last event whenever the connection is lost. */
async function follow() {
  const running = chat.running;
  const item = show({ role: "assistant", content: running.text });
  item.setAttribute("aria-busy", "true");
  fail("");
  settle();
  const began = performance.now();
  let lost = 0;
  while (chat.running === running) {
    connection = new AbortController();
    try {
      const answer = await open(running, connection.signal);
      for await (const event of events(answer.body)) {
        lost = 0;
        if (take(running, event, item)) return finish(running, item, began);
      }
      lost += 1;
    } catch (error) {
      if (error.name === "AbortError") return;
      const passing = !(error instanceof Refusal) || (running.id && [429, 503].includes(error.status));
      lost += 1;
      if (!passing || lost > ATTEMPTS) return finish(running, item, began, told(error));
    }
    $("note").textContent = "The connection was lost; resuming after the last event …";
    await pause(Math.min(3000, 100 * 2 ** lost));
  }
}

/** One event; true at the end. */
function take(running, event, item) {
  if (event.data === "[DONE]") return true;
  const chunk = JSON.parse(event.data);
  if (chunk.error) throw new Refusal(0, chunk.error.message);
  running.id = chunk.id;
  running.last = event.id ?? running.last;
  if (chunk.usage) running.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (choice?.finish_reason) running.reason = choice.finish_reason;
  if (choice?.delta.content) {
    const follows = atEnd();
    running.text += choice.delta.content;
    item.append(choice.delta.content);
    if (follows) toEnd();
    $("note").textContent = "";
  }
  saveSoon();
  return false;
}

function finish(running, item, began, words = "") {
  item.removeAttribute("aria-busy");
  chat.running = null;
  connection = null;
  if (running.text || !words) chat.messages.push({ role: "assistant", content: running.text });
  else item.remove();
  save();
  settle();
  fail(words);
  const seconds = (performance.now() - began) / 1000;
  const ends = { length: "; the limit of tokens was reached", stopped: "; stopped" };
  $("note").textContent = running.usage
    ? `${running.usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, prompt ${running.usage.prompt_tokens}` +
      ` (${running.usage.prompt_tokens_details.cached_tokens} cached)${ends[running.reason] ?? ""}`
    : (ends[running.reason] ?? "").replace("; ", "");
}

/** Ends the generation at the gateway, not just here. */
async function stop() {
  const running = chat.running;
  if (!running) return;
  connection?.abort();
  running.reason = "stopped";
  finish(running, $("transcript").lastElementChild, performance.now());
  if (!running.id) return; // not begun: it is given up when nobody comes for it
  try {
    await call(`v1/generations/${running.id}`, { method: "DELETE" });
  } catch (error) {
    fail(`The answer may continue at the gateway: ${told(error)}`);
  }
}

async function clear() {
  await stop();
  Object.assign(chat, { session: random(), messages: [], running: null });
  save();
  $("transcript").replaceChildren();
  $("note").textContent = "";
  fail("");
  $("prompt").focus();
}

function told(error) {
  if (error instanceof Refusal) return error.message;
  return "The gateway does not answer; it may be starting, or the network is gone.";
}

// --- the cluster --------------------------------------------------------------------------------

const percent = (share) => `${share > 0 && share < 0.1 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`;
const age = (seconds) => (seconds < 120 ? `${Math.max(0, Math.round(seconds))} s` : `${Math.round(seconds / 60)} min`);

function state(name) {
  const shown = document.createElement("span");
  shown.dataset.state = name;
  shown.textContent = name;
  return shown;
}

function kv(used) {
  const meter = Object.assign(document.createElement("meter"), { min: 0, max: 1, high: 0.9, value: used });
  meter.setAttribute("aria-label", `KV cache used: ${percent(used)}`);
  const shown = document.createElement("span");
  shown.append(meter, ` ${percent(used)}`);
  shown.dataset.kind = "number";
  return shown;
}

/** Rows of cells, each a text or a node, into a table. */
function fill(id, rows, none) {
  const lines = rows.map((cells) => {
    const line = document.createElement("tr");
    for (const cell of cells) {
      const place = line.insertCell();
      if (/^[\d–]/.test(cell.textContent ?? cell)) place.dataset.kind = "number";
      place.append(cell);
    }
    return line;
  });
  if (!lines.length) {
    const line = document.createElement("tr");
    const cell = Object.assign(document.createElement("td"), { className: "none", colSpan: 9, textContent: none });
    line.append(cell);
    lines.push(line);
  }
  $(id).tBodies[0].replaceChildren(...lines);
}

function ring(group) {
  const note = group.message ? ` (${group.message})` : "";
  const shown = document.createElement("span");
  shown.append(state(group.state), group.state === "starting" ? ` ${percent(group.loaded)}${note}` : note);
  return [
    group.group,
    group.model,
    shown,
    group.slots ? `${group.running} / ${group.slots}` : String(group.running),
    String(group.waiting),
    kv(group.kv_used),
    group.step_seconds ? `${(group.step_seconds * 1000).toFixed(1)} ms` : "–",
    percent(group.weight),
  ];
}

function showCluster(cluster) {
  $("link").textContent = `gateway ${cluster.gateway}`;
  fill("rings", cluster.groups.map(ring), "none yet: requests wait until one is there");
  const total = cluster.generations_total;
  $("count").textContent = total > SHOWN ? `(the newest ${SHOWN} of ${total})` : total ? `(${total})` : "";
  fill(
    "generations",
    cluster.generations.slice(0, SHOWN).map((item) => [
      item.digest,
      item.model,
      state(item.status),
      String(item.tokens),
      String(item.readers),
      age(cluster.now - item.created),
    ]),
    "none",
  );
  fill(
    "services",
    cluster.services.map((item) => [
      item.name,
      item.instance,
      state(item.state),
      item.heard_at ? `${age(cluster.now - item.heard_at)} ago` : "–",
    ]),
    "none known",
  );
}

function showModels(names) {
  const field = $("model");
  if (names.join("\n") === [...field.options].map((option) => option.value).join("\n")) return;
  const chosen = field.value || chat.running?.body.model;
  field.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
}

let paths = null; // of the API: what this gateway has

async function showBatches() {
  paths ??= (await (await call("openapi.json")).json()).paths;
  if (!paths["/v1/batches"]) return;
  const jobs = (await (await call("v1/batches?limit=20")).json()).data;
  $("batches").hidden = false;
  fill(
    "batches",
    jobs.map((job) => {
      const count = job.request_counts ?? { completed: 0, failed: 0, total: 0 };
      return [job.id, state(job.status), String(count.completed), String(count.failed), String(count.total)];
    }),
    "none",
  );
}

async function watch() {
  for (let round = 0; ; round += 1) {
    if (!document.hidden) {
      try {
        showCluster(await (await call("v1/cluster")).json());
        $("trouble").hidden = true;
        if (round % 5 === 0) await showBatches();
      } catch (error) {
        $("link").textContent = "not connected";
        $("trouble").textContent = told(error);
        $("trouble").hidden = false;
      }
    }
    await pause(1000);
  }
}

// --- the page -----------------------------------------------------------------------------------

for (const name of ["key", "system", "temperature", "limit"]) {
  const field = $(name);
  field.value = sessionStorage.getItem(`ryzanstein.${name}`) ?? "";
  field.addEventListener("input", () => sessionStorage.setItem(`ryzanstein.${name}`, field.value));
}
$("access").addEventListener("submit", (event) => event.preventDefault());
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("stop").addEventListener("click", stop);
$("clear").addEventListener("click", clear);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
addEventListener("pagehide", save);
chat.messages.forEach(show);
settle();
if (chat.running) follow();
watchModels({ call, events, fill, state, percent, told, onNames: showModels });
watch();
