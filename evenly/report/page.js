"use strict";
// Zoom, and what lies under the pointer or the arrow keys. All data is read from the SVG of a figure; see draw.py.
window.evenly = (() => {
  const ACROSS = 1e6, UP = 1e5, ROW = 100, TICKS = 5;
  const views = new Map(); // what a reader has zoomed to and left out, for a page that is drawn again

  const digits = (value) => String(Number(value.toPrecision(4)));
  function short(value) {
    const size = Math.abs(value);
    for (const [factor, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= 10 * factor || (size >= factor && factor > 1e3)) return digits(value / factor) + letter;
    return digits(value);
  }
  function roundValues(low, high) {
    const raw = (high - low) / TICKS, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at <= Math.floor(high / step + 1e-9); at++) found.push(at * step);
    return found;
  }
  function seconds(value) {
    for (const [factor, unit] of [[1e6, "us"], [1e3, "ms"]]) if (value * factor < 1000) return digits(value * factor) + " " + unit;
    return digits(value) + " s";
  }

  class Axis {
    constructor(text) { [this.low, this.high, this.scale, this.unit, this.log] = JSON.parse(text); }
    value(share) {
      return this.log ? this.low * (this.high / this.low) ** share : this.low + share * (this.high - this.low);
    }
    share(value) {
      return this.log ? Math.log(value / this.low) / Math.log(this.high / this.low) : (value - this.low) / (this.high - this.low);
    }
    words(value) {
      const whole = !this.log && this.scale === 1 && Number.isInteger(this.low) && Number.isInteger(this.high);
      const text = whole && this.high - this.low >= 10 ? Math.round(value).toLocaleString("en") : short(value / this.scale);
      return this.unit ? `${text} ${this.unit}` : text;
    }
    ticks(from, to) { // between two shares
      const low = this.value(from), high = this.value(to);
      if (!this.log) return roundValues(low / this.scale, high / this.scale).map((one) => one * this.scale);
      const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
      const every = 1 + Math.floor((last - first + 1) / (TICKS + 2)), found = [];
      for (let at = first; at <= last; at += every) found.push(10 ** at);
      return found;
    }
  }

  function readLine(path) {
    const xs = [], ys = [];
    for (const [, x, y] of path.getAttribute("d").matchAll(/[ML](-?\d+),(-?\d+)/g)) xs.push(+x), ys.push(+y);
    return { name: path.dataset.line, path, xs, ys };
  }
  function labelled(text) { // what is said of a box, and what stands in it
    const at = text.lastIndexOf("\t");
    return at < 0 ? { text, label: text.slice(text.lastIndexOf(".") + 1) } : { text: text.slice(0, at), label: text.slice(at + 1) };
  }
  function readBoxes(path) {
    const texts = JSON.parse(path.dataset.texts), found = [];
    for (const [, x, y, width, height] of path.getAttribute("d").matchAll(/M(\d+),(\d+)h(\d+)v(\d+)/g))
      found.push({ x: +x, y: +y, width: +width, height: +height, kind: path.dataset.kind, pale: /pale/.test(path.className.baseVal),
        ...labelled(texts[found.length]) });
    return found;
  }
  function readPoints(path) {
    const texts = JSON.parse(path.dataset.texts), keys = JSON.parse(path.dataset.keys), line = readLine(path);
    return line.xs.map((x, at) => ({ x, y: line.ys[at], kind: line.name, text: texts[at], key: keys[at] }));
  }
  function nearest(sorted, value) {
    let low = 0, high = sorted.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (sorted[middle] < value) low = middle; else high = middle;
    }
    return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
  }
  function element(name, className, text = "") {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = text;
    return made;
  }

  class Figure {
    constructor(figure) {
      this.figure = figure;
      this.plot = figure.querySelector(".plot");
      this.area = figure.querySelector(".area");
      this.svg = figure.querySelector("svg");
      this.x = new Axis(figure.dataset.x);
      this.y = figure.dataset.y ? new Axis(figure.dataset.y) : null;
      this.plain = "plain" in figure.dataset;
      this.lines = [...this.svg.querySelectorAll(".line")].map(readLine).filter((line) => line.xs.length);
      this.boxes = [...this.svg.querySelectorAll(".box")].flatMap(readBoxes).sort((a, b) => a.x - b.x);
      this.points = [...this.svg.querySelectorAll("[data-keys]")].flatMap(readPoints).sort((a, b) => a.x - b.x);
      this.labels = [...figure.querySelectorAll(".labels i")].map((label) => label.textContent);
      this.depth = this.y ? UP : ROW * this.labels.length;
      this.key = figure.querySelector("figcaption").firstChild.textContent;
      this.kept = views.get(this.key) || { left: null, right: null, hidden: new Set() };
      views.set(this.key, this.kept);
      this.at = null; // the line of the keyboard's place, or its box
      this.listen();
      this.toggleLines();
      const { left, right } = this.kept;
      if (left === null) this.reset();
      else this.show(ACROSS * this.x.share(left), ACROSS * this.x.share(right));
    }

    // --- what is seen
    reset() {
      [this.left, this.right, this.top, this.bottom] = [0, ACROSS, 0, this.depth];
      this.kept.left = this.kept.right = this.cursor = null;
      this.draw();
    }
    show(left, right) {
      const width = Math.min(ACROSS, Math.max(right - left, this.y ? 20 : 200));
      this.left = Math.max(0, Math.min(left, ACROSS - width));
      this.right = this.left + width;
      if (width >= ACROSS) return this.reset();
      [this.kept.left, this.kept.right] = [this.left, this.right].map((place) => this.x.value(place / ACROSS));
      if (this.y) this.fit();
      this.draw();
    }
    fit() { // the height of curves to what is seen of them
      let top = Infinity, bottom = -Infinity;
      for (const line of this.seen())
        line.xs.forEach((x, at) => {
          if (x >= this.left && x <= this.right) [top, bottom] = [Math.min(top, line.ys[at]), Math.max(bottom, line.ys[at])];
        });
      const room = Math.max(20, (bottom - top) * 0.06);
      [this.top, this.bottom] = top > bottom ? [0, UP] : [top - room, bottom + room];
    }
    zoom(factor) {
      const middle = this.cursor ?? (this.left + this.right) / 2, width = (this.right - this.left) * factor;
      this.show(middle - width / 2, middle + width / 2);
    }
    pan(share) {
      const width = this.right - this.left;
      this.show(this.left + share * width, this.right + share * width);
    }
    seen() { return this.lines.filter((line) => !this.kept.hidden.has(line.name)); }
    toggleLines() {
      for (const line of this.lines) line.path.classList.toggle("hidden", this.kept.hidden.has(line.name));
      for (const button of this.figure.querySelectorAll(".legend button"))
        button.setAttribute("aria-pressed", String(!this.kept.hidden.has(button.dataset.line)));
    }
    across(x) { return (100 * (x - this.left)) / (this.right - this.left); } // in percent of the area
    draw() {
      this.svg.setAttribute("viewBox", `${this.left} ${this.top} ${this.right - this.left} ${this.bottom - this.top}`);
      const ticks = this.figure.querySelector(".ticks");
      ticks.textContent = "";
      const found = this.x.ticks(this.left / ACROSS, this.right / ACROSS).map((value) => ({
        place: this.across(ACROSS * this.x.share(value)), // in percent
        text: this.tick(this.x, value, this.left / ACROSS, this.right / ACROSS),
      }));
      const apart = found.length > 1 ? ((found[1].place - found[0].place) / 100) * this.area.clientWidth : Infinity;
      const every = Math.ceil((7 * Math.max(0, ...found.map((one) => one.text.length)) + 10) / Math.max(1, apart));
      for (const one of found.filter((_, number) => number % every === 0)) {
        const tick = element("i", "x", one.text);
        tick.style.left = `${one.place}%`;
        const beyond = ((one.place - 100) / 100) * this.area.clientWidth + 3.5 * one.text.length - 12; // of what is free
        if (beyond > 0) tick.style.setProperty("--beyond", `${beyond}px`);
        ticks.append(tick);
      }
      if (this.y) {
        const low = 1 - this.bottom / UP, high = 1 - this.top / UP;
        for (const value of this.y.ticks(low, high)) {
          const tick = element("i", "y");
          tick.append(element("span", "", this.tick(this.y, value, low, high)));
          tick.style.bottom = `${(100 * (this.y.share(value) - low)) / (high - low)}%`;
          ticks.append(tick);
        }
        const limit = this.figure.querySelector(".limit");
        if (limit) {
          const share = (Number(limit.dataset.share) - low) / (high - low);
          limit.hidden = share < 0 || share > 1;
          limit.style.bottom = `${100 * share}%`;
        }
      } else this.write();
    }
    tick(axis, value, low, high) { // as many digits as tell ticks apart
      const range = Math.abs(axis.value(high) - axis.value(low)) / axis.scale, shown = value / axis.scale;
      const close = !axis.log && range < Math.abs(shown) / 500;
      const text = close ? String(Number(shown.toPrecision(Math.min(12, 2 + Math.ceil(Math.log10(Math.abs(shown) / range)))))) : short(shown);
      return axis.unit ? `${text} ${axis.unit}` : text;
    }
    write() { // numbers into those boxes that have room for them
      const texts = this.figure.querySelector(".texts"), width = this.area.clientWidth, found = document.createDocumentFragment();
      texts.textContent = "";
      if (this.area.clientHeight / this.labels.length < 14) return;
      let room = 800;
      for (const box of this.boxes) {
        const text = box.label, pixels = (box.width / (this.right - this.left)) * width;
        if (box.height < 50 || !text || pixels < 8 * text.length + 3) continue;
        if (box.x + box.width < this.left || box.x > this.right || !room--) continue;
        const label = element("b", box.pale ? "pale" : "", text);
        label.style.left = `${this.across(box.x + box.width / 2)}%`;
        label.style.top = `${(100 * (box.y + box.height / 2)) / this.depth}%`;
        found.append(label);
      }
      texts.append(found);
    }

    // --- what is said
    tell(x, row) {
      this.cursor = x;
      const words = this.points.length ? this.pointAt(x, row) : this.y ? this.valuesAt(x) : this.boxAt(x, row);
      if (!words) return this.hush();
      this.rule ??= this.area.appendChild(element("div", "rule"));
      if (!this.tip) {
        this.tip = this.area.appendChild(element("div", "tip"));
        this.tip.setAttribute("role", "status");
      }
      const place = this.across(words.x);
      this.rule.style.left = `${place}%`;
      this.tip.textContent = words.text;
      this.tip.style.left = place < 50 ? `calc(${place}% + 12px)` : "";
      this.tip.style.right = place < 50 ? "" : `calc(${100 - place}% + 12px)`;
      this.rule.hidden = this.tip.hidden = false;
    }
    hush() {
      if (this.tip) this.rule.hidden = this.tip.hidden = true;
      if (this.mark) this.mark.hidden = true;
    }
    valuesAt(x) {
      const found = this.seen().map((line) => ({ line, at: nearest(line.xs, x) }));
      if (!found.length) return null;
      const best = found.reduce((one, other) =>
        Math.abs(other.line.xs[other.at] - x) < Math.abs(one.line.xs[one.at] - x) ? other : one);
      const at = best.line.xs[best.at];
      const texts = found.slice(0, 12).map(({ line, at }) =>
        `${line.name ? line.name + ": " : ""}${this.y.words(this.y.value(1 - line.ys[at] / UP))}`);
      const title = this.figure.querySelector(".across").textContent;
      return { x: at, text: [`${title} ${this.x.words(this.x.value(at / ACROSS))}`, ...texts].join("\n") };
    }
    pointAt(x, y) { // the nearest on the screen
      const wide = this.area.clientWidth / (this.right - this.left), high = this.area.clientHeight / (this.bottom - this.top);
      const far = (one) => Math.hypot((one.x - x) * wide, (one.y - y) * high);
      const shown = this.points.filter((one) => !this.kept.hidden.has(one.kind));
      if (!shown.length) return null;
      return this.wordsOfPoint(shown.reduce((one, other) => (far(other) < far(one) ? other : one)));
    }
    wordsOfPoint(point) {
      this.at = point;
      this.mark ??= this.area.appendChild(element("div", "mark"));
      this.mark.hidden = false;
      this.mark.style.left = `${this.across(point.x)}%`;
      this.mark.style.top = `${(100 * (point.y - this.top)) / (this.bottom - this.top)}%`;
      return { x: point.x, text: `${point.text}\n${point.kind}` };
    }
    find(key) { // says what the point is that a row of a table tells more of
      const point = this.points.find((one) => one.key === key);
      if (!point) return;
      this.keepInView(point.x);
      this.tell(point.x, point.y);
    }
    boxAt(x, y) {
      const least = (this.right - this.left) / this.area.clientWidth; // a pixel
      const found = this.boxes.filter((box) =>
        box.x - least <= x && x <= box.x + box.width + least && box.y <= y && y <= box.y + box.height);
      const label = this.labels[Math.floor(y / ROW)];
      if (label === undefined) return null;
      const where = this.plain ? label : `${label}, ${seconds(this.x.value(x / ACROSS))}`;
      if (!found.length) return { x, text: `${where}: nothing` };
      const box = found[found.length - 1], words = this.wordsOf(box);
      return { x, text: `${label}: ${words}` };
    }
    wordsOf(box) {
      const [begin, end] = [box.x, box.x + box.width].map((place) => this.x.value(place / ACROSS));
      if (this.plain) return `${box.kind}${box.text ? " " + box.text : ""}`; // an axis of no time
      return `${box.kind}${box.text ? " " + box.text : ""}\n${seconds(end - begin)}, from ${seconds(begin)} on`;
    }

    // --- pointer and keys
    listen() {
      const place = (event) => {
        const frame = this.area.getBoundingClientRect();
        const share = (event.clientX - frame.left) / frame.width;
        return [this.left + Math.min(1, Math.max(0, share)) * (this.right - this.left),
          this.top + ((event.clientY - frame.top) / frame.height) * (this.bottom - this.top)];
      };
      let began = null;
      this.area.addEventListener("pointerdown", (event) => {
        if (event.button) return;
        began = event.clientX;
        this.from = place(event)[0];
        if (event.pointerType === "mouse") this.area.setPointerCapture(event.pointerId);
      });
      this.area.addEventListener("pointermove", (event) => {
        const [x, y] = place(event);
        this.choose(began !== null && Math.abs(event.clientX - began) > 6 ? x : null);
        this.tell(x, y);
      });
      const end = (event) => {
        const far = began !== null && Math.abs(event.clientX - began) > 6;
        began = null;
        this.choose(null);
        if (far && event.type === "pointerup") {
          const [x] = place(event);
          this.show(Math.min(x, this.from), Math.max(x, this.from));
        } else if (event.type === "pointerup" && this.points.length) {
          this.tell(...place(event));
          this.go();
        }
      };
      this.area.addEventListener("pointerup", end);
      this.area.addEventListener("pointercancel", end);
      this.area.addEventListener("pointerleave", () => this.hush());
      this.area.addEventListener("dblclick", () => this.reset());
      this.plot.addEventListener("keydown", (event) => this.press(event));
      this.plot.addEventListener("blur", () => this.hush());
      const caption = this.figure.querySelector("figcaption");
      caption.addEventListener("click", (event) => {
        const name = event.target.dataset?.line;
        if (name === undefined) return;
        if (!this.kept.hidden.delete(name)) this.kept.hidden.add(name);
        this.toggleLines();
        if (this.kept.left !== null) this.fit();
        this.draw();
      });
      const buttons = element("span", "zoom");
      for (const [text, label, act] of [["−", "zoom out", () => this.zoom(2)], ["+", "zoom in", () => this.zoom(0.5)],
        ["◂", "earlier", () => this.pan(-0.5)], ["▸", "later", () => this.pan(0.5)], ["all", "show all", () => this.reset()]]) {
        const button = element("button", "", text);
        button.type = "button";
        button.setAttribute("aria-label", label);
        button.addEventListener("click", () => { this.cursor = null; act(); });
        buttons.append(button);
      }
      caption.append(buttons);
    }
    choose(x) {
      if (x === null) return void (this.chosen && (this.chosen.hidden = true));
      this.chosen ??= this.area.appendChild(element("div", "chosen"));
      const [low, high] = [Math.min(x, this.from), Math.max(x, this.from)].map((one) => this.across(one));
      Object.assign(this.chosen.style, { left: `${low}%`, width: `${high - low}%` });
      this.chosen.hidden = false;
    }
    press(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (step && event.shiftKey) this.pan(step * 0.25);
      else if (step) this.points.length ? this.stepMark(step) : this.y ? this.stepPoint(step) : this.stepBox(step, 0);
      else if (event.key === "Enter" && this.points.length) this.go();
      else if (!this.y && event.key === "ArrowUp") this.stepBox(0, -1);
      else if (!this.y && event.key === "ArrowDown") this.stepBox(0, 1);
      else if (event.key === "+" || event.key === "=") this.zoom(0.5);
      else if (event.key === "-") this.zoom(2);
      else if (event.key === "0" || event.key === "Escape") this.reset();
      else return;
      event.preventDefault();
    }
    stepPoint(step) {
      const line = this.seen().reduce((one, other) => (other.xs.length > (one?.xs.length ?? -1) ? other : one), null);
      if (!line) return;
      const now = this.cursor == null ? (step > 0 ? -1 : line.xs.length) : nearest(line.xs, this.cursor);
      const at = Math.min(line.xs.length - 1, Math.max(0, now + step));
      this.keepInView(line.xs[at]);
      this.tell(line.xs[at], 0);
    }
    stepMark(step) {
      const shown = this.points.filter((one) => !this.kept.hidden.has(one.kind)), now = shown.indexOf(this.at);
      const at = now < 0 ? (step > 0 ? 0 : shown.length - 1) : Math.min(shown.length - 1, Math.max(0, now + step));
      if (shown.length) this.find(shown[at].key);
    }
    go() { // to the row of the point
      if (this.at?.key) window.evenly.showRow(this.at.key);
    }
    stepBox(step, rows) {
      const row = Math.min(this.labels.length - 1, Math.max(0, Math.floor((this.at?.y ?? 0) / ROW) + rows));
      const own = this.boxes.filter((box) => Math.floor(box.y / ROW) === row && box.height >= 50);
      if (!own.length) return;
      const middles = own.map((box) => box.x + box.width / 2);
      const now = this.at && !rows ? own.indexOf(this.at) : this.at ? nearest(middles, this.at.x + this.at.width / 2) : -1;
      this.at = own[Math.min(own.length - 1, Math.max(0, now + step))];
      const x = this.at.x + this.at.width / 2;
      this.keepInView(x);
      this.tell(x, this.at.y + this.at.height / 2);
    }
    keepInView(x) {
      const half = (this.right - this.left) / 2;
      if (x < this.left || x > this.right) this.show(x - half, x + half);
    }
  }

  let figures = [];
  function setUp(root) {
    figures = [...root.querySelectorAll("figure.chart")].map((figure) => new Figure(figure));
    window.evenly?.setUpControls(root);
  }
  const redraw = () => figures.forEach((figure) => figure.draw());
  const point = (key) => figures.forEach((figure) => (key ? figure.find(key) : figure.points.length && figure.hush()));
  addEventListener("resize", redraw);
  setUp(document);
  return { setUp, redraw, point };
})();
