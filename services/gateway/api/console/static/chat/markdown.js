// Markdown to HTML, with code in colours and places for maths. Pure: text in, text out.
//
// HTML within Markdown is shown as text, addresses are of a few kinds only, and images are links: the policy of the
// page would not load them. What comes out is sanitized again before it is shown (render.js).

import { Marked } from "../vendor/marked.esm.js";
import highlighter from "../vendor/highlight.min.js";

const LINKS = /^(?:https?:|mailto:)/i;
const COLOURED = 100_000; // characters of a code block; colouring a longer one would hold up the page

export const escape = (text) =>
  text.replace(/[&<>"']/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[sign]);

const math = (tex, display) => `<span class="math" data-tex="${escape(tex.trim())}" data-display="${display}"></span>`;

/** Maths on lines of its own: $$ … $$ or \[ … \]. */
const mathBlock = {
  name: "mathBlock",
  level: "block",
  start: (source) => source.match(/(?:^|\n) {0,3}(?:\$\$|\\\[)/)?.index,
  tokenizer(source) {
    const found = /^ {0,3}(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/.exec(source);
    return found ? { type: "mathBlock", raw: found[0], tex: found[1] ?? found[2] } : undefined;
  },
  renderer: (token) => `<p>${math(token.tex, true)}</p>\n`,
};

/** Maths within a line: \( … \), $ … $ (not around prices: no space within, no digit behind), $$ … $$, \[ … \]. */
const mathInline = {
  name: "mathInline",
  level: "inline",
  start: (source) => source.match(/\$|\\\(|\\\[/)?.index,
  tokenizer(source) {
    const shown = /^(?:\$\$([^\n]+?)\$\$|\\\[([\s\S]+?)\\\])/.exec(source);
    if (shown) return { type: "mathInline", raw: shown[0], tex: shown[1] ?? shown[2], display: true };
    const found = /^(?:\\\(([\s\S]+?)\\\)|\$(?![\s$])((?:\\.|[^$\\\n])*?(?:\\.|[^$\\\s]))\$(?!\d))/.exec(source);
    return found ? { type: "mathInline", raw: found[0], tex: found[1] ?? found[2], display: false } : undefined;
  },
  renderer: (token) => math(token.tex, token.display),
};

function coloured(text, language) {
  if (text.length > COLOURED || !language || !highlighter.getLanguage(language)) return escape(text);
  return highlighter.highlight(text, { language, ignoreIllegals: true }).value;
}

const renderer = {
  html: ({ text, block }) => (block ? `<p>${escape(text)}</p>\n` : escape(text)),
  code({ text, lang }) {
    const language = (lang ?? "").split(/\s/, 1)[0].toLowerCase();
    const shown = coloured(text, language);
    return `<pre data-language="${escape(language)}"><code class="hljs">${shown}\n</code></pre>\n`;
  },
  link({ href, title, tokens }) {
    const inside = this.parser.parseInline(tokens);
    if (!LINKS.test(href)) return inside;
    return `<a href="${escape(href)}"${title ? ` title="${escape(title)}"` : ""}>${inside}</a>`;
  },
  image({ href, text }) {
    const name = escape(text || href);
    return LINKS.test(href) ? `<a href="${escape(href)}">image: ${name}</a>` : `image: ${name}`;
  },
};

const marked = new Marked({ gfm: true, breaks: true, extensions: [mathBlock, mathInline], renderer });

/** HTML of Markdown, also of one that is still being written. */
export function toHtml(text) {
  return marked.parse(text);
}
