// Sixteen floats at a time, and tiles of a product, with AVX2 and FMA.
//
// There is no arithmetic on bfloat16 here: a pair of neighbouring inputs is widened by a shift and
// a mask, and rows are widened once (staged) before they meet all columns.

constexpr int64_t PANEL = UNIT;
constexpr int64_t MAX_ROWS = 6;
constexpr int64_t MAX_UNITS = 4;

using Staged = float;

struct Vec {
  __m256 low, high;
};

inline Vec all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Vec load(const float *from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float *to, Vec v) {
  _mm256_storeu_ps(to, v.low);
  _mm256_storeu_ps(to + 8, v.high);
}
inline Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Vec larger(Vec a, Vec b) {
  return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)};
}
inline Vec fused(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

inline float sum(Vec v) {
  const __m256 eight = _mm256_add_ps(v.low, v.high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
inline float largest(Vec v) {
  const __m256 eight = _mm256_max_ps(v.low, v.high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// The first `count` lanes of v, and `other` in the rest.
inline Vec first_lanes(Vec v, int64_t count, float other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int num = static_cast<int>(count);
  const __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(num), lane));
  const __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(num - 8), lane));
  const __m256 rest = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(rest, v.low, low), _mm256_blendv_ps(rest, v.high, high)};
}

inline __m256 exp2_of(__m256 x) {
  x = _mm256_min_ps(_mm256_max_ps(x, _mm256_set1_ps(LEAST_EXPONENT)),
                    _mm256_set1_ps(MOST_EXPONENT));
  const __m256 whole = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 part = _mm256_sub_ps(x, whole);
  __m256 value = _mm256_set1_ps(EXP2_TERMS[0]);
  for (int term = 1; term < NUM_EXP2_TERMS; term++) {
    value = _mm256_fmadd_ps(value, part, _mm256_set1_ps(EXP2_TERMS[term]));
  }
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127));
  return _mm256_mul_ps(value, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline Vec exp2_of(Vec v) { return {exp2_of(v.low), exp2_of(v.high)}; }

inline __m256 widened(__m128i eight) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16));
}
inline Vec widen(const bf16 *from) {
  const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
  return {widened(_mm256_castsi256_si128(both)), widened(_mm256_extracti128_si256(both, 1))};
}
inline __m256i rounded(__m256 v) {  // to nearest, ties to even, in the low halves
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
}
inline void narrow(bf16 *to, Vec v) {
  const __m256i both = _mm256_packus_epi32(rounded(v.low), rounded(v.high));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_permute4x64_epi64(both, 0xD8));
}

// ---- staging: what a tile reads of rows

inline int64_t staged_stride(int64_t inputs, int64_t) { return inputs; }
inline int64_t staged_size(int64_t rows, int64_t inputs) { return rows * inputs; }
inline const Staged *stage(Staged *scratch, const bf16 *x, int64_t stride, int64_t rows,
                           int64_t inputs) {
  for (int64_t row = 0; row < rows; row++) {
    const bf16 *from = x + row * stride;
    Staged *to = scratch + row * inputs;
    int64_t at = 0;
    for (; at + UNIT <= inputs; at += UNIT) store(to + at, widen(from + at));
    for (; at < inputs; at++) {
      const uint32_t bits = static_cast<uint32_t>(from[at]) << 16;
      std::memcpy(to + at, &bits, sizeof bits);
    }
  }
  return scratch;
}
// Puts 16 values where a tile reads them, and says which values it will read.
inline Vec stage(Staged *to, Vec v) {
  store(to, v);
  return v;
}

// silu(gate) * up of `units` units, each eight gates and their eight ups.
inline void gate(bf16 *to, const float *sums, int64_t units) {
  const __m256 one = _mm256_set1_ps(1.0f);
  for (int64_t unit = 0; unit < units; unit++) {
    const __m256 gates = _mm256_loadu_ps(sums + unit * UNIT);
    const __m256 ups = _mm256_loadu_ps(sums + unit * UNIT + 8);
    const __m256 power = exp2_of(_mm256_mul_ps(gates, _mm256_set1_ps(-LOG2_E)));
    const __m256 gated = _mm256_mul_ps(_mm256_div_ps(gates, _mm256_add_ps(one, power)), ups);
    const __m256i bits = rounded(gated);
    const __m128i eight =
        _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(to + unit * 8), eight);
  }
}

// ---- tiles

// [ROWS, UNITS * 16] sums over `pairs` pairs of inputs; units lie `unit_size` elements apart.
template <int ROWS, int UNITS>
void tile(const Staged *rows, int64_t stride, const bf16 *packed, int64_t unit_size, int64_t pairs,
          float *out) {
  const __m256i second = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  __m256 sums[ROWS][UNITS][2];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      sums[row][unit][0] = sums[row][unit][1] = _mm256_setzero_ps();
    }
  }
  const float *x[ROWS];
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) x[row] = rows + row * stride;
  for (int64_t pair = 0; pair < pairs; pair++) {
    const auto *words = reinterpret_cast<const __m256i *>(packed + pair * 2 * UNIT);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      __m256 columns[UNITS][2];
#pragma GCC unroll 8
      for (int unit = 0; unit < UNITS; unit++) {
        const auto *two = reinterpret_cast<const __m256i *>(
            reinterpret_cast<const bf16 *>(words) + unit * unit_size);
#pragma GCC unroll 2
        for (int eight = 0; eight < 2; eight++) {
          const __m256i word = _mm256_loadu_si256(two + eight);
          columns[unit][eight] = _mm256_castsi256_ps(half == 0 ? _mm256_slli_epi32(word, 16)
                                                               : _mm256_and_si256(word, second));
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < ROWS; row++) {
        const __m256 value = _mm256_broadcast_ss(x[row] + 2 * pair + half);
#pragma GCC unroll 8
        for (int unit = 0; unit < UNITS; unit++) {
#pragma GCC unroll 2
          for (int eight = 0; eight < 2; eight++) {
            sums[row][unit][eight] =
                _mm256_fmadd_ps(value, columns[unit][eight], sums[row][unit][eight]);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < ROWS; row++) {
#pragma GCC unroll 8
    for (int unit = 0; unit < UNITS; unit++) {
      float *to = out + row * MAX_UNITS * UNIT + unit * UNIT;
      store(to, {sums[row][unit][0], sums[row][unit][1]});
    }
  }
}

using Tile = void (*)(const Staged *, int64_t, const bf16 *, int64_t, int64_t, float *);

// Few rows meet several units at once: one unit alone would wait for its own last sum.
inline int64_t units_at_once(int64_t rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

inline Tile tile_of(int64_t rows, int64_t units) {
  static constexpr Tile TILES[MAX_ROWS][MAX_UNITS] = {
      {tile<1, 1>, tile<1, 2>, tile<1, 3>, tile<1, 4>},
      {tile<2, 1>, tile<2, 2>, nullptr, nullptr},
      {tile<3, 1>, tile<3, 2>, nullptr, nullptr},
      {tile<4, 1>, nullptr, nullptr, nullptr},
      {tile<5, 1>, nullptr, nullptr, nullptr},
      {tile<6, 1>, nullptr, nullptr, nullptr},
  };
  return TILES[rows - 1][units - 1];
}
