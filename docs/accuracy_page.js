// Filters, curves of errors by clients, and rows of the page on accuracy.
const FILTERS = ["known", "metric", "gpu", "engine", "model", "layout", "study"];
const COLUMNS = ["study", "arm", "known", "engine", "gpu", "layout", "load", "metric"];
const COLOURS = ["#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f"];
const root = document.getElementById("accuracy");
const chosen = { known: "=its kernels", metric: "=TTFT" };

function element(tag, text, parent, attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  Object.assign(made, attributes);
  parent.append(made);
  return made;
}

const bar = element("p", "", root);
for (const name of FILTERS) {
  const label = element("label", ` ${name} `, bar);
  const select = element("select", "", label);
  element("option", "all", select, { value: "" });
  const values = name === "known" ? KNOWN : [...new Set(NUMBERS.map((row) => row[name]))].sort();
  for (const value of values) element("option", value || "not told", select, { value: `=${value}` });
  select.value = chosen[name] ?? "";
  select.onchange = () => { chosen[name] = select.value; show(); };
}
const counts = element("p", "", root);
const figure = element("div", "", root);
const rows = element("div", "", root, { style: "overflow-x: auto" });

const percent = (value) => `${value > 0 ? "+" : ""}${(100 * value).toFixed(0)} %`;
const short = (value) => value.toPrecision(4);

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function count(kept) {
  const judged = kept.filter((row) => !row.fitted), ranged = judged.filter((row) => row.low < row.high);
  const parts = [`${kept.length} numbers`];
  if (judged.length) parts.push(`median error ${(100 * median(judged.map((row) => Math.abs(row.error)))).toFixed(1)} %`);
  if (ranged.length) {
    const inside = ranged.filter((row) => row.inside).length / ranged.length;
    parts.push(`${(100 * inside).toFixed(0)} % of ${ranged.length} inside their range`);
  }
  counts.textContent = parts.join(", ");
}

// Lines of predicted over measured, by clients: one for each server and metric with two loads or more.
function curves(kept) {
  figure.replaceChildren();
  const series = {};
  for (const row of kept) {
    const clients = parseInt(row.load);
    if (!clients) continue;
    const name = [row.study, row.model, row.gpu, row.layout, row.known, row.metric].join(", ");
    (series[name] ??= []).push([clients, row.error, row]);
  }
  const lines = Object.entries(series).filter(([, points]) => new Set(points.map(([x]) => x)).size > 1);
  if (!lines.length) return;
  const width = 720, height = 300, left = 50, most = Math.max(0.2, ...lines.flatMap(([, p]) => p.map(([, y]) => Math.abs(y))));
  const end = Math.log2(Math.max(...lines.flatMap(([, p]) => p.map(([x]) => x))));
  const x = (clients) => left + (Math.log2(clients) / end) * (width - left - 20);
  const y = (error) => height / 2 - (Math.max(-1, Math.min(1.5, error)) / Math.min(most, 1.5)) * (height / 2 - 20);
  let drawn = `<line x1="${left}" x2="${width}" y1="${y(0)}" y2="${y(0)}" stroke="currentColor" opacity=".4"/>`;
  for (const error of [-0.5, -0.25, 0, 0.25, 0.5, 1]) {
    if (Math.abs(error) <= Math.min(most, 1.5)) drawn += `<text x="0" y="${y(error) + 4}" font-size="11" fill="currentColor">${percent(error)}</text>`;
  }
  for (let clients = 1; clients <= 2 ** end; clients *= 2) {
    drawn += `<text x="${x(clients) - 6}" y="${height - 2}" font-size="11" fill="currentColor">${clients}</text>`;
  }
  lines.forEach(([name, points], i) => {
    const colour = COLOURS[i % COLOURS.length];
    points.sort((a, b) => a[0] - b[0]);
    drawn += `<polyline fill="none" stroke="${colour}" points="${points.map(([n, e]) => `${x(n)},${y(e)}`).join(" ")}"/>`;
    for (const [n, e, row] of points) {
      const told = `${name}: ${row.load}, measured ${short(row.measured)}, predicted ${short(row.predicted)}, ${percent(e)}`;
      drawn += `<circle cx="${x(n)}" cy="${y(e)}" r="4" fill="${colour}"><title>${told}</title></circle>`;
    }
  });
  figure.innerHTML = `<p>Error by clients, a line for each server and metric; a point tells its numbers.</p>
    <svg viewBox="0 0 ${width} ${height}" role="img" aria-label="errors by clients">${drawn}</svg>`;
}

function show() {
  const kept = NUMBERS.filter((row) => FILTERS.every((name) => !chosen[name] || chosen[name] === `=${row[name]}`));
  count(kept);
  curves(kept);
  rows.replaceChildren();
  const table = element("table", "", rows, { className: "docutils" });
  const head = element("tr", "", element("thead", "", table));
  for (const name of [...COLUMNS, "measured", "predicted", "error", "range", "inside"]) element("th", name, head);
  const body = element("tbody", "", table);
  for (const row of kept) {
    const line = element("tr", "", body);
    for (const name of COLUMNS) element("td", name === "known" && row.fitted ? `${row.known}, fitted` : row[name], line);
    const ranged = row.low < row.high;
    const cells = [short(row.measured), short(row.predicted), percent(row.error)];
    cells.push(ranged ? `${short(row.low)} to ${short(row.high)}` : "", ranged ? (row.inside ? "yes" : "no") : "");
    for (const text of cells) element("td", text, line);
  }
}

show();
