// The state of the page and its rendering. With events.js, the only file that knows the page's elements.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const positionalOnly = data.layers.every((layer) => layer.kind !== "stored");
const distances = data.layers.map((layer) => Array.from(arrayOf(layer.distance)));
const pictures = []; // a pale canvas per image, in the order of data.images
const cache = new Map(); // arrays and decoded maps of layers, made when they are first shown
let state = validState(data, stateOf(location.hash, initialState(data, distances)));
let frameRequested = false; // a frame is requested
let shownView = null; // of the last rendering
let dragView = null; // the view in which a drag began: a zoomed one would move away under the pointer

function cached(key, make) {
  if (!cache.has(key)) cache.set(key, make());
  return cache.get(key);
}

/** {name: {shape, f4}} -> {name: nested array} */
function unpack(packed) {
  return Object.fromEntries(Object.entries(packed).map(([name, value]) => [name, arrayOf(value)]));
}

/** Parameters of the layer's heads at the shown epoch, with edits. */
function currentHeads(index) {
  const layer = data.layers[index];
  let parameters = cached(`parameters ${index}`, () => unpack(layer.parameters));
  if (state.epoch !== null && layer.path) {
    const path = cached(`path ${index}`, () => unpack(layer.path));
    parameters = Object.fromEntries(Object.entries(path).map(([name, rows]) => [name, rows[state.epoch]]));
  }
  return editedHeads(layer.kind, parameters, state.edits[index] ?? {});
}

/** A function of (head, query) that returns attention to all keys, for the shown image and epoch. */
async function currentMaps(index) {
  const layer = data.layers[index];
  if (layer.kind === "stored") {
    return cached(`maps ${index} ${state.image}`, () => storedMaps(layer, data.images[state.image].maps[index]));
  }
  const heads = currentHeads(index);
  return (head, query) => headMap(layer, heads, head, query);
}

/** Change the state, and show it. */
function update(change) {
  const before = data.layers[state.layer];
  const next = { ...state, ...change };
  if (change.layer !== undefined && data.layers[change.layer]) {
    const [from, to] = [before.grid, data.layers[change.layer].grid];
    Object.assign(next, { query: moveToGrid(next.query, from, to), pin: moveToGrid(next.pin, from, to) });
  }
  state = validState(data, next);
  if (frameRequested) return;
  frameRequested = true;
  requestAnimationFrame(() => {
    frameRequested = false;
    render();
  });
}

function edit(head, change) {
  const edits = { ...state.edits[state.layer] };
  for (const each of head === null ? Array(data.layers[state.layer].heads).keys() : [head]) {
    edits[each] = { ...edits[each], ...(typeof change === "function" ? change(each, edits[each] ?? {}) : change) };
  }
  update({ edits: { ...state.edits, [state.layer]: edits } });
}

/** Draw the state. */
async function render() {
  const [layer, now] = [data.layers[state.layer], state];
  const maps = await currentMaps(state.layer);
  if (now !== state) return; // a later rendering is under way
  const queries = state.pin ? [state.query, state.pin] : [state.query];
  const marks = queries.map((query, index) => ({
    query, color: color(index ? "--second" : "--query"), view: (!index && dragView) || viewOf(layer, query, state.zoom),
    maps: Array.from({ length: layer.heads }, (_, head) => maps(head, query)),
  }));
  shownView = marks[0].view;
  const picture = pictures[state.image];
  renderChoices(layer);
  byId("second").hidden = !state.pin;
  byId("maps").classList.toggle("pinned", Boolean(state.pin));
  ["stage", "pinned"].slice(0, marks.length).forEach((id, index) => {
    const chosen = [{ ...marks[index], P: marks[index].maps[state.head] }];
    drawMaps(byId(id).firstChild, layer, picture, chosen, marks[index].view);
    byId(index ? "pinned-caption" : "caption").textContent = captionOf(layer, marks[index]);
  });
  byId("status").textContent = `Layer ${state.layer + 1}, head ${state.head + 1}. ${byId("caption").textContent}`;
  renderHeads(layer, picture, marks);
  renderPositional(layer);
  fillOverview(byId("overview"), data.layers, distances, state, (index, head) => update({ layer: index, head }));
  byId("dropped").textContent = layer.token_share
    ? ` Class and register tokens, which this head gives ${(100 * arrayOf(layer.token_share)[state.head]).toFixed(0)} %, are left out.` : "";
  byId("code").textContent = snippetOf(data, state, layer);
  if (location.protocol !== "about:") history.replaceState(null, "", `#${fragmentOf(state)}`); // not in a notebook's frame
}

