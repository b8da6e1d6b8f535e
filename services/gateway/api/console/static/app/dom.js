// Elements, and figures as people read them.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

/** An element with properties (`data-`, `aria-` and `role` as attributes) and what is inside; null is left out. */
export function element(name, properties = {}, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (/^(data-|aria-|role$|for$|scope$)/.test(key)) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...inside.filter((item) => item !== null && item !== undefined && item !== ""));
  return made;
}

/** An element of a picture. */
export function drawn(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

export function button(label, act, properties = {}) {
  const made = element("button", { type: "button", ...properties }, label);
  made.addEventListener("click", act);
  return made;
}

export const percent = (share) => `${share > 0 && share < 0.1 ? (share * 100).toFixed(1) : Math.round(share * 100)} %`;

export function age(seconds) {
  if (seconds < 120) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172_800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86_400)} days`;
}

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = count > 0 ? Math.min(units.length - 1, Math.floor(Math.log2(count) / 10)) : 0;
  return `${(count / 1024 ** power).toFixed(power && count / 1024 ** power < 100 ? 1 : 0)} ${units[power]}`;
}

/** A state with its coloured mark. */
export const state = (name) => element("span", { "data-state": name }, name);

/** Rows of cells, each a text or a node, into a table; `none` stands where there are no rows. */
export function fill(id, rows, none) {
  const table = $(id);
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  const lines = rows.map((cells) => {
    const line = document.createElement("tr");
    for (const cell of cells) {
      const place = line.insertCell();
      const words = cell.textContent ?? cell;
      if (/\S{20}/.test(words)) place.dataset.kind = "long";
      else if (/^[\d–]/.test(words)) place.dataset.kind = "number";
      place.dataset.head = heads[place.cellIndex]; // shown where a row is a card, as console.css has it
      place.append(cell);
    }
    return line;
  });
  if (!lines.length) lines.push(element("tr", {}, element("td", { className: "none", colSpan: heads.length }, none)));
  table.tBodies[0].replaceChildren(...lines);
}

/** Words into a place that is read out when they change. */
export function say(id, words, role = "status") {
  const place = $(id);
  place.setAttribute("role", role);
  place.textContent = words;
  place.hidden = !words;
}

/** Text into the clipboard, also where a page has no secure context, or may not write there by itself. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return;
  } catch {
    // TypeError: there is no such clipboard; NotAllowedError: the browser's policy
  }
  const before = document.activeElement;
  const field = element("textarea", { value: text, className: "aside" });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
  before?.focus();
}

/** Has the browser keep `content`, a text or a `Blob`, as a file. */
export function download(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** Calls `act` once after `milliseconds`, however often it is asked for meanwhile. */
export function soon(act, milliseconds) {
  let timer = 0;
  const asked = () => {
    timer ||= setTimeout(asked.now, milliseconds);
  };
  asked.now = () => {
    clearTimeout(timer);
    timer = 0;
    return act();
  };
  return asked;
}
