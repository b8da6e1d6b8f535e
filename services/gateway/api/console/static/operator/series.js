// Figures over time, out of the looks at a cluster. Pure.

export const SPAN = 300; // seconds that are kept
const RINGS = 8; // lines of a chart; the rings with the highest values

/** Lines of points over the last `SPAN` seconds. */
export class Series {
  #points = new Map(); // name → [{at, value}]

  /** Adds one look at `at` (seconds): {name: value}. Lines without a point for `SPAN` seconds go. */
  add(at, values) {
    for (const [name, value] of Object.entries(values)) {
      if (!this.#points.has(name)) this.#points.set(name, []);
      this.#points.get(name).push({ at, value });
    }
    for (const [name, points] of this.#points) {
      while (points.length && points[0].at < at - SPAN) points.shift();
      if (!points.length) this.#points.delete(name);
    }
  }

  /** The `RINGS` lines with the highest last values: [{name, points}], by name. */
  lines() {
    const lines = [...this.#points].map(([name, points]) => ({ name, points }));
    lines.sort((one, other) => other.points.at(-1).value - one.points.at(-1).value);
    return lines.slice(0, RINGS).sort((one, other) => (one.name < other.name ? -1 : 1));
  }
}

/** Tokens per second between two looks at the generations of a gateway; null: the looks are not comparable.
 *
 * A generation that has ended in between counts with nothing, one that has begun with all it has. */
export function rateBetween(before, after) {
  if (!before || before.gateway !== after.gateway || after.now <= before.now) return null;
  const known = new Map(before.generations.map((one) => [one.digest, one.tokens]));
  const oldest = before.generations.at(-1)?.created ?? 0;
  let tokens = 0;
  for (const one of after.generations) {
    if (known.has(one.digest) || one.created >= oldest) tokens += Math.max(0, one.tokens - (known.get(one.digest) ?? 0));
  }
  return tokens / (after.now - before.now);
}

/** Tokens per second that a ring decodes now: each step gives every running sequence one. */
export function ringRate(group) {
  return group.step_seconds > 0 ? group.running / group.step_seconds : 0;
}

/** A round number at or above `value`, for the top of an axis. */
export function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

/** Points of an SVG polyline within `width` and `height`. */
export function polyline(points, now, most, width, height) {
  return points
    .map(({ at, value }) => {
      const x = width * (1 - (now - at) / SPAN);
      const y = height * (1 - Math.min(1, value / most));
      return `${x.toFixed(1)},${y.toFixed(1)}`;
    })
    .join(" ");
}
