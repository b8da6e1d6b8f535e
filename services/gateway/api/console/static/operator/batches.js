// Batch jobs: how far they are, what has come of them, and the button that ends one.

import { call, pause, read, send, told } from "../app/api.js";
import { $, age, button, download, element, fill, say, state } from "../app/dom.js";

const LOOK = 3000; // milliseconds
const OVER = ["completed", "failed", "expired", "cancelled", "cancelling"];

function progress(job) {
  const { completed = 0, failed = 0, total = 0 } = job.request_counts ?? {};
  const bar = element("progress", { max: total || 1, value: completed + failed });
  bar.setAttribute("aria-label", `${job.id}: ${completed + failed} of ${total}`);
  return bar;
}

async function cancel(job) {
  if (!confirm(`Cancel ${job.id}? What is done is kept.`)) return;
  try {
    await send(`v1/batches/${job.id}/cancel`, "POST");
    say("batches-note", `${job.id} is being cancelled.`);
  } catch (error) {
    say("batches-note", told(error), "alert");
  }
}

/** Has the browser keep the answers, or the errors, of a job. */
async function fetchFile(file) {
  try {
    const content = await (await call(`v1/files/${file}/content`)).text();
    download(`${file}.jsonl`, "application/jsonl", content);
  } catch (error) {
    say("batches-note", told(error), "alert");
  }
}

function actions(job) {
  const place = element("span", { className: "buttons" });
  const act = (label, does) => place.append(button(label, does, { "aria-label": `${label} ${job.id}` }));
  if (!OVER.includes(job.status)) act("Cancel", () => cancel(job));
  if (job.output_file_id) act("Output", () => fetchFile(job.output_file_id));
  if (job.error_file_id) act("Errors", () => fetchFile(job.error_file_id));
  return place.childElementCount ? place : "–";
}

function row(job) {
  const count = job.request_counts ?? { completed: 0, failed: 0, total: 0 };
  return [
    job.id,
    state(job.status),
    progress(job),
    String(count.completed),
    String(count.failed),
    String(count.total),
    job.created_at ? age(Date.now() / 1000 - job.created_at) : "–",
    actions(job),
  ];
}

/** Looks every few seconds while the page of batches is shown. */
export async function watchBatches() {
  let shown = "";
  for (;;) {
    if (!document.hidden && !$("batches").hidden) {
      try {
        const jobs = (await read("v1/batches?limit=20")).data;
        const now = JSON.stringify(jobs.map((job) => [job.id, job.status, job.request_counts]));
        if (now !== shown) fill("jobs", jobs.map(row), "none");
        shown = now; // a button that has the focus stays, where nothing has changed
      } catch (error) {
        say("batches-note", told(error), "alert");
      }
    }
    await pause(shown ? LOOK : 300);
  }
}
