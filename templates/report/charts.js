const root = document.documentElement;
const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
const large = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const short = (value) => value === null || value === undefined ? "--"
  : value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e15) ? (+value.toPrecision(4)).toExponential()
  : Math.abs(value) >= 1e4 ? large.format(value) : String(+value.toPrecision(4));
const mark = (chart, restarts) => {
  const { left, top, width, height } = chart.bbox;
  chart.ctx.save();
  chart.ctx.strokeStyle = chart.ctx.fillStyle = colour("soft");
  chart.ctx.setLineDash([4, 4]);
  for (const restart of restarts) {
    const x = chart.valToPos(restart.step, "x", true);
    if (x < left || x > left + width) continue;
    const beside = x > left + width * 0.75 ? -4 : 4;
    chart.ctx.textAlign = beside < 0 ? "right" : "left";
    chart.ctx.beginPath();
    chart.ctx.moveTo(x, top);
    chart.ctx.lineTo(x, top + height);
    chart.ctx.stroke();
    chart.ctx.fillText(`attempt ${restart.attempt}`, x + beside, top + 12 * devicePixelRatio);
  }
  chart.ctx.restore();
};
const describe = (curve) => {
  if (curve.lines.length > 1) return `${curve.label} of ${curve.lines.map((one) => one.label).join(", ")}`;
  const values = curve.lines[0].values.filter((value) => value !== null);
  const [first, last] = [values[0], values[values.length - 1]];
  return `${curve.label}: ${first.toPrecision(4)} at step ${curve.steps[0]}, ` +
    `${last.toPrecision(4)} at step ${curve.steps[curve.steps.length - 1]}`;
};
const draw = (curve, place, height) => {
  const shown = document.createElement("div");
  shown.setAttribute("role", "img");
  shown.setAttribute("aria-label", describe(curve));
  place.append(shown);
  const inside = () => shown.clientWidth - 24;
  const axis = { stroke: () => colour("ink"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { stroke: () => colour("line"), width: 1 } };
  const rest = (chart) => chart.setLegend({ idx: curve.steps.length - 1 });
  const chart = new uPlot({
    title: curve.label, width: inside(), height,
    scales: { x: { time: false } },
    axes: [{ ...axis, size: 34 }, { ...axis, size: 58, values: (_, ticks) => ticks.map(short) }],
    hooks: { ready: [rest], draw: [(chart) => mark(chart, curve.restarts || [])] },
    series: [{ label: "step", value: (_, value) => value ?? "--" }, ...curve.lines.map((one, at) => ({ label: one.label, width: 1.75, spanGaps: true,
      stroke: () => colour(`curve-${at % 8 + 1}`), dash: at >= 16 ? [2, 3] : at >= 8 ? [7, 4] : undefined, points: { show: curve.steps.length < 15 },
      value: (_, value) => short(value) }))],
  }, [curve.steps, ...curve.lines.map((one) => one.values)], shown);
  chart.over.addEventListener("mouseleave", () => setTimeout(rest, 0, chart));
  addEventListener("resize", () => chart.setSize({ width: inside(), height }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.redraw());
};
const curves = JSON.parse(document.getElementById("data").textContent);
for (const curve of curves) draw(curve, document.getElementById("curves"), curves.length > 1 ? 210 : 300);
document.body.dataset.charts = document.querySelectorAll(".uplot canvas").length;
