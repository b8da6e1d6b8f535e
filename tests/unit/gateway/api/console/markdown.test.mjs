// Markdown to HTML: what people expect, and nothing that could run.
import assert from "node:assert/strict";
import { test } from "node:test";
import { toHtml } from "../../../../../services/gateway/api/console/static/chat/markdown.js";
import { textOf } from "../../../../../services/gateway/api/console/static/chat/attachments.js";

const has = (text, part) => assert.ok(toHtml(text).includes(part), `${text} → ${toHtml(text)}`);
const lacks = (text, part) => assert.ok(!toHtml(text).includes(part), `${text} → ${toHtml(text)}`);

test("text, tables, lists and code", () => {
  has("**b** and `c`", "<strong>b</strong> and <code>c</code>");
  has("|a|\n|-|\n|1|", "<td>1</td>");
  has("- [x] done", 'checked="" disabled=""');
  has("one\ntwo", "one<br>two");
  has("```python\nx = 'a'\n```", '<pre data-language="python">');
  has("```python\ndef f(): pass\n```", "hljs-keyword");
  has("```nosuch\n<b>\n```", "&lt;b&gt;");
  has("```js\nlet a", "hljs-keyword");
  lacks(`\`\`\`js\n${"let a\n".repeat(20_000)}\`\`\``, "hljs-keyword");
});

test("maths in all four ways of writing them, and prices as they are", () => {
  const inline = (tex) => `<span class="math" data-tex="${tex}" data-display="false">`;
  const display = (tex) => `<span class="math" data-tex="${tex}" data-display="true">`;
  has("so $x^2$ is", inline("x^2"));
  has("so \\(x_1\\) is", inline("x_1"));
  has("$$\na < b\n$$", display("a &lt; b"));
  has("\\[\na\n\\]", display("a"));
  has("we get\n\\[ y \\]\nthen", display("y"));
  has("1. first\n\n   $$z$$", display("z"));
  for (const plain of ["costs $5 and $6", "`$x$`", "```\n$x$\n```", "$ x $", "\\$x$ y"]) lacks(plain, "data-tex");
});

test("HTML is shown as text, and addresses are of a few kinds", () => {
  for (const text of ["<script>x</script>", "a <img src=x onerror=y> b", "<svg onload=x>", "<math><mi>x</mi></math>"]) {
    assert.doesNotMatch(toHtml(text), /<(?!\/?(p|br)\b)/, text);
  }
  for (const address of ["javascript:x", "JaVaScRiPt:x", "data:text/html,x", "vbscript:x", "/v1/files", "//host/x", "&#106;avascript:x"]) {
    lacks(`[a](${address})`, "href");
    lacks(`![a](${address})`, "href");
    lacks(`<${address}>`, "href");
  }
  has("[a](https://example.org/?a=1&b)", 'href="https://example.org/?a=1&amp;b"');
  has("![a](https://example.org/x.png)", '<a href="https://example.org/x.png">image: a</a>');
  lacks("![a](https://example.org/x.png)", "<img");
  has('```"><b>\nx\n```', 'data-language="&quot;&gt;&lt;b&gt;"');
  has('$"><b>$', 'data-tex="&quot;&gt;&lt;b&gt;"');
  has('[a](https://x.org "t\\"><b>")', "&quot;&gt;&lt;b&gt;");
});

test("what would take too long, or nests too deeply, is shown as it is written", () => {
  for (const unit of ["_a_", "$$", "\\[", "> ", "1. ", "![", "**a"]) {
    const text = unit.repeat(60_000 / unit.length);
    const shown = toHtml(text);
    assert.doesNotMatch(shown, /<(?:em|strong|img|span)/, unit);
    assert.ok(shown.length >= text.length, unit);
  }
  has(`*a*${"x".repeat(6000)}`, "*a*x");
  has(`*a*\n\n${"x".repeat(6000)}`, "<em>a</em>");
  lacks(`*a*\n\n${"x\n\n".repeat(70_000)}`, "<em>");
  const code = `\`\`\`js\n${"let a;\n".repeat(2000)}\`\`\``;
  has(code, "hljs-keyword");
  lacks(`\`\`\`js\n${"let a;\n".repeat(8000)}\`\`\``, "hljs-keyword");
  has(`|a|\n|-|\n${"|1|\n".repeat(3000)}`, "<table>");
  for (const text of [`|a|\n|-|\n${"|1|\n".repeat(30_000)}`, "# a\n".repeat(45_000), "```\n".repeat(40_000)]) {
    assert.equal(toHtml(text), `<p>${text}</p>`);
  }
  for (const [unit, tag] of [["- ", "<ul>"], ["> ", "<blockquote>"]]) {
    const nested = toHtml(`${unit.repeat(1000)}the end`);
    assert.equal(nested.split(tag).length - 1, 50, unit);
    assert.ok(nested.includes("the end"), unit);
  }
  const lists = Array.from({ length: 440 }, (_, level) => `${"  ".repeat(level)}- level ${level}`).join("\n");
  has(lists, "level 439");
});

test("attachments are text, or are refused by name", () => {
  const bytes = (text) => new TextEncoder().encode(text);
  assert.equal(textOf("a.txt", bytes("Grüße")), "Grüße");
  assert.throws(() => textOf("a.png", new Uint8Array([0x89, 0x50, 0xff])), /a\.png is not text/);
  assert.throws(() => textOf("a.bin", bytes("a\0b")), /a\.bin is not text/);
  assert.throws(() => textOf("a.txt", bytes("x".repeat((512 << 10) + 1))), /more than 512 Ki characters/);
});
