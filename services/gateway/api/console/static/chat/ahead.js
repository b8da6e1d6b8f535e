// Prefill ahead: while the next message is typed, the gateway computes the conversation up to where it begins.
//
// Asked once for each state of a conversation, of models that are loaded alone, and no more where the gateway refuses to:
// an answer comes without it too, only later.

import { Refusal } from "../app/api.js";

const NEVER = [401, 403, 404, 405]; // statuses of a gateway that will not, or cannot
export const PAUSE = 400; // milliseconds from the first key to the request

export class Ahead {
  #send;
  #loaded = new Set();
  #last = "";
  #off = false;

  /** `send(path, method, body)`: as in api.js. */
  constructor(send) {
    this.#send = send;
  }

  /** `models`: as `GET /models` lists them; adapters are loaded where their bases are. */
  knows(models) {
    const loaded = new Set(models.filter((model) => model.status?.state === "loaded").map((model) => model.id));
    const there = models.filter((model) => loaded.has(model.parent ?? model.id));
    this.#loaded = new Set(there.map((model) => model.id));
  }

  /** Has a conversation prepared, if that is of use. `request()` makes the body of its next request; what is wrong with
   * that is told when it is sent. */
  async prepare(conversation, model, request) {
    const wanted = (conversation.settings.ahead ?? "") !== "off";
    if (!wanted || this.#off || !conversation.leaf || !this.#loaded.has(model)) return;
    const state = JSON.stringify([conversation.id, conversation.leaf, model, conversation.settings]);
    if (state === this.#last) return;
    this.#last = state;
    try {
      const session = encodeURIComponent(conversation.id);
      await this.#send(`v1/sessions/${session}/prefill?wait=0`, "POST", request());
    } catch (error) {
      if (error instanceof Refusal && NEVER.includes(error.status)) this.#off = true;
    }
  }
}
