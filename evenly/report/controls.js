"use strict";
// Tables that are sorted by a click on a head, rows that name a point of a picture, and sliders that choose what is seen.
(() => {
  // --- tables: a cell's value is in data-value, where its words are no number
  const valueOf = (row, column) => {
    const text = row.cells[column].dataset.value ?? row.cells[column].textContent;
    return text !== "" && isFinite(text) ? Number(text) : text;
  };
  function compare(one, other) {
    if (typeof one === typeof other) return typeof one === "number" ? one - other : one.localeCompare(other, "en", { numeric: true });
    return typeof one === "number" ? -1 : 1;
  }
  function sort(table, column) {
    const head = table.tHead.rows[0].cells[column], body = table.tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const cell of table.tHead.rows[0].cells) cell.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = [...body.rows].sort((a, b) => compare(valueOf(a, column), valueOf(b, column)) * (down ? -1 : 1));
    body.append(...rows);
  }
  function setUpTable(table) {
    if (table.tHead.querySelector("button")) return;
    [...table.tHead.rows[0].cells].forEach((cell, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...cell.childNodes);
      cell.append(button);
      button.addEventListener("click", () => sort(table, column));
    });
    for (const row of table.querySelectorAll("tr[data-key]")) {
      const key = row.dataset.key, cell = row.cells[0], button = document.createElement("button");
      button.type = "button";
      button.setAttribute("aria-label", `${cell.textContent}: show in the picture`);
      button.append(...cell.childNodes);
      cell.append(button);
      button.addEventListener("click", () => showRow(key));
      button.addEventListener("focus", () => window.evenly.point(key));
      button.addEventListener("blur", () => window.evenly.point(null));
      row.addEventListener("pointerenter", () => window.evenly.point(key));
      row.addEventListener("pointerleave", () => window.evenly.point(null));
    }
  }
  function showRow(key) {
    for (const row of document.querySelectorAll("tr.on")) row.classList.remove("on");
    const row = document.querySelector(`tr[data-key="${CSS.escape(key)}"]`);
    row?.classList.add("on");
    row?.scrollIntoView({ block: "nearest" });
    window.evenly.point(key);
  }

  // --- sliders: each has its values in data-values; of the panes the one is seen whose data-at is what they say
  function setUpSliders(group) {
    const sliders = [...group.querySelectorAll("input[type=range]")], panes = [...group.querySelectorAll(".pane")];
    const choose = () => {
      const at = sliders.map((slider) => {
        const value = slider.dataset.values.split(" ")[slider.value], words = Number(value).toLocaleString("en");
        slider.nextElementSibling.textContent = words;
        slider.setAttribute("aria-valuetext", words);
        return value;
      });
      for (const pane of panes) pane.hidden = pane.dataset.at !== at.join(" ");
      window.evenly.redraw();
    };
    const all = group.querySelector(".sliders");
    if (all.hidden) for (const slider of sliders) slider.addEventListener("input", choose);
    all.hidden = false;
    choose();
  }
  function setUpControls(root) {
    root.querySelectorAll("table.sortable").forEach(setUpTable);
    root.querySelectorAll(".panes").forEach(setUpSliders);
    for (const one of root.querySelectorAll("details")) one.addEventListener("toggle", () => window.evenly.redraw());
  }
  Object.assign(window.evenly, { setUpControls, showRow });
  setUpControls(document);
})();
