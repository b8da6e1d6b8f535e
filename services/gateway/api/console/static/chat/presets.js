// Presets: named sets of sampling parameters and a system prompt, kept in this browser.

import { $, say } from "../app/dom.js";
import { askName } from "../app/naming.js";
import { FIELDS, only } from "./settings.js";

const STORE = "ryzanstein.presets";
const OTHERS = ["tools", "background", "ahead"]; // of the conversation, not of how the model is sampled
export const PRESET_FIELDS = FIELDS.filter((name) => !OTHERS.includes(name));
export const LIMITS = { presets: 100, name: 60 }; // characters

/** What of a conversation's settings a preset has. */
export const sampled = (settings) => only(settings, PRESET_FIELDS);

/** A conversation's settings once a preset is applied: the preset's fields, and none of the others that it could have. */
export function applied(settings, preset) {
  return { ...only(settings, OTHERS), ...preset.settings };
}

/** What was stored, as far as it is presets: [{name, settings}] in the order of their names. */
export function presetsOf(text) {
  let kept = [];
  try {
    kept = JSON.parse(text) ?? [];
  } catch {
    // not ours: as if there were none
  }
  if (!Array.isArray(kept)) return [];
  const named = kept.filter((one) => typeof one?.name === "string" && one.name.trim());
  return sorted(named.map((one) => ({ name: one.name.slice(0, LIMITS.name), settings: sampled(one.settings) })));
}

/** With this one, in the place of one that has its name. Throws `RangeError` at the limit. */
export function withPreset(presets, name, settings) {
  const others = withoutPreset(presets, name);
  if (others.length >= LIMITS.presets) throw new RangeError(`${LIMITS.presets} presets are kept here; delete some.`);
  return sorted([...others, { name, settings: sampled(settings) }]);
}

export const withoutPreset = (presets, name) => presets.filter((one) => one.name !== name);

/** With another name for one of them. Throws `RangeError` where another has that name. */
export function renamedPreset(presets, before, name) {
  if (presets.some((one) => one.name === name)) throw new RangeError(`There is a preset ${name} already.`);
  return sorted(presets.map((one) => (one.name === before ? { ...one, name } : one)));
}

/** The name of the preset that these settings are, `preferred` where it is one of several; empty: none. */
export function presetNamed(presets, settings, preferred) {
  const key = JSON.stringify(sampled(settings));
  const same = presets.filter((one) => JSON.stringify(one.settings) === key).map((one) => one.name);
  return same.includes(preferred) ? preferred : (same[0] ?? "");
}

const sorted = (presets) => [...presets].sort((one, other) => one.name.localeCompare(other.name));

export class Presets {
  #settings = {};

  /** `apply(settings)`: the conversation's settings are to be these. */
  constructor(apply) {
    $("preset").addEventListener("change", () => {
      const chosen = this.#presets().find((one) => one.name === $("preset").value);
      if (chosen) apply(applied(this.#settings, chosen));
    });
    $("preset-save").addEventListener("click", () => this.#save());
    $("preset-rename").addEventListener("click", () => this.#rename($("preset").value));
    $("preset-delete").addEventListener("click", () => this.#delete($("preset").value));
    addEventListener("storage", () => this.show(this.#settings)); // another tab has changed them
  }

  /** Shows which preset the settings of the conversation are. */
  show(settings, preferred = $("preset").value) {
    this.#settings = settings;
    const presets = this.#presets();
    const chosen = presetNamed(presets, settings, preferred);
    const none = new Option(presets.length ? "none of them" : "none yet", "", false, !chosen);
    $("preset").replaceChildren(none, ...presets.map(({ name }) => new Option(name, name, false, name === chosen)));
    for (const id of ["preset-rename", "preset-delete"]) $(id).disabled = !chosen;
  }

  #presets() {
    return presetsOf(localStorage.getItem(STORE));
  }

  async #save() {
    const name = await askName("Name of the preset (one of that name is replaced)", $("preset").value, LIMITS.name);
    if (name) this.#keep(() => withPreset(this.#presets(), name, this.#settings), `${name} is kept in this browser.`, name);
  }

  async #rename(before) {
    const name = await askName(`New name of ${before}`, before, LIMITS.name);
    if (!name || name === before) return;
    this.#keep(() => renamedPreset(this.#presets(), before, name), `${before} is called ${name} now.`, name);
  }

  #delete(name) {
    if (!confirm(`Delete the preset ${name}? The parameters of conversations stay.`)) return;
    this.#keep(() => withoutPreset(this.#presets(), name), `${name} is deleted.`, "");
    $("preset").focus(); // the button may be off now
  }

  #keep(change, words, preferred) {
    try {
      localStorage.setItem(STORE, JSON.stringify(change()));
      say("preset-note", words);
    } catch (error) {
      say("preset-note", error instanceof RangeError ? error.message : "The browser has no room for it.", "alert");
    }
    this.show(this.#settings, preferred);
  }
}
