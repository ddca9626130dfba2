"use strict";

const COLORS = ["#9aa3b2", "#332288", "#88ccee", "#117733", "#cc6677", "#882255", "#999933", "#0072b2"];
const form = document.getElementById("controls");
const at = (id) => document.getElementById(id);
const ROLES = ["prefill", "decode", "aggregated"];
let controls;
let prices;
let load; // title and range of the slider; null: the load has none
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

const fill = (name, values, now) => form.elements[name].replaceWith(select(name, values, now));

// A choice whose first option leaves the field as the scenario has it.
const fillOwn = (name, own, values) => {
  fill(name, values, null);
  form.elements[name].add(new Option(own, "", true, true), 0);
};

const number = (name, limits) => Object.assign(element("input"), { type: "number", name, ...limits });

const addRole = (role) => {
  const now = controls.now[role];
  const instances = element("label", "servers ");
  const range = Object.assign(element("input"), { type: "range", name: `${role}.instances`, min: 1, max: controls.most_instances });
  range.value = now.instances;
  instances.append(element("output", range.value), range);
  const labelled = (text, field) => {
    const label = element("label", text);
    label.append(field);
    return label;
  };
  const first = element("div", "", "pair");
  first.append(
    labelled("GPU ", select(`${role}.gpu`, controls.gpus, now.gpu)),
    labelled("price an hour ", number(`${role}.price`, { min: 0, step: "any", placeholder: "none" })),
  );
  at(role).append(instances, first, labelled("tensor parallel ", select(`${role}.tp`, controls.tp, now.tp)));
};

const showPrices = () => {
  for (const role of ROLES) form.elements[`${role}.price`].value = prices[form.elements[`${role}.gpu`].value] ?? "";
};

// A load slides by factors: half as much is as far as twice as much.
const loadOf = (position) => {
  const [low, high] = load.range;
  const value = low * (high / low) ** position;
  return value >= 10 ? Math.round(value) : Number(value.toPrecision(2));
};

// The slider of another load begins at that load's own value.
const showLoad = (found) => {
  const isOther = found?.title !== load?.title || !at("load").dataset.exact;
  load = found;
  at("load").hidden = !found;
  if (!found || !isOther) return;
  const [low, high] = found.range;
  at("load").firstChild.textContent = `${found.title} `;
  at("load").dataset.exact = found.now;
  at("load").querySelector("output").textContent = found.now;
  form.elements.load.value = Math.log(found.now / low) / Math.log(high / low);
};

const begin = async () => {
  controls = await (await fetch("controls")).json();
  const { now, own } = controls;
  prices = { ...now.prices };
  document.title = `pdsim: ${controls.scenario}`;
  at("scenario").textContent = controls.scenario;
  fill("model", controls.models, now.model);
  fillOwn("weight_dtype", own.weight_dtype, controls.weight_types);
  fillOwn("kv_dtype", own.kv_dtype, controls.kv_types);
  fillOwn("router", `${own.router} (the scenario's)`, controls.routers);
  for (const name of ["slo", "trace", "first", "count"]) form.elements[name].value = now[name];
  for (const role of ROLES) addRole(role);
  form.elements.kind.value = now.kind;
  form.elements.radix.checked = now.radix;
  showLoad(controls.load);
  showPrices();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => isTyped(event.target) || changed(event));
  form.addEventListener("change", (event) => isTyped(event.target) && changed(event));
  at("keep").addEventListener("click", keep);
  changed();
};

// What is typed counts when it is complete.
const isTyped = (field) => ["text", "number"].includes(field.type);

const chosen = () => {
  const fields = form.elements;
  const role = (name) => ({
    gpu: fields[`${name}.gpu`].value,
    tp: Number(fields[`${name}.tp`].value),
    instances: Number(fields[`${name}.instances`].value),
  });
  return {
    model: fields.model.value,
    weight_dtype: fields.weight_dtype.value || null,
    kv_dtype: fields.kv_dtype.value || null,
    slo: fields.slo.value,
    prices,
    trace: fields.trace.value.trim(),
    first: Number(fields.first.value),
    count: Number(fields.count.value),
    kind: fields.kind.value,
    ...Object.fromEntries(ROLES.map((name) => [name, role(name)])),
    radix: fields.radix.checked,
    router: fields.router.value || null,
    load: at("load").dataset.exact ? Number(at("load").dataset.exact) : null,
  };
};

