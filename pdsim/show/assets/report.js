"use strict";

// A click on a head sorts its table: numbers by data-order, largest first, and text from A.
for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const table = head.closest("table");
    const column = head.cellIndex;
    const body = table.tBodies[0];
    const isNumber = [...body.rows].some((row) => row.cells[column].dataset.order !== undefined);
    const first = isNumber ? "descending" : "ascending";
    const other = isNumber ? "ascending" : "descending";
    const order = head.getAttribute("aria-sort") === first ? other : first;
    const sign = order === "ascending" ? 1 : -1;
    const key = (row) => {
      const cell = row.cells[column];
      const value = Number(cell.dataset.order ?? "-1e308");
      return isNumber ? value : cell.textContent;
    };
    const compare = (left, right) => {
      const [a, b] = [key(left), key(right)];
      return isNumber ? Math.sign(a - b) || 0 : a.localeCompare(b, undefined, { numeric: true });
    };
    body.append(...[...body.rows].sort((left, right) => sign * compare(left, right)));
    for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", order);
  });
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
});