/** Caption of the enlarged map of a query. Pixels are counted from 1, those of the layer's input. */
function captionOf(layer, { query, maps }) {
  const { largest, key, distance } = summaryOf(layer, maps[state.head], query);
  const pixel = ([row, column]) => `row ${row + 1}, column ${column + 1}`;
  const inside = (place) => pixel(place.map((at, axis) => at - layer.padding[axis]));
  const on = layer.stride.some((step) => step > 1) ? ` on ${inside(originOf(layer, query))} of the input` : "";
  const most = `${(100 * largest).toFixed(1)} % to ${inside(key)}`;
  return `Query ${pixel(query)}${on}. Most attention: ${most}. Mean distance ${distance.toFixed(1)} px.`;
}

function renderChoices(layer) {
  byId("head-number").textContent = `${state.head + 1} of ${layer.heads}, layer ${state.layer + 1}`;
  const press = (id, chosen) => {
    const [strip, button] = [byId(id), byId(id).children[chosen]];
    if (button.ariaPressed === "true") return;
    for (const other of strip.children) other.ariaPressed = String(other === button);
    strip.scrollLeft = button.offsetLeft - strip.offsetLeft - strip.clientWidth / 2;
  };
  press("images", state.image);
  press("layers", state.layer);
  byId("pin").setAttribute("aria-pressed", Boolean(state.pin));
  byId("zoom").setAttribute("aria-pressed", state.zoom);
  byId("zoom").hidden = Math.max(...layer.keys) <= ZOOMED;
  byId("pin").textContent = state.pin ? "Unpin" : "Pin query";
  const last = data.epochs.length - 1;
  byId("epoch").value = state.epoch ?? last;
  byId("epoch-text").textContent = `${data.epochs[state.epoch ?? last]} of ${data.epochs[last]}`;
}

function renderHeads(layer, picture, marks) {
  const grid = byId("heads");
  grid.style.setProperty("--columns", Math.ceil(Math.sqrt(layer.heads)));
  while (grid.children.length > layer.heads) grid.lastChild.remove();
  while (grid.children.length < layer.heads) {
    const head = grid.children.length;
    const button = html("button", { type: "button", onclick: () => update({ head }) });
    button.append(html("canvas"), html("span"));
    grid.append(button);
  }
  [...grid.children].forEach((button, head) => {
    const { largest, distance } = summaryOf(layer, marks[0].maps[head], marks[0].query);
    const percent = `${(100 * largest).toFixed(0)} %`;
    button.setAttribute("aria-pressed", head === state.head);
    button.setAttribute("aria-label", `Head ${head + 1}, largest share ${percent}, mean distance ${distance.toFixed(1)} pixels`);
    button.lastChild.replaceChildren(html("b", { textContent: head + 1 }), html("small", { textContent: percent }));
    drawMaps(button.firstChild, layer, picture, marks.map((mark) => ({ ...mark, P: mark.maps[head] })), marks[0].view);
  });
}

/** The panels that only layers with parameters have. */
function renderPositional(layer) {
  const computed = layer.kind !== "stored";
  byId("geometry-card").hidden = !computed || layer.kind === "learned";
  byId("kernel-card").hidden = !computed || !layer.values;
  byId("epochs").hidden = !computed || !layer.path;
  if (computed) {
    const heads = currentHeads(state.layer);
    if (layer.kind !== "learned") {
      const most = Math.max(2, ...cached(`parameters ${state.layer}`, () => unpack(layer.parameters)).Delta.flatMap((center) => Array.from(center, Math.abs)));
      const extent = Math.min(Math.ceil(most + 1.2), 40);
      fillGeometry(byId("geometry"), layer.kind, heads, state.head, extent, {
        select: (head) => update({ head }),
        move: (head, Delta) => edit(head, { Delta }),
      });
    }
    renderSharpness(layer, heads);
    const kernels = { now: byId("kernel-now"), limit: byId("kernel-limit"), size: byId("kernel-size") };
    const bounds = { bound: byId("bound"), share: byId("share"), meter: byId("meter"), missed: byId("missed") };
    if (layer.values) {
      const values = cached(`values ${state.layer}`, () => unpack(layer.values));
      fillKernels({ ...kernels, ...bounds }, layer, heads, state.head, values);
    }
    byId("final").hidden = state.epoch === null;
  }
}

/** The slider shows alpha where a head has one, else a factor of the scores. */
function renderSharpness(layer, heads) {
  const value = layer.kind === "quadratic" ? heads.alpha[state.head] : state.edits[state.layer]?.[state.head]?.sharpness ?? 1;
  byId("sharpness-name").textContent = layer.kind === "quadratic" ? "alpha" : "sharpness";
  byId("sharpness").value = Math.log10(value);
  // the smallest alpha that leaves one pixel: ONE_HOT of models/positions.py
  const tap = layer.kind === "quadratic" && value >= 39 && heads.Delta[state.head].every(Number.isInteger);
  byId("sharpness-text").textContent = (layer.kind === "quadratic" ? "" : "× ") + value.toPrecision(3) + (tap ? ", a tap" : "");
}
