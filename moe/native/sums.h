// The sums of a product with a packed weight, on vector registers.

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
                     const T *packed, int64_t unit_size, int64_t inputs, float *sums, Ahead next) {
  const Tile<T> tile = tile_of<T>(rows, units);
  if (sizeof(T) < sizeof(float) || inputs <= STRETCH) {
    tile(x, stride, packed, unit_size, inputs, sums, next);
    return;
  }
  alignas(64) float more[MAX_ROWS * MAX_UNITS * UNIT];
  const int64_t wide = lesser(PANEL, units * UNIT);
  tile(x, stride, packed, unit_size, STRETCH, sums, NOTHING);
  for (int64_t at = STRETCH; at < inputs; at += STRETCH) {
    const int64_t now = lesser(STRETCH, inputs - at);
    tile(x + at, stride, packed + at * wide, unit_size, now, more, NOTHING);
    for (int64_t row = 0; row < rows; row++) {
      for (int64_t nth = 0; nth < units * UNIT; nth += UNIT) {
        float *to = sums + row * MAX_UNITS * UNIT + nth;
        store(to, add(load(to), load(more + row * MAX_UNITS * UNIT + nth)));
      }
    }
  }
}

// The same of one tile by itself, whose inputs are few. What the next one may find ready is in
// `Shaped`: for tiles of vectors, nothing.
struct Shaped {};
template <class T>
inline void sum_alone(Shaped &, int64_t rows, int64_t units, const Staged<T> *x, int64_t stride,
                      const T *packed, int64_t unit_size, int64_t inputs, float *sums,
                      Ahead next) {
  tile_of<T>(rows, units)(x, stride, packed, unit_size, inputs, sums, next);
}

// How far ahead of itself a tile alone asks, in elements.
constexpr int64_t ALONE_AHEAD = 2048;

// The height of the first of as few tiles as can be if all are equally high.
inline int64_t equal_height(int64_t left) {
  const int64_t tiles = (left + MAX_ROWS - 1) / MAX_ROWS;
  return (left + tiles - 1) / tiles;
}

// Calls finish(row, rows, unit, units, sums) for every tile of the product; row `i` of its sums
// begins at `sums + i * MAX_UNITS * UNIT`. All rows meet MAX_UNITS units before the next ones; in
// between it may stand aside. Of two tiles or more, the first asks for what comes next, or the first
// two for half of it each: of a panel only the first reads from memory, which would stand still
// under the others. One tile alone keeps it busy, or asks a little ahead of itself.
template <class T, class Finish>
inline void multiply_staged(const Staged<T> *x, int64_t stride, int64_t rows, const T *packed,
                            int64_t outputs, int64_t inputs, Aside *aside,
                            const Finish &finish) {
  alignas(64) float sums[MAX_ROWS * MAX_UNITS * UNIT];
  const int64_t units = padded(outputs) / UNIT, panel = MAX_UNITS * UNIT * inputs;
  const bool asks =
      rows > MAX_ROWS && panel * static_cast<int64_t>(sizeof(T)) <= ASKED_BYTES;
  for (int64_t group = 0; group < units; group += MAX_UNITS) {
    const int64_t end = lesser(group + MAX_UNITS, units);
    const T *next = packed + end * UNIT * inputs;
    int64_t tiles = 0;
    stands_aside(aside);
    for (int64_t row = 0; row < rows; tiles++) {
      const int64_t high = asks ? equal_height(rows - row) : height_of_tile(rows - row);
      const int64_t askers = asks ? lesser(2, units_at_once(high)) : 0;
      for (int64_t unit = group; unit < end;) {
        const int64_t now = lesser(units_at_once(high), end - unit);
        Ahead asked = NOTHING;
        if (rows <= MAX_ROWS && rows >= ASKS_ALONE_FROM) {
          asked = ahead(packed + unit * UNIT * inputs + ALONE_AHEAD, now);
        } else if (tiles < askers) {
          const int64_t done = tiles * panel + (unit - group) * UNIT * inputs;
          asked = ahead(next + done / askers, now / askers);
        }
        sum_tile<T>(high, now, x + row * stride, stride, packed + unit * UNIT * inputs,
                    UNIT * inputs, inputs, sums, asked);
        finish(row, high, unit, now, sums);
        unit += now;
      }
      row += high;
    }
  }
}
