// Drawing: attention over a picture on a canvas, and small SVG elements. Nothing here knows the state.

/** The value of a color of the style sheet, such as "--query", for light or dark as the page is shown. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** [r, g, b] of "#rrggbb" */
function channelsOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** A canvas of one pixel per key, of one color whose opacity is the attention, relative to the largest. */
function overlayOf(P, [height, width], hex) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const [red, green, blue] = channelsOf(hex);
  const largest = P.reduce((a, b) => Math.max(a, b), 1e-30);
  for (let key = 0; key < P.length; key++) image.data.set([red, green, blue, (235 * P[key]) / largest], 4 * key);
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Where the picture lies among the keys, of which some may be padding: {x, y, width, height} in units of keys. */
function pictureBox(layer) {
  return { x: layer.padding[1], y: layer.padding[0], width: layer.image[1], height: layer.image[0] };
}

/**
 * Attention over a picture.
 *
 * marks: [{P, query, color}], one per query. The canvas gets as many pixels as it has on the screen.
 */
function drawMaps(canvas, layer, picture, marks) {
  const [height, width] = layer.keys;
  const side = Math.max(canvas.clientWidth, 40) * Math.min(window.devicePixelRatio || 1, 2);
  [canvas.width, canvas.height] = [Math.round(side), Math.round((side * height) / width)];
  const [context, cell] = [canvas.getContext("2d"), canvas.width / width];
  context.fillStyle = color("--padding");
  context.fillRect(0, 0, canvas.width, canvas.height);
  const box = pictureBox(layer);
  context.imageSmoothingEnabled = picture.naturalWidth > canvas.width;
  context.fillStyle = color("--veil");
  context.fillRect(box.x * cell, box.y * cell, box.width * cell, box.height * cell);
  context.globalAlpha = Number(color("--picture-opacity"));
  context.drawImage(picture, box.x * cell, box.y * cell, box.width * cell, box.height * cell);
  context.globalAlpha = 1;
  context.imageSmoothingEnabled = false;
  for (const mark of marks) {
    context.drawImage(overlayOf(mark.P, layer.keys, mark.color), 0, 0, canvas.width, canvas.height);
  }
  for (const mark of marks) drawQuery(context, standingOf(layer, mark.query), cell, mark.color);
}

/** The query: a square in its color between two lines that stand out from any picture. */
function drawQuery(context, [row, column], cell, hex) {
  const line = Math.max(context.canvas.width / 160, 1.5);
  const [size, grow] = [Math.max(cell, 4 * line), Math.max(0, 4 * line - cell) / 2];
  for (const [stroke, outset] of [["#ffffff", line], [hex, 0], ["#000000", -line]]) {
    context.lineWidth = line;
    context.strokeStyle = stroke;
    context.strokeRect(
      column * cell - grow - outset, row * cell - grow - outset, size + 2 * outset, size + 2 * outset,
    );
  }
}

/** An SVG element with attributes, and text if given. */
function svg(name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** An HTML element with properties (textContent, className, ..) and attributes (aria-label, ..). */
function html(name, properties = {}, attributes = {}) {
  const element = Object.assign(document.createElement(name), properties);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/**
 * A table of norms as squares, brighter where larger: one SVG.
 *
 * window: {rows, columns}, the displacements; labels: (row, column) -> text in the square; marked: the selected one.
 */
function kernelPicture(norms, window, largest, labels, marked) {
  const [height, width] = [norms.length, norms[0].length];
  const picture = svg("svg", { viewBox: `-0.1 -0.1 ${width + 0.2} ${height + 0.2}`, role: "img" });
  norms.forEach((line, y) =>
    line.forEach((norm, x) => {
      const [row, column] = [window.rows[0] + y, window.columns[0] + x];
      const strength = largest ? norm / largest : 0;
      picture.append(svg("rect", { x, y, width: 1, height: 1, class: "cell" }));
      picture.append(svg("rect", { x, y, width: 1, height: 1, class: "norm", "fill-opacity": strength.toFixed(3) }));
      if (row === 0 && column === 0) {
        picture.append(svg("rect", { x: x + 0.06, y: y + 0.06, width: 0.88, height: 0.88, class: "origin" }));
      }
      const label = labels(row, column);
      const size = Math.min(0.42, 1.2 / Math.max(label.length, 1));
      const ink = strength > 0.55 ? "label strong" : "label";
      if (label) picture.append(svg("text", { x: x + 0.5, y: y + 0.52, "font-size": size, class: ink }, label));
    }),
  );
  if (marked) {
    const [x, y] = [marked[1] - window.columns[0], marked[0] - window.rows[0]];
    picture.append(svg("rect", { x, y, width: 1, height: 1, class: "marked" }));
  }
  return picture;
}

/** A filter of a CNN, (C, K, K): its colors if C is 3, else red for positive and blue for negative weights. */
function drawFilter(canvas, filter, tap) {
  const [height, width] = [filter[0].length, filter[0][0].length];
  [canvas.width, canvas.height] = [12 * width, 12 * height];
  const context = canvas.getContext("2d");
  const largest = Math.max(...filter.flatMap((channel) => channel.flatMap((row) => Array.from(row, Math.abs))), 1e-30);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const weights = filter.map((channel) => channel[y][x] / largest);
      const [w] = weights;
      const faded = Math.round(255 * (1 - Math.abs(w)));
      const rgb = weights.length === 3 ? weights.map((v) => Math.round(127.5 * (1 + v)))
        : w > 0 ? [255 - Math.round(60 * w), faded, faded] : [faded, faded, 255 - Math.round(-60 * w)];
      context.fillStyle = `rgb(${rgb.join(",")})`;
      context.fillRect(12 * x, 12 * y, 12, 12);
    }
  }
  const [row, column] = [Math.floor(tap / width), tap % width];
  context.lineWidth = 2;
  context.strokeStyle = color("--query");
  context.strokeRect(12 * column + 1, 12 * row + 1, 10, 10);
}
