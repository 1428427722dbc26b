// Sixteen floats at a time, and tiles of a product, with AVX-512 and its bfloat16 products.

constexpr int64_t PANEL = 4 * UNIT;
constexpr int64_t MAX_ROWS = 6;
constexpr int64_t MAX_UNITS = 4;

template <class T>
using Staged = T;

using Vec = __m512;

inline Vec all(float value) { return _mm512_set1_ps(value); }
inline Vec load(const float *from) { return _mm512_loadu_ps(from); }
inline void store(float *to, Vec v) { _mm512_storeu_ps(to, v); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec fused(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline float sum(Vec v) { return _mm512_reduce_add_ps(v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps(v); }

// The first `count` lanes of v, and `other` in the rest.
inline Vec first_lanes(Vec v, int64_t count, float other) {
  const uint32_t lanes = count >= UNIT ? 0xffffu : count <= 0 ? 0u : (1u << count) - 1;
  return _mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>(lanes), v);
}

inline Vec between(Vec x, float least, float most) {
  return _mm512_min_ps(_mm512_max_ps(x, all(least)), all(most));
}
inline Vec nearest_whole(Vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// 2^(whole + part), the part at most a half.
inline Vec exp2_of(Vec whole, Vec part) {
  Vec value = all(EXP2_TERMS[0]);
  for (int term = 1; term < NUM_EXP2_TERMS; term++) {
    value = _mm512_fmadd_ps(value, part, all(EXP2_TERMS[term]));
  }
  return _mm512_scalef_ps(value, whole);
}
inline Vec exp2_of(Vec x) {
  x = between(x, LEAST_EXPONENT, MOST_EXPONENT);
  const Vec whole = nearest_whole(x);
  return exp2_of(whole, sub(x, whole));
}
// e^x without the rounding of x * log2(e).
inline Vec exp_of(Vec x) {
  x = between(x, -MOST_POWER, MOST_POWER);
  const Vec whole = nearest_whole(mul(x, all(LOG2_E)));
  const Vec part = _mm512_fmsub_ps(x, all(LOG2_E), whole);
  return exp2_of(whole, fused(x, all(LOG2_E_REST), part));
}

inline Vec widen(const bf16 *from) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
}
inline Vec widen(const float *from) { return load(from); }
inline void narrow(bf16 *to, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(v));
}
inline void narrow(float *to, Vec v) { store(to, v); }

// ---- staging: what a tile reads of rows; they are read as they are

template <class T>
inline int64_t staged_stride(int64_t, int64_t stride) {
  return stride;
}
template <class T>
inline int64_t staged_size(int64_t, int64_t) {
  return 0;
}
template <class T>
inline const T *stage(T *, const T *x, int64_t, int64_t, int64_t) {
  return x;
}
// Puts 16 values where a tile reads them, and says which values it will read.
template <class T>
inline Vec stage(T *to, Vec v) {
  narrow(to, v);
  return widen(to);
}

// silu(gate) * up of whole panels, each 32 gates and their 32 ups.
template <class T>
inline void gate(T *to, const float *sums, int64_t units) {
  for (int64_t at = 0; at < units * UNIT; at += PANEL) {
    for (int64_t half = 0; half < PANEL / 2; half += UNIT) {
      const Vec gates = load(sums + at + half), ups = load(sums + at + PANEL / 2 + half);
      const Vec power = exp_of(sub(all(0.0f), gates));
      narrow(to + at / 2 + half, mul(div(gates, add(all(1.0f), power)), ups));
    }
  }
}

// ---- tiles

// A run of one row's inputs for all lanes, a run of each lane's own, and their products added up.
inline __m512 spread(const float *run) { return _mm512_set1_ps(*run); }
inline __m512bh spread(const bf16 *run) {
  int32_t two;
  std::memcpy(&two, run, sizeof two);
  return (__m512bh)_mm512_set1_epi32(two);
}
inline __m512 columns_at(const float *runs) { return _mm512_loadu_ps(runs); }
inline __m512bh columns_at(const bf16 *runs) { return (__m512bh)_mm512_loadu_si512(runs); }
inline Vec summed(__m512 a, __m512 b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec summed(__m512bh a, __m512bh b, Vec c) { return _mm512_dpbf16_ps(c, a, b); }

// [ROWS, UNITS * 16] sums over whole runs of inputs of one panel of UNITS units.
template <class T, int ROWS, int UNITS>
void tile(const T *rows, int64_t stride, const T *packed, int64_t, int64_t inputs, float *out) {
  Vec sums[ROWS][UNITS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) sums[row][unit] = _mm512_setzero_ps();
  }
  const T *x[ROWS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) x[row] = rows + row * stride;
  for (int64_t input = 0; input < inputs; input += RUN<T>) {
    decltype(columns_at(packed)) columns[UNITS];
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      columns[unit] = columns_at(packed + unit * RUN<T> * UNIT);
    }
    packed += UNITS * RUN<T> * UNIT;
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
      const auto value = spread(x[row] + input);
#pragma GCC unroll 8
      for (int unit = 0; unit < UNITS; unit++) {
        sums[row][unit] = summed(value, columns[unit], sums[row][unit]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      store(out + row * MAX_UNITS * UNIT + unit * UNIT, sums[row][unit]);
    }
  }
}

template <class T>
using Tile = void (*)(const T *, int64_t, const T *, int64_t, int64_t, float *);

inline int64_t units_at_once(int64_t) { return MAX_UNITS; }  // a panel

template <class T>
inline Tile<T> tile_of(int64_t rows, int64_t units) {
  static constexpr Tile<T> TILES[MAX_ROWS][MAX_UNITS] = {
      {tile<T, 1, 1>, tile<T, 1, 2>, tile<T, 1, 3>, tile<T, 1, 4>}, {tile<T, 2, 1>, tile<T, 2, 2>, tile<T, 2, 3>, tile<T, 2, 4>},
      {tile<T, 3, 1>, tile<T, 3, 2>, tile<T, 3, 3>, tile<T, 3, 4>}, {tile<T, 4, 1>, tile<T, 4, 2>, tile<T, 4, 3>, tile<T, 4, 4>},
      {tile<T, 5, 1>, tile<T, 5, 2>, tile<T, 5, 3>, tile<T, 5, 4>}, {tile<T, 6, 1>, tile<T, 6, 2>, tile<T, 6, 3>, tile<T, 6, 4>},
  };
  return TILES[rows - 1][units - 1];
}
