// The form that makes a job: its files are uploaded first, each once, and the job is asked for under one key.

import { random, send, told, upload } from "../app/api.js";
import { $, bytes, percent, say } from "../app/dom.js";
import { faultOf, requestOf } from "./request.js";

export class JobForm {
  #sent = new WeakMap(); // file → its id at the gateway
  #asked = { body: "", key: "" }; // of a request whose answer may have been lost
  #sending = null; // what ends an upload

  /** `onMade(job)` hears of the job. */
  constructor(onMade) {
    this.onMade = onMade;
    $("tune").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#create();
    });
    $("tune-stop").addEventListener("click", () => this.#sending?.abort());
    $("tune-method").addEventListener("change", () => this.#showMethod());
    this.#showMethod();
  }

  /** What can be trained: models, without adapters. */
  offer(models) {
    const field = $("tune-model");
    const names = models.filter((model) => !model.parent).map((model) => model.id);
    if (names.join("\n") === [...field.options].map((option) => option.value).join("\n")) return;
    field.replaceChildren(...names.map((name) => new Option(name, name, false, name === field.value)));
  }

  #showMethod() {
    $("tune-beta").disabled = $("tune-method").value !== "dpo";
  }

  async #create() {
    if (this.#sending) return;
    this.#sending = new AbortController();
    this.#busy(true);
    try {
      const job = await this.#made();
      $("tune").reset();
      this.#showMethod();
      say("tune-note", `${job.id} is made.`);
      this.onMade(job);
    } catch (error) {
      if (error.name === "AbortError") say("tune-note", "The upload was stopped; no job was made.");
      else say("tune-note", told(error), "alert");
    } finally {
      this.#sending = null;
      this.#busy(false);
    }
  }

  async #made() {
    const [training, validation] = [$("tune-file").files[0], $("tune-validation").files[0]];
    const fault = faultOf(training, "training file") || (validation && faultOf(validation, "validation file"));
    if (fault) throw new RangeError(fault);
    const given = Object.fromEntries([...new FormData($("tune"))].filter(([, value]) => typeof value === "string"));
    requestOf(given, { training: "", validation: "" }); // what is wrong with it is told before anything is sent
    const files = { training: await this.#upload(training), validation: validation ? await this.#upload(validation) : null };
    const asked = requestOf(given, files);
    const body = JSON.stringify(asked);
    if (this.#asked.body !== body) this.#asked = { body, key: random() };
    say("tune-note", "Making the job …");
    const options = { headers: { "idempotency-key": this.#asked.key }, signal: this.#sending.signal };
    const job = await (await send("v1/fine_tuning/jobs", "POST", asked, options)).json();
    this.#asked = { body: "", key: "" };
    return job;
  }

  async #upload(file) {
    if (this.#sent.has(file)) return this.#sent.get(file);
    const bar = $("tune-progress");
    say("tune-note", `Uploading ${file.name} (${bytes(file.size)}) …`);
    const onSent = (sent) => {
      bar.value = Math.min(1, sent / file.size); // the form's own bytes are counted too
      bar.setAttribute("aria-label", `${file.name}: ${percent(bar.value)}`);
    };
    onSent(0);
    const { id } = await upload(file, "fine-tune", onSent, this.#sending.signal);
    this.#sent.set(file, id);
    return id;
  }

  #busy(busy) {
    $("tune-create").disabled = busy;
    for (const name of ["tune-progress", "tune-stop"]) $(name).hidden = !busy;
  }
}
