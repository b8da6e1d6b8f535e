// One job: how far it is, its curves, checkpoints and events as they come, and the buttons that change it.

import { Refusal, call, events, pause, read, send, told } from "../app/api.js";
import { $, age, button, copy, download, element, fill, percent, say, soon, state } from "../app/dom.js";
import { Curve } from "./curve.js";
import { LIMITS, Run, figuresOf } from "./run.js";

const LOOK = 2000; // milliseconds between two looks at the job
const RETRY = 1000; // milliseconds before a stream that ended is opened again
const DRAWN = 200; // milliseconds: events that come within are shown at once
const CHECKPOINTS = 100;
export const OVER = ["succeeded", "failed", "cancelled"];

const path = (id) => `v1/fine_tuning/jobs/${encodeURIComponent(id)}`;
const figure = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toPrecision(4))));
const rate = (value) => (value ? value.toExponential(1) : "0");
const shown = (value, format = figure) => (value === null ? "–" : format(value));
const clock = (seconds) => new Date(seconds * 1000).toLocaleString();

/** How far a job is, in words. */
export function progressOf(job) {
  const { step = 0, steps = 0 } = job.progress ?? {};
  if (!steps) return "";
  const left = OVER.includes(job.status) ? 0 : (job.estimated_finish ?? 0) - Date.now() / 1000;
  return `step ${step} of ${steps}${left > 0 ? `, ends in about ${age(left)}` : ""}`;
}

/** The same, with what its host still has to do. */
function wordsOf(job) {
  const asked = { pause: job.status === "paused" ? "" : "pauses after its step", cancel: "is being cancelled" };
  return [progressOf(job), OVER.includes(job.status) ? "" : asked[job.wanted]].filter(Boolean).join(", ");
}

export function progressBar(job) {
  const { step = 0, steps = 0 } = job.progress ?? {};
  const words = progressOf(job) || "no steps yet";
  return element("progress", { max: steps || 1, value: Math.min(step, steps), "aria-label": `${job.id}: ${words}` });
}

/** Name and value of what is known of a job. */
function factsOf(job) {
  const method = job.method?.type ?? "supervised";
  const chosen = { ...job.method?.[method]?.hyperparameters, ...job.lora, ...job.settings };
  chosen.max_tokens ||= "the model's context";
  const words = (value) => (Array.isArray(value) ? value.join(" ") : String(value));
  return [
    ["Base", job.model],
    ["Method", method],
    ["Model", job.fine_tuned_model],
    ["Training file", job.training_file],
    ["Validation file", job.validation_file],
    ["Result files", (job.result_files ?? []).join(", ")],
    ["Made", clock(job.created_at)],
    ["Ended", job.finished_at ? clock(job.finished_at) : ""],
    ["Trained tokens", job.trained_tokens === null ? "" : job.trained_tokens],
    ["Seed", job.seed],
    ...Object.entries(chosen).map(([name, value]) => [name.replaceAll("_", " "), value === null ? "" : words(value)]),
  ].filter(([, value]) => value !== undefined && value !== null && value !== "");
}

