// What the page of a run shows, asked for again while it is looked at; zoom and what is folded stay.
(() => {
  const EVERY_MS = 3000;
  const main = document.querySelector("main");
  let tag = null;
  async function ask() {
    const busy = main.contains(document.activeElement) && document.activeElement.closest(".plot");
    if (!document.hidden && !busy && !main.querySelector(".tip:not([hidden])")) {
      try {
        const answer = await fetch(`${location.pathname}/contents`, { cache: "no-cache" });
        const now = answer.headers.get("ETag");
        if (answer.ok && tag !== null && now !== tag) {
          const open = [...main.querySelectorAll("details")].map((one) => one.open);
          main.innerHTML = await answer.text();
          main.querySelectorAll("details").forEach((one, at) => { one.open = open[at] ?? false; });
          window.evenly.setUp(main);
        }
        if (answer.ok) tag = now;
      } catch { /* the board has ended; it may come back */ }
    }
    setTimeout(ask, EVERY_MS);
  }
  setTimeout(ask, EVERY_MS);
})();
