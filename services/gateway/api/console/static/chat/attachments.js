// Files that go along with a message: text alone, since no model that is served here sees images.

import { $, button, bytes, element } from "../app/dom.js";
import { LIMITS } from "./conversation.js";

/** Text of a file's bytes. Throws `RangeError` for what is no text. Pure. */
export function textOf(name, content) {
  let text = "";
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(content);
  } catch {
    throw new RangeError(`${name} is not text in UTF-8; images and other files can be read by no model here.`);
  }
  if (text.includes("\0")) throw new RangeError(`${name} is not text; images and other files can be read by no model here.`);
  if (text.length > LIMITS.file) throw new RangeError(`${name} has more than ${LIMITS.file >> 10} Ki characters.`);
  return text;
}

export class Attachments {
  #files = [];

  /** `fail(words)` tells what could not be attached. */
  constructor(fail) {
    this.fail = fail;
    const field = $("files");
    $("attach").addEventListener("click", () => field.click());
    field.addEventListener("change", async () => {
      await this.add(field.files);
      field.value = "";
    });
    const form = $("ask");
    form.addEventListener("dragover", (event) => event.preventDefault());
    form.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
    $("prompt").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  async add(files) {
    this.fail("");
    for (const file of files) {
      try {
        if (this.#files.length >= LIMITS.files) throw new RangeError(`A message takes at most ${LIMITS.files} files.`);
        if (file.size > 4 * LIMITS.file) throw new RangeError(`${file.name} is too large (${bytes(file.size)}).`);
        this.#files.push({ name: file.name.slice(0, 200), text: textOf(file.name, await file.arrayBuffer()) });
      } catch (error) {
        this.fail(error instanceof RangeError ? error.message : `${file.name} cannot be read (${error.name}).`);
      }
    }
    this.#show();
    $("prompt").focus();
  }

  /** What is attached; nothing is any more. */
  take() {
    const taken = this.#files;
    this.#files = [];
    this.#show();
    return taken;
  }

  get some() {
    return this.#files.length > 0;
  }

  #show() {
    const shown = this.#files.map((file) => {
      const remove = () => {
        this.#files = this.#files.filter((other) => other !== file);
        this.#show();
      };
      return element("li", {}, file.name, button("×", remove, { "aria-label": `Remove ${file.name}` }));
    });
    $("attached").replaceChildren(...shown);
    $("attached").hidden = !shown.length;
  }
}
