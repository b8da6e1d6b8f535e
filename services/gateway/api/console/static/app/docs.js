// Shows /openapi.json: operations by tag, what they take and what they answer.

const DEPTH = 6; // of nested objects; types may hold themselves

function element(name, ...inside) {
  const made = document.createElement(name);
  made.append(...inside.filter((item) => item !== undefined && item !== null && item !== ""));
  return made;
}

/** Words in which code stands between backticks. */
function words(name, text) {
  return element(name, ...text.split("`").map((part, index) => (index % 2 ? element("code", part) : part)));
}

function folded(summary, ...inside) {
  return element("details", element("summary", ...summary), ...inside);
}

function table(columns, rows) {
  const head = columns.map((column) => Object.assign(element("th", column), { scope: "col" }));
  const lines = rows.map((cells) => element("tr", ...cells.map((cell) => element("td", cell))));
  return element("table", element("thead", element("tr", ...head)), element("tbody", ...lines));
}

class Page {
  constructor(api) {
    this.api = api;
  }

  /** A schema itself, where a reference to one stands. */
  real(schema) {
    if (!schema.$ref) return schema;
    return schema.$ref.slice(2).split("/").reduce((at, part) => at[part], this.api);
  }

  /** A schema's type in a few words. */
  type(schema) {
    const kinds = schema.anyOf ?? schema.oneOf;
    if (kinds) return [...new Set(kinds.map((kind) => this.type(kind)))].join(" or ");
    if (schema.$ref) return this.real(schema).title ?? schema.$ref.split("/").pop();
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
    if (schema.type === "array") return `array of ${this.type(schema.items ?? {})}`;
    return [schema.type ?? "anything", this.limits(schema)].join("");
  }

  limits(schema) {
    const signs = { minimum: "≥", exclusiveMinimum: ">", maximum: "≤", minLength: "length ≥", maxLength: "length ≤" };
    const shown = Object.entries(signs).filter(([name]) => name in schema);
    return shown.length ? ` (${shown.map(([name, sign]) => `${sign} ${schema[name]}`).join(", ")})` : "";
  }

  /** The fields of an object, those of its parts folded into them. */
  fields(schema, depth = 0) {
    const object = this.real(schema);
    const needed = new Set(object.required ?? []);
    const rows = Object.entries(object.properties ?? {}).map(([name, field]) => {
      const what = words("div", field.description ? `${this.type(field)}: ${field.description}` : this.type(field));
      const inner = depth < DEPTH && this.parts(field);
      if (inner) what.append(folded(["fields"], this.fields(inner, depth + 1)));
      return [element("code", name, needed.has(name) ? " *" : ""), what];
    });
    return table(["field (* required)", "what it is"], rows);
  }

  /** The one object type within a field's schema, if there is one. */
  parts(schema) {
    for (const kind of [schema, ...(schema.anyOf ?? []), schema.items ?? {}]) {
      const real = this.real(kind.type === "array" && kind.items ? kind.items : kind);
      if (real.properties) return real;
    }
    return null;
  }

  content(content) {
    return Object.entries(content ?? {}).map(([kind, { schema, example }]) => {
      const shown = [element("p", element("code", kind), ` ${this.type(schema)}`)];
      if (example) shown.push(element("pre", JSON.stringify(example, null, 2)));
      if (this.parts(schema)) shown.push(folded(["fields"], this.fields(this.parts(schema))));
      return element("div", ...shown);
    });
  }

  operation(method, path, operation) {
    const name = Object.assign(element("span", method.toUpperCase()), { className: "method" });
    const inside = [operation.description && words("p", operation.description)];
    const given = (operation.parameters ?? []).map((item) => [
      element("code", item.name),
      item.in,
      words("div", `${this.type(item.schema)}: ${item.description}`),
    ]);
    if (given.length) inside.push(element("h4", "Parameters"), table(["name", "in", "what it is"], given));
    if (operation.requestBody) inside.push(element("h4", "Body"), ...this.content(operation.requestBody.content));
    inside.push(element("h4", "Answers"));
    for (const [status, answer] of Object.entries(operation.responses)) {
      inside.push(folded([`${status} ${answer.description}`], ...this.content(answer.content)));
    }
    return folded([name, element("code", path), ` ${operation.summary}`], ...inside);
  }

  sections() {
    const tags = new Map();
    for (const [path, methods] of Object.entries(this.api.paths)) {
      for (const [method, operation] of Object.entries(methods)) {
        const [tag] = operation.tags;
        if (!tags.has(tag)) tags.set(tag, [element("h2", tag)]);
        tags.get(tag).push(this.operation(method, path, operation));
      }
    }
    return [...tags.values()].map((inside) => element("section", ...inside));
  }
}

const place = document.getElementById("operations");
try {
  const answer = await fetch("openapi.json");
  if (!answer.ok) throw new Error(`status ${answer.status}`);
  const api = await answer.json();
  document.getElementById("about").replaceWith(words("p", `Version ${api.info.version}. ${api.info.description}`));
  place.replaceChildren(...new Page(api).sections());
} catch (error) {
  place.textContent = `The description of the API could not be loaded (${error.message}); load the page again.`;
}
