// State, events and rendering of the page: the only file that knows its elements.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const positionalOnly = data.layers.every((layer) => layer.kind !== "stored");
const distances = data.layers.map((layer) => Array.from(arrayOf(layer.distance)));
const pictures = []; // loaded <img> elements, in the order of data.images
const unpacked = new Map(); // arrays and decoded maps of layers, made when they are first shown
let state = validState(data, stateOf(location.hash, initialState(data, distances)));
let waiting = false; // a frame is requested

function remembered(key, make) {
  if (!unpacked.has(key)) unpacked.set(key, make());
  return unpacked.get(key);
}

/** {name: {shape, f4}} -> {name: nested array} */
function unpack(packed) {
  return Object.fromEntries(Object.entries(packed).map(([name, value]) => [name, arrayOf(value)]));
}

/** Parameters of the layer's heads at the shown epoch, with edits. */
function currentHeads(index) {
  const layer = data.layers[index];
  let parameters = remembered(`parameters ${index}`, () => unpack(layer.parameters));
  if (state.epoch !== null && layer.path) {
    const path = remembered(`path ${index}`, () => unpack(layer.path));
    parameters = Object.fromEntries(Object.entries(path).map(([name, rows]) => [name, rows[state.epoch]]));
  }
  return editedHeads(layer.kind, parameters, state.edits[index] ?? {});
}

