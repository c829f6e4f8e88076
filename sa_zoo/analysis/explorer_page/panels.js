// The panels beside the maps. Each function fills one element from its arguments, and reports through callbacks.

/** (row, column), with signs, as a person would say it. */
function displacementText([row, column]) {
  const signed = (value) => (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(2).replace(/\.?0+$/, "");
  return `row ${signed(row) || 0}, column ${signed(column) || 0}`;
}

/**
 * Centers and contours of the heads around the query pixel. A center is dragged by mouse, touch or arrow keys.
 *
 * extent: largest displacement shown; on: {select(head), move(head, Delta)}.
 */
function fillGeometry(element, kind, heads, selected, extent, on) {
  const focused = element.contains(document.activeElement) ? document.activeElement.dataset.head : null;
  const reach = extent + 0.5;
  const picture = svg("svg", { viewBox: `${-reach} ${-reach} ${2 * reach} ${2 * reach}`, class: "geometry" });
  const unit = reach / 100; // of lines and letters
  for (let at = -extent - 0.5; at <= reach; at++) {
    picture.append(svg("path", { d: `M${at} ${-reach}V${reach}M${-reach} ${at}H${reach}`, class: "pixels", "stroke-width": unit * 0.4 }));
  }
  picture.append(svg("rect", { x: -0.5, y: -0.5, width: 1, height: 1, class: "query", "stroke-width": unit * 1.6 }));
  heads.Delta.forEach((_, head) => {
    const chosen = head === selected ? " chosen" : "";
    for (const [share, dash] of [[0.5, "none"], [0.9, `${unit * 1.5} ${unit * 2.5}`]]) {
      const points = contourOf(kind, heads, head, share).map(([row, column]) => `${column.toFixed(3)},${row.toFixed(3)}`);
      const line = { "stroke-width": unit * (chosen ? 1.6 : 0.8), "stroke-dasharray": dash };
      picture.append(svg("polygon", { points: points.join(" "), class: `contour${chosen}`, ...line }));
    }
  });
  const order = [...heads.Delta.keys()].filter((head) => head !== selected).concat(selected); // the selected one on top
  const handles = order.map((head) => handleOf(heads.Delta[head], head, head === selected, unit, extent, on));
  picture.append(...handles);
  element.replaceChildren(picture);
  if (focused !== null) handles[order.indexOf(Number(focused))]?.focus();
}

function handleOf(Delta, head, chosen, unit, extent, on) {
  const name = `Head ${head + 1}, center at ${displacementText(Delta)}. Arrow keys move it.`;
  const handle = svg("g", {
    class: chosen ? "handle chosen" : "handle", tabindex: chosen ? 0 : -1, role: "button", "aria-label": name, "data-head": head,
    transform: `translate(${Delta[1]} ${Delta[0]})`,
  });
  handle.append(svg("circle", { r: unit * 13, class: "grip" }), svg("circle", { r: unit * 6 }));
  handle.append(svg("text", { "font-size": unit * 7, y: unit * 0.4 }, head + 1));
  handle.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    const picture = handle.ownerSVGElement;
    const matrix = picture.getScreenCTM().inverse();
    const moved = (move) => {
      const point = new DOMPoint(move.clientX, move.clientY).matrixTransform(matrix);
      on.move(head, [clamp(point.y, -extent, extent), clamp(point.x, -extent, extent)]);
    };
    const ended = () => {
      window.removeEventListener("pointermove", moved);
      window.removeEventListener("pointerup", ended);
      window.removeEventListener("pointercancel", ended);
    };
    window.addEventListener("pointermove", moved);
    window.addEventListener("pointerup", ended);
    window.addEventListener("pointercancel", ended);
    on.select(head);
  });
  handle.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (event.key === "Enter" || event.key === " ") on.select(head);
    else if (step) on.move(head, Delta.map((center, axis) => clamp(center + step[axis] * (event.shiftKey ? 1 : 0.25), -extent, extent)));
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  return handle;
}

/** The kernel that the layer has now next to the one it becomes, and the certificate. */
function fillKernels(elements, layer, heads, selected, values) {
  const targets = Array.from({ length: layer.heads }, (_, head) => targetOf(layer.kind, heads, head));
  const window = windowOf(targets, 1);
  const { now, limit } = kernelsOf(layer.kind, heads, targets, window, values.gram);
  const largest = Math.max(...limit.flat(), ...now.flat());
  const at = (row, column) => targets.flatMap((target, head) => (target[0] === row && target[1] === column ? [head + 1] : []));
  elements.now.replaceChildren(kernelPicture(now, window, largest, () => [], null));
  elements.limit.replaceChildren(kernelPicture(limit, window, largest, at, targets[selected]));
  const size = [window.rows, window.columns].map(([first, last]) => last - first - 1).join(" × ");
  elements.now.firstChild.setAttribute("aria-label", `Norms of the layer's kernel, for displacements around a ${size} kernel`);
  elements.limit.firstChild.setAttribute("aria-label", `Norms of the ${size} convolution that the layer becomes`);
  elements.size.textContent = size;
  const certificate = certificateOf(layer.kind, heads, targets, values.norms);
  const percent = 100 * certificate.share;
  elements.bound.textContent = certificate.bound.toPrecision(3);
  elements.share.textContent = percent > 100 ? "> 100 %" : percent >= 0.1 ? `${percent.toFixed(1)} %` : percent ? `${percent.toExponential(1)} %` : "0 %";
  elements.meter.value = Math.min(certificate.share, 1);
  elements.missed.textContent =
    `Head ${selected + 1} gives ${(100 * (1 - certificate.missed[selected])).toFixed(1)} % of its attention to ` +
    `${displacementText(targets[selected])}.`;
  return certificate;
}

/** Mean distances of all heads of all layers: a table whose cells select; nearer is stronger. */
function fillOverview(table, layers, distances, state, select) {
  const most = Math.max(...layers.map((layer) => layer.heads));
  const head = html("tr");
  head.append(html("th", { textContent: "layer", scope: "col" }));
  for (let index = 0; index < most; index++) head.append(html("th", { textContent: index + 1, scope: "col" }));
  const rows = layers.map((layer, index) => {
    const row = html("tr");
    row.append(html("th", { textContent: index + 1, scope: "row", title: layer.name }));
    distances[index].forEach((distance, at) => {
      const strength = 0.45 / (1 + distance);
      const cell = html("td", { textContent: distance.toFixed(1), onclick: () => select(index, at) });
      cell.style.setProperty("--strength", `${Math.round(100 * strength)}%`);
      if (index === state.layer && at === state.head) cell.setAttribute("aria-current", "true");
      row.append(cell);
    });
    return row;
  });
  const caption = html("caption", { className: "hidden", textContent: "Mean distance of each head, in pixels of its layer" });
  table.replaceChildren(caption, head, ...rows);
}
