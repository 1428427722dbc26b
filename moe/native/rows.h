// What is done to rows one by one: norms, routing, adding up, rotation. Widths are multiples of 16.

inline float inverse_rms(float squares, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps);
}

void norm(const Norm &n) {
  for (int64_t row = 0; row < n.rows; row++) {
    const bf16 *x = n.x + row * n.x_stride;
    if (n.sum != nullptr) {
      bf16 *both = n.sum + row * n.width;
      for (int64_t at = 0; at < n.width; at += UNIT) {
        narrow(both + at, fused(all(n.factor), widen(n.y + row * n.width + at), widen(x + at)));
      }
      x = both;
    }
    Vec squares = all(0.0f);
    for (int64_t at = 0; at < n.width; at += UNIT) {
      const Vec v = widen(x + at);
      squares = fused(v, v, squares);
    }
    const Vec scale = all(inverse_rms(sum(squares), n.width, n.eps));
    for (int64_t at = 0; at < n.width; at += UNIT) {
      const Vec normal = mul(widen(x + at), scale);
      narrow(n.out + row * n.width + at, mul(normal, widen(n.weight + at)));
    }
  }
}

// Probabilities of all experts in float32, then the likeliest one by one, the lowest id first
// among equals.
bool choose(const Choice &c) {
  const int64_t width = padded(c.experts);
  Scratch<float> scratch(width);
  if (!scratch.good()) return false;
  float *score = scratch.get();
  for (int64_t row = 0; row < c.rows; row++) {
    const bf16 *logits = c.logits + row * c.logits_stride;
    for (int64_t expert = 0; expert < width; expert++) {
      const uint32_t bits = expert < c.experts ? static_cast<uint32_t>(logits[expert]) << 16 : 0;
      std::memcpy(score + expert, &bits, sizeof bits);
    }
    Vec highest = all(score[0]);
    for (int64_t at = 0; at < width; at += UNIT) {
      highest = larger(highest, first_lanes(load(score + at), c.experts - at, score[0]));
    }
    const Vec top = all(largest(highest));
    Vec total = all(0.0f);
    for (int64_t at = 0; at < width; at += UNIT) {
      const Vec power = exp2_of(mul(sub(load(score + at), top), all(LOG2_E)));
      const Vec counted = first_lanes(power, c.experts - at, 0.0f);
      store(score + at, counted);
      total = add(total, counted);
    }
    const Vec whole = all(sum(total));
    for (int64_t at = 0; at < width; at += UNIT) {
      store(score + at, first_lanes(div(load(score + at), whole), c.experts - at, -1.0f));
    }
    float chosen = 0.0f;
    for (int64_t nth = 0; nth < c.top_k; nth++) {
      Vec best = load(score);
      for (int64_t at = UNIT; at < width; at += UNIT) best = larger(best, load(score + at));
      const float most = largest(best);
      int64_t id = 0;
      while (id + 1 < c.experts && !(score[id] == most)) id++;
      c.ids[row * c.top_k + nth] = id;
      c.weights[row * c.top_k + nth] = score[id];
      chosen += score[id];
      score[id] = -1.0f;
    }
    for (int64_t nth = 0; nth < c.top_k; nth++) {
      float &weight = c.weights[row * c.top_k + nth];
      if (c.normalise) weight /= chosen;
      weight *= c.scale;
    }
  }
  return true;
}

void mix(const Mix &m) {
  for (int64_t row = 0; row < m.rows; row++) {
    const bf16 *outputs = m.outputs + row * m.top_k * m.width;
    const float *weights = m.weights + row * m.top_k;
    for (int64_t at = 0; at < m.width; at += UNIT) {
      Vec total = mul(widen(outputs + at), all(weights[0]));
      for (int64_t nth = 1; nth < m.top_k; nth++) {
        total = add(total, mul(widen(outputs + nth * m.width + at), all(weights[nth])));
      }
      narrow(m.out + row * m.width + at, total);
    }
  }
}

// One head's norm and rotation, in float32, rounded once.
inline void turn(bf16 *to, const bf16 *x, const bf16 *weight, const float *cos, const float *sin,
                 float *head, int64_t width, float eps) {
  Vec squares = all(0.0f);
  for (int64_t at = 0; at < width; at += UNIT) {
    const Vec v = widen(x + at);
    store(head + at, v);
    squares = fused(v, v, squares);
  }
  if (weight != nullptr) {
    const Vec scale = all(inverse_rms(sum(squares), width, eps));
    for (int64_t at = 0; at < width; at += UNIT) {
      store(head + at, mul(mul(load(head + at), scale), widen(weight + at)));
    }
  }
  const int64_t half = width / 2;
  for (int64_t at = 0; at < width; at += UNIT) {
    const float *other = head + (at < half ? at + half : at - half);
    const Vec turned = mul(load(other), load(sin + at));
    narrow(to + at, add(mul(load(head + at), load(cos + at)), turned));
  }
}

bool turn_heads(const Heads &h) {
  Scratch<float> head(h.width);
  Scratch<bf16> key(h.width);
  if (!head.good() || !key.good()) return false;
  for (int64_t row = 0; row < h.rows; row++) {
    const bf16 *qkv = h.qkv + row * h.qkv_stride;
    const float *cos = h.cos + row * h.width, *sin = h.sin + row * h.width;
    const int64_t block = h.slots[row] / BLOCK, offset = h.slots[row] % BLOCK;
    for (int64_t nth = 0; nth < h.heads + h.kv_heads; nth++) {
      const bf16 *weight = h.norm == nullptr ? nullptr : h.norm + nth * h.width;
      const bool query = nth < h.heads;
      bf16 *to = query ? h.queries + (row * h.heads + nth) * h.width : key.get();
      turn(to, qkv + nth * h.width, weight, cos, sin, head.get(), h.width, h.eps);
      if (query) continue;
      const int64_t group = nth - h.heads;
      bf16 *keys = h.pages + (block * h.kv_heads + group) * 2 * BLOCK * h.width;
      bf16 *values = keys + BLOCK * h.width;
      const bf16 *value = qkv + (h.heads + h.kv_heads + group) * h.width;
      for (int64_t at = 0; at < h.width; at++) {
        keys[place(offset, at, BLOCK, h.width)] = to[at];
        values[place(at, offset, h.width, BLOCK)] = value[at];
      }
    }
  }
  return true;
}