const changed = (event) => {
  const field = event?.target;
  if (field?.name === "load") at("load").dataset.exact = loadOf(Number(field.value));
  if (field?.name === "trace") {
    at("load").dataset.exact = "";
    form.elements.first.value = 1;
  }
  if (field?.name?.endsWith(".price")) {
    const gpu = form.elements[field.name.replace("price", "gpu")].value;
    if (field.value === "") delete prices[gpu];
    else prices[gpu] = Number(field.value);
  }
  showPrices();
  for (const range of form.querySelectorAll("input[type=range]")) {
    const shown = range.parentElement.querySelector("output");
    shown.textContent = range.name === "load" ? at("load").dataset.exact : range.value;
  }
  const apart = form.elements.kind.value === "separate";
  at("prefill").hidden = at("decode").hidden = form.querySelector(".apart").hidden = !apart;
  at("aggregated").hidden = apart;
  form.querySelector(".of-trace").hidden = !form.elements.trace.value.trim();
  ask();
};

const ask = async () => {
  const number = ++asked;
  at("status").textContent = "computing";
  at("status").className = "";
  at("result").className = "old";
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
  at("result").hidden = Boolean(answer.error);
  if (answer.error) {
    at("status").textContent = `No answer. ${answer.error}`;
    at("status").className = "wrong";
    return;
  }
  for (const term of answer.slo) term.values = term.values.map((value) => value ?? Infinity);
  last = answer;
  showLoad(answer.load);
  show(answer);
  at("result").className = "";
  const seconds = ((performance.now() - began) / 1000).toFixed(2);
  at("status").textContent = `Simulated ${answer.part}, in ${seconds} s.`;
};

const card = (title, value, note, kind = "") => {
  const made = element("div", "", "card");
  made.append(element("span", title, "title"), element("span", value, `value ${kind}`), element("span", note, "note"));
  return made;
};

const range = (values) => (values.length < 3 ? "" : `${rounded(Math.min(...values))} to ${rounded(Math.max(...values))}`);

const rangeNote = (values) => (values.length < 3 ? "" : `range ${range(values)}`);

const withRange = (values, unit = "") => `${rounded(values[0])}${unit}${values.length < 3 ? "" : ` (${range(values)})`}`;

const show = (answer) => {
  const meets = answer.slo.every((term) => term.met[0]) && !answer.warning && !answer.lost;
  const sure = answer.slo.every((term) => term.met.every(Boolean));
  const words = !meets ? "misses the SLO" : sure ? "meets the SLO" : "meets the SLO, but misses it at the slow end of the range";
  const lost = answer.lost ? ` ${answer.lost} requests fail.` : "";
  at("verdict").textContent = `${answer.cluster} ${words}. ${answer.warning}${lost} ${answer.chance}`.trim();
  at("verdict").className = meets ? "good" : "bad";
  const cards = [card("GPUs", answer.gpus, answer.kw ? `${rounded(answer.kw)} kW at most` : "")];
  if (answer.price_per_h !== null) cards.push(card("price an hour", rounded(answer.price_per_h), ""));
  for (const term of answer.slo) {
    cards.push(card(term.goal, `${rounded(term.values[0])} ${term.unit}`, rangeNote(term.values), term.met[0] ? "good" : "bad"));
  }
  for (const { title, unit, values } of answer.metrics) cards.push(card(title, `${rounded(values[0])} ${unit}`, rangeNote(values)));
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
  const table = at("kept");
  const fields = chosen();
  const types = [fields.weight_dtype, fields.kv_dtype && `KV ${fields.kv_dtype}`].filter(Boolean).join(", ");
  const cells = [
    ["", [fields.model, types, last.cluster, fields.router, last.part].filter(Boolean).join(", ")],
    ...(load === null ? [] : [[`load: ${load.title}`, fields.load]]),
    ["GPUs", last.gpus],
    ...(last.price_per_h === null ? [] : [["price an hour", rounded(last.price_per_h)]]),
    ...last.slo.map(({ goal, values, unit }) => [goal, withRange(values, ` ${unit}`)]),
    ["requests/s", withRange(last.metrics.find(({ title }) => title === "requests/s").values)],
  ];
  const line = (tag, column) => {
    const row = element("tr");
    row.append(...cells.map((cell, i) => element(tag, cell[column], i ? "number" : "")));
    return row;
  };
  const head = line("th", 0);
  const heads = [...table.rows].filter((row) => row.querySelector("th"));
  if (heads.at(-1)?.textContent !== head.textContent) table.append(head); // other limits or another load
  table.hidden = false;
  table.append(line("td", 1));
};

begin();
