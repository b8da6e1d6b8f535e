// A dialog that asks for a name.

import { $ } from "./dom.js";

/** The name, without space around it; null where the reader asks for none. `longest`: characters. */
export function askName(title, before, longest) {
  const dialog = $("naming");
  $("naming-title").textContent = title;
  Object.assign($("naming-name"), { value: before, maxLength: longest });
  dialog.returnValue = "";
  dialog.showModal();
  $("naming-name").select();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue.trim() || null), { once: true });
  });
}

export function connectNaming() {
  $("naming-form").addEventListener("submit", (event) => {
    event.preventDefault();
    $("naming").close($("naming-name").value);
  });
  $("naming-cancel").addEventListener("click", () => $("naming").close());
  $("naming").addEventListener("keydown", (event) => event.stopPropagation()); // Escape here stops no answer
}
