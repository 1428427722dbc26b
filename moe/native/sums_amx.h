// The sums of a product with a packed weight, on matrix tiles (AMX).
//
// A tile has up to 16 rows of 64 bytes: 16 sums, or 32 inputs of a row, or 16 runs of inputs of 16
// outputs, which is how a packed panel lies in memory. One instruction adds to each sum the products
// of 32 inputs: those of even and of odd inputs apart, in ascending order, then both. So a sum knows
// nothing of other rows, nor of how many there are. Numbers too small to be normal count as zero.

constexpr int64_t MAX_ROWS = 16;
constexpr int64_t TILE_INPUTS = 32;

// Bytes of rows that share the second-level cache with the panels that pass by.
constexpr int64_t TILED_BYTES = 1024 * 1024;

template <class T>
inline int64_t rows_of_block(int64_t inputs) {
  const int64_t fitting = TILED_BYTES / static_cast<int64_t>(sizeof(T)) / inputs;
  return greater(4, fitting / MAX_ROWS) * MAX_ROWS;
}

// Memory is as it was written when a tile is read: the intrinsics do not say that they read it.
inline void settle(const void *memory) { __asm__ volatile("" ::"r"(memory) : "memory"); }

// What _tile_loadconfig reads.
struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// How tiles are shaped already.
struct Shaped {
  int64_t height = 0, rest = 0;
};

// Tiles 0 to 3 are sums, 4 the rows' inputs and 5 those of outputs; 6 and 7 the same of the last
// inputs where these do not fill a tile.
inline void shape_tiles(Shaped &now, int64_t height, int64_t rest) {
  if (now.height == height && (rest == 0 || rest == now.rest)) return;
  now = {height, rest};
  Shapes shapes = {};
  shapes.palette = 1;
  for (int tile = 0; tile < 6; tile++) {
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = static_cast<uint8_t>(tile == 5 ? TILE_INPUTS / RUN<bf16> : height);
  }
  if (rest != 0) {
    shapes.row_bytes[6] = static_cast<uint16_t>(rest * sizeof(bf16));
    shapes.rows[6] = static_cast<uint8_t>(height);
    shapes.row_bytes[7] = 64;
    shapes.rows[7] = static_cast<uint8_t>(rest / RUN<bf16>);
  }
  settle(&shapes);
  _tile_loadconfig(&shapes);
}

// Tiles have numbers only in the text of a program: `rows` inputs meet those of all units.
#define MEET(rows, columns, x, x_bytes, packed, units)                            \
  do {                                                                            \
    constexpr int64_t row_bytes = (units) * UNIT * RUN<bf16> * sizeof(bf16);      \
    const bf16 *unit = packed;                                                    \
    _tile_loadd(rows, x, x_bytes);                                                \
    _tile_loadd(columns, unit, row_bytes);                                        \
    _tile_dpbf16ps(0, rows, columns);                                             \
    if constexpr ((units) > 1) {                                                  \
      _tile_loadd(columns, unit + UNIT * RUN<bf16>, row_bytes);                   \
      _tile_dpbf16ps(1, rows, columns);                                           \
    }                                                                             \
    if constexpr ((units) > 2) {                                                  \
      _tile_loadd(columns, unit + 2 * UNIT * RUN<bf16>, row_bytes);               \
      _tile_dpbf16ps(2, rows, columns);                                           \
    }                                                                             \
    if constexpr ((units) > 3) {                                                  \
      _tile_loadd(columns, unit + 3 * UNIT * RUN<bf16>, row_bytes);               \
      _tile_dpbf16ps(3, rows, columns);                                           \
    }                                                                             \
  } while (false)

// The sums of up to 16 rows, as shaped, with a panel of UNITS units. When `ahead`, each column is
// read once only, so it comes from far away: it is asked for in time. `beside` is called for every 32
// inputs: what it does with vectors takes hardly any time while tiles multiply.
template <int UNITS, class Beside>
void sum_tiles(const bf16 *x, int64_t stride, const bf16 *panel, int64_t inputs, bool ahead,
               float *sums, Beside &beside) {
  constexpr int64_t wide = UNITS * UNIT, sums_bytes = MAX_UNITS * UNIT * sizeof(float);
  const int64_t whole = inputs / TILE_INPUTS * TILE_INPUTS, x_bytes = stride * sizeof(bf16);
  settle(x);
  _tile_zero(0);
  if constexpr (UNITS > 1) _tile_zero(1);
  if constexpr (UNITS > 2) _tile_zero(2);
  if constexpr (UNITS > 3) _tile_zero(3);
  for (int64_t input = 0; input < whole; input += TILE_INPUTS) {
    const bf16 *columns = panel + input * wide;
    if (ahead) {
      const auto *far = reinterpret_cast<const char *>(columns + 2 * TILE_INPUTS * wide);
      for (int64_t line = 0; line < TILE_INPUTS / RUN<bf16> * UNITS; line++) {
        _mm_prefetch(far + 64 * line, _MM_HINT_T0);
      }
    }
    MEET(4, 5, x + input, x_bytes, columns, UNITS);
    beside();
  }
  if (whole < inputs) MEET(6, 7, x + whole, x_bytes, panel + whole * wide, UNITS);
  _tile_stored(0, sums, sums_bytes);
  if constexpr (UNITS > 1) _tile_stored(1, sums + UNIT, sums_bytes);
  if constexpr (UNITS > 2) _tile_stored(2, sums + 2 * UNIT, sums_bytes);
  if constexpr (UNITS > 3) _tile_stored(3, sums + 3 * UNIT, sums_bytes);
}

