"use strict";
(function () {
  const page = JSON.parse(document.getElementById("data").textContent);
  const BLUE = "#0072b2", ORANGE = "#d55e00", PALE = "#b8bec8", FAINT = "#e3e6eb", INK = "#1b1f24", GREY = "#667080";
  const OUTPUTS = [BLUE, ORANGE, "#009e73", "#cc79a7", "#e69f00", "#56b4e9"];
  const FONT = "13px system-ui, sans-serif";
  const get = (id) => document.getElementById(id);
  const rows = page.rows.values, columns = page.columns.values, times = page.along.values, moments = page.moments;
  const several = page.columns.name !== "all", cells = rows.length * columns.length;
  const alive = (i, j) => page.energy[i][j].some((v) => v !== null);

  // the first cell shown: one of those before the last, that has numbers
  function first() {
    const wanted = [Math.max(0, rows.length - 2), Math.max(0, columns.length - 2)];
    if (alive(...wanted)) return wanted;
    for (let i = 0; i < rows.length; i++) for (let j = 0; j < columns.length; j++) if (alive(i, j)) return [i, j];
    return wanted;
  }
  const [row, column] = first();
  const state = { row, column, time: moments.length - 1, variable: Object.keys(page.maps)[0] };

  const flat = (values) => values.flat(Infinity).filter((v) => v !== null && Number.isFinite(v));
  // loops: as arguments of Math.min many numbers do not fit on the stack
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
  const most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

  // viridis, by five stops
  function colour(share) {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    const place = Math.min(0.9999, Math.max(0, share)) * 4, k = Math.floor(place), t = place - k;
    return "rgb(" + stops[k].map((u, i) => Math.round(u + t * (stops[k + 1][i] - u))).join(",") + ")";
  }
  const shade = (k, count) => colour(count > 1 ? 0.88 * k / (count - 1) : 0.3);
  // colors tell the columns apart, or the widths where there is one column
  const cellColour = (i, j) => several ? shade(j, columns.length) : shade(i, rows.length);

  function number(v, digits = 3) {
    if (v === 0) return "0";
    if (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-3) return v.toExponential(1).replace(".0e", "e").replace("e+", "e");
    return String(+v.toPrecision(digits));
  }

  // a canvas as wide as the page lets it be, in the resolution of the screen
  const sizes = {};
  function open(id, tall) {
    const canvas = get(id), c = canvas.getContext("2d");
    const w = canvas.clientWidth || canvas.width, h = tall(w);
    const scale = Math.max(1, globalThis.devicePixelRatio || 1);
    sizes[id] = [w, h];
    canvas.style.height = h + "px";
    canvas.width = Math.round(w * scale); canvas.height = Math.round(h * scale);
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, w, h);
    c.font = FONT; c.textBaseline = "alphabetic";
    return { c, w, h };
  }

  // round numbers that cover an interval
  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw) || raw;
    const start = Math.ceil(low / step - 1e-9), marks = [];
    // counted, since large numbers have no neighbours at a distance of one step
    for (let k = 0; k <= 2 * count && (start + k) * step <= high + 1e-9 * step; k++) marks.push((start + k) * step);
    return marks;
  }

  // logarithms of round numbers: powers of ten, every few of them where there are many, or 1, 2 and 5 times those
  function powers(low, high) {
    if (high - low < 1) return ticks(10 ** low, 10 ** high, 4).filter((v) => v > 0).map(Math.log10);
    const marks = [], every = Math.max(1, Math.ceil((high - low) / 8));
    for (let k = every * Math.floor(low / every); k <= high; k += every) {
      (high - low > 3 ? [1] : [1, 2, 5]).forEach((u) => marks.push(k + Math.log10(u)));
    }
    return marks.filter((v) => v >= low && v <= high);
  }

  // the interval of some numbers, never empty: constant ones get room that their precision can resolve
  function span(values) {
    let low = least(values), high = most(values);
    if (!(low <= high)) return [0, 1];
    const room = 1e-6 * Math.max(Math.abs(low), Math.abs(high));
    if (high - low < room || high === low) { const more = Math.max(room, high === low && room < 0.5 ? 0.5 : 0); low -= more; high += more; }
    return [low, high];
  }

  // a plot area; returns the maps from data to pixels. Options: x, y (labels of ticks), xname, yname, square, log, marks
  function frame(id, tall, xs, ys, options) {
    const { c, w, h } = open(id, tall), bottom = 44, top = 12, right = 14;
    let [x0, x1] = span(xs), [y0, y1] = span(ys);
    const margin = 0.04 * (y1 - y0);
    y0 -= margin; y1 += margin;
    const rises = () => options.log ? powers(y0, y1) : ticks(y0, y1, 5);
    // room for the longest label beside the name of the axis
    const left = Math.max(62, 36 + most(rises().map((y) => c.measureText(options.y(y)).width)));
    sizes[id].push(left);
    if (options.pad) { const more = 0.04 * (x1 - x0); x0 -= more; x1 += more; }
    if (options.square) { // equal units on both axes
      const unit = Math.max((x1 - x0) / (w - left - right), (y1 - y0) / (h - top - bottom));
      const mx = (x0 + x1) / 2, my = (y0 + y1) / 2;
      x0 = mx - unit * (w - left - right) / 2; x1 = mx + unit * (w - left - right) / 2;
      y0 = my - unit * (h - top - bottom) / 2; y1 = my + unit * (h - top - bottom) / 2;
    }
    const px = (x) => left + (x - x0) / (x1 - x0) * (w - left - right);
    const py = (y) => h - bottom - (y - y0) / (y1 - y0) * (h - top - bottom);
    c.lineWidth = 1;
    (options.marks || ticks(x0, x1, w < 500 ? 5 : 6)).forEach((x) => {
      c.strokeStyle = FAINT; c.beginPath(); c.moveTo(px(x), top); c.lineTo(px(x), h - bottom); c.stroke();
      c.fillStyle = GREY; c.textAlign = "center"; c.fillText(options.x(x), px(x), h - bottom + 17);
    });
    rises().forEach((y) => {
      c.strokeStyle = FAINT; c.beginPath(); c.moveTo(left, py(y)); c.lineTo(w - right, py(y)); c.stroke();
      c.fillStyle = GREY; c.textAlign = "right"; c.fillText(options.y(y), left - 7, py(y) + 4);
    });
    c.strokeStyle = PALE; c.strokeRect(left, top, w - left - right, h - top - bottom);
    c.fillStyle = INK; c.textAlign = "center";
    c.fillText(options.xname, (w + left - right) / 2, h - 8);
    c.save(); c.translate(13, (h + top - bottom) / 2); c.rotate(-Math.PI / 2); c.fillText(options.yname, 0, 0); c.restore();
    return { c, px, py, box: [left, top, w - left - right, h - top - bottom] };
  }

  function path(area, xs, ys, stroke, width) {
    const c = area.c;
    c.strokeStyle = stroke; c.lineWidth = width; c.lineJoin = "round"; c.beginPath();
    let going = false;
    xs.forEach((x, k) => {
      if (ys[k] === null || !Number.isFinite(ys[k])) { going = false; return; }
      if (going) c.lineTo(area.px(x), area.py(ys[k])); else c.moveTo(area.px(x), area.py(ys[k]));
      going = true;
    });
    c.stroke();
  }

  // the area between two curves, where both have numbers
  function band(area, xs, low, high, fill) {
    const there = xs.map((_, k) => k).filter((k) => low[k] !== null && high[k] !== null);
    if (!there.length) return;
    const c = area.c;
    c.fillStyle = fill; c.beginPath();
    there.forEach((k, n) => n ? c.lineTo(area.px(xs[k]), area.py(high[k])) : c.moveTo(area.px(xs[k]), area.py(high[k])));
    there.reverse().forEach((k) => c.lineTo(area.px(xs[k]), area.py(low[k])));
    c.closePath(); c.fill();
  }

  function dot(area, x, y, size, fill) {
    area.c.fillStyle = fill;
    area.c.beginPath(); area.c.arc(area.px(x), area.py(y), size, 0, 7); area.c.fill();
  }

  function legend(entries) {
    const box = get("legend");
    box.textContent = "";
    entries.forEach(([text, fill, chosen]) => {
      const entry = document.createElement("span"), mark = document.createElement("i");
      mark.style.background = fill;
      if (chosen) entry.className = "chosen";
      entry.append(mark, document.createTextNode(text));
      box.append(entry);
    });
  }

  const name = (i, j) => page.rows.name + " " + rows[i] + (several ? ", " + page.columns.name + " " + columns[j] : "");

  function drawLoss() {
    const log = (v) => v === null || v <= 0 ? null : Math.log10(v);
    const curves = page.energy.map((row) => row.map((curve) => curve.map(log)));
    const values = flat(curves), tall = (w) => w > 700 ? 340 : 260;
    if (!values.length) { note("loss", tall, "no cell has a loss"); return; }
    const area = frame("loss", tall, times, values, {
      x: number, y: (v) => number(10 ** v), log: true, xname: page.along.name, yname: "loss",
    });
    const chosen = curves[state.row][state.column];
    const stroke = page.bands ? ORANGE : cellColour(state.row, state.column);
    if (page.bands) {
      const [low, lower, middle, upper, high] = page.bands.map((curve) => curve.map(log));
      band(area, times, low, high, "#dce6ef"); band(area, times, lower, upper, "#b3cce0");
      path(area, times, middle, BLUE, 1.6);
      legend([["5 to 95 % of the cells", "#dce6ef"], ["25 to 75 %", "#b3cce0"], ["median", BLUE], [name(state.row, state.column), ORANGE, true]]);
    } else {
      curves.forEach((row, i) => row.forEach((curve, j) => {
        area.c.globalAlpha = 0.6; path(area, times, curve, cellColour(i, j), 1.2); area.c.globalAlpha = 1;
      }));
      const [title, names] = several ? [page.columns.name, columns] : [page.rows.name, rows];
      if (cells > 1) {
        legend(names.map((text, k) => [
          title + " " + text, several ? shade(k, columns.length) : shade(k, rows.length), k === (several ? state.column : state.row),
        ]));
      }
    }
    path(area, times, chosen, "#ffffff", 6);
    path(area, times, chosen, stroke, 3);
    const now = moments[state.time];
    if (chosen[now] !== null) dot(area, times[now], chosen[now], 5, INK);
  }

  const mapMargin = (w) => ({ left: w > 600 ? 92 : 62, bottom: 46, top: 30, right: w > 600 ? 84 : 62 });
  const mapHeight = (w) => several ? Math.min(w > 600 ? 440 : 360, 90 + Math.max(130, rows.length * (w > 600 ? 40 : 34))) : 260;
  function cellSize(w, h) {
    const m = mapMargin(w);
    return [(w - m.left - m.right) / columns.length, (h - m.bottom - m.top) / rows.length];
  }

  function drawMap() {
    const shown = page.maps[state.variable];
    if (!shown) return;
    const label = shown.title + (shown.units && shown.units !== "1" ? " (" + shown.units + ")" : "");
    const values = flat(shown.values);
    if (!several) { drawValues(shown, label, values); return; }
    const { c, w, h } = open("map", mapHeight), low = least(values), high = most(values), m = mapMargin(w);
    const [wide, tall] = cellSize(w, h), foot = h - m.bottom;
    c.textAlign = "center"; c.fillStyle = INK;
    c.fillText(label, w / 2, 17);
    const roomy = wide >= 36 && tall >= 17, digits = wide >= 60 ? 3 : 1 + (wide >= 44);
    shown.values.forEach((row, i) => row.forEach((v, j) => {
      const x = m.left + j * wide, y = foot - (i + 1) * tall, gap = Math.min(wide, tall) > 8 ? 1 : 0;
      const share = v === null ? 0 : (v - low) / (high - low || 1);
      c.fillStyle = v === null ? "#eeeeee" : colour(share);
      c.fillRect(x, y, wide - gap, tall - gap);
      if (roomy) {
        c.fillStyle = v === null ? GREY : share > 0.6 ? INK : "#ffffff";
        c.fillText(v === null ? page.missing[i][j] || "–" : number(v, digits), x + wide / 2, y + tall / 2 + 4);
      }
    }));
    c.strokeStyle = ORANGE; c.lineWidth = 3;
    c.strokeRect(m.left + state.column * wide, foot - (state.row + 1) * tall, wide - 1, tall - 1);
    const bar = w - m.right + 10, height = foot - m.top;
    for (let k = 0; k < 100; k++) {
      c.fillStyle = colour((k + 0.5) / 100); c.fillRect(bar, foot - (k + 1) * height / 100, 10, height / 100 + 0.6);
    }
    c.fillStyle = GREY; c.textAlign = "left";
    if (values.length) { c.fillText(number(high, 2), bar + 14, m.top + 10); c.fillText(number(low, 2), bar + 14, foot); }
    c.fillStyle = INK; c.textAlign = "center";
    // as many names as have room beside each other
    const longest = most(columns.map((text) => c.measureText(text).width));
    const stride = Math.max(1, Math.ceil((longest + 10) / wide)), jump = Math.max(1, Math.ceil(16 / tall));
    columns.forEach((text, j) => { if (j % stride === 0) c.fillText(text, m.left + (j + 0.5) * wide, foot + 18); });
    c.fillText(page.columns.name, (w + m.left - m.right) / 2, h - 8);
    c.textAlign = "right";
    rows.forEach((text, i) => { if (i % jump === 0) c.fillText(text, m.left - 8, foot - (i + 0.5) * tall + 4); });
    c.textAlign = "left";
    c.fillText(page.rows.name, 4, 17);
  }

  // with one axis: final values over it
  function drawValues(shown, label, values) {
    const places = rows.map((_, i) => i), heights = shown.values.map((row) => row[0]);
    const area = frame("map", mapHeight, places, values, {
      x: (i) => rows[i] || "", y: number, xname: page.rows.name, yname: label.length < 34 ? label : "", marks: places, pad: true,
    });
    path(area, places, heights, PALE, 1.5);
    places.forEach((i) => {
      if (heights[i] !== null) dot(area, i, heights[i], 5, i === state.row ? ORANGE : BLUE);
      else if (page.missing[i][0]) {
        area.c.fillStyle = GREY; area.c.textAlign = "center";
        area.c.fillText(page.missing[i][0], area.px(i), area.box[1] + area.box[3] - 8);
      }
    });
  }

  function note(id, tall, text) {
    const { c, w, h } = open(id, tall);
    c.fillStyle = GREY; c.textAlign = "center";
    c.fillText(text, w / 2, h / 2);
  }

  const square = (w) => Math.round(Math.min(440, 0.85 * w));
  const empty = (values) => !flat(values).length;

  function drawFunction() {
    const shown = page.function;
    if (shown.reason) return;
    const all = shown.values[state.row][state.column];
    if (empty(all)) { note("function", square, page.missing[state.row][state.column] || "no numbers"); return; }
    const grid = shown.kind === "grid", samples = shown.samples || { x: [], y: [] };
    const xs = (k) => grid ? shown.x : shown.x[k];
    const wide = flat(shown.x).concat(samples.x), tall = flat(all).concat(samples.y.flat());
    const area = frame("function", square, wide, tall.concat(shown.diagonal ? flat(shown.x) : []), {
      x: number, y: number, xname: shown.xname, yname: shown.yname, pad: !grid,
    });
    if (shown.diagonal) {
      const ends = span(wide);
      area.c.setLineDash([5, 4]); path(area, ends, ends, PALE, 1.2); area.c.setLineDash([]);
    }
    const draw = (moment, size, fill) => all[moment].forEach((values, k) => {
      if (grid) path(area, xs(k), values, fill(k), size);
      else values.forEach((v, n) => { if (v !== null && xs(k)[n] !== null) dot(area, xs(k)[n], v, size, fill(k)); });
    });
    draw(0, 1.5, () => PALE);
    draw(state.time, 2.5, (k) => OUTPUTS[k]);
    samples.y.forEach((y, k) => samples.x.forEach((x, n) => dot(area, x, y[n], 3.5, samples.y.length > 1 ? OUTPUTS[k] : INK)));
  }

  function drawNeurons() {
    const shown = page.neurons;
    if (shown.reason) return;
    const [u, v, sign] = [shown.u, shown.v, shown.sign].map((all) => all[state.row][state.column]);
    if (empty(u)) { note("neurons", square, page.missing[state.row][state.column] || "no numbers"); return; }
    const reach = Math.max(1e-9, most(flat([u, v]).map(Math.abs))) * 1.05;
    const area = frame("neurons", square, [-reach, reach], [-reach, reach], {
      x: number, y: number, xname: shown.labels[0], yname: shown.labels[1], square: true,
    });
    const c = area.c;
    c.save(); c.beginPath(); c.rect(...area.box); c.clip();
    c.strokeStyle = PALE; c.setLineDash([4, 4]); c.lineWidth = 1;
    (shown.rays || []).forEach((x) => { // p at right angles to (x, 1)
      const length = 2 * reach / Math.hypot(1, x);
      c.beginPath(); c.moveTo(area.px(-length), area.py(length * x)); c.lineTo(area.px(length), area.py(-length * x)); c.stroke();
    });
    c.setLineDash([]); c.restore();
    const points = (moment, size, fill) => u[moment].forEach((x, k) => {
      if (x !== null && v[moment][k] !== null) dot(area, x, v[moment][k], size, fill(sign[moment][k]));
    });
    points(0, 1.5, () => PALE);
    points(state.time, 3, (side) => side < 0 ? ORANGE : BLUE);
    if (shown.held) {
      const held = shown.held[state.row][state.column];
      get("neurons-caption").textContent = shown.caption + (held === null ? "" : " They hold " + Math.round(100 * held) + " % of it.");
    }
  }

  function drawMoment() {
    get("now").textContent = page.along.name + " = " + number(times[moments[state.time]]);
    drawLoss();
    drawFunction();
    drawNeurons();
  }

  function draw() {
    get("row").value = String(state.row); get("column").value = String(state.column);
    if (cells > 1) drawMap();
    drawMoment();
  }

  function choose(row, column) { state.row = row; state.column = column; draw(); }

  function list(id, entries) {
    entries.forEach(([name, value]) => {
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = name; text.textContent = value;
      get(id).append(term, text);
    });
  }

  // texts and controls
  get("summary").textContent = page.summary;
  get("loss-caption").textContent = (page.bands ? "Losses of " + cells + " cells, each the median over seeds, as quantiles; "
    : cells > 1 ? "Median over seeds, one curve a cell; " : "") + (cells > 1 ? "thick: the selected cell, dot" : "Dot") + ": the time of the slider below.";
  get("map-caption").textContent = several ? "Final values, median over seeds. Select a cell by a click."
    : "Final values, median over seeds. Select a network by a click.";
  get("regimes").hidden = !state.variable;
  // a single network has no axis to draw its values over
  get("choice").hidden = get("map").hidden = get("map-caption").hidden = cells < 2;
  if (cells < 2) list("values", Object.values(page.maps).map((one) => [one.title, one.values[0][0] === null ? page.missing[0][0] : number(one.values[0][0], 4)]));
  get("row-name").textContent = page.rows.name; get("column-name").textContent = page.columns.name;
  get("column-label").hidden = !several;
  get("row-label").hidden = rows.length < 2;
  rows.forEach((text, i) => get("row").add(new Option(text, String(i))));
  columns.forEach((text, j) => get("column").add(new Option(text, String(j))));
  get("row").addEventListener("change", () => choose(Number(get("row").value), state.column));
  get("column").addEventListener("change", () => choose(state.row, Number(get("column").value)));
  ["function", "neurons"].forEach((id) => {
    get(id + "-caption").textContent = page[id].caption || "";
    get(id + "-figure").hidden = Boolean(page[id].reason);
  });
  const reasons = [page.function.reason, page.neurons.reason].filter(Boolean).join("; ");
  get("reasons").textContent = reasons && "Not drawn: " + reasons + ".";
  const slider = get("time");
  slider.max = String(moments.length - 1); slider.value = slider.max;
  slider.addEventListener("input", () => { state.time = Number(slider.value); drawMoment(); });
  get("map").addEventListener("click", (event) => {
    const box = get("map").getBoundingClientRect(), [w, h, left] = sizes.map;
    const x = (event.clientX - box.left) * w / box.width, y = (event.clientY - box.top) * w / box.width;
    if (!several) {
      // the same margins and padding as in frame
      const share = ((x - left) / (w - left - 14) * 1.08 - 0.04) * (rows.length - 1);
      choose(Math.min(rows.length - 1, Math.max(0, Math.round(share))), 0);
      return;
    }
    const [wide, tall] = cellSize(w, h), m = mapMargin(w);
    const j = Math.floor((x - m.left) / wide), i = Math.floor((h - m.bottom - y) / tall);
    if (i >= 0 && i < rows.length && j >= 0 && j < columns.length) choose(i, j);
  });
  const choice = get("variable");
  Object.keys(page.maps).forEach((name) => choice.add(new Option(name.replaceAll("_", " "), name)));
  choice.addEventListener("change", () => { state.variable = choice.value; drawMap(); });
  let timer = null;
  get("play").addEventListener("click", () => {
    if (timer !== null) { clearInterval(timer); timer = null; get("play").textContent = "play"; return; }
    get("play").textContent = "pause";
    timer = setInterval(() => {
      state.time = (state.time + 1) % moments.length;
      slider.value = String(state.time);
      drawMoment();
    }, Math.min(250, Math.max(60, 5000 / moments.length)));
  });
  list("short", page.provenance.short); list("provenance", page.provenance.all);
  globalThis.addEventListener("resize", draw);
  draw();
})();
