// From a drawing to an image like those of the data set: 32x32 black or white pixels, counted in blocks of 4x4.
// Its digits are as high as the image and at most 24 pixels wide, and whatever their shape, about 310 of the 1,024
// pixels are black (mean over all 1,797: 313, standard deviation 34): a 1 is drawn with a thick pen, an 8 with a thin one.
"use strict";
var fedcc = window.fedcc || {};
fedcc.SIDE = 32;
fedcc.WIDEST = 24;
fedcc.INK = 310;

/** The distance of a point from the line between two points, squared. */
fedcc.gap = (x, y, [ax, ay], [bx, by]) => {
  const dx = bx - ax, dy = by - ay, length = dx * dx + dy * dy;
  const t = length ? Math.max(0, Math.min(1, ((x - ax) * dx + (y - ay) * dy) / length)) : 0;
  return (x - ax - t * dx) ** 2 + (y - ay - t * dy) ** 2;
};

/** The strokes (lists of [x, y]) moved and scaled so that, drawn by this pen, they fill the image. */
fedcc.fitted = (strokes, pen) => {
  const points = strokes.flat(), side = fedcc.SIDE;
  const [left, right] = [0, 0].map((_, i) => Math[i ? "max" : "min"](...points.map((p) => p[0])));
  const [top, bottom] = [0, 0].map((_, i) => Math[i ? "max" : "min"](...points.map((p) => p[1])));
  const width = right - left, height = bottom - top, room = side - pen;
  const down = room / Math.max(height, width / 4, 1e-9); // a flat line stays flat
  const across = Math.min(down, (fedcc.WIDEST - Math.min(pen, fedcc.WIDEST / 2)) / Math.max(width, 1e-9));
  return strokes.map((stroke) => stroke.map(([x, y]) => [
    side / 2 + (x - (left + right) / 2) * across,
    side / 2 + (y - (top + bottom) / 2) * down,
  ]));
};

/** 1 where the pen has been, by pixel of the 32x32 image. */
fedcc.inked = (strokes, pen) => {
  const side = fedcc.SIDE, pixels = new Uint8Array(side * side), reach = pen / 2;
  for (const stroke of fedcc.fitted(strokes, pen))
    stroke.forEach((end, i) => {
      const start = stroke[Math.max(0, i - 1)];
      const from = (axis) => Math.max(0, Math.floor(Math.min(start[axis], end[axis]) - reach));
      const to = (axis) => Math.min(side - 1, Math.ceil(Math.max(start[axis], end[axis]) + reach));
      for (let y = from(1); y <= to(1); y++)
        for (let x = from(0); x <= to(0); x++)
          if (fedcc.gap(x + 0.5, y + 0.5, start, end) <= reach * reach) pixels[y * side + x] = 1;
    });
  return pixels;
};

/** The 8x8 counts of a drawing; null if there is none. */
fedcc.counts = (strokes) => {
  if (!strokes.length) return null;
  let thin = 1, thick = 12; // find the pen that uses the right amount of ink
  for (let step = 0; step < 8; step++) {
    const pen = (thin + thick) / 2;
    if (fedcc.sum(fedcc.inked(strokes, pen)) > fedcc.INK) thick = pen;
    else thin = pen;
  }
  const pixels = fedcc.inked(strokes, thin), image = new Array(64).fill(0), block = fedcc.SIDE / 8;
  pixels.forEach((pixel, place) => {
    const row = Math.floor(place / fedcc.SIDE), column = place % fedcc.SIDE;
    image[8 * Math.floor(row / block) + Math.floor(column / block)] += pixel;
  });
  return image;
};
