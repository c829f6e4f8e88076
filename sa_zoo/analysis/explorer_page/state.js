// The state of the view, and its form in the URL fragment: pure functions. Numbers are counted from 0 here, and shown
// from 1.
//
//     image, layer, head  numbers
//     query, pin          [row, column]; pin is null without a second query
//     epoch               number of the recorded epoch that is shown, or null for the final weights
//     zoom                whether only the keys around the query are shown
//     edits               {layer: {head: {Delta, sharpness}}}

/** The first view of a page: the middle of the first image, in the layer whose heads are most local. */
function initialState(data, distances) {
  const mean = distances.map((heads) => (heads.length > 1 ? heads.reduce((a, b) => a + b) / heads.length : Infinity));
  const layer = Math.max(mean.findIndex((distance) => distance < 1.01 * Math.min(...mean)), 0);
  const { grid, keys } = data.layers[layer];
  const query = grid.map((size) => Math.floor(size / 2));
  return { image: 0, layer, head: 0, query, pin: null, epoch: null, zoom: Math.max(...keys) > 60, edits: {} };
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** The state with every number in range: it may come from a link that was made for another page. */
function validState(data, state) {
  const number = (value, count) => clamp(Math.floor(value) || 0, 0, count - 1);
  const layer = number(state.layer, data.layers.length);
  const { grid, heads } = data.layers[layer];
  const pixel = (query) => [0, 1].map((axis) => number(query[axis], grid[axis]));
  return {
    ...state,
    layer,
    image: number(state.image, data.images.length),
    head: number(state.head, heads),
    query: pixel(state.query),
    pin: state.pin && pixel(state.pin),
    epoch: state.epoch === null || !data.epochs.length ? null : number(state.epoch, data.epochs.length),
  };
}

/** The same place of the image on another layer's grid. */
function moveToGrid(query, from, to) {
  return query && query.map((at, axis) => clamp(Math.floor(((at + 0.5) * to[axis]) / from[axis]), 0, to[axis] - 1));
}

/** State -> "layer=2&head=3&query=7,8&..", without the leading #. */
function fragmentOf(state) {
  const parts = [`image=${state.image + 1}`, `layer=${state.layer + 1}`, `head=${state.head + 1}`];
  parts.push(`query=${state.query.join(",")}`);
  if (state.pin) parts.push(`pin=${state.pin.join(",")}`);
  if (state.epoch !== null) parts.push(`epoch=${state.epoch}`);
  if (state.zoom) parts.push("zoom=1");
  const edits = [];
  for (const [layer, heads] of Object.entries(state.edits)) {
    for (const [head, { Delta, sharpness }] of Object.entries(heads)) {
      const values = [Number(layer) + 1, Number(head) + 1, sharpness ?? 1, ...(Delta ?? [])];
      edits.push(values.map((value) => Number(value.toPrecision(6))).join(","));
    }
  }
  if (edits.length) parts.push(`edits=${edits.join(";")}`);
  return parts.join("&");
}

/** The inverse of fragmentOf; what is missing or not a number is taken from `fallback`. */
function stateOf(fragment, fallback) {
  const given = new URLSearchParams(fragment.replace(/^#/, ""));
  const numbers = (text) => text.split(",").map(Number);
  const one = (name, first, otherwise) =>
    given.has(name) && Number.isFinite(Number(given.get(name))) ? Number(given.get(name)) - first : otherwise;
  const pair = (name) => {
    const found = numbers(given.get(name) ?? "");
    return found.length === 2 && found.every(Number.isFinite) ? found : null;
  };
  const edits = {};
  for (const edit of (given.get("edits") ?? "").split(";").filter(Boolean)) {
    const [layer, head, sharpness, ...Delta] = numbers(edit);
    if (![layer, head, sharpness, ...Delta].every(Number.isFinite) || !(sharpness > 0)) continue;
    edits[layer - 1] ??= {};
    edits[layer - 1][head - 1] = Delta.length === 2 ? { sharpness, Delta } : { sharpness };
  }
  return {
    image: one("image", 1, fallback.image),
    layer: one("layer", 1, fallback.layer),
    head: one("head", 1, fallback.head),
    query: pair("query") ?? fallback.query,
    pin: pair("pin"),
    epoch: one("epoch", 0, null),
    zoom: given.size ? given.get("zoom") === "1" : fallback.zoom,
    edits,
  };
}
