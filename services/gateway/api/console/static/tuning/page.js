// Fine-tuning: the jobs that this key may see, and one of them (by the address) in full.

import { pause, read, told } from "../app/api.js";
import { $, age, element, fill, say, state } from "../app/dom.js";
import { JobForm } from "./form.js";
import { JobView, progressBar } from "./job.js";

const LOOK = 3000; // milliseconds
const PAGE = 10; // jobs

const address = (job) => `#fine-tuning/${job.id}`;

function row(job) {
  return [
    element("a", { href: address(job) }, job.id),
    state(job.status),
    progressBar(job),
    job.model,
    job.method?.type ?? "supervised",
    job.fine_tuned_model ?? "–",
    age(Date.now() / 1000 - job.created_at),
  ];
}

/** The newest `count` jobs, a page at a time: {jobs, more}. */
async function newest(count) {
  const jobs = [];
  let more = true;
  while (more && jobs.length < count) {
    const after = jobs.length ? `&after=${encodeURIComponent(jobs.at(-1).id)}` : "";
    const page = await read(`v1/fine_tuning/jobs?limit=${PAGE}${after}`);
    jobs.push(...page.data);
    more = page.has_more;
  }
  return { jobs, more };
}

export class FineTuningPage {
  #wanted = PAGE;
  #next = 0; // when to look
  #shown = "";
  #open = "";

  /** `chatWith(model)` opens the chat with it. */
  constructor(chatWith) {
    this.job = new JobView(chatWith);
    this.form = new JobForm((job) => {
      location.hash = address(job);
    });
    $("more-tunings").addEventListener("click", () => {
      this.#wanted += PAGE;
      this.#next = 0;
    });
  }

  /** Shows a job; an empty id: all of them. */
  open(id) {
    const before = this.#open;
    const moved = $("fine-tuning").contains(document.activeElement);
    this.#open = id;
    $("tuning-jobs").hidden = Boolean(id);
    $("tuning-job").hidden = !id;
    this.job.open(id);
    if (id && moved) $("tuning-name").focus(); // what had the focus is hidden now
    else if (before && moved) document.querySelector(`#tunings a[href="${CSS.escape(address({ id: before }))}"]`)?.focus();
    this.#next = 0;
  }

  /** Looks every few seconds while the jobs are shown. */
  async watch() {
    for (;;) {
      const shows = !document.hidden && !$("fine-tuning").hidden && !this.#open;
      if (shows && performance.now() >= this.#next) {
        this.#next = performance.now() + LOOK;
        try {
          this.#show(await newest(this.#wanted));
          say("tunings-note", "");
        } catch (error) {
          say("tunings-note", told(error), "alert");
        }
      }
      await pause(300);
    }
  }

  #show({ jobs, more }) {
    const now = JSON.stringify(jobs.map((job) => [job.id, job.status, job.progress, job.fine_tuned_model]));
    if (now !== this.#shown) {
      const at = document.activeElement?.getAttribute("href");
      fill("tunings", jobs.map(row), "none yet: make one below");
      if (at?.startsWith("#fine-tuning/")) document.querySelector(`#tunings a[href="${CSS.escape(at)}"]`)?.focus();
    }
    this.#shown = now;
    $("more-tunings").hidden = !more;
  }
}
