// A chart of lines over the last minutes, as SVG.

import { drawn, element } from "../app/dom.js";
import { SPAN, Series, ceiling, polyline } from "./series.js";

const [WIDTH, HEIGHT] = [320, 96];

export class Chart {
  #series = new Series();

  /** `format(value)`: a figure as people read it; `most`: the top of the axis, where it is fixed. */
  constructor(place, title, format, most = 0) {
    Object.assign(this, { format, most, title });
    const named = { role: "img", "aria-label": `${title}: no figures yet` };
    this.picture = drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", ...named });
    this.top = element("span", { className: "top" });
    this.value = element("strong", {});
    this.legend = element("ul", { className: "legend" });
    const head = element("figcaption", {}, title, " ", this.value);
    const axis = element("div", { className: "axis" }, element("span", {}, `${SPAN / 60} min ago`), element("span", {}, "now"));
    const plot = element("div", { className: "plot" }, this.top, this.picture);
    place.append(element("figure", { className: "chart" }, head, plot, axis, this.legend));
  }

  /** Adds a look at `at` (seconds) and draws; `total` is shown beside the title. */
  add(at, values, total) {
    this.#series.add(at, values);
    const lines = this.#series.lines();
    const highest = Math.max(0, ...lines.flatMap((line) => line.points.map((point) => point.value)));
    const most = this.most || ceiling(highest);
    const shapes = lines.map((line, index) =>
      drawn("polyline", {
        points: polyline(line.points, at, most, WIDTH, HEIGHT),
        class: `line line-${index}`,
        "vector-effect": "non-scaling-stroke",
      }),
    );
    const grid = [0.5, 1].map((share) =>
      drawn("line", { x1: 0, x2: WIDTH, y1: HEIGHT * (1 - share), y2: HEIGHT * (1 - share), class: "grid" }),
    );
    this.picture.replaceChildren(...grid, ...shapes);
    this.picture.setAttribute("aria-label", `${this.title}: ${this.format(total)} now, at most ${this.format(highest)}`);
    this.top.textContent = this.format(most);
    this.value.textContent = this.format(total);
    this.#name(lines);
  }

  /** Says whose lines these are, where there are several. */
  #name(lines) {
    this.legend.replaceChildren(
      ...(lines.length > 1 ? lines : []).map((line, index) =>
        element("li", { className: `line-${index}` }, `${line.name} ${this.format(line.points.at(-1).value)}`),
      ),
    );
  }
}
