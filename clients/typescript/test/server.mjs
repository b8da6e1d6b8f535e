// A server that answers as the test says, and breaks its connections when the test wants it.
import { createServer } from "node:http";

/** `answer(request, response, number)`: request has `body` (text) beside Node's fields. */
export async function serve(answer) {
  const requests = [];
  const server = createServer(async (request, response) => {
    const parts = [];
    for await (const part of request) parts.push(part);
    request.body = Buffer.concat(parts).toString();
    requests.push(request);
    response.on("error", () => {});
    await answer(request, response, requests.length);
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  return {
    requests,
    url: `http://127.0.0.1:${server.address().port}`,
    async close() {
      server.closeAllConnections();
      await new Promise((resolve) => server.close(resolve));
    },
  };
}

export function json(response, body, status = 200, headers = {}) {
  response.writeHead(status, { "content-type": "application/json", ...headers }).end(JSON.stringify(body));
}

export function refuse(response, status, code, headers = {}) {
  json(response, { error: { message: `It is ${code}.`, type: "server_error", param: null, code } }, status, headers);
}

export function beginEvents(response) {
  response.writeHead(200, { "content-type": "text/event-stream" }).write("retry: 1000\n\n");
}

/** An event of a chat, whose text is one character of `text`. */
export function chatEvent(text, position) {
  const end = position > text.length;
  const choice = { index: 0, delta: end ? {} : { content: text[position - 1] }, finish_reason: end ? "stop" : null };
  return `data: ${JSON.stringify({ id: "chatcmpl-1", choices: [choice] })}\nid: ${position}\n\n`;
}

/** The events of a chat behind the request's Last-Event-ID, as one string. */
export function chatEvents(request, text) {
  const after = Number(request.headers["last-event-id"] ?? 0);
  const positions = Array.from({ length: text.length + 1 - after }, (_, index) => after + index + 1);
  return `${positions.map((position) => chatEvent(text, position)).join("")}data: [DONE]\n\n`;
}
