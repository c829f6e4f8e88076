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
  const pixel = (query) => [0, 1].map((axis) => number(query?.[axis], grid[axis]));
  return {
    layer,
    image: number(state.image, data.images.length),
    head: number(state.head, heads),
    query: pixel(state.query),
    pin: state.pin && pixel(state.pin),
    epoch: state.epoch === null || !data.epochs.length ? null : number(state.epoch, data.epochs.length),
    zoom: Boolean(state.zoom),
    edits: mapValues(state.edits ?? {}, (ofLayer) => mapValues(ofLayer ?? {}, validEdit)),
  };
}

function validEdit(edit) {
  const valid = edit?.sharpness > 0 ? { sharpness: Number(edit.sharpness) } : {};
  const Delta = [edit?.Delta?.[0], edit?.Delta?.[1]].map(Number);
  return Delta.every(Number.isFinite) ? { ...valid, Delta } : valid;
}

function mapValues(object, change) {
  return Object.fromEntries(Object.entries(object).map(([key, value]) => [key, change(value)]));
}

/** The same place of the image on another layer's grid. */
function moveToGrid(query, from, to) {
  return query && query.map((at, axis) => clamp(Math.floor(((at + 0.5) * to[axis]) / from[axis]), 0, to[axis] - 1));
}

/** State -> the fragment of an address. */
function fragmentOf(state) {
  return encodeURIComponent(JSON.stringify(state));
}

/** The inverse of fragmentOf; missing parts come from `fallback`, and everything does if the fragment holds no state. */
function stateOf(fragment, fallback) {
  try {
    return { ...fallback, ...JSON.parse(decodeURIComponent(fragment.replace(/^#/, ""))) };
  } catch {
    return fallback;
  }
}
