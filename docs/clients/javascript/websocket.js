// Two answers at a time on one WebSocket, Node's own: Node 22, or node --experimental-websocket with Node 20.
// Node's takes headers, the browser's does not.
const url = process.env.RYZANSTEIN_URL ?? "http://127.0.0.1:8000";
const headers = { authorization: `Bearer ${process.env.RYZANSTEIN_API_KEY ?? "none"}` };
const questions = { a: "Tell me a story.", b: "Write a poem." };
const listed = await fetch(`${url}/v1/models`, { headers });
if (!listed.ok) throw new Error(await listed.text());
const model = (await listed.json()).data[0].id;
const texts = { a: "", b: "" };
const running = new Set(Object.keys(questions));

const socket = new WebSocket(url.replace("http", "ws") + "/v1/stream", { headers });
socket.onopen = () => {
  for (const [id, content] of Object.entries(questions)) {
    const request = { model, messages: [{ role: "user", content }], max_tokens: 200 };
    socket.send(JSON.stringify({ type: "generate", id, request }));
  }
};
socket.onmessage = ({ data }) => {
  const message = JSON.parse(data);
  if (message.type === "chunk") {
    for (const choice of message.chunk.choices) texts[message.id] += choice.delta.content ?? "";
  } else if (message.type === "error") {
    console.error(message.error.message);
    process.exitCode = 1;
    socket.close();
  } else if (message.type === "done") {
    running.delete(message.id);
    if (running.size === 0) socket.close();
  }
};
await new Promise((resolve) => (socket.onclose = resolve));
for (const [id, text] of Object.entries(texts)) console.log(`${id}: ${text}`);
if (running.size > 0) process.exitCode = 1;
