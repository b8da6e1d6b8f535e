// An answer that is being read: from the request to its end, over lost connections, reloads and lost gateways.
//
// The request carries an Idempotency-Key, and every event an id. Both are kept with the text before anything else
// happens, so that whoever has the conversation resumes behind the last event, with nothing missing and nothing twice.

import { Refusal, call, events, pause, send, told } from "../app/api.js";
import { StreamError, backoff, pace, passing, take } from "../app/stream.js";

const ATTEMPTS = 20; // at going on with a stream, each after the one before has failed

export class Answer {
  #connection = null;
  #stopped = false;

  /** `node` is the assistant's, with `pending`: {key, body, background, session, began}; `onChange(ended)`. */
  constructor(node, onChange) {
    this.node = node;
    this.onChange = onChange;
    this.resuming = false;
  }

  /** Reads until the end. Never throws: what went wrong is `node.error`. */
  async follow() {
    const { node } = this;
    let lost = 0;
    while (!this.#stopped) {
      try {
        this.#connection = new AbortController();
        const response = await this.#open(this.#connection.signal);
        for await (const event of events(response)) {
          if (this.#stopped) return await cancel(JSON.parse(event.data).id); // it was stopped before it had an id
          lost = 0;
          this.resuming = false;
          if (take(node, event, Date.now())) return this.#end();
          this.#changed();
        }
        lost += 1;
        if (lost > ATTEMPTS) return this.#end("The gateway ends the stream again and again before the answer is whole.");
      } catch (error) {
        if (this.#stopped) return;
        lost += 1;
        if (!this.#goesOn(error, lost > 1) || lost > ATTEMPTS) return this.#end(told(error));
      }
      this.resuming = true;
      this.#tell(false);
      await pause(backoff(lost));
    }
  }

  /** The stream from where it was left: by the generation's id, else by the request and its key. */
  #open(signal) {
    const { pending } = this.node;
    if (pending.id) {
      const headers = pending.last === null ? {} : { "last-event-id": pending.last };
      return call(`v1/generations/${pending.id}/stream`, { headers, signal });
    }
    const headers = {
      "idempotency-key": pending.key,
      "x-ryzanstein-background": pending.background,
      "x-session-id": pending.session,
    };
    return send("v1/chat/completions", "POST", pending.body, { headers, signal });
  }

  /** `lost`: whether a try before this one has failed, so that the request may have been taken already. */
  #goesOn(error, lost) {
    if (error instanceof StreamError) return false;
    const { id, away } = this.node.pending;
    return !(error instanceof Refusal) || passing(error.status, Boolean(id || away || lost));
  }

  /** On its own, so that what fails on the page is not taken for a lost connection. */
  #tell(ended) {
    queueMicrotask(() => this.onChange(ended));
  }

  #changed() {
    this.node.revision += 1;
    this.#tell(false);
  }

  #end(error = "") {
    const { node } = this;
    node.pace = pace(node, Date.now());
    node.error = error;
    if (error) node.finish ??= node.pending.finish; // of the part that was there before
    node.pending = null;
    node.revision += 1;
    this.resuming = false;
    this.#stopped = true;
    this.#tell(true);
  }

  /** Ends the generation at the gateway, not only here. Throws where the gateway could not be told. */
  async stop() {
    if (this.#stopped) return;
    const { id } = this.node.pending;
    this.node.finish = "stopped";
    this.#end();
    if (!id) return; // the first event has it: `follow` cancels it then
    this.#connection?.abort();
    await cancel(id);
  }
}

async function cancel(id) {
  if (!id) return;
  try {
    await call(`v1/generations/${id}`, { method: "DELETE" });
  } catch (error) {
    if (error.status !== 404) throw new Error(`The answer may continue at the gateway: ${told(error)}`);
  }
}
