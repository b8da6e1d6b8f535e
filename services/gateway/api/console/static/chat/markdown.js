// Markdown to HTML, with code in colours and places for maths. Pure: text in, text out.
//
// HTML within Markdown is shown as text, addresses are of a few kinds only, and images are links: the policy of the
// page would not load them. What comes out is sanitized again before it is shown (render.js).

import { Lexer, Marked } from "../vendor/marked.esm.js";
import highlighter from "../vendor/highlight.min.js";

const LINKS = /^(?:https?:|mailto:)/i;
const TEXT = 200_000; // characters; a longer text is shown as it is written
const PARAGRAPH = 5000; // characters; the time for one grows with its square in the worst case, as of "_a_a_a"
const COLOURED = 50_000; // characters of a code block; colouring a longer one would hold up the page
const TAGS = 40_000; // of the HTML; what would need more, as a huge table, is shown as it is written
const DEPTH = 50; // lists and quotes within each other; what lies deeper is shown as it is written

export const escape = (text) =>
  text.replace(/[&<>"']/g, (sign) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[sign]);

const math = (tex, display) => `<span class="math" data-tex="${escape(tex.trim())}" data-display="${display}"></span>`;

/** Up to where a paragraph may reach: what comes behind need not be looked through for each of them. */
function paragraph(source) {
  const end = source.indexOf("\n\n");
  return source.slice(0, end < 0 ? source.length : end + 1);
}

/** Maths on lines of its own: $$ … $$ or \[ … \]. */
const mathBlock = {
  name: "mathBlock",
  level: "block",
  start: (source) => paragraph(source).match(/\n {0,3}(?:\$\$[^$]{1,2000}\$\$|\\\[[\s\S]{1,2000}?\\\])[ \t]*(?:\n|$)/)?.index,
  tokenizer(source) {
    const found = /^ {0,3}(?:\$\$([^$]{1,2000})\$\$|\\\[([\s\S]{1,2000}?)\\\])[ \t]*(?:\n|$)/.exec(source);
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
    const shown = /^(?:\$\$([^$\n]{1,2000})\$\$|\\\[([\s\S]{1,2000}?)\\\])/.exec(source);
    if (shown) return { type: "mathInline", raw: shown[0], tex: shown[1] ?? shown[2], display: true };
    const found = /^(?:\\\(([\s\S]{1,2000}?)\\\)|\$(?![\s$])((?:\\.|[^$\\\n])*?(?:\\.|[^$\\\s]))\$(?!\d))/.exec(source);
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

/** Leaves as they are paragraphs that are too long to be looked through, and what lies too deep. */
class BoundedLexer extends Lexer {
  #depth = 0;

  blockTokens(source, tokens = [], clipped = false) {
    if (this.#depth >= DEPTH) {
      tokens.push({ type: "text", raw: source, text: source, escaped: false });
      return tokens;
    }
    this.#depth += 1;
    try {
      return super.blockTokens(source, tokens, clipped);
    } finally {
      this.#depth -= 1;
    }
  }

  inline(source, tokens = []) {
    if (source.length <= PARAGRAPH) return super.inline(source, tokens);
    tokens.push({ type: "text", raw: source, text: source, escaped: false });
    return tokens;
  }
}

function tagsOf(html) {
  let count = 0;
  for (let at = html.indexOf("<"); at >= 0; at = html.indexOf("<", at + 1)) count += 1;
  return count;
}

/** HTML of Markdown, also of one that is still being written. */
export function toHtml(text) {
  const plain = () => `<p>${escape(text)}</p>`;
  if (text.length > TEXT) return plain();
  try {
    const html = marked.parser(new BoundedLexer(marked.defaults).lex(text));
    return tagsOf(html) > TAGS ? plain() : html;
  } catch (error) {
    if (error instanceof RangeError) return plain(); // nested too deeply for the stack
    throw error;
  }
}
