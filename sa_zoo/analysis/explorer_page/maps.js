// The mathematics of attention maps: pure functions of parameters, without a document.
//
// Symbols are those of models/attention.py: delta = k - q, Delta a center of attention, alpha a sharpness, both with
// the order (row, column). Displacements of the query (i, j) count from the key
// stride * (i, j) + center.
//
// `heads`, everywhere below, holds the parameters of all heads of a layer at one moment:
//
//     quadratic    {Delta: [[row, column], ..], alpha: [..]}            score -alpha |delta - Delta|^2       (Eq. 9)
//     generalized  {Delta, spread: [[[.., ..], [.., ..]], ..]}          score -|S^T (delta - Delta)|^2 / 2   (appendix)
//     learned      {down: [[..], ..], across: [[..], ..]}               one score per displacement and axis  (Section 4.3)

/** base64 -> bytes */
function bytesOf(base64) {
  return Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
}

/** {shape, f4} -> nested arrays of numbers, or of Float32Array at the last axis. */
function arrayOf(packed) {
  return nested(new Float32Array(bytesOf(packed.f4).buffer), packed.shape);
}

function nested(flat, shape) {
  if (shape.length <= 1) return flat;
  const size = flat.length / shape[0];
  return Array.from({ length: shape[0] }, (_, index) =>
    nested(flat.subarray(index * size, (index + 1) * size), shape.slice(1)),
  );
}

/** exp(scores) / sum: an array of any length -> Float64Array. */
function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const P = Float64Array.from(scores, (score) => Math.exp(score - largest));
  const sum = P.reduce((a, b) => a + b, 0);
  return P.map((p) => p / sum);
}

/** The key from which displacements of a query count, (row, column). */
function originOf(layer, query) {
  return [0, 1].map((axis) => layer.stride[axis] * query[axis] + layer.center[axis]);
}

/** The heads of a layer with edits applied; edits: {head: {Delta, sharpness}}, sharpness a factor of alpha. */
function editedHeads(kind, parameters, edits) {
  const count = parameters[kind === "learned" ? "down" : "Delta"].length;
  const factor = Array.from({ length: count }, (_, head) => edits[head]?.sharpness ?? 1);
  const scaled = (rows, power) =>
    rows.map((row, head) => Array.from(row, (value) => value * factor[head] ** power));
  if (kind === "learned") return { down: scaled(parameters.down, 1), across: scaled(parameters.across, 1) };
  const Delta = parameters.Delta.map((center, head) => edits[head]?.Delta ?? Array.from(center));
  if (kind === "quadratic") return { Delta, alpha: Array.from(parameters.alpha, (alpha, head) => alpha * factor[head]) };
  const spread = parameters.spread.map((S, head) => scaled(S, 0).map((row) => row.map((s) => s * factor[head] ** 0.5)));
  return { Delta, spread };
}

/** Scores of one head by displacement, as a function of (row, column). */
function scoreOf(kind, heads, head) {
  if (kind === "learned") {
    const middle = [heads.down[head], heads.across[head]].map((scores) => (scores.length - 1) / 2);
    return (row, column) => heads.down[head][middle[0] + row] + heads.across[head][middle[1] + column];
  }
  const [down, across] = heads.Delta[head];
  if (kind === "quadratic") {
    return (row, column) => -heads.alpha[head] * ((row - down) ** 2 + (column - across) ** 2);
  }
  const S = heads.spread[head];
  return (row, column) => {
    const [y, x] = [row - down, column - across];
    return -0.5 * ((S[0][0] * y + S[1][0] * x) ** 2 + (S[0][1] * y + S[1][1] * x) ** 2);
  };
}

/** Attention of one head from the query (row, column) to all keys, in row-major order: Float64Array. */
function headMap(layer, heads, head, query) {
  const [origin, [height, width]] = [originOf(layer, query), layer.keys];
  const score = scoreOf(layer.kind, heads, head);
  if (layer.kind === "generalized") {
    const scores = new Float64Array(height * width);
    for (let key = 0; key < scores.length; key++) {
      scores[key] = score(Math.floor(key / width) - origin[0], (key % width) - origin[1]);
    }
    return softmax(scores);
  }
  // The scores are a sum over the axes, so the softmax is a product. The other axis only adds a constant.
  const down = softmax(Float64Array.from({ length: height }, (_, row) => score(row - origin[0], 0)));
  const across = softmax(Float64Array.from({ length: width }, (_, column) => score(0, column - origin[1])));
  const P = new Float64Array(height * width);
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) P[row * width + column] = down[row] * across[column];
  }
  return P;
}

/** {shape, zlib, largest} -> a function of (head, query) that returns stored attention like headMap's. */
async function storedMaps(layer, packed) {
  const stream = new Blob([bytesOf(packed.zlib)]).stream().pipeThrough(new DecompressionStream("deflate"));
  const steps = new Uint8Array(await new Response(stream).arrayBuffer());
  const largest = new Float32Array(bytesOf(packed.largest.f4).buffer);
  const [, queries, keys] = packed.shape;
  return (head, query) => {
    const row = head * queries + query[0] * layer.grid[1] + query[1];
    return Float64Array.from(steps.subarray(row * keys, (row + 1) * keys), (step) => (step / 255) * largest[row]);
  };
}

/** Summary of a map: its largest share, the key of that share, and the mean attention distance. */
function summaryOf(layer, P, query) {
  const [origin, width] = [originOf(layer, query), layer.keys[1]];
  let [best, distance] = [0, 0];
  for (let key = 0; key < P.length; key++) {
    if (P[key] > P[best]) best = key;
    distance += P[key] * Math.hypot(Math.floor(key / width) - origin[0], (key % width) - origin[1]);
  }
  return { largest: P[best], key: [Math.floor(best / width), best % width], distance };
}
