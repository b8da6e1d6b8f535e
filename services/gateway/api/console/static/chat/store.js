// Conversations in this browser (IndexedDB). What two tabs write of one conversation is merged, message by message;
// other tabs are told of changes.

import { LIMITS, headOf, isNews, matches, merge } from "./conversation.js";

const NAME = "ryzanstein";
const STORE = "conversations";
const CHANNEL = "ryzanstein.conversations";

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const ended = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });

function openDatabase() {
  const request = indexedDB.open(NAME, 1);
  request.onupgradeneeded = () => {
    request.result.createObjectStore(STORE, { keyPath: "id" }).createIndex("updated", "updated");
  };
  return done(request);
}

export class Store {
  #database = null; // a promise
  #channel = new BroadcastChannel(CHANNEL);

  /** `onChange(id)`: another tab has written or deleted this conversation. */
  constructor(onChange) {
    this.#channel.onmessage = ({ data }) => onChange(data);
  }

  async #transaction(mode) {
    this.#database ??= openDatabase();
    return (await this.#database).transaction(STORE, mode);
  }

  /** The conversation, or undefined. */
  async get(id) {
    return done((await this.#transaction("readonly")).objectStore(STORE).get(id));
  }

  /** Writes a conversation. Throws `RangeError` at the limit, and where the browser has no room. */
  async put(conversation) {
    const transaction = await this.#transaction("readwrite");
    const store = transaction.objectStore(STORE);
    const whole = ended(transaction);
    whole.catch(() => {}); // it is awaited below, after what may fail before
    const stored = await done(store.get(conversation.id));
    if (!stored && (await done(store.count())) >= LIMITS.conversations) {
      transaction.abort();
      throw new RangeError(`${LIMITS.conversations} conversations are kept here; export and delete some.`);
    }
    store.put(stored ? merge(stored, conversation) : conversation);
    try {
      await whole;
    } catch (error) {
      throw new RangeError(`The browser has not kept the conversation (${error?.name ?? "no reason given"}).`);
    }
    this.#channel.postMessage(conversation.id);
  }

  /** Writes a conversation from a file: "added", "changed" (messages came to the one here) or "same". Throws as `put`. */
  async bring(conversation) {
    const stored = await this.get(conversation.id);
    if (stored && !isNews(stored, conversation)) return "same";
    await this.put(conversation);
    return stored ? "changed" : "added";
  }

  async remove(id) {
    const transaction = await this.#transaction("readwrite");
    transaction.objectStore(STORE).delete(id);
    await ended(transaction);
    this.#channel.postMessage(id);
  }

  /** All of them, whole. */
  async all() {
    return done((await this.#transaction("readonly")).objectStore(STORE).getAll());
  }

  /** Title, id and time of those in which all words of `query` stand, the newest first. */
  async heads(query = "") {
    const store = (await this.#transaction("readonly")).objectStore(STORE);
    const request = store.index("updated").openCursor(null, "prev");
    const found = [];
    return new Promise((resolve, reject) => {
      request.onerror = () => reject(request.error);
      request.onsuccess = () => {
        const cursor = request.result;
        if (!cursor) {
          resolve(found);
          return;
        }
        if (!query || matches(cursor.value, query)) found.push(headOf(cursor.value));
        cursor.continue();
      };
    });
  }
}
