// Who has API keys, what they may do, and what of their limits is used.

import { Refusal, access, pause, read, told } from "../app/api.js";
import { $, age, fill, say, state } from "../app/dom.js";

const LOOK = 3000; // milliseconds
const PAGE = 50; // keys

/** What of a limit is used, and of the tenant's, where they have one. */
function used(own, tenant) {
  const shown = own ? `${own.used} of ${own.limit}` : "";
  const shared = tenant ? `tenant ${tenant.used} of ${tenant.limit}` : "";
  return [shown, shared].filter(Boolean).join(", ") || "–";
}

function row(key) {
  const now = Date.now() / 1000;
  const rights = [key.manage_models ? "manage models" : "", key.view_keys ? "view keys" : ""];
  const limits = ["requests_per_minute", "tokens_per_minute", "concurrent"];
  return [
    key.redacted_value,
    key.name || "–",
    key.tenant,
    state(key.state),
    ["generate", ...rights].filter(Boolean).join(", "),
    ...limits.map((name) => used(key.limits[name], key.tenant_limits[name])),
    key.last_used_at ? `${age(now - key.last_used_at)} ago` : "–",
    age(now - key.created_at),
    expiry(key, now),
  ];
}

function expiry({ expires_at: at }, now) {
  if (!at) return "never";
  return at > now ? `in ${age(at - now)}` : `${age(now - at)} ago`;
}

/** The newest `count` keys, a page at a time: {keys, more}. */
async function newest(count) {
  const keys = [];
  let more = true;
  while (more && keys.length < count) {
    const after = keys.length ? `&after=${encodeURIComponent(keys.at(-1).id)}` : "";
    const page = await read(`v1/keys?limit=${PAGE}${after}`);
    keys.push(...page.data);
    more = page.has_more;
  }
  return { keys, more };
}

/** Looks every few seconds while the page of keys is shown; not again with a key that may not. */
export async function watchKeys() {
  let wanted = PAGE;
  let refused = null; // the key that may not look
  let next = 0; // when to look
  $("more-keys").addEventListener("click", () => {
    wanted += PAGE;
    next = 0;
  });
  for (;;) {
    const asked = access.key;
    if (!document.hidden && !$("keys").hidden && asked !== refused && performance.now() >= next) {
      next = performance.now() + LOOK;
      try {
        show(await newest(wanted));
        say("keys-note", "");
        refused = null;
      } catch (error) {
        say("keys-note", told(error), "alert");
        if (error instanceof Refusal && [401, 403].includes(error.status)) {
          refused = asked;
          show({ keys: [], more: false }, "not shown");
        }
      }
    }
    await pause(300);
  }
}

function show({ keys, more }, none = "none: everybody is let in") {
  fill("owners", keys.map(row), none);
  $("keys-count").textContent = keys.length ? `(${more ? "the newest " : ""}${keys.length})` : "";
  $("more-keys").hidden = !more;
}