export class JobView {
  #id = "";
  #leaving = null; // ends what is under way for the job that is shown
  #job = null;
  #run = new Run();
  #last = null; // id of the last event, for the stream's next part
  #checkpoints = "";
  #draw = soon(() => this.#show(), DRAWN);
  #curves = [
    new Curve("Loss", [{ name: "training", figure: "trainLoss" }, { name: "validation", figure: "validLoss" }], figure),
    new Curve("Accuracy", [{ name: "training", figure: "trainAccuracy" }, { name: "validation", figure: "validAccuracy" }], percent),
    new Curve("Margin", [{ name: "training", figure: "margin" }, { name: "validation", figure: "validMargin" }], figure),
    new Curve("Learning rate", [{ name: "learning rate", figure: "learningRate" }], rate),
  ];

  /** `chatWith(model)` opens the chat with it. */
  constructor(chatWith) {
    this.chatWith = chatWith;
    this.#empty();
    $("curves").append(...this.#curves.map((curve) => curve.figure));
    $("tuning-pause").addEventListener("click", () => this.#ask("pause", "pauses after its step"));
    $("tuning-resume").addEventListener("click", () => this.#ask("resume", "goes on"));
    $("tuning-cancel").addEventListener("click", () => {
      if (confirm(`Cancel ${this.#id}? Its checkpoints are kept.`)) this.#ask("cancel", "is being cancelled");
    });
    $("tuning-chat").addEventListener("click", () => chatWith(this.#job.fine_tuned_model));
    $("tuning-copy").addEventListener("click", async () => {
      await copy(this.#job.fine_tuned_model);
      say("tuning-note", "The model's name is copied.");
    });
    $("tuning-config").addEventListener("click", () => this.#save("adapter_config.json"));
    $("tuning-weights").addEventListener("click", () => this.#save("adapter_model.safetensors"));
    $("tuning-steps").addEventListener("toggle", () => this.#showSteps());
  }

  /** Shows a job, and what becomes of it, until another one is opened; an empty id: none. */
  open(id) {
    if (id === this.#id) return;
    this.#leaving?.abort();
    this.#id = id;
    if (!id) return;
    this.#leaving = new AbortController();
    [this.#job, this.#run, this.#last, this.#checkpoints] = [null, new Run(), null, ""];
    $("tuning-name").textContent = id;
    $("tuning-events").replaceChildren();
    for (const name of ["tuning-state", "tuning-facts"]) $(name).replaceChildren();
    for (const name of ["tuning-note", "tuning-error", "tuning-waiting"]) say(name, "", $(name).getAttribute("role"));
    this.#empty();
    this.#buttons();
    this.#show();
    this.#look(this.#leaving.signal);
    this.#listen(this.#leaving.signal);
  }

  #empty() {
    for (const table of ["steps", "checkpoints"]) fill(table, [], "none yet");
  }

  /** Reads the job every few seconds until it is over. */
  async #look(signal) {
    let lost = false; // whether the note says so
    while (!signal.aborted) {
      if (!document.hidden && !$("fine-tuning").hidden) {
        try {
          const job = await read(path(this.#id));
          if (signal.aborted) return;
          await this.#set(job, signal);
          if (lost) say("tuning-note", "");
          lost = false;
          if (OVER.includes(job.status)) return;
        } catch (error) {
          if (signal.aborted) return;
          lost = true;
          say("tuning-note", told(error), "alert");
          if (error instanceof Refusal && error.status === 404) return;
        }
      }
      await pause(LOOK);
    }
  }

  async #set(job, signal) {
    this.#job = job;
    const facts = factsOf(job).flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, String(value))]);
    $("tuning-facts").replaceChildren(...facts);
    $("tuning-state").replaceChildren(state(job.status), progressBar(job), element("span", {}, wordsOf(job)));
    say("tuning-waiting", OVER.includes(job.status) ? "" : (job.waiting_for ?? ""));
    say("tuning-error", job.error?.message ?? "", "alert");
    this.#buttons();
    this.#draw();
    await this.#readCheckpoints(signal);
  }

  /** Which of them do anything now; a focus on one that goes is kept near. */
  #buttons() {
    const { status = "", wanted, fine_tuned_model: model } = this.#job ?? {};
    const going = status !== "" && !OVER.includes(status) && wanted !== "cancel";
    const there = {
      "tuning-chat": Boolean(model),
      "tuning-copy": Boolean(model),
      "tuning-pause": going && wanted === "run" && status !== "paused",
      "tuning-resume": going && (wanted === "pause" || status === "paused"),
      "tuning-cancel": going,
      "tuning-config": Boolean(model),
      "tuning-weights": Boolean(model),
    };
    for (const [name, shows] of Object.entries(there)) {
      if (!shows && document.activeElement === $(name)) $("tuning-name").focus();
      $(name).hidden = !shows;
    }
  }

  /** Events as they come, from the last one that is known. */
  async #listen(signal) {
    while (!signal.aborted) {
      try {
        const headers = this.#last === null ? {} : { "last-event-id": this.#last };
        const answer = await call(`${path(this.#id)}/events?stream=true`, { headers, signal });
        for await (const event of events(answer)) {
          if (signal.aborted) return;
          if (event.data === "[DONE]") return;
          this.#take(event);
        }
      } catch (error) {
        if (signal.aborted || (error instanceof Refusal && error.status === 404)) return;
      }
      await pause(RETRY); // what is wrong is told by the look at the job
    }
  }

  #take({ data, id }) {
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    this.#last = id ?? this.#last;
    this.#run.add(event);
    this.#draw();
  }

  async #readCheckpoints(signal) {
    const { data } = await read(`${path(this.#id)}/checkpoints?limit=${CHECKPOINTS}`);
    const now = JSON.stringify(data);
    if (signal.aborted || now === this.#checkpoints) return;
    this.#checkpoints = now; // a button that has the focus stays, where nothing has changed
    fill("checkpoints", data.map((one) => this.#checkpoint(one)), "none yet");
  }

  #checkpoint({ step_number: step, fine_tuned_model_checkpoint: model, created_at: at, metrics }) {
    const { trainLoss = null, validLoss = null, validAccuracy = null } = figuresOf({ ...metrics, step }) ?? {};
    const acts = element("span", { className: "buttons" });
    const act = (label, does) => acts.append(button(label, does, { "aria-label": `${label}: step ${step}` }));
    if (model) act("Chat", () => this.chatWith(model));
    act("Config", () => this.#save("adapter_config.json", step));
    act("Weights", () => this.#save("adapter_model.safetensors", step));
    return [String(step), shown(trainLoss), shown(validLoss), shown(validAccuracy, percent), model || "–", clock(at), acts];
  }

  #show() {
    const run = this.#run;
    const steps = this.#job?.progress?.steps ?? 0;
    for (const curve of this.#curves) curve.show(run, steps);
    this.#showMessages();
    this.#showSteps();
  }

  /** Adds what is new, so that only this is read out. */
  #showMessages() {
    const list = $("tuning-events");
    const { messages } = this.#run;
    const end = list.scrollTop + list.clientHeight >= list.scrollHeight - 4;
    const ids = new Set(messages.map((message) => message.id));
    for (const item of list.querySelectorAll("li")) if (!ids.has(item.dataset.id)) item.remove();
    let place = list.firstElementChild;
    for (const { id, at, level, message } of messages) {
      if (place?.dataset.id === id) place = place.nextElementSibling;
      else {
        const time = element("time", {}, new Date(at * 1000).toLocaleTimeString());
        list.insertBefore(element("li", { "data-id": id, "data-level": level }, time, " ", message), place);
      }
    }
    if (end) list.scrollTop = list.scrollHeight;
  }

  #showSteps() {
    if (!$("tuning-steps").open) return;
    const rows = this.#run.steps.slice(-LIMITS.rows).reverse();
    const row = (one) => [
      String(one.step),
      shown(one.trainLoss),
      shown(one.trainAccuracy, percent),
      shown(one.validLoss),
      shown(one.validAccuracy, percent),
      shown(one.learningRate, rate),
      shown(one.gradNorm),
    ];
    fill("steps", rows.map(row), "none yet");
  }

  async #ask(action, words) {
    say("tuning-note", "");
    const signal = this.#leaving?.signal;
    try {
      const job = await (await send(`${path(this.#id)}/${action}`, "POST")).json();
      if (signal.aborted) return;
      await this.#set(job, signal);
      say("tuning-note", `${job.id} ${words}.`);
    } catch (error) {
      say("tuning-note", told(error), "alert");
    }
  }

  /** Has the browser keep a file of the adapter: the result's, or that of the checkpoint at `step`. */
  async #save(file, step) {
    const [id, query] = [this.#id, step ? `?checkpoint=${step}` : ""];
    say("tuning-note", `Fetching ${file} …`);
    try {
      const content = await (await call(`${path(id)}/adapter/${file}${query}`)).blob();
      download(file, content.type, content);
      say("tuning-note", `${file} is saved.`);
    } catch (error) {
      say("tuning-note", told(error), "alert");
    }
  }
}
