"use strict";

const COLORS = ["#9aa3b2", "#332288", "#88ccee", "#117733", "#cc6677", "#882255", "#999933", "#0072b2"];
const form = document.getElementById("controls");
const at = (id) => document.getElementById(id);
let controls;
let last;
let asked = 0;

const element = (tag, text = "", kind = "") => {
  const made = document.createElement(tag);
  made.textContent = text;
  made.className = kind;
  return made;
};

const rounded = (value) =>
  value === null ? "" : value.toLocaleString("en", { maximumSignificantDigits: Math.abs(value) >= 1000 ? 4 : 3 });

const select = (name, values, now) => {
  const made = element("select");
  made.name = name;
  for (const value of values) made.add(new Option(value, value, false, String(value) === String(now)));
  return made;
};

const fill = (name, values, now) => {
  const made = select(name, values, now);
  form.elements[name].replaceWith(made);
};

const addRole = (role) => {
  const now = controls.now[role];
  const field = at(role);
  const instances = element("label", "instances ");
  const range = Object.assign(element("input"), { type: "range", name: `${role}.instances`, min: 1, max: controls.most_instances });
  range.value = now.instances;
  instances.append(element("output", range.value), range);
  const gpu = element("label", "GPU ");
  gpu.append(select(`${role}.gpu`, controls.gpus, now.gpu));
  const tp = element("label", "tensor parallel ");
  tp.append(select(`${role}.tp`, controls.tp, now.tp));
  field.append(instances, gpu, tp);
};

// A load slides by factors: half as much is as far as twice as much.
const loadOf = (position) => {
  const [low, high] = controls.load.range;
  const value = low * (high / low) ** position;
  return value >= 10 ? Math.round(value) : Number(value.toPrecision(2));
};

const begin = async () => {
  controls = await (await fetch("controls")).json();
  const now = controls.now;
  document.title = `pdsim: ${controls.scenario}`;
  at("slo").textContent = `${controls.scenario}; SLO: ${controls.slo}`;
  fill("model", controls.models, now.model);
  fill("router", controls.routers, now.router);
  for (const role of ["prefill", "decode", "aggregated"]) addRole(role);
  form.elements.kind.value = now.kind;
  form.elements.radix.checked = now.radix;
  at("load").hidden = controls.load === null;
  if (controls.load) {
    const [low, high] = controls.load.range;
    at("load").firstChild.textContent = `${controls.load.title} `;
    Object.assign(form.elements.load, { min: 0, max: 1 });
    form.elements.load.value = Math.log(now.load / low) / Math.log(high / low);
    at("load").dataset.exact = now.load;
  }
  form.addEventListener("input", changed);
  at("keep").addEventListener("click", keep);
  changed();
};

const chosen = () => {
  const fields = form.elements;
  const role = (name) => ({
    gpu: fields[`${name}.gpu`].value,
    tp: Number(fields[`${name}.tp`].value),
    instances: Number(fields[`${name}.instances`].value),
  });
  return {
    model: fields.model.value,
    kind: fields.kind.value,
    prefill: role("prefill"),
    decode: role("decode"),
    aggregated: role("aggregated"),
    radix: fields.radix.checked,
    router: fields.router.value,
    load: controls.load ? Number(at("load").dataset.exact) : null,
  };
};

const changed = (event) => {
  if (event?.target.name === "load") at("load").dataset.exact = loadOf(Number(form.elements.load.value));
  for (const range of form.querySelectorAll("input[type=range]")) {
    const shown = range.parentElement.querySelector("output");
    shown.textContent = range.name === "load" ? at("load").dataset.exact : range.value;
  }
  const apart = form.elements.kind.value === "separate";
  at("prefill").hidden = at("decode").hidden = form.querySelector(".apart").hidden = !apart;
  at("aggregated").hidden = apart;
  ask();
};

