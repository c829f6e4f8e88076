// Keys, pointers and buttons. The last file: it starts the page.

/** Sharpen all heads until they are one-hot, as an animation unless the reader prefers none. */
function harden() {
  const [index, layer, start] = [state.layer, data.layers[state.layer], performance.now()];
  const heads = currentHeads(index);
  const growth = 10 ** (layer.kind === "quadratic" ? Math.max(0, 1.7 - Math.log10(Math.min(...heads.alpha))) : 2);
  const from = Array.from({ length: layer.heads }, (_, head) => state.edits[index]?.[head]?.sharpness ?? 1);
  const duration = matchMedia("(prefers-reduced-motion: reduce)").matches ? 0 : 2500;
  const step = (time) => {
    if (state.layer !== index) return;
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

async function addImage(image) {
  const shownImage = html("img", { src: `data:image/png;base64,${image.png}`, alt: image.name });
  await shownImage.decode();
  const index = pictures.push(paleOf(shownImage)) - 1;
  const button = html("button", { type: "button", title: image.name, onclick: () => update({ image: index }) });
  button.append(shownImage);
  byId("images").append(button);
}

/** Keys work wherever they mean nothing else. */
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

/** A click or a drag on the enlarged map moves the query. */
function onPointer(event) {
  if (event.type === "pointerdown") {
    byId("stage").setPointerCapture(event.pointerId);
    dragView = shownView;
  }
  if (!event.buttons || !dragView) return;
  const [layer, box] = [data.layers[state.layer], byId("stage").firstChild.getBoundingClientRect()];
  const key = [
    dragView.row + Math.floor(((event.clientY - box.top) / box.height) * dragView.height),
    dragView.column + Math.floor(((event.clientX - box.left) / box.width) * dragView.width),
  ];
  update({ query: key.map((at, axis) => Math.round((at - layer.center[axis]) / layer.stride[axis])) });
}

/** Select the code, and copy it: unlike the clipboard's interface, this works in a notebook's frame too. */
function copyCode() {
  getSelection().selectAllChildren(byId("code"));
  byId("copy").textContent = document.execCommand("copy") ? "Copied" : "Selected";
  setTimeout(() => (byId("copy").textContent = "Copy code"), 2000);
}

function listen() {
  document.addEventListener("keydown", onKey);
  const stage = byId("stage");
  stage.addEventListener("pointerdown", onPointer);
  stage.addEventListener("pointermove", onPointer);
  stage.addEventListener("pointerup", () => { dragView = null; update({}); });
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
  byId("png").onclick = () => html("a", { href: viewAsCanvas().toDataURL("image/png"), download: "attention.png" }).click();
  byId("copy").onclick = copyCode;
  window.addEventListener("hashchange", () => update(stateOf(location.hash, state)));
  window.addEventListener("resize", () => update({}));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => update({}));
}

async function start() {
  for (const image of data.images) await addImage(image);
  data.layers.forEach((layer, index) => {
    const button = html("button", { type: "button", textContent: index + 1, title: layer.name, onclick: () => update({ layer: index }) });
    button.setAttribute("aria-label", `Layer ${index + 1}, ${layer.name}`);
    byId("layers").append(button);
  });
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
