// From heads to convolutions (Theorem 1): the kernel that a layer approaches, and its distance from it.
//
// The formulas are those of convolution/theorem.py and convolution/certificate.py. Symbols: maps.js.

const EDGE = 60; // beyond this, displacements are cut off: heads so wide are far from any convolution

/** The displacement that a head turns to as it hardens, (row, column). */
function targetOf(kind, heads, head) {
  if (kind !== "learned") return heads.Delta[head].map((center) => Math.round(center));
  return [heads.down[head], heads.across[head]].map((scores) => {
    const best = scores.reduce((at, score, index) => (score > scores[at] ? index : at), 0);
    return best - (scores.length - 1) / 2;
  });
}

/** Displacements of a head's support, {rows: [first, last], columns: [first, last]}, on an unbounded grid. */
function reachOf(kind, heads, head) {
  if (kind === "learned") {
    const [rows, columns] = [heads.down[head], heads.across[head]].map((scores) => (scores.length - 1) / 2);
    return { rows: [-rows, rows], columns: [-columns, columns] };
  }
  const sharpness = kind === "quadratic" ? heads.alpha[head] : smallestEigenvalue(heads.spread[head]) / 2;
  const radius = Math.min(EDGE, Math.ceil(Math.sqrt(37 / Math.max(sharpness, 1e-9)))); // exp(-37) < 2^-53
  const [rows, columns] = heads.Delta[head].map((at) => [Math.floor(at) - radius, Math.ceil(at) + radius]);
  return { rows, columns };
}

/** The smaller eigenvalue of S S^T, S 2 x 2. */
function smallestEigenvalue(S) {
  const trace = S[0][0] ** 2 + S[0][1] ** 2 + S[1][0] ** 2 + S[1][1] ** 2;
  const determinant = (S[0][0] * S[1][1] - S[0][1] * S[1][0]) ** 2;
  return (2 * determinant) / (trace + Math.sqrt(Math.max(trace ** 2 - 4 * determinant, 0)));
}

/** Attention by displacement where no border cuts it: a function of (row, column), zero out of reach. */
function borderlessMap(kind, heads, head) {
  const [score, { rows, columns }] = [scoreOf(kind, heads, head), reachOf(kind, heads, head)];
  const [height, width] = [rows[1] - rows[0] + 1, columns[1] - columns[0] + 1];
  const scores = new Float64Array(height * width);
  for (let at = 0; at < scores.length; at++) {
    scores[at] = score(rows[0] + Math.floor(at / width), columns[0] + (at % width));
  }
  const P = softmax(scores);
  return (row, column) => {
    const inside = row >= rows[0] && row <= rows[1] && column >= columns[0] && column <= columns[1];
    return inside ? P[(row - rows[0]) * width + column - columns[0]] : 0;
  };
}

/** Attention of a head to keys other than its target, away from borders; 1 - P[target] would lose digits. */
function missedAttention(kind, heads, head, target) {
  const { rows, columns } = reachOf(kind, heads, head);
  const P = borderlessMap(kind, heads, head);
  let missed = 0;
  for (let row = rows[0]; row <= rows[1]; row++) {
    for (let column = columns[0]; column <= columns[1]; column++) {
      if (row !== target[0] || column !== target[1]) missed += P(row, column);
    }
  }
  return missed;
}

/**
 * Bound on the difference between a layer and its convolution, for |x| <= 1, in exact arithmetic:
 * max_o 2 sum_h (1 - P_h[target_h]) |W_h[:, o]|_1 (certificate.py, without its rounding term).
 *
 * norms: (D_out, N_h). `share` is relative to the largest output that the layer can have, max_o sum_h |W_h[:, o]|_1.
 */
function certificateOf(kind, heads, targets, norms) {
  const missed = targets.map((target, head) => missedAttention(kind, heads, head, target));
  let [bound, largest] = [0, 0];
  for (const row of norms) {
    bound = Math.max(bound, 2 * row.reduce((sum, norm, head) => sum + norm * missed[head], 0));
    largest = Math.max(largest, row.reduce((sum, norm) => sum + norm, 0));
  }
  return { bound, share: largest ? bound / largest : 0, missed };
}

/** Displacements of a kernel that holds all targets, and a margin: {rows: [first, last], columns: [first, last]}. */
function windowOf(targets, margin) {
  const along = (axis) => targets.map((target) => target[axis]);
  const [rows, columns] = [0, 1].map((axis) => [
    Math.max(Math.min(0, ...along(axis)) - margin, -EDGE),
    Math.min(Math.max(0, ...along(axis)) + margin, EDGE),
  ]);
  return { rows, columns };
}

/**
 * |sum_h p_h(delta) W_h|, the Frobenius norm of the layer's kernel at each displacement of a window, by rows.
 * p(delta): weights of the heads, as soft attention or as one-hot targets; gram: <W_g, W_h>, (N_h, N_h).
 */
function kernelNorms(window, weights, gram) {
  const norms = [];
  for (let row = window.rows[0]; row <= window.rows[1]; row++) {
    const line = [];
    for (let column = window.columns[0]; column <= window.columns[1]; column++) {
      const p = weights(row, column);
      const square = gram.reduce((sum, products, g) => sum + p[g] * products.reduce((s, w, h) => s + w * p[h], 0), 0);
      line.push(Math.sqrt(Math.max(square, 0)));
    }
    norms.push(line);
  }
  return norms;
}

/** Norms of the kernel that the layer has now, and of the convolution that it becomes when its heads are one-hot. */
function kernelsOf(kind, heads, targets, window, gram) {
  const maps = targets.map((_, head) => borderlessMap(kind, heads, head));
  const now = kernelNorms(window, (row, column) => maps.map((map) => map(row, column)), gram);
  const onTarget = (row, column) => targets.map((target) => Number(target[0] === row && target[1] === column));
  return { now, limit: kernelNorms(window, onTarget, gram) };
}

/** Points (row, column) of the contour that holds a share of a head's attention on an unbounded, continuous grid. */
function contourOf(kind, heads, head, share) {
  const radius = Math.sqrt(-2 * Math.log(1 - share));
  const s = kind === "quadratic" ? Math.sqrt(2 * heads.alpha[head]) : 0;
  const S = kind === "quadratic" ? [[s, 0], [0, s]] : heads.spread[head];
  const determinant = S[0][0] * S[1][1] - S[0][1] * S[1][0];
  return Array.from({ length: 73 }, (_, step) => {
    const [a, b] = [radius * Math.cos((step * Math.PI) / 36), radius * Math.sin((step * Math.PI) / 36)];
    const [y, x] = [(S[1][1] * a - S[1][0] * b) / determinant, (S[0][0] * b - S[0][1] * a) / determinant]; // S^-T (a, b)
    return [heads.Delta[head][0] + y, heads.Delta[head][1] + x];
  });
}
