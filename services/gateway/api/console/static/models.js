// The models: what is registered, what becomes of it as it happens, and the buttons that change it.
// Events (models/sse) say that something has changed; the list is then read anew, so that nothing can be missed.

const $ = (id) => document.getElementById(id);
const SETTLE = 400; // milliseconds: what changes within is shown at once
const RETRY = 2000; // milliseconds before a stream that ended is opened again

let tools = null; // what the console has: call, events, fill, state, percent, told, onNames
let reading = null; // the reading that is under way, or about to be
let again = false; // whether something has changed since it began

function say(words, role = "status") {
  $("models-note").setAttribute("role", role);
  $("models-note").textContent = words;
}

/** One change, told in words; the table follows by itself. */
async function change(words, path, method, body) {
  say(`${words} …`);
  try {
    await tools.call(path, {
      method,
      body: body === undefined ? undefined : JSON.stringify(body),
      headers: body === undefined ? {} : { "content-type": "application/json" },
    });
    say(`${words}: begun.`);
    refresh();
    return true;
  } catch (error) {
    say(tools.told(error), "alert");
    return false;
  }
}

const entry = (name) => `v1/registry/models/${encodeURIComponent(name)}`;

function actions(model) {
  const place = document.createElement("span");
  place.className = "buttons";
  if (model.pinned === null) return "–"; // its executor was started with it: nobody else decides
  const button = (name, label, act) => {
    const made = Object.assign(document.createElement("button"), { type: "button", textContent: label });
    made.dataset.action = name;
    made.dataset.model = model.id;
    made.setAttribute("aria-label", `${label} ${model.id}`);
    made.addEventListener("click", act);
    place.append(made);
  };
  const idle = ["unloaded", "sleeping", "failed"].includes(model.status.state);
  const turn = idle ? ["Load", "models/load"] : ["Unload", "models/unload"];
  button("turn", turn[0], () => change(`${turn[0]} ${model.id}`, turn[1], "POST", { model: model.id }));
  const pin = model.pinned ? "Unpin" : "Pin";
  button("pin", pin, () => change(`${pin} ${model.id}`, entry(model.id), "PATCH", { pinned: !model.pinned }));
  button("remove", "Remove", () => {
    if (confirm(`Remove ${model.id} from the registry? What runs ends first; its files stay.`)) {
      change(`Remove ${model.id}`, entry(model.id), "DELETE");
    }
  });
  return place;
}

function status(model) {
  const { state, completed, reason, expected_at: expected } = model.status;
  const shown = document.createElement("span");
  shown.append(tools.state(state));
  if (["downloading", "loading"].includes(state)) {
    const bar = Object.assign(document.createElement("progress"), { max: 1, value: completed });
    bar.setAttribute("aria-label", `${model.id}: ${tools.percent(completed)}`);
    shown.append(" ", bar, ` ${tools.percent(completed)}`);
  }
  const left = expected ? Math.max(0, Math.round(expected - Date.now() / 1000)) : 0;
  if (left) shown.append(` (in about ${left} s)`);
  if (reason) shown.append(` ${reason}`);
  return shown;
}

function show(models) {
  const at = document.activeElement?.dataset; // a new row must not take the keyboard's place away
  const row = (model) => [
    model.aliases.length ? `${model.id} (${model.aliases.join(", ")})` : model.id,
    status(model),
    String(model.status.replicas),
    model.max_model_len ? String(model.max_model_len) : "–",
    actions(model),
  ];
  tools.fill("registry", models.map(row), "none yet: add one below, or start an executor with one");
  if (at?.action) {
    const same = [...$("registry").querySelectorAll("button")].find(
      (one) => one.dataset.action === at.action && one.dataset.model === at.model,
    );
    same?.focus();
  }
  tools.onNames(models.map((model) => model.id));
}

function refresh() {
  again = true;
  reading ??= read().finally(() => {
    reading = null;
  });
}

async function read() {
  while (again) {
    again = false;
    try {
      show((await (await tools.call("models")).json()).data);
    } catch (error) {
      say(tools.told(error), "alert");
    }
    await new Promise((resume) => setTimeout(resume, SETTLE));
  }
}

async function follow() {
  for (;;) {
    if (!document.hidden) {
      try {
        const answer = await tools.call("models/sse");
        for await (const event of tools.events(answer.body)) {
          if (JSON.parse(event.data).error) break;
          refresh();
        }
      } catch {
        // the cluster's part says that the gateway is not there
      }
    }
    await new Promise((resume) => setTimeout(resume, RETRY));
  }
}

export function watchModels(given) {
  tools = given;
  $("add").addEventListener("submit", async (event) => {
    event.preventDefault();
    const [name, source] = [$("add-name").value.trim(), $("add-source").value.trim()];
    const named = name || source;
    if (!named) return;
    const added = await change(`Add ${named}`, entry(named), "PUT", { source: source || named });
    if (added) $("add").reset();
  });
  refresh();
  follow();
}
