// Markdown onto the page: sanitized nodes, maths as MathML, code blocks that can be copied.

import "../vendor/purify.min.js"; // sets DOMPurify
import { copy } from "../app/dom.js";
import { toHtml } from "./markdown.js";

const PLAIN = "align checked class data-display data-language data-tex disabled start title type".split(" ");
const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a blockquote br code del em h1 h2 h3 h4 h5 h6 hr input li ol p pre span strong".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: [...PLAIN, "href"],
  ADD_URI_SAFE_ATTR: PLAIN, // no addresses: all others are held against the expression below
  ALLOW_DATA_ATTR: false,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};
const MATHS = { trust: false, throwOnError: false, strict: false, maxExpand: 1000, maxSize: [20, 200], wrap: "tex" };
const TEX = 2000; // characters of one formula; longer ones are shown as they are written
const ALL_TEX = 20_000; // of all formulas of a text, each with FORMULA more; those behind are shown as they are written
const FORMULA = 20;

/** Shows Markdown in `place`, instead of what was there. `whole`: it grows no more. */
export function render(place, text, whole) {
  const nodes = globalThis.DOMPurify.sanitize(toHtml(text), ALLOWED);
  for (const link of nodes.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const box of nodes.querySelectorAll("input")) {
    box.disabled = true;
    box.setAttribute("aria-label", box.checked ? "done" : "to do");
  }
  let left = ALL_TEX;
  for (const span of nodes.querySelectorAll("span.math")) {
    left -= span.dataset.tex.length + FORMULA;
    showMaths(span, left >= 0);
  }
  nodes.querySelectorAll("table").forEach(wrapTable);
  nodes.querySelectorAll("pre").forEach((block) => wrapCode(block, whole));
  place.replaceChildren(nodes);
}

/** `drawn`: as maths, not as it is written. */
function showMaths(place, drawn) {
  const { tex, display } = place.dataset;
  const written = display === "true" ? `$$${tex}$$` : `$${tex}$`;
  if (!globalThis.temml || !drawn || tex.length > TEX) {
    place.textContent = written;
    return;
  }
  try {
    globalThis.temml.render(tex, place, { ...MATHS, displayMode: display === "true" });
    place.title = tex;
  } catch {
    place.textContent = written; // it is not TeX
  }
}

function wrapTable(table) {
  const frame = document.createElement("div");
  frame.className = "wide";
  frame.tabIndex = 0;
  table.replaceWith(frame);
  frame.append(table);
}

function wrapCode(block, whole) {
  const frame = document.createElement("div");
  frame.className = "code";
  const bar = document.createElement("div");
  bar.className = "bar";
  const name = document.createElement("span");
  name.textContent = block.dataset.language || "text";
  const copying = document.createElement("button");
  Object.assign(copying, { type: "button", textContent: "Copy", disabled: !whole });
  copying.setAttribute("aria-label", "Copy the code");
  copying.addEventListener("click", async () => {
    await copy(block.textContent.replace(/\n$/, ""));
    copying.textContent = "Copied";
    setTimeout(() => {
      copying.textContent = "Copy";
    }, 1500);
  });
  bar.append(name, copying);
  block.replaceWith(frame);
  frame.append(bar, block);
  block.tabIndex = 0; // so that the keyboard can scroll it
}

/** Renders a text that grows, seldom enough that the page stays quick however long the text is. */
export class GrowingText {
  #timer = 0;
  #rest = 0; // milliseconds until the next time: several times what the last one took
  #text = "";
  #shown = null;
  #whole = false; // whether what is shown is the end of it

  /** `onShown()` is called when the place has changed. */
  constructor(place, onShown) {
    Object.assign(this, { place, onShown });
  }

  set(text) {
    this.#text = text;
    this.#timer ||= setTimeout(() => this.#show(false), this.#rest);
  }

  #show(whole) {
    clearTimeout(this.#timer);
    this.#timer = 0;
    if (this.#shown === this.#text && this.#whole === whole) return;
    const began = performance.now();
    render(this.place, this.#text, whole);
    this.#shown = this.#text;
    this.#whole = whole;
    this.onShown();
    this.#rest = Math.max(40, 4 * (performance.now() - began));
  }

  /** It is whole: shown at once. */
  end(text) {
    this.#text = text;
    this.#show(true);
  }
}
