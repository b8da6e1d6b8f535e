// The page: which part of it is shown (by the address behind #), the key, and what all parts share.

import { access } from "./api.js";
import { $ } from "./dom.js";
import { connectNaming } from "./naming.js";
import { Chat } from "../chat/chat.js";
import { watchBatches } from "../operator/batches.js";
import { ClusterPage } from "../operator/cluster.js";
import { watchKeys } from "../operator/keys.js";
import { ModelsPage } from "../operator/models.js";
import { FineTuningPage } from "../tuning/page.js";

const PARTS = ["chat", "cluster", "models", "fine-tuning", "batches", "keys"];
const KEY = "ryzanstein.key";

/** On a phone: the drawer over the page, which the keyboard does not reach meanwhile. */
function showSide(open) {
  if (document.body.classList.contains("side-open") === open) return;
  document.body.classList.toggle("side-open", open);
  $("menu").setAttribute("aria-expanded", String(open));
  document.querySelector("main").inert = open;
  $(open ? "to-chat" : "menu").focus();
}

function keepKey() {
  const field = $("key");
  field.value = sessionStorage.getItem(KEY) ?? "";
  access.key = field.value.trim();
  field.addEventListener("input", () => {
    access.key = field.value.trim();
    sessionStorage.setItem(KEY, field.value);
  });
  $("access").addEventListener("submit", (event) => event.preventDefault());
}

/** What can be asked for: models, and adapters below them. */
function showModels(models) {
  const field = $("model");
  const names = models.map((model) => model.id);
  if (names.join("\n") === [...field.options].map((option) => option.value).join("\n")) return;
  const chosen = field.value || localStorage.getItem("ryzanstein.model");
  const option = ({ id, parent }) => new Option(parent ? `${id} (adapter)` : id, id, false, id === chosen);
  field.replaceChildren(...models.map(option));
}

/** Opens a chat with a model, which may have come a moment ago. */
function chatWith(model) {
  const field = $("model");
  if (![...field.options].some((option) => option.value === model)) field.append(new Option(`${model} (adapter)`, model));
  field.value = model;
  localStorage.setItem("ryzanstein.model", model);
  toPrompt();
}

/** Opens a new chat, from another part of the page. */
function toPrompt() {
  addEventListener("hashchange", () => $("prompt").focus(), { once: true });
  location.hash = "#chat";
}

async function show(chat) {
  const [name, id = ""] = location.hash.slice(1).split("/");
  const part = PARTS.includes(name) ? name : "chat";
  for (const other of PARTS) {
    $(other).hidden = other !== part;
    const link = $(`to-${other}`);
    if (other === part) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  showSide(false);
  document.title = part === "chat" ? "Ryzanstein" : `${$(`to-${part}`).textContent} · Ryzanstein`;
  fineTuning.open(part === "fine-tuning" ? id : "");
  if (part === "chat") await chat.open(id);
}

keepKey();
connectNaming();
const chat = new Chat();
const fineTuning = new FineTuningPage(chatWith);
const models = new ModelsPage((found) => {
  showModels(found);
  chat.knows(found);
  fineTuning.form.offer(found);
});
$("menu").addEventListener("click", () => showSide(!document.body.classList.contains("side-open")));
$("shade").addEventListener("click", () => showSide(false));
matchMedia("(max-width: 48rem)").addEventListener("change", () => showSide(false)); // as in console.css
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would lead to a new chat
  if ($("chat").hidden) toPrompt();
  else $("prompt").focus();
});
$("new").addEventListener("click", () => {
  showSide(false);
  if (location.hash === "#chat") chat.open("");
  else location.hash = "#chat";
  $("prompt").focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") showSide(false);
});
addEventListener("hashchange", () => show(chat));
show(chat);
models.watch();
fineTuning.watch();
watchBatches();
watchKeys();
new ClusterPage().watch();
document.body.dataset.begun = "true";
