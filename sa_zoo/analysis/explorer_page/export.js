// Exports: the view as PNG, and Python code that computes its maps.

/** The canvases of the page on one: the enlarged maps, one per query, and next to them all heads, below a title. */
function viewAsCanvas() {
  const large = [...document.querySelectorAll("#stages figure:not([hidden]) canvas")];
  const small = [...document.querySelectorAll("#heads canvas")];
  const columns = Math.ceil(Math.sqrt(small.length));
  const rows = Math.ceil(small.length / columns);
  const { width, height } = large[0];
  const gap = Math.ceil(width / 25);
  const side = (height - (rows - 1) * gap) / rows;
  const step = (side * width) / height + gap;
  const top = 4 * gap;
  const whole = html("canvas", { width: large.length * (width + gap) + columns * step + gap, height: top + height + gap });
  const context = whole.getContext("2d");
  context.fillStyle = color("--paper");
  context.fillRect(0, 0, whole.width, whole.height);
  context.fillStyle = color("--ink");
  context.font = `${gap}px system-ui, sans-serif`;
  context.fillText(`${data.title}, ${byId("large-title").textContent}`, gap, 1.6 * gap);
  context.fillText(byId("caption").textContent, gap, 3.2 * gap);
  large.forEach((canvas, index) => context.drawImage(canvas, gap + index * (width + gap), top));
  small.forEach((canvas, head) => {
    const x = gap + large.length * (width + gap) + (head % columns) * step;
    const y = top + Math.floor(head / columns) * (side + gap);
    context.drawImage(canvas, x, y, step - gap, side);
  });
  return whole;
}

/** Python code that computes the maps of the view; strings are quoted as in JSON, which is valid Python. */
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
  const place = `model.get_submodule(${JSON.stringify(layer.name)})${layer.convolution ? "" : ".terms[0]"}`;
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
    else if (layer.convolution) lines.push(`    heads.alpha[${head}] *= ${factor}`);
    else lines.push(`    heads.spread[${head}] *= ${factor} ** 0.5  # alpha = spread ** 2 / 2`);
  }
  const shape = `${positional ? "" : "B, "}${layer.heads}, ${layer.keys.join(", ")}`;
  lines.push("", `layer = attention_layers(model, images)[${state.layer}]  # ${layer.name}`);
  lines.push(`maps = layer.at((${state.query.join(", ")}))  # (${shape}), from this query, counted from 0`);
  return lines.join("\n");
}
