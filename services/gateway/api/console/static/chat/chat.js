// The chat: which conversation is shown, what is sent, and the answers that are being read, also of others.

import { random, send, told } from "../app/api.js";
import { $, download, say, soon } from "../app/dom.js";
import { askName } from "../app/naming.js";
import { Ahead, PAUSE } from "./ahead.js";
import { Answer } from "./answer.js";
import { Attachments } from "./attachments.js";
import { LIMITS, add, choose, create, messages, path } from "./conversation.js";
import { History } from "./history.js";
import { figures } from "./message.js";
import { Presets } from "./presets.js";
import { backgroundOf, keepSettings, lastSettings, requestOf, settingsForm } from "./settings.js";
import { Store } from "./store.js";
import { fileName, toJson, toMarkdown } from "./transfer.js";
import { Transcript } from "./transcript.js";

const SAVED = 300; // milliseconds between two writes of an answer that grows

export class Chat {
  #open = new Map(); // id → {conversation, answer, save}: the one that is shown, and those with an answer under way
  #shown = null;
  #asked = null; // the last time that one was to be shown
  #store = new Store((id) => this.#changedElsewhere(id));
  #history = new History(this.#store);
  #files = new Attachments(fail);
  #ahead = new Ahead(send);
  #transcript = new Transcript({
    edit: (node, text) => this.#guarded(() => this.#ask(node.parent, text, node.files)),
    regenerate: (node) => this.#guarded(() => this.#answer(node.parent)),
    proceed: (node) => this.#guarded(() => this.#proceed(node)),
    results: (node, texts) => this.#guarded(() => this.#results(node, texts)),
    choose: (node) => this.#choose(node),
    awaitsResults: (node) => node.finish === "tool_calls" && !node.pending && this.#shown?.conversation.leaf === node.id,
  });
  #showFields = settingsForm($("parameters"), (settings) => this.#set(settings));
  #presets = new Presets((settings) => {
    this.#showFields(settings);
    this.#set(settings);
  });

  constructor() {
    this.#shown = this.#empty();
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => this.#key(event));
    const typed = soon(() => this.#prepare(), PAUSE);
    $("prompt").addEventListener("input", () => typed());
    $("stop").addEventListener("click", () => this.stop());
    $("model").addEventListener("change", () => localStorage.setItem("ryzanstein.model", $("model").value));
    $("rename").addEventListener("click", () => this.#rename());
    $("delete").addEventListener("click", () => this.#delete());
    $("export-markdown").addEventListener("click", () => this.#export("md", "text/markdown", toMarkdown));
    $("export-json").addEventListener("click", () => this.#export("json", "application/json", (one) => toJson([one])));
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !closeMenus()) this.stop();
    });
    document.addEventListener("click", (event) => {
      if (!$("manage").contains(event.target)) $("manage").open = false;
    });
    if (!CSS.supports("field-sizing", "content")) {
      const lines = (field) => Math.min(10, field.value.split("\n").length);
      $("prompt").addEventListener("input", ({ target }) => Object.assign(target, { rows: lines(target) }));
    }
    addEventListener("pagehide", () => this.#open.forEach((entry) => entry.save.now()));
  }

  // --- which one is shown ------------------------------------------------------------------------

  /** Shows a conversation; an empty id, or one that is not there, begins one. */
  async open(id) {
    const asked = (this.#asked = {});
    const entry = this.#open.get(id) ?? (await this.#stored(id)) ?? this.#empty();
    if (this.#asked !== asked) return; // another one has been asked for meanwhile
    const left = this.#shown;
    if (left && left !== entry && !left.answer) this.#open.delete(left.conversation.id);
    if (left !== entry) fail("");
    this.#shown = entry;
    say("note", "");
    this.#resume(entry);
    this.#showFields(entry.conversation.settings);
    this.#presets.show(entry.conversation.settings);
    this.#show();
    this.#transcript.toEnd();
    this.#history.select(entry.conversation.id);
  }

  async #stored(id) {
    if (!id) return null;
    try {
      const found = await this.#store.get(id);
      return found ? (this.#open.get(id) ?? this.#entry(found)) : null;
    } catch (error) {
      fail(`The browser's conversations cannot be read (${error.name}).`);
      return null;
    }
  }

  #empty() {
    return this.#entry(create(random(), Date.now(), lastSettings(localStorage)));
  }

  #entry(conversation) {
    const entry = { conversation, answer: null };
    entry.save = soon(() => this.#save(entry), SAVED);
    this.#open.set(conversation.id, entry);
    return entry;
  }

  /** Goes on with an answer that was under way when the page was left. */
  #resume(entry) {
    if (entry.answer) return;
    const node = Object.values(entry.conversation.nodes).find((one) => one.pending);
    if (!node) return;
    node.pending.away = true;
    this.#reader(entry, node).follow();
  }

  async #save(entry) {
    const { conversation } = entry;
    if (entry.deleted || !Object.keys(conversation.nodes).length) return;
    try {
      await this.#store.put(conversation);
    } catch (error) {
      fail(error.message);
    }
    this.#history.refresh();
  }

  async #changedElsewhere(id) {
    this.#history.refresh();
    const entry = this.#open.get(id);
    if (!entry) return;
    const stored = entry.answer ? null : await this.#store.get(id);
    entry.stale = Boolean(entry.answer); // what is read here is merged when it is written
    if (!stored || entry.stale || this.#open.get(id) !== entry) return;
    entry.conversation = { ...stored, leaf: stored.nodes[entry.conversation.leaf] ? entry.conversation.leaf : stored.leaf };
    if (this.#shown === entry) {
      this.#resume(entry);
      this.#show();
    }
  }

  #show() {
    const { conversation, answer } = this.#shown;
    this.#transcript.show(conversation);
    $("title").textContent = conversation.title || "New chat";
    $("manage").hidden = !conversation.leaf;
    document.body.classList.toggle("answering", Boolean(answer));
    $("stop").hidden = !answer;
    $("send").hidden = Boolean(answer);
  }

  #set(settings) {
    this.#shown.conversation.settings = settings;
    keepSettings(localStorage, settings);
    this.#presets.show(settings);
    this.#shown.save();
  }

  /** The models that are there have changed. */
  knows(models) {
    this.#ahead.knows(models);
  }

  // --- asking ------------------------------------------------------------------------------------

  /** Somebody types the next message of the conversation. */
  #prepare() {
    const { conversation, answer } = this.#shown;
    if (answer || !$("prompt").value.trim()) return;
    this.#ahead.prepare(conversation, $("model").value, () => this.#request(conversation, messages(conversation)));
  }

  #key(event) {
    if (event.isComposing) return;
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      this.send();
    } else if (event.key === "ArrowUp" && !$("prompt").value) {
      event.preventDefault();
      this.#transcript.editLast();
    }
  }

  /** Sends what stands in the field. */
  send() {
    const text = $("prompt").value.trim();
    if ((!text && !this.#files.some) || this.#shown.answer) return;
    this.#guarded(() => {
      this.#request(this.#shown.conversation, []); // what is wrong with the settings is told before anything is cleared
      const files = this.#files.take();
      $("prompt").value = "";
      return this.#ask(this.#shown.conversation.leaf, text, files);
    });
  }

  async #guarded(act) {
    fail("");
    if (this.#shown.answer) return;
    try {
      await act();
    } catch (error) {
      fail(told(error));
    }
  }

  #ask(parent, text, files) {
    const node = { id: random(), role: "user", text, at: Date.now() };
    if (files?.length) node.files = files;
    add(this.#shown.conversation, parent, node);
    return this.#answer(node.id);
  }

  #results(node, texts) {
    const results = node.calls.map((call, index) => ({ id: call.id, name: call.name, text: texts[index] }));
    const given = add(this.#shown.conversation, node.id, { id: random(), role: "tool", at: Date.now(), results });
    return this.#answer(given.id);
  }

  #request(conversation, asked, options) {
    if (!$("model").value) throw new RangeError("There is no model yet: choose one when it is there.");
    return requestOf(conversation.settings, $("model").value, asked, options);
  }

  #pending(conversation, body) {
    const background = backgroundOf(conversation.settings);
    return { key: random(), body, background, session: conversation.id, began: Date.now(), id: null, last: null };
  }

  #answer(parent) {
    const { conversation } = this.#shown;
    const body = this.#request(conversation, messages(conversation, parent));
    const pending = this.#pending(conversation, body);
    const fields = { id: random(), role: "assistant", at: Date.now(), model: body.model, pending };
    return this.#begin(add(conversation, parent, fields));
  }

  /** The rest of an answer that was cut off. */
  #proceed(node) {
    const { conversation } = this.#shown;
    const body = this.#request(conversation, messages(conversation, node.id), { continued: true });
    const pending = { ...this.#pending(conversation, body), finish: node.finish };
    Object.assign(node, { pending, finish: null, error: "", revision: node.revision + 1 });
    return this.#begin(node);
  }

  async #begin(node) {
    const entry = this.#shown;
    const answer = this.#reader(entry, node);
    const address = `#chat/${entry.conversation.id}`;
    if (location.hash !== address) history.replaceState(null, "", address);
    this.#show();
    this.#transcript.toEnd();
    await entry.save.now(); // its key is kept before anything is asked under it
    this.#history.select(entry.conversation.id);
    await answer.follow();
  }

  // --- answers -----------------------------------------------------------------------------------

  #reader(entry, node) {
    const answer = new Answer(node, (ended) => this.#grown(entry, answer, ended));
    entry.answer = answer; // nothing else is sent meanwhile
    return answer;
  }

  #grown(entry, answer, ended) {
    if (ended) this.#ended(entry);
    else entry.save();
    if (this.#shown !== entry) return;
    this.#transcript.update(answer.node);
    if (answer.resuming) say("note", "The connection was lost; resuming after the last event …");
    else say("note", "");
    if (ended) {
      this.#show();
      $("spoken").textContent = answer.node.error ? "" : `Answer finished: ${figures(answer.node)}`;
    }
  }

  async #ended(entry) {
    const { id } = entry.conversation;
    entry.answer = null;
    entry.conversation.updated = Date.now();
    if (this.#shown !== entry) this.#open.delete(id);
    await entry.save.now();
    if (entry.stale) this.#changedElsewhere(id);
  }

  /** Ends the answer that is shown. */
  async stop() {
    const answer = this.#shown?.answer;
    if (!answer) return;
    const stopped = answer.stop();
    $("prompt").focus(); // at once: the reader may be elsewhere when the gateway has answered
    try {
      await stopped;
    } catch (error) {
      fail(error.message);
    }
  }

  #choose(node) {
    if (this.#shown.answer) return;
    choose(this.#shown.conversation, node);
    this.#shown.save();
    this.#show();
  }

  // --- the conversation as a whole -----------------------------------------------------------------

  async #rename() {
    const entry = this.#shown;
    $("manage").open = false;
    document.querySelector("#manage > summary").focus(); // where the focus goes after the dialog
    const title = await askName("Title of the conversation", entry.conversation.title, LIMITS.title);
    if (!title) return;
    Object.assign(entry.conversation, { title, named: true, updated: Date.now() });
    if (this.#shown === entry) this.#show();
    entry.save.now();
  }

  async #delete() {
    const { conversation } = this.#shown;
    if (!confirm(`Delete "${conversation.title}"? It is kept in this browser alone.`)) return;
    await this.stop();
    this.#shown.deleted = true; // nothing writes it again
    this.#open.delete(conversation.id);
    this.#shown = this.#empty();
    await this.#store.remove(conversation.id);
    location.hash = "#chat";
    await this.open("");
  }

  #export(ending, type, write) {
    const { conversation } = this.#shown;
    $("manage").open = false;
    if (path(conversation).length) download(fileName(conversation.title, ending), type, write(conversation));
  }
}

/** Closes what lies over the chat; whether there was anything. */
function closeMenus() {
  const open = $("manage").open || document.body.classList.contains("side-open");
  $("manage").open = false;
  return open;
}

function fail(words) {
  say("error", words, "alert");
}
