// A dialog that asks for a name.

import { $ } from "./dom.js";

let answer = () => {}; // ends the question that is open

/** The name, without space around it; null where the reader asks for none. `longest`: characters. */
export function askName(title, before, longest) {
  answer(null);
  const dialog = $("naming");
  $("naming-title").textContent = title;
  Object.assign($("naming-name"), { value: before, maxLength: longest });
  if (!dialog.open) dialog.showModal();
  $("naming-name").select();
  return new Promise((resolve) => {
    answer = resolve;
  });
}

function end(name) {
  $("naming").close();
  answer(name?.trim() || null);
}

export function connectNaming() {
  const dialog = $("naming");
  $("naming-form").addEventListener("submit", (event) => {
    event.preventDefault();
    end($("naming-name").value);
  });
  $("naming-cancel").addEventListener("click", () => end(null));
  // Escape. The event comes a frame after the closing: then the next question may be open already.
  dialog.addEventListener("close", () => dialog.open || answer(null));
  dialog.addEventListener("keydown", (event) => event.stopPropagation()); // Escape here stops no answer
}
