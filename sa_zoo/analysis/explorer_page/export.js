// What leaves the page: the view as SVG and PNG, and Python code that computes its maps.

/** Attention over a picture as an SVG element at (x, y), `side` wide: the picture and the maps are embedded as PNG. */
function mapImage(layer, pictureUrl, marks, view, x, y, side) {
  const place = ([left, top, width, height]) => ({ x: left, y: top, width, height });
  const raster = { style: "image-rendering: pixelated", preserveAspectRatio: "none" };
  const all = [0, 0, layer.keys[1], layer.keys[0]];
  const shown = svg("svg", {
    ...place([x, y, side, (side * view.height) / view.width]),
    viewBox: [view.column, view.row, view.width, view.height].join(" "),
  });
  shown.append(svg("rect", { ...place(all), fill: color("--padding") }));
  shown.append(svg("rect", { ...place(pictureBox(layer)), fill: color("--veil") }));
  const opacity = color("--picture-opacity");
  shown.append(svg("image", { ...place(pictureBox(layer)), href: pictureUrl, opacity, ...raster }));
  for (const mark of marks) {
    const href = overlayOf(mark.P, layer.keys, mark.color).toDataURL("image/png");
    shown.append(svg("image", { ...place(all), href, ...raster }));
  }
  for (const mark of marks) {
    for (const [left, top, size, stroke, line] of queryLines(standingOf(layer, mark.query), view, mark.color)) {
      shown.append(svg("rect", { ...place([left, top, size, size]), fill: "none", stroke, "stroke-width": line }));
    }
  }
  return shown;
}

/**
 * The current view as an SVG element: enlarged maps, one per query, and next to them all heads.
 *
 * shown: {title, lines, layer, head, pictureUrl, marks}; marks: [{query, color, view, maps: [P per head]}].
 */
function viewAsSvg(shown) {
  const { layer, marks } = shown;
  const [{ view }] = marks;
  const [ratio, large, gap, letters] = [view.height / view.width, 420, 20, 18];
  const columns = Math.ceil(Math.sqrt(layer.heads));
  const rows = Math.ceil(layer.heads / columns);
  const small = (large * ratio - (rows - 1) * gap * 0.4 - rows * letters) / rows / ratio;
  const left = gap + marks.length * (large + gap);
  const top = gap + 40 + 20 * shown.lines.length;
  const [width, height] = [left + columns * (small + gap * 0.4) + gap, top + large * ratio + gap];
  const picture = svg("svg", {
    xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}`,
    "font-family": "system-ui, sans-serif", fill: color("--ink"),
  });
  picture.append(svg("rect", { width, height, fill: color("--paper") }));
  picture.append(svg("text", { x: gap, y: gap + 20, "font-size": 22, "font-weight": 600 }, shown.title));
  shown.lines.forEach((line, index) => {
    picture.append(svg("text", { x: gap, y: gap + 44 + 20 * index, "font-size": 14 }, line));
  });
  marks.forEach((mark, index) => {
    const chosen = [{ ...mark, P: mark.maps[shown.head] }];
    picture.append(mapImage(layer, shown.pictureUrl, chosen, mark.view, gap + index * (large + gap), top, large));
  });
  for (let head = 0; head < layer.heads; head++) {
    const x = left + (head % columns) * (small + gap * 0.4);
    const y = top + Math.floor(head / columns) * (small * ratio + gap * 0.4 + letters);
    const both = marks.map((mark) => ({ ...mark, P: mark.maps[head] }));
    const weight = head === shown.head ? 700 : 400;
    picture.append(svg("text", { x, y: y + 13, "font-size": 12, "font-weight": weight }, `head ${head + 1}`));
    picture.append(mapImage(layer, shown.pictureUrl, both, view, x, y + letters, small));
  }
  return picture;
}

function svgBlob(picture) {
  return new Blob([new XMLSerializer().serializeToString(picture)], { type: "image/svg+xml" });
}

/** The same picture as PNG, with `scale` pixels per unit. */
async function pngBlob(picture, scale = 2) {
  const [width, height] = ["width", "height"].map((name) => Number(picture.getAttribute(name)) * scale);
  const url = URL.createObjectURL(svgBlob(picture));
  const image = await loadedImage(url);
  const canvas = html("canvas", { width, height });
  canvas.getContext("2d").drawImage(image, 0, 0, width, height);
  URL.revokeObjectURL(url);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

async function loadedImage(url) {
  const image = new Image();
  image.src = url;
  await image.decode();
  return image;
}

/** Offer a file to the browser's downloads. */
function download(blob, name) {
  const link = html("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/** Python code that computes the maps of the view; strings are quoted as JSON does, which Python reads too. */
function snippetOf(data, state, layer) {
  const positional = layer.kind !== "stored";
  const model = data.source
    ? `model = timm.create_model(${JSON.stringify(data.source)}, pretrained=True)`
    : "model = ...  # the network that this page was made from";
  const size = data.size.join(", ");
  const images = positional
    ? `images = torch.zeros(1, ${size})  # these maps are the same for every image`
    : `images = ...  # (B, ${size}), as the model takes them; the page shows number ${state.image + 1} of them`;
  const lines = ["import timm", "import torch", "", "import sa_zoo  # registers the names with timm"];
  lines.push("from sa_zoo.analysis.maps import attention_layers", "", model, images);
  const edits = positional ? Object.entries(state.edits[state.layer] ?? {}) : [];
  const place = `model.get_submodule(${JSON.stringify(layer.name)})${layer.filters ? "" : ".terms[0]"}`;
  if (positional && state.epoch !== null) {
    lines.push("", "from safetensors.torch import load_file", "");
    lines.push(`path = load_file("heads.safetensors")  # of the run: one row per epoch, the first before training`);
    lines.push(`model.load_state_dict({name: rows[${data.epochs[state.epoch]}] for name, rows in path.items()}, strict=False)`);
  }
  if (edits.length) lines.push("", `heads = ${place}`, "with torch.no_grad():");
  for (const [head, { Delta, sharpness }] of edits) {
    if (Delta) lines.push(`    heads.Delta[${head}] = torch.tensor([${Delta.map((center) => center.toPrecision(6)).join(", ")}])`);
    if (!sharpness || sharpness === 1) continue;
    const factor = sharpness.toPrecision(6);
    if (layer.kind === "learned") lines.push(`    heads.v[${head}] *= ${factor}`, `    heads.w[${head}] *= ${factor}`);
    else if (layer.filters) lines.push(`    heads.alpha[${head}] *= ${factor}`);
    else lines.push(`    heads.spread[${head}] *= ${factor} ** 0.5  # alpha = spread ** 2 / 2`);
  }
  const shape = `${positional ? "" : "B, "}${layer.heads}, ${layer.keys.join(", ")}`;
  lines.push("", `layer = attention_layers(model, images)[${state.layer}]  # ${layer.name}`);
  lines.push(`maps = layer.at((${state.query.join(", ")}))  # (${shape}), from this query, counted from 0`);
  return lines.join("\n");
}