const ask = async () => {
  const number = ++asked;
  at("status").textContent = "computing";
  at("status").className = "";
  const began = performance.now();
  let response;
  let answer;
  try {
    response = await fetch("answer", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(chosen()),
    });
    answer = await response.json();
  } catch {
    answer = { error: "pdsim serve does not answer: is it still running?" };
  }
  if (number !== asked) return;
  if (answer.error) {
    at("status").textContent = answer.error;
    at("status").className = "wrong";
    return;
  }
  for (const term of answer.slo) term.values = term.values.map((value) => value ?? Infinity);
  last = answer;
  show(answer);
  const seconds = ((performance.now() - began) / 1000).toFixed(2);
  at("status").textContent = `${answer.requests.toLocaleString("en")} requests, simulated in ${seconds} s`;
};

const card = (title, value, note, kind = "") => {
  const made = element("div", "", "card");
  made.append(element("span", title, "title"), element("span", value, `value ${kind}`), element("span", note, "note"));
  return made;
};

const range = (values) => (values.length < 3 ? "" : `${rounded(Math.min(...values))} to ${rounded(Math.max(...values))}`);

const withRange = (values, unit = "") => `${rounded(values[0])}${unit}${values.length < 3 ? "" : ` (${range(values)})`}`;

const show = (answer) => {
  const meets = answer.slo.every((term) => term.met[0]) && !answer.warning && !answer.lost;
  const sure = answer.slo.every((term) => term.met.every(Boolean));
  const words = !meets ? "misses the SLO" : sure ? "meets the SLO" : "meets the SLO, but not on the slowest server that it may be";
  const lost = answer.lost ? ` ${answer.lost} requests fail.` : "";
  at("verdict").textContent = `${answer.cluster} ${words}. ${answer.warning}${lost}`;
  at("verdict").className = meets ? "good" : "bad";
  const cards = [card("GPUs", answer.gpus, answer.kw ? `${rounded(answer.kw)} kW at most` : "")];
  if (answer.price_per_h !== null) cards.push(card("price an hour", rounded(answer.price_per_h), ""));
  for (const term of answer.slo) {
    cards.push(card(term.goal, `${rounded(term.values[0])} ${term.unit}`, range(term.values), term.met[0] ? "good" : "bad"));
  }
  for (const { title, unit, values } of answer.metrics) cards.push(card(title, `${rounded(values[0])} ${unit}`, range(values)));
  at("cards").replaceChildren(...cards);
  showStages(answer.stages);
  at("command").textContent = answer.command;
};

const showStages = (stages) => {
  const total = stages.reduce((sum, { ms }) => sum + ms, 0);
  const share = (ms) => (ms < total / 100 ? "< 1 %" : `${Math.round((100 * ms) / total)} %`);
  const spans = [];
  const rows = [];
  stages.forEach(({ stage, meaning, ms }, i) => {
    const span = element("span");
    span.style.width = `${(100 * ms) / total}%`;
    span.style.background = COLORS[i];
    span.title = `${stage}: ${rounded(ms)} ms`;
    spans.push(span);
    const row = element("tr");
    const name = element("td");
    const swatch = element("span", "", "swatch");
    swatch.style.background = COLORS[i];
    name.append(swatch, meaning);
    row.append(name, element("td", `${rounded(ms)} ms`, "number"), element("td", share(ms), "number"));
    if (ms) rows.push(row);
  });
  at("bar").replaceChildren(...spans);
  at("stages").replaceChildren(...rows);
};

const keep = () => {
  if (!last) return;
  const table = at("kept");
  const fields = chosen();
  const cells = [
    ["", `${fields.model}, ${last.cluster}, ${fields.router}`],
    ...(fields.load === null ? [] : [[controls.load.title, fields.load]]),
    ["GPUs", last.gpus],
    ...(last.price_per_h === null ? [] : [["an hour", rounded(last.price_per_h)]]),
    ...last.slo.map(({ goal, values, unit }) => [goal, withRange(values, ` ${unit}`)]),
    ["requests/s", withRange(last.metrics.find(({ title }) => title === "requests/s").values)],
  ];
  const line = (tag, column) => {
    const row = element("tr");
    row.append(...cells.map((cell, i) => element(tag, cell[column], i ? "number" : "")));
    return row;
  };
  if (table.hidden) table.append(line("th", 0));
  table.hidden = false;
  table.append(line("td", 1));
};

begin();
