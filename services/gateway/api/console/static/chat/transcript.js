// The conversation on the page. It follows the answer, unless the reader has scrolled up.

import { $ } from "../app/dom.js";
import { path, siblings } from "./conversation.js";
import { Message } from "./message.js";

const NEAR = 64; // pixels from the end at which a reader counts as being there

export class Transcript {
  #box = $("transcript");
  #messages = new Map(); // node's id → Message
  #follows = true;
  #height = 0; // of the box, when it was last looked at

  /** `acts`: see message.js. */
  constructor(acts) {
    this.acts = acts;
    this.#box.addEventListener("scroll", () => this.#look(), { passive: true });
    $("to-end").addEventListener("click", () => this.toEnd());
    new ResizeObserver(() => this.#stay()).observe(this.#box);
  }

  #look() {
    if (this.#box.clientHeight !== this.#height) return; // it is not the reader who has scrolled
    this.#follows = this.#box.scrollHeight - this.#box.scrollTop - this.#box.clientHeight < NEAR;
    $("to-end").hidden = this.#follows;
  }

  #stay() {
    this.#height = this.#box.clientHeight;
    if (this.#follows) this.#box.scrollTop = this.#box.scrollHeight;
    else this.#look();
  }

  toEnd() {
    this.#follows = true;
    this.#stay();
    $("to-end").hidden = true;
  }

  /** Shows the branch of a conversation that is chosen; messages that stay are left as they are. */
  show(conversation) {
    const nodes = path(conversation);
    const before = this.#messages;
    this.#messages = new Map(
      nodes.map((node) => {
        const versions = siblings(conversation, node);
        const old = before.get(node.id);
        const same = old && old.node === node && old.versions.length === versions.length;
        return [node.id, same ? old : new Message(node, versions, this.acts, () => this.#stay())];
      }),
    );
    for (const message of this.#messages.values()) if (before.get(message.node.id) === message) message.update();
    this.#box.replaceChildren(...[...this.#messages.values()].map((message) => message.item));
    this.#box.hidden = !nodes.length;
    $("welcome").hidden = nodes.length > 0;
    this.#stay();
  }

  /** Shows a message that has changed, if it is there. */
  update(node) {
    const message = this.#messages.get(node.id);
    if (!message) return;
    message.update();
    this.#stay();
  }

  /** The last message of a user, to be edited. */
  editLast() {
    const own = [...this.#messages.values()].filter((message) => message.node.role === "user");
    own.at(-1)?.edit();
  }
}
