// What a conversation asks the model for, besides its messages: the fields of the form, and the request made of them.

const PENALTIES = ["frequency_penalty", "presence_penalty", "repetition_penalty"];
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", ...PENALTIES, "max_tokens", "seed"];
export const FIELDS = ["system", ...NUMBERS, "reasoning_effort", "tools", "background", "ahead"];
const BACKGROUND = 60; // seconds that an answer goes on while nobody is there
const STORE = "ryzanstein.settings";

/** What was used last, for a conversation that begins. */
export function lastSettings(storage) {
  try {
    return only(JSON.parse(storage.getItem(STORE)));
  } catch {
    return {};
  }
}

export function keepSettings(storage, settings) {
  storage.setItem(STORE, JSON.stringify(settings));
}

/** Those of `fields` that are texts, and have one. */
export function only(given, fields = FIELDS) {
  const texts = fields.map((name) => [name, given?.[name]]);
  return Object.fromEntries(texts.filter(([, value]) => typeof value === "string" && value !== ""));
}

/** The body of a request. Throws `RangeError` where a field cannot be sent. */
export function requestOf(settings, model, messages, { continued = false } = {}) {
  const request = {
    model,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
    messages,
  };
  for (const name of NUMBERS) {
    const given = (settings[name] ?? "").trim();
    if (given !== "") request[name] = Number(given);
    if (Number.isNaN(request[name])) throw new RangeError(`${name} is no number: ${given.slice(0, 40)}`);
  }
  if (settings.reasoning_effort) request.reasoning_effort = settings.reasoning_effort;
  const tools = toolsOf(settings.tools ?? "");
  if (tools.length) request.tools = tools;
  if (continued) Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  return request;
}

/** Functions as the API takes them: an array of tools, or of their `function` objects alone. */
export function toolsOf(text) {
  if (!text.trim()) return [];
  let tools = null;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new RangeError(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new RangeError("The tools are a JSON array of functions.");
  return tools.map((tool) => (tool?.type ? tool : { type: "function", function: tool }));
}

/** Seconds for which an answer goes on without a reader. */
export function backgroundOf(settings) {
  const given = Number((settings.background ?? "").trim() || BACKGROUND);
  if (!Number.isFinite(given) || given < 0) throw new RangeError("The seconds in the background are a number from 0 on.");
  return String(given);
}

/** Connects the form's fields: `onChange` gets all of them. Returns a function that shows settings. */
export function settingsForm(form, onChange) {
  const fields = FIELDS.map((name) => form.elements.namedItem(name));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (!fields.includes(target)) return;
    const given = fields.map((field) => [field.name, field.value]);
    onChange(only(Object.fromEntries(given)));
  });
  return (settings) => {
    for (const field of fields) field.value = settings[field.name] ?? "";
  };
}
