// Drawing: attention over a picture on a canvas, and small SVG elements. Nothing here knows the state.

const ZOOMED = 17; // keys per axis that are shown around a query

/** The value of a color of the style sheet, such as "--query", for light or dark as the page is shown. */
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** [r, g, b] of "#rrggbb" */
function channelsOf(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/**
 * A canvas of one pixel per key, of one color whose opacity is the attention, relative to the largest.
 *
 * A map whose largest share is below 4 times the mean is fainter, so that nearly uniform attention is faint.
 */
function overlayOf(P, [height, width], hex) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [width, height];
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const [red, green, blue] = channelsOf(hex);
  const largest = P.reduce((a, b) => Math.max(a, b), 4 / P.length);
  for (let key = 0; key < P.length; key++) {
    [image.data[4 * key], image.data[4 * key + 1], image.data[4 * key + 2]] = [red, green, blue];
    image.data[4 * key + 3] = (225 * P[key]) / largest;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

/** A picture with little color, so that the color of attention stands out from it: a canvas. */
function paleOf(picture) {
  const canvas = html("canvas", { width: picture.naturalWidth, height: picture.naturalHeight });
  const context = canvas.getContext("2d");
  context.drawImage(picture, 0, 0);
  [context.globalCompositeOperation, context.globalAlpha] = ["saturation", 0.75];
  context.fillStyle = "#808080";
  context.fillRect(0, 0, canvas.width, canvas.height);
  return canvas;
}

/** Place of the picture among the keys, without padding: [x, y, width, height] in units of keys. */
function pictureBox(layer) {
  return [layer.padding[1], layer.padding[0], layer.image[1], layer.image[0]];
}

/** The part of the keys that is shown: all, or those around a query. */
function viewOf(layer, query, zoom) {
  const origin = originOf(layer, query);
  const [height, width] = layer.keys.map((size) => (zoom ? Math.min(size, ZOOMED) : size));
  const [row, column] = [height, width].map((size, axis) =>
    clamp(origin[axis] - Math.floor(size / 2), 0, layer.keys[axis] - size),
  );
  return { row, column, height, width };
}

/**
 * Attention over a picture.
 *
 * marks: [{P, query, color}], one per query; view: the part of the keys to show. The canvas gets as many pixels as it
 * has on the screen; everything is drawn in units of keys.
 */
function drawMaps(canvas, layer, picture, marks, view) {
  const pixels = Math.max(canvas.clientWidth, 40) * Math.min(window.devicePixelRatio || 1, 2);
  [canvas.width, canvas.height] = [Math.round(pixels), Math.round((pixels * view.height) / view.width)];
  const [context, cell] = [canvas.getContext("2d"), canvas.width / view.width];
  context.setTransform(cell, 0, 0, cell, -view.column * cell, -view.row * cell);
  context.fillStyle = color("--padding");
  context.fillRect(0, 0, layer.keys[1], layer.keys[0]);
  context.fillStyle = color("--veil");
  context.fillRect(...pictureBox(layer));
  context.imageSmoothingEnabled = picture.width > layer.image[1] * cell;
  context.globalAlpha = Number(color("--picture-opacity"));
  context.drawImage(picture, ...pictureBox(layer));
  context.globalAlpha = 1;
  context.imageSmoothingEnabled = false;
  for (const mark of marks) {
    context.drawImage(overlayOf(mark.P, layer.keys, mark.color), 0, 0, layer.keys[1], layer.keys[0]);
  }
  for (const mark of marks) outlineQuery(context, originOf(layer, mark.query), mark.color, view.width / 150);
}

/** A square in the color of the query between two that stand out from any picture. */
function outlineQuery(context, [row, column], hex, line) {
  context.lineWidth = line;
  for (const [stroke, outset] of [["#ffffff", line], [hex, 0], ["#000000", -line]]) {
    const side = Math.max(1, 5 * line) + 2 * outset;
    context.strokeStyle = stroke;
    context.strokeRect(column + (1 - side) / 2, row + (1 - side) / 2, side, side);
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
 * A table of norms as squares, stronger where larger: one SVG.
 *
 * window: {rows, columns}, the displacements; labels: (row, column) -> names of heads; marked: the selected square. The
 * opacity is the square root of the norm: otherwise a blurred kernel is invisible next to a sharp one.
 */
function kernelPicture(norms, window, largest, labels, marked) {
  const [height, width] = [norms.length, norms[0].length];
  const picture = svg("svg", { viewBox: `-0.1 -0.1 ${width + 0.2} ${height + 0.2}`, role: "img" });
  norms.forEach((line, y) =>
    line.forEach((norm, x) => {
      const [row, column] = [window.rows[0] + y, window.columns[0] + x];
      const strength = largest ? Math.sqrt(norm / largest) : 0;
      picture.append(svg("rect", { x, y, width: 1, height: 1, class: "cell" }));
      picture.append(svg("rect", { x, y, width: 1, height: 1, class: "norm", "fill-opacity": strength.toFixed(3) }));
      if (row === 0 && column === 0) {
        picture.append(svg("rect", { x: x + 0.06, y: y + 0.06, width: 0.88, height: 0.88, class: "origin" }));
      }
      const names = labels(row, column);
      const label = names.length > 2 ? `${names[0]} +${names.length - 1}` : names.join(" ");
      const place = { x: x + 0.5, y: y + 0.52, "font-size": Math.min(0.42, 1.3 / Math.max(label.length, 1)) };
      if (label) picture.append(svg("text", { ...place, class: strength > 0.72 ? "label strong" : "label" }, label));
    }),
  );
  if (marked) {
    const [x, y] = [marked[1] - window.columns[0], marked[0] - window.rows[0]];
    picture.append(svg("rect", { x, y, width: 1, height: 1, class: "marked" }));
  }
  return picture;
}