#undef MEET

template <class Beside>
inline void sum_units(int64_t units, const bf16 *x, int64_t stride, const bf16 *panel,
                      int64_t inputs, bool ahead, float *sums, Beside &beside) {
  constexpr decltype(&sum_tiles<1, Beside>) of_units[] = {sum_tiles<1, Beside>, sum_tiles<2, Beside>,
                                                          sum_tiles<3, Beside>, sum_tiles<4, Beside>};
  of_units[units - 1](x, stride, panel, inputs, ahead, sums, beside);
}

// What goes on beside tiles that multiply, a little for every 32 inputs: the sums of the last tile are
// put where they belong, and the next panel is asked for.
template <class Finish>
struct Meanwhile {
  const Finish &finish;
  int64_t at_once;  // rows
  Ahead next = NOTHING;
  const float *sums = nullptr;
  int64_t row = 0, left = 0, unit = 0, units = 0;

  void operator()() {
    ask(next);
    put_away();
  }
  void put_away() {
    const int64_t now = lesser(at_once, left);
    if (now == 0) return;
    finish(row, now, unit, units, sums);
    row += now, left -= now, sums += now * MAX_UNITS * UNIT;
  }
  // A tile's sums are there: what is left of the last one's goes first.
  void begin(const float *of, int64_t first, int64_t height, int64_t first_unit, int64_t num) {
    end();
    sums = of, row = first, left = height, unit = first_unit, units = num;
  }
  void end() {
    while (left > 0) put_away();
  }
};

constexpr bool ASKS_AHEAD = false;

inline int64_t units_at_once(int64_t) { return MAX_UNITS; }

// As in sums.h. Inputs that fill no run are followed by zeros in rows.
template <class T>
inline void sum_alone(Shaped &shaped, int64_t rows, int64_t units, const T *x, int64_t stride,
                      const T *packed, int64_t, int64_t inputs, float *sums, Ahead) {
  inputs = (inputs + RUN<T> - 1) / RUN<T> * RUN<T>;
  shape_tiles(shaped, rows, inputs % TILE_INPUTS);
  const auto nothing = [] {};
  sum_units(units, x, stride, packed, inputs, false, sums, nothing);
}

// As in sums.h. All tiles of a product have one height; the last rows meet their panel in a tile
// that reaches back, and some get the same sums twice. A tile's sums are put away while the next one
// is multiplied. Of a panel only the first of several tiles reads from memory, and would stand still
// for it: each asks for its share of the next panel, which lies behind this one.
template <class T, class Finish>
inline void multiply_staged(const T *x, int64_t stride, int64_t rows, const T *packed,
                            int64_t outputs, int64_t inputs, Aside *aside,
                            const Finish &finish) {
  if (rows == 0) return;
  alignas(64) float sums[2][MAX_ROWS * MAX_UNITS * UNIT];
  const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS, height = (rows + tiles - 1) / tiles;
  const int64_t units = padded(outputs) / UNIT, steps = greater(1, inputs / TILE_INPUTS);
  Meanwhile<Finish> meanwhile = {finish, (height + steps - 1) / steps};
  Shaped shaped;
  shape_tiles(shaped, height, inputs % TILE_INPUTS);
  int64_t nth = 0;
  for (int64_t unit = 0; unit < units; unit += MAX_UNITS) {
    const int64_t now = lesser(MAX_UNITS, units - unit);
    const T *panel = packed + unit * UNIT * inputs;
    if (stands_aside(aside)) {
      shaped = {};
      shape_tiles(shaped, height, inputs % TILE_INPUTS);
    }
    if (tiles > 1) {
      const int64_t size = now * UNIT * inputs, times = tiles * steps;
      const int64_t lines = size * static_cast<int64_t>(sizeof(T)) / LINE_BYTES;
      meanwhile.next = ahead(panel + size, (lines + times - 1) / times);
    }
    for (int64_t tile = 0; tile < tiles; tile++, nth++) {
      const int64_t row = lesser(tile * height, rows - height);
      sum_units(now, x + row * stride, stride, panel, inputs, tiles == 1, sums[nth % 2], meanwhile);
      meanwhile.begin(sums[nth % 2], row, height, unit, now);
    }
  }
  meanwhile.end();
}
