// The list of runs, asked for again while it is looked at. All texts are put in as text, never as markup.
(() => {
  const EVERY_MS = 2000;
  const body = document.getElementById("runs"), only = document.getElementById("only");
  const chosen = new Set();
  let runs = [], tag = null;

  const number = (value, digits) => (value === null ? "-" : value.toFixed(digits));
  const grouped = (value) => (value === null ? "-" : Math.round(value).toLocaleString("en"));
  const size = (bytes) => (bytes === null ? "-" : bytes < 2 ** 30 ? `${Math.round(bytes / 2 ** 20)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`);
  function span(seconds) {
    if (seconds === null) return "";
    const whole = Math.max(0, Math.round(seconds));
    if (whole < 90) return `${whole} s`;
    if (whole < 5400) return `${Math.round(whole / 60)} min`;
    return whole < 172800 ? `${Math.round(whole / 3600)} h` : `${Math.round(whole / 86400)} d`;
  }
  function cell(row, text, className = "short") {
    const made = row.insertCell();
    made.textContent = text;
    made.className = className;
    return made;
  }
  function add(run) {
    const row = body.insertRow(), box = document.createElement("input"), link = document.createElement("a");
    box.type = "checkbox";
    box.checked = chosen.has(run.name);
    box.setAttribute("aria-label", `compare ${run.name}`);
    box.addEventListener("change", () => chosen[box.checked ? "add" : "delete"](run.name));
    row.insertCell().append(box);
    link.href = `run/${encodeURIComponent(run.name)}`;
    link.textContent = run.name;
    cell(row, "").append(link);
    cell(row, run.state, `short state-${run.state.replace(" ", "-")}`);
    cell(row, run.world > 1 ? `${run.plan}, ${run.world} ranks` : run.plan, "");
    cell(row, run.steps === null ? grouped(run.step) : `${grouped(run.step)} of ${grouped(run.steps)}`);
    cell(row, number(run.loss, 4));
    cell(row, number(run.evaluation, 4));
    cell(row, run.per_s === null ? "-" : `${grouped(run.per_s)} ${run.unit}`);
    cell(row, size(run.memory));
    cell(row, span(run.left_s));
    cell(row, `${span(Date.now() / 1000 - run.changed_s)} ago`);
  }
  function draw() {
    const words = only.value.toLowerCase().split(" ").filter(Boolean);
    const shown = runs.filter((run) => words.every((word) => `${run.name} ${run.plan} ${run.state} ${run.job}`.toLowerCase().includes(word)));
    const focus = document.activeElement?.closest?.("#runs") ? document.activeElement.getAttribute("href") : null;
    body.textContent = "";
    shown.forEach(add);
    if (focus) body.querySelector(`a[href="${CSS.escape(focus)}"]`)?.focus();
    document.getElementById("count").textContent = `${shown.length} of ${runs.length} runs`;
  }
  async function ask() {
    if (!document.hidden) {
      try {
        const answer = await fetch("runs.json", { cache: "no-cache" });
        if (answer.ok && answer.headers.get("ETag") !== tag) {
          runs = (await answer.json()).runs;
          tag = answer.headers.get("ETag");
          draw();
        }
      } catch { /* the board has ended; it may come back */ }
    }
    setTimeout(ask, EVERY_MS);
  }
  only.addEventListener("input", draw);
  document.getElementById("compare").addEventListener("click", () => {
    if (chosen.size) location.href = `compare?${[...chosen].map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;
  });
  document.addEventListener("visibilitychange", () => document.hidden || draw());
  ask();
})();
