// What is done to rows one by one: norms, routing, adding up, rotation. Widths are multiples of 16.

inline float inverse_rms(float squares, int64_t width, float eps) {
  return 1.0f / __builtin_sqrtf(squares / static_cast<float>(width) + eps);
}

template <class T>
void norm(const Norm<T> &n) {
  for (int64_t row = 0; row < n.rows; row++) {
    const T *x = n.x + row * n.x_stride;
    if (n.sum != nullptr) {
      T *both = n.sum + row * n.width;
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
template <class T>
bool choose(const Choice<T> &c) {
  const int64_t width = padded(c.experts);
  Scratch<float> scratch(width);
  if (!scratch.good()) return false;
  float *score = scratch.get();
  for (int64_t row = 0; row < c.rows; row++) {
    const T *logits = c.logits + row * c.logits_stride;
    for (int64_t expert = 0; expert < width; expert++) {
      score[expert] = expert < c.experts ? real(logits[expert]) : 0.0f;
    }
    Vec highest = all(score[0]);
    for (int64_t at = 0; at < width; at += UNIT) {
      highest = larger(highest, first_lanes(load(score + at), c.experts - at, score[0]));
    }
    const Vec top = all(largest(highest));
    Vec total = all(0.0f);
    for (int64_t at = 0; at < width; at += UNIT) {
      const Vec power = exp_of(sub(load(score + at), top));
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

// Every step is rounded as if it stood alone: the sum, its multiple, and both with the residual.
template <class T>
void mix(const Mix<T> &m) {
  for (int64_t row = 0; row < m.rows; row++) {
    const int64_t *places = m.places + row * m.top_k;
    const float *weights = m.weights + row * m.top_k;
    T *out = m.out + row * m.width;
    for (int64_t at = 0; at < m.width; at += UNIT) {
      Vec total = mul(widen(m.outputs + places[0] * m.stride + at), all(weights[0]));
      for (int64_t nth = 1; nth < m.top_k; nth++) {
        const Vec output = widen(m.outputs + places[nth] * m.stride + at);
        total = add(total, mul(output, all(weights[nth])));
      }
      narrow(out + at, total);
      if (m.residual == nullptr) continue;
      if (m.factor != 1.0f) narrow(out + at, mul(widen(out + at), all(m.factor)));
      narrow(out + at, add(widen(m.residual + row * m.width + at), widen(out + at)));
    }
  }
}

// One head's norm and rotation, in float32, rounded once. `head` has room for the head twice, so
// that half a width further on lies the other half, whatever the width.
template <class T>
inline void turn(T *to, const T *x, const T *weight, const float *cos, const float *sin,
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
  std::memcpy(head + width, head, static_cast<size_t>(width) * sizeof *head);
  for (int64_t at = 0; at < width; at += UNIT) {
    const Vec turned = mul(load(head + width / 2 + at), load(sin + at));
    narrow(to + at, add(mul(load(head + at), load(cos + at)), turned));
  }
}

template <class T>
bool turn_heads(const Heads<T> &h) {
  Scratch<float> head(2 * h.width);
  Scratch<T> key(h.width);
  if (!head.good() || !key.good()) return false;
  for (int64_t row = 0; row < h.rows; row++) {
    const T *qkv = h.qkv + row * h.qkv_stride;
    const float *cos = h.cos + row * h.width, *sin = h.sin + row * h.width;
    const int64_t block = h.slots[row] / BLOCK, offset = h.slots[row] % BLOCK;
    for (int64_t nth = 0; nth < h.heads + h.kv_heads; nth++) {
      const T *weight = h.norm == nullptr ? nullptr : h.norm + nth * h.width;
      const bool query = nth < h.heads;
      T *to = query ? h.queries + (row * h.heads + nth) * h.width : key.get();
      turn(to, qkv + nth * h.width, weight, cos, sin, head.get(), h.width, h.eps);
      if (query) continue;
      const int64_t group = nth - h.heads;
      T *keys = h.pages + (block * h.kv_heads + group) * 2 * BLOCK * h.width;
      T *values = keys + BLOCK * h.width;
      const T *value = qkv + (h.heads + h.kv_heads + group) * h.width;
      for (int64_t at = 0; at < h.width; at++) {
        keys[place<T>(offset, at, BLOCK, h.width)] = to[at];
        values[place<T>(at, offset, h.width, BLOCK)] = value[at];
      }
    }
  }
  return true;
}
