// FedCC's prediction, from an 8x8 image to the federation's answer. No library, no server: every network runs here.
// A vote is C + 1 probabilities, the last one "unknown". Numbers in brackets are the paper's equations; the Python
// functions of the same names are in src/fedcc/methods/abstention.py.
"use strict";
var fedcc = window.fedcc || {};

/** Numbers from 16-bit floats, little-endian, in base64. */
fedcc.halves = (text) => {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const bits = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 2 }, (_, i) => {
    const half = bits.getUint16(2 * i, true);
    const exponent = (half >> 10) & 31, fraction = half & 1023;
    const size = exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024);
    return half & 32768 ? -size : size;
  });
};

/** The networks of all clients: their layers with weights and biases, cut from one array. */
fedcc.networks = (model) => {
  const numbers = fedcc.halves(model.weights);
  let next = 0;
  const take = (count) => numbers.subarray(next, (next += count));
  return model.clients.map(() =>
    model.layers.map((layer) => ({
      ...layer,
      weight: take(layer.outputs * layer.inputs * layer.kernel ** 2),
      bias: take(layer.outputs),
    })));
};

/** A convolution with zero padding that keeps the side (divided by the stride), and ReLU; BatchNorm is folded in. */
fedcc.convolve = (input, side, { inputs, outputs, kernel, stride, weight, bias }) => {
  const small = Math.ceil(side / stride), reach = (kernel - 1) / 2;
  const output = new Float32Array(outputs * small * small);
  for (let o = 0, place = 0; o < outputs; o++)
    for (let row = 0; row < small; row++)
      for (let column = 0; column < small; column++, place++) {
        let sum = bias[o];
        for (let i = 0; i < inputs; i++)
          for (let a = 0; a < kernel; a++)
            for (let b = 0; b < kernel; b++) {
              const y = row * stride + a - reach, x = column * stride + b - reach;
              if (y >= 0 && y < side && x >= 0 && x < side)
                sum += weight[((o * inputs + i) * kernel + a) * kernel + b] * input[(i * side + y) * side + x];
            }
        output[place] = Math.max(0, sum);
      }
  return [output, small];
};

/** The logits of one network for an image of 8x8 counts from 0 to 16. */
fedcc.logits = (network, image) => {
  let values = Float32Array.from(image, (count) => count / 16), side = 8;
  for (const layer of network.slice(0, -1)) [values, side] = fedcc.convolve(values, side, layer);
  const { inputs, outputs, weight, bias } = network[network.length - 1];
  return Array.from({ length: outputs }, (_, o) => {
    let sum = bias[o];
    for (let i = 0; i < inputs; i++) sum += weight[o * inputs + i] * values[i];
    return sum;
  });
};

fedcc.softmax = (logits) => {
  const largest = Math.max(...logits), powers = logits.map((z) => Math.exp(z - largest)), total = fedcc.sum(powers);
  return powers.map((p) => p / total);
};

fedcc.sum = (values) => values.reduce((total, value) => total + value, 0);

/** The mass that a vote gives to known classes: 1 - v_u. */
fedcc.known = (vote) => fedcc.sum(vote.slice(0, -1));

/** Trust: mu_k = a_k / sum_j a_j with a_k = 1 - v_{k,u}, Algorithm 1, line 7. Equal where everybody abstains. */
fedcc.trust = (votes) => {
  const known = votes.map(fedcc.known), total = fedcc.sum(known);
  return known.map((a) => (total < 1e-12 ? 1 / votes.length : a / total));
};

/** The federation's answer: the votes' mean, weighted by trust, Eq. (11). */
fedcc.aggregate = (votes, weights) => votes[0].map((_, c) => fedcc.sum(votes.map((vote, k) => weights[k] * vote[c])));

/** guard_votes, F-32 in docs/deviations.md: only what stands out from a client's habits counts. */
fedcc.guarded = (votes, habits) => {
  const known = habits.map(fedcc.sum), sorted = [...known].sort((a, b) => a - b);
  const limit = 2 * sorted[Math.floor((sorted.length - 1) / 2)];
  return votes.map((vote, k) => {
    const scale = Math.min(1, limit / Math.max(known[k], 1e-12));
    const counted = vote.slice(0, -1).map((v, c) => (v > 1.25 * habits[k][c] ? scale * v : 0));
    return [...counted, 1 - fedcc.sum(counted)];
  });
};

/** All that the page shows of an image. `liar` is a client that always answers class 0, -1 for none. */
fedcc.ask = (networks, model, image, { liar = -1, guard = false } = {}) => {
  const logits = networks.map((network) => fedcc.logits(network, image));
  const zero = (length) => Array.from({ length }, (_, c) => (c === 0 ? 1 : 0));
  const votes = logits.map((z, k) => (k === liar ? zero(z.length) : fedcc.softmax(z)));
  const habits = model.habits.map((means, k) => (k === liar ? zero(means.length) : means));
  const counted = guard ? fedcc.guarded(votes, habits) : votes;
  const trust = fedcc.trust(counted);
  const forced = logits.map((z, k) => (k === liar ? zero(z.length - 1) : fedcc.softmax(z.slice(0, -1))));
  return {
    votes, trust,
    answer: fedcc.aggregate(counted, trust),
    forced: fedcc.aggregate(forced, forced.map(() => 1 / forced.length)), // the plain mean without "unknown"
  };
};

fedcc.best = (values) => values.indexOf(Math.max(...values));
