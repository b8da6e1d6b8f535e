// What the events of a job tell: figures by step, and messages. Pure: no network, no page, no clock.

export const LIMITS = {
  messages: 500, // the newest, that are shown
  steps: 10_000, // the newest, whose figures are kept
  points: 400, // of a line that is drawn
  rows: 100, // of the table of steps
};
const VALID_LOSS = ["full_valid_loss", "valid_loss"]; // over the whole file, where it is known
const VALID_ACCURACY = ["full_valid_mean_token_accuracy", "valid_mean_token_accuracy"];

/** The first of these that is a finite number; else null. */
function figure(data, ...names) {
  return names.map((name) => data?.[name]).find((value) => Number.isFinite(value)) ?? null;
}

/** A step's figures, of an event or of a checkpoint's metrics; null where there is no step. */
export function figuresOf(data) {
  const step = figure(data, "step");
  if (step === null || step < 0) return null;
  return {
    step,
    trainLoss: figure(data, "train_loss"),
    trainAccuracy: figure(data, "train_mean_token_accuracy"),
    validLoss: figure(data, ...VALID_LOSS),
    validAccuracy: figure(data, ...VALID_ACCURACY),
    margin: figure(data, "reward_margin"),
    validMargin: figure(data, "valid_reward_margin"),
    learningRate: figure(data, "learning_rate"),
    gradNorm: figure(data, "grad_norm"),
    tokens: figure(data, "tokens"),
  };
}

/** The events of one job, each once, however often they are read. */
export class Run {
  #steps = new Map(); // step → figures
  #messages = [];

  add(event) {
    if (typeof event?.id !== "string") return;
    const figures = event.type === "metrics" ? figuresOf(event.data) : null;
    if (figures) this.#addStep(figures);
    else if (!this.#messages.some((message) => message.id === event.id)) this.#addMessage(event);
  }

  #addStep(figures) {
    const known = this.#steps.get(figures.step) ?? {};
    const said = Object.entries(figures).filter(([, value]) => value !== null);
    this.#steps.set(figures.step, { ...figures, ...known, ...Object.fromEntries(said) });
    if (this.#steps.size > LIMITS.steps) this.#steps.delete(Math.min(...this.#steps.keys()));
  }

  #addMessage({ id, created_at: at, level, message }) {
    const made = { id, at: Number(at) || 0, level: String(level), message: String(message) };
    const later = this.#messages.findIndex((one) => one.at > made.at);
    this.#messages.splice(later < 0 ? this.#messages.length : later, 0, made);
    if (this.#messages.length > LIMITS.messages) this.#messages.shift();
  }

  /** By time. */
  get messages() {
    return this.#messages;
  }

  /** Figures by step. */
  get steps() {
    return [...this.#steps.values()].sort((one, other) => one.step - other.step);
  }

  /** Points of a figure: [{step, value}]. */
  points(name) {
    return this.steps.filter((one) => one[name] !== null).map((one) => ({ step: one.step, value: one[name] }));
  }
}

/** At most `most` points: means of neighbours, so that a line of many steps keeps its course. */
export function thinned(points, most = LIMITS.points) {
  if (points.length <= most) return points;
  const size = Math.ceil(points.length / most);
  const mean = (part, name) => part.reduce((sum, point) => sum + point[name], 0) / part.length;
  const parts = Array.from({ length: Math.ceil(points.length / size) }, (_, at) => points.slice(at * size, (at + 1) * size));
  return parts.map((part) => ({ step: Math.round(mean(part, "step")), value: mean(part, "value") }));
}

/** A round axis about values: {low, high}, with 0 where the values come near it. */
export function axis(values) {
  if (!values.length) return { low: 0, high: 1 };
  const [least, most] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  const base = least >= 0 && least < most / 2 ? 0 : least;
  const span = most - base || Math.abs(most) || 1;
  const power = 10 ** Math.floor(Math.log10(span / 4));
  const unit = [1, 2, 5, 10].map((step) => step * power).find((step) => step >= (span / 4) * (1 - 1e-9));
  const low = Math.floor(base / unit + 1e-9) * unit;
  const high = Math.ceil(most / unit - 1e-9) * unit;
  return { low, high: high > low ? high : low + unit };
}

/** Points of an SVG polyline within `width` and `height`, of the steps 1 to `steps`. */
export function polyline(points, steps, { low, high }, width, height) {
  return points
    .map(({ step, value }) => {
      const x = width * (steps > 1 ? Math.min(1, Math.max(0, step - 1) / (steps - 1)) : 0.5);
      const y = height * (1 - (value - low) / (high - low));
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    })
    .join(" ");
}

/** The point nearest to a `share` (0 to 1) of the axis of steps; null: there is none. */
export function nearest(points, steps, share) {
  const step = 1 + share * (Math.max(1, steps) - 1);
  const nearer = (one, other) => (Math.abs(other.step - step) < Math.abs(one.step - step) ? other : one);
  return points.length ? points.reduce(nearer) : null;
}
