"use strict";
// Opens the path of a request on a click, and draws charts anew that were in a closed section.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);

  const add = (parent, tag, text = "", name = "") => {
    const made = document.createElement(tag);
    made.textContent = text;
    if (name) made.className = name;
    parent.append(made);
    return made;
  };
  const seconds = (value) =>
    value >= 1 ? `${value.toFixed(2)} s` : value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
  const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "-");

  // Black or white, whichever is read better on a colour such as #D55E00.
  const textOn = (colour) => {
    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
    return 0.3 * red + 0.59 * green + 0.11 * blue > 110 ? "#000000" : "#ffffff";
  };

  // One strip of parts in their order, and below it what each name has in all.
  const strip = (parent, view, parts, whole, text) => {
    const bar = add(parent, "div", "", "strip");
    const sums = new Map();
    for (const [name, size] of parts) {
      if (!size) continue;
      sums.set(name, (sums.get(name) ?? 0) + size);
      const label = view.names[name] ?? name;
      const piece = add(bar, "span", size > 0.09 * whole ? label : "");
      piece.style.flexGrow = size / whole;
      piece.style.flexBasis = 0;
      piece.style.background = view.colours[name];
      piece.style.color = textOn(view.colours[name]);
      piece.title = `${label}: ${text(size)}`;
    }
    const keys = add(parent, "div", "", "keys");
    for (const [name, size] of sums) {
      const key = add(keys, "span");
      add(key, "i").style.background = view.colours[name];
      key.append(`${view.names[name] ?? name}: ${text(size)} (${percent(size, whole)})`);
    }
  };

  const show = (element, view, run, request) => {
    element.replaceChildren();
    const tokens = request.prompt_tokens.toLocaleString("en");
    const place = `Request ${request.number}, ${request.arrived.toFixed(3)} s after the start`;
    add(element, "h2", `${place}: first token after ${seconds(request.first_token_seconds)}`);
    add(element, "p", `Its prompt of ${tokens} tokens, from its first to its last, by where each part came from`);
    strip(element, view, request.parts, request.prompt_tokens, (size) => `${size.toLocaleString("en")} tokens`);
    const phases = Object.entries(request.phases);
    const spent = phases.reduce((sum, [, length]) => sum + length, 0);
    add(element, "p", `Its ${seconds(spent)}, in the order in which they passed`);
    strip(element, view, phases, spent, seconds);
    const order = Object.keys(run.tiers);
    const way = (tier) => [tier, ...order.slice(0, 2).reverse().filter((name) => name !== tier)].join(" → ");
    const ways = [...new Set(request.parts.map(([name]) => name))].filter((name) => order.indexOf(name) > 0).map(way);
    if (ways.length) add(element, "p", `Its loads went ${ways.join(", ")}.`);
    for (const [tier, blocks] of Object.entries(request.failed))
      add(element, "p", `${blocks} blocks did not come from ${tier} and were computed.`, "wrong");
  };

  for (const element of document.querySelectorAll(".request")) {
    const view = JSON.parse(element.dataset.view);
    const run = view.path.reduce((value, key) => value[key], figures);
    if (!run.requests.length) continue;
    const slower = (one, other) => (other.first_token_seconds > one.first_token_seconds ? other : one);
    show(element, view, run, run.requests.reduce(slower));
    document.getElementById(view.chart).on("plotly_click", (event) => {
      const clicked = event.points.find((point) => point.customdata !== undefined);
      if (clicked) show(element, view, run, run.requests[clicked.customdata]);
    });
  }

  for (const section of document.querySelectorAll("details"))
    section.addEventListener("toggle", () => {
      if (section.open) section.querySelectorAll(".js-plotly-plot").forEach((plot) => Plotly.Plots.resize(plot));
    });
})();
