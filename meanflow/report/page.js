"use strict";
(function () {
  const page = JSON.parse(document.getElementById("data").textContent);
  const BLUE = "#0072b2", ORANGE = "#d55e00", PALE = "#b8bec8", INK = "#1b1f24";
  const get = (id) => document.getElementById(id);
  const rows = page.rows.values, columns = page.columns.values, times = page.along.values;
  const state = { row: rows.length - 1, column: columns.length - 1, time: 0, variable: Object.keys(page.maps)[0] };

  function flat(values) {
    return values.flat(Infinity).filter((v) => v !== null);
  }

  // a plot area with linear axes; returns the map from data to pixels
  function frame(canvas, xs, ys, labels) {
    const c = canvas.getContext("2d"), w = canvas.width, h = canvas.height, left = 64, bottom = 40, top = 12, right = 12;
    const span = (v) => {
      let low = Math.min(...v), high = Math.max(...v);
      if (!(high > low)) { low -= 0.5; high += 0.5; }
      return [low, high];
    };
    const [x0, x1] = span(xs), [y0, y1] = span(ys);
    const px = (x) => left + (x - x0) / (x1 - x0) * (w - left - right);
    const py = (y) => h - bottom - (y - y0) / (y1 - y0) * (h - top - bottom);
    c.clearRect(0, 0, w, h);
    c.font = "13px system-ui, sans-serif";
    c.strokeStyle = PALE; c.lineWidth = 1; c.fillStyle = INK;
    c.strokeRect(left, top, w - left - right, h - top - bottom);
    for (let k = 0; k <= 4; k++) {
      const x = x0 + k * (x1 - x0) / 4, y = y0 + k * (y1 - y0) / 4;
      c.textAlign = "center"; c.fillText(labels.x(x), px(x), h - bottom + 18);
      c.textAlign = "right"; c.fillText(labels.y(y), left - 6, py(y) + 4);
    }
    c.textAlign = "center";
    c.fillText(labels.name, (w + left) / 2, h - 6);
    return { c, px, py };
  }

  const number = (v) => Math.abs(v) >= 1e4 || (v !== 0 && Math.abs(v) < 1e-2) ? v.toExponential(1) : String(+v.toPrecision(3));

  function path(area, xs, ys, colour, width) {
    const c = area.c;
    c.strokeStyle = colour; c.lineWidth = width; c.beginPath();
    let open = false;
    xs.forEach((x, k) => {
      if (ys[k] === null || !Number.isFinite(ys[k])) { open = false; return; }
      if (open) c.lineTo(area.px(x), area.py(ys[k])); else c.moveTo(area.px(x), area.py(ys[k]));
      open = true;
    });
    c.stroke();
  }

  function drawLoss() {
    const log = (v) => v === null || v <= 0 ? null : Math.log10(v);
    const curves = page.energy.map((row) => row.map((curve) => curve.map(log)));
    const values = flat(curves);
    if (!values.length) return;
    const area = frame(get("loss"), times, values, { x: number, y: (v) => number(10 ** v), name: page.along.name });
    curves.forEach((row) => row.forEach((curve) => path(area, times, curve, PALE, 1)));
    path(area, times, curves[state.row][state.column], BLUE, 3);
  }

  function colour(share) {
    const stops = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];
    const place = Math.min(0.9999, Math.max(0, share)) * 4, k = Math.floor(place), t = place - k;
    return "rgb(" + stops[k].map((u, i) => Math.round(u + t * (stops[k + 1][i] - u))).join(",") + ")";
  }

  const MARGIN = { left: 110, bottom: 44, top: 30 };

  function drawMap() {
    const canvas = get("map"), c = canvas.getContext("2d"), shown = page.maps[state.variable];
    c.clearRect(0, 0, canvas.width, canvas.height);
    if (!shown) return;
    const values = flat(shown.values), low = Math.min(...values), high = Math.max(...values);
    const w = (canvas.width - MARGIN.left) / columns.length, h = (canvas.height - MARGIN.bottom - MARGIN.top) / rows.length;
    c.font = "13px system-ui, sans-serif"; c.textAlign = "center"; c.fillStyle = INK;
    c.fillText(shown.title, canvas.width / 2, 18);
    shown.values.forEach((row, i) => row.forEach((v, j) => {
      const x = MARGIN.left + j * w, y = canvas.height - MARGIN.bottom - (i + 1) * h;
      const share = v === null ? 0 : (v - low) / (high - low || 1);
      c.fillStyle = v === null ? "#eeeeee" : colour(share);
      c.fillRect(x, y, w - 1, h - 1);
      c.fillStyle = share > 0.6 ? INK : "#ffffff";
      c.fillText(v === null ? "failed" : number(v), x + w / 2, y + h / 2 + 4);
    }));
    c.strokeStyle = ORANGE; c.lineWidth = 3;
    c.strokeRect(MARGIN.left + state.column * w, canvas.height - MARGIN.bottom - (state.row + 1) * h, w - 1, h - 1);
    c.fillStyle = INK;
    columns.forEach((name, j) => c.fillText(name, MARGIN.left + (j + 0.5) * w, canvas.height - 24));
    c.fillText(page.columns.name, (canvas.width + MARGIN.left) / 2, canvas.height - 6);
    c.textAlign = "right";
    rows.forEach((name, i) => c.fillText("width " + name, MARGIN.left - 8, canvas.height - MARGIN.bottom - (i + 0.5) * h + 4));
  }

  function note(canvas, text) {
    const c = canvas.getContext("2d");
    c.clearRect(0, 0, canvas.width, canvas.height);
    c.font = "14px system-ui, sans-serif"; c.fillStyle = "#6b7280"; c.textAlign = "center";
    c.fillText(text, canvas.width / 2, canvas.height / 2);
  }

  function drawFunction() {
    const canvas = get("function");
    if (!page.f) { note(canvas, "predictions on a grid were not recorded"); return; }
    const all = page.f[state.row][state.column], samples = page.samples || { x: [], y: [] };
    const area = frame(canvas, page.x.concat(samples.x), flat(all).concat(samples.y), { x: number, y: number, name: "x" });
    path(area, page.x, all[0], PALE, 1);
    path(area, page.x, all[state.time], BLUE, 2);
    area.c.fillStyle = INK;
    samples.x.forEach((x, k) => {
      area.c.beginPath(); area.c.arc(area.px(x), area.py(samples.y[k]), 4, 0, 7); area.c.fill();
    });
  }

  function drawNeurons() {
    const canvas = get("neurons");
    if (!page.neurons) { note(canvas, "neurons were not recorded"); return; }
    const at = (name) => page.neurons[name][state.row][state.column];
    const reach = Math.max(...flat(at("u")).map(Math.abs), ...flat(at("v")).map(Math.abs));
    const area = frame(canvas, [-reach, reach], [-reach, reach], { x: number, y: number, name: "u" });
    const u = at("u")[state.time], v = at("v")[state.time], sign = at("sign")[state.time];
    u.forEach((_, k) => {
      if (u[k] === null || v[k] === null) return;
      area.c.fillStyle = sign[k] > 0 ? BLUE : ORANGE;
      area.c.beginPath(); area.c.arc(area.px(u[k]), area.py(v[k]), 3, 0, 7); area.c.fill();
    });
  }

  function drawMoment() {
    get("now").textContent = page.along.name + " = " + times[state.time] + ", width " + rows[state.row] +
      (page.columns.name === "all" ? "" : ", " + page.columns.name + " " + columns[state.column]);
    drawFunction();
    drawNeurons();
  }

  function draw() { drawLoss(); drawMap(); drawMoment(); }

  const slider = get("time");
  slider.max = String(times.length - 1);
  slider.addEventListener("input", () => { state.time = Number(slider.value); drawMoment(); });
  get("map").addEventListener("click", (event) => {
    const canvas = get("map"), box = canvas.getBoundingClientRect(), scale = canvas.width / box.width;
    const x = (event.clientX - box.left) * scale, y = (event.clientY - box.top) * scale;
    const j = Math.floor((x - MARGIN.left) / ((canvas.width - MARGIN.left) / columns.length));
    const i = Math.floor((canvas.height - MARGIN.bottom - y) / ((canvas.height - MARGIN.bottom - MARGIN.top) / rows.length));
    if (i >= 0 && i < rows.length && j >= 0 && j < columns.length) { state.row = i; state.column = j; draw(); }
  });
  const choice = get("variable");
  Object.keys(page.maps).forEach((name) => choice.add(new Option(name, name)));
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
  get("summary").textContent = rows.length * columns.length + " cells shown; " + page.failed + " failed runs.";
  Object.entries(page.provenance).forEach(([name, value]) => {
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = name; text.textContent = value;
    get("provenance").append(term, text);
  });
  draw();
})();
