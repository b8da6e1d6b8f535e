// The cluster as the gateway sees it: charts, rings, services, generations.

import { pause, read, told } from "../app/api.js";
import { $, age, element, fill, percent, say, state } from "../app/dom.js";
import { Chart } from "./chart.js";
import { rateBetween, ringRate } from "./series.js";

const SHOWN = 20; // generations
const LOOK = 1000; // milliseconds between two looks
const whole = (value) => (value >= 100 ? Math.round(value) : Math.round(value * 10) / 10).toLocaleString("en");

function kv(used) {
  const meter = element("meter", { min: 0, max: 1, high: 0.9, value: used, "aria-label": `KV cache used: ${percent(used)}` });
  return element("span", { "data-kind": "number" }, meter, ` ${percent(used)}`);
}

function ring(group) {
  const note = group.message ? ` (${group.message})` : "";
  const shown = element("span", {}, state(group.state), group.state === "starting" ? ` ${percent(group.loaded)}${note}` : note);
  return [
    group.group,
    group.model,
    shown,
    group.slots ? `${group.running} / ${group.slots}` : String(group.running),
    String(group.waiting),
    kv(group.kv_used),
    group.step_seconds ? `${(group.step_seconds * 1000).toFixed(1)} ms` : "–",
    group.step_seconds ? whole(ringRate(group)) : "–",
    percent(group.weight),
  ];
}

export class ClusterPage {
  #before = null;

  constructor() {
    const place = $("charts");
    this.tokens = new Chart(place, "Your tokens/s at this gateway", whole);
    this.decoding = new Chart(place, "Tokens/s decoded by rings", whole);
    this.kv = new Chart(place, "KV cache used", percent, 1);
    this.queue = new Chart(place, "Waiting requests", whole);
  }

  /** Looks once a second while the page is in view. */
  async watch() {
    for (;;) {
      if (!document.hidden) {
        try {
          const cluster = await read("v1/cluster");
          this.#show(cluster);
          say("trouble", "", "alert");
        } catch (error) {
          $("link").textContent = "not connected";
          $("link").dataset.state = "gone";
          say("trouble", told(error), "alert");
        }
      }
      await pause(LOOK);
    }
  }

  #show(cluster) {
    $("link").textContent = `gateway ${cluster.gateway}`;
    $("link").dataset.state = "ready";
    this.#draw(cluster);
    fill("rings", cluster.groups.map(ring), "none yet: requests wait until one is there");
    const total = cluster.generations_total;
    $("count").textContent = total > SHOWN ? `(the newest ${SHOWN} of ${total})` : total ? `(${total})` : "";
    fill(
      "generations",
      cluster.generations.slice(0, SHOWN).map((item) => [
        item.digest,
        item.model,
        state(item.status),
        String(item.tokens),
        String(item.readers),
        age(cluster.now - item.created),
      ]),
      "none",
    );
    fill(
      "services",
      cluster.services.map((item) => [
        item.name,
        item.instance,
        state(item.state),
        item.heard_at ? `${age(cluster.now - item.heard_at)} ago` : "–",
      ]),
      "none known",
    );
  }

  #draw(cluster) {
    const rate = rateBetween(this.#before, cluster);
    this.#before = cluster;
    const live = cluster.groups.filter((group) => group.state !== "gone");
    const by = (figure) => Object.fromEntries(live.map((group) => [group.group, figure(group)]));
    const sum = (figure) => live.reduce((total, group) => total + figure(group), 0);
    if (rate !== null) this.tokens.add(cluster.now, { all: rate }, rate);
    this.decoding.add(cluster.now, by(ringRate), sum(ringRate));
    this.kv.add(cluster.now, by((group) => group.kv_used), live.length ? sum((group) => group.kv_used) / live.length : 0);
    this.queue.add(cluster.now, by((group) => group.waiting), sum((group) => group.waiting));
  }
}
