// Packed weights, and products with them.

inline int64_t padded(int64_t outputs) { return (outputs + UNIT - 1) / UNIT * UNIT; }

// Where output `n`'s input `k` lies. Panels of up to PANEL outputs follow one another; in a panel
// runs of inputs follow one another, each of all its outputs: [inputs / RUN, outputs, RUN].
template <class T>
inline int64_t place(int64_t n, int64_t k, int64_t outputs, int64_t inputs) {
  const int64_t first = n / PANEL * PANEL;
  const int64_t wide = lesser(PANEL, outputs - first);
  return first * inputs + k / RUN<T> * wide * RUN<T> + (n - first) * RUN<T> + k % RUN<T>;
}

template <class T>
void pack(T *to, const T *from, int64_t outputs, int64_t inputs, int64_t output_stride,
          int64_t input_stride) {
  for (int64_t first = 0; first < padded(outputs); first += PANEL) {
    const int64_t wide = lesser(PANEL, padded(outputs) - first);
    T *panel = to + first * inputs;
    for (int64_t n = 0; n < wide; n++) {
      const T *row = from + (first + n) * output_stride;
      for (int64_t k = 0; k < inputs; k++) {
        panel[k / RUN<T> * wide * RUN<T> + n * RUN<T> + k % RUN<T>] =
            first + n < outputs ? row[k * input_stride] : T{0};
      }
    }
  }
}

// Rows whose staged form stays in the second-level cache while all columns pass by.
template <class T>
inline int64_t rows_of_block(int64_t inputs) {
  const int64_t fitting = BLOCK_BYTES / static_cast<int64_t>(sizeof(Staged<T>)) / inputs;
  return greater(4 * MAX_ROWS, lesser(64 * MAX_ROWS, fitting / MAX_ROWS * MAX_ROWS));
}

// A tile's sums. In float32 every STRETCH inputs are summed alone and then added up, which leaves
// long sums less of their rounding; what bfloat16 rounds away is far more.
template <class T>
inline void sum_tile(int64_t rows, int64_t units, const Staged<T> *x, int64_t stride,
                     const T *packed, int64_t unit_size, int64_t inputs, float *sums) {
  const Tile<T> tile = tile_of<T>(rows, units);
  if (sizeof(T) < sizeof(float) || inputs <= STRETCH) {
    tile(x, stride, packed, unit_size, inputs, sums);
    return;
  }
  alignas(64) float more[MAX_ROWS * MAX_UNITS * UNIT];
  const int64_t wide = lesser(PANEL, units * UNIT);
  tile(x, stride, packed, unit_size, STRETCH, sums);
  for (int64_t at = STRETCH; at < inputs; at += STRETCH) {
    const int64_t now = lesser(STRETCH, inputs - at);
    tile(x + at, stride, packed + at * wide, unit_size, now, more);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t nth = 0; nth < units * UNIT; nth += UNIT) {
        float *to = sums + row * MAX_UNITS * UNIT + nth;
        store(to, add(load(to), load(more + row * MAX_UNITS * UNIT + nth)));
      }
    }
  }
}

// Calls finish(row, rows, unit, units, sums) for every tile of the product; row `i` of its sums
// begins at `sums + i * MAX_UNITS * UNIT`. All rows meet MAX_UNITS units before the next ones.
template <class T, class Finish>
inline void multiply_staged(const Staged<T> *x, int64_t stride, int64_t rows, const T *packed,
                            int64_t outputs, int64_t inputs, const Finish &finish) {
  alignas(64) float sums[MAX_ROWS * MAX_UNITS * UNIT];
  const int64_t units = padded(outputs) / UNIT;
  for (int64_t group = 0; group < units; group += MAX_UNITS) {
    const int64_t end = lesser(group + MAX_UNITS, units);
    for (int64_t row = 0; row < rows;) {
      const int64_t high = height_of_tile(rows - row);
      for (int64_t unit = group; unit < end;) {
        const int64_t now = lesser(units_at_once(high), end - unit);
        sum_tile<T>(high, now, x + row * stride, stride, packed + unit * UNIT * inputs,
                    UNIT * inputs, inputs, sums);
        finish(row, high, unit, now, sums);
        unit += now;
      }
      row += high;
    }
  }
}

template <class T>
inline void put(T *to, const float *sums, int64_t columns) {
  int64_t at = 0;
  for (; at + UNIT <= columns; at += UNIT) narrow(to + at, load(sums + at));
  if (at < columns) {
    T rest[UNIT];
    narrow(rest, load(sums + at));
    std::memcpy(to + at, rest, static_cast<size_t>(columns - at) * sizeof *rest);
  }
}

// Puts the sums of a product where they belong.
template <class T>
inline auto into(T *out, int64_t stride, int64_t outputs) {
  return [=](int64_t row, int64_t rows, int64_t unit, int64_t units, const float *sums) {
    const int64_t columns = lesser(units * UNIT, outputs - unit * UNIT);
    for (int64_t nth = 0; nth < rows; nth++) {
      put(out + (row + nth) * stride + unit * UNIT, sums + nth * MAX_UNITS * UNIT, columns);
    }
  };
}

template <class T>
bool multiply(const Product<T> &p) {
  const int64_t most = lesser(rows_of_block<T>(p.inputs), p.rows);
  Scratch<Staged<T>> scratch(staged_size<T>(most, p.inputs));
  if (!scratch.good()) return false;
  const int64_t stride = staged_stride<T>(p.inputs, p.x_stride);
  for (int64_t row = 0; row < p.rows; row += most) {
    const int64_t rows = lesser(most, p.rows - row);
    const Staged<T> *x =
        stage(scratch.get(), p.x + row * p.x_stride, p.x_stride, rows, p.inputs);
    multiply_staged<T>(x, stride, rows, p.packed, p.outputs, p.inputs,
                    into(p.out + row * p.out_stride, p.out_stride, p.outputs));
  }
  return true;
}

template <class T>
bool experts(const ExpertPass<T> &p) {
  const int64_t most = lesser(rows_of_block<T>(p.hidden), rows_of_block<T>(p.width));
  Scratch<Staged<T>> staged(staged_size<T>(most, greater(p.hidden, p.width)));
  Scratch<T> inner(most * p.width);
  if (!staged.good() || !inner.good()) return false;
  T *gated = inner.get();
  const int64_t x_stride = staged_stride<T>(p.hidden, p.x_stride);
  const int64_t inner_stride = staged_stride<T>(p.width, p.width);
  int64_t row = 0;
  for (int64_t expert = 0; expert < p.experts; expert++) {
    const T *gate_up = p.matrices[2 * expert], *down = p.matrices[2 * expert + 1];
    for (const int64_t end = row + p.counts[expert]; row < end;) {
      const int64_t rows = lesser(most, end - row);
      const Staged<T> *x =
          stage(staged.get(), p.x + row * p.x_stride, p.x_stride, rows, p.hidden);
      multiply_staged<T>(x, x_stride, rows, gate_up, 2 * p.width, p.hidden,
                      [&](int64_t first, int64_t high, int64_t unit, int64_t units,
                          const float *sums) {
                        for (int64_t nth = 0; nth < high; nth++) {
                          gate(gated + (first + nth) * p.width + unit * UNIT / 2,
                               sums + nth * MAX_UNITS * UNIT, units);
                        }
                      });
      const Staged<T> *h = stage(staged.get(), gated, p.width, rows, p.width);
      multiply_staged<T>(h, inner_stride, rows, down, p.hidden, p.width,
                      into(p.out + row * p.hidden, p.hidden, p.hidden));
      row += rows;
    }
  }
  return true;
}
