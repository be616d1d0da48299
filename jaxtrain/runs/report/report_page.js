"use strict";
// Draws the charts of the page from the JSON in it. Colours come from the style sheet, so that light, dark and print
// mode have their own; `meta` of a trace says which, and where it lies on the other axes.
const SECONDS = 5;
const NUMBERS = {i1: Int8Array, i2: Int16Array, i4: Int32Array, f4: Float32Array, f8: Float64Array};
const byId = id => document.getElementById(id);
let figures = JSON.parse(byId("data").textContent);

function bytes(text) { return Uint8Array.from(atob(text), letter => letter.charCodeAt(0)); }

function numbers(packed) { return packed?.bdata ? new NUMBERS[packed.dtype](bytes(packed.bdata).buffer) : packed ?? []; }

function smoothed(values, share) {  // means weighted by a bell whose deviation is this share of them all
  const deviation = share * values.length, reach = Math.ceil(3 * deviation);
  if (deviation < 0.2) return values;
  return values.map((own, i) => {
    let sum = 0, weight = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
      if (!isFinite(values[j])) continue;
      const bell = Math.exp(-0.5 * ((i - j) / deviation) ** 2);
      sum += bell * values[j];
      weight += bell;
    }
    return isFinite(own) && weight ? sum / weight : NaN;
  });
}

function looked(trace, colour, axis, share) {  // the trace as the controls want it
  const {role, colour: place, x} = trace.meta;
  const own = place >= 0 ? colour(`--line${place}`) : colour(role === "mark" ? "--soft" : "--text");
  const made = {...trace};
  if (role === "bar") return {...made, marker: {...trace.marker, color: own, line: {width: 0},
    pattern: {...trace.marker.pattern, fgcolor: own, bgcolor: colour("--surface"), solidity: 0.5}}};
  if (role === "event") return {...made, marker: {...trace.marker, color: own,
    line: {width: 1, color: colour("--surface")}}};
  if (axis !== "step") made.x = x[axis];
  if (trace.mode !== "markers") made.line = {...trace.line, color: own};
  if (trace.marker) made.marker = {...trace.marker, color: trace.mode === "markers" ? colour("--line7") : own};
  if (role === "raw" && share) Object.assign(made, {opacity: 0.35, hoverinfo: "skip", showlegend: false,
    line: {...made.line, width: 1, dash: "solid"}});
  if (role === "mean") Object.assign(made, {visible: share > 0,
    y: share ? smoothed(numbers(trace.y), share) : trace.y});
  return made;
}

function shown(range, log) {  // the range of an axis as its scale has it; undefined: Plotly finds one
  if (!range || !log) return range;
  return range[0] > 0 ? range.map(Math.log10) : undefined;
}

function draw(figure) {
  const name = figure.dataset.chart, drawing = figure.querySelector(".drawing");
  if (!drawing.clientWidth || !figures[name]) return;  // in a part that is closed, or no run has it any more
  const {data, layout} = figures[name];
  const style = getComputedStyle(document.documentElement), colour = key => style.getPropertyValue(key).trim();
  const axis = byId("axis").value, share = byId("smoothing").value / 100, log = byId("log").checked;
  const curves = name !== "timeline", narrow = drawing.clientWidth < 600;
  const lines = {gridcolor: colour("--edge"), linecolor: colour("--soft"), zeroline: false, automargin: true};
  const wanted = {...layout, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    uirevision: curves ? `${axis} ${log}` : "time", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    font: {family: "system-ui, sans-serif", size: narrow ? 11 : 13, color: colour("--text")},
    hoverlabel: {bgcolor: colour("--card"), bordercolor: colour("--edge"), font: {color: colour("--text")}, namelength: -1},
    xaxis: {...layout.xaxis, ...lines, nticks: narrow ? 5 : 0,
      ...(curves && {title: {text: byId("axis").selectedOptions[0].text}})},
    yaxis: {...layout.yaxis, ...lines, ...(curves && {type: log ? "log" : "linear",
      range: shown(layout.yaxis.range, log)})},
    margin: {...layout.margin, ...(narrow && {l: 40, r: 6})}};
  Plotly.react(drawing, data.map(trace => looked(trace, colour, axis, share)), wanted,
    {responsive: true, displaylogo: false, displayModeBar: narrow ? false : undefined,
     modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"]});
}

function drawAll() {
  const share = byId("smoothing").value;
  byId("smoothing-text").textContent = share > 0 ? `${share} %` : "none";
  document.querySelectorAll("[data-chart]").forEach(draw);
}

async function renew() {  // put what is new into the page, and leave open what is open
  try {
    const answer = await fetch("/now", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.statusText);
    const now = new DOMParser().parseFromString(await answer.text(), "text/html");
    const drawn = name => document.querySelector(`[data-chart="${name}"]`);
    if ([...now.querySelectorAll("[data-chart]")].some(one => !drawn(one.dataset.chart))) return location.reload();
    figures = JSON.parse(now.getElementById("data").textContent);
    for (const part of now.querySelectorAll("[data-part]")) {
      const here = document.querySelector(`[data-part="${part.dataset.part}"]`);
      if (here && here.innerHTML !== part.innerHTML) here.replaceChildren(...part.childNodes);
    }
    document.querySelectorAll("[data-chart]").forEach(draw);
    byId("status").textContent = `Renewed every ${SECONDS} seconds.`;
  } catch (error) {
    byId("status").textContent = `Not renewed since ${new Date().toLocaleTimeString()}: is the command still running?`;
  }
  setTimeout(renew, SECONDS * 1000);
}

async function start() {
  const stream = new Blob([bytes(byId("plotly").textContent)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  drawAll();
  for (const id of ["axis", "smoothing", "log"]) byId(id).addEventListener("input", drawAll);
  document.querySelector(".controls").addEventListener("submit", event => event.preventDefault());
  document.querySelectorAll("details").forEach(part => part.addEventListener("toggle",
    () => part.querySelectorAll("[data-chart]").forEach(draw)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  for (const when of ["beforeprint", "afterprint"]) addEventListener(when, drawAll);
  document.documentElement.dataset.drawn = "";
  if ("live" in document.body.dataset) setTimeout(renew, SECONDS * 1000);
}

start();
