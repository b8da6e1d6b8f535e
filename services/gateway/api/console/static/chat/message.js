// One message on the page: its text, what is folded away, its versions and what can be done with it.

import { age, button, bytes, copy, element } from "../app/dom.js";
import { contentOf } from "./conversation.js";
import { pace } from "../app/stream.js";
import { GrowingText } from "./render.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool results" };
const ENDS = { length: "the limit of tokens was reached", stopped: "stopped", content_filter: "withheld" };

function folded(className, summary, ...inside) {
  return element("details", { className }, element("summary", {}, summary), ...inside);
}

function fileOf(file) {
  const size = bytes(new Blob([file.text]).size);
  return folded("file", `${file.name} (${size})`, element("pre", { tabIndex: 0 }, file.text));
}

function callOf(call) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(call.arguments), null, 2);
  } catch {
    // it is still being written, or no JSON
  }
  return folded("call", `Tool call: ${call.name || "…"}`, element("pre", { tabIndex: 0 }, shown));
}

/** What is known of an answer's speed, in words. */
export function figures(node) {
  const { usage, pace, finish } = node;
  const parts = [];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (pace?.rate) parts.push(`${pace.rate.toFixed(1)} tokens/s`);
  if (pace?.first !== null && pace?.first !== undefined) parts.push(`first token ${pace.first.toFixed(2)} s`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (usage) parts.push(`prompt ${usage.prompt_tokens}${cached ? ` (${cached} cached)` : ""}`);
  if (ENDS[finish]) parts.push(ENDS[finish]);
  return parts.join(" · ");
}

export class Message {
  /** `acts`: edit(node, text), regenerate(node), proceed(node), results(node, texts), choose(node) and
   * awaitsResults(node); `onChange()` is called when its height may have changed. */
  constructor(node, versions, acts, onChange) {
    Object.assign(this, { node, versions, acts });
    this.item = element("li", { "data-role": node.role, "data-id": node.id });
    this.body = element("div", { className: "body" });
    this.thoughts = element("div", { className: "thoughts" });
    this.reasoning = folded("reasoning", "Reasoning", this.thoughts);
    this.extras = element("div", { className: "extras" });
    this.failure = element("p", { className: "failure", role: "alert" });
    this.foot = element("div", { className: "foot" });
    const name = NAMES[node.role] + (node.model && node.role === "assistant" ? ` · ${node.model}` : "");
    this.who = element("div", { className: "who" }, name);
    this.item.append(this.who, this.reasoning, this.body, this.extras, this.failure, this.foot);
    this.text = new GrowingText(this.body, onChange);
    this.thinking = new GrowingText(this.thoughts, onChange);
    this.update();
  }

  /** Shows the node as it is now. */
  update() {
    const { node } = this;
    const growing = Boolean(node.pending);
    this.item.toggleAttribute("data-growing", growing);
    this.item.setAttribute("aria-busy", String(growing));
    this.reasoning.hidden = !node.reasoning;
    if (node.role === "assistant") {
      for (const [part, text] of [[this.thinking, node.reasoning ?? ""], [this.text, node.text]]) {
        if (growing) part.set(text);
        else part.end(text);
      }
    } else if (!this.body.querySelector("textarea")) this.body.textContent = node.text;
    this.#showExtras();
    this.failure.textContent = node.error ?? "";
    this.failure.hidden = !node.error;
    this.foot.replaceChildren(...(growing ? [this.#live()] : this.#actions()));
  }

  #showExtras() {
    const { node } = this;
    const awaited = this.acts.awaitsResults(node);
    const state = `${node.revision} ${awaited}`;
    if (this.extrasShown === state) return; // what is being typed there stays
    this.extrasShown = state;
    const open = [...this.extras.querySelectorAll("details")].map((part) => part.open);
    const results = (node.results ?? []).map((result) =>
      folded("call", `Result of ${result.name ?? "a tool"}`, element("pre", { tabIndex: 0 }, result.text)),
    );
    const parts = [...(node.files ?? []).map(fileOf), ...(node.calls ?? []).filter(Boolean).map(callOf), ...results];
    parts.forEach((part, index) => {
      part.open = open[index] ?? false;
    });
    if (awaited) parts.push(this.#resultForm());
    this.extras.replaceChildren(...parts);
  }

  #resultForm() {
    const { node } = this;
    const fields = node.calls.map((call, index) => {
      const id = `result-${node.id}-${index}`;
      return element(
        "div",
        {},
        element("label", { htmlFor: id }, `Result of ${call.name}`),
        element("textarea", { id, rows: 2, required: true }),
      );
    });
    const send = element("button", { type: "submit" }, "Send results");
    const form = element("form", { className: "results", "aria-label": "Results of tools" }, ...fields, send);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.acts.results(node, fields.map((field) => field.lastChild.value));
    });
    return form;
  }

  #actions() {
    const { node, versions, acts } = this;
    const made = [];
    if (versions.length > 1) made.push(this.#turn());
    const act = (label, does, what) => made.push(button(label, does, { "data-action": what }));
    act("Copy", (event) => this.#copied(event.target), "copy");
    if (node.role === "user") act("Edit", () => this.edit(), "edit");
    if (node.role === "assistant") {
      act("Regenerate", () => acts.regenerate(node), "regenerate");
      const cut = node.error || ["length", "stopped"].includes(node.finish);
      if (node.text && cut) act("Continue", () => acts.proceed(node), "continue");
    }
    const when = element("time", { dateTime: new Date(node.at).toISOString() }, `${age((Date.now() - node.at) / 1000)} ago`);
    when.title = new Date(node.at).toLocaleString();
    made.push(element("span", { className: "figures" }, figures(node) || when));
    return made;
  }

  /** How fast it is, while it grows. */
  #live() {
    const { node } = this;
    const read = node.pending.progress;
    const reading = read ? `the prompt is read: ${Math.floor((100 * read.processed) / read.total)}%` : "";
    const soFar = node.usage && !read ? figures({ ...node, pace: pace(node, Date.now()) }) : reading;
    return element("span", { className: "figures", "aria-hidden": "true" }, soFar);
  }

  async #copied(place) {
    await copy(this.node.role === "user" ? contentOf(this.node) : this.node.text);
    place.textContent = "Copied";
    setTimeout(() => {
      place.textContent = "Copy";
    }, 1500);
  }

  /** Buttons through the versions of this message. */
  #turn() {
    const at = this.versions.indexOf(this.node);
    const to = (step, label, sign) =>
      button(sign, () => this.acts.choose(this.versions[at + step]), {
        "aria-label": label,
        "data-action": label.split(" ")[0].toLowerCase(),
        disabled: !this.versions[at + step],
      });
    const count = element("span", {}, `${at + 1} / ${this.versions.length}`);
    const group = { className: "versions", role: "group", "aria-label": "Versions of this message" };
    return element("span", group, to(-1, "Previous version", "‹"), count, to(1, "Next version", "›"));
  }

  /** A field in place of the text; what is sent becomes another version. */
  edit() {
    const { node } = this;
    const field = element("textarea", { value: node.text, rows: Math.min(12, node.text.split("\n").length + 1) });
    field.setAttribute("aria-label", "Edit the message");
    const close = () => {
      this.body.replaceChildren();
      this.update();
    };
    const send = () => {
      if (field.value.trim() || node.files?.length) this.acts.edit(node, field.value.trim());
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    this.body.replaceChildren(field);
    const save = button("Send as a new version", send, { className: "primary", "data-action": "save" });
    this.foot.replaceChildren(save, button("Cancel", close));
    field.focus();
  }
}
