// A stream that survives its connection and its gateway; Node's fetch alone.
// RYZANSTEIN_URL may name several gateways, separated by commas: when one is lost the next one goes on.
import { randomUUID } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";

const gateways = (process.env.RYZANSTEIN_URL ?? "http://127.0.0.1:8000").split(",");
const authorization = `Bearer ${process.env.RYZANSTEIN_API_KEY ?? "none"}`;
const TRIES = 20; // in a row without anything new

/** Yields {data, id} of each event; one counts when the blank line behind it is there. */
async function* events(body) {
  let rest = "";
  for await (const part of body.pipeThrough(new TextDecoderStream())) {
    const blocks = (rest + part).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = {};
      for (const line of block.split("\n")) {
        const [, field, value] = line.match(/^(data|id): (.*)$/) ?? [];
        if (field) event[field] = value;
      }
      if (event.data) yield event;
    }
  }
}

/** Yields the text. The same request under the same key is the same generation, at every gateway. */
async function* stream(body) {
  const headers = { authorization, "content-type": "application/json", "idempotency-key": randomUUID() };
  let tries = 0;
  for (let turn = 0; ; turn++) {
    const gateway = gateways[turn % gateways.length];
    let answer;
    let lost = "the stream ended";
    try {
      answer = await fetch(`${gateway}/v1/chat/completions`, {
        method: "POST",
        headers,
        body: JSON.stringify(body),
      });
      if (answer.ok) {
        for await (const event of events(answer.body)) {
          if (event.data === "[DONE]") return;
          const chunk = JSON.parse(event.data);
          if (chunk.error) throw new TypeError(chunk.error.message); // the next try tells whether it is the end
          headers["last-event-id"] = event.id;
          tries = 0;
          for (const choice of chunk.choices) yield choice.delta.content ?? "";
        }
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error; // fetch says TypeError where there was no answer
      lost = error.message;
    }
    if (answer && !answer.ok && ![429, 502, 503].includes(answer.status)) throw new Error(await answer.text());
    if (++tries > TRIES) throw new Error("No gateway answers.");
    console.error(`\n[${gateway} is lost: ${lost}]`);
    await sleep(Math.min(1000, 50 * tries));
  }
}

const listed = await fetch(`${gateways[0]}/v1/models`, { headers: { authorization } });
if (!listed.ok) throw new Error(await listed.text());
const model = (await listed.json()).data[0].id;
const messages = [{ role: "user", content: "Tell me a story." }];
for await (const text of stream({ model, messages, max_tokens: 200, stream: true })) {
  process.stdout.write(text);
}
console.log();
