// The list of conversations beside the chat: search, and files in and out.

import { $, download, element, say, soon } from "../app/dom.js";
import { LIMITS } from "./conversation.js";
import { fromJson, importWords, toJson } from "./transfer.js";

const SHOWN = 200; // of the list; the search finds the others

function dayOf(time) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - time) / 86_400_000);
  if (days < 1) return "Today";
  if (days < 2) return "Yesterday";
  if (days < 7) return "Last 7 days";
  return days < 30 ? "Last 30 days" : "Older";
}

export class History {
  #current = "";

  /** `store`: see store.js. */
  constructor(store) {
    this.store = store;
    this.refresh = soon(() => this.#refresh(), 150);
    $("search").addEventListener("input", this.refresh);
    $("export-all").addEventListener("click", () => this.#export());
    const file = $("import-file");
    $("import").addEventListener("click", () => file.click());
    file.addEventListener("change", async () => {
      if (file.files[0]) await this.import(file.files[0]);
      file.value = "";
    });
    this.refresh(); // also where the page begins with another part than the chat
  }

  /** Marks the conversation that is shown. */
  select(id) {
    this.#current = id;
    this.refresh.now();
  }

  async #refresh() {
    try {
      const query = $("search").value.trim();
      this.#show(await this.store.heads(query), query);
    } catch (error) {
      say("import-note", `The browser's conversations cannot be read (${error.name}).`, "alert");
    }
  }

  #show(heads, query) {
    const shown = [];
    let day = "";
    for (const head of heads.slice(0, SHOWN)) {
      if (dayOf(head.updated) !== day) {
        day = dayOf(head.updated);
        shown.push(element("li", { className: "day" }, day));
      }
      const link = element("a", { href: `#chat/${head.id}` }, head.title || "Conversation");
      if (head.id === this.#current) link.setAttribute("aria-current", "page");
      shown.push(element("li", {}, link));
    }
    if (heads.length > SHOWN) shown.push(element("li", { className: "day" }, `and ${heads.length - SHOWN} more`));
    if (!heads.length) shown.push(element("li", { className: "day" }, query ? "nothing found" : "none yet"));
    $("conversations").replaceChildren(...shown);
  }

  async #export() {
    download("conversations.json", "application/json", toJson(await this.store.all()));
  }

  /** Adds the conversations of a file; those that are there get its messages. Says what has come of it. */
  async import(file) {
    say("import-note", `Reading ${file.name} …`);
    try {
      if (file.size > LIMITS.import) throw new RangeError(`A file has at most ${LIMITS.import >> 20} MiB.`);
      const { conversations, wrong } = fromJson(await file.text());
      const counts = { added: 0, changed: 0, same: 0 };
      for (const conversation of conversations) {
        try {
          counts[await this.store.bring(conversation)] += 1;
        } catch (error) {
          wrong.push(error.message.replace(/\.$/, ""));
        }
      }
      say("import-note", importWords(file.name, counts, wrong), wrong.length ? "alert" : "status");
    } catch (error) {
      say("import-note", `${file.name}: nothing imported. ${error.message}`, "alert");
    }
    this.refresh.now();
  }
}
