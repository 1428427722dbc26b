// Sixteen floats at a time, and tiles of a product, with AVX-512 and its bfloat16 products.

constexpr int64_t PANEL = 4 * UNIT;
constexpr int64_t MAX_ROWS = 6;
constexpr int64_t MAX_UNITS = 4;

using Staged = bf16;

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

inline Vec exp2_of(Vec x) {
  x = _mm512_min_ps(_mm512_max_ps(x, all(LEAST_EXPONENT)), all(MOST_EXPONENT));
  const Vec whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec part = _mm512_sub_ps(x, whole);
  Vec value = all(EXP2_TERMS[0]);
  for (int term = 1; term < NUM_EXP2_TERMS; term++) {
    value = _mm512_fmadd_ps(value, part, all(EXP2_TERMS[term]));
  }
  return _mm512_scalef_ps(value, whole);
}

inline Vec widen(const bf16 *from) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(both), 16));
}
inline void narrow(bf16 *to, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(v));
}

// ---- staging: what a tile reads of rows; they are read as they are

inline int64_t staged_stride(int64_t, int64_t stride) { return stride; }
inline int64_t staged_size(int64_t, int64_t) { return 0; }
inline const Staged *stage(Staged *, const bf16 *x, int64_t, int64_t, int64_t) { return x; }
// Puts 16 values where a tile reads them, and says which values it will read.
inline Vec stage(Staged *to, Vec v) {
  narrow(to, v);
  return widen(to);
}

// silu(gate) * up of whole panels, each 32 gates and their 32 ups.
inline void gate(bf16 *to, const float *sums, int64_t units) {
  for (int64_t at = 0; at < units * UNIT; at += PANEL) {
    for (int64_t half = 0; half < PANEL / 2; half += UNIT) {
      const Vec gates = load(sums + at + half), ups = load(sums + at + PANEL / 2 + half);
      const Vec power = exp2_of(mul(gates, all(-LOG2_E)));
      narrow(to + at / 2 + half, mul(div(gates, add(all(1.0f), power)), ups));
    }
  }
}

// ---- tiles

// [ROWS, UNITS * 16] sums over `pairs` pairs of inputs of one panel of UNITS units.
template <int ROWS, int UNITS>
void tile(const Staged *rows, int64_t stride, const bf16 *packed, int64_t, int64_t pairs,
          float *out) {
  Vec sums[ROWS][UNITS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) sums[row][unit] = _mm512_setzero_ps();
  }
  const bf16 *x[ROWS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) x[row] = rows + row * stride;
  for (int64_t pair = 0; pair < pairs; pair++) {
    __m512bh columns[UNITS];
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      columns[unit] = (__m512bh)_mm512_loadu_si512(packed + unit * 2 * UNIT);
    }
    packed += UNITS * 2 * UNIT;
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++) {
      int32_t two;
      std::memcpy(&two, x[row] + 2 * pair, sizeof two);
      const __m512bh value = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 8
      for (int unit = 0; unit < UNITS; unit++) {
        sums[row][unit] = _mm512_dpbf16_ps(sums[row][unit], value, columns[unit]);
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

using Tile = void (*)(const Staged *, int64_t, const bf16 *, int64_t, int64_t, float *);

inline int64_t units_at_once(int64_t) { return MAX_UNITS; }  // a panel

inline Tile tile_of(int64_t rows, int64_t units) {
  static constexpr Tile TILES[MAX_ROWS][MAX_UNITS] = {
      {tile<1, 1>, tile<1, 2>, tile<1, 3>, tile<1, 4>}, {tile<2, 1>, tile<2, 2>, tile<2, 3>, tile<2, 4>},
      {tile<3, 1>, tile<3, 2>, tile<3, 3>, tile<3, 4>}, {tile<4, 1>, tile<4, 2>, tile<4, 3>, tile<4, 4>},
      {tile<5, 1>, tile<5, 2>, tile<5, 3>, tile<5, 4>}, {tile<6, 1>, tile<6, 2>, tile<6, 3>, tile<6, 4>},
  };
  return TILES[rows - 1][units - 1];
}
