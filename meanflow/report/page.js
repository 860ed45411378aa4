"use strict";
(function () {
  const page = JSON.parse(document.getElementById("data").textContent);
  const BLUE = "#0072b2", ORANGE = "#d55e00", PALE = "#b8bec8", FAINT = "#e3e6eb", INK = "#1b1f24", GREY = "#667080";
  const FONT = "13px system-ui, sans-serif";
  const get = (id) => document.getElementById(id);
  const rows = page.rows.values, columns = page.columns.values, times = page.along.values;
  const middle = (n) => Math.max(0, n - 2);
  const state = { row: middle(rows.length), column: middle(columns.length), time: 0, variable: Object.keys(page.maps)[0] };

  const flat = (values) => values.flat(Infinity).filter((v) => v !== null);

  // viridis, by five stops
  function colour(share) {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    const place = Math.min(0.9999, Math.max(0, share)) * 4, k = Math.floor(place), t = place - k;
    return "rgb(" + stops[k].map((u, i) => Math.round(u + t * (stops[k + 1][i] - u))).join(",") + ")";
  }
  const columnColour = (j) => colour(columns.length > 1 ? 0.92 * j / (columns.length - 1) : 0.3);

  const number = (v) => v !== 0 && (Math.abs(v) >= 1e5 || Math.abs(v) < 1e-2) ? v.toExponential(1) : String(+v.toPrecision(3));

  // a canvas in the resolution of the screen; drawing keeps to the size written in the page
  const sizes = {};
  function open(id) {
    const canvas = get(id), c = canvas.getContext("2d");
    const [w, h] = sizes[id] ||= [canvas.width, canvas.height];
    const scale = Math.max(1, globalThis.devicePixelRatio || 1);
    canvas.width = w * scale; canvas.height = h * scale;
    c.setTransform(scale, 0, 0, scale, 0, 0);
    c.clearRect(0, 0, w, h);
    c.font = FONT; c.textBaseline = "alphabetic";
    return { c, w, h };
  }

  // round numbers that cover an interval
  function ticks(low, high, count) {
    const raw = (high - low) / count, power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= raw);
    const marks = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) marks.push(k * step);
    return marks;
  }

  // logarithms of round numbers: powers of ten, or 1, 2 and 5 times those where there are few
  function powers(low, high) {
    const marks = [];
    for (let k = Math.floor(low); k <= high; k++) {
      (high - low > 2 ? [1] : [1, 2, 5]).forEach((u) => marks.push(k + Math.log10(u)));
    }
    return marks.filter((v) => v >= low && v <= high);
  }

  // a plot area; returns the maps from data to pixels. Options: x, y (labels of ticks), xname, yname, square, log, right
  function frame(id, xs, ys, options) {
    const { c, w, h } = open(id), left = 66, bottom = 44, top = 12, right = options.right || 14;
    const span = (v) => {
      let low = Math.min(...v), high = Math.max(...v);
      if (!(high > low)) { low -= 0.5; high += 0.5; }
      return [low, high];
    };
    let [x0, x1] = span(xs), [y0, y1] = span(ys);
    const margin = 0.04 * (y1 - y0);
    y0 -= margin; y1 += margin;
    if (options.square) { // equal units on both axes
      const unit = Math.max((x1 - x0) / (w - left - right), (y1 - y0) / (h - top - bottom));
      const mx = (x0 + x1) / 2, my = (y0 + y1) / 2;
      x0 = mx - unit * (w - left - right) / 2; x1 = mx + unit * (w - left - right) / 2;
      y0 = my - unit * (h - top - bottom) / 2; y1 = my + unit * (h - top - bottom) / 2;
    }
    const px = (x) => left + (x - x0) / (x1 - x0) * (w - left - right);
    const py = (y) => h - bottom - (y - y0) / (y1 - y0) * (h - top - bottom);
    c.lineWidth = 1;
    ticks(x0, x1, 6).forEach((x) => {
      c.strokeStyle = FAINT; c.beginPath(); c.moveTo(px(x), top); c.lineTo(px(x), h - bottom); c.stroke();
      c.fillStyle = GREY; c.textAlign = "center"; c.fillText(options.x(x), px(x), h - bottom + 17);
    });
    (options.log ? powers(y0, y1) : ticks(y0, y1, 5)).forEach((y) => {
      c.strokeStyle = FAINT; c.beginPath(); c.moveTo(left, py(y)); c.lineTo(w - right, py(y)); c.stroke();
      c.fillStyle = GREY; c.textAlign = "right"; c.fillText(options.y(y), left - 7, py(y) + 4);
    });
    c.strokeStyle = PALE; c.strokeRect(left, top, w - left - right, h - top - bottom);
    c.fillStyle = INK; c.textAlign = "center";
    c.fillText(options.xname, (w + left - right) / 2, h - 8);
    c.save(); c.translate(15, (h + top - bottom) / 2); c.rotate(-Math.PI / 2); c.fillText(options.yname, 0, 0); c.restore();
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

  function dot(area, x, y, size, fill) {
    area.c.fillStyle = fill;
    area.c.beginPath(); area.c.arc(area.px(x), area.py(y), size, 0, 7); area.c.fill();
  }

  function drawLoss() {
    const log = (v) => v === null || v <= 0 ? null : Math.log10(v);
    const curves = page.energy.map((row) => row.map((curve) => curve.map(log)));
    const values = flat(curves);
    if (!values.length) return;
    const area = frame("loss", times, values, {
      x: number, y: (v) => number(10 ** v), log: true, xname: page.along.name, yname: "loss", right: 118,
    });
    curves.forEach((row) => row.forEach((curve, j) => {
      area.c.globalAlpha = 0.4; path(area, times, curve, columnColour(j), 1); area.c.globalAlpha = 1;
    }));
    const chosen = curves[state.row][state.column];
    path(area, times, chosen, "#ffffff", 6);
    path(area, times, chosen, columnColour(state.column), 3.5);
    if (chosen[state.time] !== null) dot(area, times[state.time], chosen[state.time], 6, INK);
    const [left, top, width] = area.box, shown = columns.slice(0, 16);
    area.c.textAlign = "left";
    if (page.columns.name !== "all") {
      area.c.fillStyle = INK; area.c.fillText(page.columns.name, left + width + 14, top + 12);
      shown.forEach((name, j) => {
        area.c.fillStyle = columnColour(j); area.c.fillRect(left + width + 14, top + 24 + 19 * j, 18, 4);
        area.c.fillStyle = j === state.column ? INK : GREY;
        area.c.fillText(name, left + width + 40, top + 31 + 19 * j);
      });
    }
  }

  const MARGIN = { left: 96, bottom: 46, top: 34, right: 84 };
  const cellSize = (w, h) => [(w - MARGIN.left - MARGIN.right) / columns.length, (h - MARGIN.bottom - MARGIN.top) / rows.length];

  function drawMap() {
    const { c, w, h } = open("map"), shown = page.maps[state.variable];
    if (!shown) return;
    const values = flat(shown.values), low = Math.min(...values), high = Math.max(...values);
    const [wide, tall] = cellSize(w, h), foot = h - MARGIN.bottom;
    c.textAlign = "center"; c.fillStyle = INK;
    c.fillText(shown.title + (shown.units && shown.units !== "1" ? " (" + shown.units + ")" : ""), w / 2, 19);
    shown.values.forEach((row, i) => row.forEach((v, j) => {
      const x = MARGIN.left + j * wide, y = foot - (i + 1) * tall;
      const share = v === null ? 0 : (v - low) / (high - low || 1);
      c.fillStyle = v === null ? "#eeeeee" : colour(share);
      c.fillRect(x, y, wide - 1, tall - 1);
      c.fillStyle = v === null ? GREY : share > 0.6 ? INK : "#ffffff";
      c.fillText(v === null ? "failed" : number(v), x + wide / 2, y + tall / 2 + 4);
    }));
    c.strokeStyle = ORANGE; c.lineWidth = 3;
    c.strokeRect(MARGIN.left + state.column * wide, foot - (state.row + 1) * tall, wide - 1, tall - 1);
    const bar = w - MARGIN.right + 18, height = foot - MARGIN.top;
    for (let k = 0; k < 100; k++) {
      c.fillStyle = colour((k + 0.5) / 100); c.fillRect(bar, foot - (k + 1) * height / 100, 14, height / 100 + 0.6);
    }
    c.fillStyle = GREY; c.textAlign = "left";
    if (values.length) { c.fillText(number(high), bar + 19, MARGIN.top + 10); c.fillText(number(low), bar + 19, foot); }
    c.fillStyle = INK; c.textAlign = "center";
    columns.forEach((name, j) => c.fillText(name, MARGIN.left + (j + 0.5) * wide, foot + 18));
    if (page.columns.name !== "all") c.fillText(page.columns.name, (w + MARGIN.left - MARGIN.right) / 2, h - 8);
    c.textAlign = "right";
    rows.forEach((name, i) => c.fillText("width " + name, MARGIN.left - 8, foot - (i + 0.5) * tall + 4));
  }

  function note(id, text) {
    const { c, w, h } = open(id);
    c.fillStyle = GREY; c.textAlign = "center";
    c.fillText(text, w / 2, h / 2);
  }

  function drawFunction() {
    if (!page.f) { note("function", "predictions on a grid were not recorded"); return; }
    const all = page.f[state.row][state.column], samples = page.samples || { x: [], y: [] };
    const area = frame("function", page.x.concat(samples.x), flat(all).concat(samples.y), {
      x: number, y: number, xname: "x", yname: "f(x)",
    });
    path(area, page.x, all[0], PALE, 1.5);
    path(area, page.x, all[state.time], BLUE, 2.5);
    samples.x.forEach((x, k) => dot(area, x, samples.y[k], 4, INK));
  }

  function drawNeurons() {
    if (!page.neurons) { note("neurons", "neurons were not recorded"); return; }
    const at = (name) => page.neurons[name][state.row][state.column];
    const size = (moment) => flat([at("u")[moment], at("v")[moment]]).map(Math.abs);
    const reach = Math.max(1e-9, ...times.map((_, k) => Math.max(0, ...size(k)))) * 1.05;
    const area = frame("neurons", [-reach, reach], [-reach, reach], { x: number, y: number, xname: "u", yname: "v", square: true });
    const c = area.c;
    c.save(); c.beginPath(); c.rect(...area.box); c.clip();
    c.strokeStyle = PALE; c.setLineDash([4, 4]); c.lineWidth = 1;
    (page.samples ? page.samples.x : []).forEach((x) => { // p at right angles to (x, 1)
      const length = 2 * reach / Math.hypot(1, x);
      c.beginPath(); c.moveTo(area.px(-length), area.py(length * x)); c.lineTo(area.px(length), area.py(-length * x)); c.stroke();
    });
    c.setLineDash([]); c.restore();
    const points = (moment, size, fill) => at("u")[moment].forEach((u, k) => {
      const v = at("v")[moment][k];
      if (u !== null && v !== null) dot(area, u, v, size, fill(at("sign")[moment][k]));
    });
    points(0, 1.5, () => PALE);
    points(state.time, 3, (sign) => sign > 0 ? BLUE : ORANGE);
  }

  function drawMoment() {
    get("now").textContent = page.along.name + " = " + times[state.time] + ", width " + rows[state.row] +
      (page.columns.name === "all" ? "" : ", " + page.columns.name + " " + columns[state.column]);
    drawLoss();
    drawFunction();
    drawNeurons();
  }

  function draw() { drawMap(); drawMoment(); }

  const slider = get("time");
  slider.max = String(times.length - 1);
  slider.addEventListener("input", () => { state.time = Number(slider.value); drawMoment(); });
  get("map").addEventListener("click", (event) => {
    const box = get("map").getBoundingClientRect(), [w, h] = sizes.map, scale = w / box.width, [wide, tall] = cellSize(w, h);
    const j = Math.floor(((event.clientX - box.left) * scale - MARGIN.left) / wide);
    const i = Math.floor((h - MARGIN.bottom - (event.clientY - box.top) * scale) / tall);
    if (i >= 0 && i < rows.length && j >= 0 && j < columns.length) { state.row = i; state.column = j; draw(); }
  });
  const choice = get("variable");
  Object.keys(page.maps).forEach((name) => choice.add(new Option(name.replaceAll("_", " "), name)));
  choice.addEventListener("change", () => { state.variable = choice.value; drawMap(); });
  let timer = null;
  get("play").addEventListener("click", () => {
    if (timer !== null) { clearInterval(timer); timer = null; get("play").textContent = "play"; return; }
    get("play").textContent = "pause";
    timer = setInterval(() => {
      state.time = (state.time + 1) % times.length;
      slider.value = String(state.time);
      drawMoment();
    }, 250);
  });
  get("summary").textContent = page.summary;
  page.provenance.forEach(([name, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name; text.textContent = value;
    get("provenance").append(term, text);
  });
  draw();
})();