/** A function of (head, query) that returns attention to all keys, for the shown image and epoch. */
async function currentMaps(index) {
  const layer = data.layers[index];
  if (layer.kind === "stored") {
    return remembered(`maps ${index} ${state.image}`, () => storedMaps(layer, layer.stored[state.image]));
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
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
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

let shown = null; // what the last rendering drew, for export
async function render() {
  const [layer, now] = [data.layers[state.layer], state];
  const maps = await currentMaps(state.layer);
  if (now !== state) return; // a later rendering is under way
  const queries = state.pin ? [state.query, state.pin] : [state.query];
  const marks = queries.map((query, index) => ({
    query, color: color(index ? "--second" : "--query"), view: (!index && held) || viewOf(layer, query, state.zoom),
    maps: Array.from({ length: layer.heads }, (_, head) => maps(head, query)),
  }));
  shown = { layer, marks };
  const picture = pictures[state.image];
  renderChoices(layer);
  byId("second").hidden = !state.pin;
  byId("maps").classList.toggle("pinned", Boolean(state.pin));
  ["stage", "pinned"].slice(0, marks.length).forEach((id, index) => {
    const chosen = [{ ...marks[index], P: marks[index].maps[state.head] }];
    drawMaps(byId(id).firstChild, layer, picture, chosen, marks[index].view);
    const { largest, key, distance } = summaryOf(layer, marks[index].maps[state.head], marks[index].query);
    const [row, column] = marks[index].query;
    byId(index ? "pinned-caption" : "caption").textContent =
      `Query row ${row + 1}, column ${column + 1}. Most attention: ${(100 * largest).toFixed(1)} % to row ` +
      `${key[0] - layer.padding[0] + 1}, column ${key[1] - layer.padding[1] + 1}. Mean distance ${distance.toFixed(1)} px.`;
  });
  byId("status").textContent = `Layer ${state.layer + 1}, head ${state.head + 1}. ${byId("caption").textContent}`;
  renderHeads(layer, picture, marks);
  renderPositional(layer);
  fillOverview(byId("overview"), data.layers, distances, state, (index, head) => update({ layer: index, head }));
  byId("dropped").textContent = layer.dropped
    ? ` Class and register tokens, which this head gives ${(100 * arrayOf(layer.dropped)[state.head]).toFixed(0)} %, are left out.` : "";
  byId("code").textContent = snippetOf(data, state, layer);
  if (location.protocol !== "about:") history.replaceState(null, "", `#${fragmentOf(state)}`); // not in a notebook's frame
}

function renderChoices(layer) {
  byId("head-number").textContent = `${state.head + 1} of ${layer.heads}, layer ${state.layer + 1}`;
  const press = (id, chosen) => [...byId(id).children].forEach((button, at) => button.setAttribute("aria-pressed", at === chosen));
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
  byId("filter-card").hidden = !layer.filters || layer.kernel.every((size) => size === 1);
  byId("epochs").hidden = !computed || !layer.path;
  if (computed) {
    const heads = currentHeads(state.layer);
    if (layer.kind !== "learned") {
      const most = Math.max(2, ...remembered(`parameters ${state.layer}`, () => unpack(layer.parameters)).Delta.flatMap((center) => Array.from(center, Math.abs)));
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
      const values = remembered(`values ${state.layer}`, () => unpack(layer.values));
      fillKernels({ ...kernels, ...bounds }, layer, heads, state.head, values);
    }
    byId("final").hidden = state.epoch === null;
  }
  if (!byId("filter-card").hidden) renderFilters(layer);
}

/** The slider shows alpha where a head has one, else a factor of the scores. */
function renderSharpness(layer, heads) {
  const value = layer.kind === "quadratic" ? heads.alpha[state.head] : state.edits[state.layer]?.[state.head]?.sharpness ?? 1;
  byId("sharpness-name").textContent = layer.kind === "quadratic" ? "alpha" : "sharpness";
  byId("sharpness").value = Math.log10(value);
  byId("sharpness-text").textContent = (layer.kind === "quadratic" ? "" : "× ") + value.toPrecision(3);
}

function renderFilters(layer) {
  const filters = remembered(`filters ${state.layer}`, () => arrayOf(layer.filters));
  byId("filters").replaceChildren(
    ...filters.map((filter) => {
      const canvas = html("canvas", {}, { "aria-hidden": "true" });
      drawFilter(canvas, filter, state.head);
      return canvas;
    }),
  );
  const channels = filters[0].length === 3 ? "in color" : "at their input channel of most weight; red is positive, blue negative";
  byId("filter-text").textContent =
    `${filters.length} filters of the ${layer.kernel.join(" × ")} kernel that the heads replace, ${channels}. ` +
    `The square is the pixel of the kernel that head ${state.head + 1} stands for.`;
}

/** Sharpen all heads until they are one-hot, as an animation unless the reader prefers none. */
function harden() {
  const [layer, start] = [data.layers[state.layer], performance.now()];
  const heads = currentHeads(state.layer);
  const growth = 10 ** (layer.kind === "quadratic" ? Math.max(0, 1.7 - Math.log10(Math.min(...heads.alpha))) : 2);
  const from = heads[layer.kind === "learned" ? "down" : "Delta"].map((_, head) => state.edits[state.layer]?.[head]?.sharpness ?? 1);
  const duration = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 2500;
  const step = (time) => {
    const part = duration ? clamp((time - start) / duration, 0, 1) : 1;
    edit(null, (head) => ({ sharpness: from[head] * growth ** part }));
    if (part < 1) requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

let playing = null; // the timer of `play`
/** Move the heads along their training path, from the start; a second click stops it. */
function play() {
  const stop = () => {
    clearInterval(playing);
    playing = null;
    byId("play").textContent = "Play";
  };
  if (playing !== null) return stop();
  let epoch = 0;
  byId("play").textContent = "Stop";
  playing = setInterval(() => {
    update({ epoch });
    if (epoch++ >= data.epochs.length - 1) stop();
  }, 4000 / Math.max(data.epochs.length, 20));
}

/** A picture of the reader's own, cropped to the size of the model's input; it stays in this page. */
async function openFile(file) {
  if (!positionalOnly || !file?.type.startsWith("image/")) return;
  const bitmap = await createImageBitmap(file);
  const [, height, width] = data.size;
  const canvas = html("canvas", { width, height });
  const scale = Math.max(width / bitmap.width, height / bitmap.height);
  const [w, h] = [bitmap.width * scale, bitmap.height * scale];
  canvas.getContext("2d").drawImage(bitmap, (width - w) / 2, (height - h) / 2, w, h);
  await addImage({ name: file.name, url: canvas.toDataURL("image/png") });
  update({ image: data.images.length - 1 });
}

async function addImage(image) {
  const picture = await loadedImage(image.url);
  pictures.push(picture);
  if (!data.images.includes(image)) data.images.push(image);
  const index = pictures.length - 1;
  const button = html("button", { type: "button", title: image.name, onclick: () => update({ image: index }) });
  button.append(html("img", { src: image.url, alt: image.name }));
  byId("images").append(button);
}

/** The view as SVG, from what was drawn last. */
function exported() {
  const query = ([row, column]) => `row ${row + 1}, column ${column + 1}`;
  const lines = [`Layer ${state.layer + 1} (${shown.layer.name}), head ${state.head + 1}; query ${query(state.query)}`];
  if (state.pin) lines[0] += ` and ${query(state.pin)}`;
  if (state.epoch !== null) lines[0] += `; epoch ${data.epochs[state.epoch]}`;
  return viewAsSvg({ ...shown, title: data.title, lines, head: state.head, pictureUrl: data.images[state.image].url });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, pre, .scroll")) return;
  const { query, head, image } = state;
  const actions = {
    ArrowUp: { query: [query[0] - 1, query[1]] }, ArrowDown: { query: [query[0] + 1, query[1]] },
    ArrowLeft: { query: [query[0], query[1] - 1] }, ArrowRight: { query: [query[0], query[1] + 1] },
    "[": { head: Math.max(head - 1, 0) }, "]": { head: head + 1 }, p: { pin: state.pin ? null : query }, Escape: { pin: null },
    z: { zoom: !state.zoom }, i: { image: (image + 1) % data.images.length },
  };
  const layer = Number(event.key) - 1;
  const change = actions[event.key] ?? (layer >= 0 && layer < data.layers.length ? { layer } : null);
  if (!change) return;
  event.preventDefault();
  update(change);
}

let held = null; // the view in which a drag began: a zoomed one would move away under the pointer
function onPointer(event) {
  if (event.type === "pointerdown") {
    byId("stage").setPointerCapture(event.pointerId);
    held = shown.marks[0].view;
  }
  if (!event.buttons || !held) return;
  const [layer, box] = [data.layers[state.layer], byId("stage").firstChild.getBoundingClientRect()];
  const key = [
    held.row + Math.floor(((event.clientY - box.top) / box.height) * held.height),
    held.column + Math.floor(((event.clientX - box.left) / box.width) * held.width),
  ];
  update({ query: key.map((at, axis) => Math.round((at - layer.center[axis]) / layer.stride[axis])) });
}

function listen() {
  document.addEventListener("keydown", onKey);
  const stage = byId("stage");
  stage.addEventListener("pointerdown", onPointer);
  stage.addEventListener("pointermove", onPointer);
  stage.addEventListener("pointerup", () => { held = null; update({}); });
  const heads = () => data.layers[state.layer].heads;
  byId("previous").onclick = () => update({ head: (state.head + heads() - 1) % heads() });
  byId("next").onclick = () => update({ head: (state.head + 1) % heads() });
  byId("pin").onclick = () => update({ pin: state.pin ? null : state.query });
  byId("zoom").onclick = () => update({ zoom: !state.zoom });
  byId("play").onclick = play;
  byId("epoch").max = data.epochs.length - 1;
  byId("epoch").oninput = (event) => update({ epoch: Number(event.target.value) });
  byId("sharpness").oninput = (event) => {
    const old = data.layers[state.layer].kind === "quadratic" ? currentHeads(state.layer).alpha[state.head] : state.edits[state.layer]?.[state.head]?.sharpness ?? 1;
    const factor = 10 ** Number(event.target.value) / old;
    edit(byId("all").checked ? null : state.head, (_, { sharpness = 1 }) => ({ sharpness: sharpness * factor }));
  };
  byId("harden").onclick = harden;
  byId("snap").onclick = () => {
    const { Delta } = currentHeads(state.layer);
    edit(null, (head) => ({ Delta: Delta[head].map(Math.round) }));
  };
  byId("reset").onclick = () => update({ edits: { ...state.edits, [state.layer]: {} } });
  byId("svg").onclick = () => download(svgBlob(exported()), "attention.svg");
  byId("png").onclick = async () => download(await pngBlob(exported()), "attention.png");
  byId("copy").onclick = () => navigator.clipboard.writeText(byId("code").textContent);
  byId("file").onchange = (event) => openFile(event.target.files[0]);
  const dropping = (on) => (event) => { event.preventDefault(); document.body.classList.toggle("dropping", on && positionalOnly); };
  document.addEventListener("dragover", dropping(true));
  document.addEventListener("dragleave", dropping(false));
  document.addEventListener("drop", (event) => { dropping(false)(event); openFile(event.dataTransfer.files[0]); });
  window.addEventListener("hashchange", () => update(stateOf(location.hash, state)));
  window.addEventListener("resize", () => update({}));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update({}));
}

async function start() {
  for (const image of data.images) image.url = `data:image/png;base64,${image.png}`;
  for (const image of data.images) await addImage(image);
  data.layers.forEach((layer, index) => {
    const button = html("button", { type: "button", textContent: index + 1, title: layer.name, onclick: () => update({ layer: index }) });
    button.setAttribute("aria-label", `Layer ${index + 1}, ${layer.name}`);
    byId("layers").append(button);
  });
  byId("own").hidden = !positionalOnly;
  const [heads, kinds] = [data.layers.map((layer) => layer.heads), new Set(data.layers.map((layer) => layer.kind))];
  const attention = positionalOnly ? "attention by position, computed here from the heads' parameters" : kinds.size > 1 ? "attention by position and content" : "attention that depends on the image";
  const range = [...new Set([Math.min(...heads), Math.max(...heads)])].join(" to ");
  byId("summary").textContent = `${data.layers.length} layers of ${range} heads; ${attention}`;
  listen();
  await render();
  document.body.dataset.ready = "true";
}

// For tests and the browser's console.
window.explorer = { data, state: () => state, update, maps: currentMaps, heads: currentHeads, certificateOf, targetOf, unpack };
start();
