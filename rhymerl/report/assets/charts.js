"use strict";
// Draws the charts in view, then the others while nothing else is to be done; all of them again when the page turns dark or light.
{
  const narrow = () => matchMedia("(max-width: 860px)").matches;
  const isTouched = matchMedia("(pointer: coarse)").matches;
  const faded = (colour, alpha) => colour + Math.round(alpha * 255).toString(16).padStart(2, "0");

  const axis = (title) => ({
    title: { text: title, font: { size: 12 }, standoff: 8 },
    gridcolor: rhymerl.colour("rule"), zerolinecolor: rhymerl.colour("rule"), linecolor: rhymerl.colour("rule"),
    tickfont: { size: 12 }, automargin: true, separatethousands: true,
  });

  const layoutOf = (xTitle, yTitle) => ({
    font: { family: getComputedStyle(document.body).fontFamily, color: rhymerl.colour("muted"), size: 12 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 46, r: 8, t: 10, b: 40 },
    xaxis: { ...axis(xTitle), showgrid: false, zeroline: false }, yaxis: axis(yTitle),
    hovermode: "x unified", dragmode: isTouched ? false : "zoom",
    hoverlabel: { bgcolor: rhymerl.colour("surface"), bordercolor: rhymerl.colour("rule"), font: { color: rhymerl.colour("ink") } },
    showlegend: false,
  });

  const config = { displayModeBar: false, responsive: true, doubleClick: "reset+autosize" };

  const tracesOf = (series) => {
    const colour = rhymerl.colour(series.colour);
    const base = { x: series.x, y: series.y, name: series.name, hovertemplate: "%{y:.4~g}" };
    switch (series.kind) {
      case "dots":
        return [{ ...base, mode: "markers", marker: { color: faded(colour, 0.6), size: 5 } }];
      case "marks":
        return [{ ...base, mode: "markers", marker: { color: colour, size: 11, symbol: "diamond", line: { color: rhymerl.colour("surface"), width: 1.5 } } }];
      case "band":
        return [
          { ...base, y: series.low, name: "shortest", mode: "lines", line: { width: 0 } },
          { ...base, mode: "lines", line: { width: 0 }, fill: "tonexty", fillcolor: faded(colour, 0.16) },
        ];
      case "area":
        return [{ ...base, mode: "lines", stackgroup: "all", line: { width: 0.5, color: colour }, fillcolor: faded(colour, 0.75) }];
      case "bars":
        return [{ ...base, type: "bar", marker: { color: faded(colour, 0.85) } }];
      default:
        return [{ ...base, mode: series.x.length < 3 ? "lines+markers" : "lines", line: { color: colour, width: 2 } }];
    }
  };

  // In the page's own type, which wraps; one series needs no key, but an area of one colour does.
  const drawKeys = (plot, series) => {
    const caption = plot.previousElementSibling;
    caption.querySelector(".keys")?.remove();
    if (series.length < 2 && series[0]?.kind !== "area") return;
    const keys = rhymerl.element("p", "keys");
    const hasOneRun = series.filter((each) => each.kind === "dots").length < 2; // of several, the lines say which is which
    for (const each of series.filter((each) => hasOneRun || each.kind !== "dots")) {
      const key = rhymerl.element("span");
      const mark = rhymerl.element("i", each.kind);
      mark.style.background = `var(--${each.colour})`;
      key.append(mark, each.name);
      keys.append(key);
    }
    caption.append(keys);
  };

  const drawChart = (plot, chart) => {
    const layout = layoutOf(chart.x_title, chart.y_title);
    const traces = chart.series.flatMap(tracesOf);
    drawKeys(plot, chart.series);
    if (chart.series.every((each) => each.y.every((value) => Math.abs(value) < 0.001))) layout.yaxis.exponentformat = "e"; // 3e-4, not 300µ
    if (chart.from_zero) layout.yaxis.rangemode = "tozero";
    if (chart.reference !== null) {
      layout.shapes = [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.reference, y1: chart.reference, line: { color: rhymerl.colour("muted"), width: 1, dash: "dot" } }];
    }
    const isCounted = chart.series.every((each) => each.x.every(Number.isInteger));
    const span = Math.max(...chart.series.flatMap((each) => each.x)) - Math.min(...chart.series.flatMap((each) => each.x));
    if (isCounted && span < 12) layout.xaxis.dtick = 1;
    return Plotly.react(plot, traces, layout, config);
  };

  const SHOWN_STEPS = 5;
  const drawTimeline = (plot, timeline) => {
    plot.style.height = `${70 + Math.max(2, timeline.rows.length) * (narrow() ? 22 : 28)}px`;
    const layout = layoutOf("seconds", "");
    const traces = [];
    for (const [kind, name] of Object.entries(timeline.kinds)) {
      const bars = timeline.bars.filter((each) => each.kind === kind);
      traces.push({
        type: "bar", orientation: "h", name,
        y: bars.map((each) => each.row), base: bars.map((each) => each.start_s), x: bars.map((each) => each.end_s - each.start_s),
        customdata: bars.map((each) => each.step), hovertemplate: "step %{customdata}, %{x:.3~g} s",
        marker: { color: rhymerl.colour(`bar-${kind}`), line: { color: rhymerl.colour("surface"), width: 1 } }, width: 0.72,
      });
    }
    const weights = timeline.bars.filter((each) => each.kind === "weights");
    traces.push({
      type: "scatter", mode: "markers", name: "weights", y: weights.map((each) => each.row), x: weights.map((each) => each.end_s),
      customdata: weights.map((each) => each.step), hovertemplate: "weights after %{customdata} updates",
      marker: { symbol: "line-ns", size: 16, line: { color: rhymerl.colour("bar-weights"), width: 1.5 } },
    });
    const ends = timeline.step_ends;
    const first = ends.length > SHOWN_STEPS ? ends[ends.length - 1 - SHOWN_STEPS][1] : 0;
    const last = ends[ends.length - 1][1];
    Object.assign(layout, { barmode: "overlay", hovermode: "closest", margin: { l: 64, r: 8, t: 6, b: 40 } });
    Object.assign(layout.xaxis, { range: [first, last + (last - first) * 0.01], zeroline: false });
    Object.assign(layout.yaxis, {
      tickvals: timeline.rows.map((_, index) => index), ticktext: timeline.rows, range: [timeline.rows.length - 0.5, -0.5],
      fixedrange: true, showgrid: false, zeroline: false,
    });
    layout.shapes = ends.map(([, end]) => ({ type: "line", x0: end, x1: end, yref: "paper", y0: 0, y1: 1, layer: "below", line: { color: rhymerl.colour("rule"), width: 1 } }));
    return Plotly.react(plot, traces, layout, { ...config, doubleClick: "autosize" });
  };

  const WINDOW = 5; // steps, as in charts/base.py
  const mean = (values) => {
    const known = values.filter((each) => each !== null);
    return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
  };
  const smoothed = (values) => values.map((_, index) => mean(values.slice(Math.max(0, index - 2), index + 3)));

  const drawMetric = (plot, data, name) => {
    const runs = data.metrics.map((run, index) => ({ run, index })).filter(({ run }) => name in run.curves);
    return drawChart(plot, {
      x_title: runs[0].run.step, y_title: "", reference: null, from_zero: false,
      series: runs.flatMap(({ run, index }) => {
        const [x, y] = run.curves[name];
        const series = (kind, y) => ({ name: kind === "dots" ? `${run.run}, each step` : run.run, kind, colour: `series-${index % 6}`, x, y });
        return y.length > WINDOW ? [series("dots", y), series("line", smoothed(y))] : [series("line", y)];
      }),
    });
  };

  rhymerl.parts.push(async (data) => {
    await rhymerl.loadLibrary();
    const draws = new Map();
    for (const plot of document.querySelectorAll("[data-chart]")) draws.set(plot, () => drawChart(plot, data.charts[plot.dataset.chart]));
    for (const plot of document.querySelectorAll("[data-timeline]")) draws.set(plot, () => drawTimeline(plot, data.timelines[plot.dataset.timeline]));
    const select = document.getElementById("metric");
    if (select) {
      const names = [...new Set(data.metrics.flatMap((run) => Object.keys(run.curves)))].sort();
      for (const name of names) select.append(new Option(name, name));
      const drawChosen = () => drawMetric(document.getElementById("metric-plot"), data, select.value);
      select.value = names.includes("entropy") ? "entropy" : names[0];
      select.addEventListener("change", drawChosen);
      draws.set(document.getElementById("metric-plot"), drawChosen);
    }
    const drawn = new Set();
    const draw = (plot) => {
      if (drawn.has(plot)) return;
      drawn.add(plot);
      draws.get(plot)();
    };
    const seen = new IntersectionObserver((entries) => entries.filter((each) => each.isIntersecting).forEach((each) => draw(each.target)));
    for (const plot of draws.keys()) seen.observe(plot);
    const whenIdle = window.requestIdleCallback ?? ((work) => setTimeout(work, 20));
    const drawNext = () => {
      const next = [...draws.keys()].find((plot) => !drawn.has(plot));
      if (next === undefined) {
        document.body.dataset.drawn = "yes";
        return;
      }
      draw(next);
      whenIdle(drawNext);
    };
    whenIdle(drawNext);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawn.forEach((plot) => draws.get(plot)()));
    window.addEventListener("beforeprint", () => [...draws.keys()].forEach(draw));
  });
}
