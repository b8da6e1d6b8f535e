// The models: what is registered, what becomes of it as it happens, and the buttons that change it.
// Events (models/sse) say that something has changed; the list is then read anew, so that nothing can be missed.

import { call, events, pause, read, send, told } from "../app/api.js";
import { $, age, button, bytes, element, fill, percent, say, state } from "../app/dom.js";

const SETTLE = 400; // milliseconds: what changes within is shown at once
const RETRY = 2000; // milliseconds before a stream that ended is opened again
const IDLE = ["unloaded", "sleeping", "failed"];

/** One change, told in words; the tables follow by themselves. `place`: where it is told. */
async function change(place, words, act) {
  say(place, `${words} …`);
  try {
    await act();
    say(place, `${words}: begun.`);
    return true;
  } catch (error) {
    say(place, told(error), "alert");
    return false;
  }
}

const entry = (name) => `v1/registry/models/${encodeURIComponent(name)}`;

function actions(model, refresh) {
  if (model.pinned === null) return "–"; // its executor was started with it: nobody else decides
  const place = element("span", { className: "buttons" });
  const add = (name, label, act) => {
    const asked = async () => {
      await change("models-note", `${label} ${model.id}`, act);
      refresh();
    };
    const named = { "data-action": name, "data-model": model.id, "aria-label": `${label} ${model.id}` };
    place.append(button(label, asked, named));
  };
  const [turn, path] = IDLE.includes(model.status.state) ? ["Load", "models/load"] : ["Unload", "models/unload"];
  add("turn", turn, () => send(path, "POST", { model: model.id }));
  if (IDLE.includes(model.status.state)) add("pull", "Pull", () => send("models", "POST", { model: model.id }));
  const pin = model.pinned ? "Unpin" : "Pin";
  add("pin", pin, () => send(entry(model.id), "PATCH", { pinned: !model.pinned }));
  add("remove", "Remove", async () => {
    const asked = `Remove ${model.id} from the registry? What runs ends first; its files stay.`;
    if (!confirm(asked)) throw new Error("Nothing was removed.");
    await send(entry(model.id), "DELETE");
  });
  return place;
}

/** What has come of a download, in bytes; empty: nothing is known. */
function fetched(progress) {
  const parts = Object.values(progress ?? {}).filter((part) => part?.total);
  return parts.map((part) => `${bytes(part.done)} of ${bytes(part.total)}`).join(", ");
}

function status(model) {
  const { state: name, completed, reason, expected_at: expected, progress } = model.status;
  const shown = element("span", {}, state(name));
  if (["downloading", "loading"].includes(name)) {
    const bar = element("progress", { max: 1, value: completed, "aria-label": `${model.id}: ${percent(completed)}` });
    shown.append(" ", bar, ` ${percent(completed)}`);
    if (name === "downloading" && fetched(progress)) shown.append(` (${fetched(progress)})`);
  }
  const left = expected ? Math.max(0, Math.round(expected - Date.now() / 1000)) : 0;
  if (left) shown.append(` (in about ${left} s)`);
  if (reason) shown.append(` ${reason}`);
  return shown;
}

/** Fills a table; a button that has the focus keeps it in its new row. */
function refill(id, rows, none) {
  const at = document.activeElement?.dataset;
  fill(id, rows, none);
  if (!at?.action) return;
  const same = [...$(id).querySelectorAll("button")].find(
    (one) => one.dataset.action === at.action && one.dataset.model === at.model,
  );
  same?.focus();
}

export class ModelsPage {
  #reading = null; // the reading that is under way, or about to be
  #again = false; // whether something has changed since it began

  /** `onModels(models)` hears of what can be asked for, adapters among it. */
  constructor(onModels) {
    this.onModels = onModels;
    $("add").addEventListener("submit", (event) => this.#add(event));
    $("pull").addEventListener("click", () => this.#pull());
    $("add-adapter").addEventListener("submit", (event) => this.#addAdapter(event));
  }

  /** Shows them, and what becomes of them, for as long as the page is there. */
  async watch() {
    this.refresh();
    for (;;) {
      if (!document.hidden) {
        try {
          for await (const event of events(await call("models/sse"))) {
            if (JSON.parse(event.data).error) break;
            this.refresh();
          }
        } catch {
          // the cluster's part says that the gateway is not there
        }
      }
      await pause(RETRY);
    }
  }

  refresh() {
    this.#again = true;
    this.#reading ??= this.#read().finally(() => {
      this.#reading = null;
    });
  }

  async #read() {
    while (this.#again) {
      this.#again = false;
      try {
        const models = (await read("models")).data;
        this.#show(models);
        this.#showAdapters((await read("v1/loras")).data);
      } catch (error) {
        say("models-note", told(error), "alert");
      }
      await pause(SETTLE);
    }
  }

  #show(models) {
    this.onModels(models);
    const own = models.filter((model) => !model.parent);
    const row = (model) => [
      model.aliases.length ? `${model.id} (${model.aliases.join(", ")})` : model.id,
      status(model),
      String(model.status.replicas),
      model.max_model_len ? String(model.max_model_len) : "–",
      actions(model, () => this.refresh()),
    ];
    refill("registry", own.map(row), "none yet: add one below, or start an executor with one");
    const field = $("adapter-base");
    const names = own.map((model) => model.id);
    if (names.join("\n") !== [...field.options].map((option) => option.value).join("\n")) {
      field.replaceChildren(...names.map((name) => new Option(name, name, false, name === field.value)));
    }
  }

  #showAdapters(adapters) {
    const row = (adapter) => [
      adapter.id,
      adapter.parent,
      adapter.root,
      String(adapter.rank),
      bytes(adapter.bytes),
      adapter.groups.join(", ") || "–",
      age(Date.now() / 1000 - adapter.created),
      this.#unloading(adapter),
    ];
    refill("adapters", adapters.map(row), "none");
  }

  #unloading(adapter) {
    const unload = async () => {
      const path = `v1/loras/${encodeURIComponent(adapter.id)}`;
      await change("adapters-note", `Unload ${adapter.id}`, () => send(path, "DELETE"));
      this.refresh();
    };
    const named = { "data-action": "unload", "data-model": adapter.id, "aria-label": `Unload ${adapter.id}` };
    return button("Unload", unload, named);
  }

  async #add(event) {
    event.preventDefault();
    const [name, source] = [$("add-name").value.trim(), $("add-source").value.trim()];
    const named = name || source;
    if (!named) return;
    const added = await change("models-note", `Add ${named}`, () => send(entry(named), "PUT", { source: source || named }));
    if (added) $("add").reset();
    this.refresh();
  }

  /** Fetches the files alone, and registers what is named there. */
  async #pull() {
    const [name, source] = [$("add-name").value.trim(), $("add-source").value.trim()];
    if (!source) {
      $("add-source").focus();
      return;
    }
    const pulled = await change("models-note", `Pull ${name || source}`, async () => {
      if (name && name !== source) await send(entry(name), "PUT", { source });
      await send("models", "POST", { model: name || source });
    });
    if (pulled) $("add").reset();
    this.refresh();
  }

  async #addAdapter(event) {
    event.preventDefault();
    const name = $("adapter-name").value.trim();
    const body = { source: $("adapter-source").value.trim(), model: $("adapter-base").value };
    const path = `v1/loras/${encodeURIComponent(name)}`;
    const added = await change("adapters-note", `Load ${name}`, () => send(path, "PUT", body));
    if (added) {
      say("adapters-note", `${name} is loaded.`);
      $("add-adapter").reset();
    }
    this.refresh();
  }
}
