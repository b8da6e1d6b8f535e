// What a form asks of POST /v1/fine_tuning/jobs. Pure: no network, no page.

const COMMON = ["n_epochs", "batch_size", "learning_rate_multiplier"]; // of the method's hyperparameters
const LORA = ["rank", "alpha", "dropout"];
const OWN = ["max_tokens", "warmup_ratio", "weight_decay", "max_grad_norm", "replicas"];
export const FIELDS = {
  n_epochs: "Epochs",
  batch_size: "Batch size",
  learning_rate_multiplier: "Learning rate multiplier",
  beta: "Beta",
  rank: "Rank",
  alpha: "Alpha",
  dropout: "Dropout",
  max_tokens: "Longest example",
  warmup_ratio: "Warm-up",
  weight_decay: "Weight decay",
  max_grad_norm: "Longest gradient",
  replicas: "Hosts",
  seed: "Seed",
};

/** The number of a field; undefined: left to the gateway. Throws `RangeError` for what is no number. */
function number(given, name) {
  const text = (given[name] ?? "").trim();
  if (text === "" || text === "auto") return undefined;
  const value = Number(text);
  if (!Number.isFinite(value)) throw new RangeError(`${FIELDS[name]} is no number: ${text.slice(0, 40)}`);
  return value;
}

/** Those of `names` that were filled in. */
function numbers(given, names) {
  const found = names.map((name) => [name, number(given, name)]);
  return Object.fromEntries(found.filter(([, value]) => value !== undefined));
}

/** The body. `given`: the form's fields as texts (`truncate` is on where it is not empty); `files`: {training,
 * validation} as ids of files, without a validation null. Throws `RangeError` where a field cannot be sent. */
export function requestOf(given, files) {
  if (!given.model) throw new RangeError("Choose the model that is to be trained.");
  const dpo = given.method === "dpo";
  const hyperparameters = numbers(given, dpo ? [...COMMON, "beta"] : COMMON);
  const type = dpo ? "dpo" : "supervised";
  const body = { model: given.model, training_file: files.training, method: { type, [type]: { hyperparameters } } };
  if (files.validation) body.validation_file = files.validation;
  if (given.suffix?.trim()) body.suffix = given.suffix.trim();
  const lora = numbers(given, LORA);
  const targets = (given.target_modules ?? "").split(/[\s,]+/).filter(Boolean);
  if (targets.length) lora.target_modules = targets;
  if (Object.keys(lora).length) body.lora = lora;
  Object.assign(body, numbers(given, ["seed", ...OWN]));
  if (given.schedule) body.schedule = given.schedule;
  if (given.truncate) body.truncate = true;
  return body;
}

/** What a file must be before it is sent; empty: nothing is wrong with it. */
export function faultOf(file, what) {
  if (!file) return `Choose the ${what}: JSON Lines, an example a line.`;
  if (!file.size) return `${file.name} is empty.`;
  return "";
}
