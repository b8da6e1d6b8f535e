// A chart of figures over the steps of a job, as SVG, and what stands at the step under the pointer.

import { drawn, element } from "../app/dom.js";
import { axis, nearest, polyline, thinned } from "./run.js";

const [WIDTH, HEIGHT] = [320, 128];
const HALVES = [0, 0.5, 1];

export class Curve {
  #lines = [];
  #steps = 1;

  /** `lines`: [{name, points(run)}], at most 8; `format(value)`: a figure as people read it. */
  constructor(title, lines, format) {
    Object.assign(this, { title, lines, format });
    this.picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.top = element("span", { className: "top" });
    this.bottom = element("span", { className: "bottom" });
    this.value = element("strong", {});
    this.legend = element("ul", { className: "legend" });
    this.last = element("span", {});
    const head = element("figcaption", {}, title, " ", this.value);
    const steps = element("div", { className: "axis" }, element("span", {}, "step 1"), this.last);
    const plot = element("div", { className: "plot" }, this.top, this.picture, this.bottom);
    this.figure = element("figure", { className: "chart" }, head, plot, steps, this.legend);
    plot.addEventListener("pointermove", (event) => this.#point(event));
    plot.addEventListener("pointerleave", () => this.#name(null));
  }

  /** Draws what `run` knows of `steps`. Hidden while there is nothing of it. */
  show(run, steps) {
    this.#lines = this.lines.map(({ name, figure }) => ({ name, points: run.points(figure) }));
    const values = this.#lines.flatMap((line) => line.points.map((point) => point.value));
    this.figure.hidden = !values.length;
    const last = this.#lines.flatMap((line) => line.points.slice(-1)).reduce((most, point) => Math.max(most, point.step), 1);
    this.#steps = Math.max(steps, last);
    const drawnLines = this.#lines.map((line) => thinned(line.points));
    const range = axis(drawnLines.flatMap((points) => points.map((point) => point.value)));
    this.picture.replaceChildren(...this.#grid(), ...drawnLines.map((points, index) => this.#line(points, index, range)));
    [this.top.textContent, this.bottom.textContent] = [this.format(range.high), this.format(range.low)];
    this.last.textContent = `step ${this.#steps}`;
    this.#name(null);
    this.picture.setAttribute("aria-label", `${this.title} over ${this.#steps} steps: ${this.#words(this.#latest())}`);
  }

  #grid() {
    const line = (share) => ({ x1: 0, x2: WIDTH, y1: HEIGHT * (1 - share), y2: HEIGHT * (1 - share), class: "grid" });
    return HALVES.map((share) => drawn("line", line(share)));
  }

  /** A line; a dot where it is a single point. */
  #line(points, index, range) {
    const single = points.length === 1;
    const shape = polyline(single ? [...points, ...points] : points, this.#steps, range, WIDTH, HEIGHT);
    const name = `line line-${index}${single ? " dot" : ""}`;
    return drawn("polyline", { points: shape, class: name, "vector-effect": "non-scaling-stroke" });
  }

  #latest() {
    return this.#lines.map(({ name, points }) => ({ name, point: points.at(-1) ?? null }));
  }

  #words(figures) {
    const said = figures.filter(({ point }) => point).map(({ name, point }) => `${name} ${this.format(point.value)}`);
    return said.join(", ") || "no figures yet";
  }

  #point(event) {
    const box = this.picture.getBoundingClientRect();
    this.#name((event.clientX - box.left) / box.width);
  }

  /** Says whose lines these are, with their values at a `share` of the axis; null: the last ones. */
  #name(share) {
    const at = ({ name, points }) => ({ name, point: nearest(points, this.#steps, share) });
    const figures = share === null ? this.#latest() : this.#lines.map(at);
    const step = share === null ? null : figures.find(({ point }) => point)?.point.step;
    this.value.textContent = step ? `at step ${step}` : "";
    this.legend.replaceChildren(
      ...figures.map(({ name, point }, index) =>
        element("li", { className: `line-${index}`, hidden: !point }, point ? `${name} ${this.format(point.value)}` : name),
      ),
    );
  }
}
